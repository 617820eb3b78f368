//! `r3 bench ring`: how fast rollouts get from one thread to another, beside a memcpy of the same bytes.

use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use r3_core::count::counted;
use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_core::rollout::{FinishReason, Reward, RolloutView};
use r3_core::routes::{RouteDims, RouteRows, write_ids};
use r3_ring::error::RingError;
use r3_ring::frame::{Frame, FrameMeta, encode, frame_bytes};
use r3_ring::reader::Reader;
use r3_ring::ring::Ring;
use r3_ring::writer::Writer;
use serde::Serialize;

use crate::bench::Spread;
use crate::error::RunError;

/// Longest wait for the other end.
const DEADLINE: Duration = Duration::from_secs(60);

/// Bytes of the ring: some frames fit, and the writer never waits for long.
const RING_FRAMES: usize = 8;

/// What is measured: one rollout, sent over and over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingSetup {
    /// Tokens of the rollout, half of them sampled.
    pub tokens: usize,
    /// MoE layers.
    pub layers: usize,
    /// Experts a token takes in each, at most `experts`.
    pub top_k: usize,
    /// Experts of each.
    pub experts: usize,
    /// Frames of a round.
    pub frames: usize,
    /// Rounds, beside one to warm up.
    pub rounds: usize,
}

/// What sending a rollout takes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RingBench {
    /// Bytes of a frame.
    pub frame_bytes: usize,
    /// Frames of a round.
    pub frames: usize,
    /// Rounds.
    pub rounds: usize,
    /// Microseconds from one thread's `commit` of a frame of 8 bytes to its arrival on the other, half of there and back.
    pub latency_us: Spread,
    /// GB/s of frames of rollouts, encoded on one thread while another checks and decodes them.
    pub frames_gb_per_s: Spread,
    /// GB/s of the ring alone: each frame is copied into it, and its last byte read.
    pub ring_gb_per_s: Spread,
    /// GB/s at which one thread copies the same bytes to as many places in turn, without a ring.
    pub memcpy_gb_per_s: Spread,
    /// `ring_gb_per_s / memcpy_gb_per_s`.
    pub ring_over_memcpy: f64,
}

impl RingBench {
    /// A table for people.
    #[must_use]
    pub fn table(&self) -> String {
        let Self { frame_bytes, frames, rounds, .. } = self;
        [
            format!("{} of {frame_bytes} bytes, {}\n", counted(*frames, "frame"), counted(*rounds, "round")),
            Spread::heading(),
            self.latency_us.row("latency, us"),
            self.frames_gb_per_s.row("encoded and decoded, GB/s"),
            self.ring_gb_per_s.row("copied, GB/s"),
            self.memcpy_gb_per_s.row("memcpy, GB/s"),
        ]
        .concat()
    }
}

/// Measures.
///
/// # Errors
/// If there is no memory for a ring, or no thread.
///
/// # Panics
/// If a frame does not arrive as it was sent.
pub fn measure(setup: &RingSetup) -> Result<RingBench, RunError> {
    let sent = Sent::new(setup);
    let bytes = frame_bytes(&sent.view());
    let mut rounds: [Vec<f64>; 4] = Default::default();
    for round in 0..=setup.rounds.max(1) {
        let gb = (bytes * setup.frames) as f64 / 1e9;
        let measured = [
            latency_us(setup.frames)?,
            gb / frames_seconds(&sent, setup.frames)?,
            gb / ring_seconds(bytes, setup.frames)?,
            gb / memcpy_seconds(bytes, setup.frames),
        ];
        // The first round warms up.
        for (values, value) in rounds.iter_mut().zip(measured).filter(|_| round > 0) {
            values.push(value);
        }
    }
    let [latency_us, frames_gb_per_s, ring_gb_per_s, memcpy_gb_per_s] = rounds.map(Spread::of);
    Ok(RingBench {
        frame_bytes: bytes,
        frames: setup.frames,
        rounds: setup.rounds.max(1),
        latency_us,
        frames_gb_per_s,
        ring_gb_per_s,
        memcpy_gb_per_s,
        ring_over_memcpy: ring_gb_per_s.median / memcpy_gb_per_s.median,
    })
}

/// The rollout that is sent.
struct Sent {
    tokens: Vec<TokenId>,
    prompt_tokens: usize,
    logprobs: Vec<f32>,
    versions: Vec<PolicyVersion>,
    layer_ids: Vec<u32>,
    routes: RouteRows,
}

impl Sent {
    fn new(setup: &RingSetup) -> Self {
        let dims = RouteDims { n_layers: setup.layers, top_k: setup.top_k, n_experts: setup.experts };
        let prompt_tokens = setup.tokens.div_ceil(2);
        let n_sampled = setup.tokens - prompt_tokens;
        let mut routes = RouteRows::with_capacity(dims, setup.tokens);
        let mut row = vec![0; dims.row_bytes()];
        for at in 0..setup.tokens - 1 {
            let id = |n: usize| u16::try_from((at * 7 + n) % setup.experts).unwrap_or(0);
            let ids: Vec<u16> = (0..dims.row_ids()).map(id).collect();
            write_ids(&ids, dims.width(), &mut row);
            routes.append(&row);
        }
        Self {
            tokens: (0u32..).map(TokenId).take(setup.tokens).collect(),
            prompt_tokens,
            logprobs: vec![-1.5; n_sampled],
            versions: vec![PolicyVersion(3); n_sampled],
            layer_ids: (0u32..).take(setup.layers).collect(),
            routes,
        }
    }

