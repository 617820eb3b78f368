//! What a step optimises, as plain numbers: the recipe's algorithm, with what its `objective` section adds.
//!
//! Every objective is one choice at each stage of a line: [advantage](crate::advantage) → [ratio](crate::loss::ratio) →
//! [surrogate](crate::loss::surrogate) → [correction](crate::loss::correction) → [aggregation](crate::loss::aggregation), plus [KL](crate::loss::kl) and entropy. An algorithm is a file that
//! names its four choices and where they come from; a new one is another such file.

pub mod cispo;
pub mod dapo;
pub mod dr_grpo;
pub mod grpo;
pub mod gspo;
pub mod reinforce_plus_plus;
pub mod rloo;

use r3_recipe::algorithm::{Algorithm, Overlong};
use r3_recipe::objective::{
    AggregationName, CorrectionKnobs, ImportanceWeight, Kl, KlEstimatorName, KlPlace, ObjectiveTerms,
    OldLogprobs, Truncated,
};

use crate::advantage::Estimator;
use crate::loss::aggregation::Aggregation;
use crate::loss::correction::{Band, Correction, Weight};
use crate::loss::kl::KlEstimator;
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
    /// What is done about tokens of other policies.
    pub correction: Correction,
    /// How tokens become one number.
    pub aggregation: Aggregation,
    /// What being away from the reference costs.
    pub kl: Option<KlTerm>,
    /// How much of the entropy is taken off the loss.
    pub entropy_coef: f64,
    /// Whose logprobs the ratio divides by.
    pub old_logprobs: OldLogprobs,
    /// Soft punishment of long completions.
    pub overlong: Option<Overlong>,
    /// What is done with completions that were cut off.
    pub truncated: Truncated,
    /// Whether groups whose rewards are all equal are left out, whatever else they would teach: dynamic sampling.
    pub leaves_out_equal: bool,
}

/// What being away from the reference costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KlTerm {
    /// Of a nat.
    pub coef: f64,
    /// How it is estimated.
    pub estimator: KlEstimator,
    /// Where it is added.
    pub place: KlPlace,
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
        objective.kl = terms.kl.as_ref().map(kl);
        objective.entropy_coef = terms.entropy_coef;
        objective.correction = correction(&terms.correction);
        objective.old_logprobs = terms.old_logprobs;
        objective.overlong = terms.overlong(algorithm).cloned();
        objective.truncated = terms.truncated;
        objective.leaves_out_equal = terms.dynamic_sampling(algorithm).is_some();
        objective
    }

    /// Whether groups whose rewards are all equal are trained on: they have a gradient, from a KL to the reference or
    /// from the entropy, and nobody asked to leave them out.
    #[must_use]
    pub fn keeps_equal(&self) -> bool {
        !self.leaves_out_equal && (self.kl.is_some() || self.entropy_coef != 0.0)
    }

    /// The four choices, and nothing else.
    fn of(estimator: Estimator, ratio: Ratio, surrogate: Surrogate, aggregation: Aggregation) -> Self {
        Self {
            estimator,
            ratio,
            surrogate,
            correction: Correction::default(),
            aggregation,
            kl: None,
            entropy_coef: 0.0,
            old_logprobs: OldLogprobs::Rollout,
            overlong: None,
            truncated: Truncated::Keep,
            leaves_out_equal: false,
        }
    }
}

fn kl(knobs: &Kl) -> KlTerm {
    let estimator = match knobs.estimator {
        KlEstimatorName::K1 => KlEstimator::K1,
        KlEstimatorName::K2 => KlEstimator::K2,
        KlEstimatorName::K3 => KlEstimator::K3,
        KlEstimatorName::Unbiased => KlEstimator::Unbiased,
    };
    KlTerm { coef: knobs.coef, estimator, place: knobs.place }
}

fn correction(knobs: &CorrectionKnobs) -> Correction {
    let CorrectionKnobs { weight, sequence_mask, geometric_mask, opsm, veto } = knobs;
    Correction {
        weight: weight.as_ref().map(|weight| match weight {
            ImportanceWeight::Tis(own) => Weight::Tis { cap: own.cap },
            ImportanceWeight::SequenceTis(own) => Weight::SequenceTis { cap: own.cap },
            ImportanceWeight::Icepop(own) => Weight::IcePop(Band { low: own.low, high: own.high }),
        }),
        sequence_mask: sequence_mask.as_ref().map(|own| Band { low: own.low, high: own.high }),
        geometric_mask: geometric_mask.as_ref().map(|own| Band { low: own.low, high: own.high }),
        opsm: opsm.as_ref().map(|own| own.delta),
        veto: veto.as_ref().map(|own| own.below),
    }
}
