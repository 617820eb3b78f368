//! Why a run ends early, what the user can do, and with which exit code.

use std::error::Error;
use std::io::{self, ErrorKind};
use std::iter;
use std::path::{Path, PathBuf};
use std::time::Duration;

use r3_core::count::counted;
use r3_engine::error::EngineError;
use r3_model::error::ModelError;
use r3_recipe::error::RecipeError;
use r3_ring::error::{FrameError, RingError};
use r3_scheduler::error::SchedulerError;
use r3_tasks::error::TaskError;
use r3_telemetry::error::TelemetryError;
use r3_train::error::TrainError;
use r3_wire::error::WireError;

use crate::pending_file::FILE as PENDING;
use crate::run_state::{Change, FILE as STATE};

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
    #[error(transparent)]
    Routes(#[from] WireError),
    #[error(
        "the ring holds {}, but the rollouts of one step may need {needed_bytes}", counted(*ring_bytes, "byte")
    )]
    RingTooSmall { ring_bytes: u64, needed_bytes: u64, max_support: Option<usize> },
    #[error("the KV cache needs {kv_bytes} bytes of memory, but {available_bytes} are available")]
    KvTooLarge { kv_bytes: u64, available_bytes: u64 },
    #[error(
        "truncated draws that keep up to {} each need {support_bytes} bytes of memory, but beside the KV \
         cache {available_bytes} are available", counted(*max_support, "token")
    )]
    SupportsTooLarge { max_support: usize, support_bytes: u64, available_bytes: u64 },
    #[error("{} holds an earlier run", path.display())]
    OutTaken { path: PathBuf },
    #[error("another process runs in {}", path.display())]
    OutBusy { path: PathBuf },
    #[error("{} is there already", path.display())]
    OutFileTaken { path: PathBuf },
    #[error("{} is what is read here, and would be replaced", path.display())]
    OutFileRead { path: PathBuf },
    #[error("another process writes {}", path.display())]
    OutFileBusy { path: PathBuf },
    #[error("{} holds a model already", path.display())]
    WeightsThere { path: PathBuf },
    #[error("{} would be written over by the recipe that a run leaves there", recipe.display())]
    RecipeThere { recipe: PathBuf },
    #[error("{} is the directory of a run", path.display())]
    RunThere { path: PathBuf },
    #[error("{} is a checkpoint of a run", path.display())]
    CheckpointThere { path: PathBuf },
    #[error(
        "what group {group} began is {staleness} versions old, but `train.max_staleness` is {max_staleness}"
    )]
    PendingStale { group: u64, staleness: u64, max_staleness: u64 },
    #[error("{} starts from {}, which --overwrite would remove", path.display(), model.display())]
    ModelOverwritten { model: PathBuf, path: PathBuf },
    #[error("{} holds no checkpoint to resume from", path.display())]
    NothingToResume { path: PathBuf },
    #[error("{} holds a model and no run to resume", path.display())]
    ModelToResume { path: PathBuf },
    #[error("{} has got a model meanwhile", path.display())]
    ModelAppeared { path: PathBuf, unfinished: PathBuf },
    #[error(
        "the checkpoint was written with `{}: {}`, but the recipe now says {}", change.key, change.then, change.now
    )]
    RecipeChanged { change: Change },
    #[error("`{key}` holds `{pattern}`, which matches no weight {}", could_be(key))]
    NoSuchWeight { key: &'static str, pattern: String, nearest: Vec<String> },
    #[error(
        "{} is not the model that the checkpoint's updates are of: its `{tensor}` is another", path.display()
    )]
    OtherBase { path: PathBuf, tensor: String },
    #[error("{} was not trained with `train.lora`, so it has no adapter", path.display())]
    NoAdapter { path: PathBuf },
    #[error("`train.freeze` leaves nothing to train")]
    NothingTrained,
    #[error("{} has another vocabulary or other MoE layers than the model", path.display())]
    ForeignReference { path: PathBuf },
    #[error("`rollout.stop_token_ids` holds {id}, but the model's vocabulary ends at {vocab_size}")]
    NoSuchStopToken { id: u32, vocab_size: usize },
    #[error("the problems of the task are not those that the run was started with")]
    OtherProblems,
    #[error("{} is not the reference policy that the run was started with", path.display())]
    OtherReference { path: PathBuf },
    #[error("cannot use {}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{} is not the run state r3 wrote", path.display())]
    RunState { path: PathBuf, source: serde_json::Error },
    #[error("{} holds a broken rollout", path.display())]
    PendingFrame { path: PathBuf, source: FrameError },
    #[error("{} holds rollouts {found:?} of group {group}, but a group has {expected}, each once", path.display())]
    PendingGroup { path: PathBuf, group: u64, found: Vec<u32>, expected: usize },
    #[error("{} holds rollouts of group {group} that complete another prompt than the task's", path.display())]
    PendingPrompt { path: PathBuf, group: u64 },
    #[error("the rollout worker got nothing done for {waited:.0?}")]
    Stalled { waited: Duration },
    #[error("the rollout worker stopped without a word")]
    WorkerGone,
    #[error(
        "no group of {n_groups} had rewards that differ, in {} of prompts", counted(*batches, "batch")
    )]
    NoSignal { n_groups: usize, batches: usize },
    #[error(
        "rollouts of group {group} carry routes of layers {found:?}, but the model's MoE layers are {expected:?}"
    )]
    ForeignLayers { group: u64, found: Vec<u32>, expected: Vec<u32> },
    #[error("routes to replay are of layers {found:?}, but the model's MoE layers are {expected:?}")]
    ReplayLayers { found: Vec<u32>, expected: Vec<u32> },
    #[error(
        "rollout of group {group} is {} old, but the recipe allows {max_staleness}", counted(*staleness, "step")
    )]
    Stale { group: u64, staleness: u64, max_staleness: u64 },
    #[error("interrupted; step {step} is finished and saved")]
    Interrupted { step: u64 },
    #[error("interrupted at step {step}; nothing was written")]
    Discarded { step: u64 },
    #[error("interrupted; {} of {n_rollouts} lie in {}", counted(*n_written, "rollout"), path.display())]
    Unfinished { n_written: u64, n_rollouts: u64, path: PathBuf },
    #[error("interrupted; {} of {n_rollouts} went to {}", counted(*n_written, "rollout"), path.display())]
    CutOff { n_written: u64, n_rollouts: u64, path: PathBuf },
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

