//! Where results go: a file that appears whole or not at all, or stdout.

use std::fs::{self, File, TryLockError};
use std::io::{self, BufWriter, Stdout, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use r3_train::checkpoint::sync_dir;

use crate::error::{RunError, io_at};
use crate::lock::Lock;

/// What errors call stdout.
pub const STDOUT: &str = "stdout";

/// A destination for results.
///
/// A file is written beside its name, as `NAME.partial`, and takes the name in [`Self::commit`]: whoever is killed before
/// leaves no file that reads as whole. Dropped without it, nothing is left. What is no regular file, such as a pipe, is
/// written to as it is.
#[derive(Debug)]
pub struct OutFile {
    writer: Writer,
    /// Where the results lie until they are whole.
    partial: Option<Partial>,
    /// Whether what an interrupted process left there is written over: who is refused before it has a result loses nobody's.
    is_begun: bool,
    path: PathBuf,
}

/// A file beside the one that it becomes, held by this process: whoever has it may give it its name, or remove it.
#[derive(Debug)]
struct Partial {
    path: PathBuf,
    lock: Lock,
}

#[derive(Debug)]
enum Writer {
    Stdout(BufWriter<Stdout>),
    File(BufWriter<File>),
}

impl OutFile {
    /// Opens `path` as [`Self::open`] does, for what is made of the file `input`.
    ///
    /// # Errors
    /// As [`Self::open`], or if both are one file: what it holds would be lost.
    pub fn open_beside(input: &Path, path: &Path, overwrite: bool) -> Result<Self, RunError> {
        if fs::canonicalize(path).is_ok_and(|path| fs::canonicalize(input).is_ok_and(|input| input == path)) {
            return Err(RunError::OutFileRead { path: path.into() });
        }
        Self::open(path, overwrite)
    }

    /// Opens `path`, which is stdout if it is `-`.
    ///
    /// # Errors
    /// If there is such a file already and it is not to be overwritten, another process is writing it, or it cannot be
    /// made.
    pub fn open(path: &Path, overwrite: bool) -> Result<Self, RunError> {
        if path == Path::new("-") {
            let writer = Writer::Stdout(BufWriter::new(io::stdout()));
            return Ok(Self { writer, partial: None, is_begun: true, path: STDOUT.into() });
        }
        let (file, partial) = match fs::metadata(path) {
            Ok(found) if found.is_dir() => return Err(io_at(path)(io::ErrorKind::IsADirectory.into())),
            Ok(found) if !found.is_file() => {
                (File::options().write(true).open(path).map_err(io_at(path))?, None)
            }
            Ok(_) if !overwrite => return Err(RunError::OutFileTaken { path: path.into() }),
            _ => {
                let partial = Partial::hold(path, overwrite)?;
                (partial.lock.file().try_clone().map_err(io_at(&partial.path))?, Some(partial))
            }
        };
        Ok(Self { writer: Writer::File(BufWriter::new(file)), partial, is_begun: false, path: path.into() })
    }

    /// Writes, and hands it on: what was sampled an hour ago is worth seeing.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&mut self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), RunError> {
        self.begin()?;
        let writer: &mut dyn Write = match &mut self.writer {
            Writer::Stdout(writer) => writer,
            Writer::File(writer) => writer,
        };
        write(writer).and_then(|()| writer.flush()).map_err(io_at(&self.path))
    }

    /// Writes over what an interrupted process left, if that has not been done.
    fn begin(&mut self) -> Result<(), RunError> {
        if let Some(partial) = self.partial.as_ref().filter(|_| !self.is_begun) {
            partial.lock.file().set_len(0).map_err(io_at(&partial.path))?;
        }
        self.is_begun = true;
        Ok(())
    }

    /// Gives the file its name. It is on the disk then.
    ///
    /// # Errors
    /// If that fails; what had the name before is still there then.
    pub fn commit(mut self) -> Result<(), RunError> {
        self.begin()?;
        if let (Writer::File(writer), Some(partial)) = (&self.writer, &self.partial) {
            writer.get_ref().sync_all().map_err(io_at(&partial.path))?;
            fs::rename(&partial.path, &self.path).map_err(io_at(&self.path))?;
            self.partial = None;
            let dir = self.path.parent().unwrap_or(Path::new("/"));
            sync_dir(dir).map_err(io_at(dir))?;
        }
        Ok(())
    }

    /// What errors call it.
    #[must_use]
    pub fn name(&self) -> &Path {
        &self.path
    }

    /// Leaves what was written so far, under the name that says that it is not whole, and says where it lies. The next
    /// process that writes the file writes over it. Of stdout, or what is no regular file, nothing is left: `None`.
    ///
    /// # Errors
    /// If it cannot be brought to the disk.
    pub fn leave(mut self) -> Result<Option<PathBuf>, RunError> {
        self.begin()?;
        match (&self.writer, self.partial.take()) {
            (Writer::File(writer), Some(partial)) => {
                writer.get_ref().sync_all().map_err(io_at(&partial.path))?;
                Ok(Some(partial.path))
            }
            _ => Ok(None),
        }
    }
}

