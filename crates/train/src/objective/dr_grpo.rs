//! Dr. GRPO: GRPO without the two divisions that bias it, by a completion's length and by the group's spread.
//!
//! ```text
//! A_i = R_i - mean(R)
//! J   = 1/N sum_i 1/horizon sum_t min(r_it A_i, clip(r_it, 1 - clip, 1 + clip) A_i)
//! ```
//!
//! Source: "Understanding R1-Zero-Like Training", arXiv 2503.20783 section 3.1; the constant horizon is its listing 1, which
//! takes the generation budget.

use r3_recipe::algorithm::DrGrpo;

use super::Objective;
use crate::advantage::Estimator;
use crate::loss::aggregation::Aggregation;
use crate::loss::ratio::Ratio;
use crate::loss::surrogate::{Clip, Surrogate};

/// Dr. GRPO with the recipe's knobs and a horizon in tokens.
#[must_use]
pub fn objective(knobs: &DrGrpo, horizon: usize) -> Objective {
    Objective::of(
        Estimator::Group { normalise_std: false },
        Ratio::Token,
        Surrogate::clipped(Clip { low: knobs.clip, high: knobs.clip }),
        Aggregation::SequenceSum { horizon },
    )
}
