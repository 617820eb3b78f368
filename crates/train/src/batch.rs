//! From complete groups of rollouts to one packed, ragged step.
//!
//! A batch borrows its rollouts, so routes stay where the rollout engine wrote them until a micro-batch runs.

use std::ops::Range;

use r3_core::ids::{GroupId, PolicyVersion};
use r3_core::rollout::{FinishReason, Reward, RolloutView};
use r3_core::routes::RouteDims;
use r3_recipe::objective::Truncated;

use crate::advantage::{Signal, signal};
use crate::batch_stats::{BatchCounter, BatchStats, overlong};
use crate::contract::{ordered_samples, refuse_repeated_groups};
use crate::cut::micro_batches;
use crate::error::TrainError;
use crate::loss::aggregation::StepCounts;
use crate::objective::Objective;

/// What the trainer does with the routes of a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoutesUse {
    /// The trainer takes the experts that the rollout took (R3).
    Replay,
    /// The trainer chooses freely, and counts where it differs from the rollout.
    Diagnose,
    /// Nobody looks at routes; rollouts need none.
    None,
}

/// How a batch is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Optimiser steps to make of one batch; at least 1.
    pub mini_steps: usize,
    /// Rows a forward may take at once; a longer sequence runs alone.
    pub micro_batch_tokens: usize,
    /// Whether rollouts of one prompt share its rows.
    pub share_prompts: bool,
    /// What routes are for.
    pub routes: RoutesUse,
}

/// A rollout and what was thought of it.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'a> {
    /// The rollout.
    pub rollout: RolloutView<'a>,
    /// What its task said.
    pub reward: Reward,
    /// `[N]`: 0 for tokens that are not trained on, such as those that were given between two turns; `None` trains on
    /// all.
    pub mask: Option<&'a [u8]>,
}

impl Sample<'_> {
    /// Tokens trained on.
    #[must_use]
    pub fn n_trained(&self) -> usize {
        let n_tokens = self.rollout.completion().len();
        self.mask.map_or(n_tokens, |mask| mask.iter().filter(|&&kept| kept != 0).count())
    }
}

/// All rollouts of one prompt.
#[derive(Clone, Debug)]
pub struct Group<'a> {
    /// Which group.
    pub id: GroupId,
    /// Its rollouts, in any order.
    pub samples: Vec<Sample<'a>>,
}

/// A rollout that will be trained on.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// The rollout and its mask.
    pub sample: Sample<'a>,
    /// Its reward after shaping.
    pub reward: f64,
    /// Its advantage, finite.
    pub advantage: f64,
    /// Weight of each of its trained tokens in the loss.
    pub weight: f64,
    /// Tokens trained on, at least 1.
    pub n_trained: usize,
    /// Inputs, from the first, whose rows are those of its leader: the last sequence before it that shares none, which is
    /// of its group and in its micro-batch.
    pub n_shared: usize,
}

impl Sequence<'_> {
    /// Tokens fed to the model: all but the last.
    #[must_use]
    pub fn n_inputs(&self) -> usize {
        self.sample.rollout.tokens.len() - 1
    }

    /// Rows of its own in a forward: its inputs but for those it shares.
    #[must_use]
    pub fn n_rows(&self) -> usize {
        self.n_inputs() - self.n_shared
    }
}

/// One optimiser step: its micro-batches and the denominators of its loss.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MiniStep {
    /// Ranges of [`Batch::sequences`], in order.
    pub micro_batches: Vec<Range<usize>>,
    /// What it trains on.
    pub counts: StepCounts,
}

/// One packed training batch.
#[derive(Clone, Debug)]
pub struct Batch<'a> {
    sequences: Vec<Sequence<'a>>,
    mini_steps: Vec<MiniStep>,
    routes: RoutesUse,
    stats: BatchStats,
}

