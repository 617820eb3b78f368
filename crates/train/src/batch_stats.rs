//! What the groups of a batch looked like before any of them was left out.

use r3_core::rollout::{FinishReason, Reward};

use crate::batch::{Sample, is_left_out};
use crate::objective::Objective;
use crate::overlong::punishment;

/// What the groups of a batch looked like, including those that are left out.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BatchStats {
    /// Groups that came.
    pub n_groups: usize,
    /// Groups whose rewards are all equal, left out or not.
    pub n_groups_equal: usize,
    /// Groups left out since fewer than two rewards are valid, or no token is trained on.
    pub n_groups_too_few: usize,
    /// Rollouts that came.
    pub n_rollouts: usize,
    /// Rollouts whose reward failed.
    pub n_rewards_failed: usize,
    /// Mean of the valid rewards, before shaping; 0 without any.
    pub reward_mean: f64,
    /// Sample standard deviation of the valid rewards, before shaping; 0 with fewer than two.
    pub reward_std: f64,
    /// Mean overlong punishment, 0 or less.
    pub overlong_mean: f64,
    /// Mean sampled tokens of a rollout: those that are trained on.
    pub response_length_mean: f64,
    /// Most sampled tokens of a rollout.
    pub response_length_max: usize,
    /// Rollouts that are not trained on since they were cut off.
    pub n_truncated_masked: usize,
    /// Share of rollouts that were cut off by their token limit.
    pub response_length_clip_ratio: f64,
    /// Inputs of the rollouts that will be trained on.
    pub n_inputs: usize,
    /// Of these, those whose rows are computed for another rollout.
    pub n_shared: usize,
    /// Tokens that will be trained on.
    pub n_trained: usize,
}

/// What a sample's reward becomes before it is compared.
pub(crate) fn overlong(sample: &Sample<'_>, objective: &Objective) -> f64 {
    objective.overlong.as_ref().map_or(0.0, |overlong| punishment(sample.n_trained(), overlong))
}

/// Counts the rollouts of a batch as they are packed.
#[derive(Default)]
pub(crate) struct BatchCounter {
    pub(crate) stats: BatchStats,
    rewards: Vec<f64>,
    n_cut_off: usize,
    n_sampled: usize,
    overlong: f64,
}

impl BatchCounter {
    pub(crate) fn add_group(&mut self, samples: &[Sample<'_>], objective: &Objective) {
        self.stats.n_groups += 1;
        for sample in samples {
            let n_sampled = sample.n_trained();
            self.stats.n_rollouts += 1;
            self.stats.n_rewards_failed += usize::from(sample.reward == Reward::Failed);
            self.stats.response_length_max = self.stats.response_length_max.max(n_sampled);
            self.stats.n_truncated_masked += usize::from(is_left_out(sample, objective));
            self.rewards.extend(sample.reward.score().map(f64::from));
            self.n_cut_off += usize::from(sample.rollout.finish == FinishReason::Length);
            self.n_sampled += n_sampled;
            self.overlong += overlong(sample, objective);
        }
    }

    pub(crate) fn finish(self) -> BatchStats {
        let mut stats = self.stats;
        let (n_rollouts, n_rewards) = (stats.n_rollouts.max(1) as f64, self.rewards.len() as f64);
        if !self.rewards.is_empty() {
            stats.reward_mean = self.rewards.iter().sum::<f64>() / n_rewards;
        }
        if self.rewards.len() > 1 {
            let squares: f64 = self.rewards.iter().map(|reward| (reward - stats.reward_mean).powi(2)).sum();
            stats.reward_std = (squares / (n_rewards - 1.0)).sqrt();
        }
        stats.overlong_mean = self.overlong / n_rollouts;
        stats.response_length_mean = self.n_sampled as f64 / n_rollouts;
        stats.response_length_clip_ratio = self.n_cut_off as f64 / n_rollouts;
        stats
    }
}

#[cfg(test)]
mod tests {
    use r3_recipe::algorithm::Overlong;

    use crate::batch::{Batch, Limits, RoutesUse};
    use crate::fixtures::{OwnedRollout, dapo, with_groups};
    use crate::objective::Objective;

    #[test]
    fn given_tokens_count_neither_as_length_nor_as_overlong() {
        let mut rollouts = [OwnedRollout::new(1, 0, (2, 6), 1.0), OwnedRollout::new(1, 1, (2, 4), 0.0)];
        rollouts[0].mask = Some(vec![1, 0, 0, 0, 1, 1]);
        let overlong = Some(Overlong { max_tokens: 4, cache_tokens: 2, factor: 1.0 });
        let objective = Objective { overlong, ..dapo() };
        let limits =
            Limits { mini_steps: 1, micro_batch_tokens: 100, share_prompts: true, routes: RoutesUse::None };
        with_groups(&rollouts, |groups| {
            let batch = Batch::pack(groups, &objective, limits).unwrap();
            let stats = batch.stats();
            assert_eq!((stats.response_length_mean, stats.response_length_max), (3.5, 4));
            assert_eq!(stats.overlong_mean, -(0.5 + 1.0) / 2.0);
            assert_eq!((stats.n_trained, stats.n_inputs), (3 + 4, 7 + 5));
        });
    }
}
