//! What sampling took, and what came of it.

use r3_core::rollout::{FinishReason, Reward};
use r3_scheduler::scheduler::SchedulerStats;
use r3_tasks::reward::RewardFailure;

use crate::pending::Scored;

/// What sampling took, tick by tick, and what the rollouts that were handed to the trainer are like. With groups kept
/// from step to step, those are not all of the same ticks.
#[derive(Clone, Debug, Default)]
pub struct SampleStats {
    /// Tokens sampled.
    pub sampled_tokens: u64,
    /// Seconds of scoring.
    pub reward_s: f64,
    /// Largest share of KV blocks held at once.
    pub kv_usage: f64,
    /// Most sequences that ran at once.
    pub max_running: usize,
    /// Most sequences that waited at once.
    pub max_waiting: usize,
    /// Sequences that gave their blocks back.
    pub preemptions: u64,
    /// Rewards that failed.
    pub failures: Vec<RewardFailure>,

    /// Of the rollouts handed over: those that were scored.
    pub n_scored: usize,
    /// Those whose reward failed.
    pub n_failed: usize,
    /// Sum of the scores.
    pub score_sum: f64,
    /// Sum of the squares of the scores.
    pub score_square_sum: f64,
    /// Those cut off by their token limit.
    pub n_cut: usize,
    /// Those that more than one policy version sampled.
    pub n_mixed: usize,
    /// Tokens that were sampled for them.
    pub completion_tokens: u64,
    /// Turns in which those were.
    pub turns: u64,
    /// Of those tokens, how many were drawn from a part of the vocabulary.
    pub truncated_tokens: u64,
    /// Tokens that those draws kept together.
    pub kept_tokens: u64,
    /// Most tokens that one of them kept.
    pub max_kept: u32,
    /// Tokens of the prompts, once a group.
    pub prompt_tokens: u64,
    /// Of those, tokens found in the prefix cache.
    pub cached_tokens: u64,
}

impl SampleStats {
    /// Rollouts handed over.
    #[must_use]
    pub fn n_rollouts(&self) -> usize {
        self.n_scored + self.n_failed
    }

    /// Mean and sample standard deviation of the scores; 0 where there are too few.
    #[must_use]
    pub fn score_moments(&self) -> (f64, f64) {
        let n = self.n_scored as f64;
        let mean = self.score_sum / n.max(1.0);
        let variance = (self.score_square_sum - n * mean * mean) / (n - 1.0).max(1.0);
        (mean, variance.max(0.0).sqrt())
    }

    /// Adds what another batch of prompts took.
    pub fn add(&mut self, other: Self) {
        self.sampled_tokens += other.sampled_tokens;
        self.reward_s += other.reward_s;
        self.kv_usage = self.kv_usage.max(other.kv_usage);
        self.max_running = self.max_running.max(other.max_running);
        self.max_waiting = self.max_waiting.max(other.max_waiting);
        self.preemptions += other.preemptions;
        self.failures.extend(other.failures);
        self.n_scored += other.n_scored;
        self.n_failed += other.n_failed;
        self.score_sum += other.score_sum;
        self.score_square_sum += other.score_square_sum;
        self.n_cut += other.n_cut;
        self.n_mixed += other.n_mixed;
        self.completion_tokens += other.completion_tokens;
        self.turns += other.turns;
        self.truncated_tokens += other.truncated_tokens;
        self.kept_tokens += other.kept_tokens;
        self.max_kept = self.max_kept.max(other.max_kept);
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
    }

    /// Notes where the engine stands after a tick.
    pub(crate) fn observe(&mut self, now: &SchedulerStats) {
        self.kv_usage = self.kv_usage.max(now.n_held_blocks as f64 / now.n_blocks as f64);
        self.max_running = self.max_running.max(now.n_running);
        self.max_waiting = self.max_waiting.max(now.n_waiting);
    }

