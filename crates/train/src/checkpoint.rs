//! Checkpoints: directories that exist whole or not at all.
//!
//! A checkpoint is written into `<name>.tmp`, every file and the directory are synced, and a rename gives it
//! its name. `trainer_state.json` is written last and lists every other file with length and checksum, so a
//! directory without it is not a checkpoint, and one whose files were damaged later is refused by name. A
//! crash at any point leaves the previous checkpoint alone.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use r3_core::ids::PolicyVersion;
use r3_model::error::ModelError;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::error::{Damage, TrainError};
use crate::optimiser_state;

/// Makes a directory a checkpoint.
pub const STATE_FILE: &str = "trainer_state.json";
const UNFINISHED: &str = ".tmp";
const FORMAT: u32 = 1;

/// `trainer_state.json`: where the run stood, and what the checkpoint holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainerState {
    /// Version of this file's format.
    format: u32,
    /// Batches trained on.
    pub step: u64,
    /// Policy version of the weights.
    pub version: u64,
    /// Optimiser steps made, which is where the learning rate stands.
    pub optimiser_steps: u64,
    /// How good the weights are, higher is better; absent if nobody evaluated them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score: Option<f64>,
    /// Every other file of the checkpoint.
    files: BTreeMap<String, FileDigest>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileDigest {
    bytes: u64,
    xxh3: String,
}

/// Where a run stands, as far as the trainer knows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Position {
    /// Batches trained on.
    pub step: u64,
    /// Policy version of the weights.
    pub version: PolicyVersion,
    /// Optimiser steps made.
    pub optimiser_steps: u64,
    /// How good the weights are, higher is better; `None` if nobody evaluated them.
    pub score: Option<f64>,
}

/// The checkpoints of one run: `root/step-000010` and so on.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    root: PathBuf,
    keep_last: usize,
    keep_best: usize,
}

impl Checkpoints {
    /// Checkpoints below `root`, of which the newest `keep_last` (at least 1) are kept.
    #[must_use]
    pub fn new(root: PathBuf, keep_last: usize) -> Self {
        Self { root, keep_last: keep_last.max(1), keep_best: 0 }
    }

    /// Keeps the `n` of the highest score, too; of equal ones the newer.
    #[must_use]
    pub fn keeping_best(self, n: usize) -> Self {
        Self { keep_best: n, ..self }
    }

    /// Writes the checkpoint of `position.step` and removes those that are neither among the newest nor the best.
    ///
    /// `write` puts all files but the state into the directory it is given, and no directories. An existing
    /// checkpoint of the same step is replaced.
    ///
    /// # Errors
    /// Whatever `write` says, or [`TrainError::Write`] with `needed_bytes`, the size of the whole checkpoint.
    /// What was written is then removed, and earlier checkpoints are untouched.
    pub fn save(
        &self,
        position: Position,
        needed_bytes: u64,
        write: impl FnOnce(&Path) -> Result<(), TrainError>,
    ) -> Result<PathBuf, TrainError> {
        let name = format!("step-{:06}", position.step);
        let (unfinished, target) = (self.root.join(format!("{name}{UNFINISHED}")), self.root.join(&name));
        let written = self.write_unfinished(&unfinished, position, write);
        if let Err(error) = written.and_then(|()| self.publish(&unfinished, &target)) {
            // The error at hand matters more than one while cleaning up; `latest` ignores the rest.
            let _ = fs::remove_dir_all(&unfinished);
            return Err(with_needed_bytes(error, needed_bytes));
        }
        self.remove_old();
        Ok(target)
    }

    /// Removes checkpoints that are neither among the newest nor the best, as a save does at its end: a process that is killed
    /// there leaves one too many.
    pub fn remove_old(&self) {
        if let Err(error) = self.try_remove_old() {
            // A run need not stop for an old one that cannot be removed: the newest is whole.
            tracing::warn!(%error, "an old checkpoint stays");
        }
    }

    /// The newest whole checkpoint, `None` if there is none.
    ///
    /// # Errors
    /// If the root exists and cannot be read.
    pub fn latest(&self) -> Result<Option<PathBuf>, TrainError> {
        Ok(self.whole()?.into_iter().next_back().map(|(_, path)| path))
    }

