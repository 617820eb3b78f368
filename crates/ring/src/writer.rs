//! The writing end: reserve room, fill it in place, commit.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use crate::error::{RingError, Side, Wait};
use crate::memory::Access;
use crate::protocol::{Deadline, Position, RECORD_HEADER_BYTES, Shared, WRAP, record_bytes};

/// The only writer of a ring. Dropping it closes the ring: the reader still gets every committed frame.
pub struct Writer {
    shared: Arc<Shared>,
    /// Our own copy of the published head: the next record starts here.
    head: u64,
}

impl Writer {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, head: 0 }
    }

    /// Reserves `n_bytes` bytes for one record, waiting at most `deadline` for the reader to make room.
    ///
    /// # Errors
    /// [`RingError::FrameTooLarge`] at once if no empty ring could hold it; [`RingError::Timeout`],
    /// [`RingError::ReaderDied`] or [`RingError::Closed`] if nobody makes room. The ring is as before, and
    /// another attempt may follow.
    pub fn reserve(&mut self, n_bytes: usize, deadline: Duration) -> Result<Reservation<'_>, RingError> {
        let capacity = self.shared.capacity();
        let Some(record_bytes) = record_bytes(n_bytes).filter(|bytes| *bytes <= capacity) else {
            let frame_bytes = (n_bytes as u64).saturating_add(RECORD_HEADER_BYTES);
            return Err(RingError::FrameTooLarge { frame_bytes, ring_bytes: capacity });
        };
        let deadline = Deadline::after(deadline);
        let until_end = capacity - self.head % capacity;
        if record_bytes > until_end {
            // The marker is published by itself. Were it part of the record, a record of more than half the
            // ring could need more room than there is, and wait for ever.
            self.wait_for_space(until_end, &deadline)?;
            self.write_length(WRAP);
            self.advance(until_end);
        }
        self.wait_for_space(record_bytes, &deadline)?;
        self.write_length(n_bytes as u64);
        Ok(Reservation { writer: self, n_bytes, record_bytes })
    }

    /// Bytes of records the ring can hold.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.shared.capacity()
    }

    /// Bytes of records that are committed and not yet released.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.head.saturating_sub(self.shared.observe_tail().bytes)
    }

    fn wait_for_space(&self, bytes: u64, deadline: &Deadline) -> Result<(), RingError> {
        let (capacity, head) = (self.shared.capacity(), self.head);
        self.shared.wait(Wait::Space { bytes }, deadline, || {
            let tail = self.shared.observe_tail();
            if tail.closed {
                return Err(RingError::Closed { side: Side::Reader });
            }
            let used = head.wrapping_sub(tail.bytes);
            if used > capacity {
                return Err(RingError::Corrupt { what: "the tail", value: tail.bytes, position: head });
            }
            Ok((capacity - used >= bytes).then_some(()))
        })
    }

    /// Writes the first word of the record at `head`, for which there must be room.
    fn write_length(&mut self, length: u64) {
        let mut word =
            self.shared.memory.span(self.shared.offset(self.head), size_of::<u64>(), Access::Write);
        // SAFETY: `wait_for_space` saw the reader done with the line at `head`, and the reader does not look
        // there before the next `advance`; `&mut self` makes this the only access on our side.
        unsafe { word.as_mut() }.copy_from_slice(&length.to_ne_bytes());
    }

    /// Publishes `bytes` more bytes.
    fn advance(&mut self, bytes: u64) {
        self.head += bytes; // Our own copy: re-reading the atomic would hide interleavings from loom.
        self.shared.publish_head(Position { bytes: self.head, closed: false });
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.shared.close(Side::Writer, self.head);
    }
}

impl fmt::Debug for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writer").field("head", &self.head).finish_non_exhaustive()
    }
}

/// Room for one record: plain bytes, left over from earlier records. Dropped without [`Reservation::commit`],
/// it never was.
#[must_use = "a reservation that is not committed publishes nothing"]
#[derive(Debug)]
pub struct Reservation<'a> {
    writer: &'a mut Writer,
    n_bytes: usize,
    record_bytes: u64,
}

impl Reservation<'_> {
    /// Lets the reader see the record.
    pub fn commit(self) {
        let _ = self.span(Access::Write); // The last moment at which the caller may have written.
        self.writer.advance(self.record_bytes);
    }

    fn span(&self, access: Access) -> std::ptr::NonNull<[u8]> {
        let shared = &self.writer.shared;
        shared.memory.span(shared.offset(self.writer.head + RECORD_HEADER_BYTES), self.n_bytes, access)
    }
}

impl Deref for Reservation<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let span = self.span(Access::Read);
        // SAFETY: the record was reserved, so the reader is done with these bytes and does not look at them
        // before `commit`, which takes `self`; mapped memory is always initialised.
        unsafe { span.as_ref() }
    }
}

impl DerefMut for Reservation<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        let mut span = self.span(Access::Write);
        // SAFETY: as in `deref`, and `&mut self` makes this the only access on our side.
        unsafe { span.as_mut() }
    }
}
