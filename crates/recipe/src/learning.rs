//! How the policy learns: the optimiser, and the supervised warm start.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pattern::Pattern;
use crate::rollout::Dtype;

fn one() -> f64 {
    1.0
}

/// The trainer: AdamW (decoupled decay, arXiv 1711.05101), or Muon for matrices, over packed micro-batches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Train {
    /// Format of what products multiply, forward and backward; weights and gradients are f32 in either.
    pub dtype: Dtype,
    /// Keeps the input of every layer alone and runs layers again, on the same experts, when gradients need the rest: less
    /// memory for a third more work, and the same bits.
    pub recompute: bool,
    /// Names of weights that are not trained, by pattern: `*.mlp.gate.weight` is every router. `*` is any characters, `?`
    /// is one, `{q,k}` is one of several texts; a pattern that matches no weight is refused.
    pub freeze: Vec<Pattern>,
    /// Trains updates of low rank instead of weights; without it, weights themselves are trained.
    pub lora: Option<Lora>,
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
    /// What is done when a loss or gradient is not finite. A logprob that is not always stops the run, since weights are
    /// broken then.
    pub non_finite: NonFinite,
    /// Format of AdamW's running means, of which there are two for every weight.
    pub moments: MomentsFormat,
    /// Muon for matrices; AdamW alone by default.
    pub muon: Option<Muon>,
    /// Optimiser steps over which the learning rate rises linearly from 0.
    pub warmup_steps: u64,
    /// What the learning rate does after that, until the last optimiser step (`run.steps * mini_steps`).
    pub schedule: Schedule,
    /// Last optimiser steps, over which `schedule: wsd` falls.
    pub decay_steps: u64,
    /// Share of `lr` that a falling rate ends at.
    pub min_lr_ratio: f64,
    /// Optimiser steps taken on one batch of rollouts, each on an even share of the groups that are trained on; one a
    /// group where fewer groups are left.
    pub mini_steps: usize,
    /// Tokens of one forward and backward pass, those that rollouts share counted once. Bounds memory; changes no bit of a step,
    /// unless it parts rollouts that share a prompt.
    pub micro_batch_tokens: usize,
    /// Computes a prompt once for all its rollouts in a forward and backward pass, but for its last token, which predicts
    /// what was sampled. Logprobs keep every bit, gradients are the same up to the rounding of another order of sums.
    pub share_prompts: bool,
    /// Optimiser steps between the oldest token of a batch and the trainer when it takes the batch; 0 samples every
    /// batch with the newest weights.
    pub max_staleness: u64,
}

impl Default for Train {
    fn default() -> Self {
        Self {
            dtype: Dtype::F32,
            recompute: false,
            freeze: Vec::new(),
            lora: None,
            lr: 1e-6,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.0,
            grad_clip: 1.0,
            non_finite: NonFinite::Stop,
            moments: MomentsFormat::F32,
            muon: None,
            warmup_steps: 0,
            schedule: Schedule::Constant,
            decay_steps: 0,
            min_lr_ratio: 0.0,
            mini_steps: 1,
            micro_batch_tokens: 4096,
            share_prompts: true,
            max_staleness: 0,
        }
    }
}

/// Updates of low rank (LoRA, arXiv 2106.09685): `W = W0 + (alpha / rank) B A`, with `A` and `B` trained and everything
/// else frozen. The engine serves the merged weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Lora {
    /// Rows of `A` and columns of `B`; every expert has its own.
    #[serde(default = "Lora::default_rank")]
    pub rank: usize,
    /// Size of an update, as `alpha / rank` is what it is multiplied with.
    #[serde(default = "Lora::default_alpha")]
    pub alpha: f64,
    /// Names of the weights that get one, by pattern as in `train.freeze`: of projections, routers (`*.mlp.gate.weight`) and
    /// experts (`*.mlp.experts.*`). Norms, biases, embeddings and the head take none.
    pub targets: Vec<Pattern>,
}

impl Lora {
    fn default_rank() -> usize {
        8
    }

    fn default_alpha() -> f64 {
        16.0
    }
}

/// Format of AdamW's running means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MomentsFormat {
    /// 32-bit floating point.
    #[default]
    F32,
    /// Small floats of a byte, rounded at random, with a scale for every 256 (as 8-bit AdamW, arXiv 2110.02861): a quarter
    /// of the memory.
    #[serde(rename = "8bit")]
    EightBit,
}

/// The learning rate after warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// Stays as it is.
    #[default]
    Constant,
    /// Falls on a line.
    Linear,
    /// Falls on half a cosine.
    Cosine,
    /// Stays as it is, and falls on a line over the last `decay_steps` (warmup-stable-decay: MiniCPM, arXiv 2404.06395).
    Wsd,
}

/// What is done about an optimiser step whose loss or gradient is not finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NonFinite {
    /// The run stops, says which tensor it is, and keeps its checkpoints.
    #[default]
    Stop,
    /// The step is not made: weights, optimiser and version stay, and it is counted in `updates_skipped_total`.
    Skip,
}

/// Muon (Jordan et al. 2024) on every matrix but embedding and head, one expert's gate, up or down at a time: the momentum,
/// made nearly orthogonal. Updates are scaled to the size of AdamW's (Moonlight, arXiv 2502.16982, equation 4), so `lr`
/// and `weight_decay` serve both.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Muon {
    /// Decay of the running sum of gradients, in `[0, 1)`.
    pub momentum: f64,
    /// Looks ahead by one more decay.
    pub nesterov: bool,
    /// Newton-Schulz iterations, 1 to 20.
    pub iterations: usize,
}

impl Default for Muon {
    fn default() -> Self {
        Self { momentum: 0.95, nesterov: true, iterations: 5 }
    }
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
    /// Format of AdamW's running means, of which there are two for every weight.
    #[serde(default)]
    pub moments: MomentsFormat,
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
