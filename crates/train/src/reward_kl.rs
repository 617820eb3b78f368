//! A KL that is taken out of the reward.
//!
//! `R_i - coef * sum_t kl_it` is what is compared, with `kl` between the rollout's logprobs, which sampled the tokens, and the
//! reference's. REINFORCE++ without a baseline credits each token with what is still to come:
//! `A_it = R_i - coef * sum_(s >= t) kl_is` (arXiv 2501.03262, section 3).

use crate::advantage::Estimator;
use crate::batch::{Batch, Sequence};
use crate::loss::kl::KlEstimator;
use crate::objective::Objective;

/// What taking the KL out of the rewards gives.
pub struct TakenOut {
    /// Advantage of every row of the batch.
    pub advantages: Vec<f64>,
    /// KL of a trained token, nats, mean over all of them; 0 if there is none.
    pub kl: f64,
}

/// Advantages in f64, when `coef * estimator` of each trained token of `batch` is taken off its rollout's
/// reward. `reference_logprobs` has one for each row, in the order of the batch's sequences.
///
/// # Panics
/// If it has not.
#[must_use]
pub fn take_out(
    batch: &Batch<'_>,
    objective: &Objective,
    (estimator, coef): (KlEstimator, f64),
    reference_logprobs: &[f32],
) -> TakenOut {
    let mut costs = Vec::with_capacity(reference_logprobs.len());
    for sequence in batch.sequences() {
        let reference = &reference_logprobs[costs.len()..][..sequence.n_rows()];
        costs
            .extend(costs_of(sequence, reference).map(|log_ratio| log_ratio.map(|x| coef * estimator.of(x))));
    }
    assert_eq!(costs.len(), reference_logprobs.len());
    let mut advantages = Vec::with_capacity(costs.len());
    let mut sequences = batch.sequences();
    while let Some(first) = sequences.first() {
        let group = first.sample.rollout.group;
        let n = sequences.iter().take_while(|sequence| sequence.sample.rollout.group == group).count();
        let (members, others) = sequences.split_at(n);
        push_group(members, objective.estimator, &costs, &mut advantages);
        sequences = others;
    }
    let trained = advantages.iter_mut().zip(&costs).filter(|(_, cost)| cost.is_some());
    objective.estimator.whiten(trained.map(|(advantage, _)| (advantage, 1)));
    let n_trained = costs.iter().flatten().count().max(1);
    TakenOut { advantages, kl: costs.iter().flatten().sum::<f64>() / (coef * n_trained as f64) }
}

/// `rollout - reference` of each trained row; `None` for the others.
fn costs_of<'a>(
    sequence: &'a Sequence<'_>,
    reference: &'a [f32],
) -> impl Iterator<Item = Option<f64>> + use<'a> {
    let rollout = &sequence.sample.rollout;
    let n_prompt_targets = rollout.prompt_tokens - 1 - sequence.n_shared;
    let mask = sequence.sample.mask;
    reference.iter().enumerate().map(move |(at, &reference)| {
        let n = at.checked_sub(n_prompt_targets)?;
        let trained = mask.is_none_or(|mask| mask[n] != 0);
        trained.then(|| f64::from(rollout.rollout_logprobs[n]) - f64::from(reference))
    })
}

/// Adds the advantages of one group's rows, which begin where `advantages` ends.
fn push_group(
    members: &[Sequence<'_>],
    estimator: Estimator,
    costs: &[Option<f64>],
    advantages: &mut Vec<f64>,
) {
    let mut start = advantages.len();
    let mut ranges = Vec::with_capacity(members.len());
    for member in members {
        ranges.push(start..start + member.n_rows());
        start += member.n_rows();
    }
    let total = |range: &std::ops::Range<usize>| -> f64 { costs[range.clone()].iter().flatten().sum() };
    if estimator.compares_within_groups() {
        let rewards = members.iter().zip(&ranges).map(|(member, range)| Some(member.reward - total(range)));
        let group = estimator.advantages(&rewards.collect::<Vec<_>>());
        for (advantage, range) in group.advantages.into_iter().zip(ranges) {
            advantages.extend(std::iter::repeat_n(advantage.expect("every reward is there"), range.len()));
        }
        return;
    }
    for (member, range) in members.iter().zip(ranges) {
        let mut to_come = total(&range);
        for cost in &costs[range] {
            advantages.push(member.reward - to_come);
            to_come -= cost.unwrap_or(0.0);
        }
    }
}
