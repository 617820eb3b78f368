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
use crate::sample_stats::SampleStats;

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

/// Refuses routes of other layers than the model's MoE layers: replayed, they would be other layers' experts.
///
/// # Errors
/// The first such rollout.
pub fn check_layers(frames: &[Frame<'_>], layer_ids: &[u32]) -> Result<(), RunError> {
    let foreign = |frame: &&Frame<'_>| frame.rollout().routes.is_some() && frame.layer_ids() != layer_ids;
    match frames.iter().find(foreign) {
        None => Ok(()),
        Some(frame) => Err(RunError::ForeignLayers {
            group: frame.rollout().group.0,
            found: frame.layer_ids().to_vec(),
            expected: layer_ids.to_vec(),
        }),
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

#[cfg(test)]
mod tests {
    use r3_core::ids::TokenId;
    use r3_core::rollout::{FinishReason, Reward, RolloutView};
    use r3_core::routes::{RouteDims, RouteView};
    use r3_ring::frame::{FrameMeta, encode, frame_bytes};
    use r3_ring::ring::Ring;

    use super::*;

    /// A buffer that holds one frame for each `(group, index, reward)`, sampled by `version`.
    fn buffer(rollouts: &[(u64, u32, Reward)], version: u64) -> GroupBuffer {
        let (mut writer, mut reader) = Ring::create(1 << 16).unwrap();
        let mut held = Vec::new();
        for &(group, index, reward) in rollouts {
            let rollout = RolloutView {
                group: GroupId(group),
                index,
                tokens: &[TokenId(1), TokenId(2)],
                prompt_tokens: 1,
                rollout_logprobs: &[-0.5],
                versions: &[PolicyVersion(version)],
                routes: None,
                finish: FinishReason::Stop,
                cached_tokens: 0,
                support: None,
            };
            let meta = FrameMeta { layer_ids: &[], weight_epoch: 1, model_hash: 2, reward, mask: None };
            let mut frame = writer.reserve(frame_bytes(&rollout), Duration::ZERO).unwrap();
            encode(&rollout, &meta, &mut frame);
            frame.commit();
            held.push(reader.next(Duration::ZERO).unwrap());
        }
        GroupBuffer { reader, held }
    }

    fn ids(buffer: &GroupBuffer) -> Vec<(u64, u32)> {
        let frames = buffer.frames().unwrap();
        frames.iter().map(|frame| (frame.rollout().group.0, frame.rollout().index)).collect()
    }

    #[test]
    fn routes_of_other_layers_are_refused() {
        let dims = RouteDims { n_layers: 2, top_k: 1, n_experts: 4 };
        let rollout = RolloutView {
            group: GroupId(3),
            index: 0,
            tokens: &[TokenId(1), TokenId(2)],
            prompt_tokens: 1,
            rollout_logprobs: &[-0.5],
            versions: &[PolicyVersion(0)],
            routes: Some(RouteView::new(dims, &[0, 3]).unwrap()),
            finish: FinishReason::Stop,
            cached_tokens: 0,
            support: None,
        };
        let reward = Reward::Score(1.0);
        let meta = FrameMeta { layer_ids: &[1, 2], weight_epoch: 1, model_hash: 2, reward, mask: None };
        let (mut writer, mut reader) = Ring::create(1 << 16).unwrap();
        let mut reserved = writer.reserve(frame_bytes(&rollout), Duration::ZERO).unwrap();
        encode(&rollout, &meta, &mut reserved);
        reserved.commit();
        let id = reader.next(Duration::ZERO).unwrap();
        let frame = [Frame::decode(reader.bytes(id)).unwrap()];
        check_layers(&frame, &[1, 2]).unwrap();
        let error = check_layers(&frame, &[0, 1]).unwrap_err();
        assert!(matches!(error, RunError::ForeignLayers { group: 3, .. }), "{error}");
    }

    #[test]
    fn groups_without_a_signal_go_back_and_the_others_keep_their_order() {
        let score = Reward::Score;
        let mut buffer = buffer(
            &[
                (3, 1, score(1.0)),
                (1, 0, score(0.5)),
                (2, 0, score(1.0)),
                (3, 0, score(0.0)),
                (1, 1, score(0.5)),
                (2, 1, Reward::Failed),
                (0, 0, score(0.0)),
                (0, 1, score(1.0)),
            ],
            0,
        );
        assert_eq!(buffer.n_groups(2), 4);
        assert_eq!(buffer.drop_equal().unwrap(), 2, "one is equal, one has a single valid reward");
        assert_eq!(ids(&buffer), [(3, 1), (3, 0), (0, 0), (0, 1)]);
        assert_eq!((buffer.n_groups(2), buffer.reader.held_frames()), (2, 4));
        assert_eq!(buffer.drop_equal().unwrap(), 0);
        buffer.release();
        assert_eq!((buffer.n_groups(2), buffer.reader.held_frames(), buffer.used_bytes()), (0, 0, 0));
    }

    #[test]
    fn frames_become_groups_by_id_with_their_rewards() {
        let score = Reward::Score;
        let buffer = buffer(&[(9, 1, score(1.0)), (4, 0, Reward::Failed), (9, 0, score(0.25))], 7);
        let frames = buffer.frames().unwrap();
        let groups = groups(&frames, PolicyVersion(7), 0).unwrap();
        let found: Vec<_> = groups
            .iter()
            .map(|group| {
                let samples = group.samples.iter().map(|sample| (sample.rollout.index, sample.reward));
                (group.id.0, samples.collect::<Vec<_>>())
            })
            .collect();
        assert_eq!(found, [(4, vec![(0, Reward::Failed)]), (9, vec![(1, score(1.0)), (0, score(0.25))])]);
    }

    #[test]
    fn a_rollout_is_refused_one_step_past_the_bound() {
        let buffer = buffer(&[(5, 0, Reward::Failed)], 10);
        let frames = buffer.frames().unwrap();
        assert!(groups(&frames, PolicyVersion(12), 2).is_ok());
        let error = groups(&frames, PolicyVersion(13), 2).map(|_| ()).unwrap_err();
        assert!(matches!(error, RunError::Stale { group: 5, staleness: 3, max_staleness: 2 }), "{error}");
    }
}
