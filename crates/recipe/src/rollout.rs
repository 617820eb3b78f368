//! How completions are sampled: the rollout, its engine, and what the trainer replays of it.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::bytes::Bytes;

/// Format of weights and of what they are multiplied with; sums are f32 in either.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// 32-bit floating point.
    F32,
    /// Brain float, 8 significant bits: half the memory, twice the speed. Where the other side is f32, the mismatch that
    /// replay is for.
    #[default]
    Bf16,
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        })
    }
}

/// What is sampled for every batch the trainer learns from.
///
/// Logprobs, the rollout's and the trainer's, are those of the distribution sampled from: logits are divided by
/// `temperature`, then cut by `sample_top_k`, `top_p` and `min_p`, in this order, and what is left is renormalised. What
/// a draw kept goes to the trainer with its token, which scores it over the same tokens. That takes 4 bytes a kept token,
/// and room is made for as many as there may be: `sample_top_k`, or the vocabulary.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rollout {
    /// Prompts in a batch, each with `group_size` completions; a multiple of `train.mini_steps`.
    pub groups: usize,
    /// Completions of one prompt (`G`), at least 2: an advantage compares them.
    pub group_size: usize,
    /// Tokens a completion may have, its stop token included.
    pub max_new_tokens: usize,
    /// Divides the logits before sampling; above 0.
    #[serde(default = "one")]
    pub temperature: f64,
    /// Samples from the fewest most likely tokens that hold this much of what `sample_top_k` left; 1 takes all of them.
    #[serde(default = "one")]
    pub top_p: f64,
    /// Samples from this many most likely tokens; 0 takes all of them. With `top_p` or `min_p` it also bounds what is
    /// kept for every token, in the ring as in memory; without, that is the whole vocabulary, which needs a small one.
    #[serde(default)]
    pub sample_top_k: usize,
    /// Samples from tokens at least this many times as likely as the most likely one; 0 takes all of them.
    #[serde(default)]
    pub min_p: f64,
    /// Format the engine holds weights, keys and values in.
    #[serde(default)]
    pub dtype: Dtype,
    /// Token ids that end a completion; the end tokens of the model's configuration by default.
    #[serde(default)]
    pub stop_token_ids: Option<Vec<u32>>,
    /// Groups begun beyond those a step trains on, at most `groups`. A step takes the oldest groups that are whole and
    /// leaves the others for the next, so it does not wait for the slowest completion; none is ever dropped. Above 0,
    /// `train.max_staleness` must be at least `train.mini_steps`.
    #[serde(default)]
    pub over_sampling_groups: usize,
}

fn one() -> f64 {
    1.0
}

/// The rollout engine: memory and batching. Changes speed, never what given weights sample; of completions in flight
/// at a refit, it also decides how many tokens the old weights sampled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Engine {
    /// Memory for keys, values and, with replay on, routes of all resident tokens. What keys and values take of it is free
    /// while the trainer trains.
    pub kv_memory: Bytes,
    /// Tokens in a block, the unit in which that memory is given out and shared.
    pub block_tokens: usize,
    /// Tokens of one tick, decoded and prefilled together; longer prompts are prefilled in chunks.
    pub max_batch_tokens: usize,
    /// Sequences decoded at once.
    pub max_running: usize,
    /// Keeps blocks of finished sequences findable by their tokens until memory is needed or weights change.
    pub prefix_cache: bool,
}

impl Default for Engine {
    fn default() -> Self {
        Self {
            kv_memory: Bytes::mib(64),
            block_tokens: 16,
            max_batch_tokens: 2048,
            max_running: 128,
            prefix_cache: true,
        }
    }
}

/// Whether the trainer takes experts that were chosen before (R3 and R2, arXiv 2510.11370). One switch for both sides.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RouterReplay {
    /// What is replayed.
    pub mode: ReplayMode,
    /// With `mode: r2` or `off`, records the rollout's routes all the same, only to count where the trainer's router
    /// disagrees.
    pub diagnose: bool,
    /// With `mode: r2`, replays the gates of that choice, too: constants, through which the router does not learn. An ablation.
    pub gates: bool,
    /// Replays an expert only where its score, as a probability or through the sigmoid, is at least this share of the least
    /// that the trainer's router itself would choose; else the best of that choice takes its place. 0 replays all, 1 none but
    /// the router's own. An ablation.
    pub threshold: f64,
}

/// Whose expert choice the trainer uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReplayMode {
    /// The rollout engine's, recorded token by token; gates still come from the trainer's own scores.
    #[default]
    R3,
    /// The trainer's own before the first update of a step, which the updates of all mini-steps hold to; gates still come
    /// from the scores at hand. With one mini-step the same as `off`, bit for bit. Unless `diagnose` asks for it, the rollout
    /// records no route.
    R2,
    /// The trainer's own, at every pass. Unless `diagnose` asks for it, no route is recorded and no memory held for one.
    Off,
}

/// How trained weights get into the engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Refit {
    /// What happens to completions that `rollout.over_sampling_groups` left unfinished. Versions are kept by token, so
    /// staleness is exact in each case.
    pub in_flight: InFlight,
}

/// What a refit does to unfinished completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum InFlight {
    /// Waits until the old weights have finished them, so that no completion mixes versions.
    Drain,
    /// Takes them out of the engine, and resumes them where they stopped when the next step samples.
    Abort,
    /// Leaves them in the engine: keys and values are computed again under the new weights, tokens, logprobs and routes
    /// stay. The same completions as `abort`.
    #[default]
    Continue,
}
