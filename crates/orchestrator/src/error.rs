//! Why a run ends early, what the user can do, and with which exit code.

use std::path::PathBuf;
use std::time::Duration;

use r3_engine::error::EngineError;
use r3_model::error::ModelError;
use r3_recipe::error::RecipeError;
use r3_ring::error::{FrameError, RingError};
use r3_tasks::error::TaskError;
use r3_telemetry::error::TelemetryError;
use r3_train::error::TrainError;

/// What stopped a run or kept it from starting.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum RunError {
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    #[error(transparent)]
    Task(#[from] TaskError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Ring(#[from] RingError),
    #[error("the ring delivered a broken frame")]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Train(#[from] TrainError),
    #[error(transparent)]
    Telemetry(#[from] TelemetryError),
    #[error("the ring holds {ring_bytes} bytes, but the rollouts of one step may need {needed_bytes}")]
    RingTooSmall { ring_bytes: u64, needed_bytes: u64 },
    #[error("the KV cache needs {kv_bytes} bytes of memory, but {available_bytes} are available")]
    KvTooLarge { kv_bytes: u64, available_bytes: u64 },
    #[error("{} holds the checkpoints of an earlier run", path.display())]
    OutTaken { path: PathBuf },
    #[error("{} holds weights already", path.display())]
    WeightsThere { path: PathBuf },
    #[error("{} starts from {}, which --overwrite would remove", path.display(), model.display())]
    ModelOverwritten { model: PathBuf, path: PathBuf },
    #[error("{} holds no checkpoint to resume from", path.display())]
    NothingToResume { path: PathBuf },
    #[error("the checkpoint was written with `{key}: {then}`, but the recipe now says {now}")]
    RecipeChanged { key: String, then: String, now: String },
    #[error("cannot use {}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{} is not the run state r3 wrote", path.display())]
    RunState { path: PathBuf, source: serde_json::Error },
    #[error("the rollout worker got nothing done for {waited:.0?}")]
    Stalled { waited: Duration },
    #[error("the rollout worker stopped without a word")]
    WorkerGone,
    #[error("no group of {n_groups} had rewards that differ, in {batches} batches of prompts")]
    NoSignal { n_groups: usize, batches: usize },
    #[error("rollout of group {group} is {staleness} steps old, but the recipe allows {max_staleness}")]
    Stale { group: u64, staleness: u64, max_staleness: u64 },
    #[error("interrupted; step {step} is finished and saved")]
    Interrupted { step: u64 },
    #[error("interrupted at step {step}; nothing was written")]
    Discarded { step: u64 },
}

/// How the process ends; the numbers are part of r3's interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitClass {
    /// A bug in r3.
    Bug = 1,
    /// The recipe, the arguments, or a file they name.
    Usage = 2,
    /// The machine: memory, disk, ports.
    Machine = 3,
    /// The run diverged.
    Diverged = 4,
    /// Ctrl-C or SIGTERM; the run can be resumed.
    Interrupted = 130,
}

impl RunError {
    /// What the user can change, printed as `hint: ...`.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::Recipe(error) => error.hint(),
            Self::Task(error) => error.hint(),
            Self::Model(error) => error.hint(),
            Self::Engine(error) => error.hint(),
            Self::Ring(error) => error.hint(),
            Self::Frame(error) => error.hint(),
            Self::Train(error) => error.hint(),
            Self::Telemetry(error) => error.hint(),
            Self::RingTooSmall { needed_bytes, .. } => format!("set `ring.bytes` to at least {needed_bytes}"),
            Self::KvTooLarge { available_bytes, .. } => {
                format!("set `engine.kv_memory` below {available_bytes}, or free memory")
            }
            Self::OutTaken { .. } => {
                "continue it with --resume, discard it with --overwrite, or choose another \
                 directory with --set run.out=DIR"
                    .into()
            }
            Self::WeightsThere { .. } => "choose another directory, or remove that one first".into(),
            Self::ModelOverwritten { .. } => "write to another directory with --set run.out=DIR".into(),
            Self::NothingToResume { .. } => "start the run without --resume".into(),
            Self::RecipeChanged { key, then, .. } => {
                format!(
                    "set `{key}` back to {then}, or start a new run from the checkpoint with `model.path`"
                )
            }
            Self::Io { .. } => "check that the path exists, is writable and has room".into(),
            Self::RunState { .. } => {
                "the checkpoint is damaged: remove it and resume from an earlier one".into()
            }
            Self::Stalled { .. } => {
                "a reward may never return, or the machine is too slow for `ring.deadline_s`".into()
            }
            Self::WorkerGone | Self::Stale { .. } => "this is a bug in r3; please report it".into(),
            Self::NoSignal { .. } => {
                "the task is too hard or too easy for this policy: change the task, raise \
                 `rollout.group_size`, or warm-start the policy with `r3 sft`"
                    .into()
            }
            Self::Interrupted { .. } => "continue with --resume".into(),
            Self::Discarded { .. } => "start it again".into(),
        }
    }

    /// The exit code's class.
    #[must_use]
    pub fn exit_class(&self) -> ExitClass {
        match self {
            Self::Recipe(_)
            | Self::Task(_)
            | Self::RingTooSmall { .. }
            | Self::OutTaken { .. }
            | Self::WeightsThere { .. }
            | Self::ModelOverwritten { .. }
            | Self::NothingToResume { .. }
            | Self::RecipeChanged { .. }
            | Self::Io { .. }
            | Self::RunState { .. } => ExitClass::Usage,
            Self::Model(error) => model_class(error),
            Self::Engine(error) => match error {
                EngineError::Model(error) => model_class(error),
                EngineError::Audit { .. } | EngineError::Busy { .. } => ExitClass::Bug,
                _ => ExitClass::Usage,
            },
            Self::Ring(RingError::FrameTooLarge { .. }) => ExitClass::Usage,
            Self::KvTooLarge { .. } | Self::Ring(_) | Self::Telemetry(_) | Self::Stalled { .. } => {
                ExitClass::Machine
            }
            Self::Train(error) => match error {
                TrainError::NonFinite { .. } => ExitClass::Diverged,
                TrainError::Write { .. } => ExitClass::Machine,
                TrainError::Read { .. } | TrainError::Damaged { .. } => ExitClass::Usage,
                TrainError::Model(error) => model_class(error),
                _ => ExitClass::Bug,
            },
            Self::NoSignal { .. } => ExitClass::Diverged,
            Self::Frame(_) | Self::WorkerGone | Self::Stale { .. } => ExitClass::Bug,
            Self::Interrupted { .. } | Self::Discarded { .. } => ExitClass::Interrupted,
        }
    }
}

fn model_class(error: &ModelError) -> ExitClass {
    match error {
        ModelError::Write { .. } => ExitClass::Machine,
        ModelError::Tensor(_) | ModelError::NoSuchTensor { .. } => ExitClass::Bug,
        _ => ExitClass::Usage,
    }
}

/// Attaches a path to an I/O error.
pub(crate) fn io_at(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> RunError {
    let path = path.to_path_buf();
    move |source| RunError::Io { path, source }
}