    /// Counts a rollout that is handed over.
    pub(crate) fn hand_over(&mut self, Scored { rollout, reward, .. }: &Scored) {
        match *reward {
            Reward::Score(score) => {
                self.n_scored += 1;
                self.score_sum += f64::from(score);
                self.score_square_sum += f64::from(score).powi(2);
            }
            Reward::Failed => self.n_failed += 1,
        }
        self.n_cut += usize::from(rollout.finish == FinishReason::Length);
        self.n_mixed += usize::from(rollout.versions.first() != rollout.versions.last());
        self.completion_tokens += rollout.turns.iter().map(|turn| turn.len() as u64).sum::<u64>();
        self.turns += rollout.turns.len() as u64;
        for &size in rollout.support.iter().flat_map(|support| support.view().sizes()) {
            self.truncated_tokens += u64::from(size > 0);
            self.kept_tokens += u64::from(size);
            self.max_kept = self.max_kept.max(size);
        }
        if rollout.index == 0 {
            self.prompt_tokens += rollout.prompt_tokens as u64;
            self.cached_tokens += rollout.cached_tokens as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use r3_core::ids::PolicyVersion;
    use r3_core::support::SupportRows;

    use super::*;
    use crate::fixtures::scored;

    #[test]
    fn batches_add_up_and_peaks_stay_peaks() {
        let batch = |n: usize| SampleStats {
            sampled_tokens: n as u64,
            prompt_tokens: n as u64,
            cached_tokens: n as u64,
            completion_tokens: n as u64,
            turns: n as u64,
            truncated_tokens: n as u64,
            kept_tokens: 10 * n as u64,
            max_kept: n as u32,
            reward_s: n as f64,
            kv_usage: n as f64,
            max_running: n,
            max_waiting: n,
            preemptions: n as u64,
            n_scored: n,
            n_failed: n,
            n_mixed: n,
            ..SampleStats::default()
        };
        let mut stats = batch(3);
        stats.add(batch(2));
        assert_eq!((stats.sampled_tokens, stats.prompt_tokens, stats.cached_tokens), (5, 5, 5));
        assert_eq!((stats.reward_s, stats.preemptions, stats.n_rollouts()), (5.0, 5, 10));
        assert_eq!((stats.kv_usage, stats.max_running, stats.max_waiting), (3.0, 3, 3));
        assert_eq!((stats.completion_tokens, stats.turns, stats.n_mixed), (5, 5, 5));
        assert_eq!((stats.truncated_tokens, stats.kept_tokens, stats.max_kept), (5, 50, 3));
    }

    #[test]
    fn what_is_handed_over_counts_and_a_prompt_counts_once_a_group() {
        let mut stats = SampleStats::default();
        for index in 0..2 {
            stats.hand_over(&scored(3, index, Reward::Score(0.5)));
        }
        let mut mixed = scored(3, 2, Reward::Failed);
        mixed.rollout.versions[1] = PolicyVersion(9);
        mixed.rollout.finish = FinishReason::Length;
        stats.hand_over(&mixed);
        assert_eq!((stats.n_rollouts(), stats.n_scored, stats.score_moments()), (3, 2, (0.5, 0.0)));
        assert_eq!((stats.n_mixed, stats.n_cut), (1, 1));
        assert_eq!((stats.completion_tokens, stats.turns, stats.prompt_tokens), (6, 3, 3));
    }

    #[test]
    fn what_draws_kept_is_counted_where_they_were_truncated() {
        let mut scored = scored(3, 0, Reward::Score(1.0));
        let mut supports = SupportRows::default();
        supports.push(&[4, 7, 9]);
        supports.push(&[]);
        scored.rollout.support = Some(supports);
        let mut stats = SampleStats::default();
        stats.hand_over(&scored);
        assert_eq!((stats.truncated_tokens, stats.kept_tokens, stats.max_kept), (1, 3, 3));
    }

    #[test]
    fn given_tokens_are_no_part_of_a_completion() {
        let mut scored = scored(3, 0, Reward::Score(1.0));
        scored.rollout.tokens.extend([6, 7, 8].map(r3_core::ids::TokenId));
        scored.rollout.turns.push(7..8);
        let mut stats = SampleStats::default();
        stats.hand_over(&scored);
        assert_eq!((stats.completion_tokens, stats.turns), (3, 2));
    }
}
