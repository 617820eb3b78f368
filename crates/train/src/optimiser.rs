//! AdamW over the policy's weights, or Muon over their matrices, in place.

use std::sync::Mutex;

use candle_core::{CpuStorage, InplaceOp1, Layout, Var, bail};
use r3_core::ids::PolicyVersion;
use r3_kernels::adamw::bytes::ByteMoments;
use r3_kernels::adamw::{AdamwStep, adamw};
use r3_kernels::muon::{MuonStep, muon};
use r3_kernels::parallel;
use r3_model::autograd::gradients::Gradients;
use r3_model::export::FileTensor;
use r3_recipe::learning::{MomentsFormat, Muon, NonFinite, Sft, Train};
use safetensors::tensor::View;

use crate::error::TrainError;
use crate::schedule::LearningRate;

/// What an optimiser does, and what it does not do.
#[derive(Clone, Debug, PartialEq)]
pub struct OptimiserConfig {
    /// Learning rate by optimiser step.
    pub lr: LearningRate,
    /// Decay of the running means of gradient and squared gradient.
    pub betas: [f64; 2],
    /// Added to the square root of the running squared gradient.
    pub eps: f64,
    /// Share of a weight, times the learning rate, that a step takes away.
    pub weight_decay: f64,
    /// Largest global L2 norm of a gradient.
    pub max_grad_norm: f64,
    /// Format of AdamW's running means.
    pub moments: MomentsFormat,
    /// What matrices but embedding and head are updated by, instead of AdamW.
    pub muon: Option<Muon>,
    /// What a gradient that is not finite leads to.
    pub non_finite: NonFinite,
}

impl OptimiserConfig {
    /// As a reinforcement learning recipe says, for `total_steps` optimiser steps.
    #[must_use]
    pub fn of_train(train: &Train, total_steps: u64) -> Self {
        Self {
            lr: LearningRate::of_train(train, total_steps),
            betas: train.betas,
            eps: train.eps,
            weight_decay: train.weight_decay,
            max_grad_norm: train.grad_clip,
            moments: train.moments,
            muon: train.muon.clone(),
            non_finite: train.non_finite,
        }
    }

    /// As a warm-start recipe says; `eps` is PyTorch's 1e-8.
    #[must_use]
    pub fn of_sft(sft: &Sft) -> Self {
        Self {
            lr: LearningRate::of_sft(sft),
            betas: sft.betas,
            eps: 1e-8,
            weight_decay: sft.weight_decay,
            max_grad_norm: sft.grad_clip,
            moments: sft.moments,
            muon: None,
            non_finite: NonFinite::Stop,
        }
    }
}

/// What the optimiser remembers of one weight, flat.
#[derive(Clone, Debug, PartialEq)]
pub enum Moments {
    /// AdamW's in f32.
    Whole {
        /// Running mean of the gradient.
        m: Vec<f32>,
        /// Running mean of its square.
        v: Vec<f32>,
    },
    /// AdamW's, a byte each.
    Bytes(ByteMoments),
    /// Muon's running sum of the gradients of a matrix.
    Sum(Vec<f32>),
}

impl Moments {
    /// Those of `len` elements before the first step.
    fn zeros(len: usize, is_matrix_of_muon: bool, format: MomentsFormat) -> Self {
        match format {
            _ if is_matrix_of_muon => Self::Sum(vec![0.0; len]),
            MomentsFormat::F32 => Self::Whole { m: vec![0.0; len], v: vec![0.0; len] },
            MomentsFormat::EightBit => Self::Bytes(ByteMoments::zeros(len)),
        }
    }

    /// Its parts as a file holds them, each with what the file calls it.
    #[must_use]
    pub fn parts(&self) -> Vec<(&'static str, FileTensor<'_>)> {
        match self {
            Self::Whole { m, v } => vec![("m", numbers(m)), ("v", numbers(v))],
            Self::Bytes(ByteMoments { mean, root }) => vec![
                ("m", FileTensor::u8(&mean.codes)),
                ("m_scale", numbers(&mean.scales)),
                ("root_v", FileTensor::u8(&root.codes)),
                ("root_v_scale", numbers(&root.scales)),
            ],
            Self::Sum(m) => vec![("m", numbers(m))],
        }
    }

