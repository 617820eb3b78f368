//! Holds the frames of a step in the ring until the trainer has used them, and reads them as groups.

use std::collections::BTreeMap;
use std::time::Duration;

use r3_core::ids::{GroupId, PolicyVersion};
use r3_ring::error::RingError;
use r3_ring::frame::Frame;
use r3_ring::reader::{FrameId, Reader};
use r3_train::advantage::{Signal, signal};
use r3_train::batch::{Group, Sample};

use crate::error::RunError;
use crate::handle::WorkerHandle;
use crate::worker::SampleStats;

/// How long one look into the ring may take before the worker is asked whether it still lives.
const LOOK: Duration = Duration::from_millis(100);

/// The trainer's end of the ring. Frames are read in place and given back after the step.
pub struct GroupBuffer {
    reader: Reader,
    held: Vec<FrameId>,
}

impl GroupBuffer {
    /// An empty buffer.
    #[must_use]
    pub fn new(reader: Reader) -> Self {
        Self { reader, held: Vec::new() }
    }

    /// Holds the next `n` frames, and says what sampling them took.
    ///
    /// # Errors
    /// Whatever stopped the worker, or that it got nothing done before the deadline.
    pub fn receive(&mut self, n: usize, worker: &mut WorkerHandle) -> Result<SampleStats, RunError> {
        let mut stats = None;
        let mut missing = n;
        while missing > 0 {
            match self.reader.next(LOOK) {
                Ok(frame) => {
                    self.held.push(frame);
                    missing -= 1;
                }
                Err(RingError::Timeout { .. }) if stats.is_none() => {
                    stats = worker.sampled(Duration::ZERO)?
                }
                // The worker's own error says more than the ring it closed.
                Err(error) => return Err(worker.sampled(LOOK).err().unwrap_or(error.into())),
            }
        }
        loop {
            if let Some(stats) = stats {
                return Ok(stats);
            }
            stats = worker.sampled(LOOK)?;
        }
    }

    /// The held frames, checked and decoded in place.
    ///
    /// # Errors
    /// If a frame is broken, which names the sample.
    pub fn frames(&self) -> Result<Vec<Frame<'_>>, RunError> {
        Ok(self.held.iter().map(|&id| Frame::decode(self.reader.bytes(id))).collect::<Result<_, _>>()?)
    }

    /// Gives back the frames of groups whose rewards are all equal; returns how many groups that were.
    ///
    /// # Errors
    /// If a frame is broken.
    pub fn drop_equal(&mut self) -> Result<usize, RunError> {
        let mut rewards: BTreeMap<GroupId, Vec<Option<f64>>> = BTreeMap::new();
        let frames = self.frames()?;
        for frame in &frames {
            let reward = frame.reward().score().map(f64::from);
            rewards.entry(frame.rollout().group).or_default().push(reward);
        }
        let keep: Vec<bool> =
            frames.iter().map(|frame| signal(&rewards[&frame.rollout().group]) == Signal::Mixed).collect();
        drop(frames);
        let mut keep = keep.into_iter();
        let reader = &mut self.reader;
        self.held.retain(|&id| {
            let kept = keep.next().expect("one verdict for each frame");
            if !kept {
                reader.release(id);
            }
            kept
        });
        Ok(rewards.values().filter(|rewards| signal(rewards) != Signal::Mixed).count())
    }

    /// Groups held, complete ones, since a batch of prompts is awaited whole.
    #[must_use]
    pub fn n_groups(&self, group_size: usize) -> usize {
        self.held.len() / group_size
    }

    /// Gives all frames back to the worker.
    pub fn release(&mut self) {
        for id in self.held.drain(..) {
            self.reader.release(id);
        }
    }

    /// Bytes of the ring that hold frames.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.reader.used_bytes()
    }
}

/// Sorts decoded frames into groups, and refuses those that are staler than `max_staleness`.
///
/// # Errors
/// The first rollout that is too old.
pub fn groups<'a>(
    frames: &[Frame<'a>],
    version: PolicyVersion,
    max_staleness: u64,
) -> Result<Vec<Group<'a>>, RunError> {
    let mut groups: BTreeMap<GroupId, Vec<Sample<'a>>> = BTreeMap::new();
    for frame in frames {
        let rollout = frame.rollout();
        let staleness = rollout.oldest_version().map_or(0, |oldest| version.staleness(oldest));
        if staleness > max_staleness {
            return Err(RunError::Stale { group: rollout.group.0, staleness, max_staleness });
        }
        groups.entry(rollout.group).or_default().push(Sample {
            rollout,
            reward: frame.reward(),
            mask: Some(frame.mask()),
        });
    }
    Ok(groups.into_iter().map(|(id, samples)| Group { id, samples }).collect())
}
