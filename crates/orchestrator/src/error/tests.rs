//! Tests of hints and exit classes.

use r3_core::ids::PolicyVersion;
use r3_recipe::recipe::Recipe;
use r3_train::error::Damage;

use super::*;

fn path() -> PathBuf {
    "a/file".into()
}

fn failed(kind: ErrorKind) -> io::Error {
    kind.into()
}

fn json() -> serde_json::Error {
    serde_json::from_str::<u8>("{").unwrap_err()
}

/// Errors of the run's own, by class.
fn own() -> Vec<(ExitClass, RunError)> {
    let (waited, io) = (Duration::from_secs(1), |kind| RunError::Io { path: path(), source: failed(kind) });
    let change = Change { key: "k".into(), then: "1".into(), now: "2".into() };
    let changed = RunError::RecipeChanged { change };
    vec![
        (ExitClass::Usage, RunError::RingTooSmall { ring_bytes: 1, needed_bytes: 2, max_support: None }),
        (ExitClass::Machine, RunError::KvTooLarge { kv_bytes: 2, available_bytes: 1 }),
        (
            ExitClass::Machine,
            RunError::SupportsTooLarge { max_support: 1, support_bytes: 2, available_bytes: 1 },
        ),
        (ExitClass::Usage, RunError::OutTaken { path: path() }),
        (ExitClass::Usage, RunError::OutBusy { path: path() }),
        (ExitClass::Usage, RunError::OutFileTaken { path: path() }),
        (ExitClass::Usage, RunError::OutFileRead { path: path() }),
        (ExitClass::Usage, RunError::OutFileBusy { path: path() }),
        (ExitClass::Usage, RunError::WeightsThere { path: path() }),
        (ExitClass::Usage, RunError::RunThere { path: path() }),
        (ExitClass::Usage, RunError::RecipeThere { recipe: path() }),
        (ExitClass::Usage, RunError::CheckpointThere { path: path() }),
        (ExitClass::Usage, RunError::PendingStale { group: 1, staleness: 2, max_staleness: 1 }),
        (ExitClass::Usage, RunError::ModelOverwritten { model: path(), path: path() }),
        (ExitClass::Usage, RunError::NothingToResume { path: path() }),
        (ExitClass::Usage, RunError::ModelToResume { path: path() }),
        (ExitClass::Usage, RunError::ModelAppeared { path: path(), unfinished: path() }),
        (ExitClass::Usage, RunError::ForeignReference { path: path() }),
        (
            ExitClass::Usage,
            RunError::NoSuchWeight { key: "train.freeze", pattern: "x".into(), nearest: vec!["y".into()] },
        ),
        (ExitClass::Usage, RunError::NothingTrained),
        (ExitClass::Usage, RunError::OtherBase { path: path(), tensor: "x".into() }),
        (ExitClass::Usage, RunError::NoAdapter { path: path() }),
        (ExitClass::Usage, RunError::NoSuchStopToken { id: 64, vocab_size: 64 }),
        (ExitClass::Usage, RunError::OtherProblems),
        (ExitClass::Usage, RunError::OtherReference { path: path() }),
        (ExitClass::Usage, changed),
        (ExitClass::Usage, io(ErrorKind::NotFound)),
        (ExitClass::Usage, io(ErrorKind::PermissionDenied)),
        (ExitClass::Machine, io(ErrorKind::StorageFull)),
        (ExitClass::Machine, io(ErrorKind::FileTooLarge)),
        (ExitClass::Machine, io(ErrorKind::WouldBlock)),
        (ExitClass::Machine, RunError::Io { path: path(), source: io::Error::from_raw_os_error(EMFILE) }),
        (ExitClass::Machine, RunError::Io { path: path(), source: io::Error::from_raw_os_error(ENFILE) }),
        (ExitClass::Usage, RunError::RunState { path: path(), source: json() }),
        (ExitClass::Usage, RunError::PendingFrame { path: path(), source: FrameError::Misaligned }),
        (ExitClass::Usage, RunError::PendingGroup { path: path(), group: 1, found: vec![0], expected: 2 }),
        (ExitClass::Usage, RunError::PendingPrompt { path: path(), group: 1 }),
        (ExitClass::Machine, RunError::Stalled { waited }),
        (ExitClass::Usage, RunError::ReplayLayers { found: vec![0], expected: vec![1] }),
        (ExitClass::Bug, RunError::WorkerGone),
        (ExitClass::Diverged, RunError::NoSignal { n_groups: 1, batches: 1 }),
        (ExitClass::Bug, RunError::ForeignLayers { group: 1, found: vec![0], expected: vec![1] }),
        (ExitClass::Bug, RunError::Stale { group: 1, staleness: 2, max_staleness: 1 }),
        (ExitClass::Interrupted, RunError::Interrupted { step: 1 }),
        (ExitClass::Interrupted, RunError::Discarded { step: 1 }),
        (ExitClass::Interrupted, RunError::Unfinished { n_written: 1, n_rollouts: 2, path: path() }),
        (ExitClass::Interrupted, RunError::CutOff { n_written: 1, n_rollouts: 2, path: path() }),
    ]
}