    /// The running mean or sum.
    #[cfg(test)]
    pub(crate) fn mean(&self) -> &[f32] {
        match self {
            Self::Whole { m, .. } | Self::Sum(m) => m,
            Self::Bytes(_) => panic!("a byte is no number"),
        }
    }

    /// Touches memory that nobody has touched yet. A page that is read before it is written to is mapped twice, and the second
    /// time every other core is interrupted.
    fn touch(&mut self) {
        match self {
            Self::Whole { m, v } => {
                parallel::fill(m, 0.0);
                parallel::fill(v, 0.0);
            }
            Self::Bytes(ByteMoments { mean, root }) => {
                parallel::fill(&mut mean.codes, 0);
                parallel::fill(&mut root.codes, 0);
            }
            Self::Sum(m) => parallel::fill(m, 0.0),
        }
    }
}

fn numbers(values: &[f32]) -> FileTensor<'_> {
    FileTensor::f32(vec![values.len()], values)
}

/// What one update did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// Global L2 norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Learning rate used.
    pub lr: f64,
}

/// AdamW with decoupled weight decay (arXiv 1711.05101), as PyTorch computes it, on every weight alike; with Muon, on what
/// is no matrix and on embedding and head.
#[derive(Clone, Debug)]
pub struct Optimiser {
    config: OptimiserConfig,
    /// Of each weight that Muon updates, its rows and columns.
    matrices: Vec<Option<(usize, usize)>>,
    moments: Vec<Moments>,
    steps: u64,
}

impl Optimiser {
    /// An optimiser for `vars` that has made no step.
    #[must_use]
    pub fn new(vars: &[(String, Var)], config: OptimiserConfig) -> Self {
        let matrices =
            vars.iter().map(|(name, var)| config.muon.as_ref().and_then(|_| matrix(name, var.dims())));
        let matrices: Vec<_> = matrices.collect();
        let moments = vars
            .iter()
            .zip(&matrices)
            .map(|((_, var), matrix)| Moments::zeros(var.elem_count(), matrix.is_some(), config.moments))
            .collect();
        Self { config, moments, matrices, steps: 0 }
    }

    /// Continues a run after `steps` optimiser steps.
    ///
    /// # Panics
    /// If `moments` are not those of the same weights.
    pub fn resume(&mut self, moments: Vec<Moments>, steps: u64) {
        let shapes = |moments: &[Moments]| -> Vec<_> {
            let parts = moments.iter().flat_map(Moments::parts);
            parts.map(|(name, tensor)| (name, tensor.shape().to_vec())).collect()
        };
        assert_eq!(shapes(&moments), shapes(&self.moments), "moments of other weights");
        self.moments = moments;
        self.steps = steps;
    }

    /// Optimiser steps made.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Running means, in the order of the weights.
    #[must_use]
    pub fn moments(&self) -> &[Moments] {
        &self.moments
    }

    /// What a gradient that is not finite leads to.
    pub(crate) fn non_finite(&self) -> NonFinite {
        self.config.non_finite
    }

