//! What a run came to: the table at its end, and the line of `--json`.

use r3_core::count::counted;
use serde::Serialize;

use crate::format::{MISSING, duration, or_missing, percent, short};
use crate::metric::{Gauge, Kind};
use crate::metrics::{
    ABS_DIFF_MEAN, DISCREPANCY_TOKEN_ANY, DISCREPANCY_TOKEN_LAYER, EXTREME_FRAC_TAU2, K3_KL, METRICS,
    REWARD_MEAN, ROLLOUT_TOKENS_PER_SECOND, TIMING_GEN, TIMING_UPDATE_ACTOR, TRAIN_TOKENS_PER_SECOND,
    VAL_CORE_MEAN,
};
use crate::step_record::StepRecord;

/// A run in a dozen numbers. The fields are the keys of `r3 run --json`; what was not measured is `null`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunSummary {
    /// Optimiser steps.
    pub steps: u64,
    /// Wall time of the whole run, in seconds.
    pub seconds: f64,
    /// Held-out accuracy before the first step, a share.
    pub eval_before: Option<f64>,
    /// Last held-out accuracy, a share.
    pub eval_after: Option<f64>,
    /// Mean over the steps, in nats.
    pub rollout_train_k3_kl: Option<f64>,
    /// Mean over the steps, in nats.
    pub rollout_train_logprobs_abs_diff_mean: Option<f64>,
    /// Mean over the steps, a share of tokens.
    pub rollout_train_extreme_frac_tau2: Option<f64>,
    /// Mean over the steps, a share of pairs of token and layer.
    pub router_discrepancy_token_layer_frac: Option<f64>,
    /// Mean over the steps, a share of tokens.
    pub router_discrepancy_token_any_frac: Option<f64>,
    /// All sampled tokens over all seconds of sampling.
    pub rollout_tokens_per_second: Option<f64>,
    /// All trained tokens over all seconds of training.
    pub train_tokens_per_second: Option<f64>,
}

/// Key and meaning of each field, for the docs.
pub const FIELDS: &[(&str, &str)] = &[
    ("steps", "batches of rollouts trained on; with `metrics.jsonl`, those before a `--resume` too"),
    ("seconds", "wall time of this process"),
    ("eval_before", "held-out accuracy before the first step, a share"),
    ("eval_after", "last held-out accuracy, a share"),
    ("rollout_train_k3_kl", "mean over the steps, nats"),
    ("rollout_train_logprobs_abs_diff_mean", "mean over the steps, nats"),
    ("rollout_train_extreme_frac_tau2", "mean over the steps, a share of tokens"),
    ("router_discrepancy_token_layer_frac", "mean over the steps, a share of pairs of token and MoE layer"),
    ("router_discrepancy_token_any_frac", "mean over the steps, a share of tokens"),
    ("rollout_tokens_per_second", "all sampled tokens over all seconds of sampling"),
    ("train_tokens_per_second", "all trained tokens over all seconds of training"),
];

impl RunSummary {
    /// Summarises the records of a run, in order; the one of step 0, if any, holds the evaluation before the first update.
    #[must_use]
    pub fn new(records: &[StepRecord], seconds: f64) -> Self {
        let before = records.first().filter(|record| record.step() == 0);
        Self {
            steps: records.iter().filter(|record| record.step() > 0).count() as u64,
            seconds,
            eval_before: before.and_then(|record| record.dataset_mean(VAL_CORE_MEAN)),
            eval_after: records.iter().rev().find_map(|record| record.dataset_mean(VAL_CORE_MEAN)),
            rollout_train_k3_kl: mean(records, K3_KL),
            rollout_train_logprobs_abs_diff_mean: mean(records, ABS_DIFF_MEAN),
            rollout_train_extreme_frac_tau2: mean(records, EXTREME_FRAC_TAU2),
            router_discrepancy_token_layer_frac: mean(records, DISCREPANCY_TOKEN_LAYER),
            router_discrepancy_token_any_frac: mean(records, DISCREPANCY_TOKEN_ANY),
            rollout_tokens_per_second: rate(records, ROLLOUT_TOKENS_PER_SECOND, TIMING_GEN),
            train_tokens_per_second: rate(records, TRAIN_TOKENS_PER_SECOND, TIMING_UPDATE_ACTOR),
        }
    }
}

