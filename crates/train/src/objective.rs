//! What a step optimises: the recipe's algorithm as plain numbers.

use r3_recipe::learning::{Algorithm, Overlong};

use crate::loss::Clip;

/// How token losses become one number, always over the whole optimiser step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aggregation {
    /// Every token weighs the same (DAPO).
    TokenMean,
    /// Every rollout weighs the same, and so does every token inside it (GRPO).
    SequenceMean,
}

/// What a step optimises.
#[derive(Clone, Debug, PartialEq)]
pub struct Objective {
    /// Bounds of the ratio.
    pub clip: Clip,
    /// Denominator of the loss.
    pub aggregation: Aggregation,
    /// Whether advantages are divided by the standard deviation of their group.
    pub normalise_std: bool,
    /// Soft punishment of long completions.
    pub overlong: Option<Overlong>,
}

impl From<&Algorithm> for Objective {
    fn from(algorithm: &Algorithm) -> Self {
        match algorithm {
            Algorithm::Grpo(grpo) => Self {
                clip: Clip { low: grpo.clip, high: grpo.clip },
                aggregation: Aggregation::SequenceMean,
                normalise_std: grpo.std_normalise,
                overlong: None,
            },
            Algorithm::Dapo(dapo) => Self {
                clip: Clip { low: dapo.clip_low, high: dapo.clip_high },
                aggregation: Aggregation::TokenMean,
                normalise_std: true,
                overlong: dapo.overlong.clone(),
            },
        }
    }
}
