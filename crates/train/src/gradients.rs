//! Gradients summed over micro-batches.

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, Storage, Tensor, Var, bail};

use crate::error::TrainError;

/// The f32 gradient of every weight, in the order of the policy's weights. Allocated once.
#[derive(Clone, Debug)]
pub struct Gradients {
    tensors: Vec<Vec<f32>>,
}

impl Gradients {
    /// Zero gradients for `vars`.
    #[must_use]
    pub fn new(vars: &[(String, Var)]) -> Self {
        Self { tensors: vars.iter().map(|(_, var)| vec![0.0; var.elem_count()]).collect() }
    }

    /// Forgets everything added.
    pub fn zero(&mut self) {
        for tensor in &mut self.tensors {
            tensor.fill(0.0);
        }
    }

    /// Adds the gradients of one backward pass.
    ///
    /// # Errors
    /// If a weight has no gradient: some of candle's fast ops cut the graph without a word, and a frozen
    /// weight that should learn is worse than a stopped run.
    pub fn add(&mut self, vars: &[(String, Var)], store: &GradStore) -> Result<(), TrainError> {
        for (sum, (name, var)) in self.tensors.iter_mut().zip(vars) {
            let gradient =
                store.get(var).ok_or_else(|| TrainError::MissingGradient { tensor: name.clone() })?;
            add_tensor(sum, gradient)?;
        }
        Ok(())
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

fn add_tensor(sum: &mut [f32], gradient: &Tensor) -> candle_core::Result<()> {
    let gradient = gradient.contiguous()?;
    let (storage, layout) = gradient.storage_and_layout();
    let (Storage::Cpu(CpuStorage::F32(values)), Some((start, end))) =
        (&*storage, layout.contiguous_offsets())
    else {
        bail!("a gradient of {:?} on {:?} is not f32 in host memory", gradient.dtype(), gradient.device())
    };
    if end - start != sum.len() {
        bail!("a gradient has {} values, its weight {}", end - start, sum.len())
    }
    for (sum, value) in sum.iter_mut().zip(&values[start..end]) {
        *sum += value;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn vars() -> Vec<(String, Var)> {
        let var = |values: &[f32]| Var::new(values, &Device::Cpu).unwrap();
        vec![("a".into(), var(&[1.0, 2.0])), ("b".into(), var(&[3.0]))]
    }

    #[test]
    fn backward_passes_add_up_until_zeroed() {
        let vars = vars();
        let mut gradients = Gradients::new(&vars);
        for _ in 0..2 {
            let loss = (vars[0].1.sqr().unwrap().sum_all().unwrap() + vars[1].1.sum_all().unwrap()).unwrap();
            gradients.add(&vars, &loss.backward().unwrap()).unwrap();
        }
        assert_eq!([gradients.tensor(0), gradients.tensor(1)], [&[4.0, 8.0][..], &[2.0]]);
        assert_eq!(gradients.norm(), 84.0_f64.sqrt());
        gradients.zero();
        assert_eq!(gradients.norm(), 0.0);
    }

    #[test]
    fn a_weight_without_gradient_is_named() {
        let vars = vars();
        let loss = vars[0].1.sum_all().unwrap();
        let error = Gradients::new(&vars).add(&vars, &loss.backward().unwrap()).unwrap_err();
        assert!(matches!(error, TrainError::MissingGradient { tensor } if tensor == "b"));
    }

    #[test]
    fn a_transposed_gradient_lands_in_the_order_of_its_weight() {
        let var = Var::new(&[[1.0_f32, 2.0, 3.0], [4.0, 5.0, 6.0]], &Device::Cpu).unwrap();
        let weight = Tensor::new(&[[1.0_f32, 2.0], [3.0, 4.0], [5.0, 6.0]], &Device::Cpu).unwrap();
        let loss = (var.t().unwrap() * &weight).unwrap().sum_all().unwrap();
        let vars = vec![("w".to_owned(), var)];
        let mut gradients = Gradients::new(&vars);
        gradients.add(&vars, &loss.backward().unwrap()).unwrap();
        assert_eq!(gradients.tensor(0), [1.0, 3.0, 5.0, 2.0, 4.0, 6.0]);
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
