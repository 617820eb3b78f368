//! AdamW over the policy's weights, in place.

use std::sync::Mutex;

use candle_core::{CpuStorage, InplaceOp1, Layout, Var, bail};
use r3_core::ids::PolicyVersion;
use r3_kernels::adamw::{AdamwStep, adamw};
use r3_recipe::learning::{Sft, Train};

use crate::error::TrainError;
use crate::gradients::Gradients;
use crate::schedule::LearningRate;

/// Numbers of an AdamW run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
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
}

impl AdamWConfig {
    /// As a reinforcement learning recipe says, for `total_steps` optimiser steps.
    #[must_use]
    pub fn of_train(train: &Train, total_steps: u64) -> Self {
        Self {
            lr: LearningRate::of_train(train, total_steps),
            betas: train.betas,
            eps: train.eps,
            weight_decay: train.weight_decay,
            max_grad_norm: train.grad_clip,
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
        }
    }
}

/// The running means of one weight, flat f32.
#[derive(Clone, Debug, PartialEq)]
pub struct Moments {
    /// Of the gradient.
    pub m: Vec<f32>,
    /// Of the squared gradient.
    pub v: Vec<f32>,
}

/// What one update did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// Global L2 norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Learning rate used.
    pub lr: f64,
}

/// AdamW with decoupled weight decay (arXiv 1711.05101), as PyTorch computes it, on every weight alike.
#[derive(Clone, Debug)]
pub struct AdamW {
    config: AdamWConfig,
    moments: Vec<Moments>,
    steps: u64,
}

impl AdamW {
    /// An optimiser for `vars` that has made no step.
    #[must_use]
    pub fn new(vars: &[(String, Var)], config: AdamWConfig) -> Self {
        let zeros = |var: &Var| vec![0.0; var.elem_count()];
        let moments = vars.iter().map(|(_, var)| Moments { m: zeros(var), v: zeros(var) }).collect();
        Self { config, moments, steps: 0 }
    }

    /// Continues a run after `steps` optimiser steps.
    ///
    /// # Panics
    /// If `moments` are not those of the same weights.
    pub fn resume(&mut self, moments: Vec<Moments>, steps: u64) {
        let lengths =
            |moments: &[Moments]| moments.iter().map(|one| (one.m.len(), one.v.len())).collect::<Vec<_>>();
        assert_eq!(lengths(&moments), lengths(&self.moments), "moments of other weights");
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
        if let Some(index) = gradients.non_finite().filter(|_| !grad_norm.is_finite()) {
            return Err(TrainError::NonFinite {
                tensor: format!("the gradient of {}", vars[index].0),
                version,
            });
        }
        let lr = self.config.lr.at(self.steps);
        let step = AdamwStep {
            lr,
            beta1: self.config.betas[0],
            beta2: self.config.betas[1],
            eps: self.config.eps,
            weight_decay: self.config.weight_decay,
            step: self.steps + 1,
            grad_scale: clip_scale(grad_norm, self.config.max_grad_norm),
        };
        for (index, ((_, var), moments)) in vars.iter().zip(&mut self.moments).enumerate() {
            var.inplace_op1(&InPlace {
                gradient: gradients.tensor(index),
                moments: Mutex::new(moments),
                step: &step,
            })?;
        }
        self.steps += 1;
        Ok(Update { grad_norm, lr })
    }
}

/// What gradients are multiplied with, as PyTorch's `clip_grad_norm_`.
fn clip_scale(norm: f64, max_norm: f64) -> f64 {
    (max_norm / (norm + 1e-6)).min(1.0)
}

/// The kernel as a candle op on a weight's own memory.
struct InPlace<'a> {
    gradient: &'a [f32],
    /// candle hands the op over by shared reference.
    moments: Mutex<&'a mut Moments>,
    step: &'a AdamwStep,
}

impl InplaceOp1 for InPlace<'_> {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let (CpuStorage::F32(values), Some((start, end))) = (storage, layout.contiguous_offsets()) else {
            bail!("a weight is not contiguous f32")
        };
        let mut moments = self.moments.lock().expect("only this op holds the lock");
        let Moments { m, v } = &mut **moments;
        adamw(&mut values[start..end], self.gradient, m, v, self.step);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use r3_recipe::learning::Schedule;

    use super::*;

    fn config(max_grad_norm: f64) -> AdamWConfig {
        let lr = LearningRate {
            peak: 0.1,
            warmup_steps: 0,
            fall_start: 0,
            total_steps: 10,
            fall: Schedule::Constant,
        };
        AdamWConfig { lr, betas: [0.9, 0.99], eps: 1e-8, weight_decay: 0.1, max_grad_norm }
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
        let mut optimiser = AdamW::new(&vars, config(1e9));
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
        let mut optimiser = AdamW::new(&vars, config(1.0));
        let update = optimiser.update(&vars, &gradients(&vars, [3.0, 4.0, 0.0]), PolicyVersion(0)).unwrap();
        assert_eq!(update.grad_norm, 5.0);
        assert!((optimiser.moments()[0].m[0] - 0.1 * 3.0 / 5.0).abs() < 1e-6);
        assert_eq!(clip_scale(0.5, 1.0), 1.0);
    }

    #[test]
    fn a_non_finite_gradient_is_named_and_changes_nothing() {
        let vars = vars();
        let mut optimiser = AdamW::new(&vars, config(1.0));
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
        let (whole, split) = (vars(), vars());
        let mut optimiser = AdamW::new(&whole, config(1.0));
        let mut first = AdamW::new(&split, config(1.0));
        let factors = [[1.0, 2.0, 3.0], [-1.0, 0.5, 0.1]];
        for (vars, optimiser) in [(&whole, &mut optimiser), (&split, &mut first)] {
            optimiser.update(vars, &gradients(vars, factors[0]), PolicyVersion(0)).unwrap();
        }
        let mut second = AdamW::new(&split, config(1.0));
        second.resume(first.moments().to_vec(), first.steps());
        for (vars, optimiser) in [(&whole, &mut optimiser), (&split, &mut second)] {
            optimiser.update(vars, &gradients(vars, factors[1]), PolicyVersion(1)).unwrap();
        }
        assert_eq!(values(&whole), values(&split));
    }
}
