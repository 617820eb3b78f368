//! Making a ring and handing out its two ends.

#[cfg(not(loom))]
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::error::{RingError, Side};
use crate::memory::Memory;
use crate::peer::Peer;
use crate::protocol::Shared;
use crate::reader::Reader;
use crate::sync::Orders;
use crate::writer::Writer;

/// A ring of bytes in shared memory, to be given a writer and a reader once each.
///
/// In one process [`Ring::create`] is all there is to it. Across processes one side calls
/// [`Ring::create_shared`], lets the other side have the file (by inheritance, over a Unix socket or as
/// `/proc/PID/fd/N`), and each claims its end. Both must be the same build of r3 and see the same `/proc`.
/// The memory goes away with the last of them, however they end; nothing is left behind.
#[derive(Clone)]
pub struct Ring {
    shared: Arc<Shared>,
}

impl Ring {
    /// Both ends of a new ring of at least `bytes` bytes (rounded up to whole pages), for threads of one
    /// process.
    ///
    /// All of it is allocated here and now, so that no later write can fail.
    ///
    /// # Errors
    /// [`RingError::NoRoom`] if the machine cannot back it; [`RingError::System`] or
    /// [`RingError::Unreadable`] if a system call fails.
    pub fn create(bytes: usize) -> Result<(Writer, Reader), RingError> {
        let ring = Self::over(Memory::allocate(bytes)?, Orders::default())?;
        Ok((ring.writer()?, ring.reader()?))
    }

    /// As [`Ring::create`], with the memory orderings of a broken control.
    #[cfg(all(test, loom))]
    pub(crate) fn create_with(bytes: usize, orders: Orders) -> Result<(Writer, Reader), RingError> {
        let ring = Self::over(Memory::allocate(bytes)?, orders)?;
        Ok((ring.writer()?, ring.reader()?))
    }

    /// A new ring of at least `bytes` bytes (rounded up to whole pages) whose ends may live in two processes.
    ///
    /// # Errors
    /// As [`Ring::create`].
    #[cfg(not(loom))]
    pub fn create_shared(bytes: usize) -> Result<Self, RingError> {
        Self::over(Memory::allocate(bytes)?, Orders::default())
    }

    /// The ring in `file`, which [`Ring::create_shared`] made here or in another process.
    ///
    /// # Errors
    /// If `file` is not such a ring: wrong magic, format version or capacity, or not sealed against
    /// shrinking.
    #[cfg(not(loom))]
    pub fn open(file: OwnedFd) -> Result<Self, RingError> {
        Self::over(Memory::open(file)?, Orders::default())
    }

    /// Makes this process the ring's writer.
    ///
    /// # Errors
    /// [`RingError::Taken`] if the ring has had a writer, dead or alive.
    pub fn writer(&self) -> Result<Writer, RingError> {
        self.shared.claim(Side::Writer)?;
        Ok(Writer::new(Arc::clone(&self.shared)))
    }

    /// Makes this process the ring's reader.
    ///
    /// # Errors
    /// [`RingError::Taken`] if the ring has had a reader, dead or alive.
    pub fn reader(&self) -> Result<Reader, RingError> {
        self.shared.claim(Side::Reader)?;
        Ok(Reader::new(Arc::clone(&self.shared)))
    }

    fn over(memory: Memory, orders: Orders) -> Result<Self, RingError> {
        let what = "/proc/self/stat, by which the ring knows this process";
        let me = Peer::this_process().map_err(|source| RingError::Unreadable { what, source })?;
        Ok(Self { shared: Arc::new(Shared { memory, me, orders }) })
    }
}

#[cfg(not(loom))]
impl AsFd for Ring {
    /// The ring's memfd; closed on exec unless the flag is cleared.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.memory.as_fd()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_end_is_claimed_once() {
        let ring = Ring::create_shared(1).unwrap();
        let writer = ring.writer().unwrap();
        let again = Ring::open(ring.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let pid = std::process::id();
        for ring in [&ring, &again] {
            let taken = ring.writer().map(drop);
            assert!(matches!(taken, Err(RingError::Taken { side: Side::Writer, pid: by }) if by == pid));
        }
        drop(writer);
        assert!(ring.writer().is_err(), "a closed end stays closed");
        let reader = again.reader().unwrap();
        assert!(ring.reader().is_err());
        drop(reader);
    }

    #[test]
    fn a_ring_is_whole_pages() {
        for (bytes, capacity) in [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192)] {
            assert_eq!(Ring::create(bytes).unwrap().0.capacity(), capacity);
        }
    }
}
