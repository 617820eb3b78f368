//! RLOO: REINFORCE on whole completions, each against the mean of the others.
//!
//! ```text
//! A_i = R_i - 1/(G - 1) sum_(j != i) R_j
//! J   = 1/N sum_i min(s_i A_i, clip(s_i, 1 - clip, 1 + clip) A_i),  s_i = exp(sum_t log r_it)
//! ```
//!
//! Source: "Back to Basics", arXiv 2402.14740 equation 9 (after Kool et al. 2019). The paper samples with the weights it updates,
//! where `s_i` is 1 and the gradient is its `A_i grad log policy(o_i)`; ratio and clip are for updates after the first.

use r3_recipe::algorithm::Rloo;

use super::Objective;
use crate::advantage::Estimator;
use crate::loss::aggregation::Aggregation;
use crate::loss::ratio::Ratio;
use crate::loss::surrogate::{Clip, Surrogate};

/// RLOO with the recipe's knobs.
#[must_use]
pub fn objective(knobs: &Rloo) -> Objective {
    Objective::of(
        Estimator::LeaveOneOut,
        Ratio::Sequence,
        Surrogate::clipped(Clip { low: knobs.clip, high: knobs.clip }),
        // A completion is one action: the mean over tokens that share its ratio counts it once.
        Aggregation::SequenceMean,
    )
}
