//! Gradients summed over micro-batches.

/// The f32 gradient of every weight, in the order of the policy's weights. Allocated once.
#[derive(Clone, Debug)]
pub struct Gradients {
    tensors: Vec<Vec<f32>>,
}

impl Gradients {
    /// Starts from `zeros`, those of the policy.
    #[must_use]
    pub fn new(zeros: Vec<Vec<f32>>) -> Self {
        Self { tensors: zeros }
    }

    /// Forgets everything added.
    pub fn zero(&mut self) {
        for tensor in &mut self.tensors {
            tensor.fill(0.0);
        }
    }

    /// All of them, for a backward pass to add to.
    pub fn tensors_mut(&mut self) -> &mut [Vec<f32>] {
        &mut self.tensors
    }

    /// The gradient of weight `index`, flat.
    #[must_use]
    pub fn tensor(&self, index: usize) -> &[f32] {
        &self.tensors[index]
    }

    /// L2 norm over all tensors, summed in f64 in a fixed order, so finite exactly if every element is.
    #[must_use]
    pub fn norm(&self) -> f64 {
        self.tensors.iter().map(|tensor| sum_of_squares(tensor)).sum::<f64>().sqrt()
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
    fn the_norm_counts_every_element_whatever_the_length() {
        for len in [1, 7, 8, 9, 31] {
            assert_eq!(Gradients { tensors: vec![vec![2.0; len]] }.norm(), (4.0 * len as f64).sqrt());
        }
        let huge = Gradients { tensors: vec![vec![f32::MAX; 2]] };
        assert!(huge.norm().is_finite(), "finite elements have a finite norm");
    }

    #[test]
    fn a_non_finite_element_is_found() {
        for bad in [f32::NAN, f32::INFINITY] {
            let gradients = Gradients { tensors: vec![vec![1.0; 3], vec![1.0, bad]] };
            assert!(!gradients.norm().is_finite());
            assert_eq!(gradients.non_finite(), Some(1));
        }
    }
}
