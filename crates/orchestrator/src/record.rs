//! Turns what a step returned into the metrics that are shown and kept.

use r3_engine::memory::MemoryBudget;
use r3_telemetry::metrics;
use r3_telemetry::prometheus::Exporter;
use r3_telemetry::step_record::StepRecord;
use r3_train::batch::RoutesUse;
use r3_train::trainer::StepStats;

use crate::greedy::Evaluation;
use crate::sample_stats::SampleStats;

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
    /// Groups that dynamic sampling sent back.
    pub filtered: usize,
    /// Groups that the step lacks of those the recipe asks for.
    pub missing: usize,
    /// Groups and rollouts that the refit found unfinished.
    pub in_flight: (usize, usize),
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

    /// Adds the step's counts to the run's totals.
    pub fn count(&self, exporter: &Exporter) {
        exporter.add(metrics::GROUPS_FILTERED, self.filtered as u64);
        exporter.add(metrics::STEPS_WITHOUT_UPDATE, u64::from(self.stats.mini_steps == 0));
        exporter.add(metrics::UPDATES_SKIPPED, self.stats.skipped_steps as u64);
        exporter.add(metrics::PREEMPTIONS, self.sampled.preemptions);
        exporter.add(metrics::ROLLOUTS_RESUMED, self.in_flight.1 as u64);
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
        record.set(metrics::PG_CLIPFRAC_LOWER, actor.clip_frac_dual);
        let optional = [
            (metrics::KL_LOSS, actor.kl_loss),
            (metrics::REWARD_KL, actor.reward_kl),
            (metrics::CORRECTION_MEAN, actor.correction_mean),
            (metrics::CORRECTION_DROPPED, actor.correction_dropped_frac),
            (metrics::ROUTE_REPLACED, actor.replaced_frac),
        ];
        for (metric, value) in optional {
            if let Some(value) = value {
                record.set(metric, value);
            }
        }
        record.set(metrics::ENTROPY, actor.entropy);
        record.set(metrics::GRAD_NORM, actor.grad_norm);
        record.set(metrics::LR, actor.lr);
        if let Some(load) = load {
            record.set(metrics::MOE_MAX_VIO, load.max_vio_max);
        }
    }

    fn set_rollouts(&self, record: &mut StepRecord) {
        let Self { stats, sampled, filtered, .. } = self;
        let (n_rollouts, n_groups) = (sampled.n_rollouts(), stats.batch.n_groups + filtered);
        if n_rollouts == 0 {
            return;
        }
        // Of all that was sampled: the batch no longer holds the groups that dynamic sampling sent back.
        let (mean, std) = sampled.score_moments();
        record.set(metrics::REWARD_MEAN, mean);
        record.set(metrics::REWARD_STD, std);
        record.set(metrics::REWARD_FAILED, sampled.n_failed as f64);
        let n_equal = stats.batch.n_groups_equal + filtered;
        record.set(metrics::FRAC_REWARD_ZERO_STD, n_equal as f64 / n_groups.max(1) as f64);
        record.set(metrics::GROUPS_MISSING, self.missing as f64);
        record.set(metrics::TRUNCATED_MASKED, stats.batch.n_truncated_masked as f64);
        record.set(metrics::STALENESS_MEAN, stats.staleness_mean);
        record.set(metrics::STALENESS_MAX, stats.staleness_max as f64);
        record.set(metrics::ROLLOUT_PARTIAL_RATIO, sampled.n_mixed as f64 / n_rollouts as f64);
        record.set(metrics::RESPONSE_LENGTH_MEAN, sampled.completion_tokens as f64 / n_rollouts as f64);
        record.set(metrics::NUM_TURNS_MEAN, sampled.turns as f64 / n_rollouts as f64);
        if sampled.truncated_tokens > 0 {
            let mean = sampled.kept_tokens as f64 / sampled.truncated_tokens as f64;
            record.set(metrics::SUPPORT_SIZE_MEAN, mean);
            record.set(metrics::SUPPORT_SIZE_MAX, f64::from(sampled.max_kept));
        }
        record.set(metrics::RESPONSE_CLIP_RATIO, sampled.n_cut as f64 / n_rollouts as f64);
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
        let batch = &self.stats.batch;
        record.set(metrics::TRAIN_ROWS_SHARED, batch.n_shared as f64 / batch.n_inputs.max(1) as f64);
        record.set(metrics::KV_CACHE_USAGE, sampled.kv_usage);
        let hit_rate = sampled.cached_tokens as f64 / sampled.prompt_tokens.max(1) as f64;
        record.set(metrics::PREFIX_CACHE_HIT_RATE, hit_rate);
        record.set(metrics::REQUESTS_RUNNING, sampled.max_running as f64);
        record.set(metrics::REQUESTS_WAITING, sampled.max_waiting as f64);
        record.set(metrics::GROUPS_IN_FLIGHT, self.in_flight.0 as f64);
        record.set(metrics::RING_USED_BYTES, self.ring_used_bytes as f64);
    }
}

/// Adds what is the same at every step: what the engine's memory holds, and how much of the model is trained.
pub fn set_model(record: &mut StepRecord, memory: &MemoryBudget, n_trained: u64) {
    record.set(metrics::TRAINED_PARAMETERS, n_trained as f64);
    record.set(metrics::KV_CACHE_CAPACITY, memory.capacity_tokens() as f64);
    record.set(metrics::ROUTE_BYTES_PER_TOKEN, memory.route_bytes_per_token());
    record.set(metrics::ROUTE_SHARE, memory.route_share());
}

/// Adds an evaluation to a step's record.
pub fn set_evaluation(record: &mut StepRecord, dataset: &str, evaluation: Evaluation) {
    record.set_dataset(metrics::VAL_CORE_MEAN, dataset, evaluation.accuracy);
    record.set(metrics::TIMING_TESTING, evaluation.seconds);
}

