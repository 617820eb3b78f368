//! What the updates of a step add up to.

use candle_core::Tensor;

use crate::error::TrainError;
use crate::loss::Loss;
use crate::loss::surrogate::Clipped;
use crate::micro_batch::MicroBatch;
use crate::objective::Objective;
use crate::optimiser::Update;

use super::{ActorStats, Pass};

/// Sums behind [`ActorStats`]. Every one is a chain over tokens, in order.
#[derive(Default)]
pub(super) struct ActorSums {
    loss: f64,
    kl_loss: Option<f64>,
    pub(super) reward_kl: Option<f64>,
    kl: f64,
    entropy: f64,
    n_high: usize,
    n_low: usize,
    n_dual: usize,
    /// Sum of weights, and tokens dropped.
    correction: Option<(f64, usize)>,
    /// Replayed experts that were replaced, and all of them.
    replaced: Option<(usize, usize)>,
    n_tokens: usize,
    grad_norm: f64,
    lr: f64,
    pub(super) n_updates: usize,
}

impl ActorSums {
    pub(super) fn add_tokens(
        &mut self,
        micro: &MicroBatch,
        pass: &Pass,
        old_logprobs: &[f32],
        objective: &Objective,
    ) {
        let difference = |(&policy, &other): (&f32, &f32)| f64::from(policy) - f64::from(other);
        let log_ratios: Vec<f64> = pass.policy_logprobs.iter().zip(old_logprobs).map(difference).collect();
        let log_ratios = objective.ratio.log_ratios(&log_ratios, &micro.mask, &micro.lengths);
        if let Some((n_replaced, n)) = pass.n_replaced {
            let (sum, of) = self.replaced.get_or_insert_default();
            (*sum, *of) = (*sum + n_replaced, *of + n);
        }
        for t in (0..micro.n_rows()).filter(|&t| micro.mask[t] != 0.0) {
            self.kl -= difference((&pass.policy_logprobs[t], &micro.rollout_logprobs[t]));
            self.entropy += f64::from(pass.entropy[t]);
            self.n_tokens += 1;
            match objective.surrogate.judge(log_ratios[t], micro.advantages[t]) {
                Some(Clipped::High) => self.n_high += 1,
                Some(Clipped::Low) => self.n_low += 1,
                Some(Clipped::Dual) => self.n_dual += 1,
                None => {}
            }
        }
    }

    pub(super) fn add_loss(&mut self, loss: &Loss, denominator: f64) -> Result<(), TrainError> {
        add_shares(&mut self.loss, &loss.surrogate, -denominator)?;
        if let Some(kl) = &loss.kl {
            add_shares(self.kl_loss.get_or_insert_default(), kl, denominator)?;
        }
        Ok(())
    }

    pub(super) fn add_correction(&mut self, weights: &[f64], mask: &[f32]) {
        let (sum, n_dropped) = self.correction.get_or_insert_default();
        for (weight, _) in weights.iter().zip(mask).filter(|(_, kept)| **kept != 0.0) {
            *sum += weight;
            *n_dropped += usize::from(*weight == 0.0);
        }
    }

    pub(super) fn add_update(&mut self, update: Update) {
        self.grad_norm += update.grad_norm;
        self.lr = update.lr;
        self.n_updates += 1;
    }

    pub(super) fn finish(self) -> ActorStats {
        let (n_tokens, n_updates) = (self.n_tokens.max(1) as f64, self.n_updates.max(1) as f64);
        ActorStats {
            pg_loss: self.loss / n_updates,
            kl_loss: self.kl_loss.map(|kl| kl / n_updates),
            reward_kl: self.reward_kl,
            ppo_kl: self.kl / n_tokens,
            pg_clipfrac: (self.n_high + self.n_low + self.n_dual) as f64 / n_tokens,
            clip_frac_high: self.n_high as f64 / n_tokens,
            clip_frac_low: self.n_low as f64 / n_tokens,
            correction_mean: self.correction.map(|(sum, _)| sum / n_tokens),
            correction_dropped_frac: self.correction.map(|(_, n_dropped)| n_dropped as f64 / n_tokens),
            replaced_frac: self.replaced.map(|(n_replaced, n)| n_replaced as f64 / n.max(1) as f64),
            clip_frac_dual: self.n_dual as f64 / n_tokens,
            entropy: self.entropy / n_tokens,
            grad_norm: self.grad_norm / n_updates,
            lr: self.lr,
        }
    }
}

/// Adds each of the `parts` `[T]` over `whole`, one after the other, so that it does not show how a step was split.
fn add_shares(sum: &mut f64, parts: &Tensor, whole: f64) -> candle_core::Result<()> {
    parts.to_vec1::<f32>()?.into_iter().for_each(|part| *sum += f64::from(part) / whole);
    Ok(())
}
