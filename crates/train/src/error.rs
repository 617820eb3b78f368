//! Why the trainer stops.

use std::io;
use std::path::PathBuf;

use r3_core::count::counted;
use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_core::routes::{RouteDims, RouteError};
use r3_core::support::SupportError;
use r3_model::error::ModelError;

/// Why a batch, an optimiser step or a checkpoint failed. Weights and earlier checkpoints are as they were.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum TrainError {
    #[error("group {group}, rollout {index} has no routes, but the trainer needs them")]
    MissingRoutes { group: GroupId, index: u32 },
    #[error("group {group}, rollout {index} has routes that break their contract")]
    Routes { group: GroupId, index: u32, source: RouteError },
    #[error("group {group}, rollout {index} has routes of shape {dims:?}, but the model's are {expected:?}")]
    RouteShape { group: GroupId, index: u32, dims: RouteDims, expected: RouteDims },
    #[error(
        "group {group}, rollout {index}: token {position} was sampled from a part of the vocabulary that is not said"
    )]
    MissingSupport { group: GroupId, index: u32, position: usize },
    #[error("group {group}, rollout {index} has supports that break their contract")]
    Support { group: GroupId, index: u32, source: SupportError },
    #[error(
        "group {group}, rollout {index}: token {position} could have been {token}, but the model has {vocab_size} tokens"
    )]
    SupportToken { group: GroupId, index: u32, position: usize, token: TokenId, vocab_size: usize },
    #[error("group {group}, rollout {index} has {len} {array}, but {expected} are needed")]
    Misshapen { group: GroupId, index: u32, array: &'static str, len: usize, expected: usize },
    #[error("group {group}, rollout {index} came twice")]
    DuplicateRollout { group: GroupId, index: u32 },
    #[error("group {group}, rollout {index} lies in group {holder}")]
    ForeignRollout { group: GroupId, index: u32, holder: GroupId },
    #[error("group {group}, rollout {index}: {array} holds {value} at {at}")]
    NonFiniteInput { group: GroupId, index: u32, array: &'static str, value: f32, at: usize },
    #[error("{tensor} is not finite in the step after version {version}")]
    NonFinite { tensor: String, version: PolicyVersion },
    #[error("example {example} has {tokens} tokens, of which the answer starts at {answer_start}")]
    EmptyAnswer { example: usize, tokens: usize, answer_start: usize },
    #[error("cannot write {}, which needs {needed_bytes} bytes", path.display())]
    Write { path: PathBuf, needed_bytes: u64, source: io::Error },
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is damaged", path.display())]
    Damaged { path: PathBuf, source: Damage },
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

/// What is wrong with a file of a checkpoint.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum Damage {
    #[error("it has {} instead of {expected}", counted(*bytes, "byte"))]
    Length { bytes: u64, expected: u64 },
    #[error("its bytes are not the ones that were written")]
    Checksum,
    #[error("it is not the JSON that was written")]
    Json(#[from] serde_json::Error),
    #[error("it is not a whole safetensors file")]
    Safetensors(#[from] safetensors::SafeTensorError),
    #[error("the checkpoint does not list it")]
    Unlisted,
    #[error("{tensor} is missing")]
    Missing { tensor: String },
    #[error("{tensor} belongs to no weight of this model")]
    Surplus { tensor: String },
    #[error("{tensor} is {found}, but the model needs {expected}")]
    Misshapen { tensor: String, found: String, expected: String },
}

impl TrainError {
    /// What the user can change, printed as `hint: ...`.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::MissingRoutes { .. } => {
                "the rollout engine did not record them: `router_replay.mode` has to drive both sides".into()
            }
            Self::MissingSupport { .. } => {
                "the rollout engine did not record it: set `rollout.top_p`, `rollout.sample_top_k` and `rollout.min_p` to \
                their defaults to train without"
                    .into()
            }
            Self::SupportToken { .. } => {
                "the rollout is not of this model: check that engine and trainer loaded one directory".into()
            }
            Self::Routes { .. } | Self::RouteShape { .. } => {
                "the routes are not this model's: check that engine and trainer loaded one directory".into()
            }
            Self::Misshapen { .. }
            | Self::Support { .. }
            | Self::DuplicateRollout { .. }
            | Self::ForeignRollout { .. }
            | Self::NonFiniteInput { .. } => {
                "whoever made this rollout broke its contract; if that was r3, please report it".into()
            }
            Self::NonFinite { .. } => {
                "the run diverged: resume from the last checkpoint with a lower `train.lr` or `train.grad_clip`"
                    .into()
            }
            Self::Tensor(_) => "this is a bug in r3, please report it".into(),
            Self::EmptyAnswer { .. } => "an example needs a prompt token and an answer token at least".into(),
            Self::Write { needed_bytes, .. } => format!(
                "earlier checkpoints are intact: free {needed_bytes} bytes, or lower `run.keep_last`"
            ),
            Self::Read { .. } => "check the path and its permissions".into(),
            Self::Damaged { .. } => "remove this checkpoint and resume from an older one".into(),
            Self::Model(error) => error.hint(),
        }
    }
}
