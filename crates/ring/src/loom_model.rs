//! The protocol under loom: the code of writer, reader and `protocol.rs` itself, in every order the memory
//! model allows, and a broken control for each ordering it relies on.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p r3-ring --release --lib loom_model`

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::error::{RingError, Side};
use crate::ring::Ring;
use crate::sync::{Edge, Orders};

const FOR_EVER: Duration = Duration::MAX;
const LINE_BYTES: usize = 64;
const SOUND: Orders = Orders { weakened: None };

/// Three frames of two lines through a ring of three lines: every frame after the first waits for room and
/// finds a wrap marker before it, and the last thing the reader sees is the close.
fn frames_arrive_whole_and_in_order(orders: Orders) {
    let (mut writer, mut reader) = Ring::create_with(3 * LINE_BYTES, orders).unwrap();
    let worker = loom::thread::spawn(move || {
        for n in 1..=3 {
            let mut reservation = writer.reserve(1, FOR_EVER).unwrap();
            reservation[0] = n;
            reservation.commit();
        }
    });
    for n in 1..=3 {
        let id = reader.next(FOR_EVER).unwrap();
        assert_eq!(reader.bytes(id), [n]);
        reader.release(id);
    }
    assert!(matches!(reader.next(FOR_EVER), Err(RingError::Closed { side: Side::Writer })));
    worker.join().unwrap();
}

/// Two frames fit; they are released newest first, and only then the third finds room.
fn frames_kept_are_not_overwritten(orders: Orders) {
    let (mut writer, mut reader) = Ring::create_with(4 * LINE_BYTES, orders).unwrap();
    let worker = loom::thread::spawn(move || {
        for n in 1..=3 {
            let mut reservation = writer.reserve(1, FOR_EVER).unwrap();
            reservation[0] = n;
            reservation.commit();
        }
    });
    let first = reader.next(FOR_EVER).unwrap();
    let second = reader.next(FOR_EVER).unwrap();
    assert_eq!((reader.bytes(first), reader.bytes(second)), ([1].as_slice(), [2].as_slice()));
    reader.release(second);
    assert_eq!(reader.bytes(first), [1]);
    reader.release(first);
    let third = reader.next(FOR_EVER).unwrap();
    assert_eq!(reader.bytes(third), [3]);
    worker.join().unwrap();
}

/// A reader that goes away wakes the writer that waits for it.
fn a_reader_that_leaves_is_noticed(orders: Orders) {
    let (mut writer, mut reader) = Ring::create_with(2 * LINE_BYTES, orders).unwrap();
    let worker = loom::thread::spawn(move || {
        writer.reserve(1, FOR_EVER).unwrap().commit();
        let refused = writer.reserve(1, FOR_EVER).map(drop);
        assert!(matches!(refused, Err(RingError::Closed { side: Side::Reader })));
    });
    reader.next(FOR_EVER).unwrap();
    drop(reader);
    worker.join().unwrap();
}

fn explore(scenario: fn(Orders), orders: Orders) {
    let mut builder = loom::model::Builder::new();
    // More preemptions than the shortest counterexample of any control needs, and few enough to finish.
    builder.preemption_bound = Some(3);
    builder.check(move || scenario(orders));
}

#[test]
fn no_frame_is_lost_torn_or_overwritten() {
    explore(frames_arrive_whole_and_in_order, SOUND);
    explore(frames_kept_are_not_overwritten, SOUND);
    explore(a_reader_that_leaves_is_noticed, SOUND);
}

#[test]
fn every_ordering_is_needed() {
    let controls = [
        (Edge::HeadPublish, "Causality violation"),
        (Edge::HeadObserve, "Causality violation"),
        (Edge::TailPublish, "Causality violation"),
        (Edge::TailObserve, "Causality violation"),
        (Edge::WakeFence, "deadlock"),
        (Edge::WaitFence, "deadlock"),
    ];
    for (edge, failure) in controls {
        let weakened = Orders { weakened: Some(edge) };
        let found = catch_unwind(AssertUnwindSafe(|| explore(frames_arrive_whole_and_in_order, weakened)));
        let panic = found.expect_err("a weakened ordering must be found");
        let message = panic.downcast_ref::<String>().map_or("", String::as_str);
        assert!(message.contains(failure), "weakening {edge:?} led to {message:?}, not to a {failure}");
    }
}