/// What there is too much of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Excess {
    /// Tokens of one sequence, for the model's positions.
    Tokens,
    /// Slots of all sequences, for their ids.
    Slots,
    /// Bytes, for the machine.
    Bytes,
}

impl RunError {
    /// What there is too much of, if that is the error: for commands whose sizes are arguments, which [`Self::hint`] does
    /// not know.
    #[must_use]
    pub fn excess(&self) -> Option<Excess> {
        match self {
            Self::Engine(EngineError::TooLong { .. }) | Self::Model(ModelError::TooLong { .. }) => {
                Some(Excess::Tokens)
            }
            Self::Engine(EngineError::Scheduler(SchedulerError::TooManySlots { .. })) => Some(Excess::Slots),
            Self::KvTooLarge { .. } | Self::Ring(RingError::NoRoom { .. }) => Some(Excess::Bytes),
            _ => None,
        }
    }

    /// What the user can change, printed as `hint: ...`.
    #[must_use]
    pub fn hint(&self) -> String {
        io_causes(self).find_map(limit_hint).map_or_else(|| self.own_hint(), str::to_owned)
    }

    fn own_hint(&self) -> String {
        match self {
            Self::Recipe(error) => error.hint(),
            Self::Task(error) => error.hint(),
            Self::Model(error) => error.hint(),
            Self::Engine(error) => error.hint(),
            Self::Ring(error) => error.hint(),
            Self::Frame(error) => error.hint(),
            Self::Train(error) => error.hint(),
            Self::Telemetry(error) => error.hint(),
            Self::Routes(error) => error.hint(),
            Self::RingTooSmall { needed_bytes, max_support, .. } => ring_hint(*needed_bytes, *max_support),
            Self::KvTooLarge { available_bytes, .. } => {
                format!("set `engine.kv_memory` below {available_bytes}, or free memory")
            }
            Self::SupportsTooLarge { .. } => {
                "set `rollout.sample_top_k`, to 256 say, or lower `engine.max_running` or `rollout.max_new_tokens`".into()
            }
            Self::OutTaken { .. } => OUT_TAKEN.into(),
            Self::OutFileTaken { .. } => "replace it with --overwrite, or write to another file".into(),
            Self::OutFileRead { .. } => "write to another file".into(),
            Self::OutFileBusy { .. } => "wait for it, stop it, or write to another file".into(),
            Self::WeightsThere { .. } => "choose another directory, or remove that one first".into(),
            Self::RunThere { .. } => RUN_THERE.into(),
            Self::RecipeThere { .. } => RECIPE_THERE.into(),
            Self::CheckpointThere { .. } => "choose another directory, since the run may be resumed from it".into(),
            Self::PendingStale { .. } => PENDING_STALE.into(),
            Self::OutBusy { .. } => OUT_BUSY.into(),
            Self::ModelOverwritten { .. } => "write to another directory with --set run.out=DIR".into(),
            Self::ForeignReference { .. } => FOREIGN_REFERENCE.into(),
            Self::NoSuchWeight { nearest, .. } => format!("the nearest names are `{}`", nearest.join("`, `")),
            Self::OtherBase { .. } => {
                "set `model.path` to the model that the run was started with, or start a new run from the checkpoint"
                    .into()
            }
            Self::NoSuchStopToken { .. } => "leave the key out to end completions as the model's own files say".into(),
            Self::NoAdapter { .. } => "export the whole model, without --adapter".into(),
            Self::NothingTrained => "freeze less, or give `train.lora` other targets".into(),
            Self::NothingToResume { .. } => "start the run without --resume".into(),
            Self::ModelToResume { .. } => MODEL_TO_RESUME.into(),
            Self::ModelAppeared { unfinished, .. } => appeared_hint(unfinished),
            Self::RecipeChanged { change: Change { key, then, .. } } => {
                format!(
                    "set `{key}` back to {then}, or start a new run from the checkpoint with `model.path`"
                )
            }
            Self::Io { path, source } => io_hint(path, source).into(),
            Self::PendingPrompt { .. } | Self::OtherProblems | Self::OtherReference { .. } => STARTED_WITH.into(),
            Self::RunState { .. } | Self::PendingFrame { .. } | Self::PendingGroup { .. } => {
                DAMAGED.into()
            }
            Self::Stalled { .. } => {
                "a reward may never return, or the machine is too slow for `ring.deadline_s`".into()
            }
            Self::WorkerGone | Self::Stale { .. } | Self::ForeignLayers { .. } => {
                "this is a bug in r3; please report it".into()
            }
            Self::ReplayLayers { .. } => "check which model the routes are of".into(),
            Self::NoSignal { .. } => {
                "the task is too hard or too easy for this policy: change the task, raise \
                 `rollout.group_size` or `max_batches`, or warm-start the policy with `r3 sft`"
                    .into()
            }
            Self::Interrupted { .. } => "continue with --resume".into(),
            Self::Discarded { .. } => "start it again".into(),
            Self::Unfinished { .. } => UNFINISHED.into(),
            Self::CutOff { .. } => "start it again, which samples all of them".into(),
        }
    }