    fn write_unfinished(
        &self,
        dir: &Path,
        position: Position,
        write: impl FnOnce(&Path) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        fs::create_dir_all(&self.root).map_err(|source| failed(&self.root, source))?;
        remove(dir)?;
        fs::create_dir(dir).map_err(|source| failed(dir, source))?;
        write(dir)?;
        let mut files = BTreeMap::new();
        for (name, path) in list(dir).map_err(|source| failed(dir, source))? {
            files.insert(name, sync_and_digest(&path).map_err(|source| failed(&path, source))?);
        }
        let Position { step, version, optimiser_steps, score } = position;
        let state = TrainerState { format: FORMAT, step, version: version.0, optimiser_steps, score, files };
        let path = dir.join(STATE_FILE);
        let mut json = serde_json::to_vec_pretty(&state).expect("numbers and strings always serialise");
        json.push(b'\n');
        write_and_sync(&path, &json).map_err(|source| failed(&path, source))?;
        sync_dir(dir).map_err(|source| failed(dir, source))
    }

    fn publish(&self, unfinished: &Path, target: &Path) -> Result<(), TrainError> {
        remove(target)?;
        fs::rename(unfinished, target).map_err(|source| failed(target, source))?;
        sync_dir(&self.root).map_err(|source| failed(&self.root, source))
    }

    fn try_remove_old(&self) -> Result<(), TrainError> {
        let whole = self.whole()?;
        let n_old = whole.len().saturating_sub(self.keep_last);
        let best = self.best(&whole)?;
        let is_best = |step| best.iter().any(|(known, _)| known == step);
        let mut old = whole[..n_old].iter().filter(|(step, _)| !is_best(step));
        old.try_for_each(|(_, path)| remove(&condemn(path)?))
    }

    /// Steps and scores of the best of `whole`, the best first.
    fn best(&self, whole: &[(u64, PathBuf)]) -> Result<Vec<(u64, f64)>, TrainError> {
        if self.keep_best == 0 {
            return Ok(Vec::new());
        }
        let mut scored = Vec::new();
        for (step, path) in whole {
            scored.extend(read_state(path)?.score.map(|score| (*step, score)));
        }
        scored
            .sort_by(|(step, score), (other_step, other)| other.total_cmp(score).then(other_step.cmp(step)));
        scored.truncate(self.keep_best);
        Ok(scored)
    }

    /// Whole checkpoints, oldest first.
    fn whole(&self) -> Result<Vec<(u64, PathBuf)>, TrainError> {
        let read = |source| TrainError::Read { path: self.root.clone(), source };
        let entries = match list(&self.root) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(read)?,
        };
        let mut whole: Vec<_> = entries
            .into_iter()
            .filter_map(|(name, path)| Some((name.strip_prefix("step-")?.parse().ok()?, path)))
            .filter(|(_, path)| path.join(STATE_FILE).is_file())
            .collect();
        whole.sort();
        Ok(whole)
    }
}

/// Reads the state of checkpoint `dir` and checks every file against it.
///
/// # Errors
/// [`TrainError::Damaged`] names the first file that is missing, short, changed or not listed.
pub fn verify(dir: &Path) -> Result<TrainerState, TrainError> {
    let state = read_state(dir)?;
    for (name, expected) in &state.files {
        verify_file(dir.join(name), expected)?;
    }
    let present = list(dir).map_err(|source| TrainError::Read { path: dir.to_owned(), source })?;
    match present.into_iter().find(|(name, _)| name != STATE_FILE && !state.files.contains_key(name)) {
        Some((_, path)) => Err(TrainError::Damaged { path, source: Damage::Unlisted }),
        None => Ok(state),
    }
}

/// Checks the weights of checkpoint `dir` alone, for those who take nothing else of it; of a directory that is none, nothing is
/// known.
///
/// # Errors
/// As [`verify`], of weights.
pub fn verify_weights(dir: &Path) -> Result<(), TrainError> {
    if !dir.join(STATE_FILE).exists() {
        return Ok(());
    }
    let state = read_state(dir)?;
    let is_weights = |name: &str| name.ends_with(".safetensors") && name != optimiser_state::FILE;
    let mut weights = state.files.iter().filter(|(name, _)| is_weights(name));
    weights.try_for_each(|(name, expected)| verify_file(dir.join(name), expected))
}

fn verify_file(path: PathBuf, expected: &FileDigest) -> Result<(), TrainError> {
    let found = File::open(&path).and_then(digest);
    let found = found.map_err(|source| TrainError::Read { path: path.clone(), source })?;
    if found == *expected {
        return Ok(());
    }
    let source = match found.bytes == expected.bytes {
        true => Damage::Checksum,
        false => Damage::Length { bytes: found.bytes, expected: expected.bytes },
    };
    Err(TrainError::Damaged { path, source })
}

