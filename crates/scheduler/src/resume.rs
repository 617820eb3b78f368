//! Rollouts taken up again: where an abort stopped them, or with the next turn of their conversation.

use std::ops::Range;

use r3_core::ids::{SequenceId, TokenId};
use r3_core::rollout::FinishReason;
use r3_core::routes::RouteRows;
use r3_core::support::SupportRows;

use crate::error::SchedulerError;
use crate::request::{Finished, Limits, Refused};
use crate::scheduler::Scheduler;
use crate::sequence::Sequence;

impl Scheduler {
    /// Goes on with aborted rollouts of one group where they stopped, as the youngest that wait.
    ///
    /// What they emitted moves in and never changes: tokens, logprobs, versions, and the route rows under which a logprob
    /// was emitted. Other rows are dropped and computed again, by the weights that will sample. Those that had sampled
    /// nothing compute their prompt once, as when they were submitted.
    ///
    /// # Errors
    /// If a rollout was not aborted, has sampled all it may, contradicts itself or does not fit the whole cache, or
    /// they are not of one group. The rollouts come back as they were.
    pub fn resume(&mut self, rollouts: Vec<Finished>, limits: &Limits) -> Result<Vec<SequenceId>, Refused> {
        if let Err(error) = self.check_resumed(&rollouts, limits) {
            return Err(Refused { error, rollouts });
        }
        let (first, replays) = (self.next_id(), self.config.replays);
        let unstarted = rollouts.iter().position(|rollout| rollout.turns.is_empty());
        let family_of = |at: usize, rollout: &Finished| {
            let at = unstarted.filter(|_| rollout.turns.is_empty()).unwrap_or(at);
            SequenceId(first + at as u64)
        };
        let resume = |(at, rollout): (usize, Finished)| {
            let family = family_of(at, &rollout);
            Sequence::resumed((SequenceId(first + at as u64), family), rollout, limits, replays)
        };
        let members = rollouts.into_iter().enumerate().map(resume).collect();
        Ok(self.queue(members))
    }

    /// Begins the next turn of a rollout that ended: `given` follows its tokens, then more are sampled.
    ///
    /// Of the `T` tokens so far rows `0..T - 1` are owned: they move in, and never change. Row `T - 1`, of the token that
    /// was sampled last and never fed, is the first that this turn computes. Positions, and with them the random
    /// numbers, go on counting.
    ///
    /// # Errors
    /// If the rollout did not end by itself, contradicts itself or would not fit the whole cache, or nothing is given or
    /// to be sampled. The rollout comes back as it was.
    pub fn next_turn(
        &mut self,
        rollout: Finished,
        given: &[TokenId],
        limits: &Limits,
    ) -> Result<SequenceId, Refused> {
        if let Err(error) = self.check_next_turn(&rollout, given, limits) {
            return Err(Refused { error, rollouts: vec![rollout] });
        }
        let id = SequenceId(self.next_id());
        let mut sequence = Sequence::resumed((id, id), rollout, limits, self.config.replays);
        sequence.give(given);
        self.queue(vec![sequence]);
        Ok(id)
    }

    /// Every unfinished request as [`Self::abort`] would return it, oldest first, copied; nothing changes.
    ///
    /// # Panics
    /// Inside a tick.
    #[must_use]
    pub fn in_flight(&self) -> Vec<Finished> {
        assert!(!self.is_in_tick, "requests are copied between ticks");
        let copy = |sequence: &Sequence| {
            let mut copy = sequence.clone();
            copy.keep_routes(&self.kv);
            copy.finish(FinishReason::Abort)
        };
        self.sequences.values().map(copy).collect()
    }