#[cfg(test)]
mod tests {
    use r3_core::ids::PolicyVersion;
    use r3_train::batch_stats::BatchStats;
    use r3_train::loads::LoadStats;
    use r3_train::mismatch::{MismatchStats, RouterDiscrepancy};
    use r3_train::trainer::ActorStats;
    use serde_json::Value;

    use super::*;

    /// A step in which nothing happened and which took no time.
    fn nothing() -> StepStats {
        StepStats {
            version: PolicyVersion(4),
            mini_steps: 0,
            skipped_steps: 0,
            batch: BatchStats::default(),
            mismatch: MismatchStats::default(),
            actor: ActorStats::default(),
            load: None,
            staleness_mean: 0.0,
            staleness_max: 0,
        }
    }

    fn record(stats: &StepStats, sampled: &SampleStats) -> StepRecord {
        let (timings, routes) = (Timings::default(), RoutesUse::Replay);
        StepReport {
            step: 3,
            stats,
            sampled,
            timings,
            routes,
            filtered: 0,
            missing: 0,
            in_flight: (0, 0),
            ring_used_bytes: 0,
        }
        .record()
    }

    /// The record's keys; every value has to be finite, since others are written as null.
    fn finite_keys(record: &StepRecord) -> Vec<String> {
        let Value::Object(values) = serde_json::to_value(record).unwrap() else {
            panic!("a record is an object")
        };
        for (key, value) in &values {
            assert!(value.is_number(), "{key} is {value}");
        }
        values.into_iter().map(|(key, _)| key).collect()
    }

    #[test]
    fn a_step_without_rollouts_has_readings_of_the_machine_only() {
        let keys = finite_keys(&record(&nothing(), &SampleStats::default()));
        let is_the_machines = |key: &&str| key.starts_with("timing_s/") || key.ends_with("_per_second");
        let (machine, other): (Vec<&str>, Vec<&str>) =
            keys.iter().map(String::as_str).partition(is_the_machines);
        assert!(machine.len() > 5);
        let expected = [
            "step",
            "kv_cache_usage_perc",
            "num_groups_in_flight",
            "num_requests_running",
            "num_requests_waiting",
            "policy_version",
            "prefix_cache_hit_rate",
            "ring_used_bytes",
            "train_rows_shared_frac",
        ];
        assert_eq!(other, expected);
    }

    #[test]
    fn every_gauge_of_a_step_is_finite_though_it_took_no_time() {
        let stats = StepStats {
            mini_steps: 1,
            batch: BatchStats {
                n_groups: 1,
                n_groups_equal: 1,
                n_rollouts: 2,
                n_inputs: 9,
                n_shared: 3,
                ..BatchStats::default()
            },
            mismatch: MismatchStats {
                n_tokens: 5,
                router: Some(RouterDiscrepancy::default()),
                ..MismatchStats::default()
            },
            load: Some(LoadStats::default()),
            ..nothing()
        };
        let sampled = SampleStats { sampled_tokens: 7, n_scored: 2, ..SampleStats::default() };
        let step = record(&stats, &sampled);
        let keys = finite_keys(&step);
        assert!(keys.len() > 30, "{keys:?}");
        assert_eq!(step.get(metrics::FRAC_REWARD_ZERO_STD), Some(1.0));
        assert_eq!(step.get(metrics::PREFIX_CACHE_HIT_RATE), Some(0.0));
        assert_eq!(step.get(metrics::TRAIN_ROWS_SHARED), Some(1.0 / 3.0));
        assert_eq!(step.get(metrics::PROBS_PEARSON), None, "it has no value where nothing varies");
        assert_eq!(step.get(metrics::ROUTE_COVERAGE), Some(1.0));
    }

    #[test]
    fn a_step_that_trained_nothing_still_says_what_was_sampled() {
        let batch = BatchStats { n_groups: 2, n_groups_equal: 2, ..BatchStats::default() };
        let sampled =
            SampleStats { n_scored: 4, score_sum: 2.0, score_square_sum: 2.0, ..SampleStats::default() };
        let step = record(&StepStats { batch, ..nothing() }, &sampled);
        assert_eq!(step.get(metrics::REWARD_MEAN), Some(0.5));
        assert!((step.get(metrics::REWARD_STD).unwrap() - (1.0_f64 / 3.0).sqrt()).abs() < 1e-12);
        assert_eq!((step.get(metrics::PG_LOSS), step.get(metrics::K3_KL)), (None, None));
    }

    #[test]
    fn groups_that_were_sent_back_count_among_those_without_signal() {
        let batch = BatchStats { n_groups: 4, n_groups_equal: 0, ..BatchStats::default() };
        let stats = StepStats { batch, ..nothing() };
        let sampled = SampleStats { n_scored: 10, ..SampleStats::default() };
        let (timings, routes) = (Timings::default(), RoutesUse::Replay);
        let report = StepReport {
            step: 1,
            stats: &stats,
            sampled: &sampled,
            timings,
            routes,
            filtered: 12,
            missing: 0,
            in_flight: (0, 0),
            ring_used_bytes: 0,
        };
        assert_eq!(report.record().get(metrics::FRAC_REWARD_ZERO_STD), Some(0.75));
    }

    #[test]
    fn an_evaluation_is_filed_under_its_dataset() {
        let mut record = StepRecord::new(0, PolicyVersion(0));
        set_evaluation(&mut record, "sums", Evaluation { problems: 4, accuracy: 0.75, seconds: 2.0 });
        assert_eq!(record.get_dataset(metrics::VAL_CORE_MEAN, "sums"), Some(0.75));
        assert_eq!(record.get(metrics::TIMING_TESTING), Some(2.0));
    }
}