impl Drop for OutFile {
    fn drop(&mut self) {
        if let Some(partial) =
            self.partial.as_ref().filter(|partial| self.is_begun || is_empty(&partial.lock))
        {
            let _ = fs::remove_file(&partial.path); // What cannot be removed still does not read as whole.
        }
    }
}

/// Whether nobody has written into the file.
fn is_empty(lock: &Lock) -> bool {
    lock.file().metadata().is_ok_and(|found| found.len() == 0)
}

/// `NAME.partial`.
fn partial_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().map(ToOwned::to_owned).unwrap_or_default();
    name.push(".partial");
    path.with_file_name(name)
}

impl Partial {
    /// The file that becomes `path`, with what a killed process left in it.
    fn hold(path: &Path, overwrite: bool) -> Result<Self, RunError> {
        let partial = partial_path(path);
        let open = File::options().create(true).truncate(false).write(true).open(&partial);
        let lock = match Lock::take(open.map_err(io_at(&partial))?) {
            Ok(lock) => lock,
            Err(TryLockError::WouldBlock) => return Err(RunError::OutFileBusy { path: path.into() }),
            Err(TryLockError::Error(source)) => return Err(RunError::Io { path: partial, source }),
        };
        // Who held it may have given it its name between our opening and locking it: then it is not ours to empty.
        let is_ours = |found: fs::Metadata, held: fs::Metadata| found.ino() == held.ino();
        let (found, held) = (fs::metadata(&partial), lock.file().metadata());
        if !found.and_then(|found| Ok(is_ours(found, held?))).is_ok_and(|is_ours| is_ours) {
            return Err(RunError::OutFileBusy { path: path.into() });
        }
        // Or before our opening: then there are results that nobody wanted to lose. From now on nobody else gives the name.
        if !overwrite && path.exists() {
            if is_empty(&lock) {
                let _ = fs::remove_file(&partial); // It does not read as whole.
            }
            return Err(RunError::OutFileTaken { path: path.into() });
        }
        Ok(Self { path: partial, lock })
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::fixtures::names;

    fn say(file: &mut OutFile, text: &str) {
        file.write(|out| out.write_all(text.as_bytes())).unwrap();
    }

    #[test]
    fn a_file_takes_its_name_when_it_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.jsonl");
        let mut file = OutFile::open(&path, false).unwrap();
        say(&mut file, "one\n");
        assert_eq!(names(dir.path()), ["out.jsonl.partial"]);
        say(&mut file, "two\n");
        file.commit().unwrap();
        assert_eq!(names(dir.path()), ["out.jsonl"]);
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntwo\n");
    }