fn read_state(dir: &Path) -> Result<TrainerState, TrainError> {
    let path = dir.join(STATE_FILE);
    let json = fs::read(&path).map_err(|source| TrainError::Read { path: path.clone(), source })?;
    serde_json::from_slice(&json).map_err(|error| TrainError::Damaged { path, source: error.into() })
}

/// Names and paths inside `dir`, sorted.
fn list(dir: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let mut entries = fs::read_dir(dir)?
        .map(|entry| entry.map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path())))
        .collect::<io::Result<Vec<_>>>()?;
    entries.sort();
    Ok(entries)
}

/// Gives checkpoint `dir` the name of an unfinished one: a process that is killed before all of it is removed leaves nothing that
/// stays for ever.
fn condemn(dir: &Path) -> Result<PathBuf, TrainError> {
    let condemned = dir.with_added_extension(&UNFINISHED[1..]);
    remove(&condemned)?;
    fs::rename(dir, &condemned).map_err(|source| failed(dir, source))?;
    Ok(condemned)
}

/// Removes a directory, if it is there, in a way that never leaves half a checkpoint under its name.
fn remove(dir: &Path) -> Result<(), TrainError> {
    let removed = match fs::remove_file(dir.join(STATE_FILE)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => fs::remove_dir_all(dir),
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(|source| failed(dir, source)),
    }
}

fn sync_and_digest(path: &Path) -> io::Result<FileDigest> {
    let file = File::open(path)?;
    file.sync_all()?;
    digest(file)
}

fn digest(mut file: File) -> io::Result<FileDigest> {
    let mut hash = Xxh3::new();
    let mut bytes = 0;
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(FileDigest { bytes, xxh3: format!("{:016x}", hash.digest()) }),
            n => {
                hash.update(&buffer[..n]);
                bytes += n as u64;
            }
        }
    }
}

fn write_and_sync(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Brings the names in `dir`, which is the current directory if it is empty, to the disk: after a rename they may still be
/// the old ones there.
///
/// # Errors
/// If the directory cannot be opened or synced.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    File::open(dir)?.sync_all()
}

/// A failed write; [`Checkpoints::save`] knows how many bytes were needed and fills them in.
fn failed(path: &Path, source: io::Error) -> TrainError {
    TrainError::Write { path: path.to_owned(), needed_bytes: 0, source }
}

