//! The algorithm: which advantage, ratio, surrogate and mean a step optimises.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The algorithm, in YAML `dapo: { clip_low: 0.2, clip_high: 0.28 }`; what any of them may add is `objective`'s.
///
/// Each names an advantage, a ratio, a surrogate and a mean. Unless it says otherwise, the advantage is GRPO's, `A =
/// (R - mean) / (std + 1e-6)` over the group with `std` over `G - 1`, and exactly 0 when all rewards are equal; the
/// ratio is a token's, `r = exp(policy - old)`; and what is minimised is the mean of `-min(r A, clip(r) A)`. Groups
/// whose rewards, after `objective.overlong`, are all equal have no gradient and are left out of the mean. With
/// `objective.kl` or `objective.entropy_coef` they have one and stay in it, unless there is `dynamic_sampling`, which
/// leaves out what is equal before `overlong`. A group of which fewer than two rewards are valid is left out even then:
/// something failed in it, and nothing is learnt from it. REINFORCE++ without a baseline, which compares over the batch,
/// keeps both in any case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Algorithm {
    /// Symmetric clip; mean over a completion's tokens, then over completions (DeepSeekMath, arXiv 2402.03300,
    /// equation 3).
    Grpo(Grpo),
    /// GRPO without its two biases: `A = R - mean`, and a sum over tokens divided by a constant (arXiv 2503.20783).
    DrGrpo(DrGrpo),
    /// Wider upper clip; mean over all tokens of the optimiser step (DAPO, arXiv 2503.14476, equation 8).
    Dapo(Dapo),
    /// One ratio a completion, the geometric mean of its tokens' (GSPO, arXiv 2507.18071, equations 5 to 7).
    Gspo(Gspo),
    /// The clipped ratio weighs `A log policy` and carries no gradient, so a clipped token still learns; mean over
    /// all tokens (CISPO, MiniMax-M1, arXiv 2506.13585, equations 4 and 5).
    Cispo(Cispo),
    /// A completion is one action: its ratio is the product of its tokens', and `A = R_i - mean of the others` (RLOO,
    /// arXiv 2402.14740, equation 9).
    Rloo(Rloo),
    /// Advantages are compared over the whole batch instead of the group (REINFORCE++, arXiv 2501.03262).
    ReinforcePlusPlus(ReinforcePlusPlus),
}

/// Knobs of GRPO.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Grpo {
    /// The ratio is clipped to `1 - clip ..= 1 + clip`; between 0 and 1.
    pub clip: f64,
    /// Divides the advantage by the group's standard deviation; off is Dr. GRPO's (arXiv 2503.20783) `R - mean`.
    pub std_normalise: bool,
}

impl Default for Grpo {
    fn default() -> Self {
        Self { clip: 0.2, std_normalise: true }
    }
}

/// Knobs of Dr. GRPO; the constant it divides by is `objective.horizon`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DrGrpo {
    /// The ratio is clipped to `1 - clip ..= 1 + clip`; between 0 and 1.
    pub clip: f64,
}

impl Default for DrGrpo {
    fn default() -> Self {
        Self { clip: 0.2 }
    }
}

/// Knobs of DAPO.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Dapo {
    /// The ratio is clipped from below at `1 - clip_low`; between 0 and 1.
    pub clip_low: f64,
    /// The ratio is clipped from above at `1 + clip_high`; above 0.
    pub clip_high: f64,
    /// Samples more prompts in place of groups whose rewards are all equal; off by default.
    pub dynamic_sampling: Option<DynamicSampling>,
    /// Lowers the reward of completions near the length limit; off by default.
    pub overlong: Option<Overlong>,
}

impl Default for Dapo {
    fn default() -> Self {
        Self { clip_low: 0.2, clip_high: 0.28, dynamic_sampling: None, overlong: None }
    }
}

/// Knobs of GSPO. Its ratio is a geometric mean over a completion, so it is clipped a thousand times closer to 1 than a
/// token's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Gspo {
    /// The ratio is clipped from below at `1 - clip_low`; between 0 and 1.
    pub clip_low: f64,
    /// The ratio is clipped from above at `1 + clip_high`; above 0.
    pub clip_high: f64,
}

impl Default for Gspo {
    fn default() -> Self {
        Self { clip_low: 3e-4, clip_high: 4e-4 }
    }
}

/// Knobs of CISPO.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Cispo {
    /// The weight is clipped from below at `1 - clip_low`; between 0 and 1. The paper has no such bound, and none is
    /// the default.
    pub clip_low: Option<f64>,
    /// The weight is clipped from above at `1 + clip_high`; above 0.
    pub clip_high: f64,
}

impl Default for Cispo {
    fn default() -> Self {
        Self { clip_low: None, clip_high: 4.0 }
    }
}

/// Knobs of RLOO.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Rloo {
    /// The completion's ratio is clipped to `1 - clip ..= 1 + clip`; between 0 and 1. At ratio 1 the gradient is the
    /// paper's, which has no clip.
    pub clip: f64,
}

impl Default for Rloo {
    fn default() -> Self {
        Self { clip: 0.2 }
    }
}

/// Knobs of REINFORCE++: PPO's clipped surrogate, mean over all tokens, with advantages whitened over the tokens of the
/// batch: `(A - mean) / (std + 1e-6)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ReinforcePlusPlus {
    /// The ratio is clipped to `1 - clip ..= 1 + clip`; between 0 and 1.
    pub clip: f64,
    /// What is subtracted from a reward before that.
    pub baseline: Baseline,
}

impl Default for ReinforcePlusPlus {
    fn default() -> Self {
        Self { clip: 0.2, baseline: Baseline::None }
    }
}

/// What REINFORCE++ subtracts from a reward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Baseline {
    /// Nothing: a prompt whose rewards are all 1 still teaches that it went better than others.
    #[default]
    None,
    /// The mean of the group, the paper's "REINFORCE++ w/ baseline".
    Group,
}

/// DAPO's dynamic sampling, bounded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DynamicSampling {
    /// Batches of `rollout.groups` prompts sampled at most for one batch to train on, the first included: 1 samples
    /// no others. When they are used up, the step trains on the groups there are; from 2 on, a run without any saves the
    /// steps it has done and ends.
    pub max_batches: usize,
}

impl Default for DynamicSampling {
    fn default() -> Self {
        Self { max_batches: 10 }
    }
}

/// DAPO's soft overlong punishment, added to the reward of a completion of `n` tokens:
/// `-factor * clamp((n - (max_tokens - cache_tokens)) / cache_tokens, 0, 1)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Overlong {
    /// Length at which the whole punishment is reached (`L_max`; the paper's is 20480).
    pub max_tokens: usize,
    /// Tokens before that over which it grows (`L_cache`; the paper's is 4096).
    pub cache_tokens: usize,
    /// The whole punishment.
    #[serde(default = "one")]
    pub factor: f64,
}

fn one() -> f64 {
    1.0
}
