//! The one line a step prints.

use crate::format::{duration, or_missing, percent, short};
use crate::metrics::{
    ABS_DIFF_MEAN, DISCREPANCY_TOKEN_LAYER, GRAD_NORM, K3_KL, PG_LOSS, REWARD_MEAN,
    ROLLOUT_TOKENS_PER_SECOND, TIMING_STEP, TRAIN_TOKENS_PER_SECOND, VAL_CORE_MEAN,
};
use crate::step_record::StepRecord;

/// The line of one step out of `n_steps`. Columns keep their place from step to step; the held-out accuracy comes last,
/// since only some steps measure it. Step 0 is the evaluation before the first update and has nothing else to show.
#[must_use]
pub fn step_line(record: &StepRecord, n_steps: u64) -> String {
    let n_digits = n_steps.to_string().len();
    let accuracy = record.dataset_mean(VAL_CORE_MEAN).map(|share| format!("  held-out {}", percent(share)));
    let accuracy = accuracy.unwrap_or_default();
    if record.step() == 0 {
        return format!("step {:>n_digits$}/{n_steps}{accuracy}", 0);
    }
    let share = |gauge| or_missing(record.get(gauge), percent);
    let number = |gauge| or_missing(record.get(gauge), short);
    format!(
        "step {:>n_digits$}/{n_steps}  reward {:>5}  kl {:>6}  |Δ| {:>6}  flips {:>5}  loss {:>7}  grad {:>5}  \
         gen {:>5} tok/s  train {:>5} tok/s  {:>6}{accuracy}",
        record.step(),
        number(REWARD_MEAN),
        number(K3_KL),
        number(ABS_DIFF_MEAN),
        share(DISCREPANCY_TOKEN_LAYER),
        number(PG_LOSS),
        number(GRAD_NORM),
        number(ROLLOUT_TOKENS_PER_SECOND),
        number(TRAIN_TOKENS_PER_SECOND),
        or_missing(record.get(TIMING_STEP), duration),
    )
}

#[cfg(test)]
mod tests {
    use r3_core::ids::PolicyVersion;

    use super::*;

    fn record(step: u64) -> StepRecord {
        let mut record = StepRecord::new(step, PolicyVersion(step));
        let values = [
            (REWARD_MEAN, 0.53),
            (K3_KL, 1.24e-5),
            (ABS_DIFF_MEAN, 1.91e-3),
            (DISCREPANCY_TOKEN_LAYER, 0.031),
            (PG_LOSS, -0.0123),
            (GRAD_NORM, 0.43),
            (ROLLOUT_TOKENS_PER_SECOND, 12_140.0),
            (TRAIN_TOKENS_PER_SECOND, 8_400.0),
            (TIMING_STEP, 0.94),
        ];
        for (gauge, value) in values {
            record.set(gauge, value);
        }
        record
    }

    #[test]
    fn steps_line_up_under_each_other() {
        let mut evaluated = record(10);
        evaluated.set_dataset(VAL_CORE_MEAN, "arithmetic", 0.612);
        evaluated.set(PG_LOSS, 0.5);
        let bare = StepRecord::new(11, PolicyVersion(11));
        let mut before = StepRecord::new(0, PolicyVersion(0));
        before.set_dataset(VAL_CORE_MEAN, "arithmetic", 0.27);
        let lines = [
            step_line(&before, 30),
            step_line(&record(9), 30),
            step_line(&evaluated, 30),
            step_line(&bare, 30),
        ];
        insta::assert_snapshot!(lines.join("\n"), @r"
        step  0/30  held-out 27.0%
        step  9/30  reward  0.53  kl 1.2e-5  |Δ| 1.9e-3  flips  3.1%  loss  -0.012  grad  0.43  gen 12.1k tok/s  train  8.4k tok/s   0.9 s
        step 10/30  reward  0.53  kl 1.2e-5  |Δ| 1.9e-3  flips  3.1%  loss    0.50  grad  0.43  gen 12.1k tok/s  train  8.4k tok/s   0.9 s  held-out 61.2%
        step 11/30  reward     -  kl      -  |Δ|      -  flips     -  loss       -  grad     -  gen     - tok/s  train     - tok/s       -
        ");
    }
}
