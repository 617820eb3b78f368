//! Turns what a step returned into the metrics that are shown and kept.

use r3_telemetry::metrics;
use r3_telemetry::prometheus::Exporter;
use r3_telemetry::step_record::StepRecord;
use r3_train::batch::RoutesUse;
use r3_train::trainer::StepStats;

use crate::worker::{Evaluation, SampleStats};

/// Seconds of each phase of a step.
#[derive(Clone, Copy, Debug, Default)]
pub struct Timings {
    /// From the first prompt to the last frame.
    pub sample_s: f64,
    /// Of the trainer's time, the forwards that only compare it with the rollout.
    pub measure_s: f64,
    /// All of the trainer's time.
    pub train_s: f64,
    /// Refit and audit.
    pub refit_s: f64,
    /// Writing the newest checkpoint; 0 before the first.
    pub save_s: f64,
    /// The whole step, without evaluation and checkpoint.
    pub step_s: f64,
}

/// What a step did, as far as metrics go.
pub struct StepReport<'a> {
    /// Steps done, this one included.
    pub step: u64,
    /// The trainer's account.
    pub stats: &'a StepStats,
    /// The worker's account, over all batches of prompts.
    pub sampled: &'a SampleStats,
    /// Where the time went.
    pub timings: Timings,
    /// What routes are for in this run.
    pub routes: RoutesUse,
    /// Bytes of frames in the ring when the batch was complete.
    pub ring_used_bytes: u64,
}

impl StepReport<'_> {
    /// The step's gauges.
    #[must_use]
    pub fn record(&self) -> StepRecord {
        let mut record = StepRecord::new(self.step, self.stats.version);
        self.set_mismatch(&mut record);
        self.set_actor(&mut record);
        self.set_rollouts(&mut record);
        self.set_speed(&mut record);
        record
    }

    /// Adds the step's counts to the run's totals. `filtered` groups were sent back by dynamic sampling.
    pub fn count(&self, exporter: &Exporter, filtered: u64) {
        exporter.add(metrics::GROUPS_FILTERED, filtered);
        exporter.add(metrics::PREEMPTIONS, self.sampled.preemptions);
        if self.routes == RoutesUse::Replay {
            exporter.add(metrics::ROUTE_REPLAYED_ROWS, self.stats.batch.n_inputs as u64);
        }
    }

    fn set_mismatch(&self, record: &mut StepRecord) {
        let mismatch = &self.stats.mismatch;
        if mismatch.n_tokens == 0 {
            return;
        }
        record.set(metrics::K3_KL, mismatch.k3_kl);
        record.set(metrics::ABS_DIFF_MEAN, mismatch.abs_diff_mean);
        record.set(metrics::ABS_DIFF_STD, mismatch.abs_diff_std);
        record.set(metrics::ABS_DIFF_MAX, mismatch.abs_diff_max);
        record.set(metrics::ABS_DIFF_P99, mismatch.abs_diff_p99);
        record.set(metrics::EXTREME_FRAC_TAU2, mismatch.extreme_frac_tau2);
        record.set(metrics::MULT_PROB_ERROR, mismatch.token_mult_prob_error);
        record.set(metrics::ROLLOUT_IS_MEAN, mismatch.rollout_is_mean);
        record.set(metrics::ROLLOUT_IS_MAX, mismatch.rollout_is_max);
        record.set(metrics::ROLLOUT_IS_EFF_SAMPLE_SIZE, mismatch.rollout_is_eff_sample_size);
        if let Some(pearson) = mismatch.probs_pearson_corr {
            record.set(metrics::PROBS_PEARSON, pearson);
        }
        if let Some(router) = &mismatch.router {
            record.set(metrics::DISCREPANCY_TOKEN_LAYER, router.token_layer_frac);
            record.set(metrics::DISCREPANCY_TOKEN_ANY, router.token_any_frac);
            record.set(metrics::DISCREPANCY_LAYERS_PER_TOKEN, router.layers_per_token);
            // A frame with an unset row is refused when it is decoded, so what got here is whole.
            record.set(metrics::ROUTE_COVERAGE, 1.0);
        }
    }

    fn set_actor(&self, record: &mut StepRecord) {
        let StepStats { actor, load, mini_steps, .. } = self.stats;
        if *mini_steps == 0 {
            return;
        }
        record.set(metrics::PG_LOSS, actor.pg_loss);
        record.set(metrics::PPO_KL, actor.ppo_kl);
        record.set(metrics::PG_CLIPFRAC, actor.pg_clipfrac);
        record.set(metrics::ENTROPY, actor.entropy);
        record.set(metrics::GRAD_NORM, actor.grad_norm);
        record.set(metrics::LR, actor.lr);
        if let Some(load) = load {
            record.set(metrics::MOE_MAX_VIO, load.max_vio_max);
        }
    }

    fn set_rollouts(&self, record: &mut StepRecord) {
        let batch = &self.stats.batch;
        record.set(metrics::REWARD_MEAN, batch.reward_mean);
        record.set(metrics::REWARD_STD, batch.reward_std);
        record.set(metrics::REWARD_FAILED, batch.n_rewards_failed as f64);
        record.set(metrics::FRAC_REWARD_ZERO_STD, batch.n_groups_equal as f64 / batch.n_groups.max(1) as f64);
        record.set(metrics::STALENESS_MEAN, self.stats.staleness_mean);
        record.set(metrics::STALENESS_MAX, self.stats.staleness_max as f64);
        record.set(metrics::RESPONSE_LENGTH_MEAN, batch.response_length_mean);
        record.set(metrics::RESPONSE_CLIP_RATIO, batch.response_length_clip_ratio);
    }

    fn set_speed(&self, record: &mut StepRecord) {
        let Self { sampled, timings, .. } = self;
        record.set(metrics::TIMING_GEN, timings.sample_s);
        record.set(metrics::TIMING_REWARD, sampled.reward_s);
        record.set(metrics::TIMING_OLD_LOG_PROB, timings.measure_s);
        record.set(metrics::TIMING_UPDATE_ACTOR, timings.train_s);
        record.set(metrics::TIMING_SAVE, timings.save_s);
        record.set(metrics::TIMING_UPDATE_WEIGHTS, timings.refit_s);
        record.set(metrics::TIMING_STEP, timings.step_s);
        record.set(
            metrics::ROLLOUT_TOKENS_PER_SECOND,
            sampled.sampled_tokens as f64 / timings.sample_s.max(1e-9),
        );
        record.set(
            metrics::TRAIN_TOKENS_PER_SECOND,
            self.stats.batch.n_inputs as f64 / timings.train_s.max(1e-9),
        );
        record.set(metrics::KV_CACHE_USAGE, sampled.kv_usage);
        let hit_rate = sampled.cached_tokens as f64 / sampled.prompt_tokens.max(1) as f64;
        record.set(metrics::PREFIX_CACHE_HIT_RATE, hit_rate);
        record.set(metrics::REQUESTS_RUNNING, sampled.max_running as f64);
        record.set(metrics::REQUESTS_WAITING, sampled.max_waiting as f64);
        record.set(metrics::RING_USED_BYTES, self.ring_used_bytes as f64);
    }
}

/// Adds an evaluation to a step's record.
pub fn set_evaluation(record: &mut StepRecord, dataset: &str, evaluation: Evaluation) {
    record.set_dataset(metrics::VAL_CORE_MEAN, dataset, evaluation.accuracy);
    record.set(metrics::TIMING_TESTING, evaluation.seconds);
}
