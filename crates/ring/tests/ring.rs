//! The ring against a naive model, and its two ends in two threads.
#![cfg(not(loom))]

use std::collections::VecDeque;
use std::thread;
use std::time::Duration;

use proptest::prelude::{Just, Strategy, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};
use r3_ring::error::{RingError, Side, Wait};
use r3_ring::reader::{FrameId, Reader};
use r3_ring::ring::Ring;
use r3_ring::writer::Writer;

const LINE_BYTES: u64 = 64;
const NOW: Duration = Duration::ZERO;
const LONG: Duration = Duration::from_secs(60);

#[derive(Clone, Debug)]
enum Op {
    /// Reserve so many bytes, and commit or drop the reservation.
    Write {
        n_bytes: usize,
        commit: bool,
    },
    Next,
    /// Release one of the held frames, counted from the oldest, modulo their number.
    Release(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let n_bytes = prop_oneof![4 => 0usize..300, 2 => 300usize..1500, 1 => 3900usize..=4032];
    let op = prop_oneof![
        3 => (n_bytes, prop::bool::weighted(0.8)).prop_map(|(n_bytes, commit)| Op::Write { n_bytes, commit }),
        3 => Just(Op::Next),
        3 => any::<usize>().prop_map(Op::Release),
    ];
    prop::collection::vec(op, 0..300)
}

/// What lies in the ring, oldest first: frames, and the gaps before the end that a record did not fit into.
struct Entry {
    payload: Option<Vec<u8>>,
    bytes: u64,
    read: bool,
    released: bool,
}

/// The ring as one would first write it: a queue of vectors and a byte count.
#[derive(Default)]
struct Model {
    entries: VecDeque<Entry>,
    head: u64,
    capacity: u64,
}

impl Model {
    fn used_bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.bytes).sum()
    }

    fn push(&mut self, payload: Option<Vec<u8>>, bytes: u64) {
        self.head += bytes;
        self.entries.push_back(Entry { payload, bytes, read: false, released: false });
    }

    /// Whether a record fits. A gap that is left before it stays, even if the record then does not fit.
    fn reserve(&mut self, record_bytes: u64) -> bool {
        let until_end = self.capacity - self.head % self.capacity;
        if record_bytes > until_end {
            if self.used_bytes() + until_end > self.capacity {
                return false;
            }
            self.push(None, until_end);
        }
        self.used_bytes() + record_bytes <= self.capacity
    }

    fn next(&mut self) -> Option<Vec<u8>> {
        for entry in self.entries.iter_mut().filter(|entry| !entry.read) {
            entry.read = true;
            match &entry.payload {
                Some(payload) => return Some(payload.clone()),
                None => entry.released = true,
            }
        }
        None
    }

    fn release(&mut self, nth: usize) {
        let mut held = self.entries.iter_mut().filter(|entry| entry.read && !entry.released);
        held.nth(nth).unwrap().released = true;
    }

    fn forget_released(&mut self) {
        while self.entries.front().is_some_and(|entry| entry.released) {
            self.entries.pop_front();
        }
    }
}

fn record_bytes(n_bytes: usize) -> u64 {
    LINE_BYTES + (n_bytes as u64).next_multiple_of(LINE_BYTES)
}

fn payload(n: usize, n_bytes: usize) -> Vec<u8> {
    (0..n_bytes).map(|i| (i * 7 + n * 31 + 1) as u8).collect()
}

fn check(model: &mut Model, held: &[(FrameId, Vec<u8>)], (writer, reader): (&Writer, &Reader)) {
    model.forget_released();
    assert_eq!(writer.used_bytes(), model.used_bytes());
    assert_eq!(reader.used_bytes(), model.used_bytes());
    assert_eq!(reader.held_frames(), held.len());
    for (id, expected) in held {
        assert_eq!(reader.bytes(*id), expected);
    }
}