/// The table at the end of a run.
#[must_use]
pub fn table(records: &[StepRecord], seconds: f64) -> String {
    let summary = RunSummary::new(records, seconds);
    let number = |value| or_missing(value, short);
    let share = |value| or_missing(value, percent);
    let rewards: Vec<f64> = records.iter().filter_map(|record| record.get(REWARD_MEAN)).collect();
    let rows = [
        ("steps", format!("{} in {}", summary.steps, duration(seconds))),
        ("held-out accuracy", change(summary.eval_before, summary.eval_after)),
        ("reward", format!("{} -> {}", number(rewards.first().copied()), number(rewards.last().copied()))),
        ("KL, rollout to trainer", format!("{} nats", number(summary.rollout_train_k3_kl))),
        ("mean |Δ logprob|", format!("{} nats", number(summary.rollout_train_logprobs_abs_diff_mean))),
        ("extreme tokens, F(2)", number(summary.rollout_train_extreme_frac_tau2)),
        (
            "routes that differ",
            format!(
                "{} of token-layers, {} of tokens",
                share(summary.router_discrepancy_token_layer_frac),
                share(summary.router_discrepancy_token_any_frac)
            ),
        ),
        (
            "throughput",
            format!(
                "rollout {} tok/s, train {} tok/s",
                number(summary.rollout_tokens_per_second),
                number(summary.train_tokens_per_second)
            ),
        ),
    ];
    let mut text = String::new();
    for (name, value) in rows {
        text += &format!("  {name:<24}{value}\n");
    }
    for remark in remarks(records) {
        text += &format!("  note: {remark}\n");
    }
    text
}

/// `27.0% -> 97.1% (+70.1 points)`.
fn change(before: Option<f64>, after: Option<f64>) -> String {
    match (before, after) {
        (Some(before), Some(after)) => {
            format!("{} -> {} ({:+.1} points)", percent(before), percent(after), 100.0 * (after - before))
        }
        (None, None) => MISSING.into(),
        (before, after) => format!("{} -> {}", or_missing(before, percent), or_missing(after, percent)),
    }
}

/// One remark for each gauge that left its healthy range.
fn remarks(records: &[StepRecord]) -> Vec<String> {
    let gauges = METRICS.iter().filter(|metric| metric.kind == Kind::Gauge).map(|metric| Gauge(metric));
    let remark = |gauge: Gauge| {
        let values: Vec<f64> = records.iter().filter_map(|record| record.get(gauge)).collect();
        let outside: Vec<f64> =
            values.iter().copied().filter(|value| !gauge.0.healthy.contains(value)).collect();
        let last = outside.last()?;
        Some(format!(
            "{} left its healthy range ({}) in {} of {}, last {}",
            gauge.0.key,
            gauge.0.healthy_range(),
            outside.len(),
            counted(values.len(), "step"),
            if last.is_finite() { format!("with {}", short(*last)) } else { "without a finite value".into() }
        ))
    };
    gauges.filter_map(remark).collect()
}

