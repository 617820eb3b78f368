//! The reading end: look at frames in place, keep as many as needed, release them in any order.

use std::collections::VecDeque;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{RingError, Side, Wait};
use crate::memory::Access;
use crate::protocol::{Deadline, Position, RECORD_ALIGN, RECORD_HEADER_BYTES, Shared, WRAP, record_bytes};

/// A frame that [`Reader::next`] returned: its number in the stream, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrameId(u64);

/// The only reader of a ring. Dropping it closes the ring to the writer.
///
/// The bytes of a frame stay as they are until it is released. Frames are released in any order; their room
/// is given back to the writer in the order of the stream, so one old frame kept keeps all later room. Who
/// waits for one more frame while holding all that fits waits in vain: size the ring for the frames held at
/// once, and one more.
pub struct Reader {
    shared: Arc<Shared>,
    /// The next record to read starts here.
    cursor: u64,
    /// Our own copy of the published tail.
    tail: u64,
    /// Number of the first frame in `held`.
    first: u64,
    /// Every frame from the oldest unreleased one to the newest: at most one per cache line of the ring.
    held: VecDeque<Held>,
}

/// A frame that was read.
struct Held {
    /// Where its payload lies in the ring.
    offset: usize,
    n_bytes: usize,
    /// Where the stream goes on, behind a wrap marker too: the tail once everything up to here is released.
    end: u64,
    released: bool,
}

enum Record {
    Frame { n_bytes: usize, record_bytes: u64 },
    Wrap { bytes: u64 },
}

impl Reader {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, cursor: 0, tail: 0, first: 0, held: VecDeque::new() }
    }

    /// Moves on to the next frame, waiting at most `deadline` for the writer to commit one. Releases nothing.
    ///
    /// # Errors
    /// Only when every committed frame has been read: [`RingError::Timeout`], [`RingError::Closed`] if the
    /// writer has finished, [`RingError::WriterDied`] if it did not get to. [`RingError::Corrupt`] if what
    /// lies in the ring was not written by a [`Writer`](crate::writer::Writer).
    pub fn next(&mut self, deadline: Duration) -> Result<FrameId, RingError> {
        let deadline = Deadline::after(deadline);
        loop {
            let head = self.wait_for_head(&deadline)?;
            match self.record_before(head)? {
                Record::Wrap { bytes } => self.skip(bytes),
                Record::Frame { n_bytes, record_bytes } => {
                    let offset = self.shared.offset(self.cursor + RECORD_HEADER_BYTES);
                    self.cursor += record_bytes;
                    self.held.push_back(Held { offset, n_bytes, end: self.cursor, released: false });
                    return Ok(FrameId(self.first + self.held.len() as u64 - 1));
                }
            }
        }
    }

    /// The frame's bytes, in place, starting on a cache line.
    ///
    /// # Panics
    /// If this reader does not hold `id`: it was released before.
    #[must_use]
    pub fn bytes(&self, id: FrameId) -> &[u8] {
        let span = self.span(id);
        // SAFETY: the frame is committed and its writer done; it is not released, so the tail is not past it
        // and the writer stays away. `release` takes `&mut self`, so the slice is gone by then.
        unsafe { span.as_ref() }
    }

    /// Gives a frame back; its room is the writer's once every older frame is released too.
    ///
    /// # Panics
    /// If this reader does not hold `id`: it was released before.
    pub fn release(&mut self, id: FrameId) {
        let _ = self.span(id); // The last moment at which the caller may have read.
        let idx = self.idx(id);
        self.held[idx].released = true;
        let mut tail = self.tail;
        while let Some(end) = self.held.front().filter(|oldest| oldest.released).map(|oldest| oldest.end) {
            self.held.pop_front();
            self.first += 1;
            tail = end;
        }
        self.advance_tail(tail);
    }

    /// Bytes of records the ring can hold.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.shared.capacity()
    }

    /// Bytes of records that are committed and not yet given back to the writer.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.shared.observe_head().bytes.saturating_sub(self.tail)
    }

    /// Frames that were read and not released.
    #[must_use]
    pub fn held_frames(&self) -> usize {
        self.held.iter().filter(|frame| !frame.released).count()
    }

    fn wait_for_head(&self, deadline: &Deadline) -> Result<u64, RingError> {
        self.shared.wait(Wait::Frame, deadline, || {
            let head = self.shared.observe_head();
            match (head.bytes == self.cursor, head.closed) {
                (false, _) => Ok(Some(head.bytes)),
                (true, true) => Err(RingError::Closed { side: Side::Writer }),
                (true, false) => Ok(None),
            }
        })
    }

    /// What lies at the cursor, which is before `head`. The lengths come from another process: they are
    /// checked.
    fn record_before(&self, head: u64) -> Result<Record, RingError> {
        let (capacity, position) = (self.shared.capacity(), self.cursor);
        let corrupt = |what, value| RingError::Corrupt { what, value, position };
        let committed = head.wrapping_sub(position);
        if committed > capacity || !committed.is_multiple_of(RECORD_ALIGN) {
            return Err(corrupt("the head", head));
        }
        let word = self.shared.memory.span(self.shared.offset(position), size_of::<u64>(), Access::Read);
        // SAFETY: the cursor is before the head, so the writer is done with this line, and not released.
        let word = unsafe { word.as_ref() };
        let length = u64::from_ne_bytes(word.try_into().expect("a span of eight bytes"));
        let until_end = capacity - position % capacity;
        if length == WRAP && until_end <= committed {
            return Ok(Record::Wrap { bytes: until_end });
        }
        let n_bytes = usize::try_from(length).map_err(|_| corrupt("a frame's length", length))?;
        match record_bytes(n_bytes) {
            Some(record_bytes) if record_bytes <= committed.min(until_end) => {
                Ok(Record::Frame { n_bytes, record_bytes })
            }
            _ => Err(corrupt("a frame's length", length)),
        }
    }

    /// Moves over a wrap marker. Its room goes back with the newest frame, or at once if none is held: the
    /// writer may need it for the very next record.
    fn skip(&mut self, bytes: u64) {
        self.cursor += bytes;
        match self.held.back_mut() {
            Some(newest) => newest.end = self.cursor,
            None => self.advance_tail(self.cursor),
        }
    }

    /// Gives the writer everything before `tail`, if that is news.
    fn advance_tail(&mut self, tail: u64) {
        if tail != self.tail {
            self.tail = tail; // Our own copy: re-reading the atomic would hide interleavings from loom.
            self.shared.publish_tail(Position { bytes: tail, closed: false });
        }
    }

    fn idx(&self, id: FrameId) -> usize {
        let idx = id.0.checked_sub(self.first).and_then(|idx| usize::try_from(idx).ok());
        let idx = idx.filter(|&idx| self.held.get(idx).is_some_and(|frame| !frame.released));
        idx.unwrap_or_else(|| panic!("frame {} is not held", id.0))
    }

    fn span(&self, id: FrameId) -> NonNull<[u8]> {
        let frame = &self.held[self.idx(id)];
        self.shared.memory.span(frame.offset, frame.n_bytes, Access::Read)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.shared.close(Side::Reader, self.tail);
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader").field("cursor", &self.cursor).finish_non_exhaustive()
    }
}
