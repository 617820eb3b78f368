//! Checks of `algorithm` and `objective`: ranges, and combinations that would mean nothing.

use crate::algorithm::{Algorithm, DynamicSampling, Overlong};
use crate::check::{Limit, Rule, filled, within};
use crate::objective::{
    AggregationName, CorrectionKnobs, ImportanceWeight, Kl, KlEstimatorName, KlPlace, ObjectiveTerms,
    OldLogprobs, Truncated,
};

/// Paths of a block that two places may hold.
struct OverlongPaths {
    max_tokens: &'static str,
    cache_tokens: &'static str,
    factor: &'static str,
}

const DAPO_OVERLONG: OverlongPaths = OverlongPaths {
    max_tokens: "algorithm.dapo.overlong.max_tokens",
    cache_tokens: "algorithm.dapo.overlong.cache_tokens",
    factor: "algorithm.dapo.overlong.factor",
};

const OVERLONG: OverlongPaths = OverlongPaths {
    max_tokens: "objective.overlong.max_tokens",
    cache_tokens: "objective.overlong.cache_tokens",
    factor: "objective.overlong.factor",
};

pub(crate) fn check_algorithm(algorithm: &Algorithm, max_new_tokens: usize) -> Result<(), Rule> {
    match algorithm {
        Algorithm::Grpo(grpo) => within("algorithm.grpo.clip", grpo.clip, Limit::PositiveShare, "0.2"),
        Algorithm::DrGrpo(own) => within("algorithm.dr_grpo.clip", own.clip, Limit::PositiveShare, "0.2"),
        Algorithm::Dapo(dapo) => {
            within("algorithm.dapo.clip_low", dapo.clip_low, Limit::PositiveShare, "0.2")?;
            within("algorithm.dapo.clip_high", dapo.clip_high, Limit::Positive, "0.28")?;
            let path = "algorithm.dapo.dynamic_sampling.max_batches";
            check_sampling(path, dapo.dynamic_sampling.as_ref())?;
            check_overlong(&DAPO_OVERLONG, dapo.overlong.as_ref(), max_new_tokens)
        }
        Algorithm::Gspo(gspo) => {
            within("algorithm.gspo.clip_low", gspo.clip_low, Limit::PositiveShare, "3e-4")?;
            within("algorithm.gspo.clip_high", gspo.clip_high, Limit::Positive, "4e-4")
        }
        Algorithm::Cispo(cispo) => {
            within("algorithm.cispo.clip_low", cispo.clip_low.unwrap_or(1.0), Limit::PositiveShare, "null")?;
            within("algorithm.cispo.clip_high", cispo.clip_high, Limit::Positive, "4.0")
        }
        Algorithm::Rloo(rloo) => within("algorithm.rloo.clip", rloo.clip, Limit::PositiveShare, "0.2"),
        Algorithm::ReinforcePlusPlus(own) => {
            within("algorithm.reinforce_plus_plus.clip", own.clip, Limit::PositiveShare, "0.2")
        }
    }
}

pub(crate) fn check_objective(
    terms: &ObjectiveTerms,
    algorithm: &Algorithm,
    max_new_tokens: usize,
) -> Result<(), Rule> {
    within("objective.horizon", terms.horizon.unwrap_or(1), Limit::Count(1), "1024")?;
    within("objective.dual_clip", terms.dual_clip.unwrap_or(3.0), Limit::AboveOne, "3.0")?;
    check_sampling("objective.dynamic_sampling.max_batches", terms.dynamic_sampling.as_ref())?;
    check_overlong(&OVERLONG, terms.overlong.as_ref(), max_new_tokens)?;
    within("objective.entropy_coef", terms.entropy_coef, Limit::NotNegative, "0.001")?;
    check_correction(&terms.correction)?;
    check_kl(terms)?;
    if terms.correction.weight.is_some() && terms.old_logprobs == OldLogprobs::Rollout {
        return Err(Rule::WeightOverRollout);
    }
    let sums = match terms.aggregation {
        Some(name) => name == AggregationName::SequenceSum,
        None => matches!(algorithm, Algorithm::DrGrpo(_)),
    };
    if terms.horizon.is_some() && !sums {
        return Err(Rule::UnusedHorizon);
    }
    match algorithm {
        Algorithm::Cispo(_) if terms.dual_clip.is_some() => Err(Rule::DualClipOfCispo),
        Algorithm::Dapo(dapo) if dapo.dynamic_sampling.is_some() && terms.dynamic_sampling.is_some() => {
            Err(Rule::TwoPlaces { key: "dynamic_sampling", path: "objective.dynamic_sampling" })
        }
        Algorithm::Dapo(dapo) if dapo.overlong.is_some() && terms.overlong.is_some() => {
            Err(Rule::TwoPlaces { key: "overlong", path: "objective.overlong" })
        }
        _ => Ok(()),
    }
}

