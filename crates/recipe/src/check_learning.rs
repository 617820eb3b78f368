//! Checks of `train` and `sft`, and of `train` against `rollout`.

use crate::check::{Limit, Rule, within};
use crate::learning::{Muon, Schedule, Sft, Train};
use crate::numerics::Numerics;
use crate::rollout::{Dtype, Rollout};

pub(crate) fn check_train(train: &Train) -> Result<(), Rule> {
    within("train.lr", train.lr, Limit::Positive, "1e-6")?;
    within("train.betas", train.betas[0], Limit::BelowOne, "[0.9, 0.999]")?;
    within("train.betas", train.betas[1], Limit::BelowOne, "[0.9, 0.999]")?;
    within("train.eps", train.eps, Limit::Positive, "1e-8")?;
    within("train.weight_decay", train.weight_decay, Limit::NotNegative, "0.01")?;
    within("train.grad_clip", train.grad_clip, Limit::Positive, "1.0")?;
    within("train.min_lr_ratio", train.min_lr_ratio, Limit::Share, "0.1")?;
    if let Some(lora) = &train.lora {
        within("train.lora.rank", lora.rank, Limit::UpTo(1024), "8")?;
        within("train.lora.alpha", lora.alpha, Limit::Positive, "16")?;
        if lora.targets.is_empty() {
            return Err(Rule::NoTargets);
        }
    }
    if let Some(Muon { momentum, iterations, .. }) = &train.muon {
        within("train.muon.momentum", *momentum, Limit::BelowOne, "0.95")?;
        within("train.muon.iterations", *iterations, Limit::UpTo(20), "5")?;
    }
    match (train.schedule, train.decay_steps) {
        (Schedule::Wsd, 0) => return Err(Rule::NoDecaySteps),
        (Schedule::Constant | Schedule::Linear | Schedule::Cosine, decay_steps @ 1..) => {
            return Err(Rule::UnusedDecaySteps { decay_steps });
        }
        _ => {}
    }
    within("train.mini_steps", train.mini_steps, Limit::Count(1), "1")?;
    within("train.micro_batch_tokens", train.micro_batch_tokens, Limit::Count(1), "4096")
}

/// Whatever a step leaves behind fits into the next one, in number and in age; so nothing is dropped as stale.
pub(crate) fn check_over_sampling(rollout: &Rollout, train: &Train) -> Result<(), Rule> {
    let &Rollout { groups, over_sampling_groups, .. } = rollout;
    let &Train { mini_steps, max_staleness, .. } = train;
    if over_sampling_groups > groups {
        return Err(Rule::OverSampledBatch { over_sampling_groups, groups });
    }
    if over_sampling_groups > 0 && max_staleness < mini_steps as u64 {
        return Err(Rule::OverSampledStaleness { mini_steps, max_staleness });
    }
    Ok(())
}

/// Sums agree to the bit only where both sides round alike.
pub(crate) fn check_numerics(numerics: Option<Numerics>, rollout: Dtype, train: Dtype) -> Result<(), Rule> {
    if numerics == Some(Numerics::Exact) && rollout != train {
        return Err(Rule::ExactAcrossDtypes { rollout, train });
    }
    Ok(())
}

pub(crate) fn check_sft(sft: &Sft) -> Result<(), Rule> {
    within("sft.steps", sft.steps, Limit::Count(1), "400")?;
    within("sft.batch", sft.batch, Limit::Count(1), "256")?;
    within("sft.lr", sft.lr, Limit::Positive, "2e-3")?;
    within("sft.betas", sft.betas[0], Limit::BelowOne, "[0.9, 0.999]")?;
    within("sft.betas", sft.betas[1], Limit::BelowOne, "[0.9, 0.999]")?;
    within("sft.weight_decay", sft.weight_decay, Limit::NotNegative, "0.01")?;
    within("sft.grad_clip", sft.grad_clip, Limit::Positive, "1.0")?;
    within("sft.load_balance", sft.load_balance, Limit::NotNegative, "0.01")?;
    within("sft.carry_dropped", sft.carry_dropped, Limit::Share, "0.7")?;
    within("sft.max_new_tokens", sft.max_new_tokens, Limit::Count(1), "16")
}
