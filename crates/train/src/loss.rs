//! The loss of a micro-batch: a pure function of its tokens and of the denominator of the whole optimiser step.
//!
//! It runs along the stages of an [`Objective`]: [`ratio`], [`surrogate`], [`correction`], [`aggregation`], plus [`kl`] and entropy. The arrays may be f32, as the
//! trainer's are, or f64, as the reference's are.

pub mod aggregation;
pub mod correction;
pub mod kl;
pub mod ratio;
pub mod surrogate;

use candle_core::{Result, Tensor};
use r3_recipe::objective::KlPlace;

use crate::loss::aggregation::weighted;
use crate::objective::{KlTerm, Objective};

/// One micro-batch as the losses see it. Every array is `[T]`; entry `t` is about the token predicted at input `t`.
#[derive(Clone, Copy, Debug)]
pub struct TokenBatch<'a> {
    /// Log-probabilities under the weights being trained, in nats; differentiable.
    pub policy_logprobs: &'a Tensor,
    /// Log-probabilities that the ratio divides by; any finite value where the mask is 0.
    pub old_logprobs: &'a Tensor,
    /// Log-probabilities under the reference; any finite value where the mask is 0. A KL in the loss needs them.
    pub ref_logprobs: Option<&'a Tensor>,
    /// Entropy of each distribution, nats; differentiable.
    pub entropy: &'a Tensor,
    /// Advantage of the token.
    pub advantages: &'a Tensor,
    /// 1 where the token is trained on, else 0.
    pub mask: &'a Tensor,
    /// Weight of the token in the sum; any finite value where the mask is 0.
    pub weights: &'a Tensor,
    /// What the surrogate is multiplied by, without a gradient; `None` is 1.
    pub correction: Option<&'a Tensor>,
    /// Tokens of each sequence; sums to `T`. A sequence is never cut in two.
    pub lengths: &'a [usize],
}

/// A micro-batch's share of the loss, which adds up over micro-batches.
#[derive(Clone, Debug)]
pub struct Loss {
    /// What is minimised, a scalar: `(-surrogate + coef * kl - entropy_coef * entropy) / denominator`, summed over tokens.
    pub total: Tensor,
    /// The surrogate of each token, weighed, `[T]`.
    pub surrogate: Tensor,
    /// KL to the reference of each token, weighed, `[T]` nats, if it is part of the loss.
    pub kl: Option<Tensor>,
}

/// The loss of a micro-batch, to be minimised.
///
/// `denominator` is [`aggregation::Aggregation::denominator`] of the whole optimiser step, so micro-batches add up. Prompt
/// tokens are masked, never dropped. KL and entropy are averaged like the surrogate, and no correction weighs them.
///
/// # Errors
/// If the arrays do not share shape, dtype and device.
///
/// # Panics
/// If the loss has a KL, and the batch no reference.
pub fn loss(objective: &Objective, batch: &TokenBatch<'_>, denominator: f64) -> Result<Loss> {
    let log_ratio = (batch.policy_logprobs - batch.old_logprobs)?;
    let log_ratio = objective.ratio.log_ratio(log_ratio, batch.mask, batch.lengths)?;
    let mut surrogate = objective.surrogate.apply(&log_ratio, batch.policy_logprobs, batch.advantages)?;
    if let Some(correction) = batch.correction {
        surrogate = (surrogate * correction)?;
    }
    let weigh = |x: &Tensor| weighted(x, batch.mask, batch.weights);
    let surrogate = weigh(&surrogate)?;
    let mut total = (surrogate.sum_all()? / -denominator)?;
    let mut loss_kl = None;
    if let Some(KlTerm { coef, estimator, place: KlPlace::Loss }) = objective.kl {
        let reference = batch.ref_logprobs.expect("a KL has a reference");
        let kl = weigh(&estimator.apply(batch.policy_logprobs, reference, batch.old_logprobs)?)?;
        total = (total + ((kl.sum_all()? / denominator)? * coef)?)?;
        loss_kl = Some(kl);
    }
    if objective.entropy_coef != 0.0 {
        total = (total - ((weigh(batch.entropy)?.sum_all()? / denominator)? * objective.entropy_coef)?)?;
    }
    Ok(Loss { total, surrogate, kl: loss_kl })
}

#[cfg(test)]
mod tests;
