//! What writer and reader share, and how they speak: two positions, two sleepers, two owners.
//!
//! A position counts bytes since the stream began and never wraps; byte `p` of the stream lies at `p %
//! capacity`. Committed and unreleased bytes are `tail..head`, so `head - tail <= capacity` always. Only the
//! writer moves `head` and only the reader moves `tail`. Records are multiples of [`RECORD_ALIGN`], which
//! leaves the low bit of a position to say that its owner has closed: closing is one more publication, and
//! cannot overtake a frame.
//!
//! Nobody sleeps through news: a waiter says so, fences, looks again, sleeps; a publisher stores, fences,
//! looks for a waiter. One of the two must see the other.

use std::cell::OnceCell;
use std::hint;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::error::{RingError, Side, Wait};
use crate::memory::Memory;
use crate::peer::Peer;
use crate::sync::{AtomicU64, Edge, Futex, Orders, fence, spins};

/// Records start and end on a cache line, so payloads can be read in place as any plain type.
pub(crate) const RECORD_ALIGN: u64 = 64;

/// The line before a payload; its first word is the payload's length in bytes, or [`WRAP`].
pub(crate) const RECORD_HEADER_BYTES: u64 = 64;

/// Instead of a length: nothing here, the next record starts at the beginning of the ring.
pub(crate) const WRAP: u64 = u64::MAX;

/// Longest sleep before looking whether the other end still lives.
const LIVENESS_POLL: Duration = Duration::from_millis(50);

const CLOSED_BIT: u64 = 1;

/// A value on a cache line of its own, so that the ends do not slow each other down.
#[repr(C, align(64))]
pub(crate) struct Line<T>(pub(crate) T);

/// What one end of the ring tells the other.
#[repr(C)]
pub(crate) struct End {
    /// `head` of the writer, `tail` of the reader, with [`CLOSED_BIT`]. Written by this end only.
    position: Line<AtomicU64>,
    /// 1 while this end may be asleep; set by this end, cleared by both.
    waiting: Line<Futex>,
    /// Which process is this end; 0 until somebody claims it. Publishes nothing but itself.
    peer: Line<AtomicU64>,
}

/// The first page of a ring; all zeros is a valid header of a new one.
#[repr(C)]
pub(crate) struct Header {
    #[cfg(not(loom))]
    pub(crate) identity: Line<Identity>,
    pub(crate) writer: End,
    pub(crate) reader: End,
}

/// What makes a file a ring. Atomics, because whoever made the file may still have it mapped.
#[cfg(not(loom))]
#[repr(C)]
pub(crate) struct Identity {
    pub(crate) magic: AtomicU64,
    pub(crate) format_version: AtomicU64,
    pub(crate) capacity: AtomicU64,
}

#[cfg(loom)]
impl Header {
    pub(crate) fn new() -> Self {
        let end = || End {
            position: Line(AtomicU64::new(0)),
            waiting: Line(Futex::new()),
            peer: Line(AtomicU64::new(0)),
        };
        Self { writer: end(), reader: end() }
    }
}

/// How far an end has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    /// Bytes since the stream began, a multiple of [`RECORD_ALIGN`].
    pub(crate) bytes: u64,
    /// Whether this is as far as it will ever come.
    pub(crate) closed: bool,
}

impl Position {
    fn from_word(word: u64) -> Self {
        Self { bytes: word & !CLOSED_BIT, closed: word & CLOSED_BIT != 0 }
    }

    fn to_word(self) -> u64 {
        self.bytes | if self.closed { CLOSED_BIT } else { 0 }
    }
}

/// A limit on one call, which may have to wait more than once. It runs from the moment there is something to wait for:
/// a call that finds what it needs does not look at a clock.
#[derive(Clone, Debug)]
pub(crate) struct Deadline {
    started: OnceCell<Instant>,
    limit: Duration,
}

impl Deadline {
    pub(crate) fn after(limit: Duration) -> Self {
        Self { started: OnceCell::new(), limit }
    }

