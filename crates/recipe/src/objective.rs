//! What any algorithm may add to its objective, or take in place of its own.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::algorithm::{Algorithm, DynamicSampling, Overlong};

/// What any algorithm may add to its objective, or take in place of its own. Nothing by default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ObjectiveTerms {
    /// How the losses of tokens become one number; the algorithm's own by default. Every denominator counts the whole
    /// optimiser step, so it does not matter how that is cut into micro-batches.
    pub aggregation: Option<AggregationName>,
    /// What `sequence_sum` divides by; `rollout.max_new_tokens` by default, and 1 is a plain sum.
    pub horizon: Option<usize>,
    /// A token with `A < 0` is worth at least `dual_clip * A`, however large its ratio; above 1, and 3 is usual. Off
    /// by default (dual-clip PPO, arXiv 1912.09729, equation 5).
    pub dual_clip: Option<f64>,
    /// Whose logprobs the ratio divides by.
    pub old_logprobs: OldLogprobs,
    /// What is done with completions that ran into `rollout.max_new_tokens`.
    pub truncated: Truncated,
    /// As `algorithm.dapo.dynamic_sampling`, under any algorithm.
    pub dynamic_sampling: Option<DynamicSampling>,
    /// As `algorithm.dapo.overlong`, under any algorithm.
    pub overlong: Option<Overlong>,
}

/// How the losses of tokens become one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AggregationName {
    /// Every token weighs the same.
    TokenMean,
    /// Every completion weighs the same, and so does every token inside it.
    SequenceMean,
    /// Sum over a completion's tokens divided by `horizon`, then the mean over completions.
    SequenceSum,
    /// Every prompt weighs the same, and so does every token of its completions.
    PromptMean,
}

/// Whose logprobs the ratio divides by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OldLogprobs {
    /// Those the tokens were sampled with, so that the ratio also corrects what rollout and trainer differ in.
    #[default]
    Rollout,
    /// The trainer's own at the weights the step starts with (decoupled PPO, arXiv 2110.00641). They come from
    /// forwards that are made anyway.
    Trainer,
}

/// What is done with completions that were cut off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Truncated {
    /// Nothing: they are trained on with the reward they got.
    #[default]
    Keep,
    /// They are not trained on, but their rewards still count in the group (DAPO, arXiv 2503.14476, section 3.4).
    Mask,
}

impl ObjectiveTerms {
    /// Dynamic sampling, wherever the recipe has it.
    #[must_use]
    pub fn dynamic_sampling<'a>(&'a self, algorithm: &'a Algorithm) -> Option<&'a DynamicSampling> {
        let own = match algorithm {
            Algorithm::Dapo(dapo) => dapo.dynamic_sampling.as_ref(),
            _ => None,
        };
        own.or(self.dynamic_sampling.as_ref())
    }

    /// The punishment of long completions, wherever the recipe has it.
    #[must_use]
    pub fn overlong<'a>(&'a self, algorithm: &'a Algorithm) -> Option<&'a Overlong> {
        let own = match algorithm {
            Algorithm::Dapo(dapo) => dapo.overlong.as_ref(),
            _ => None,
        };
        own.or(self.overlong.as_ref())
    }
}
