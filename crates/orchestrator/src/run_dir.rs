//! The directory of a run: whose it is, and what may be taken away from it.

use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::{RunError, io_at};
use crate::lock::Lock;

/// Locked by the process that is at work here. A run's is empty and stays: alone, it is what a run leaves that is killed
/// while it loads its model. Others write [`NO_RUN`] into theirs, and remove it.
const LOCK: &str = ".lock";

/// Content of the lock of a process that is no run.
const NO_RUN: &[u8] = b"no run\n";

/// How often a lock is looked for whose holder has just removed it.
const TRIES: usize = 100;

/// Metrics of every step.
pub(crate) const METRICS: &str = "metrics.jsonl";

/// The recipe as it was run.
pub(crate) const RECIPE: &str = "recipe.yaml";

/// A run's directory, or one that becomes a model's, held by this process until it is dropped. Who leaves no run there leaves no
/// lock either, and no directory that holds nothing.
#[derive(Debug)]
pub(crate) struct RunDir {
    path: PathBuf,
    /// The directories that had to be made.
    made: Made,
    is_run: bool,
    /// Whether the lock of an earlier run was there and stays in any case.
    is_begun: bool,
    lock: Lock,
}

impl RunDir {
    /// Creates `path` if need be and locks it, for what is no run.
    ///
    /// # Errors
    /// If another process is at work there, or the directory cannot be made.
    pub(crate) fn lock(path: &Path) -> Result<Self, RunError> {
        let mut dir = Self::take(path)?;
        dir.is_run = false;
        // A run that was killed before it wrote anything is none that this must leave room for.
        dir.is_begun &= is_taken(path)?;
        if !dir.is_begun {
            dir.mark(NO_RUN)?;
        }
        Ok(dir)
    }

    /// The same, for what must not lie beside a model either.
    ///
    /// # Errors
    /// As [`Self::lock`], or if `path` holds a model, and is left as it is.
    pub(crate) fn lock_no_model(path: &Path) -> Result<Self, RunError> {
        refuse_model(path)?;
        let dir = Self::lock(path)?;
        refuse_model(path)?;
        Ok(dir)
    }