    /// The exit code's class.
    #[must_use]
    pub fn exit_class(&self) -> ExitClass {
        match self {
            _ if io_causes(self).any(is_out_of_files) => ExitClass::Machine,
            Self::Recipe(_)
            | Self::Task(_)
            | Self::Routes(_)
            | Self::RingTooSmall { .. }
            | Self::OutTaken { .. }
            | Self::OutBusy { .. }
            | Self::OutFileTaken { .. }
            | Self::OutFileRead { .. }
            | Self::OutFileBusy { .. }
            | Self::WeightsThere { .. }
            | Self::RunThere { .. }
            | Self::RecipeThere { .. }
            | Self::CheckpointThere { .. }
            | Self::PendingStale { .. }
            | Self::ModelOverwritten { .. }
            | Self::NothingToResume { .. }
            | Self::ModelToResume { .. }
            | Self::ModelAppeared { .. }
            | Self::ForeignReference { .. }
            | Self::NoSuchWeight { .. }
            | Self::NothingTrained
            | Self::OtherBase { .. }
            | Self::NoAdapter { .. }
            | Self::NoSuchStopToken { .. }
            | Self::OtherProblems
            | Self::OtherReference { .. }
            | Self::RecipeChanged { .. }
            | Self::ReplayLayers { .. }
            | Self::RunState { .. }
            | Self::PendingFrame { .. }
            | Self::PendingGroup { .. }
            | Self::PendingPrompt { .. } => ExitClass::Usage,
            Self::Io { source, .. } => io_class(source),
            Self::Model(error) => model_class(error),
            Self::Engine(error) => match error {
                EngineError::Model(error) => model_class(error),
                EngineError::NonFinite { .. } | EngineError::ScoreNonFinite { .. } => ExitClass::Diverged,
                EngineError::Audit { .. }
                | EngineError::Busy { .. }
                | EngineError::Scheduler(SchedulerError::StaleEpoch { .. }) => ExitClass::Bug,
                _ => ExitClass::Usage,
            },
            Self::Ring(RingError::FrameTooLarge { .. }) | Self::Telemetry(TelemetryError::Corrupt { .. }) => {
                ExitClass::Usage
            }
            Self::KvTooLarge { .. }
            | Self::SupportsTooLarge { .. }
            | Self::Ring(_)
            | Self::Telemetry(_)
            | Self::Stalled { .. } => ExitClass::Machine,
            Self::Train(error) => match error {
                TrainError::NonFinite { .. } => ExitClass::Diverged,
                TrainError::Write { .. } => ExitClass::Machine,
                TrainError::Read { .. } | TrainError::Damaged { .. } => ExitClass::Usage,
                TrainError::Model(error) => model_class(error),
                _ => ExitClass::Bug,
            },
            Self::NoSignal { .. } => ExitClass::Diverged,
            Self::Frame(_) | Self::WorkerGone | Self::Stale { .. } | Self::ForeignLayers { .. } => {
                ExitClass::Bug
            }
            Self::Interrupted { .. }
            | Self::Discarded { .. }
            | Self::Unfinished { .. }
            | Self::CutOff { .. } => ExitClass::Interrupted,
        }
    }
}