    fn left(&self) -> Duration {
        self.limit.saturating_sub(self.started.get_or_init(Instant::now).elapsed())
    }
}

/// Bytes a record with a payload of `n_bytes` takes; `None` if no ring could hold it.
pub(crate) fn record_bytes(n_bytes: usize) -> Option<u64> {
    u64::try_from(n_bytes).ok()?.checked_next_multiple_of(RECORD_ALIGN)?.checked_add(RECORD_HEADER_BYTES)
}

/// The ring as both ends see it.
pub(crate) struct Shared {
    pub(crate) memory: Memory,
    pub(crate) me: Peer,
    pub(crate) orders: Orders,
}

impl Shared {
    /// Bytes of records the ring can hold.
    pub(crate) fn capacity(&self) -> u64 {
        self.memory.capacity()
    }

    /// Where byte `position` of the stream lies in the ring.
    pub(crate) fn offset(&self, position: u64) -> usize {
        usize::try_from(position % self.capacity()).expect("a mapped ring fits the address space")
    }

    /// Makes this process the `side` of the ring, once and for ever.
    pub(crate) fn claim(&self, side: Side) -> Result<(), RingError> {
        let owner = &self.end(side).peer.0;
        match owner.compare_exchange(Peer::NOBODY.bits(), self.me.bits(), Relaxed, Relaxed) {
            Ok(_) => Ok(()),
            Err(bits) => Err(RingError::Taken { side, pid: Peer::from_bits(bits).pid() }),
        }
    }

    /// Moves `head`: the reader may now read every byte before it.
    pub(crate) fn publish_head(&self, head: Position) {
        let word = &self.end(Side::Writer).position.0;
        // Pairs with the load in `observe_head`.
        word.store(head.to_word(), self.orders.of(Edge::HeadPublish));
        self.wake(Side::Reader);
    }

    /// How far the writer has come.
    pub(crate) fn observe_head(&self) -> Position {
        let word = &self.end(Side::Writer).position.0;
        // Pairs with the store in `publish_head`.
        Position::from_word(word.load(self.orders.of(Edge::HeadObserve)))
    }

    /// Moves `tail`: the writer may now overwrite every byte before it.
    pub(crate) fn publish_tail(&self, tail: Position) {
        let word = &self.end(Side::Reader).position.0;
        // Pairs with the load in `observe_tail`.
        word.store(tail.to_word(), self.orders.of(Edge::TailPublish));
        self.wake(Side::Writer);
    }

    /// Says that `side` will not move past `bytes` any more.
    pub(crate) fn close(&self, side: Side, bytes: u64) {
        // A model that failed is over: touching its atomics while unwinding would abort instead of report.
        #[cfg(loom)]
        if std::thread::panicking() {
            return;
        }
        let end = Position { bytes, closed: true };
        match side {
            Side::Writer => self.publish_head(end),
            Side::Reader => self.publish_tail(end),
        }
    }

    /// How far the reader has released.
    pub(crate) fn observe_tail(&self) -> Position {
        let word = &self.end(Side::Reader).position.0;
        // Pairs with the store in `publish_tail`.
        Position::from_word(word.load(self.orders.of(Edge::TailObserve)))
    }

    /// Waits until `check` finds something or fails, for as long as `deadline` leaves.
    ///
    /// A dead peer is only reported after one more look: what it published before it died still counts.
    pub(crate) fn wait<T>(
        &self,
        wait: Wait,
        deadline: &Deadline,
        check: impl Fn() -> Result<Option<T>, RingError>,
    ) -> Result<T, RingError> {
        for _ in 0..spins() {
            if let Some(found) = check()? {
                return Ok(found);
            }
            hint::spin_loop();
        }
        let waiting = &self.end(waiter(wait)).waiting.0;
        let outcome = loop {
            waiting.word.store(1, Relaxed); // Pairs with the load in `wake`, by way of the two fences.
            fence(self.orders.of(Edge::WaitFence)); // Pairs with the fence in `wake`.
            if let Some(outcome) = check().transpose() {
                break outcome;
            }
            let left = deadline.left();
            if !left.is_zero() && waiting.wait(1, left.min(LIVENESS_POLL)) {
                continue;
            }
            if let Some(death) = self.peer_death(wait) {
                break check().transpose().unwrap_or(Err(death));
            }
            if left.is_zero() {
                break Err(RingError::Timeout { wait, waited: deadline.limit });
            }
        };
        waiting.word.store(0, Relaxed); // Only saves the peer a wake-up: missing it costs one system call.
        outcome
    }