proptest! {
    #[test]
    fn the_ring_is_a_bounded_queue(ops in ops()) {
        let (mut writer, mut reader) = Ring::create(4096).unwrap();
        let mut model = Model { capacity: 4096, ..Model::default() };
        let mut held: Vec<(FrameId, Vec<u8>)> = Vec::new();
        for (n, op) in ops.into_iter().enumerate() {
            match op {
                Op::Write { n_bytes, commit } => match writer.reserve(n_bytes, NOW) {
                    Ok(mut reservation) => {
                        prop_assert!(model.reserve(record_bytes(n_bytes)));
                        let bytes = payload(n, n_bytes);
                        reservation.copy_from_slice(&bytes);
                        if commit {
                            reservation.commit();
                            model.push(Some(bytes), record_bytes(n_bytes));
                        }
                    }
                    Err(RingError::Timeout { wait: Wait::Space { .. }, .. }) => {
                        prop_assert!(!model.reserve(record_bytes(n_bytes)));
                    }
                    Err(error) => prop_assert!(false, "{error}"),
                },
                Op::Next => match (reader.next(NOW), model.next()) {
                    (Ok(id), Some(expected)) => held.push((id, expected)),
                    (Err(RingError::Timeout { wait: Wait::Frame, .. }), None) => {}
                    (found, expected) => prop_assert!(false, "{found:?} instead of {expected:?}"),
                },
                Op::Release(nth) if !held.is_empty() => {
                    let nth = nth % held.len();
                    model.release(nth);
                    reader.release(held.remove(nth).0);
                }
                Op::Release(_) => {}
            }
            check(&mut model, &held, (&writer, &reader));
        }
        drop(writer);
        while let Some(expected) = model.next() {
            let id = reader.next(NOW).unwrap();
            prop_assert_eq!(reader.bytes(id), expected);
        }
        let end = reader.next(NOW);
        prop_assert!(matches!(end, Err(RingError::Closed { side: Side::Writer })), "{:?}", end);
    }
}

#[test]
fn two_threads_pass_every_frame_in_order() {
    const N_FRAMES: usize = 20_000;
    let n_bytes = |n: usize| n.wrapping_mul(2_654_435_761) % 1500;
    let (mut writer, mut reader) = Ring::create(8192).unwrap();
    let worker = thread::spawn(move || {
        for n in 0..N_FRAMES {
            let mut reservation = writer.reserve(n_bytes(n), LONG).unwrap();
            reservation.copy_from_slice(&payload(n, n_bytes(n)));
            reservation.commit();
        }
    });
    let mut held = VecDeque::new();
    for n in 0..N_FRAMES {
        held.push_back((n, reader.next(LONG).unwrap()));
        // Three frames at most, newest first: the writer always finds room in the end.
        if held.len() == 3 {
            for (n, id) in held.drain(..).rev() {
                assert_eq!(reader.bytes(id), payload(n, n_bytes(n)));
                reader.release(id);
            }
        }
    }
    worker.join().unwrap();
    assert!(matches!(reader.next(LONG), Err(RingError::Closed { side: Side::Writer })));
}

#[test]
fn a_frame_as_large_as_the_ring_passes_from_any_offset() {
    let (mut writer, mut reader) = Ring::create(4096).unwrap();
    let worker = thread::spawn(move || {
        for _ in 0..200 {
            writer.reserve(0, LONG).unwrap().commit();
            writer.reserve(4096 - 64, LONG).unwrap().commit();
        }
        writer.reserve(4096 - 63, LONG).map(drop)
    });
    for n in 0..400 {
        let id = reader.next(LONG).unwrap();
        assert_eq!(reader.bytes(id).len(), if n % 2 == 0 { 0 } else { 4096 - 64 });
        reader.release(id);
    }
    let refused = worker.join().unwrap();
    assert!(matches!(refused, Err(RingError::FrameTooLarge { frame_bytes: 4097, ring_bytes: 4096 })));
}

#[test]
fn a_full_ring_times_out_and_says_what_it_waited_for() {
    let (mut writer, mut reader) = Ring::create(4096).unwrap();
    let empty = reader.next(Duration::from_millis(3)).unwrap_err();
    assert_eq!(empty.to_string(), "waited 3.0ms for a frame from the writer");
    writer.reserve(4096 - 64, NOW).unwrap().commit();
    let full = writer.reserve(100, Duration::from_millis(3)).map(drop).unwrap_err();
    assert_eq!(full.to_string(), "waited 3.0ms for the reader to release 192 bytes");
    assert!(full.hint().contains("ring.bytes"));
    let id = reader.next(NOW).unwrap();
    assert!(writer.reserve(100, NOW).is_err(), "reading releases nothing");
    reader.release(id);
    assert!(writer.reserve(100, NOW).is_ok(), "a time-out leaves the ring usable");
}

#[test]
fn a_reader_that_leaves_ends_the_writers_wait() {
    let (mut writer, reader) = Ring::create(4096).unwrap();
    writer.reserve(4000, NOW).unwrap().commit();
    let worker = thread::spawn(move || writer.reserve(4000, LONG).map(drop));
    drop(reader);
    let refused = worker.join().unwrap();
    assert!(matches!(refused, Err(RingError::Closed { side: Side::Reader })), "{refused:?}");
}

#[test]
fn a_released_frame_can_not_be_touched_again() {
    let (mut writer, mut reader) = Ring::create(4096).unwrap();
    writer.reserve(1, NOW).unwrap().commit();
    let id = reader.next(NOW).unwrap();
    reader.release(id);
    assert!(std::panic::catch_unwind(|| reader.bytes(id).len()).is_err());
    let again = std::panic::AssertUnwindSafe(|| reader.release(id));
    assert!(std::panic::catch_unwind(again).is_err());
}
