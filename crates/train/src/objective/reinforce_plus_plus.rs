//! REINFORCE++: PPO's surrogate without a critic; advantages are whitened over the batch instead of the group.
//!
//! ```text
//! A'_i = R_i                       or, with the group as baseline, R_i - mean(R)
//! A_i  = (A'_i - mean(A')) / (std(A') + 1e-6)     over all trained tokens of the batch
//! J    = 1/(sum_i |o_i|) sum_i sum_t min(r_it A_i, clip(r_it, 1 - clip, 1 + clip) A_i)
//! ```
//!
//! Source: REINFORCE++, arXiv 2501.03262 section 3. Its first form also takes a KL out of the reward, its second adds one to
//! the loss; both are the recipe's to add.

use r3_recipe::algorithm::{Baseline, ReinforcePlusPlus};

use super::Objective;
use crate::advantage::Estimator;
use crate::loss::aggregation::Aggregation;
use crate::loss::ratio::Ratio;
use crate::loss::surrogate::{Clip, Surrogate};

/// REINFORCE++ with the recipe's knobs.
#[must_use]
pub fn objective(knobs: &ReinforcePlusPlus) -> Objective {
    Objective::of(
        Estimator::Batch { group_baseline: knobs.baseline == Baseline::Group },
        Ratio::Token,
        Surrogate::clipped(Clip { low: knobs.clip, high: knobs.clip }),
        Aggregation::TokenMean,
    )
}