/// Whoever failed to write, the user needs to know how much room the whole checkpoint takes.
fn with_needed_bytes(error: TrainError, needed_bytes: u64) -> TrainError {
    match error {
        TrainError::Write { path, source, .. } | TrainError::Model(ModelError::Write { path, source }) => {
            TrainError::Write { path, needed_bytes, source }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn position(step: u64) -> Position {
        Position { step, version: PolicyVersion(2 * step), optimiser_steps: 2 * step, score: None }
    }

    fn write_weights(dir: &Path) -> Result<(), TrainError> {
        fs::write(dir.join("model.safetensors"), b"weights").unwrap();
        Ok(())
    }

    fn names(root: &Path) -> Vec<String> {
        list(root).unwrap().into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn a_saved_checkpoint_is_found_and_verified() {
        let root = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(root.path().join("checkpoints"), 2);
        assert_eq!(checkpoints.latest().unwrap(), None);
        let dir = checkpoints.save(position(10), 7, write_weights).unwrap();
        assert_eq!(checkpoints.latest().unwrap().as_ref(), Some(&dir));
        let state = verify(&dir).unwrap();
        assert_eq!((state.step, state.version, state.optimiser_steps), (10, 20, 20));
        assert_eq!(names(&dir), ["model.safetensors", "trainer_state.json"]);
    }

    #[test]
    fn only_the_newest_are_kept() {
        let root = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(root.path().to_owned(), 2);
        for step in [1, 2, 1_000_000, 999_999] {
            checkpoints.save(position(step), 7, write_weights).unwrap();
        }
        assert_eq!(names(root.path()), ["step-1000000", "step-999999"]);
        assert_eq!(checkpoints.latest().unwrap(), Some(root.path().join("step-1000000")));
    }

    #[test]
    fn the_best_are_kept_besides_the_newest() {
        let root = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(root.path().to_owned(), 1).keeping_best(2);
        let scores = [Some(0.5), Some(0.9), None, Some(0.7), Some(0.7), Some(0.1)];
        for (step, score) in (1..).zip(scores) {
            checkpoints.save(Position { score, ..position(step) }, 7, write_weights).unwrap();
        }
        assert_eq!(names(root.path()), ["step-000002", "step-000005", "step-000006"]);
        assert_eq!(verify(&root.path().join("step-000002")).unwrap().score, Some(0.9));
        assert_eq!(checkpoints.latest().unwrap(), Some(root.path().join("step-000006")));
    }

    #[test]
    fn a_full_disk_names_path_and_bytes_and_leaves_the_previous_checkpoint() {
        let root = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(root.path().to_owned(), 2);
        let previous = checkpoints.save(position(1), 7, write_weights).unwrap();
        let error = checkpoints
            .save(position(2), 123_456, |dir| {
                write_weights(dir)?;
                let full = PathBuf::from("/dev/full");
                fs::write(&full, b"more").map_err(|source| ModelError::Write { path: full, source }.into())
            })
            .unwrap_err();
        let TrainError::Write { source, .. } = &error else { panic!("{error} is no failed write") };
        assert_eq!(source.kind(), io::ErrorKind::StorageFull);
        assert_eq!(error.to_string(), "cannot write /dev/full, which needs 123456 bytes");
        assert_eq!(names(root.path()), ["step-000001"]);
        verify(&previous).unwrap();
    }

    #[test]
    fn what_a_crash_leaves_is_ignored_and_written_over() {
        let root = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(root.path().to_owned(), 2);
        let whole = checkpoints.save(position(1), 7, write_weights).unwrap();
        for partial in ["step-000002.tmp", "step-000003"] {
            fs::create_dir(root.path().join(partial)).unwrap();
            fs::write(root.path().join(partial).join("model.safetensors"), b"wei").unwrap();
        }
        assert_eq!(checkpoints.latest().unwrap(), Some(whole));
        for step in [2, 3] {
            verify(&checkpoints.save(position(step), 7, write_weights).unwrap()).unwrap();
        }
        assert_eq!(names(root.path()), ["step-000002", "step-000003"]);
    }

    /// So a process that is killed while it removes one leaves what a resumed run takes for unfinished and removes.
    #[test]
    fn a_checkpoint_to_be_removed_has_no_moment_as_half_a_checkpoint() {
        let root = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(root.path().to_owned(), 1);
        let whole = checkpoints.save(position(1), 7, write_weights).unwrap();
        let files = names(&whole);
        let condemned = condemn(&whole).unwrap();
        assert_eq!((names(root.path()), names(&condemned)), (vec!["step-000001.tmp".to_owned()], files));
        assert_eq!(checkpoints.latest().unwrap(), None);
        // What is in the way was condemned before.
        fs::create_dir(&whole).unwrap();
        fs::write(whole.join("newer"), "").unwrap();
        assert_eq!(names(&condemn(&whole).unwrap()), ["newer"]);
        checkpoints.save(position(2), 7, write_weights).unwrap();
        checkpoints.save(position(3), 7, write_weights).unwrap();
        assert_eq!(names(root.path()), ["step-000001.tmp", "step-000003"]);
    }

    #[test]
    fn a_damaged_file_is_refused_by_name() {
        let root = tempfile::tempdir().unwrap();
        let dir = Checkpoints::new(root.path().to_owned(), 1).save(position(1), 7, write_weights).unwrap();
        let weights = dir.join("model.safetensors");
        let refusal = || match verify(&dir).unwrap_err() {
            TrainError::Damaged { path, source } => (path, source.to_string()),
            other => panic!("{other} does not say what is damaged"),
        };
        fs::write(&weights, b"weigh").unwrap();
        assert_eq!(refusal(), (weights.clone(), "it has 5 bytes instead of 7".into()));
        fs::write(&weights, b"weightz").unwrap();
        assert_eq!(refusal(), (weights.clone(), "its bytes are not the ones that were written".into()));
        assert!(verify_weights(&dir).unwrap_err().to_string().ends_with("model.safetensors is damaged"));
        fs::write(&weights, b"weights").unwrap();
        fs::write(dir.join("extra"), b"").unwrap();
        verify_weights(&dir).unwrap();
        assert_eq!(refusal().0, dir.join("extra"));
        fs::write(dir.join(STATE_FILE), b"{").unwrap();
        assert_eq!(refusal().0, dir.join(STATE_FILE));
        fs::remove_file(dir.join("extra")).unwrap();
    }

    #[test]
    fn a_missing_file_is_refused_by_name() {
        let root = tempfile::tempdir().unwrap();
        let dir = Checkpoints::new(root.path().to_owned(), 1).save(position(1), 7, write_weights).unwrap();
        fs::remove_file(dir.join("model.safetensors")).unwrap();
        let error = verify(&dir).unwrap_err();
        assert!(error.to_string().ends_with("model.safetensors"), "{error}");
    }
}
