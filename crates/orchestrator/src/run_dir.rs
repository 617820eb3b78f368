//! The directory of a run: whose it is, and what may be taken away from it.

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::{RunError, io_at};
use crate::lock::Lock;

/// Locked by the process that runs here; empty, and never removed.
const LOCK: &str = ".lock";

/// Metrics of every step.
pub(crate) const METRICS: &str = "metrics.jsonl";

/// The recipe as it was run.
pub(crate) const RECIPE: &str = "recipe.yaml";

/// A run's directory, held by this process until it is dropped.
#[derive(Debug)]
pub(crate) struct RunDir {
    path: PathBuf,
    _lock: Lock,
}

impl RunDir {
    /// Creates `path` if need be and locks it.
    ///
    /// # Errors
    /// If another process runs there, or the directory cannot be made.
    pub(crate) fn lock(path: &Path) -> Result<Self, RunError> {
        fs::create_dir_all(path).map_err(io_at(path))?;
        let at = path.join(LOCK);
        let file = File::options().create(true).append(true).open(&at).map_err(io_at(&at))?;
        match Lock::take(file) {
            Ok(lock) => Ok(Self { path: path.to_path_buf(), _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(RunError::OutBusy { path: path.to_path_buf() }),
            Err(TryLockError::Error(source)) => Err(RunError::Io { path: at, source }),
        }
    }

    /// A file of the run.
    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Locks the directory of a run that begins. A model there would be taken for its newest checkpoint.
    ///
    /// # Errors
    /// As [`Self::lock`], or if `path` holds a model, and is left as it is.
    pub(crate) fn lock_new(path: &Path) -> Result<Self, RunError> {
        if path.join("config.json").exists() {
            return Err(RunError::WeightsThere { path: path.to_path_buf() });
        }
        Self::lock(path)
    }

    /// Locks the directory of a run that was begun before. It may have died while it loaded its model, and left no more than
    /// the lock.
    ///
    /// # Errors
    /// As [`Self::lock`], or if no run was ever begun in `path`, which is left as it is.
    pub(crate) fn lock_again(path: &Path) -> Result<Self, RunError> {
        if path.join(LOCK).exists() || is_taken(path)? {
            return Self::lock(path);
        }
        Err(RunError::NothingToResume { path: path.to_path_buf() })
    }

    /// Refuses to start a run over what another one left, or, with `overwrite`, over the files it starts from.
    ///
    /// # Errors
    /// If the directory holds a run, or `overwrite` would remove one of `sources`.
    pub(crate) fn check_free(&self, overwrite: bool, sources: &[&Path]) -> Result<(), RunError> {
        if !overwrite {
            return if is_taken(&self.path)? {
                Err(RunError::OutTaken { path: self.path.clone() })
            } else {
                Ok(())
            };
        }
        let discarded = checkpoints(&self.path)?;
        for &source in sources {
            let Ok(model) = source.canonicalize() else { continue };
            let is_lost = |dir: &PathBuf| dir.canonicalize().is_ok_and(|dir| model.starts_with(dir));
            if discarded.iter().any(is_lost) {
                return Err(RunError::ModelOverwritten { model: source.into(), path: self.path.clone() });
            }
        }
        Ok(())
    }

    /// Removes the checkpoints of an earlier run. Its metrics and its recipe are written over, and nothing else here
    /// is a run's.
    ///
    /// # Errors
    /// If a checkpoint cannot be removed.
    pub(crate) fn discard_checkpoints(&self) -> Result<(), RunError> {
        self.condemn_checkpoints()?;
        self.discard_unfinished()
    }

    /// Gives all of them the names of unfinished ones, so that a process killed while they are removed leaves none that
    /// could be resumed from.
    fn condemn_checkpoints(&self) -> Result<(), RunError> {
        self.discard_unfinished()?;
        checkpoints(&self.path)?
            .iter()
            .try_for_each(|dir| fs::rename(dir, dir.with_added_extension("tmp")).map_err(io_at(dir)))
    }

    /// Removes checkpoints that a killed process did not finish.
    ///
    /// # Errors
    /// If one cannot be removed.
    pub(crate) fn discard_unfinished(&self) -> Result<(), RunError> {
        let unfinished = checkpoints(&self.path)?.into_iter().filter(|dir| dir.extension().is_some());
        unfinished.into_iter().try_for_each(|dir| fs::remove_dir_all(&dir).map_err(io_at(&dir)))
    }
}

/// Keeps runs away while a model is written into `out`, until what is returned is dropped. Makes nothing.
///
/// # Errors
/// If `out` is the directory of a run, whose checkpoints nobody would find any more beside a model, or another process runs
/// there; or if it is a checkpoint of a run, which could not be resumed any more.
pub(crate) fn hold_for_model(out: &Path) -> Result<Option<RunDir>, RunError> {
    let found = out.canonicalize().unwrap_or_else(|_| out.to_path_buf());
    let is_checkpoint = found.file_name().is_some_and(|name| is_checkpoint_name(&name.to_string_lossy()));
    let is_run = |dir: &Path| [LOCK, METRICS, RECIPE].iter().any(|name| dir.join(name).exists());
    if is_checkpoint && found.parent().is_some_and(is_run) {
        return Err(RunError::CheckpointThere { path: out.to_path_buf() });
    }
    let held = out.join(LOCK).exists().then(|| RunDir::lock(out)).transpose()?;
    if out.join(METRICS).exists() || !checkpoints(out)?.is_empty() {
        return Err(RunError::RunThere { path: out.to_path_buf() });
    }
    Ok(held)
}

/// Whether a run left anything in `path`.
fn is_taken(path: &Path) -> Result<bool, RunError> {
    Ok([METRICS, RECIPE].iter().any(|name| path.join(name).exists()) || !checkpoints(path)?.is_empty())
}

/// Directories named `step-000010` or `step-000010.tmp`.
fn checkpoints(path: &Path) -> Result<Vec<PathBuf>, RunError> {
    let entries = match fs::read_dir(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(io_at(path))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(io_at(path))?;
        if is_checkpoint_name(&entry.file_name().to_string_lossy()) && entry.path().is_dir() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// `step-000010` or `step-000010.tmp`.
fn is_checkpoint_name(name: &str) -> bool {
    let digits = name.strip_prefix("step-").map(|rest| rest.strip_suffix(".tmp").unwrap_or(rest));
    digits.is_some_and(|digits| digits.len() >= 6 && digits.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_dir() -> (tempfile::TempDir, RunDir) {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir::lock(dir.path()).unwrap();
        (dir, run_dir)
    }

    #[test]
    fn a_directory_has_one_run_at_a_time() {
        let (dir, run_dir) = run_dir();
        assert!(matches!(RunDir::lock(dir.path()), Err(RunError::OutBusy { .. })));
        drop(run_dir);
        RunDir::lock(dir.path()).unwrap();
    }

    #[test]
    fn a_model_is_written_neither_over_a_run_nor_over_a_checkpoint_of_one() {
        let (dir, run_dir) = run_dir();
        let checkpoint = dir.path().join("step-000002");
        let busy = |out: &Path| matches!(hold_for_model(out), Err(RunError::OutBusy { .. }));
        let is_checkpoint = || matches!(hold_for_model(&checkpoint), Err(RunError::CheckpointThere { .. }));
        assert!(busy(dir.path()) && is_checkpoint());
        assert!(hold_for_model(&dir.path().join("export")).unwrap().is_none(), "a run does not mind");
        drop(run_dir);
        assert!(is_checkpoint());
        let held = hold_for_model(dir.path()).unwrap();
        assert!(held.is_some() && matches!(RunDir::lock(dir.path()), Err(RunError::OutBusy { .. })));
        drop(held);
        hold_for_model(dir.path()).expect("a run that was refused left nothing but its lock");
        fs::create_dir(&checkpoint).unwrap();
        assert!(matches!(hold_for_model(dir.path()), Err(RunError::RunThere { .. })));
        let other = tempfile::tempdir().unwrap();
        assert!(hold_for_model(&other.path().join("step-000002")).unwrap().is_none(), "a name is no run");
        fs::write(other.path().join(METRICS), "").unwrap();
        assert!(matches!(hold_for_model(other.path()), Err(RunError::RunThere { .. })));
    }

    #[test]
    fn what_an_earlier_run_left_is_not_written_over_unasked() {
        for left in ["metrics.jsonl", "recipe.yaml", "step-000002/", "step-000003.tmp/"] {
            let (dir, run_dir) = run_dir();
            run_dir.check_free(false, &[]).unwrap();
            match left.strip_suffix('/') {
                Some(name) => fs::create_dir(dir.path().join(name)).unwrap(),
                None => fs::write(dir.path().join(left), "").unwrap(),
            }
            assert!(matches!(run_dir.check_free(false, &[]), Err(RunError::OutTaken { .. })), "{left}");
            run_dir.check_free(true, &[]).unwrap();
        }
    }

    #[test]
    fn only_numbered_checkpoints_are_discarded() {
        let (dir, run_dir) = run_dir();
        let kept = ["step-best", "step-notes", "step-12", "other"];
        for name in kept.into_iter().chain(["step-000002", "step-000003.tmp"]) {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        fs::write(dir.path().join("step-000009"), "a file").unwrap();
        run_dir.discard_unfinished().unwrap();
        assert!(dir.path().join("step-000002").exists() && !dir.path().join("step-000003.tmp").exists());
        run_dir.condemn_checkpoints().unwrap();
        assert!(!dir.path().join("step-000002").exists() && dir.path().join("step-000002.tmp").exists());
        run_dir.discard_checkpoints().unwrap();
        assert!(!dir.path().join("step-000002.tmp").exists() && dir.path().join("step-000009").exists());
        assert!(kept.iter().all(|name| dir.path().join(name).exists()));
    }

    #[test]
    fn a_run_never_discards_what_it_starts_from() {
        let (dir, run_dir) = run_dir();
        let model = dir.path().join("step-000004");
        fs::create_dir(&model).unwrap();
        let refused = run_dir.check_free(true, &[Path::new("elsewhere"), &model]);
        assert!(matches!(refused, Err(RunError::ModelOverwritten { .. })));
        fs::create_dir(dir.path().join("step-best")).unwrap();
        run_dir.check_free(true, &[&dir.path().join("step-best")]).unwrap();
    }
}