    fn view(&self) -> RolloutView<'_> {
        RolloutView {
            group: GroupId(1),
            index: 0,
            tokens: &self.tokens,
            prompt_tokens: self.prompt_tokens,
            rollout_logprobs: &self.logprobs,
            versions: &self.versions,
            routes: Some(self.routes.view()),
            finish: FinishReason::Length,
            cached_tokens: 0,
            support: None,
        }
    }

    fn meta(&self) -> FrameMeta<'_> {
        let reward = Reward::Score(1.0);
        FrameMeta { layer_ids: &self.layer_ids, weight_epoch: 1, model_hash: 2, reward, mask: None }
    }
}

/// Seconds until a thread that writes and this one, which reads, are through with `n` records.
fn exchange(
    bytes: usize,
    n: usize,
    mut write: impl FnMut(&mut [u8]) + Send,
    mut read: impl FnMut(&[u8]),
) -> Result<f64, RunError> {
    let (mut writer, mut reader) = Ring::create((bytes + 256) * RING_FRAMES)?;
    thread::scope(|scope| {
        let start = Instant::now();
        let sender = scope.spawn(move || -> Result<(), RingError> {
            for _ in 0..n {
                let mut room = writer.reserve(bytes, DEADLINE)?;
                write(&mut room);
                room.commit();
            }
            Ok(())
        });
        for _ in 0..n {
            let frame = reader.next(DEADLINE)?;
            read(reader.bytes(frame));
            reader.release(frame);
        }
        let seconds = start.elapsed().as_secs_f64();
        sender.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok(seconds)
    })
}

fn frames_seconds(sent: &Sent, n: usize) -> Result<f64, RunError> {
    let view = sent.view();
    exchange(
        frame_bytes(&view),
        n,
        |room| encode(&view, &sent.meta(), room),
        |bytes| {
            let frame = Frame::decode(bytes).expect("what was sent is whole");
            assert_eq!(frame.rollout().tokens.len(), view.tokens.len(), "the rollout arrives as it was sent");
        },
    )
}

fn ring_seconds(bytes: usize, n: usize) -> Result<f64, RunError> {
    let from = vec![7_u8; bytes];
    exchange(
        bytes,
        n,
        |room| room.copy_from_slice(black_box(&from)),
        |bytes| assert_eq!(bytes.last(), Some(&7), "the last byte arrives"),
    )
}

fn memcpy_seconds(bytes: usize, n: usize) -> f64 {
    let (from, mut to) = (vec![7_u8; bytes], vec![0_u8; bytes * RING_FRAMES]);
    let start = Instant::now();
    for at in 0..n {
        let place = at % RING_FRAMES * bytes;
        to[place..place + bytes].copy_from_slice(black_box(&from));
        black_box(&mut to);
    }
    start.elapsed().as_secs_f64()
}

/// Half the microseconds of a word's way there and back, the mean of `n`.
fn latency_us(n: usize) -> Result<f64, RunError> {
    let ((mut there, mut served), (mut back, mut answer)) = (Ring::create(1 << 12)?, Ring::create(1 << 12)?);
    thread::scope(|scope| {
        let echo = scope.spawn(move || -> Result<(), RingError> {
            (0..n).try_for_each(|_| take(&mut served).and_then(|word| send(&mut back, word)))
        });
        let start = Instant::now();
        for word in 0..n as u64 {
            send(&mut there, word)?;
            assert_eq!(take(&mut answer)?, word, "the answer is the question");
        }
        let seconds = start.elapsed().as_secs_f64();
        echo.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok(seconds / n as f64 / 2.0 * 1e6)
    })
}

fn send(writer: &mut Writer, word: u64) -> Result<(), RingError> {
    let mut room = writer.reserve(size_of::<u64>(), DEADLINE)?;
    room.copy_from_slice(&word.to_le_bytes());
    room.commit();
    Ok(())
}

fn take(reader: &mut Reader) -> Result<u64, RingError> {
    let frame = reader.next(DEADLINE)?;
    let word = u64::from_le_bytes(reader.bytes(frame).try_into().expect("eight bytes were sent"));
    reader.release(frame);
    Ok(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_arrive_whole_and_every_way_is_measured() {
        for experts in [16, 300] {
            let setup = RingSetup { tokens: 9, layers: 2, top_k: 2, experts, frames: 20, rounds: 2 };
            let measured = measure(&setup).unwrap();
            assert_eq!((measured.rounds, measured.frames), (2, 20));
            assert!(measured.latency_us.min > 0.0 && measured.frames_gb_per_s.min > 0.0);
            assert!(measured.ring_gb_per_s.min > 0.0 && measured.memcpy_gb_per_s.min > 0.0);
            assert!(measured.table().contains("memcpy, GB/s"), "{}", measured.table());
        }
    }
}
