//! Whole recipes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::learning::{Algorithm, Sft, Train};
use crate::rollout::{Engine, Rollout, RouterReplay};
use crate::run::{Eval, Metrics, Ring, Run, SftRun};
use crate::task::{Model, NewOrExistingModel, Task};

/// What `r3 run` needs to know, all of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// The policy to start from.
    pub model: Model,
    /// Where prompts come from and how completions are judged.
    pub task: Task,
    /// What is sampled for every batch.
    pub rollout: Rollout,
    /// Memory and batching of the rollout engine.
    #[serde(default)]
    pub engine: Engine,
    /// Whether the trainer takes the experts the rollout took.
    #[serde(default)]
    pub router_replay: RouterReplay,
    /// The objective.
    pub algorithm: Algorithm,
    /// The optimiser and its batches.
    #[serde(default)]
    pub train: Train,
    /// Shared memory between engine and trainer.
    #[serde(default)]
    pub ring: Ring,
    /// Accuracy on held-out problems.
    #[serde(default)]
    pub eval: Eval,
    /// Where measurements go.
    #[serde(default)]
    pub metrics: Metrics,
    /// Length, seed and directory of the run.
    pub run: Run,
}

/// What `r3 sft` needs to know, all of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SftRecipe {
    /// Random weights, or a directory's.
    pub model: NewOrExistingModel,
    /// Where demonstrations come from.
    pub task: Task,
    /// The optimiser and its batches.
    pub sft: Sft,
    /// Seed and directory of the warm start.
    pub run: SftRun,
}