    #[test]
    fn what_is_left_behind_does_not_read_as_whole_and_is_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.jsonl");
        let mut file = OutFile::open(&path, false).unwrap();
        say(&mut file, "one\n");
        let left = file.leave().unwrap().expect("a file");
        assert_eq!(
            (left.as_path(), names(dir.path())),
            (&*partial_path(&path), vec!["out.jsonl.partial".to_owned()])
        );
        assert_eq!(fs::read_to_string(&left).unwrap(), "one\n");
        OutFile::open(&path, false).unwrap().commit().unwrap();
        assert_eq!(names(dir.path()), ["out.jsonl"]);
    }

    #[test]
    fn who_is_refused_before_a_result_leaves_what_an_interrupted_one_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.jsonl");
        let mut file = OutFile::open(&path, false).unwrap();
        say(&mut file, "an hour of rollouts\n");
        let left = file.leave().unwrap().expect("a file");
        drop(OutFile::open(&path, false).unwrap());
        assert_eq!(fs::read_to_string(&left).unwrap(), "an hour of rollouts\n");
        fs::write(&path, "other results").unwrap();
        Partial::hold(&path, false).unwrap_err();
        assert_eq!(fs::read_to_string(&left).unwrap(), "an hour of rollouts\n");
        let mut file = OutFile::open(&path, true).unwrap();
        say(&mut file, "new");
        drop(file);
        assert_eq!(names(dir.path()), ["out.jsonl"]);
    }

    #[test]
    fn a_failure_leaves_nothing_and_what_was_there_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.jsonl");
        fs::write(&path, "earlier").unwrap();
        let error = OutFile::open(&path, false).unwrap_err();
        assert!(matches!(error, RunError::OutFileTaken { .. }), "{error}");
        let mut file = OutFile::open(&path, true).unwrap();
        say(&mut file, "half");
        drop(file);
        assert_eq!(names(dir.path()), ["out.jsonl"]);
        assert_eq!(fs::read_to_string(&path).unwrap(), "earlier");
    }

    #[test]
    fn what_a_killed_process_left_is_written_over_and_what_a_live_one_writes_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.jsonl");
        fs::write(dir.path().join("out.jsonl.partial"), "a killed process wrote this").unwrap();
        let mut file = OutFile::open(&path, false).unwrap();
        let error = OutFile::open(&path, false).unwrap_err();
        assert!(matches!(error, RunError::OutFileBusy { .. }), "{error}");
        say(&mut file, "new");
        file.commit().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
    }

    #[test]
    fn results_that_came_after_the_first_look_are_not_written_over_unasked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.jsonl");
        fs::write(&path, "another process has just been done").unwrap();
        let error = Partial::hold(&path, false).unwrap_err();
        assert!(matches!(error, RunError::OutFileTaken { .. }), "{error}");
        assert_eq!(names(dir.path()), ["out.jsonl"]);
        Partial::hold(&path, true).unwrap();
    }

    #[test]
    fn of_several_that_begin_at_once_one_writes_the_file() {
        let dir = tempfile::tempdir().unwrap();
        for round in 0..50 {
            let path = dir.path().join(format!("{round}.jsonl"));
            let write = || {
                let mut file = OutFile::open(&path, false)?;
                say(&mut file, "whole");
                file.commit()
            };
            let results: Vec<_> = thread::scope(|scope| {
                let writers: Vec<_> = (0..4).map(|_| scope.spawn(write)).collect();
                writers.into_iter().map(|writer| writer.join().unwrap()).collect()
            });
            let written = results.iter().filter(|result| result.is_ok()).count();
            let refused = |error: &RunError| {
                matches!(error, RunError::OutFileTaken { .. } | RunError::OutFileBusy { .. })
            };
            assert!(results.iter().filter_map(|result| result.as_ref().err()).all(refused), "{results:?}");
            assert_eq!(written, 1, "{results:?}");
        }
        assert_eq!(names(dir.path()).len(), 50);
    }

    #[test]
    fn a_directory_is_refused_at_once_and_a_device_is_written_to_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(OutFile::open(dir.path(), true).unwrap_err(), RunError::Io { .. }));
        assert!(matches!(OutFile::open(&dir.path().join("no/out"), false).unwrap_err(), RunError::Io { .. }));
        let mut null = OutFile::open(Path::new("/dev/null"), false).unwrap();
        say(&mut null, "nothing");
        null.commit().unwrap();
        let null = OutFile::open(Path::new("/dev/null"), false).unwrap();
        assert_eq!(null.leave().unwrap(), None, "it is no file that could be kept");
        assert!(!Path::new("/dev/null.partial").exists());
    }
}
