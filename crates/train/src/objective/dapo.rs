//! DAPO: GRPO's advantage, a wider clip from above, every token weighs the same.
//!
//! ```text
//! J = 1/(sum_i |o_i|) sum_i sum_t min(r_it A_i, clip(r_it, 1 - clip_low, 1 + clip_high) A_i)
//! ```
//!
//! Its other two parts are not losses: groups without signal are sampled again (`dynamic_sampling`), and long completions
//! are [punished](crate::overlong).
//!
//! Source: DAPO, arXiv 2503.14476 equation 8, "Clip-Higher" and "Token-Level Policy Gradient Loss".

use r3_recipe::algorithm::Dapo;

use super::Objective;
use crate::advantage::Estimator;
use crate::loss::aggregation::Aggregation;
use crate::loss::ratio::Ratio;
use crate::loss::surrogate::{Clip, Surrogate};

/// DAPO with the recipe's knobs.
#[must_use]
pub fn objective(knobs: &Dapo) -> Objective {
    Objective::of(
        Estimator::Group { normalise_std: true },
        Ratio::Token,
        Surrogate::clipped(Clip { low: knobs.clip_low, high: knobs.clip_high }),
        Aggregation::TokenMean,
    )
}
