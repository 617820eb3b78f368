//! Why the engine cannot be built, or refuses a request.

use r3_core::count::counted;
use r3_core::ids::GroupId;
use r3_core::routes::RouteError;
use r3_core::support::SupportError;
use r3_model::error::ModelError;
use r3_scheduler::error::SchedulerError;

/// What went wrong in the engine.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum EngineError {
    #[error("the KV cache has {kv_bytes} bytes, but one block of {block_tokens} tokens needs {block_bytes}")]
    NoBlock { kv_bytes: u64, block_bytes: u64, block_tokens: usize },
    #[error("prompt and completion may take {tokens} tokens, but the model has {max_positions} positions")]
    TooLong { tokens: usize, max_positions: usize },
    #[error(
        "the KV cache of {kv_bytes} bytes holds {capacity_tokens} tokens, but one sequence may need {needed_tokens}"
    )]
    KvTooSmall { kv_bytes: u64, capacity_tokens: usize, needed_tokens: usize, needed_bytes: u64 },
    #[error("{} cannot be scored: there is nothing to predict", counted(*tokens, "token"))]
    NothingToScore { tokens: usize },
    #[error("position {position}: a row of routes is [{layers}][{top_k}], one list of experts a MoE layer")]
    ReplayShape { position: usize, layers: usize, top_k: usize },
    #[error(
        "the engine did not load what it was given: {differing} of {tensors} tensors differ, first `{first}`"
    )]
    Audit { tensors: usize, differing: usize, first: String },
    #[error("scoring needs an idle engine, but {sequences} sequences are unfinished or not taken")]
    Busy { sequences: usize },
    #[error("routes to replay have {}, but {tokens} tokens are scored", counted(*rows, "row"))]
    ReplayRows { rows: usize, tokens: usize },
    #[error("routes to replay break their contract")]
    ReplayRoutes(#[source] RouteError),
    #[error("logits cannot be divided by a temperature of {temperature}")]
    Temperature { temperature: f32 },
    #[error("the tokens were drawn from sets that break their contract")]
    Support(#[source] SupportError),
    #[error(
        "the token at position {position} was drawn from a set with token {token}, outside the vocabulary of {vocab_size}"
    )]
    SupportToken { token: u32, position: usize, vocab_size: usize },
    #[error("group {group}, rollout {index}: the logprob of the token at position {position} is {logprob}")]
    NonFinite { group: GroupId, index: u32, position: usize, logprob: f32 },
    #[error("the logprob of the token at position {position} is {logprob}")]
    ScoreNonFinite { position: usize, logprob: f32 },
    #[error(transparent)]
    Scheduler(#[from] SchedulerError),
    #[error(transparent)]
    Model(#[from] ModelError),
}

impl EngineError {
    /// What the user can change.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::NoBlock { block_bytes, .. } => {
                format!("set `engine.kv_memory` to at least {block_bytes} bytes, better a hundred times that")
            }
            Self::TooLong { .. } => "shorten the prompt or `rollout.max_new_tokens`".into(),
            Self::KvTooSmall { needed_bytes, .. } => {
                format!(
                    "set `engine.kv_memory` to at least {needed_bytes}, or shorten prompts or completions"
                )
            }
            Self::NothingToScore { .. } => "give at least two tokens".into(),
            Self::ReplayShape { .. } => "check which model the routes are of".into(),
            Self::Audit { .. } => {
                "a refit that fails leaves the old weights active; please report this".into()
            }
            Self::Busy { .. } => "finish or abort the sequences, and take them, first".into(),
            Self::ReplayRoutes(_) => "check which model the routes are of".into(),
            Self::ReplayRows { .. } => "`routed_experts` needs one row for each token but the last".into(),
            Self::Temperature { .. } => {
                "give a temperature above 0, such as 1; 0.01 is next to greedy".into()
            }
            Self::Support(_) => {
                "`supports` has a list for each of the last tokens, ascending, with that token in it".into()
            }
            Self::SupportToken { .. } => "check which model the tokens are of".into(),
            Self::NonFinite { .. } | Self::ScoreNonFinite { .. } => {
                "numbers overflow on their way through these weights: go back to an earlier checkpoint, and if a run made \
                 them, lower `train.lr`"
                    .into()
            }
            Self::Scheduler(error) => error.hint(),
            Self::Model(error) => error.hint(),
        }
    }
}
