//! `metrics.jsonl`: one line a step, written at once, never twice.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::error::TelemetryError;
use crate::step_record::StepRecord;

/// The open file. After a crash at any instruction it holds whole lines, and at most one torn one at its end.
#[derive(Debug)]
pub struct Jsonl {
    path: PathBuf,
    file: File,
    end: u64,
    last: Option<StepRecord>,
}

impl Jsonl {
    /// Opens `path` to continue after `resume_step`: lines of later steps, which will be run again, are cut off, and so
    /// is a torn last line. At 0 a new run begins, and the file starts empty.
    ///
    /// # Errors
    /// If the file cannot be opened, read or cut, or a line other than the last is not a record.
    pub fn open(path: &Path, resume_step: u64) -> Result<Self, TelemetryError> {
        let path = path.to_owned();
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let file = opened.map_err(|source| TelemetryError::Open { path: path.clone(), source })?;
        let (end, last) = if resume_step == 0 { (0, None) } else { kept(&file, &path, resume_step)? };
        let length =
            file.metadata().map_err(|source| TelemetryError::Read { path: path.clone(), source })?.len();
        if length != end {
            file.set_len(end).map_err(|source| TelemetryError::Write { path: path.clone(), source })?;
        }
        Ok(Self { path, file, end, last })
    }

    /// The last record kept from before.
    #[must_use]
    pub fn last(&self) -> Option<&StepRecord> {
        self.last.as_ref()
    }

    /// Appends one line; when this returns, the line has left the process.
    ///
    /// # Errors
    /// If the disk refuses it; the file then ends as before.
    pub fn append(&mut self, record: &StepRecord) -> Result<(), TelemetryError> {
        let mut line = serde_json::to_vec(record).expect("a flat map of numbers is JSON");
        line.push(b'\n');
        if let Err(source) = self.file.write_all_at(&line, self.end) {
            let _ = self.file.set_len(self.end); // Half a line may be there; the error below is the one to tell.
            return Err(TelemetryError::Write { path: self.path.clone(), source });
        }
        self.end += line.len() as u64;
        Ok(())
    }
}

/// Reads every record of a file.
///
/// # Errors
/// If the file cannot be read, or a line other than a torn last one is not a record.
pub fn read(path: &Path) -> Result<Vec<StepRecord>, TelemetryError> {
    let file = File::open(path).map_err(|source| TelemetryError::Open { path: path.to_owned(), source })?;
    let mut records = Vec::new();
    scan(&file, path, |record, _| {
        records.push(record);
        true
    })?;
    Ok(records)
}

/// How many bytes of the file to keep, and the last record within.
fn kept(file: &File, path: &Path, resume_step: u64) -> Result<(u64, Option<StepRecord>), TelemetryError> {
    let mut end = 0;
    let mut last = None;
    scan(file, path, |record, record_end| {
        let keep = record.step() <= resume_step;
        if keep {
            end = record_end;
            last = Some(record);
        }
        keep
    })?;
    Ok((end, last))
}

/// Calls `visit` with each record and the offset behind its line, until it says no.
fn scan(
    file: &File,
    path: &Path,
    mut visit: impl FnMut(StepRecord, u64) -> bool,
) -> Result<(), TelemetryError> {
    let mut reader = BufReader::new(file);
    let mut line = Vec::new();
    let mut end = 0;
    for number in 1.. {
        line.clear();
        let read = reader.read_until(b'\n', &mut line);
        let n_bytes =
            read.map_err(|source: io::Error| TelemetryError::Read { path: path.to_owned(), source })?;
        if line.last() != Some(&b'\n') {
            break; // The end, or the line a crash tore.
        }
        end += n_bytes as u64;
        let record = serde_json::from_slice(&line);
        let corrupt = |source| TelemetryError::Corrupt { path: path.to_owned(), line: number, source };
        if !visit(record.map_err(corrupt)?, end) {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use r3_core::ids::PolicyVersion;

    use super::*;

    fn record(step: u64) -> StepRecord {
        StepRecord::new(step, PolicyVersion(step))
    }

    fn steps(path: &Path) -> Vec<u64> {
        read(path).unwrap().iter().map(StepRecord::step).collect()
    }

    fn write_steps(path: &Path, steps: std::ops::Range<u64>) {
        let mut jsonl = Jsonl::open(path, 0).unwrap();
        for step in steps {
            jsonl.append(&record(step)).unwrap();
        }
    }

    #[test]
    fn resuming_cuts_the_steps_that_will_be_run_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        write_steps(&path, 0..6);
        let mut jsonl = Jsonl::open(&path, 3).unwrap();
        assert_eq!(jsonl.last().map(StepRecord::step), Some(3));
        jsonl.append(&record(4)).unwrap();
        assert_eq!(steps(&path), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn a_new_run_starts_with_an_empty_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        write_steps(&path, 0..6);
        Jsonl::open(&path, 0).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"");
    }

    #[test]
    fn a_line_torn_by_a_crash_is_cut_and_its_step_written_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        write_steps(&path, 1..3);
        let whole = std::fs::read(&path).unwrap();
        for torn in 1..whole.len() {
            std::fs::write(&path, &whole[..torn]).unwrap();
            let mut jsonl = Jsonl::open(&path, 2).unwrap();
            let next = jsonl.last().map_or(1, |record| record.step() + 1);
            (next..=2).for_each(|step| jsonl.append(&record(step)).unwrap());
            assert_eq!(std::fs::read(&path).unwrap(), whole, "cut after {torn} bytes");
        }
    }

    #[test]
    fn a_corrupt_line_is_named_by_number() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let text = "{\"step\":1}\n{\"step\"\n{\"step\":3}\n";
        std::fs::write(&path, text).unwrap();
        let error = Jsonl::open(&path, 3).unwrap_err();
        assert!(matches!(error, TelemetryError::Corrupt { line: 2, .. }), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text, "a refused file is left as it was");
    }

    #[test]
    fn a_full_disk_is_an_error_with_a_hint() {
        let error = Jsonl::open(Path::new("/dev/full"), 0).and_then(|mut jsonl| jsonl.append(&record(1)));
        let error = error.unwrap_err();
        assert!(matches!(error, TelemetryError::Write { .. }), "{error}");
        assert!(error.hint().contains("free space"));
    }
}