fn check_kl(terms: &ObjectiveTerms) -> Result<(), Rule> {
    let Some(Kl { coef, estimator, place, reference }) = &terms.kl else { return Ok(()) };
    within("objective.kl.coef", *coef, Limit::Positive, "0.001")?;
    if let Some(path) = reference {
        filled("objective.kl.reference", path)?;
    }
    match place {
        KlPlace::Loss => Ok(()),
        KlPlace::Reward if *estimator == KlEstimatorName::Unbiased => Err(Rule::UnbiasedKlInReward),
        KlPlace::Reward if terms.truncated == Truncated::Mask => Err(Rule::KlInMaskedReward),
        KlPlace::Reward => Ok(()),
    }
}

fn check_correction(correction: &CorrectionKnobs) -> Result<(), Rule> {
    let CorrectionKnobs { weight, sequence_mask, geometric_mask, opsm, veto } = correction;
    match weight {
        Some(ImportanceWeight::Tis(own)) => {
            within("objective.correction.weight.tis.cap", own.cap, Limit::Positive, "2.0")?;
        }
        Some(ImportanceWeight::SequenceTis(own)) => {
            within("objective.correction.weight.sequence_tis.cap", own.cap, Limit::Positive, "5.0")?;
        }
        Some(ImportanceWeight::Icepop(own)) => check_band(&ICEPOP, own.low, own.high)?,
        None => {}
    }
    if let Some(own) = sequence_mask {
        check_band(&SEQUENCE_MASK, own.low, own.high)?;
    }
    if let Some(own) = geometric_mask {
        check_band(&GEOMETRIC_MASK, own.low, own.high)?;
    }
    if let Some(own) = opsm {
        within("objective.correction.opsm.delta", own.delta, Limit::NotNegative, "1e-4")?;
    }
    match veto {
        Some(own) => within("objective.correction.veto.below", own.below, Limit::Share, "1e-4"),
        None => Ok(()),
    }
}

/// Paths and usual values of a band.
struct BandPaths {
    low: (&'static str, &'static str),
    high: (&'static str, &'static str),
}

const ICEPOP: BandPaths = BandPaths {
    low: ("objective.correction.weight.icepop.low", "0.5"),
    high: ("objective.correction.weight.icepop.high", "5.0"),
};

const SEQUENCE_MASK: BandPaths = BandPaths {
    low: ("objective.correction.sequence_mask.low", "0.5"),
    high: ("objective.correction.sequence_mask.high", "2.0"),
};

const GEOMETRIC_MASK: BandPaths = BandPaths {
    low: ("objective.correction.geometric_mask.low", "0.99"),
    high: ("objective.correction.geometric_mask.high", "1.01"),
};

/// A band holds 1, which is where nothing differs.
fn check_band(paths: &BandPaths, low: f64, high: f64) -> Result<(), Rule> {
    within(paths.low.0, low, Limit::Share, paths.low.1)?;
    within(paths.high.0, high, Limit::OneOrMore, paths.high.1)
}

fn check_sampling(path: &'static str, sampling: Option<&DynamicSampling>) -> Result<(), Rule> {
    match sampling {
        Some(sampling) => within(path, sampling.max_batches, Limit::Count(1), "10"),
        None => Ok(()),
    }
}

fn check_overlong(
    paths: &OverlongPaths,
    overlong: Option<&Overlong>,
    max_new_tokens: usize,
) -> Result<(), Rule> {
    let Some(&Overlong { max_tokens, cache_tokens, factor }) = overlong else { return Ok(()) };
    within(paths.max_tokens, max_tokens, Limit::Count(1), "20480")?;
    within(paths.cache_tokens, cache_tokens, Limit::Count(1), "4096")?;
    within(paths.factor, factor, Limit::NotNegative, "1.0")?;
    let Some(free_tokens) = max_tokens.checked_sub(cache_tokens) else {
        return Err(Rule::OverlongCacheTooLong { path: paths.cache_tokens, max_tokens, cache_tokens });
    };
    if free_tokens >= max_new_tokens {
        return Err(Rule::OverlongOutOfReach { path: paths.max_tokens, free_tokens, max_new_tokens });
    }
    Ok(())
}
