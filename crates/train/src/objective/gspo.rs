//! GSPO: one ratio a completion, clipped as a whole.
//!
//! ```text
//! s_i = exp(1/|o_i| sum_t log r_it)
//! J   = 1/N sum_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)
//! ```
//!
//! Source: GSPO, arXiv 2507.18071 equations 5 to 7, with the clip of section 5.1. Here every token of a completion carries
//! `s_i`, and the mean over its tokens gives back the one term of the paper. With an advantage a completion this is GSPO-token
//! (equation 13), too.

use r3_recipe::algorithm::Gspo;

use super::Objective;
use crate::advantage::Estimator;
use crate::loss::aggregation::Aggregation;
use crate::loss::ratio::Ratio;
use crate::loss::surrogate::{Clip, Surrogate};

/// GSPO with the recipe's knobs.
#[must_use]
pub fn objective(knobs: &Gspo) -> Objective {
    Objective::of(
        Estimator::Group { normalise_std: true },
        Ratio::SequenceMean,
        Surrogate::clipped(Clip { low: knobs.clip_low, high: knobs.clip_high }),
        Aggregation::SequenceMean,
    )
}
