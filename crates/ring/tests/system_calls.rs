//! Frames pass the ring without a system call, and so without a lock that could sleep, as long as nobody waits: the
//! kernel is told to kill the thread that makes one.
#![cfg(not(loom))]

use std::io::{Read, Write, stdout};
use std::process::{Command, Stdio};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

use r3_ring::ring::Ring;
use rustix::thread::{SecureComputingMode, set_secure_computing_mode};

/// Frames in flight at a time, as of so many concurrent rollouts.
const N_CONCURRENT: usize = 256;
const FRAME_BYTES: usize = 1000;
const LONG: Duration = Duration::from_secs(60);

/// What the watched process says at the end, and where seccomp's strict mode is not to be had, as in a container that
/// has a filter already.
const PASSED: &str = "no system call";
const UNWATCHED: &str = "cannot be watched";

/// Role: passes frames while only `read`, `write` and `exit` are allowed. Nothing to do unless it was started below.
#[test]
fn watched_ends() {
    if !std::env::args().any(|argument| argument == "watched=1") {
        return;
    }
    let (mut writer, mut reader) = Ring::create(N_CONCURRENT * 2 * FRAME_BYTES).unwrap();
    let mut held = Vec::with_capacity(N_CONCURRENT);
    let mut pass = |rounds: u64| {
        for round in 0..rounds {
            for _ in 0..N_CONCURRENT {
                let mut reservation = writer.reserve(FRAME_BYTES, LONG).unwrap();
                reservation[..8].copy_from_slice(&round.to_le_bytes());
                reservation.commit();
            }
            held.extend((0..N_CONCURRENT).map(|_| reader.next(LONG).unwrap()));
            assert!(held.iter().all(|&id| reader.bytes(id)[..8] == round.to_le_bytes()));
            held.drain(..).for_each(|id| reader.release(id));
        }
    };
    // The first rounds may touch pages and grow what the reader holds.
    pass(3);
    let mut out = stdout();
    writeln!(out, "begun").unwrap();
    if set_secure_computing_mode(SecureComputingMode::Strict).is_err() {
        writeln!(out, "{UNWATCHED}").unwrap();
        return;
    }
    pass(100);
    writeln!(out, "{PASSED}").unwrap();
}

#[test]
fn twenty_five_thousand_frames_pass_without_a_system_call() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "watched_ends", "--nocapture", "watched=1"]);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = child.stdout.take().unwrap();
    // The kernel kills the thread and not its process, which would then say nothing for ever.
    let (sender, receiver) = sync_channel(1);
    let listener = thread::spawn(move || {
        let (mut text, mut byte) = (String::new(), [0]);
        while !text.contains(PASSED) && !text.contains(UNWATCHED) && said.read(&mut byte).unwrap() == 1 {
            text.push(byte[0].into());
        }
        sender.send(text)
    });
    let text = receiver.recv_timeout(LONG);
    child.kill().unwrap();
    child.wait().unwrap();
    listener.join().unwrap().ok();
    let text = text.expect("the watched thread was killed: it made a system call");
    assert!(text.contains(PASSED) || text.contains(UNWATCHED), "{text}");
}
