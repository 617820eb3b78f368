//! How the policy learns: the objective, the optimiser, and the supervised warm start.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::rollout::Dtype;

/// The objective, in YAML `dapo: { clip_low: 0.2, clip_high: 0.28 }`.
///
/// Both take the advantage from the group: `A = (R - mean) / (std + 1e-6)`, with `std` over `G - 1`, and exactly 0
/// when all rewards are equal. Both minimise `-min(r A, clip(r) A)` with `r = exp(policy - rollout)`; they differ
/// in the clip and in how tokens are averaged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Algorithm {
    /// Symmetric clip; mean over a completion's tokens, then over completions (DeepSeekMath, arXiv 2402.03300).
    Grpo(Grpo),
    /// Wider upper clip; mean over all tokens of the optimiser step (DAPO, arXiv 2503.14476).
    Dapo(Dapo),
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

/// Knobs of DAPO.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Dapo {
    /// The ratio is clipped from below at `1 - clip_low`; between 0 and 1.
    pub clip_low: f64,
    /// The ratio is clipped from above at `1 + clip_high`; above 0.
    pub clip_high: f64,
    /// Leaves out groups whose rewards are all equal, and samples more prompts in their place; off by default.
    pub dynamic_sampling: Option<DynamicSampling>,
    /// Lowers the reward of completions near the length limit; off by default.
    pub overlong: Option<Overlong>,
}

impl Default for Dapo {
    fn default() -> Self {
        Self { clip_low: 0.2, clip_high: 0.28, dynamic_sampling: None, overlong: None }
    }
}

/// DAPO's dynamic sampling, bounded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DynamicSampling {
    /// Batches of `rollout.groups` prompts sampled at most for one batch to train on, the first included: 1 only
    /// leaves groups out. When they are used up, the step trains on the groups there are.
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

/// The trainer: AdamW (decoupled decay, arXiv 1711.05101) over packed micro-batches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Train {
    /// Format of weights, activations and gradients.
    pub dtype: TrainDtype,
    /// Learning rate, reached after `warmup_steps`.
    pub lr: f64,
    /// Decay of the running means of gradient and squared gradient, each in `[0, 1)`.
    pub betas: [f64; 2],
    /// Added to the square root of the running squared gradient.
    pub eps: f64,
    /// Share of a weight, times the learning rate, that a step takes away.
    pub weight_decay: f64,
    /// Largest global L2 norm of a gradient; above it, the gradient is scaled down.
    pub grad_clip: f64,
    /// Optimiser steps over which the learning rate rises linearly from 0.
    pub warmup_steps: u64,
    /// What the learning rate does after that, until the last optimiser step (`run.steps * mini_steps`).
    pub schedule: Schedule,
    /// Optimiser steps taken on one batch of rollouts, each on an even share of the groups that are trained on; one a
    /// group where fewer groups are left.
    pub mini_steps: usize,
    /// Tokens of one forward and backward pass. Bounds memory; never changes a gradient beyond rounding.
    pub micro_batch_tokens: usize,
    /// Optimiser steps between the oldest token of a batch and the trainer when it takes the batch; 0 samples every
    /// batch with the newest weights.
    pub max_staleness: u64,
}

impl Default for Train {
    fn default() -> Self {
        Self {
            dtype: TrainDtype::F32,
            lr: 1e-6,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.0,
            grad_clip: 1.0,
            warmup_steps: 0,
            schedule: Schedule::Constant,
            mini_steps: 1,
            micro_batch_tokens: 4096,
            max_staleness: 0,
        }
    }
}

/// Format the trainer computes in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TrainDtype {
    /// 32-bit floating point.
    #[default]
    F32,
}

impl From<TrainDtype> for Dtype {
    fn from(dtype: TrainDtype) -> Self {
        match dtype {
            TrainDtype::F32 => Self::F32,
        }
    }
}

/// The learning rate after warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// Stays as it is.
    #[default]
    Constant,
    /// Falls on a line to 0.
    Linear,
    /// Falls on half a cosine to 0.
    Cosine,
}

/// Supervised warm start on the task's own answers: AdamW, loss on answer tokens only.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Sft {
    /// Optimiser steps.
    pub steps: u64,
    /// Demonstrations of one step.
    #[serde(default = "Sft::default_batch")]
    pub batch: usize,
    /// Learning rate, reached after `warmup_steps`.
    pub lr: f64,
    /// Decay of the running means of gradient and squared gradient, each in `[0, 1)`.
    #[serde(default = "Sft::default_betas")]
    pub betas: [f64; 2],
    /// Share of a weight, times the learning rate, that a step takes away.
    #[serde(default)]
    pub weight_decay: f64,
    /// Largest global L2 norm of a gradient; above it, the gradient is scaled down.
    #[serde(default = "one")]
    pub grad_clip: f64,
    /// Steps over which the learning rate rises linearly from 0.
    #[serde(default)]
    pub warmup_steps: u64,
    /// Last steps, over which the learning rate falls linearly to 0.
    #[serde(default)]
    pub decay_steps: u64,
    /// Weight of the load-balancing loss (Switch Transformer, arXiv 2101.03961), averaged over MoE layers.
    #[serde(default = "Sft::default_load_balance")]
    pub load_balance: f64,
    /// Share of arithmetic demonstrations that show the sum with its carries dropped (`47+38=75`), so that the start
    /// is often wrong and reinforcement has something to choose; 0 by default.
    #[serde(default)]
    pub carry_dropped: f64,
    /// Held-out problems, decoded greedily after the last step; 0 is none.
    #[serde(default = "Sft::default_eval_problems")]
    pub eval_problems: usize,
    /// Tokens an evaluated completion may have, its stop token included.
    #[serde(default = "Sft::default_max_new_tokens")]
    pub max_new_tokens: usize,
}

impl Sft {
    fn default_batch() -> usize {
        256
    }

    fn default_betas() -> [f64; 2] {
        [0.9, 0.999]
    }

    fn default_load_balance() -> f64 {
        0.01
    }

    fn default_eval_problems() -> usize {
        512
    }

    fn default_max_new_tokens() -> usize {
        16
    }
}
