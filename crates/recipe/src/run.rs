//! The run itself: how long, how observed, where kept.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::bytes::Bytes;

/// The shared-memory ring between engine and trainer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Ring {
    /// Memory for frames, one frame a rollout. A full ring makes the engine wait, never drop.
    pub bytes: Bytes,
    /// Seconds either side waits for the other before the run stops and says so.
    pub deadline_s: u64,
}

impl Default for Ring {
    fn default() -> Self {
        Self { bytes: Bytes::mib(64), deadline_s: 600 }
    }
}

/// Greedy accuracy on held-out problems, before the first step, after the last one and in between.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Eval {
    /// Held-out problems; 0 is no evaluation.
    pub problems: usize,
    /// Steps between evaluations; 0 is only before the first and after the last.
    pub every: u64,
    /// Tokens a completion may have; `rollout.max_new_tokens` by default.
    pub max_new_tokens: Option<usize>,
}

impl Default for Eval {
    fn default() -> Self {
        Self { problems: 512, every: 0, max_new_tokens: None }
    }
}

/// Where measurements go, besides the terminal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Metrics {
    /// Address, such as `127.0.0.1:9464`, that serves `/metrics` to Prometheus while the run lasts; `null` is nowhere.
    pub listen: Option<SocketAddr>,
    /// Writes `metrics.jsonl`, one object a step, into `run.out`.
    pub jsonl: bool,
}

impl Default for Metrics {
    fn default() -> Self {
        Self { listen: Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 9464))), jsonl: true }
    }
}

/// Length, seed and directory of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Batches of rollouts to train on; each is `train.mini_steps` optimiser steps.
    pub steps: u64,
    /// Seed of prompt order and sampling. Every sample's own seed derives from (seed, group, rollout, position).
    #[serde(default)]
    pub seed: u64,
    /// Directory for checkpoints, metrics and the recipe as it was run; relative to the current directory.
    pub out: PathBuf,
    /// Steps between checkpoints; 0 is only after the last.
    #[serde(default = "Run::default_save_every")]
    pub save_every: u64,
    /// Newest checkpoints kept; older ones are removed.
    #[serde(default = "Run::default_keep_last")]
    pub keep_last: usize,
    /// Checkpoints kept besides because their held-out accuracy is highest; needs an evaluation at every checkpoint.
    #[serde(default)]
    pub keep_best: usize,
}

impl Run {
    fn default_save_every() -> u64 {
        10
    }

    fn default_keep_last() -> usize {
        2
    }
}

/// Seed and directory of a warm start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SftRun {
    /// Seed of new weights and of the demonstrations' order.
    #[serde(default)]
    pub seed: u64,
    /// Hugging Face directory to write, relative to the current directory.
    pub out: PathBuf,
}
