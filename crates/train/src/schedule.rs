//! The learning rate as a function of the optimiser steps taken.

use std::f64::consts::PI;

use r3_recipe::learning::{Schedule, Sft, Train};

/// Linear warm-up to a peak, the peak for a while, then a fall.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    /// Highest rate.
    pub peak: f64,
    /// Optimiser steps over which the rate rises.
    pub warmup_steps: u64,
    /// Optimiser step at which the fall starts.
    pub fall_start: u64,
    /// Optimiser steps of the whole run; from here on a falling rate stays at its end.
    pub total_steps: u64,
    /// How it falls.
    pub fall: Schedule,
    /// Share of the peak that a fall ends at.
    pub floor: f64,
}

impl LearningRate {
    /// The schedule of a reinforcement learning run of `total_steps` optimiser steps (`run.steps *
    /// mini_steps`).
    #[must_use]
    pub fn of_train(train: &Train, total_steps: u64) -> Self {
        let stable_steps = match train.schedule {
            Schedule::Wsd => total_steps.saturating_sub(train.decay_steps),
            Schedule::Constant | Schedule::Linear | Schedule::Cosine => 0,
        };
        Self {
            peak: train.lr,
            warmup_steps: train.warmup_steps,
            fall_start: stable_steps.max(train.warmup_steps),
            total_steps,
            fall: train.schedule,
            floor: train.min_lr_ratio,
        }
    }

    /// The schedule of a supervised warm start.
    #[must_use]
    pub fn of_sft(sft: &Sft) -> Self {
        Self {
            peak: sft.lr,
            warmup_steps: sft.warmup_steps,
            fall_start: sft.steps.saturating_sub(sft.decay_steps).max(sft.warmup_steps),
            total_steps: sft.steps,
            fall: if sft.decay_steps == 0 { Schedule::Constant } else { Schedule::Linear },
            floor: 0.0,
        }
    }

    /// The rate of the optimiser step that follows `done` others.
    ///
    /// The first step of a warm-up has `1 / warmup_steps` of the peak and its last one the peak; the last
    /// step of a fall is still above its end, so no step is wasted where that is 0.
    #[must_use]
    pub fn at(&self, done: u64) -> f64 {
        if done < self.warmup_steps {
            return self.peak * (done + 1) as f64 / self.warmup_steps as f64;
        }
        let fall_steps = self.total_steps.saturating_sub(self.fall_start).max(1);
        let fallen = (done.saturating_sub(self.fall_start) as f64 / fall_steps as f64).min(1.0);
        let left = match self.fall {
            Schedule::Constant => 1.0,
            Schedule::Linear | Schedule::Wsd => 1.0 - fallen,
            Schedule::Cosine => 0.5 * (1.0 + (PI * fallen).cos()),
        };
        self.peak * (self.floor + (1.0 - self.floor) * left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(fall: Schedule) -> Vec<f64> {
        let rate =
            LearningRate { peak: 8.0, warmup_steps: 2, fall_start: 2, total_steps: 6, fall, floor: 0.0 };
        (0..8).map(|done| rate.at(done)).collect()
    }

    #[test]
    fn warm_up_reaches_the_peak_and_constant_stays_there() {
        assert_eq!(rates(Schedule::Constant), [4.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0]);
    }

    #[test]
    fn linear_falls_to_zero_after_the_last_step() {
        assert_eq!(rates(Schedule::Linear), [4.0, 8.0, 8.0, 6.0, 4.0, 2.0, 0.0, 0.0]);
    }

    #[test]
    fn cosine_is_half_way_down_in_the_middle() {
        let rates = rates(Schedule::Cosine);
        assert_eq!((rates[2], rates[6]), (8.0, 0.0));
        assert!((rates[4] - 4.0).abs() < 1e-12);
    }

    #[test]
    fn a_warm_start_keeps_its_peak_until_the_decay() {
        let rate = LearningRate {
            peak: 1.0,
            warmup_steps: 0,
            fall_start: 6,
            total_steps: 10,
            fall: Schedule::Linear,
            floor: 0.0,
        };
        assert_eq!([5, 6, 8, 9].map(|done| rate.at(done)), [1.0, 1.0, 0.5, 0.25]);
    }

    #[test]
    fn a_stable_rate_falls_over_the_last_steps_and_down_to_its_floor() {
        let rates = |decay_steps, min_lr_ratio, schedule| {
            let train =
                Train { lr: 8.0, warmup_steps: 2, schedule, decay_steps, min_lr_ratio, ..Train::default() };
            let rate = LearningRate::of_train(&train, 8);
            (0..10).map(|done| rate.at(done)).collect::<Vec<_>>()
        };
        assert_eq!(rates(4, 0.0, Schedule::Wsd), [4.0, 8.0, 8.0, 8.0, 8.0, 6.0, 4.0, 2.0, 0.0, 0.0]);
        assert_eq!(rates(2, 0.5, Schedule::Wsd), [4.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 6.0, 4.0, 4.0]);
        // No fall begins in the warm-up, however long it should be.
        assert_eq!(rates(9, 0.0, Schedule::Wsd)[..4], [4.0, 8.0, 8.0, 8.0 * (1.0 - 1.0 / 6.0)]);
        let cosine = rates(0, 0.25, Schedule::Cosine);
        assert_eq!((cosine[5], cosine[9]), (8.0 * (0.25 + 0.75 * 0.5), 2.0));
        assert_eq!(rates(0, 0.25, Schedule::Constant)[9], 8.0);
    }
}
