//! What a step optimises, as plain numbers: the recipe's algorithm, with what its `objective` section adds.
//!
//! Every objective is one choice at each stage of a line: [advantage](crate::advantage) → [ratio](crate::loss::ratio) →
//! [surrogate](crate::loss::surrogate) → [aggregation](crate::loss::aggregation). An algorithm is a file that
//! names its four choices and where they come from; a new one is another such file.

pub mod cispo;
pub mod dapo;
pub mod dr_grpo;
pub mod grpo;
pub mod gspo;
pub mod reinforce_plus_plus;
pub mod rloo;

use r3_recipe::algorithm::{Algorithm, Overlong};
use r3_recipe::objective::{AggregationName, ObjectiveTerms, OldLogprobs, Truncated};

use crate::advantage::Estimator;
use crate::loss::aggregation::Aggregation;
use crate::loss::ratio::Ratio;
use crate::loss::surrogate::Surrogate;

/// What a step optimises.
#[derive(Clone, Debug, PartialEq)]
pub struct Objective {
    /// How rewards become advantages.
    pub estimator: Estimator,
    /// What the new policy is compared with the old one over: a token or a completion.
    pub ratio: Ratio,
    /// What is maximised of ratio and advantage.
    pub surrogate: Surrogate,
    /// How tokens become one number.
    pub aggregation: Aggregation,
    /// Whose logprobs the ratio divides by.
    pub old_logprobs: OldLogprobs,
    /// Soft punishment of long completions.
    pub overlong: Option<Overlong>,
    /// What is done with completions that were cut off.
    pub truncated: Truncated,
}

impl Objective {
    /// The objective of a checked recipe. `max_new_tokens` is the horizon where the recipe has none.
    #[must_use]
    pub fn new(algorithm: &Algorithm, terms: &ObjectiveTerms, max_new_tokens: usize) -> Self {
        let horizon = terms.horizon.unwrap_or(max_new_tokens);
        let mut objective = match algorithm {
            Algorithm::Grpo(knobs) => grpo::objective(knobs),
            Algorithm::DrGrpo(knobs) => dr_grpo::objective(knobs, horizon),
            Algorithm::Dapo(knobs) => dapo::objective(knobs),
            Algorithm::Gspo(knobs) => gspo::objective(knobs),
            Algorithm::Cispo(knobs) => cispo::objective(knobs),
            Algorithm::Rloo(knobs) => rloo::objective(knobs),
            Algorithm::ReinforcePlusPlus(knobs) => reinforce_plus_plus::objective(knobs),
        };
        if let Some(name) = terms.aggregation {
            objective.aggregation = match name {
                AggregationName::TokenMean => Aggregation::TokenMean,
                AggregationName::SequenceMean => Aggregation::SequenceMean,
                AggregationName::SequenceSum => Aggregation::SequenceSum { horizon },
                AggregationName::PromptMean => Aggregation::PromptMean,
            };
        }
        if let Surrogate::Clipped { dual, .. } = &mut objective.surrogate {
            *dual = terms.dual_clip;
        }
        objective.old_logprobs = terms.old_logprobs;
        objective.overlong = terms.overlong(algorithm).cloned();
        objective.truncated = terms.truncated;
        objective
    }

    /// The four choices, and nothing else.
    fn of(estimator: Estimator, ratio: Ratio, surrogate: Surrogate, aggregation: Aggregation) -> Self {
        Self {
            estimator,
            ratio,
            surrogate,
            aggregation,
            old_logprobs: OldLogprobs::Rollout,
            overlong: None,
            truncated: Truncated::Keep,
        }
    }
}