    fn check_resumed(&self, rollouts: &[Finished], limits: &Limits) -> Result<(), SchedulerError> {
        let [first, ..] = rollouts else { return Err(SchedulerError::NothingToResume) };
        let group = first.group;
        let mut prompt = None;
        for rollout in rollouts {
            let Finished { index, finish, .. } = *rollout;
            if rollout.group != group {
                return Err(SchedulerError::MixedGroups { group, index, other: rollout.group });
            }
            if finish != FinishReason::Abort {
                return Err(SchedulerError::CannotResume { group, index, finish, how: "where it stopped" });
            }
            let is_unstarted = rollout.turns.is_empty();
            if is_unstarted && *prompt.get_or_insert(&rollout.tokens) != &rollout.tokens {
                return Err(SchedulerError::MixedPrompts { group });
            }
            let n_sampled = rollout.n_sampled_in_last_turn();
            let max_new_tokens = limits.max_new_tokens;
            if n_sampled >= max_new_tokens {
                return Err(SchedulerError::NothingToSample { group, index, n_sampled, max_new_tokens });
            }
            self.check_rollout(rollout)?;
            self.check_room(group, rollout.tokens.len(), max_new_tokens - n_sampled)?;
        }
        Ok(())
    }

    fn check_next_turn(
        &self,
        rollout: &Finished,
        given: &[TokenId],
        limits: &Limits,
    ) -> Result<(), SchedulerError> {
        let Finished { group, index, finish, .. } = *rollout;
        if finish == FinishReason::Abort || rollout.n_sampled_in_last_turn() == 0 {
            return Err(SchedulerError::CannotResume { group, index, finish, how: "with another turn" });
        }
        if given.is_empty() {
            return Err(SchedulerError::NothingGiven { group, index });
        }
        if limits.max_new_tokens == 0 {
            let max_new_tokens = 0;
            return Err(SchedulerError::NothingToSample { group, index, n_sampled: 0, max_new_tokens });
        }
        self.check_rollout(rollout)?;
        self.check_room(group, rollout.tokens.len().saturating_add(given.len()), limits.max_new_tokens)
    }

