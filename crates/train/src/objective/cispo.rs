//! CISPO: clips the importance weight and not the update, so that every token keeps its gradient.
//!
//! ```text
//! J = 1/(sum_i |o_i|) sum_i sum_t sg(clip(r_it, 1 - clip_low, 1 + clip_high)) A_i log policy_it
//! ```
//!
//! Source: MiniMax-M1, arXiv 2506.13585 equations 4 and 5. The paper sets no lower bound.

use r3_recipe::algorithm::Cispo;

use super::Objective;
use crate::advantage::Estimator;
use crate::loss::aggregation::Aggregation;
use crate::loss::ratio::Ratio;
use crate::loss::surrogate::{Clip, Surrogate};

/// CISPO with the recipe's knobs.
#[must_use]
pub fn objective(knobs: &Cispo) -> Objective {
    // A ratio is above 0, so a bound of 0 bounds nothing.
    let clip = Clip { low: knobs.clip_low.unwrap_or(1.0), high: knobs.clip_high };
    Objective::of(
        Estimator::Group { normalise_std: true },
        Ratio::Token,
        Surrogate::Detached { clip },
        Aggregation::TokenMean,
    )
}
