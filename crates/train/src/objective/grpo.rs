//! GRPO: advantages relative to the group, a clipped ratio by token, every completion weighs the same.
//!
//! ```text
//! A_i = (R_i - mean(R)) / (std(R) + 1e-6)
//! J   = 1/N sum_i 1/|o_i| sum_t min(r_it A_i, clip(r_it, 1 - clip, 1 + clip) A_i)
//! ```
//!
//! Source: DeepSeekMath, arXiv 2402.03300 equation 3 and section 4.1.2; DeepSeek-R1, arXiv 2501.12948 equation 1. Their KL
//! term is the recipe's to add. `N` counts the completions of the optimiser step instead of a group's.

use r3_recipe::algorithm::Grpo;

use super::Objective;
use crate::advantage::Estimator;
use crate::loss::aggregation::Aggregation;
use crate::loss::ratio::Ratio;
use crate::loss::surrogate::{Clip, Surrogate};

/// GRPO with the recipe's knobs.
#[must_use]
pub fn objective(knobs: &Grpo) -> Objective {
    Objective::of(
        Estimator::Group { normalise_std: knobs.std_normalise },
        Ratio::Token,
        Surrogate::clipped(Clip { low: knobs.clip, high: knobs.clip }),
        Aggregation::SequenceMean,
    )
}