impl<'a> Batch<'a> {
    /// Packs complete groups for training on `objective`.
    ///
    /// Sequences are ordered by (group, index), so the order of arrival never matters. Groups whose rewards are all
    /// equal are counted, and left out, of denominators too, where they have no gradient: DAPO's dynamic sampling
    /// (arXiv 2503.14476) shows that counting them only shrinks the others'. Where a KL or the entropy gives them one,
    /// they stay, unless dynamic sampling asks to leave them out. That judges rewards before the overlong punishment, as
    /// DAPO does, which counts correct answers; without it the punishment is as good a difference as any. A group of
    /// which fewer than two rewards are valid never stays, unless rewards are compared over the batch. The remaining groups
    /// are spread over `limits.mini_steps` optimiser steps in order, as evenly as they go (the first take one more), over
    /// fewer steps where there are fewer groups; none make no step.
    ///
    /// # Errors
    /// If a rollout breaks its contract, came twice, or lacks routes that `limits.routes` needs; group and
    /// index are named.
    pub fn pack(groups: &[Group<'a>], objective: &Objective, limits: Limits) -> Result<Self, TrainError> {
        let routes = limits.routes;
        refuse_repeated_groups(groups)?;
        let mut order: Vec<&Group<'a>> = groups.iter().collect();
        order.sort_by_key(|group| group.id);
        let mut kept = Vec::new();
        let mut counter = BatchCounter::default();
        for group in order {
            let samples = ordered_samples(group, routes)?;
            counter.add_group(&samples, objective);
            let (judged, sequences) = weigh(&samples, objective);
            counter.stats.n_groups_equal += usize::from(judged == Signal::Equal);
            if !sequences.is_empty() {
                kept.push(sequences);
            } else if judged != Signal::Equal {
                counter.stats.n_groups_too_few += 1;
            }
        }
        leave_out_equal_batch(&mut kept, objective, &mut counter.stats);
        let all = kept.iter_mut().flatten();
        objective.estimator.whiten(all.map(|sequence| (&mut sequence.advantage, sequence.n_trained)));
        let mut batch =
            Self { sequences: Vec::new(), mini_steps: Vec::new(), routes, stats: counter.finish() };
        batch.cut(kept, limits);
        batch.refuse_mixed_routes()?;
        Ok(batch)
    }

    /// The rollouts that will be trained on, by (group, index).
    #[must_use]
    pub fn sequences(&self) -> &[Sequence<'a>] {
        &self.sequences
    }

    /// The optimiser steps, in order; together their micro-batches hold every sequence once.
    #[must_use]
    pub fn mini_steps(&self) -> &[MiniStep] {
        &self.mini_steps
    }

    /// Forwards that [`Trainer::step`](crate::trainer::Trainer::step) makes: each micro-batch learns once, and those of
    /// all but the first mini-step are measured before.
    #[must_use]
    pub fn n_passes(&self) -> usize {
        let counts = self.mini_steps.iter().map(|mini| mini.micro_batches.len());
        counts.clone().sum::<usize>() + counts.skip(1).sum::<usize>()
    }

    /// What the trainer does with the routes.
    #[must_use]
    pub fn routes(&self) -> RoutesUse {
        self.routes
    }

    /// Shape of the routes, if the batch carries any.
    #[must_use]
    pub fn route_dims(&self) -> Option<RouteDims> {
        if self.routes == RoutesUse::None {
            return None;
        }
        self.sequences.first().and_then(|sequence| sequence.sample.rollout.routes).map(|routes| routes.dims())
    }

    /// What the groups looked like.
    #[must_use]
    pub fn stats(&self) -> &BatchStats {
        &self.stats
    }

    /// Mean and maximum staleness of the sequences at trainer version `version`, in optimiser steps.
    #[must_use]
    pub fn staleness(&self, version: PolicyVersion) -> (f64, u64) {
        let stale = |sequence: &Sequence<'_>| {
            sequence.sample.rollout.oldest_version().map_or(0, |oldest| version.staleness(oldest))
        };
        let sum: u64 = self.sequences.iter().map(stale).sum();
        let max = self.sequences.iter().map(stale).max().unwrap_or(0);
        (sum as f64 / self.sequences.len().max(1) as f64, max)
    }

    /// All routes have one shape, or a micro-batch could not hold them.
    fn refuse_mixed_routes(&self) -> Result<(), TrainError> {
        let Some(expected) = self.route_dims() else { return Ok(()) };
        for Sequence { sample: Sample { rollout, .. }, .. } in &self.sequences {
            let RolloutView { group, index, routes: Some(view), .. } = *rollout else { continue };
            if view.dims() != expected {
                return Err(TrainError::RouteShape { group, index, dims: view.dims(), expected });
            }
        }
        Ok(())
    }

