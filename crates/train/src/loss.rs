//! The loss of a micro-batch: a pure function of its tokens and of the denominator of the whole optimiser step.
//!
//! It runs along the stages of an [`Objective`]: [`ratio`], [`surrogate`], [`aggregation`]. The arrays may be f32, as the
//! trainer's are, or f64, as the reference's are.

pub mod aggregation;
pub mod ratio;
pub mod surrogate;

use candle_core::{Result, Tensor};

use crate::loss::aggregation::weighted_sum;
use crate::objective::Objective;

/// One micro-batch as the losses see it. Every array is `[T]`; entry `t` is about the token predicted at input `t`.
#[derive(Clone, Copy, Debug)]
pub struct TokenBatch<'a> {
    /// Log-probabilities under the weights being trained, in nats; the only differentiable array.
    pub policy_logprobs: &'a Tensor,
    /// Log-probabilities that the ratio divides by; any finite value where the mask is 0.
    pub old_logprobs: &'a Tensor,
    /// Advantage of the token.
    pub advantages: &'a Tensor,
    /// 1 where the token is trained on, else 0.
    pub mask: &'a Tensor,
    /// Weight of the token in the sum; any finite value where the mask is 0.
    pub weights: &'a Tensor,
    /// Tokens of each sequence; sums to `T`. A sequence is never cut in two.
    pub lengths: &'a [usize],
}

/// The loss of a micro-batch, to be minimised: its share of `-J / denominator`, a scalar.
///
/// `denominator` is [`aggregation::Aggregation::denominator`] of the whole optimiser step, so micro-batches add up. Prompt
/// tokens are masked, never dropped.
///
/// # Errors
/// If the arrays do not share shape, dtype and device.
pub fn loss(objective: &Objective, batch: &TokenBatch<'_>, denominator: f64) -> Result<Tensor> {
    let log_ratio = (batch.policy_logprobs - batch.old_logprobs)?;
    let log_ratio = objective.ratio.log_ratio(log_ratio, batch.mask, batch.lengths)?;
    let surrogate = objective.surrogate.apply(&log_ratio, batch.policy_logprobs, batch.advantages)?;
    weighted_sum(&surrogate, batch.mask, batch.weights)? / -denominator
}

#[cfg(test)]
mod tests;