fn ring_hint(needed_bytes: u64, max_support: Option<usize>) -> String {
    let larger = format!("set `ring.bytes` to at least {needed_bytes}");
    match max_support {
        Some(n) => format!("{larger}, or `rollout.sample_top_k` below {n}, the tokens that a draw may keep"),
        None => larger,
    }
}

/// How to raise a limit of the process that was met, whatever was being done.
fn limit_hint(error: &io::Error) -> Option<&'static str> {
    match error.kind() {
        ErrorKind::FileTooLarge => Some(FILE_TOO_LARGE),
        _ if is_out_of_files(error) => Some(OUT_OF_FILES),
        _ => None,
    }
}

/// What the system said, in whatever crate it was asked.
fn io_causes(error: &RunError) -> impl Iterator<Item = &io::Error> {
    let causes = iter::successors(Some(error as &dyn Error), |&error| error.source());
    causes.filter_map(|error| error.downcast_ref::<io::Error>())
}

fn model_class(error: &ModelError) -> ExitClass {
    match error {
        ModelError::Write { .. } => ExitClass::Machine,
        ModelError::Tensor(_) | ModelError::NoSuchTensor { .. } => ExitClass::Bug,
        _ => ExitClass::Usage,
    }
}

/// What a pattern under `key` should have matched.
fn could_be(key: &str) -> &'static str {
    if key == "train.freeze" { "of the model" } else { "that takes an update of low rank" }
}

/// Linux's numbers of two errors that the standard library has no kind for: too many open files, of the machine and of this process.
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;

/// Whether this process or the whole machine may open no more files.
fn is_out_of_files(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|code| [ENFILE, EMFILE].contains(&code))
}

fn io_hint(path: &Path, error: &io::Error) -> &'static str {
    let is_of_checkpoint = path.file_name().is_some_and(|name| name == STATE || name == PENDING);
    match error.kind() {
        ErrorKind::NotFound if is_of_checkpoint => DAMAGED,
        ErrorKind::WouldBlock | ErrorKind::OutOfMemory => "raise `ulimit -u` and `ulimit -v`, or free memory",
        _ => "check that the path exists, is writable and has room",
    }
}

const OUT_OF_FILES: &str = "raise `ulimit -n`, or end what holds files open";
const FILE_TOO_LARGE: &str = "raise `ulimit -f`, or choose a file system that holds files of this size; what was there before is intact";
const FOREIGN_REFERENCE: &str =
    "set `objective.kl.reference` to a model of the same configuration, such as `model.path`";
const MODEL_TO_RESUME: &str = "name the directory of a run as `run.out`, or start a run from the model with `model.path`, without --resume";
const PENDING_STALE: &str =
    "resume with the bound that the run had, which its `recipe.yaml` says, or a higher one";
const STARTED_WITH: &str = "resume with what the run was started with, or start a new run from its newest checkpoint with `model.path`";
const DAMAGED: &str = "the checkpoint is damaged: remove it and resume from an earlier one";
const RECIPE_THERE: &str = "give it another name, or choose another directory with --set run.out=DIR";
const RUN_THERE: &str = "choose another directory, or one inside it: whoever names the run would get this model instead of its newest \
                         checkpoint";
const OUT_TAKEN: &str = "continue it with --resume, discard it with --overwrite, or choose another directory with --set run.out=DIR";
const OUT_BUSY: &str =
    "wait for it, stop it, or choose another directory, which --set run.out=DIR sets in a recipe";
const UNFINISHED: &str = "start it again, which samples all of them, or keep those under another name";

/// A path that is wrong is its author's to change; room, memory, files and threads are the machine's.
fn io_class(error: &io::Error) -> ExitClass {
    match error.kind() {
        ErrorKind::StorageFull
        | ErrorKind::FileTooLarge
        | ErrorKind::QuotaExceeded
        | ErrorKind::ReadOnlyFilesystem
        | ErrorKind::OutOfMemory
        | ErrorKind::WouldBlock => ExitClass::Machine,
        _ => ExitClass::Usage,
    }
}

fn appeared_hint(unfinished: &Path) -> String {
    let unfinished = unfinished.display();
    format!(
        "the one that was trained lies in {unfinished}: move it elsewhere, since the next one written here replaces it"
    )
}

/// Attaches a path to an I/O error.
pub(crate) fn io_at(path: &Path) -> impl FnOnce(io::Error) -> RunError {
    let path = path.to_path_buf();
    move |source| RunError::Io { path, source }
}

#[cfg(test)]
mod tests;