    /// Cuts groups into mini-steps and those into micro-batches.
    fn cut(&mut self, groups: Vec<Vec<Sequence<'a>>>, limits: Limits) {
        let n_steps = limits.mini_steps.max(1).min(groups.len());
        let n_groups = groups.len();
        let mut groups = groups.into_iter();
        for step in 0..n_steps {
            let start = self.sequences.len();
            let n_here = n_groups / n_steps + usize::from(step < n_groups % n_steps);
            self.sequences.extend(groups.by_ref().take(n_here).flatten());
            let sequences = &mut self.sequences[start..];
            let micro_batches = micro_batches(sequences, start, limits);
            let counts = StepCounts {
                n_tokens: sequences.iter().map(|sequence| sequence.n_trained).sum(),
                n_sequences: sequences.len(),
                n_prompts: n_here,
            };
            self.stats.n_trained += counts.n_tokens;
            self.stats.n_inputs += sequences.iter().map(Sequence::n_inputs).sum::<usize>();
            self.stats.n_shared += sequences.iter().map(|sequence| sequence.n_shared).sum::<usize>();
            self.mini_steps.push(MiniStep { micro_batches, counts });
        }
    }
}

/// The sequences of one group that are worth a forward, with their advantages.
fn weigh<'a>(samples: &[Sample<'a>], objective: &Objective) -> (Signal, Vec<Sequence<'a>>) {
    let task: Vec<_> = samples.iter().map(|sample| sample.reward.score().map(f64::from)).collect();
    let shaped: Vec<_> = samples
        .iter()
        .zip(&task)
        .map(|(sample, reward)| reward.map(|reward| reward + overlong(sample, objective)))
        .collect();
    let judged = match signal(if objective.leaves_out_equal { &task } else { &shaped }) {
        // Compared with the whole batch, a reward needs no other in its group.
        _ if !objective.estimator.compares_within_groups() => Signal::Mixed,
        judged => judged,
    };
    let stays = match judged {
        Signal::Mixed => true,
        Signal::Equal => objective.keeps_equal(),
        Signal::TooFew => false,
    };
    if !stays {
        return (judged, Vec::new());
    }
    let group = objective.estimator.advantages(&shaped);
    let mut sequences: Vec<_> = samples
        .iter()
        .zip(shaped.iter().zip(group.advantages))
        .filter(|(sample, _)| !is_left_out(sample, objective))
        .filter_map(|(sample, (reward, advantage))| {
            let n_trained = sample.n_trained();
            let (reward, advantage) = ((*reward)?, advantage?);
            let sequence =
                Sequence { sample: *sample, reward, advantage, weight: 0.0, n_trained, n_shared: 0 };
            (n_trained > 0).then_some(sequence)
        })
        .collect();
    let n_prompt = sequences.iter().map(|sequence| sequence.n_trained).sum();
    for sequence in &mut sequences {
        sequence.weight = objective.aggregation.weight(sequence.n_trained, n_prompt);
    }
    (judged, sequences)
}

/// Whether a sample was cut off, and the recipe does not train on such.
pub(crate) fn is_left_out(sample: &Sample<'_>, objective: &Objective) -> bool {
    objective.truncated == Truncated::Mask && sample.rollout.finish == FinishReason::Length
}