/// Errors of the crates below, by class.
fn inner() -> Vec<(ExitClass, RunError)> {
    let name = || "t".to_owned();
    let frame_too_large = RingError::FrameTooLarge { frame_bytes: 2, ring_bytes: 1 };
    let addr = ([127, 0, 0, 1], 9464).into();
    let listen = TelemetryError::Listen { addr, source: failed(ErrorKind::AddrInUse) };
    let corrupt = TelemetryError::Corrupt { path: path(), line: 3, source: json() };
    let missing = || ModelError::NoWeights { dir: path() };
    let unwritten = || ModelError::Write { path: path(), source: failed(ErrorKind::StorageFull) };
    let stale = SchedulerError::StaleEpoch { epoch: 1, current: 1 };
    let saved = TrainError::Write { path: path(), needed_bytes: 1, source: failed(ErrorKind::StorageFull) };
    let diverged = TrainError::NonFinite { tensor: name(), version: PolicyVersion(1) };
    let damaged = TrainError::Damaged { path: path(), source: Damage::Checksum };
    vec![
        (ExitClass::Usage, Recipe::parse("", "empty.yaml").unwrap_err().into()),
        (ExitClass::Usage, TaskError::AssistantLast.into()),
        (ExitClass::Usage, WireError::from(r3_wire::error::ModelError::Undescribed).into()),
        (ExitClass::Usage, missing().into()),
        (ExitClass::Machine, unwritten().into()),
        (ExitClass::Bug, ModelError::NoSuchTensor { name: name() }.into()),
        (ExitClass::Usage, EngineError::from(missing()).into()),
        (ExitClass::Machine, EngineError::from(unwritten()).into()),
        (ExitClass::Usage, EngineError::TooLong { tokens: 2, max_positions: 1 }.into()),
        (ExitClass::Bug, EngineError::Audit { tensors: 2, differing: 1, first: name() }.into()),
        (ExitClass::Bug, EngineError::Busy { sequences: 1 }.into()),
        (ExitClass::Diverged, EngineError::ScoreNonFinite { position: 1, logprob: f32::NAN }.into()),
        (ExitClass::Bug, EngineError::from(stale).into()),
        (ExitClass::Usage, frame_too_large.into()),
        (ExitClass::Machine, RingError::NoRoom { needed_bytes: 2, available_bytes: 1 }.into()),
        (ExitClass::Bug, FrameError::NotAFrame { magic: 0 }.into()),
        (ExitClass::Diverged, diverged.into()),
        (ExitClass::Machine, saved.into()),
        (ExitClass::Usage, damaged.into()),
        (ExitClass::Usage, TrainError::from(missing()).into()),
        (ExitClass::Machine, listen.into()),
        (ExitClass::Usage, corrupt.into()),
    ]
}

#[test]
fn every_error_ends_the_process_with_its_class_and_says_what_to_do() {
    for (class, error) in own().into_iter().chain(inner()) {
        assert_eq!(error.exit_class(), class, "{error:?}");
        assert!(!error.hint().is_empty() && !error.hint().ends_with('.'), "{error:?}");
        assert!(!error.to_string().ends_with('.'), "{error}");
    }
}

/// That each of `errors` is the machine's, and its hint says which `limit` to raise.
fn assert_limited(errors: &[RunError], limit: &str) {
    for error in errors {
        assert_eq!(error.exit_class(), ExitClass::Machine, "{error}");
        assert!(error.hint().contains(limit), "{error}: {}", error.hint());
    }
}

#[test]
fn a_file_larger_than_it_may_be_is_told_from_a_disk_that_is_full() {
    let source = || failed(ErrorKind::FileTooLarge);
    let errors: [RunError; 4] = [
        RunError::Io { path: path(), source: source() },
        ModelError::Write { path: path(), source: source() }.into(),
        TrainError::Write { path: path(), needed_bytes: 1, source: source() }.into(),
        TelemetryError::Write { path: path(), source: source() }.into(),
    ];
    assert_limited(&errors, "`ulimit -f`");
}

#[test]
fn too_few_open_files_are_told_from_files_that_are_not_there() {
    let source = || io::Error::from_raw_os_error(EMFILE);
    let errors: [RunError; 5] = [
        RunError::Io { path: path(), source: source() },
        RingError::Unreadable { what: "what it needs", source: source() }.into(),
        ModelError::Read { path: path(), source: source() }.into(),
        TrainError::Read { path: path(), source: source() }.into(),
        TelemetryError::Open { path: path(), source: source() }.into(),
    ];
    assert_limited(&errors, "`ulimit -n`");
}

#[test]
fn the_numbers_of_the_classes_are_the_documented_ones() {
    let classes = [
        (ExitClass::Bug, 1),
        (ExitClass::Usage, 2),
        (ExitClass::Machine, 3),
        (ExitClass::Diverged, 4),
        (ExitClass::Interrupted, 130),
    ];
    for (class, code) in classes {
        assert_eq!(class as u8, code);
    }
}
