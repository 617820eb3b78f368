//! What any algorithm may add to its objective, or take in place of its own.

use std::path::PathBuf;

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
    /// What is done about tokens that another policy than the trainer's sampled; nothing by default.
    pub correction: CorrectionKnobs,
    /// Holds the policy near a reference; off by default.
    pub kl: Option<Kl>,
    /// How much of the policy's entropy, in nats and averaged like the loss, is taken off the loss; 0 by default.
    pub entropy_coef: f64,
    /// What is done with completions that ran into `rollout.max_new_tokens`.
    pub truncated: Truncated,
    /// As `algorithm.dapo.dynamic_sampling`, under any algorithm.
    pub dynamic_sampling: Option<DynamicSampling>,
    /// As `algorithm.dapo.overlong`, under any algorithm.
    pub overlong: Option<Overlong>,
}

/// The KL to a reference policy: a frozen second model in the trainer, which takes 4 bytes a parameter. It takes the
/// experts that the trainer takes, so at the start the KL is 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Kl {
    /// What a nat costs; above 0.
    pub coef: f64,
    /// How the KL is estimated from the tokens that were sampled, with `x = policy - reference`.
    #[serde(default)]
    pub estimator: KlEstimatorName,
    /// Where it is added.
    #[serde(default)]
    pub place: KlPlace,
    /// Hugging Face directory of the reference, relative to the current directory; `model.path` by default. Its
    /// configuration is the model's.
    #[serde(default)]
    pub reference: Option<PathBuf>,
}

/// How a KL is estimated from sampled tokens (Schulman 2020, "Approximating KL Divergence").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimatorName {
    /// `x`: in a loss its gradient is 0 on average; in a reward it is what REINFORCE++ takes.
    K1,
    /// `x^2 / 2`: its gradient is that of the KL, where the policy itself sampled.
    K2,
    /// `exp(-x) - 1 + x`: GRPO's; least variance, but its gradient is that of the reverse KL.
    #[default]
    K3,
    /// k3 times the token's ratio, whose gradient is that of the KL off-policy, too (DeepSeek-V3.2, arXiv 2512.02556,
    /// equation 7). Only in the loss.
    Unbiased,
}

/// Where a KL is added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlPlace {
    /// To every token's loss, averaged like it.
    #[default]
    Loss,
    /// Taken off the reward before it is compared, as the sum over a completion's tokens, between the rollout's
    /// logprobs and the reference. REINFORCE++ without a baseline takes off each token what is still to come.
    Reward,
}

/// What is done about tokens that another policy than the trainer's sampled. Parts that are on multiply; what is dropped
/// stays in the denominators.
///
/// `rho = exp(trainer - rollout)`, of a token, or of a sequence as the product of its tokens'. The trainer's logprobs are
/// those that the ratio divides by, or with `old_logprobs: rollout` the policy's current ones.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CorrectionKnobs {
    /// Weighs every token by its importance; needs `old_logprobs: trainer`, for with the rollout's the ratio does so
    /// already.
    pub weight: Option<ImportanceWeight>,
    /// Drops sequences with `rho` outside (masked importance sampling: Liu, Li et al. 2025, "When Speed Kills
    /// Stability").
    pub sequence_mask: Option<SequenceMask>,
    /// Drops sequences with the geometric mean of their tokens' `rho` outside; the same source.
    pub geometric_mask: Option<GeometricMask>,
    /// Drops tokens with `A < 0` of sequences that the policy has moved away from (off-policy sequence masking,
    /// DeepSeek-V3.2, arXiv 2512.02556).
    pub opsm: Option<Opsm>,
    /// Drops sequences with a token that the trainer finds all but impossible.
    pub veto: Option<Veto>,
}

/// Weight of a token, in YAML `tis: { cap: 2.0 }`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ImportanceWeight {
    /// `min(rho, cap)` of the token (truncated importance sampling: Yao et al. 2025, "Your Efficient RL Framework
    /// Secretly Brings You Off-Policy RL Training").
    Tis(Tis),
    /// `min(rho, cap)` of the sequence, for all its tokens.
    SequenceTis(SequenceTis),
    /// `rho` of the token inside the band, 0 outside (IcePop: Ring-1T, arXiv 2510.18855).
    Icepop(IcePop),
}

/// Truncated importance sampling by token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Tis {
    /// Largest weight; 1.5 to 5 is usual.
    pub cap: f64,
}

impl Default for Tis {
    fn default() -> Self {
        Self { cap: 2.0 }
    }
}

/// Truncated importance sampling by sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SequenceTis {
    /// Largest weight; 2 to 10 is usual.
    pub cap: f64,
}

impl Default for SequenceTis {
    fn default() -> Self {
        Self { cap: 5.0 }
    }
}

/// The band of IcePop.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct IcePop {
    /// Smallest `rho` of a token that is kept.
    pub low: f64,
    /// Largest `rho` of a token that is kept.
    pub high: f64,
}

impl Default for IcePop {
    fn default() -> Self {
        Self { low: 0.5, high: 5.0 }
    }
}

/// The band of a sequence's `rho`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SequenceMask {
    /// Smallest `rho` of a sequence that is kept.
    pub low: f64,
    /// Largest `rho` of a sequence that is kept.
    pub high: f64,
}

impl Default for SequenceMask {
    fn default() -> Self {
        Self { low: 0.5, high: 2.0 }
    }
}

/// The band of the geometric mean of a sequence's tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GeometricMask {
    /// Smallest mean of a sequence that is kept.
    pub low: f64,
    /// Largest mean of a sequence that is kept.
    pub high: f64,
}

impl Default for GeometricMask {
    fn default() -> Self {
        Self { low: 0.99, high: 1.01 }
    }
}

/// Off-policy sequence masking.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Opsm {
    /// Mean of `rollout - policy` over a sequence, in nats, above which it is dropped.
    pub delta: f64,
}

impl Default for Opsm {
    fn default() -> Self {
        Self { delta: 1e-4 }
    }
}

/// A veto of single tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Veto {
    /// `rho` of a token, below which its sequence is dropped.
    pub below: f64,
}

impl Default for Veto {
    fn default() -> Self {
        Self { below: 1e-4 }
    }
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