/// Compared with one another over the batch, advantages that are all equal teach as little as those of one group.
fn leave_out_equal_batch(kept: &mut Vec<Vec<Sequence<'_>>>, objective: &Objective, stats: &mut BatchStats) {
    let advantages: Vec<_> = kept.iter().flatten().map(|sequence| Some(sequence.advantage)).collect();
    if !objective.estimator.compares_within_groups() && signal(&advantages) != Signal::Mixed {
        stats.n_groups_equal += kept.len();
        if !objective.keeps_equal() {
            kept.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{Just, Strategy, prop, prop_assert_eq, proptest};
    use r3_recipe::algorithm::Overlong;
    use r3_recipe::objective::KlPlace;

    use super::*;
    use crate::advantage::Estimator;
    use crate::fixtures::{OwnedRollout, dapo, grpo, with_groups};
    use crate::loss::kl::KlEstimator;
    use crate::micro_batch::MicroBatch;
    use crate::objective::KlTerm;

    const DIMS: RouteDims = RouteDims { n_layers: 2, top_k: 2, n_experts: 5 };

    fn limits(mini_steps: usize, micro_batch_tokens: usize, routes: RoutesUse) -> Limits {
        Limits { mini_steps, micro_batch_tokens, share_prompts: false, routes }
    }

    fn packed<R>(rollouts: &[OwnedRollout], limits: Limits, inspect: impl FnOnce(Batch<'_>) -> R) -> R {
        with_groups(rollouts, |groups| inspect(Batch::pack(groups, &dapo(), limits).unwrap()))
    }

    fn order(batch: &Batch<'_>) -> Vec<(u64, u32)> {
        let id = |sequence: &Sequence<'_>| (sequence.sample.rollout.group.0, sequence.sample.rollout.index);
        batch.sequences().iter().map(id).collect()
    }

    /// Group 1 teaches, group 2 does not, group 3 teaches with one failed reward.
    fn three_groups() -> Vec<OwnedRollout> {
        let mut failed = OwnedRollout::new(3, 1, (2, 2), 0.0);
        failed.reward = Reward::Failed;
        vec![
            OwnedRollout::new(3, 2, (2, 2), 1.0),
            OwnedRollout::new(1, 1, (3, 2), 0.0),
            OwnedRollout::new(2, 0, (2, 4), 1.0),
            failed,
            OwnedRollout::new(1, 0, (3, 3), 1.0),
            OwnedRollout::new(2, 1, (2, 1), 1.0),
            OwnedRollout::new(3, 0, (2, 1), 0.0),
        ]
    }

    #[test]
    fn groups_without_signal_leave_the_batch_and_its_denominators() {
        packed(&three_groups(), limits(1, 100, RoutesUse::None), |batch| {
            assert_eq!(order(&batch), [(1, 0), (1, 1), (3, 0), (3, 2)]);
            let [mini] = batch.mini_steps() else { panic!("one mini-step") };
            assert_eq!(
                (mini.counts.n_tokens, mini.counts.n_sequences, mini.counts.n_prompts),
                (3 + 2 + 1 + 2, 4, 2)
            );
            let stats = batch.stats();
            assert_eq!((stats.n_groups, stats.n_groups_equal, stats.n_groups_too_few), (3, 1, 0));
            assert_eq!((stats.n_rollouts, stats.n_rewards_failed), (7, 1));
            assert_eq!((stats.n_inputs, stats.n_trained), (5 + 4 + 2 + 3, 8));
            assert!((stats.reward_mean - 4.0 / 6.0).abs() < 1e-12);
        });
    }

    #[test]
    fn mini_steps_share_the_groups_in_order() {
        let rollouts: Vec<_> = (0..5)
            .flat_map(|group| {
                [OwnedRollout::new(group, 0, (1, 2), 1.0), OwnedRollout::new(group, 1, (1, 2), 0.0)]
            })
            .collect();
        let sizes = |mini_steps| {
            packed(&rollouts, limits(mini_steps, 100, RoutesUse::None), |batch| {
                batch.mini_steps().iter().map(|mini| mini.counts.n_sequences / 2).collect::<Vec<_>>()
            })
        };
        assert_eq!(sizes(2), [3, 2]);
        assert_eq!(sizes(5), [1; 5]);
        assert_eq!(sizes(9), [1; 5], "fewer groups than mini-steps make fewer mini-steps");
    }

    #[test]
    fn nothing_to_learn_makes_no_step() {
        let equal = [OwnedRollout::new(0, 0, (1, 1), 1.0), OwnedRollout::new(0, 1, (1, 1), 1.0)];
        packed(&equal, limits(2, 100, RoutesUse::None), |batch| assert!(batch.mini_steps().is_empty()));
        packed(&[], limits(2, 100, RoutesUse::None), |batch| assert_eq!(batch.stats().n_groups, 0));
    }

    #[test]
    fn compared_over_the_batch_equal_groups_teach_unless_all_of_them_are_equal() {
        let objective = Objective { estimator: Estimator::Batch { group_baseline: false }, ..dapo() };
        let pack = |rewards: [f32; 4]| {
            let rollout =
                |(at, reward): (u64, f32)| OwnedRollout::new(at / 2, (at % 2) as u32, (1, 2), reward);
            let rollouts: Vec<_> = (0..).zip(rewards).map(rollout).collect();
            with_groups(&rollouts, |groups| {
                let batch = Batch::pack(groups, &objective, limits(1, 100, RoutesUse::None)).unwrap();
                let advantages: Vec<_> = batch.sequences().iter().map(|one| one.advantage).collect();
                (advantages, batch.stats().n_groups_equal, batch.mini_steps().len())
            })
        };
        let (advantages, n_equal, n_steps) = pack([1.0, 1.0, 0.0, 0.0]);
        assert_eq!((n_equal, n_steps), (0, 1));
        assert!(advantages[0] > 0.9 && advantages[0] == advantages[1] && advantages[2] == -advantages[0]);
        assert_eq!(pack([1.0; 4]), (vec![], 2, 0));
    }

    #[test]
    fn equal_groups_stay_for_what_else_the_objective_has_unless_dynamic_sampling_leaves_them_out() {
        let taken = |objective: &Objective| {
            with_groups(&three_groups(), |groups| {
                let batch = Batch::pack(groups, objective, limits(1, 100, RoutesUse::None)).unwrap();
                let of_equal = batch.sequences().iter().filter(|one| one.sample.rollout.group.0 == 2);
                let advantages: Vec<_> = of_equal.map(|one| one.advantage).collect();
                (advantages, batch.mini_steps()[0].counts.n_tokens, batch.stats().n_groups_equal)
            })
        };
        let entropy = Objective { entropy_coef: 0.1, ..dapo() };
        let kl =
            |place| Objective { kl: Some(KlTerm { coef: 0.1, estimator: KlEstimator::K3, place }), ..dapo() };
        for objective in [entropy, kl(KlPlace::Loss), kl(KlPlace::Reward)] {
            assert_eq!(taken(&objective), (vec![0.0, 0.0], 8 + 5, 1));
            assert_eq!(taken(&Objective { leaves_out_equal: true, ..objective }), (vec![], 8, 1));
        }
        let whitened =
            Objective { estimator: Estimator::Batch { group_baseline: false }, entropy_coef: 0.1, ..dapo() };
        let equal = [OwnedRollout::new(0, 0, (1, 1), 1.0), OwnedRollout::new(0, 1, (1, 1), 1.0)];
        with_groups(&equal, |groups| {
            let batch = Batch::pack(groups, &whitened, limits(1, 100, RoutesUse::None)).unwrap();
            assert_eq!(batch.sequences().iter().map(|one| one.advantage).collect::<Vec<_>>(), [0.0; 2]);
            assert_eq!(batch.stats().n_groups_equal, 1);
        });
    }

    #[test]
    fn the_overlong_punishment_moves_advantages_but_not_what_dynamic_sampling_judges() {
        let overlong = Overlong { max_tokens: 4, cache_tokens: 2, factor: 1.0 };
        let objective = Objective { overlong: Some(overlong), leaves_out_equal: true, ..dapo() };
        let pair = |group, rewards: [f32; 2]| {
            [OwnedRollout::new(group, 0, (1, 4), rewards[0]), OwnedRollout::new(group, 1, (1, 2), rewards[1])]
        };
        // Group 0: shaped rewards are -1 and 1, a difference of 2. Group 1: equal before shaping, so left
        // out.
        with_groups(&[pair(0, [0.0, 1.0]), pair(1, [1.0, 1.0])].concat(), |groups| {
            let batch = Batch::pack(groups, &objective, limits(1, 100, RoutesUse::None)).unwrap();
            assert_eq!(order(&batch), [(0, 0), (0, 1)]);
            assert!((batch.sequences()[1].advantage - 1.0 / 2.0_f64.sqrt()).abs() < 1e-5);
            assert_eq!(batch.stats().overlong_mean, -0.5);
        });
        // Otherwise it is as good a signal as any.
        let objective = Objective { leaves_out_equal: false, ..objective };
        with_groups(&pair(1, [1.0, 1.0]), |groups| {
            let batch = Batch::pack(groups, &objective, limits(1, 100, RoutesUse::None)).unwrap();
            assert!((batch.sequences()[1].advantage - 1.0 / 2.0_f64.sqrt()).abs() < 1e-5);
            assert_eq!(batch.stats().n_groups_equal, 0);
        });
    }

    #[test]
    fn dr_grpo_keeps_the_scale_of_rewards() {
        let rollouts = [OwnedRollout::new(0, 0, (1, 1), 10.0), OwnedRollout::new(0, 1, (1, 1), 0.0)];
        let objective = Objective { estimator: Estimator::Group { normalise_std: false }, ..grpo() };
        with_groups(&rollouts, |groups| {
            let batch = Batch::pack(groups, &objective, limits(1, 100, RoutesUse::None)).unwrap();
            assert_eq!(batch.sequences().iter().map(|s| s.advantage).collect::<Vec<_>>(), [5.0, -5.0]);
        });
    }

    #[test]
    fn staleness_counts_from_the_oldest_token() {
        let mut rollouts = three_groups();
        rollouts[4].version = 3; // group 1, rollout 0; the others are of version 0
        packed(&rollouts, limits(1, 100, RoutesUse::None), |batch| {
            assert_eq!(batch.staleness(PolicyVersion(4)), ((1.0 + 3.0 * 4.0) / 4.0, 4));
        });
    }

    #[test]
    fn a_rollout_without_trained_tokens_is_left_out() {
        let mut rollouts = three_groups();
        rollouts[0].mask = Some(vec![0, 0]);
        packed(&rollouts, limits(1, 100, RoutesUse::None), |batch| {
            assert_eq!(order(&batch), [(1, 0), (1, 1), (3, 0)]);
        });
    }

    fn arrivals() -> impl Strategy<Value = (Vec<OwnedRollout>, Vec<OwnedRollout>)> {
        let rollout = (1_usize..4, 0_usize..6, prop::option::weighted(0.9, 0_u8..3));
        let group = prop::collection::vec(rollout, 1..5);
        prop::collection::vec(group, 0..6)
            .prop_map(|groups| {
                let mut rollouts = Vec::new();
                for (group, members) in (0..).zip(groups) {
                    for (index, (prompt, sampled, reward)) in (0..).zip(members) {
                        let mut rollout =
                            OwnedRollout::new(group, index, (prompt, sampled), reward.unwrap_or(0).into());
                        if reward.is_none() {
                            rollout.reward = Reward::Failed;
                        }
                        rollouts.push(rollout.with_routes(DIMS));
                    }
                }
                rollouts
            })
            .prop_flat_map(|rollouts| (Just(rollouts.clone()), Just(rollouts).prop_shuffle()))
    }

    proptest! {
        #[test]
        fn micro_batches_hold_every_token_once_within_the_budget(
            (rollouts, shuffled) in arrivals(),
            mini_steps in 1_usize..4,
            budget in 1_usize..20,
        ) {
            let limits = limits(mini_steps, budget, RoutesUse::Replay);
            let pack = |rollouts: &[OwnedRollout]| packed(rollouts, limits, |batch| check(&batch, budget));
            prop_assert_eq!(pack(&rollouts), pack(&shuffled), "the order of arrival matters");
        }
    }

    /// Checks a batch against its own sequences, and returns all it would feed to the model.
    fn check(batch: &Batch<'_>, budget: usize) -> Vec<MicroBatch> {
        let mut next = 0;
        let mut micro_batches = Vec::new();
        for mini in batch.mini_steps() {
            let start = next;
            for range in &mini.micro_batches {
                assert_eq!(range.start, next, "sequences are taken once, in order");
                next = range.end;
                let mut micro = MicroBatch::default();
                micro.gather(batch, range.clone());
                assert!(micro.n_inputs() <= budget || range.len() == 1);
                check_tokens(&micro, &batch.sequences()[range.clone()]);
                micro_batches.push(micro);
            }
            let sequences = &batch.sequences()[start..next];
            assert_eq!(mini.counts.n_sequences, sequences.len());
            assert_eq!(
                mini.counts.n_tokens,
                sequences.iter().map(|sequence| sequence.n_trained).sum::<usize>()
            );
        }
        assert_eq!(next, batch.sequences().len());
        micro_batches
    }

    fn check_tokens(micro: &MicroBatch, sequences: &[Sequence<'_>]) {
        let rollouts = || sequences.iter().map(|sequence| sequence.sample.rollout);
        let inputs: Vec<_> = rollouts().flat_map(|r| &r.tokens[..r.tokens.len() - 1]).copied().collect();
        let targets: Vec<_> = rollouts().flat_map(|r| &r.tokens[1..]).copied().collect();
        assert_eq!((&micro.tokens, &micro.targets), (&inputs, &targets));
        assert_eq!(micro.lengths.iter().sum::<usize>(), micro.n_inputs());
        let trained = |values: &[f32]| -> Vec<f32> {
            values
                .iter()
                .zip(&micro.mask)
                .filter(|(_, mask)| **mask == 1.0)
                .map(|(value, _)| *value)
                .collect()
        };
        let logprobs: Vec<f32> = rollouts().flat_map(|r| r.rollout_logprobs).copied().collect();
        assert_eq!(trained(&micro.rollout_logprobs), logprobs);
        let weights: Vec<_> = sequences.iter().flat_map(|one| vec![one.weight; one.n_inputs()]).collect();
        assert_eq!(micro.weights, weights);
        let mut at = 0;
        for layer in 0..DIMS.n_layers {
            for view in rollouts().map(|rollout| rollout.routes.unwrap()) {
                for row in 0..view.rows() {
                    for k in 0..DIMS.top_k {
                        assert_eq!(micro.routes[at], view.expert(row, layer, k));
                        at += 1;
                    }
                }
            }
        }
        assert_eq!(at, micro.routes.len());
    }
}
