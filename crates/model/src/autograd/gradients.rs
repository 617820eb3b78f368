//! Gradients summed over micro-batches.

use std::collections::BTreeMap;

use r3_core::ids::TokenId;
use r3_kernels::team::in_team;
use r3_kernels::{parallel, residual};

/// The f32 gradient of every trained tensor, in the policy's order.
///
/// Every element is one chain over the tokens of all backward passes, in order, so it does not show where one pass ended
/// and the next began.
#[derive(Clone, Debug)]
pub struct Gradients {
    tensors: Vec<Vec<f32>>,
    lookups: Lookups,
}

/// Elements whose squares one task adds up, so that the order of the norm's sum does not depend on threads.
const PIECE: usize = 1 << 16;

/// Gradients of rows that tokens looked up, kept apart until a step ends: a head that shares the table adds to all of it in
/// every pass, and if lookups were added in between, passes would show.
#[derive(Clone, Debug, Default)]
struct Lookups {
    /// Where the row of a tensor and a token starts in `values`.
    starts: BTreeMap<(usize, TokenId), usize>,
    values: Vec<f32>,
}

impl Gradients {
    /// Starts from `zeros`, those of the policy.
    #[must_use]
    pub fn new(zeros: Vec<Vec<f32>>) -> Self {
        Self { tensors: zeros, lookups: Lookups::default() }
    }

    /// Forgets everything added.
    pub fn zero(&mut self) {
        in_team(|| {
            for tensor in &mut self.tensors {
                parallel::fill(tensor, 0.0);
            }
        });
        self.lookups = Lookups::default();
    }

    /// Adds `rows` `[T, D]` to those rows of table `tensor` that `tokens` looked up, once the step [ends](Self::finish).
    pub(super) fn look_up(&mut self, tensor: usize, tokens: &[TokenId], rows: &[f32]) {
        let Lookups { starts, values } = &mut self.lookups;
        let width = rows.len() / tokens.len().max(1);
        for (&token, row) in tokens.iter().zip(rows.chunks_exact(width)) {
            let start = *starts.entry((tensor, token)).or_insert(values.len());
            if start == values.len() {
                values.extend_from_slice(row);
            } else {
                residual::add(row, &mut values[start..start + width]);
            }
        }
    }

    /// Ends a step: whatever was kept apart is added.
    pub fn finish(&mut self) {
        let Lookups { starts, values } = std::mem::take(&mut self.lookups);
        let width = values.len() / starts.len().max(1);
        for ((tensor, token), start) in starts {
            let row = &mut self.tensors[tensor][token.index() * width..][..width];
            residual::add(&values[start..start + width], row);
        }
    }

    /// All of them, of a step that ends here.
    #[must_use]
    pub fn into_tensors(mut self) -> Vec<Vec<f32>> {
        self.finish();
        self.tensors
    }

    fn finished(&self) -> &[Vec<f32>] {
        assert!(self.lookups.starts.is_empty(), "gradients are read after a step has ended");
        &self.tensors
    }

    /// All of them, for a backward pass to add to.
    pub fn tensors_mut(&mut self) -> &mut [Vec<f32>] {
        &mut self.tensors
    }

    /// The gradient of tensor `index`, flat.
    ///
    /// # Panics
    /// If a backward pass came after the last [`Self::finish`].
    #[must_use]
    pub fn tensor(&self, index: usize) -> &[f32] {
        &self.finished()[index]
    }

    /// L2 norm over all tensors, summed in f64 in a fixed order, so finite exactly if every element is.
    ///
    /// # Panics
    /// As [`Self::tensor`].
    #[must_use]
    pub fn norm(&self) -> f64 {
        let pieces: Vec<&[f32]> = self.finished().iter().flat_map(|tensor| tensor.chunks(PIECE)).collect();
        let mut sums = vec![0.0; pieces.len()];
        parallel::for_rows(&mut sums, 1, PIECE, |first, sums| {
            for (sum, piece) in sums.iter_mut().zip(&pieces[first..]) {
                *sum = sum_of_squares(piece);
            }
        });
        sums.iter().sum::<f64>().sqrt()
    }

    /// Index of the first tensor with a non-finite element.
    #[must_use]
    pub fn non_finite(&self) -> Option<usize> {
        self.tensors.iter().position(|tensor| tensor.iter().any(|value| !value.is_finite()))
    }
}

/// Eight partial sums, so that the sum vectorises; their order depends on the length only.
fn sum_of_squares(values: &[f32]) -> f64 {
    let mut partial = [0.0_f64; 8];
    let mut chunks = values.chunks_exact(8);
    for chunk in chunks.by_ref() {
        for (sum, &value) in partial.iter_mut().zip(chunk) {
            *sum += f64::from(value) * f64::from(value);
        }
    }
    let rest: f64 = chunks.remainder().iter().map(|&value| f64::from(value) * f64::from(value)).sum();
    partial.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backward_passes_add_up_until_zeroed() {
        let mut gradients = Gradients::new(vec![vec![0.0; 2], vec![0.0]]);
        for _ in 0..2 {
            for (tensor, add) in gradients.tensors_mut().iter_mut().zip([2.0, 1.0]) {
                tensor.iter_mut().for_each(|value| *value += add);
            }
        }
        assert_eq!([gradients.tensor(0), gradients.tensor(1)], [&[4.0, 4.0][..], &[2.0]]);
        assert_eq!(gradients.norm(), 6.0);
        gradients.zero();
        assert_eq!(gradients.norm(), 0.0);
    }

    #[test]
    fn rows_that_are_looked_up_are_added_when_the_step_ends() {
        let mut gradients = Gradients::new(vec![vec![9.0], vec![1.0; 6]]);
        gradients.look_up(1, &[TokenId(2), TokenId(0), TokenId(2)], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        gradients.look_up(1, &[TokenId(2)], &[0.5, 0.5]);
        assert!(std::panic::catch_unwind(|| gradients.norm()).is_err(), "not before");
        gradients.finish();
        gradients.finish();
        assert_eq!(gradients.tensor(1), [4.0, 5.0, 1.0, 1.0, 7.5, 9.5]);
        gradients.look_up(1, &[TokenId(1)], &[1.0, 1.0]);
        gradients.zero();
        gradients.finish();
        assert_eq!(gradients.norm(), 0.0);
    }

    #[test]
    fn the_norm_counts_every_element_whatever_the_length() {
        for len in [1, 7, 8, 9, 31] {
            assert_eq!(Gradients::new(vec![vec![2.0; len]]).norm(), (4.0 * len as f64).sqrt());
        }
        let huge = Gradients::new(vec![vec![f32::MAX; 2]]);
        assert!(huge.norm().is_finite(), "finite elements have a finite norm");
    }

    #[test]
    fn a_non_finite_element_is_found() {
        for bad in [f32::NAN, f32::INFINITY] {
            let gradients = Gradients::new(vec![vec![1.0; 3], vec![1.0, bad]]);
            assert!(!gradients.norm().is_finite());
            assert_eq!(gradients.non_finite(), Some(1));
        }
    }
}
