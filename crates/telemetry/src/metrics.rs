//! Every metric of r3, declared once: key, Prometheus name, unit, healthy range, meaning.
//!
//! Keys follow the field where it has a word (veRL's `actor/*` and `timing_s/*`, AReaL's `rollout_train_*`,
//! vLLM's engine gauges), so that dashboards and habits carry over. Ranges are where runs without trouble lie, with
//! a bf16 rollout, an f32 trainer and replay on; they are guides for readers, not limits that stop anything.

use std::ops::RangeInclusive;

use crate::metric::{Counter, DATASET, DatasetGauge, Gauge, Kind, Metric};
use crate::summary::FIELDS;

const ANY: RangeInclusive<f64> = f64::NEG_INFINITY..=f64::INFINITY;
const POSITIVE: RangeInclusive<f64> = 0.0..=f64::INFINITY;

macro_rules! metrics {
    ($($kind:ident $id:ident = $key:literal => $name:literal $([$label:ident = $value:literal])?,
       $unit:literal, $healthy:expr, $help:literal;)*) => {
        $(
            #[doc = concat!("`", $key, "`: ", $help)]
            pub const $id: $kind = $kind(&Metric {
                key: $key,
                name: $name,
                label: metrics!(@label $($label $value)?),
                kind: metrics!(@kind $kind),
                unit: $unit,
                healthy: $healthy,
                help: $help,
            });
        )*

        /// Every metric there is, in the order of the docs.
        pub const METRICS: &[&Metric] = &[$($id.0),*];
    };
    (@label) => { None };
    (@label $label:ident $value:literal) => { Some((stringify!($label), $value)) };
    (@kind Counter) => { Kind::Counter };
    (@kind $gauge:ident) => { Kind::Gauge };
}

