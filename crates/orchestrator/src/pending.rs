//! Groups that were begun and not trained on yet: which of them go next, and what is there of them.

use std::collections::BTreeMap;

use r3_core::ids::{GroupId, PolicyVersion};
use r3_core::rollout::Reward;
use r3_scheduler::request::Finished;
use r3_tasks::dataset::Prompt;

/// A rollout that ended, and what it earned.
#[derive(Clone, Debug)]
pub struct Scored {
    /// The rollout.
    pub rollout: Finished,
    /// What its completion earned.
    pub reward: Reward,
    /// The weights under which it ended.
    pub origin: Origin,
}

/// Which weights an engine holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// Refits since the run began, whichever process made them. The engine's own epoch ends with an evaluation, too.
    pub weight_epoch: u64,
    /// One hash over all tensors.
    pub model_hash: u64,
}

/// A group that was begun.
#[derive(Clone, Debug)]
struct Group {
    /// The problem its completions are judged by.
    problem: usize,
    /// The version served when it was begun: none of its tokens is older.
    begun: PolicyVersion,
    /// Rollouts that have not ended.
    n_unfinished: u32,
    /// Rollouts that ended and were not handed over.
    kept: Vec<Scored>,
}

/// The groups that were begun and not handed over, and the unfinished rollouts that are not in the engine.
///
/// Nothing in here is ever dropped for its age. A group that would be too old for the next step has to be in this one,
/// and the oldest groups go first, so slow prompts are trained on as often as fast ones.
#[derive(Clone, Debug, Default)]
pub struct Pending {
    groups: BTreeMap<GroupId, Group>,
    /// Taken out of the engine, oldest first; resumed before anything else is sampled.
    pub(crate) partial: Vec<Finished>,
}

impl Pending {
    /// Notes that `size` rollouts of `prompt` begin under `version`.
    ///
    /// # Panics
    /// If the group was begun before.
    pub fn begin(&mut self, prompt: &Prompt, size: u32, version: PolicyVersion) {
        let group = Group { problem: prompt.problem, begun: version, n_unfinished: size, kept: Vec::new() };
        let earlier = self.groups.insert(prompt.group, group);
        assert!(earlier.is_none(), "group {} begins twice", prompt.group);
    }

    /// The problem of a group that was begun.
    ///
    /// # Panics
    /// If it was not.
    #[must_use]
    pub fn problem(&self, group: GroupId) -> usize {
        self.groups[&group].problem
    }

    /// Groups begun and not handed over.
    #[must_use]
    pub fn n_groups(&self) -> usize {
        self.groups.len()
    }

    /// Of those, groups with rollouts that have not ended.
    #[must_use]
    pub fn n_unfinished(&self) -> usize {
        self.groups.values().filter(|group| group.n_unfinished > 0).count()
    }

    /// The version that began each group.
    #[must_use]
    pub fn begun(&self) -> BTreeMap<GroupId, PolicyVersion> {
        self.groups.iter().map(|(&id, group)| (id, group.begun)).collect()
    }

    /// Rollouts that ended and are kept, by group in the order in which they ended.
    pub fn kept(&self) -> impl Iterator<Item = &Scored> {
        self.groups.values().flat_map(|group| &group.kept)
    }

    /// Notes that a rollout of `group` ended.
    ///
    /// # Panics
    /// If the group has no unfinished rollout.
    pub fn end_one(&mut self, group: GroupId) {
        let group = self.groups.get_mut(&group).expect("rollouts are of groups that were begun");
        group.n_unfinished = group.n_unfinished.checked_sub(1).expect("a rollout ends once");
    }

    /// Keeps a rollout that ended until its group is handed over.
    ///
    /// # Panics
    /// If its group was not begun.
    pub fn keep(&mut self, rollout: Scored) {
        let group = self.groups.get_mut(&rollout.rollout.group);
        group.expect("rollouts are of groups that were begun").kept.push(rollout);
    }

    /// Whether `n` whole groups are there, and among them all that were begun before `oldest`.
    #[must_use]
    pub fn is_ready(&self, n: usize, oldest: PolicyVersion) -> bool {
        let is_whole = |group: &&Group| group.n_unfinished == 0;
        self.groups.values().filter(is_whole).count() >= n
            && self.groups.values().take_while(|group| group.begun < oldest).all(|group| is_whole(&group))
    }

    /// Hands over the oldest `n` whole groups: groups are begun in the order of their ids. Returns what is kept of them.
    pub fn take(&mut self, n: usize) -> Vec<Scored> {
        let whole = self.groups.iter().filter(|(_, group)| group.n_unfinished == 0).map(|(&id, _)| id);
        let taken: Vec<GroupId> = whole.take(n).collect();
        taken.iter().filter_map(|id| self.groups.remove(id)).flat_map(|group| group.kept).collect()
    }

