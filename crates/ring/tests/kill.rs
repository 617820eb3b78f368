//! Two processes: the ring's other end is this very test binary, started again, and killed at random moments.
#![cfg(not(loom))]

mod common;

use std::fs::OpenOptions;
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{Random, Sample, Shape};
use r3_core::routes::RouteDims;
use r3_ring::error::{RingError, Side};
use r3_ring::frame::{Frame, encode, frame_bytes};
use r3_ring::reader::{FrameId, Reader};
use r3_ring::ring::Ring;
use r3_ring::writer::Writer;

const LONG: Duration = Duration::from_secs(60);
const RING_BYTES: usize = 1 << 16;

/// The `n`-th rollout of every writer here, from a few hundred bytes to a quarter of the ring.
fn sample(n: u64) -> Sample {
    let mut random = Random(n);
    let dims = RouteDims { n_layers: 3, top_k: 2, n_experts: 16 };
    let prompt_tokens = 1 + random.below(100) as usize;
    let n_sampled = random.below(500) as usize;
    Sample::new(
        n,
        Shape {
            prompt_tokens,
            n_sampled,
            routes: random.below(3).checked_sub(1).map(|_| dims),
            max_support: 0,
        },
    )
}

/// Starts `role` (a test of this file) in a process of its own, with `ring` at hand.
fn start(role: &str, ring: &Ring, argument: &str) -> Child {
    let file = format!("ring=/proc/{}/fd/{}", std::process::id(), ring.as_fd().as_raw_fd());
    let mut command = Command::new(std::env::current_exe().unwrap());
    // To the test harness the last two are filters that match nothing.
    command.args(["--exact", role, "--nocapture", &file, argument]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap()
}

/// The ring and the number that [`start`] handed to this process, if it did.
fn handed_over() -> Option<(Ring, u64)> {
    let argument = |key: &str| std::env::args().find_map(|arg| arg.strip_prefix(key).map(str::to_owned));
    let file = OpenOptions::new().read(true).write(true).open(argument("ring=")?).unwrap();
    Some((Ring::open(file.into()).unwrap(), argument("n=")?.parse().unwrap()))
}

fn kill_this_process() -> ! {
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    unreachable!("killed")
}

fn write(writer: &mut Writer, n: u64) {
    let sample = sample(n);
    let mut reservation = writer.reserve(frame_bytes(&sample.rollout()), LONG).unwrap();
    encode(&sample.rollout(), &sample.meta(), &mut reservation);
    reservation.commit();
}

/// Role: writes frames until it is killed. Nothing to do unless it was started by a test below.
#[test]
fn endless_writer() {
    let Some((ring, first)) = handed_over() else { return };
    let mut writer = ring.writer().unwrap();
    for n in first.. {
        write(&mut writer, n);
    }
}

/// Role: writes `n` frames, then half of one more, and is killed before it commits.
#[test]
fn half_writer() {
    let Some((ring, n_frames)) = handed_over() else { return };
    let mut writer = ring.writer().unwrap();
    for n in 0..n_frames {
        write(&mut writer, n);
    }
    let sample = sample(n_frames);
    let mut reservation = writer.reserve(frame_bytes(&sample.rollout()), LONG).unwrap();
    encode(&sample.rollout(), &sample.meta(), &mut reservation);
    let half = reservation.len() / 2;
    reservation[half..].fill(0xee);
    kill_this_process();
}

/// Role: writes `n` frames and closes.
#[test]
fn finishing_writer() {
    let Some((ring, n_frames)) = handed_over() else { return };
    let mut writer = ring.writer().unwrap();
    for n in 0..n_frames {
        write(&mut writer, n);
    }
}

/// Role: reads `n` frames, keeps them, and is killed.
#[test]
fn hoarding_reader() {
    let Some((ring, n_frames)) = handed_over() else { return };
    let mut reader = ring.reader().unwrap();
    for n in 0..n_frames {
        let id = reader.next(LONG).unwrap();
        check(&reader, id, n);
    }
    kill_this_process();
}

/// The frame is whole and is the `n`-th of its writer.
fn check(reader: &Reader, id: FrameId, n: u64) {
    let frame = Frame::decode(reader.bytes(id)).unwrap();
    let expected = sample(n);
    assert_eq!(format!("{:?}", frame.rollout()), format!("{:?}", expected.rollout()));
    assert_eq!(frame.layer_ids(), expected.layer_ids);
}

/// Reads and releases what is left; how many frames there were, counted from the first, and what ended them.
fn drain(reader: &mut Reader, mut n: u64) -> (u64, RingError) {
    loop {
        match reader.next(LONG) {
            Ok(id) => check(reader, id, n),
            Err(error) => return (n, error),
        }
        n += 1;
    }
}

#[test]
fn a_writer_killed_at_any_moment_leaves_whole_frames_only() {
    let mut random = Random(11);
    for round in 0..50 {
        let ring = Ring::create_shared(RING_BYTES).unwrap();
        let mut reader = ring.reader().unwrap();
        let mut writer = start("endless_writer", &ring, "n=0");
        let n_read = 1 + random.below(60);
        for n in 0..n_read {
            let id = reader.next(LONG).unwrap();
            check(&reader, id, n);
            reader.release(id);
        }
        // From here on the writer runs against the clock, into a ring that fills up, until it is killed.
        for _ in 0..random.below(300_000) {
            std::hint::spin_loop();
        }
        writer.kill().unwrap();
        let pid = writer.id();
        // Every other time the dead writer is left a zombie.
        if round % 2 == 0 {
            writer.wait().unwrap();
        }
        let (_, end) = drain(&mut reader, n_read);
        assert!(matches!(end, RingError::WriterDied { pid: died } if died == pid), "{end}");
        assert!(ring.writer().is_err(), "nobody takes the place of a dead writer");
        writer.wait().unwrap();
    }
}

#[test]
fn a_writer_killed_with_the_ring_full_leaves_all_of_it() {
    let ring = Ring::create_shared(RING_BYTES).unwrap();
    let mut reader = ring.reader().unwrap();
    let mut writer = start("endless_writer", &ring, "n=0");
    // The largest frame does not fit any more: the writer waits, or soon will.
    while reader.used_bytes() < reader.capacity() * 3 / 4 {
        std::thread::yield_now();
    }
    writer.kill().unwrap();
    writer.wait().unwrap();
    let (n_frames, end) = drain(&mut reader, 0);
    assert!(n_frames > 3 && matches!(end, RingError::WriterDied { .. }), "{end} after {n_frames}");
}

#[test]
fn a_writer_killed_between_reserve_and_commit_leaves_nothing_of_that_frame() {
    for n_frames in [0, 1, 7, 40] {
        let ring = Ring::create_shared(RING_BYTES).unwrap();
        let mut reader = ring.reader().unwrap();
        let mut writer = start("half_writer", &ring, &format!("n={n_frames}"));
        let mut n_read = 0;
        let end = loop {
            match reader.next(LONG) {
                Ok(id) => {
                    check(&reader, id, n_read);
                    reader.release(id);
                    n_read += 1;
                }
                Err(error) => break error,
            }
        };
        assert_eq!(n_read, n_frames);
        assert!(matches!(end, RingError::WriterDied { .. }), "{end}");
        writer.wait().unwrap();
    }
}

#[test]
fn a_writer_that_finishes_is_closed_and_not_dead() {
    let ring = Ring::create_shared(RING_BYTES * 16).unwrap();
    let mut reader = ring.reader().unwrap();
    let mut writer = start("finishing_writer", &ring, "n=30");
    writer.wait().unwrap();
    let (n_frames, end) = drain(&mut reader, 0);
    assert_eq!(n_frames, 30);
    assert!(matches!(end, RingError::Closed { side: Side::Writer }), "{end}");
}

#[test]
fn a_killed_reader_ends_the_writers_wait() {
    let ring = Ring::create_shared(RING_BYTES).unwrap();
    let mut writer = ring.writer().unwrap();
    let mut reader = start("hoarding_reader", &ring, "n=3");
    for n in 0.. {
        let sample = sample(n);
        match writer.reserve(frame_bytes(&sample.rollout()), LONG) {
            Ok(mut reservation) => {
                encode(&sample.rollout(), &sample.meta(), &mut reservation);
                reservation.commit();
            }
            Err(error) => {
                let pid = reader.id();
                assert!(matches!(error, RingError::ReaderDied { pid: died } if died == pid), "{error}");
                break;
            }
        }
    }
    reader.wait().unwrap();
}