fn mean(records: &[StepRecord], gauge: Gauge) -> Option<f64> {
    let values: Vec<f64> = records.iter().filter_map(|record| record.get(gauge)).collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Weighs each step's rate by its seconds, which is all tokens over all seconds.
fn rate(records: &[StepRecord], tokens_per_second: Gauge, seconds: Gauge) -> Option<f64> {
    let pairs = records.iter().filter_map(|record| record.get(tokens_per_second).zip(record.get(seconds)));
    let (tokens, seconds) =
        pairs.fold((0.0, 0.0), |(tokens, total), (rate, s)| (tokens + rate * s, total + s));
    if seconds > 0.0 { Some(tokens / seconds) } else { mean(records, tokens_per_second) }
}

#[cfg(test)]
mod tests {
    use r3_core::ids::PolicyVersion;

    use super::*;
    use crate::metrics::MULT_PROB_ERROR;

    fn run() -> Vec<StepRecord> {
        let mut before = StepRecord::new(0, PolicyVersion(0));
        before.set_dataset(VAL_CORE_MEAN, "arithmetic", 0.27);
        let mut records = vec![before];
        for step in 1..=4_u32 {
            let at = f64::from(step);
            let mut record = StepRecord::new(u64::from(step), PolicyVersion(u64::from(step)));
            let values = [
                (K3_KL, 2.5e-5),
                (ABS_DIFF_MEAN, 2e-3),
                (EXTREME_FRAC_TAU2, 0.0),
                (DISCREPANCY_TOKEN_LAYER, 0.03),
                (DISCREPANCY_TOKEN_ANY, 0.11),
                (REWARD_MEAN, 0.2 * at),
                (MULT_PROB_ERROR, 1.0 + 0.02 * at),
                (ROLLOUT_TOKENS_PER_SECOND, 1000.0 * at),
                (TIMING_GEN, [4.0, 2.0, 1.0, 1.0][step as usize - 1]),
            ];
            values.into_iter().for_each(|(gauge, value)| record.set(gauge, value));
            records.push(record);
        }
        records[4].set_dataset(VAL_CORE_MEAN, "arithmetic", 0.97);
        records
    }

    #[test]
    fn the_table_of_a_run() {
        insta::assert_snapshot!(table(&run(), 62.04), @r"
        steps                   4 in 62.0 s
        held-out accuracy       27.0% -> 97.0% (+70.0 points)
        reward                  0.20 -> 0.80
        KL, rollout to trainer  2.5e-5 nats
        mean |Δ logprob|        2.0e-3 nats
        extreme tokens, F(2)    0
        routes that differ      3.0% of token-layers, 11.0% of tokens
        throughput              rollout 1.9k tok/s, train - tok/s
        note: token_mult_prob_error left its healthy range (1 to 1.05) in 2 of 4 steps, last with 1.08
        ");
    }

    #[test]
    fn a_value_that_is_not_finite_is_said_in_words() {
        let mut records = run();
        records[4].set(MULT_PROB_ERROR, f64::INFINITY);
        let text = table(&records, 1.0);
        assert!(text.ends_with(" in 2 of 4 steps, last without a finite value\n"), "{text}");
    }

    #[test]
    fn the_json_line_has_every_documented_key() {
        insta::assert_snapshot!(serde_json::to_string(&RunSummary::new(&run(), 62.5)).unwrap(), @r#"{"steps":4,"seconds":62.5,"eval_before":0.27,"eval_after":0.97,"rollout_train_k3_kl":0.000025,"rollout_train_logprobs_abs_diff_mean":0.002,"rollout_train_extreme_frac_tau2":0.0,"router_discrepancy_token_layer_frac":0.03,"router_discrepancy_token_any_frac":0.11,"rollout_tokens_per_second":1875.0,"train_tokens_per_second":null}"#);
        let empty = RunSummary::new(&[], 0.0);
        insta::assert_snapshot!(serde_json::to_string(&empty).unwrap(), @r#"{"steps":0,"seconds":0.0,"eval_before":null,"eval_after":null,"rollout_train_k3_kl":null,"rollout_train_logprobs_abs_diff_mean":null,"rollout_train_extreme_frac_tau2":null,"router_discrepancy_token_layer_frac":null,"router_discrepancy_token_any_frac":null,"rollout_tokens_per_second":null,"train_tokens_per_second":null}"#);
    }

    #[test]
    fn the_docs_list_the_keys_in_order() {
        let json = serde_json::to_value(RunSummary::new(&run(), 1.0)).unwrap();
        let keys: Vec<_> = json.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, FIELDS.iter().map(|field| field.0).collect::<Vec<_>>());
    }

    /// As after a resume without `metrics.jsonl`.
    #[test]
    fn without_step_0_nothing_is_known_of_the_accuracy_before_it() {
        let summary = RunSummary::new(&run()[1..], 1.0);
        assert_eq!((summary.eval_before, summary.eval_after), (None, Some(0.97)));
        assert!(table(&run()[1..], 1.0).contains("\n  held-out accuracy       - -> 97.0%\n"));
        let summary = RunSummary::new(&run()[..1], 1.0);
        assert_eq!((summary.eval_before, summary.eval_after), (Some(0.27), Some(0.27)));
    }

    #[test]
    fn throughput_is_all_tokens_over_all_seconds() {
        let summary = RunSummary::new(&run(), 1.0);
        let (tokens, seconds) = (4.0 * 1000.0 + 2.0 * 2000.0 + 3000.0 + 4000.0, 8.0);
        assert_eq!(summary.rollout_tokens_per_second, Some(tokens / seconds));
    }
}