metrics! {
    Gauge STEP = "step" => "r3_step", "batches", POSITIVE,
        "Batches trained on; each is train.mini_steps optimiser steps.";
    Gauge POLICY_VERSION = "policy_version" => "r3_policy_version", "steps", POSITIVE,
        "Optimiser steps inside the weights the engine samples with next.";

    Gauge TRAINED_PARAMETERS = "trained_parameters" => "r3_trained_parameters", "parameters", POSITIVE,
        "Numbers the optimiser changes: all of the model's, short of frozen ones, or those of train.lora's factors.";

    // Mismatch of rollout and trainer at equal weights (R3, arXiv 2510.11370), over the trained tokens that the trainer's
    // version sampled.
    Gauge K3_KL = "rollout_train_k3_kl" => "r3_rollout_train_k3_kl", "nats", 0.0..=1e-3,
        "Mean of ratio - 1 - ln(ratio), the k3 estimate of KL(rollout || trainer), at the weights that sampled the tokens.";
    Gauge ABS_DIFF_MEAN = "rollout_train_logprobs_abs_diff_mean" => "r3_rollout_train_logprobs_abs_diff" [stat = "mean"],
        "nats", 0.0..=0.02, "Mean absolute difference of trainer and rollout logprobs.";
    Gauge ABS_DIFF_STD = "rollout_train_logprobs_abs_diff_std" => "r3_rollout_train_logprobs_abs_diff" [stat = "std"],
        "nats", 0.0..=0.05, "Standard deviation of that difference.";
    Gauge ABS_DIFF_MAX = "rollout_train_logprobs_abs_diff_max" => "r3_rollout_train_logprobs_abs_diff" [stat = "max"],
        "nats", 0.0..=1.0, "Largest such difference of any token.";
    Gauge ABS_DIFF_P99 = "rollout_train_logprobs_abs_diff_p99" => "r3_rollout_train_logprobs_abs_diff" [stat = "p99"],
        "nats", 0.0..=0.2, "The difference that 99 of 100 tokens stay below.";
    Gauge EXTREME_FRAC_TAU2 = "rollout_train_extreme_frac_tau2" => "r3_rollout_train_extreme_frac" [tau = "2"],
        "share", 0.0..=1e-3, "Tokens whose probability differs by more than a factor of 2, F(2); it rises before a collapse.";
    Gauge MULT_PROB_ERROR = "token_mult_prob_error" => "r3_token_mult_prob_error", "ratio", 1.0..=1.05,
        "Mean of exp(absolute logprob difference); 1 when both sides agree.";
    Gauge PROBS_PEARSON = "training/rollout_actor_probs_pearson_corr" => "r3_rollout_actor_probs_pearson_corr",
        "correlation", 0.99..=1.0, "Pearson correlation of rollout and trainer probabilities of the sampled tokens.";
    Gauge ROLLOUT_IS_MEAN = "rollout_is_mean" => "r3_rollout_is" [stat = "mean"], "ratio", 0.95..=1.05,
        "Mean importance weight, trainer probability over rollout probability.";
    Gauge ROLLOUT_IS_MAX = "rollout_is_max" => "r3_rollout_is" [stat = "max"], "ratio", 0.0..=2.0,
        "Largest importance weight.";
    Gauge ROLLOUT_IS_EFF_SAMPLE_SIZE = "rollout_is_eff_sample_size" => "r3_rollout_is" [stat = "eff_sample_size"],
        "share", 0.9..=1.0, "Effective sample size of the weights over the number of tokens.";

    Gauge DISCREPANCY_TOKEN_LAYER = "router_discrepancy_token_layer_frac" => "r3_router_discrepancy" [level = "token_layer"],
        "share", 0.0..=0.15, "Pairs of token and MoE layer where the trainer's own router picks another expert set.";
    Gauge DISCREPANCY_TOKEN_ANY = "router_discrepancy_token_any_frac" => "r3_router_discrepancy" [level = "token_any"],
        "share", 0.0..=1.0, "Tokens where that happens in at least one layer.";
    Gauge DISCREPANCY_LAYERS_PER_TOKEN = "router_discrepancy_layers_per_token"
        => "r3_router_discrepancy" [level = "layers_per_token"],
        "layers", POSITIVE, "Mean number of layers of a token where that happens.";
    Gauge ROUTE_COVERAGE = "route_coverage" => "r3_route_coverage", "share", 1.0..=1.0,
        "Route rows of the batch that were recorded, over rows needed; less than 1 is a bug.";
    Gauge ROUTE_REPLACED = "route_replaced_frac" => "r3_route_replaced_frac", "share", 0.0..=0.1,
        "Replayed experts that scored below router_replay.threshold and gave way to the router's own.";
    Counter ROUTE_REPLAYED_ROWS = "route_replayed_rows" => "r3_route_rows_total" [state = "replayed"], "rows", POSITIVE,
        "Route rows handed to the trainer.";
    Counter ROUTE_UNSET_ROWS = "route_unset_rows" => "r3_route_rows_total" [state = "unset"], "rows", 0.0..=0.0,
        "Route rows that were needed and had never been written.";
    Counter ROUTE_STALE_REJECTS = "route_stale_rejects" => "r3_route_rows_total" [state = "stale"], "rows", POSITIVE,
        "Route rows refused because their slot had been written under another stamp.";

    Gauge PG_LOSS = "actor/pg_loss" => "r3_actor_pg_loss", "loss", ANY,
        "Policy-gradient loss, mean over the mini-steps.";
    Gauge PPO_KL = "actor/ppo_kl" => "r3_actor_ppo_kl", "nats", -0.05..=0.05,
        "Mean of old minus new policy logprob: how far the updates moved within the step; 0 at its first update.";
    Gauge PG_CLIPFRAC = "actor/pg_clipfrac" => "r3_actor_pg_clipfrac", "share", 0.0..=0.2,
        "Tokens whose ratio was clipped.";
    Gauge PG_CLIPFRAC_LOWER = "actor/pg_clipfrac_lower" => "r3_actor_pg_clipfrac_lower", "share", 0.0..=0.05,
        "Tokens that the dual clip stopped.";
    Gauge KL_LOSS = "actor/kl_loss" => "r3_actor_kl_loss", "nats", 0.0..=1.0,
        "KL to the reference policy, averaged like the loss, if it is part of the loss; 0 at the first update.";
    Gauge REWARD_KL = "actor/reward_kl_penalty" => "r3_actor_reward_kl_penalty", "nats", 0.0..=1.0,
        "KL from rollout to reference policy, mean over trained tokens, if it is taken out of the rewards.";
    Gauge CORRECTION_MEAN = "actor/correction_mean" => "r3_actor_correction_mean", "ratio", 0.8..=1.2,
        "Mean weight that objective.correction gives a token, dropped ones included.";
    Gauge CORRECTION_DROPPED = "actor/correction_dropped_frac" => "r3_actor_correction_dropped_frac", "share",
        0.0..=0.2, "Tokens that objective.correction drops.";
    Gauge ENTROPY = "actor/entropy" => "r3_actor_entropy", "nats", POSITIVE,
        "Mean entropy of the policy at trained tokens; near 0 it no longer explores.";
    Gauge GRAD_NORM = "actor/grad_norm" => "r3_actor_grad_norm", "norm", 0.0..=10.0,
        "Norm of the gradient before clipping.";
    Gauge LR = "actor/lr" => "r3_actor_lr", "rate", POSITIVE,
        "Learning rate of the last mini-step.";

    Gauge REWARD_MEAN = "reward/mean" => "r3_reward" [stat = "mean"], "reward", ANY,
        "Mean reward of the rollouts.";
    Gauge REWARD_STD = "reward/std" => "r3_reward" [stat = "std"], "reward", POSITIVE,
        "Standard deviation of the rewards.";
    Gauge REWARD_FAILED = "reward/failed" => "r3_reward_failed", "rollouts", 0.0..=0.0,
        "Rollouts of the step whose reward function failed; they leave their group.";
    Gauge FRAC_REWARD_ZERO_STD = "frac_reward_zero_std" => "r3_frac_reward_zero_std", "share", 0.0..=0.8,
        "Groups whose rewards are all equal: they say nothing about what is better.";
    Counter GROUPS_FILTERED = "groups_filtered_total" => "r3_groups_filtered_total", "groups", POSITIVE,
        "Groups that dynamic sampling sent back because their rewards are all equal.";
    Gauge GROUPS_MISSING = "groups_missing" => "r3_groups_missing", "groups", 0.0..=0.0,
        "Groups that a step lacks of rollout.groups, since dynamic sampling used up its batches.";
    Gauge TRUNCATED_MASKED = "truncated_masked" => "r3_truncated_masked", "rollouts", POSITIVE,
        "Rollouts of the batch that objective.truncated leaves out of the loss.";
    Counter STEPS_WITHOUT_UPDATE = "steps_without_update_total" => "r3_steps_without_update_total", "steps", 0.0..=0.0,
        "Steps that changed no weight: no group of theirs taught anything, or all their updates were skipped.";
    Counter UPDATES_SKIPPED = "updates_skipped_total" => "r3_updates_skipped_total", "steps", 0.0..=0.0,
        "Optimiser steps not made, since a loss or gradient was not finite and train.non_finite is skip.";
    Gauge STALENESS_MEAN = "trajectory_staleness_mean" => "r3_trajectory_staleness" [stat = "mean"], "steps", POSITIVE,
        "Trainer's version minus the rollout's oldest, mean over rollouts.";
    Gauge STALENESS_MAX = "trajectory_staleness_max" => "r3_trajectory_staleness" [stat = "max"], "steps", POSITIVE,
        "The same of the stalest rollout; never above the recipe's bound.";
    Gauge ROLLOUT_PARTIAL_RATIO = "rollout_partial_ratio" => "r3_rollout_partial_ratio", "share", 0.0..=1.0,
        "Rollouts that more than one policy version sampled, since they were in flight at a refit.";
    Gauge RESPONSE_LENGTH_MEAN = "response_length/mean" => "r3_response_length" [stat = "mean"], "tokens", POSITIVE,
        "Mean sampled tokens of a rollout.";
    Gauge NUM_TURNS_MEAN = "num_turns/mean" => "r3_num_turns" [stat = "mean"], "turns", POSITIVE,
        "Mean turns that a rollout sampled; 1 unless a wrong answer may be followed by another.";
    Gauge SUPPORT_SIZE_MEAN = "support_size/mean" => "r3_support_size" [stat = "mean"], "tokens", POSITIVE,
        "With truncated sampling: mean tokens that a draw kept, which the trainer scores it over, at 4 bytes each.";
    Gauge SUPPORT_SIZE_MAX = "support_size/max" => "r3_support_size" [stat = "max"], "tokens", POSITIVE,
        "With truncated sampling: most tokens that a draw kept.";
    Gauge RESPONSE_CLIP_RATIO = "response_length/clip_ratio" => "r3_response_length" [stat = "clip_ratio"],
        "share", 0.0..=0.1, "Completions cut off at max_new_tokens.";
    DatasetGauge VAL_CORE_MEAN = "val-core/<dataset>/mean@1" => "r3_val_core" [stat = "mean@1"], "share", 0.0..=1.0,
        "Held-out problems solved, one greedy answer each.";

    Gauge TIMING_GEN = "timing_s/gen" => "r3_phase_seconds" [phase = "gen"], "s", POSITIVE,
        "Seconds of sampling.";
    Gauge TIMING_REWARD = "timing_s/reward" => "r3_phase_seconds" [phase = "reward"], "s", POSITIVE,
        "Seconds of scoring.";
    Gauge TIMING_OLD_LOG_PROB = "timing_s/old_log_prob" => "r3_phase_seconds" [phase = "old_log_prob"], "s", POSITIVE,
        "Seconds of the forward that compares rollout and trainer.";
    Gauge TIMING_UPDATE_ACTOR = "timing_s/update_actor" => "r3_phase_seconds" [phase = "update_actor"], "s", POSITIVE,
        "Seconds of the trainer: the comparing forward (old_log_prob), then forward, backward and optimiser.";
    Gauge TIMING_UPDATE_WEIGHTS = "timing_s/update_weights" => "r3_phase_seconds" [phase = "update_weights"],
        "s", POSITIVE, "Seconds of the refit and its audit.";
    Gauge TIMING_TESTING = "timing_s/testing" => "r3_phase_seconds" [phase = "testing"], "s", POSITIVE,
        "Seconds of evaluation.";
    Gauge TIMING_SAVE = "timing_s/save" => "r3_phase_seconds" [phase = "save"], "s", POSITIVE,
        "Seconds of writing a checkpoint.";
    Gauge TIMING_STEP = "timing_s/step" => "r3_phase_seconds" [phase = "step"], "s", POSITIVE,
        "Seconds of the whole step.";
    Gauge ROLLOUT_TOKENS_PER_SECOND = "rollout_tokens_per_second" => "r3_rollout_tokens_per_second",
        "tokens/s", POSITIVE, "Sampled tokens over the seconds of sampling.";
    Gauge TRAIN_TOKENS_PER_SECOND = "train_tokens_per_second" => "r3_train_tokens_per_second",
        "tokens/s", POSITIVE, "Inputs of all rollouts that are trained on over the seconds of the trainer; one that is shared counts for each.";
    Gauge TRAIN_ROWS_SHARED = "train_rows_shared_frac" => "r3_train_rows_shared_frac", "share", 0.0..=1.0,
        "Inputs of the trainer that were computed for another rollout of the same prompt, over all inputs.";

    Gauge KV_CACHE_USAGE = "kv_cache_usage_perc" => "r3_kv_cache_usage_perc", "share", 0.0..=1.0,
        "KV blocks in use, over all; 1 means full.";
    Gauge KV_CACHE_CAPACITY = "kv_cache_capacity_tokens" => "r3_kv_cache_capacity_tokens", "tokens", POSITIVE,
        "Tokens whose keys, values and routes the KV memory holds at once.";
    Gauge ROUTE_BYTES_PER_TOKEN = "kv_cache_route_bytes_per_token" => "r3_kv_cache_route_bytes_per_token", "bytes", POSITIVE,
        "Bytes of the KV memory that the routes of a token take; 0 when none are recorded.";
    Gauge ROUTE_SHARE = "kv_cache_route_share" => "r3_kv_cache_route_share", "share", 0.0..=0.1,
        "Share of the KV memory that routes take.";
    Gauge PREFIX_CACHE_HIT_RATE = "prefix_cache_hit_rate" => "r3_prefix_cache_hit_rate", "share", 0.0..=1.0,
        "Prompt tokens that came from the prefix cache, over all prompt tokens.";
    Gauge REQUESTS_RUNNING = "num_requests_running" => "r3_num_requests_running", "sequences", POSITIVE,
        "Sequences in the engine's batch.";
    Gauge REQUESTS_WAITING = "num_requests_waiting" => "r3_num_requests_waiting", "sequences", POSITIVE,
        "Sequences waiting for room.";
    Counter PREEMPTIONS = "num_preemptions_total" => "r3_num_preemptions_total", "sequences", POSITIVE,
        "Times a sequence gave its KV blocks back and had to be prefilled again.";
    Gauge GROUPS_IN_FLIGHT = "num_groups_in_flight" => "r3_num_groups_in_flight", "groups", POSITIVE,
        "Groups that the refit found unfinished; at most rollout.over_sampling_groups.";
    Counter ROLLOUTS_RESUMED = "num_rollouts_resumed_total" => "r3_num_rollouts_resumed_total", "rollouts", POSITIVE,
        "Times a rollout was unfinished at a refit and went on under the new weights.";
    Gauge RING_USED_BYTES = "ring_used_bytes" => "r3_ring_used_bytes", "bytes", POSITIVE,
        "Bytes of the ring that hold unread frames.";
    Gauge MOE_MAX_VIO = "rollout/moe/max_vio/max" => "r3_moe_max_vio", "ratio", POSITIVE,
        "Load of the busiest expert over the mean load, less 1, in the worst layer. A token that rollouts share counts for each of them.";
}