    /// Locks `path` in whatever state it is.
    fn take(path: &Path) -> Result<Self, RunError> {
        let at = path.join(LOCK);
        let mut refusal = RunError::OutBusy { path: path.to_path_buf() };
        for _ in 0..TRIES {
            let made = match Made::at(path) {
                Ok(made) => made,
                // As well if a directory was another's, who removed it while it was looked at.
                Err(error) => {
                    refusal = error;
                    continue;
                }
            };
            let was_there = at.exists();
            let file = match File::options().create(true).append(true).open(&at) {
                Ok(file) => file,
                // The directory was another's, who has just removed it.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(source) => {
                    made.remove();
                    return Err(RunError::Io { path: at, source });
                }
            };
            let lock = match Lock::take(file) {
                Ok(lock) => lock,
                Err(TryLockError::WouldBlock) => return Err(RunError::OutBusy { path: path.to_path_buf() }),
                Err(TryLockError::Error(source)) => return Err(RunError::Io { path: at, source }),
            };
            let held = lock.file().metadata().map_err(io_at(&at))?;
            // Who held it may have removed it between our opening and locking it.
            if fs::metadata(&at).is_ok_and(|found| (found.dev(), found.ino()) == (held.dev(), held.ino())) {
                let is_begun = was_there && held.len() == 0;
                return Ok(Self { path: path.to_path_buf(), made, is_run: true, is_begun, lock });
            }
        }
        Err(refusal)
    }

    /// Says in the lock what its holder is.
    fn mark(&self, says: &[u8]) -> Result<(), RunError> {
        let mut file = self.lock.file();
        file.set_len(0).and_then(|()| file.write_all(says)).map_err(io_at(&self.path.join(LOCK)))
    }

    /// Which it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// A file of the run.
    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Locks the directory of a run that begins. A model there would be taken for its newest checkpoint.
    ///
    /// # Errors
    /// As [`Self::lock`], or if `path` holds a model, or a recipe that no run wrote, and is left as it is.
    pub(crate) fn lock_new(path: &Path) -> Result<Self, RunError> {
        refuse_model(path)?;
        refuse_recipe(path)?;
        let dir = Self::take(path)?;
        refuse_model(path)?;
        dir.mark(b"")?;
        Ok(dir)
    }

    /// Locks the directory of a run that was begun before. It may have died while it loaded its model, and left no more than
    /// the lock.
    ///
    /// # Errors
    /// As [`Self::lock`], or if no run was ever begun in `path`, which is left as it is.
    pub(crate) fn lock_again(path: &Path) -> Result<Self, RunError> {
        refuse_recipe(path)?;
        let is_run = is_taken(path)?;
        if !is_run && path.join("config.json").exists() {
            return Err(RunError::ModelToResume { path: path.to_path_buf() });
        }
        let nothing = || RunError::NothingToResume { path: path.to_path_buf() };
        if !is_run && !path.join(LOCK).exists() {
            return Err(nothing());
        }
        let dir = Self::take(path)?;
        if !dir.is_begun && !is_taken(path)? {
            return Err(nothing());
        }
        Ok(dir)
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

impl Drop for RunDir {
    /// While the lock is held: whoever waits for it sees that it is gone.
    fn drop(&mut self) {
        let is_left = self.is_begun || (self.is_run && is_taken(&self.path).unwrap_or(true));
        if !is_left {
            let _ = fs::remove_file(self.path.join(LOCK)); // What cannot be removed says whose it was.
            self.made.remove();
        }
    }
}

/// The directories that had to be made for a path, deepest first.
#[derive(Debug)]
struct Made(Vec<PathBuf>);

impl Made {
    /// Makes the directory `path` and those above it that are missing.
    fn at(path: &Path) -> Result<Self, RunError> {
        let missing = path.ancestors().take_while(|dir| !dir.as_os_str().is_empty() && !dir.exists());
        let made = Self(missing.map(Path::to_path_buf).collect());
        match fs::create_dir_all(path) {
            Ok(()) => Ok(made),
            Err(source) => {
                made.remove();
                Err(io_at(path)(source))
            }
        }
    }

    /// Removes them, but for those that hold something by now.
    fn remove(&self) {
        for dir in &self.0 {
            let _ = fs::remove_dir(dir);
        }
    }
}

/// Keeps runs and other writers of models away while a model is made for `out` and written there, until what is returned is
/// dropped.
///
/// # Errors
/// If `out` is the directory of a run, whose checkpoints nobody would find any more beside a model, or another process is at
/// work there; or if it is a checkpoint of a run, which could not be resumed any more; or if it cannot be made.
pub(crate) fn hold_for_model(out: &Path) -> Result<RunDir, RunError> {
    let found = out.canonicalize().unwrap_or_else(|_| out.to_path_buf());
    let is_checkpoint = found.file_name().is_some_and(|name| is_checkpoint_name(&name.to_string_lossy()));
    let is_run = |dir: &Path| [LOCK, METRICS, RECIPE].iter().any(|name| dir.join(name).exists());
    if is_checkpoint && found.parent().is_some_and(is_run) {
        return Err(RunError::CheckpointThere { path: out.to_path_buf() });
    }
    let refuse_run = || match out.join(METRICS).exists() || !checkpoints(out)?.is_empty() {
        true => Err(RunError::RunThere { path: out.to_path_buf() }),
        false => Ok(()),
    };
    if !out.join(LOCK).exists() {
        refuse_run()?;
    }
    let held = RunDir::lock(out)?;
    refuse_run()?;
    Ok(held)
}

/// Refuses a directory that holds a model.
fn refuse_model(path: &Path) -> Result<(), RunError> {
    if path.join("config.json").exists() {
        return Err(RunError::WeightsThere { path: path.to_path_buf() });
    }
    Ok(())
}

/// Refuses a directory with nothing of a run but a recipe: somebody wrote it, and a run would write over it.
fn refuse_recipe(path: &Path) -> Result<(), RunError> {
    let recipe = path.join(RECIPE);
    let is_alone = ![LOCK, METRICS].iter().any(|name| path.join(name).exists());
    if recipe.exists() && is_alone && checkpoints(path)?.is_empty() {
        return Err(RunError::RecipeThere { recipe });
    }
    Ok(())
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
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;
    use crate::fixtures::names;

    fn run_dir() -> (tempfile::TempDir, RunDir) {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir::lock_new(dir.path()).unwrap();
        (dir, run_dir)
    }

    fn has_nothing_to_resume(dir: &Path) -> bool {
        matches!(RunDir::lock_again(dir), Err(RunError::NothingToResume { .. }))
    }

    #[test]
    fn a_directory_has_one_run_at_a_time() {
        let (dir, run_dir) = run_dir();
        for again in [RunDir::lock, RunDir::lock_new, RunDir::lock_again, hold_for_model] {
            assert!(matches!(again(dir.path()), Err(RunError::OutBusy { .. })));
        }
        drop(run_dir);
        RunDir::lock(dir.path()).unwrap();
    }

    #[test]
    fn a_run_that_is_refused_leaves_nothing_and_one_that_is_killed_its_lock() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("above/run");
        drop(RunDir::lock_new(&out).unwrap());
        assert!(names(dir.path()).is_empty() && has_nothing_to_resume(&out));
        fs::create_dir_all(&out).unwrap();
        fs::write(out.join(LOCK), "").unwrap();
        drop(RunDir::lock_again(&out).expect("it starts over"));
        drop(RunDir::lock_new(&out).expect("nothing is lost"));
        drop(RunDir::lock_again(&out).expect("it may be refused as often as need be"));
        assert_eq!(names(&out), [LOCK]);
        let run = RunDir::lock_new(&out).unwrap();
        fs::write(out.join(METRICS), "").unwrap();
        drop(run);
        assert_eq!(names(&out), [LOCK, METRICS]);
    }

    #[test]
    fn what_is_no_run_leaves_no_lock_and_killed_none_that_looks_like_a_runs() {
        for hold in [RunDir::lock, hold_for_model] {
            let dir = tempfile::tempdir().unwrap();
            let out = dir.path().join("above/out");
            let held = hold(&out).unwrap();
            assert!(matches!(RunDir::lock_again(&out), Err(RunError::OutBusy { .. })));
            let left = fs::read(out.join(LOCK)).unwrap();
            drop(held);
            assert!(names(dir.path()).is_empty());
            fs::create_dir_all(&out).unwrap();
            fs::write(out.join(LOCK), &left).unwrap();
            assert!(has_nothing_to_resume(&out));
            fs::write(out.join(LOCK), &left).unwrap();
            drop(hold(&out).unwrap());
            assert!(names(&out).is_empty());
            fs::write(out.join(LOCK), "").unwrap();
            drop(hold(&out).expect("a run was killed while it loaded"));
            assert!(has_nothing_to_resume(&out));
            fs::write(out.join(RECIPE), "").unwrap();
            drop(hold(&out).unwrap());
            assert_eq!(names(&out), [RECIPE]);
        }
    }

    #[test]
    fn a_model_is_nothing_to_resume_whatever_lock_lies_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), "{}").unwrap();
        for lock in [None, Some(&b""[..]), Some(NO_RUN)] {
            lock.iter().for_each(|lock| fs::write(dir.path().join(LOCK), lock).unwrap());
            assert!(matches!(RunDir::lock_again(dir.path()), Err(RunError::ModelToResume { .. })));
            assert!(matches!(RunDir::lock_new(dir.path()), Err(RunError::WeightsThere { .. })));
        }
    }

    #[test]
    fn a_recipe_that_no_run_wrote_is_not_written_over() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(RECIPE), "# notes").unwrap();
        for begin in [RunDir::lock_new, RunDir::lock_again] {
            assert!(matches!(begin(dir.path()), Err(RunError::RecipeThere { .. })));
            assert_eq!(names(dir.path()), [RECIPE]);
        }
        for left in [LOCK, METRICS] {
            fs::write(dir.path().join(left), "").unwrap();
            RunDir::lock_again(dir.path()).expect("a run was here");
            fs::remove_file(dir.path().join(left)).unwrap();
        }
    }

    #[test]
    fn of_several_that_take_turns_each_holds_the_lock_that_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let n_inside = AtomicUsize::new(0);
        let turns = |hold: fn(&Path) -> Result<RunDir, RunError>| {
            for _ in 0..200 {
                match hold(&out) {
                    Ok(held) => {
                        // Counts; the lock orders them.
                        assert_eq!(n_inside.fetch_add(1, Ordering::Relaxed), 0, "two at once");
                        n_inside.fetch_sub(1, Ordering::Relaxed);
                        drop(held);
                    }
                    Err(error) => assert!(matches!(error, RunError::OutBusy { .. }), "{error:?}"),
                }
            }
        };
        thread::scope(|scope| {
            for hold in [RunDir::lock, RunDir::lock_new, hold_for_model, RunDir::lock_new] {
                scope.spawn(move || turns(hold));
            }
        });
    }

    #[test]
    fn a_model_is_written_neither_over_a_run_nor_over_a_checkpoint_of_one() {
        let (dir, run_dir) = run_dir();
        let checkpoint = dir.path().join("step-000002");
        let busy = |out: &Path| matches!(hold_for_model(out), Err(RunError::OutBusy { .. }));
        let is_checkpoint = || matches!(hold_for_model(&checkpoint), Err(RunError::CheckpointThere { .. }));
        assert!(busy(dir.path()) && is_checkpoint());
        hold_for_model(&dir.path().join("export")).expect("a run does not mind");
        drop(run_dir);
        fs::write(dir.path().join(RECIPE), "").unwrap();
        assert!(is_checkpoint());
        fs::remove_file(dir.path().join(RECIPE)).unwrap();
        let held = hold_for_model(dir.path()).unwrap();
        assert!(busy(dir.path()) && matches!(RunDir::lock_new(dir.path()), Err(RunError::OutBusy { .. })));
        drop(held);
        fs::create_dir(&checkpoint).unwrap();
        assert!(matches!(hold_for_model(dir.path()), Err(RunError::RunThere { .. })));
        let other = tempfile::tempdir().unwrap();
        hold_for_model(&other.path().join("step-000002")).expect("a name is no run");
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

    #[test]
    fn holding_a_place_leaves_no_directory_that_was_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("one/two/three");
        drop(hold_for_model(&out).unwrap());
        assert!(names(dir.path()).is_empty());
        fs::create_dir_all(out.parent().unwrap()).unwrap();
        drop(hold_for_model(&out).unwrap());
        assert!(names(out.parent().unwrap()).is_empty(), "what was there stays");
        fs::write(&out, "a file").unwrap();
        let below = dir.path().join("one/other/..").join("two/three/four");
        assert!(hold_for_model(&below).is_err());
        assert_eq!(names(&dir.path().join("one")), ["two"]);
    }
}