    /// One step: clips `gradients` to the configured global norm and updates `vars` in place.
    ///
    /// # Errors
    /// [`TrainError::NonFinite`] names the first tensor with a non-finite gradient; weights and moments are
    /// then untouched. `version` is the weights' version before the step, for the message.
    pub fn update(
        &mut self,
        vars: &[(String, Var)],
        gradients: &Gradients,
        version: PolicyVersion,
    ) -> Result<Update, TrainError> {
        let grad_norm = gradients.norm();
        if !grad_norm.is_finite()
            && let Some(index) = gradients.non_finite()
        {
            return Err(TrainError::NonFinite {
                tensor: format!("the gradient of {}", vars[index].0),
                version,
            });
        }
        if self.steps == 0 {
            self.moments.iter_mut().for_each(Moments::touch);
        }
        let lr = self.config.lr.at(self.steps);
        let grad_scale = clip_scale(grad_norm, self.config.max_grad_norm);
        let (adamw_step, muon_step) = self.config.steps(lr, self.steps + 1, grad_scale);
        let weights = vars.iter().zip(&self.matrices).zip(&mut self.moments);
        for (index, (((_, var), &matrix), moments)) in weights.enumerate() {
            let gradient = gradients.tensor(index);
            // Another in every step, and for every tensor.
            let seed = (self.steps << 32) | index as u64;
            in_place(var, |values| match (&mut *moments, matrix, &muon_step) {
                (Moments::Sum(m), Some(shape), Some(step)) => muon(values, gradient, m, shape, step),
                (Moments::Whole { m, v }, ..) => adamw(values, gradient, m, v, &adamw_step),
                (Moments::Bytes(bytes), ..) => bytes.update(values, gradient, &adamw_step, seed),
                (Moments::Sum(_), ..) => unreachable!("Muon's are of matrices"),
            })?;
        }
        self.steps += 1;
        Ok(Update { grad_norm, lr })
    }
}

impl OptimiserConfig {
    /// What step `step`, counted from 1, does by AdamW and by Muon.
    fn steps(&self, lr: f64, step: u64, grad_scale: f64) -> (AdamwStep, Option<MuonStep>) {
        let Self { betas: [beta1, beta2], eps, weight_decay, muon, .. } = self;
        let adamw = AdamwStep {
            lr,
            beta1: *beta1,
            beta2: *beta2,
            eps: *eps,
            weight_decay: *weight_decay,
            step,
            grad_scale,
        };
        let muon = muon.as_ref().map(|&Muon { momentum, nesterov, iterations }| MuonStep {
            lr,
            momentum,
            nesterov,
            iterations,
            weight_decay: *weight_decay,
            grad_scale,
        });
        (adamw, muon)
    }
}

/// Rows and columns of the matrices of a weight that Muon updates. Gate and up lie one upon the other but are matrices of
/// their own.
fn matrix(name: &str, dims: &[usize]) -> Option<(usize, usize)> {
    let is_table = ["embed_tokens.weight", "lm_head.weight"].iter().any(|table| name.ends_with(table));
    match *dims {
        [.., rows, columns] if !is_table => {
            Some((if name.ends_with("gate_up_proj") { rows / 2 } else { rows }, columns))
        }
        _ => None,
    }
}

/// What gradients are multiplied with, as PyTorch's `clip_grad_norm_`.
fn clip_scale(norm: f64, max_norm: f64) -> f64 {
    (max_norm / (norm + 1e-6)).min(1.0)
}

/// Calls `change` on a weight's own memory.
fn in_place(var: &Var, change: impl FnMut(&mut [f32]) + Send) -> candle_core::Result<()> {
    var.inplace_op1(&InPlace { change: Mutex::new(change) })
}

/// A change as a candle op.
struct InPlace<F> {
    /// candle hands the op over by shared reference.
    change: Mutex<F>,
}