/// `HELP` text of a Prometheus name: the sentence of its metric, or of each of them after its label.
#[must_use]
pub fn help_of(name: &str) -> String {
    let sentences: Vec<String> = METRICS
        .iter()
        .filter(|metric| metric.name == name)
        .map(|metric| match metric.label {
            Some((_, value)) => format!("{value}: {} ({})", metric.help.trim_end_matches('.'), metric.unit),
            None => format!("{} ({})", metric.help.trim_end_matches('.'), metric.unit),
        })
        .collect();
    sentences.join("; ")
}

/// `docs/metrics.md`.
#[must_use]
pub fn markdown() -> String {
    let mut text = String::from(
        "# Metrics\n\n\
         Generated from `crates/telemetry/src/metrics.rs` by `cargo run -p r3-telemetry --example metrics_md`.\n\n\
         Every step appends one line to `metrics.jsonl` under the keys below and sets the same values in Prometheus, at\n\
         `metrics.listen` while the run lasts. Counters are totals since the run began, in both. A share is a number from\n\
         0 to 1. Healthy is where runs without trouble lie; nothing stops when a value leaves it.\n\n\
         | key in `metrics.jsonl` | Prometheus | kind | unit | healthy | meaning |\n\
         | --- | --- | --- | --- | --- | --- |\n",
    );
    for metric in METRICS {
        let mut labels: Vec<String> = Vec::new();
        if metric.key.contains(DATASET) {
            labels.push("dataset=\"<dataset>\"".into());
        }
        if let Some((label, value)) = metric.label {
            labels.push(format!("{label}=\"{value}\""));
        }
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        text += &format!(
            "| `{}` | `{}{labels}` | {} | {} | {} | {} |\n",
            metric.key,
            metric.name,
            metric.kind,
            metric.unit,
            metric.healthy_range(),
            metric.help.replace('|', "\\|"),
        );
    }
    text += "\n## The line of `--json`\n\n\
             `r3 run RECIPE --json` ends stdout with one line, an object with the keys below, all numbers, or `null` where the\n\
             run did not measure it. `r3 compare RECIPE --json` prints `{\"on\": …, \"off\": …}` with such an object for each.\n\n\
             | key | meaning |\n| --- | --- |\n";
    for (key, meaning) in FIELDS {
        text += &format!("| `{key}` | {meaning} |\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn no_key_and_no_series_is_declared_twice() {
        let keys: BTreeSet<_> = METRICS.iter().map(|metric| metric.key).collect();
        let series: BTreeSet<_> = METRICS.iter().map(|metric| (metric.name, metric.label)).collect();
        assert_eq!((keys.len(), series.len()), (METRICS.len(), METRICS.len()));
    }

    #[test]
    fn metrics_of_one_name_share_kind_and_label() {
        for (a, b) in METRICS.iter().flat_map(|a| METRICS.iter().map(move |b| (a, b))) {
            if a.name == b.name {
                let labels = (a.label.map(|pair| pair.0), b.label.map(|pair| pair.0));
                assert_eq!((a.kind, labels.0), (b.kind, labels.1), "{} and {}", a.key, b.key);
            }
        }
    }

    #[test]
    fn names_follow_the_prometheus_conventions() {
        for metric in METRICS {
            let word = |name: &str| name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_'));
            assert!(metric.name.starts_with("r3_") && word(metric.name), "{}", metric.name);
            assert_eq!(metric.name.ends_with("_total"), metric.kind == Kind::Counter, "{}", metric.name);
            assert!(metric.help.ends_with('.') && metric.help.len() > 15, "{}", metric.key);
        }
    }

    #[test]
    fn the_committed_table_is_the_generated_one() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
        let committed = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            committed == markdown(),
            "docs/metrics.md is out of date: cargo run -p r3-telemetry --example metrics_md > docs/metrics.md"
        );
    }

    #[test]
    fn help_of_a_shared_name_names_each_label() {
        let help = help_of("r3_reward");
        assert!(
            help.starts_with("mean: Mean reward") && help.contains("; std: Standard deviation"),
            "{help}"
        );
    }
}