    /// Refuses a rollout that no engine of these dimensions made: it may come from a file.
    fn check_rollout(&self, rollout: &Finished) -> Result<(), SchedulerError> {
        let Finished { group, index, prompt_tokens, .. } = *rollout;
        if prompt_tokens == 0 {
            return Err(SchedulerError::EmptyPrompt { group });
        }
        let n_tokens = rollout.tokens.len();
        let rows = rollout.routes.as_ref().map_or(0, RouteRows::rows);
        let emitted = rollout.turns.last().map_or(0, |turn| turn.end.saturating_sub(1));
        let needed_rows = rollout.routes.as_ref().map_or(0, |_| emitted.saturating_sub(rollout.routes_start));
        let is_turn =
            |turn: &&Range<usize>| !turn.is_empty() && turn.start >= prompt_tokens && turn.end <= n_tokens;
        let n_turns = rollout.turns.iter().filter(is_turn).count();
        let dims = rollout.routes.as_ref().map(|routes| routes.view().dims());
        let row_ids = dims.map_or(0, |dims| dims.row_ids());
        let own_ids = dims.and(self.config.routes).map_or(row_ids, |dims| dims.row_ids());
        let n_after_prompt = n_tokens.saturating_sub(prompt_tokens);
        let counts = [
            ("prompt tokens", prompt_tokens.min(n_tokens), prompt_tokens),
            ("logprobs", rollout.rollout_logprobs.len(), n_after_prompt),
            ("versions", rollout.versions.len(), n_after_prompt),
            ("supports", rollout.support.as_ref().map_or(n_after_prompt, SupportRows::rows), n_after_prompt),
            ("turns within its tokens", n_turns, rollout.turns.len()),
            ("expert ids in a route row", row_ids, own_ids),
            ("route rows of sampled tokens", rows.min(needed_rows), needed_rows),
        ];
        if let Some(&(what, n, expected)) = counts.iter().find(|(_, n, expected)| n != expected) {
            return Err(SchedulerError::Misshapen { group, index, what, n, expected });
        }
        match rollout.routes {
            Some(_) => self.check_routes(group, rollout.routes_start, prompt_tokens),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use r3_core::ids::{GroupId, PolicyVersion};
    use r3_core::routes::RouteDims;

    use super::*;
    use crate::config::SchedulerConfig;
    use crate::request::{Request, Sample};

    const DIMS: RouteDims = RouteDims { n_layers: 1, top_k: 1, n_experts: 256 };
    const CONFIG: SchedulerConfig = SchedulerConfig {
        block_tokens: 4,
        n_blocks: 8,
        max_running: 4,
        max_batch_tokens: 8,
        prefix_cache: false,
        routes: Some(DIMS),
        replays: false,
    };

    fn scheduler() -> Scheduler {
        Scheduler::new(CONFIG).unwrap()
    }

    fn request(prompt: &[u32], max_new_tokens: usize) -> Request {
        Request {
            group: GroupId(7),
            prompt: prompt.iter().map(|&token| TokenId(token)).collect(),
            max_new_tokens,
            stop_tokens: Arc::new([]),
            prompt_logprobs: false,
            max_support: None,
            return_routes: Some(0),
        }
    }

    fn limits(max_new_tokens: usize) -> Limits {
        Limits { max_new_tokens, stop_tokens: Arc::new([]), max_support: None }
    }

    /// One tick under the weights of `version`, which route everything to the expert of their number.
    fn tick(scheduler: &mut Scheduler, version: u16) -> usize {
        assert!(scheduler.plan());
        scheduler.record(&vec![u8::try_from(version).unwrap(); scheduler.tick_plan().n_tokens()]);
        let sites = scheduler.tick_plan().samples.iter();
        let sample = |sequence| Sample { sequence, token: TokenId(9), logprob: -1.0 };
        let samples: Vec<_> = sites.map(|site| sample(site.sequence)).collect();
        scheduler.advance(&samples, PolicyVersion(version.into()));
        scheduler.check();
        scheduler.tick_plan().n_tokens()
    }

    fn ended(scheduler: &mut Scheduler, version: u16) -> Finished {
        loop {
            if let Some(finished) = scheduler.take_finished() {
                return finished;
            }
            tick(scheduler, version);
        }
    }

    fn routes(finished: &Finished) -> &[u8] {
        finished.routes.as_ref().unwrap().view().bytes()
    }

    fn versions(finished: &Finished) -> Vec<u64> {
        finished.versions.iter().map(|version| version.0).collect()
    }

    #[test]
    fn an_aborted_rollout_goes_on_and_its_emitted_rows_stay() {
        let mut scheduler = scheduler();
        let id = scheduler.submit(&request(&[1, 2, 3], 6)).unwrap();
        (0..3).for_each(|_| assert!(tick(&mut scheduler, 1) > 0));
        scheduler.abort(id);
        let aborted = scheduler.take_finished().unwrap();
        assert_eq!((aborted.tokens.len(), aborted.turns.first().cloned()), (6, Some(3..6)));
        scheduler.flush(1).unwrap();
        scheduler.resume(vec![aborted], &limits(6)).unwrap();
        let finished = ended(&mut scheduler, 2);
        assert_eq!(routes(&finished), [1, 1, 1, 1, 1, 2, 2, 2], "row 5 was never fed before");
        assert_eq!(
            (versions(&finished), finished.turns.first().cloned()),
            (vec![1, 1, 1, 2, 2, 2], Some(3..9))
        );
        assert_eq!((finished.new_rows, finished.mask(), finished.finish), (3, None, FinishReason::Length));
    }

    #[test]
    fn a_turn_owns_the_rows_before_it_and_computes_the_boundary_row() {
        let mut scheduler = scheduler();
        scheduler.submit(&request(&[1, 2], 2)).unwrap();
        let first = ended(&mut scheduler, 1);
        assert_eq!((routes(&first), first.new_rows), (&[1, 1, 1][..], 3));
        scheduler.next_turn(first, &[5, 6].map(TokenId), &limits(2)).unwrap();
        let second = ended(&mut scheduler, 2);
        assert_eq!(routes(&second), [1, 1, 1, 2, 2, 2, 2], "row 3 is of the token that ended turn 1");
        assert_eq!((second.new_rows, second.turns.clone()), (4, vec![2..4, 6..8]));
        assert_eq!(second.mask(), Some(vec![1, 1, 0, 0, 1, 1]));
        assert_eq!(
            (versions(&second), &second.rollout_logprobs[2..4]),
            (vec![1, 1, 1, 1, 2, 2], &[0.0; 2][..])
        );
    }

    #[test]
    fn a_refit_between_the_chunks_of_a_turn_computes_its_rows_again() {
        let mut scheduler = scheduler();
        scheduler.submit(&request(&[1, 2], 1)).unwrap();
        let first = ended(&mut scheduler, 1);
        let given: Vec<_> = (20..30).map(TokenId).collect();
        scheduler.next_turn(first, &given, &limits(2)).unwrap();
        assert_eq!(tick(&mut scheduler, 1), 8, "a chunk, and nothing sampled");
        scheduler.flush(1).unwrap();
        scheduler.check();
        let second = ended(&mut scheduler, 2);
        assert_eq!(routes(&second), [[1; 2].as_slice(), &[2; 12]].concat());
    }

    #[test]
    fn members_that_sampled_nothing_compute_their_prompt_once() {
        let mut scheduler = scheduler();
        scheduler.submit_group(&request(&[1, 2, 3], 2), 3).unwrap();
        scheduler.abort_all();
        let aborted: Vec<_> = std::iter::from_fn(|| scheduler.take_finished()).collect();
        scheduler.resume(aborted, &limits(2)).unwrap();
        scheduler.check();
        assert_eq!(tick(&mut scheduler, 1), 3);
        assert_eq!(scheduler.stats().forked_tokens, 6);
        let ends: Vec<_> = (0..3).map(|_| ended(&mut scheduler, 1).index).collect();
        assert_eq!(ends, [0, 1, 2]);
    }

    #[test]
    fn a_copy_of_what_is_in_flight_goes_on_in_another_scheduler_alike() {
        let mut one = scheduler();
        one.submit_group(&request(&[1, 2, 3], 4), 2).unwrap();
        (0..2).for_each(|_| assert!(tick(&mut one, 1) > 0));
        let copies = one.in_flight();
        let mut other = scheduler();
        other.resume(copies, &limits(4)).unwrap();
        one.flush(1).unwrap();
        for _ in 0..2 {
            let (kept, restored) = (ended(&mut one, 2), ended(&mut other, 2));
            assert_eq!(
                (kept.index, &kept.tokens, kept.versions),
                (restored.index, &restored.tokens, restored.versions)
            );
            assert_eq!((kept.routes, kept.turns), (restored.routes, restored.turns));
        }
    }

    #[test]
    fn the_unstarted_of_a_resumed_group_share_a_prefill_whoever_leads_the_group() {
        let mut scheduler = Scheduler::new(SchedulerConfig { max_running: 1, ..CONFIG }).unwrap();
        scheduler.submit_group(&request(&[1, 2, 3], 4), 3).unwrap();
        tick(&mut scheduler, 1);
        scheduler.abort_all();
        let aborted: Vec<_> = std::iter::from_fn(|| scheduler.take_finished()).collect();
        assert_eq!(aborted.iter().map(|rollout| rollout.turns.len()).collect::<Vec<_>>(), [1, 0, 0]);
        let mut scheduler = self::scheduler();
        scheduler.resume(aborted, &limits(4)).unwrap();
        scheduler.check();
        assert_eq!(tick(&mut scheduler, 1), 4 + 3, "the first goes on, the others compute one prompt");
        assert_eq!(scheduler.stats().n_running, 3);
    }

    #[test]
    fn what_cannot_go_on_is_refused_and_comes_back() {
        let mut scheduler = scheduler();
        scheduler.submit(&request(&[1, 2], 2)).unwrap();
        let finished = ended(&mut scheduler, 1);
        let refused = scheduler.resume(vec![finished], &limits(4)).unwrap_err();
        assert!(matches!(refused.error, SchedulerError::CannotResume { .. }));
        let refuse_turn =
            |scheduler: &mut Scheduler, rollout: Finished, given: &[TokenId], limits: &Limits| {
                let mut refused = scheduler.next_turn(rollout, given, limits).unwrap_err();
                (refused.error, refused.rollouts.remove(0))
            };
        let rollout = { refused.rollouts }.remove(0);
        let (error, rollout) = refuse_turn(&mut scheduler, rollout, &[], &limits(1));
        assert_eq!(error, SchedulerError::NothingGiven { group: GroupId(7), index: 0 });
        let given = [TokenId(5)];
        let (error, rollout) = refuse_turn(&mut scheduler, rollout, &given, &limits(0));
        assert!(matches!(error, SchedulerError::NothingToSample { .. }));
        let (error, mut rollout) = refuse_turn(&mut scheduler, rollout, &given, &limits(99));
        let group = GroupId(7);
        let too_long = SchedulerError::NeverFits { group, needed_tokens: 103, capacity_tokens: 32 };
        assert_eq!(error, too_long);
        rollout.versions.pop();
        let (error, mut rollout) = refuse_turn(&mut scheduler, rollout, &given, &limits(1));
        let misshapen = SchedulerError::Misshapen { group, index: 0, what: "versions", n: 1, expected: 2 };
        assert_eq!(error, misshapen);
        rollout.versions.push(PolicyVersion(1));
        let mut short = SupportRows::default();
        short.push(&[9]);
        rollout.support = Some(short);
        let (error, mut rollout) = refuse_turn(&mut scheduler, rollout, &given, &limits(1));
        let misshapen = SchedulerError::Misshapen { group, index: 0, what: "supports", n: 1, expected: 2 };
        assert_eq!(error, misshapen);
        rollout.support = None;
        rollout.routes.as_mut().unwrap().truncate(1);
        let (error, _) = refuse_turn(&mut scheduler, rollout, &given, &limits(1));
        assert!(matches!(error, SchedulerError::Misshapen { n: 1, expected: 3, .. }), "{error}");
        assert!(matches!(
            scheduler.resume(vec![], &limits(1)).unwrap_err().error,
            SchedulerError::NothingToResume
        ));
        assert!(!scheduler.has_work());
    }

    /// One tick whose draws keep token 9 and the token of their version's number.
    fn truncated_tick(scheduler: &mut Scheduler, version: u32) {
        assert!(scheduler.plan());
        scheduler.record(&vec![0; scheduler.tick_plan().n_tokens()]);
        let sampling: Vec<_> = scheduler.tick_plan().samples.iter().map(|site| site.sequence).collect();
        sampling.iter().for_each(|&sequence| scheduler.record_support(sequence, &[version, 9]));
        let sample = |sequence| Sample { sequence, token: TokenId(9), logprob: -1.0 };
        let samples: Vec<_> = sampling.into_iter().map(sample).collect();
        scheduler.advance(&samples, PolicyVersion(version.into()));
        scheduler.check();
    }

    fn support_sizes(rollout: &Finished) -> Vec<u32> {
        rollout.support.as_ref().unwrap().view().sizes().to_vec()
    }

    #[test]
    fn supports_go_along_through_retraction_abort_resumption_and_the_next_turn() {
        let truncated = |max_new_tokens| Limits { max_support: Some(2), ..limits(max_new_tokens) };
        let mut scheduler = scheduler();
        let request = Request { max_support: Some(2), ..request(&[1, 2, 3], 4) };
        let id = scheduler.submit(&request).unwrap();
        truncated_tick(&mut scheduler, 1);
        assert!(scheduler.retract(id));
        truncated_tick(&mut scheduler, 2);
        let copy = scheduler.in_flight().remove(0);
        assert_eq!(support_sizes(&copy), [2, 2]);
        scheduler.abort(id);
        let aborted = scheduler.take_finished().unwrap();
        scheduler.resume(vec![aborted], &truncated(4)).unwrap();
        (3..5).for_each(|version| truncated_tick(&mut scheduler, version));
        let turn = scheduler.take_finished().unwrap();
        scheduler.next_turn(turn, &[TokenId(7)], &truncated(2)).unwrap();
        (5..7).for_each(|version| truncated_tick(&mut scheduler, version));
        let finished = scheduler.take_finished().unwrap();
        assert_eq!(support_sizes(&finished), [2, 2, 2, 2, 0, 2, 2], "a given token was not drawn");
        let kept: Vec<u32> = finished.support.unwrap().view().ids().iter().map(|token| token.0).collect();
        assert_eq!(kept, [1, 2, 3, 4, 5, 6].map(|version| [version, 9]).concat());
    }

    #[test]
    fn tokens_of_before_and_after_truncation_were_drawn_from_everything() {
        let mut scheduler = scheduler();
        scheduler.submit(&request(&[1, 2, 3], 2)).unwrap();
        let whole = ended(&mut scheduler, 1);
        assert_eq!(whole.support, None);
        let truncated = Limits { max_support: Some(2), ..limits(1) };
        scheduler.next_turn(whole, &[TokenId(7)], &truncated).unwrap();
        truncated_tick(&mut scheduler, 2);
        let mixed = scheduler.take_finished().unwrap();
        assert_eq!(support_sizes(&mixed), [0, 0, 0, 2]);
        scheduler.next_turn(mixed, &[TokenId(7)], &limits(1)).unwrap();
        assert_eq!(support_sizes(&ended(&mut scheduler, 3)), [0, 0, 0, 2, 0, 0]);
    }

    #[test]
    fn a_truncated_draw_whose_support_is_not_there_is_a_bug_that_shows() {
        let panics = |supports: &[&[u32]]| {
            let mut scheduler = scheduler();
            let request = Request { max_support: Some(2), ..request(&[1, 2, 3], 4) };
            let sequence = scheduler.submit(&request).unwrap();
            assert!(scheduler.plan());
            scheduler.record(&vec![0; scheduler.tick_plan().n_tokens()]);
            let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                supports.iter().for_each(|support| scheduler.record_support(sequence, support));
                let sample = Sample { sequence, token: TokenId(9), logprob: -1.0 };
                scheduler.advance(&[sample], PolicyVersion(1));
            }));
            panic.is_err()
        };
        assert!(!panics(&[&[4, 9]]));
        assert!(panics(&[]) && panics(&[&[9], &[9]]), "none, and one too many");
        assert!(panics(&[&[4, 5]]), "it lacks the token");
        assert!(panics(&[&[4, 5, 9]]), "it is more than there is room for");
    }

    #[test]
    fn a_tick_that_is_given_up_leaves_no_support_behind() {
        let mut scheduler = scheduler();
        let request = Request { max_support: Some(2), ..request(&[1, 2, 3], 4) };
        let sequence = scheduler.submit(&request).unwrap();
        truncated_tick(&mut scheduler, 1);
        assert!(scheduler.plan());
        scheduler.record_support(sequence, &[9]);
        scheduler.abort_all();
        assert_eq!(support_sizes(&scheduler.take_finished().unwrap()), [2]);
    }

    #[test]
    fn routes_begin_where_the_request_says() {
        let mut scheduler = scheduler();
        for (start, expected) in [(0, Some((0, 4))), (2, Some((2, 2))), (3, Some((3, 1)))] {
            let request = Request { return_routes: Some(start), ..request(&[1, 2, 3], 2) };
            scheduler.submit(&request).unwrap();
            let finished = ended(&mut scheduler, 1);
            let rows = finished.routes.as_ref().map(|routes| (finished.routes_start, routes.rows()));
            assert_eq!(rows, expected);
        }
        let none = Request { return_routes: None, ..request(&[1, 2, 3], 2) };
        scheduler.submit(&none).unwrap();
        assert_eq!(ended(&mut scheduler, 1).routes, None);
        let late = Request { return_routes: Some(4), ..none.clone() };
        let group = GroupId(7);
        let refused = SchedulerError::RoutesStart { group, start: 4, prompt_tokens: 3 };
        assert_eq!(scheduler.submit(&late), Err(refused));
        let mut off = Scheduler::new(SchedulerConfig { routes: None, ..CONFIG }).unwrap();
        assert_eq!(off.submit(&request(&[1], 1)), Err(SchedulerError::RoutesOff { group }));
    }
}
