//! What rollout and trainer promise each other about floating point.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What decides the order in which sums are added up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Numerics {
    /// The model's dimensions alone: at equal weights, rollout and trainer logprobs agree to the bit, whatever the
    /// batches, chunks, caches and threads. Needs one dtype on both sides.
    Exact,
    /// Whatever is fastest for the shape at hand; what that changes is measured every step.
    Fast,
}