    /// Puts back what a checkpoint kept of a group. Its unfinished rollouts go into `partial`.
    pub(crate) fn restore(
        &mut self,
        prompt: &Prompt,
        begun: PolicyVersion,
        kept: Vec<Scored>,
        n_unfinished: usize,
    ) {
        let n_unfinished = u32::try_from(n_unfinished).expect("a group has fewer rollouts");
        self.groups.insert(prompt.group, Group { problem: prompt.problem, begun, n_unfinished, kept });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{ProptestConfig, prop, prop_assert, prop_assert_eq, proptest};

    use super::*;
    use crate::fixtures::scored;

    fn prompt(group: u64) -> Prompt {
        Prompt { group: GroupId(group), problem: group as usize + 100, tokens: Vec::new() }
    }

    /// Groups of two, each begun under the version of its place.
    fn begun(versions: &[u64]) -> Pending {
        let mut pending = Pending::default();
        for (&version, group) in versions.iter().zip(0..) {
            pending.begin(&prompt(group), 2, PolicyVersion(version));
        }
        pending
    }

    fn end(pending: &mut Pending, group: u64, index: u32) {
        pending.end_one(GroupId(group));
        pending.keep(scored(group, index, Reward::Score(1.0)));
    }

    fn ids(rollouts: &[Scored]) -> Vec<(u64, u32)> {
        rollouts.iter().map(|scored| (scored.rollout.group.0, scored.rollout.index)).collect()
    }

    #[test]
    fn a_group_is_handed_over_whole_or_not_at_all() {
        let mut pending = begun(&[0, 0, 0]);
        (0..3).for_each(|group| end(&mut pending, group, 1));
        assert!(!pending.is_ready(1, PolicyVersion(0)));
        end(&mut pending, 1, 0);
        assert!(pending.is_ready(1, PolicyVersion(0)) && !pending.is_ready(2, PolicyVersion(0)));
        assert_eq!((pending.n_groups(), pending.n_unfinished()), (3, 2));
        assert_eq!(ids(&pending.take(2)), [(1, 1), (1, 0)]);
        assert_eq!((pending.n_groups(), pending.kept().count()), (2, 2));
        assert_eq!(pending.problem(GroupId(2)), 102);
    }

    #[test]
    fn the_oldest_go_first_and_the_others_stay() {
        let mut pending = begun(&[0, 0, 2, 2]);
        for group in [3, 2, 0] {
            (0..2).for_each(|index| end(&mut pending, group, index));
        }
        assert_eq!(ids(&pending.take(2)), [(0, 0), (0, 1), (2, 0), (2, 1)]);
        assert_eq!(pending.begun().into_keys().collect::<Vec<_>>(), [1, 3].map(GroupId));
    }

    #[test]
    fn a_step_waits_for_what_would_be_too_old_for_the_next() {
        let mut pending = begun(&[0, 2, 2]);
        for group in [1, 2] {
            (0..2).for_each(|index| end(&mut pending, group, index));
        }
        assert!(pending.is_ready(2, PolicyVersion(0)), "group 0 may go on");
        assert!(!pending.is_ready(2, PolicyVersion(1)), "group 0 may not");
        (0..2).for_each(|index| end(&mut pending, 0, index));
        assert!(pending.is_ready(2, PolicyVersion(1)));
        assert_eq!(ids(&pending.take(2))[..2], [(0, 0), (0, 1)]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        /// The loop over groups of one rollout that last `ticks[group]` ticks: whatever the durations, none is trained on
        /// later than the bound allows, none is dropped, and all that are begun come up.
        #[test]
        fn nothing_is_staler_than_the_bound_and_nothing_is_dropped(
            groups in 1_usize..5,
            over in 0_usize..5,
            mini_steps in 1_u64..4,
            slack in 0_u64..7,
            ticks in prop::collection::vec(1_u32..40, 60),
        ) {
            let over = over.min(groups);
            let max_staleness = mini_steps + slack;
            let (mut pending, mut running) = (Pending::default(), Vec::new());
            let (mut next, mut trained) = (0, Vec::new());
            for step in 0..8 {
                let version = PolicyVersion(step * mini_steps);
                for _ in 0..groups + over - pending.n_groups() {
                    pending.begin(&prompt(next), 1, version);
                    running.push((next, ticks[next as usize % ticks.len()]));
                    next += 1;
                }
                let oldest = PolicyVersion(version.0.saturating_sub(max_staleness - mini_steps));
                let mut began = pending.begun();
                while !pending.is_ready(groups, oldest) {
                    running.iter_mut().for_each(|(_, left)| *left -= 1);
                    for (group, _) in running.extract_if(.., |(_, left)| *left == 0) {
                        end(&mut pending, group, 0);
                    }
                }
                let taken = pending.take(groups);
                prop_assert_eq!(taken.len(), groups);
                for scored in &taken {
                    let begun = began.remove(&scored.rollout.group).unwrap();
                    prop_assert!(version.staleness(begun) <= max_staleness);
                }
                trained.extend(ids(&taken));
                prop_assert_eq!(pending.n_groups(), over);
            }
            let waiting = pending.begun().len();
            trained.sort_unstable();
            trained.dedup();
            prop_assert_eq!(trained.len() + waiting, next as usize, "each is trained on once or waits");
        }
    }
}