impl<F: FnMut(&mut [f32]) + Send> InplaceOp1 for InPlace<F> {
    fn name(&self) -> &'static str {
        "optimiser"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let (CpuStorage::F32(values), Some((start, end))) = (storage, layout.contiguous_offsets()) else {
            bail!("a weight is not contiguous f32")
        };
        let mut change = self.change.lock().expect("only this op holds the lock");
        change(&mut values[start..end]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use candle_core::Device;
    use r3_recipe::learning::Schedule;

    use super::*;

    fn config(max_grad_norm: f64) -> OptimiserConfig {
        let lr = LearningRate {
            peak: 0.1,
            warmup_steps: 0,
            fall_start: 0,
            total_steps: 10,
            fall: Schedule::Constant,
            floor: 0.0,
        };
        OptimiserConfig {
            lr,
            betas: [0.9, 0.99],
            eps: 1e-8,
            weight_decay: 0.1,
            max_grad_norm,
            moments: MomentsFormat::F32,
            muon: None,
            non_finite: NonFinite::Stop,
        }
    }

    fn vars() -> Vec<(String, Var)> {
        let var = |values: &[f32]| Var::new(values, &Device::Cpu).unwrap();
        vec![("a".into(), var(&[1.0, -2.0])), ("b".into(), var(&[0.5]))]
    }

    fn values(vars: &[(String, Var)]) -> Vec<f32> {
        vars.iter().flat_map(|(_, var)| var.flatten_all().unwrap().to_vec1::<f32>().unwrap()).collect()
    }

    fn gradients(vars: &[(String, Var)], factors: [f32; 3]) -> Gradients {
        let zeros = vars.iter().map(|(_, var)| vec![0.0; var.elem_count()]).collect();
        let mut gradients = Gradients::new(zeros);
        let elements = gradients.tensors_mut().iter_mut().flatten();
        elements.zip(factors).for_each(|(element, factor)| *element = factor);
        gradients
    }

    #[test]
    fn two_steps_match_adamw_in_f64() {
        let vars = vars();
        let mut optimiser = Optimiser::new(&vars, config(1e9));
        let steps = [[0.3_f32, -0.1, 2.0], [-0.2, 0.4, 1.0]];
        let mut expected = [1.0, -2.0, 0.5];
        let (mut m, mut v) = ([0.0; 3], [0.0; 3]);
        for (n, factors) in steps.iter().enumerate() {
            let update = optimiser.update(&vars, &gradients(&vars, *factors), PolicyVersion(0)).unwrap();
            assert_eq!(update.lr, 0.1);
            for i in 0..3 {
                let g = f64::from(factors[i]);
                m[i] = 0.9 * m[i] + 0.1 * g;
                v[i] = 0.99 * v[i] + 0.01 * g * g;
                let power = n as i32 + 1;
                let (m_hat, v_hat) =
                    (m[i] / (1.0 - 0.9_f64.powi(power)), v[i] / (1.0 - 0.99_f64.powi(power)));
                expected[i] -= 0.1 * 0.1 * expected[i];
                expected[i] -= 0.1 * m_hat / (v_hat.sqrt() + 1e-8);
            }
        }
        for (actual, expected) in values(&vars).iter().zip(expected) {
            assert!((f64::from(*actual) - expected).abs() < 1e-5, "{actual} is not {expected}");
        }
        assert_eq!(optimiser.steps(), 2);
    }

    #[test]
    fn a_long_gradient_is_scaled_to_the_norm_and_a_short_one_is_not() {
        let vars = vars();
        let mut optimiser = Optimiser::new(&vars, config(1.0));
        let update = optimiser.update(&vars, &gradients(&vars, [3.0, 4.0, 0.0]), PolicyVersion(0)).unwrap();
        assert_eq!(update.grad_norm, 5.0);
        assert!((optimiser.moments()[0].mean()[0] - 0.1 * 3.0 / 5.0).abs() < 1e-6);
        assert_eq!(clip_scale(0.5, 1.0), 1.0);
    }

    #[test]
    fn a_non_finite_gradient_is_named_and_changes_nothing() {
        let vars = vars();
        let mut optimiser = Optimiser::new(&vars, config(1.0));
        optimiser.update(&vars, &gradients(&vars, [1.0; 3]), PolicyVersion(0)).unwrap();
        let (weights, moments) = (values(&vars), optimiser.moments().to_vec());
        let error =
            optimiser.update(&vars, &gradients(&vars, [1.0, 1.0, f32::NAN]), PolicyVersion(7)).unwrap_err();
        assert_eq!(error.to_string(), "the gradient of b is not finite in the step after version 7");
        assert_eq!((values(&vars), optimiser.moments()), (weights, &moments[..]));
        assert_eq!(optimiser.steps(), 1);
    }

    #[test]
    fn a_resumed_optimiser_continues_bit_for_bit() {
        for moments in [MomentsFormat::F32, MomentsFormat::EightBit] {
            let config = OptimiserConfig { moments, ..config(1.0) };
            let (whole, split) = (vars(), vars());
            let mut optimiser = Optimiser::new(&whole, config.clone());
            let mut first = Optimiser::new(&split, config.clone());
            let factors = [[1.0, 2.0, 3.0], [-1.0, 0.5, 0.1]];
            for (vars, optimiser) in [(&whole, &mut optimiser), (&split, &mut first)] {
                optimiser.update(vars, &gradients(vars, factors[0]), PolicyVersion(0)).unwrap();
            }
            let mut second = Optimiser::new(&split, config);
            second.resume(first.moments().to_vec(), first.steps());
            for (vars, optimiser) in [(&whole, &mut optimiser), (&split, &mut second)] {
                optimiser.update(vars, &gradients(vars, factors[1]), PolicyVersion(1)).unwrap();
            }
            assert_eq!(values(&whole), values(&split));
            assert_eq!(optimiser.moments(), second.moments());
        }
    }

    #[test]
    fn moments_of_a_byte_round_in_another_way_in_every_step_and_tensor() {
        let var = || Var::new(vec![1.0_f32; 512], &Device::Cpu).unwrap();
        let vars = vec![("a".into(), var()), ("b".into(), var())];
        let mut optimiser =
            Optimiser::new(&vars, OptimiserConfig { moments: MomentsFormat::EightBit, ..config(1e9) });
        let gradient: Vec<f32> = (1..=512_u16).map(f32::from).collect();
        let mut codes = BTreeSet::new();
        for version in 0..2 {
            let gradients = Gradients::new(vec![gradient.clone(); 2]);
            optimiser.update(&vars, &gradients, PolicyVersion(version)).unwrap();
            for moments in optimiser.moments() {
                let Moments::Bytes(ByteMoments { mean, .. }) = moments else { panic!("a byte each") };
                codes.insert(mean.codes.clone());
            }
        }
        assert_eq!(codes.len(), 4);
    }

    #[test]
    fn muon_takes_the_matrices_and_adamw_the_rest() {
        let of = |name: &str, dims: &[usize]| matrix(&format!("model.layers.0.{name}"), dims);
        assert_eq!(of("self_attn.q_proj.weight", &[6, 4]), Some((6, 4)));
        assert_eq!(of("mlp.experts.down_proj", &[8, 4, 3]), Some((4, 3)));
        assert_eq!(of("mlp.experts.gate_up_proj", &[8, 6, 4]), Some((3, 4)));
        assert_eq!(of("input_layernorm.weight", &[4]), None);
        assert_eq!(matrix("model.embed_tokens.weight", &[9, 4]), None);
        assert_eq!(matrix("lm_head.weight", &[9, 4]), None);

        let zeros = |dims: &[usize]| Var::zeros(dims, candle_core::DType::F32, &Device::Cpu).unwrap();
        let vars = vec![("q.weight".into(), zeros(&[2, 3])), ("norm.weight".into(), zeros(&[2]))];
        let muon = Muon { momentum: 0.5, ..Muon::default() };
        let mut optimiser = Optimiser::new(&vars, OptimiserConfig { muon: Some(muon), ..config(1e9) });
        let [Moments::Sum(sum), Moments::Whole { m, v }] = optimiser.moments() else {
            panic!("a matrix, a norm")
        };
        assert_eq!([sum.len(), m.len(), v.len()], [6, 2, 2]);
        let mut gradients = Gradients::new(vec![vec![3.0, 0.0, 0.0, 0.0, 0.01, 0.0], vec![1.0, -1.0]]);
        optimiser.update(&vars, &gradients, PolicyVersion(0)).unwrap();
        gradients.zero();
        optimiser.update(&vars, &gradients, PolicyVersion(1)).unwrap();
        assert_eq!(optimiser.moments()[0].mean(), [1.5, 0.0, 0.0, 0.0, 0.005, 0.0]);
        // Both directions of the matrix move as far, though one of its gradients is 300 times the other's.
        let values = values(&vars);
        assert!((0.5..2.0).contains(&(values[0] / values[4])), "{values:?}");
        assert!(values[6] < 0.0 && values[7] > 0.0, "{values:?}");
    }
}