    /// Wakes `sleeper` if it sleeps or is about to.
    fn wake(&self, sleeper: Side) {
        let waiting = &self.end(sleeper).waiting.0;
        fence(self.orders.of(Edge::WakeFence)); // Pairs with the fence in `wait`.
        if waiting.word.load(Relaxed) != 0 {
            // Pairs with the store in `wait`, by way of the two fences. Cleared before the wake-up: a sleeper
            // that has not yet fallen asleep then finds the word changed, and one that has is woken.
            waiting.word.store(0, Relaxed);
            waiting.wake();
        }
    }

    /// The error to report if whoever could end this wait is dead.
    fn peer_death(&self, wait: Wait) -> Option<RingError> {
        let other = match waiter(wait) {
            Side::Writer => Side::Reader,
            Side::Reader => Side::Writer,
        };
        let peer = Peer::from_bits(self.end(other).peer.0.load(Relaxed));
        if peer == Peer::NOBODY || peer == self.me || !peer.is_dead() {
            return None;
        }
        let pid = peer.pid();
        Some(match other {
            Side::Writer => RingError::WriterDied { pid },
            Side::Reader => RingError::ReaderDied { pid },
        })
    }

    fn end(&self, side: Side) -> &End {
        let header = self.memory.header();
        match side {
            Side::Writer => &header.writer,
            Side::Reader => &header.reader,
        }
    }
}

fn waiter(wait: Wait) -> Side {
    match wait {
        Wait::Frame => Side::Reader,
        Wait::Space { .. } => Side::Writer,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_record_is_a_header_line_and_whole_payload_lines() {
        assert_eq!([0, 1, 64, 65].map(record_bytes), [Some(64), Some(128), Some(128), Some(192)]);
        assert_eq!(record_bytes(usize::MAX), None);
        assert_eq!(record_bytes(usize::MAX - 63), None);
    }

    #[test]
    fn closing_leaves_the_position_readable() {
        let end = Position { bytes: 192, closed: true };
        assert_eq!(Position::from_word(end.to_word()), end);
        assert_eq!(Position::from_word(192), Position { bytes: 192, closed: false });
    }

    #[test]
    fn what_a_dead_writer_published_last_still_counts() {
        let me = Peer::this_process().unwrap();
        let shared = Shared { memory: Memory::allocate(1).unwrap(), me, orders: Orders::default() };
        let dead = Peer::from_bits(u64::MAX);
        shared.end(Side::Writer).peer.0.store(dead.bits(), Relaxed);
        let looks = Cell::new(0);
        let found_at = |nth| {
            looks.set(0);
            shared.wait(Wait::Frame, &Deadline::after(Duration::ZERO), || {
                looks.set(looks.get() + 1);
                Ok((looks.get() == nth).then_some(nth))
            })
        };
        // The spins, the look before falling asleep, and the one after the writer was found dead.
        let last = spins() + 2;
        for nth in [1, last - 2, last - 1, last] {
            assert_eq!(found_at(nth).unwrap(), nth);
        }
        assert!(matches!(found_at(last + 1), Err(RingError::WriterDied { .. })));
        assert_eq!(looks.get(), last);
        let waiting = &shared.end(Side::Reader).waiting.0;
        assert_eq!(waiting.word.load(Relaxed), 0, "whoever stops waiting says so");
    }
}
