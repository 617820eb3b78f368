//! Files that one process holds at a time.

use std::fs::{File, TryLockError};

/// The lock of a file, held until it is dropped, and no longer than the process lives.
#[derive(Debug)]
pub(crate) struct Lock {
    file: File,
}

impl Lock {
    /// Locks `file`.
    ///
    /// # Errors
    /// [`TryLockError::WouldBlock`] if another holds it, or what the system says.
    pub(crate) fn take(file: File) -> Result<Self, TryLockError> {
        file.try_lock()?;
        Ok(Self { file })
    }

    /// What is locked.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }
}

impl Drop for Lock {
    /// Closing would leave the lock to a child that another thread has just forked, until that executes its program.
    fn drop(&mut self) {
        // What cannot be unlocked is closed in a moment.
        let _ = self.file.unlock();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn take(path: &Path) -> Result<Lock, TryLockError> {
        Lock::take(File::options().create(true).append(true).open(path).unwrap())
    }

    #[test]
    fn a_file_is_held_once_and_free_when_its_lock_is_dropped_whoever_has_inherited_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let lock = take(&path).unwrap();
        assert!(matches!(take(&path), Err(TryLockError::WouldBlock)));
        // As a child has between fork and exec.
        let _inherited = lock.file().try_clone().unwrap();
        drop(lock);
        take(&path).unwrap();
    }
}
