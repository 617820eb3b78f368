//! Plays a program and knows, without looking into the engine, what must come out.

use std::collections::BTreeMap;

use r3_core::ids::{GroupId, PolicyVersion, SequenceId, TokenId};
use r3_core::rollout::FinishReason;
use r3_core::routes::RouteView;
use r3_scheduler::config::SchedulerConfig;
use r3_scheduler::error::SchedulerError;
use r3_scheduler::request::{Finished, Limits, Request};

use crate::expected::Expected;
use crate::hash_engine::MAX_SUPPORT;
use crate::program::{Ask, InFlight, Op, Program, Reach};
use crate::subject::Subject;
use crate::tally::Tally;

/// Ticks after which a drain is taken for a standstill. No program of the first 200,000 seeds needs 1,000.
const MAX_TICKS: usize = 5_000;

/// A rollout that came out, and what its client knows of it.
struct Ended {
    finished: Finished,
    expected: Expected,
    /// Served when it came out: whatever it computed and had not sampled for is of these weights.
    version: PolicyVersion,
}

/// Plays operations on a subject and asserts after each.
pub struct Player<S> {
    subject: S,
    config: SchedulerConfig,
    version: PolicyVersion,
    /// On their way.
    live: BTreeMap<SequenceId, Expected>,
    /// Ended by themselves, and not taken up again.
    ended: Vec<Ended>,
    /// Taken back, and not taken up again.
    aborted: Vec<Ended>,
    n_groups: u64,
    tally: Tally,
}

impl<S: Subject> Player<S> {
    /// A player of programs with `config` on `subject`, which serves version 0.
    pub fn new(subject: S, config: SchedulerConfig) -> Self {
        Self {
            subject,
            config,
            version: PolicyVersion(0),
            live: BTreeMap::new(),
            ended: Vec::new(),
            aborted: Vec::new(),
            n_groups: 0,
            tally: Tally { schedules: 1, ..Tally::default() },
        }
    }

    /// Plays all of `program`, then drains.
    ///
    /// # Panics
    /// If anything is not as it must be, with what that was.
    pub fn play(&mut self, program: &Program) -> Tally {
        for op in &program.ops {
            self.apply(op);
        }
        self.drain();
        assert_eq!(self.subject.n_open(), 0, "the engine holds something of requests that ended");
        let stats = self.subject.stats();
        assert_eq!((stats.n_running, stats.n_waiting, stats.n_held_blocks), (0, 0, 0), "left when all ended");
        let mut tally = self.tally;
        tally.add_stats(&stats);
        tally
    }

    /// The engine.
    pub fn subject(&self) -> &S {
        &self.subject
    }

    /// Rollouts that ended by themselves and have not gone on, in order.
    pub fn ended(&self) -> impl Iterator<Item = &Finished> {
        self.ended.iter().map(|ended| &ended.finished)
    }

    /// Rollouts that were taken back and have not gone on, in order.
    pub fn aborted(&self) -> impl Iterator<Item = &Finished> {
        self.aborted.iter().map(|ended| &ended.finished)
    }

    /// Does one thing.
    ///
    /// # Panics
    /// If anything is not as it must be.
    pub fn apply(&mut self, op: &Op) {
        match op {
            Op::Submit(ask) => self.submit(ask),
            Op::Resubmit { which, size, reach } => self.resubmit(*which, *size, *reach),
            Op::NextTurn { which, given, reach } => self.next_turn(*which, given, *reach),
            Op::Resume { which, alone, reach } => self.resume(*which, *alone, *reach),
            Op::Tick { times, max_tokens } => {
                let max_tokens = max_tokens.unwrap_or(self.config.max_batch_tokens);
                (0..*times).for_each(|_| self.tick(max_tokens));
            }
            Op::FailingTick { max_tokens, after } => {
                let max_tokens = max_tokens.unwrap_or(self.config.max_batch_tokens);
                self.subject.failing_tick(max_tokens, *after);
                self.tally.failing_ticks += 1;
                self.collect_aborted(usize::MAX);
                assert!(self.live.is_empty(), "a failing tick takes everything back");
            }
            Op::Abort { which } => {
                if let Some(id) = self.live_id(*which) {
                    self.abort(id);
                }
            }
            Op::Retract { which } => {
                if let Some(id) = self.live_id(*which) {
                    self.retract(id);
                }
            }
            Op::RetractAll => {
                let ids: Vec<_> = self.live.keys().copied().collect();
                ids.into_iter().for_each(|id| self.retract(id));
                assert_eq!(self.subject.stats().n_running, 0, "sequences run after all were retracted");
            }
            Op::Refit(in_flight) => self.refit(*in_flight),
            Op::FailedRefit(in_flight) => self.failed_refit(*in_flight),
            Op::Flush => {
                self.subject.flush();
                self.tally.flushes += 1;
            }
            Op::Crash => self.crash(),
        }
        self.settle();
    }

    fn submit(&mut self, ask: &Ask) {
        let group = GroupId(self.n_groups);
        self.n_groups += 1;
        let return_routes = ask.return_routes.filter(|_| self.config.routes.is_some());
        let request = Request {
            group,
            prompt: ask.prompt.clone().into(),
            max_new_tokens: ask.reach.max_new_tokens,
            stop_tokens: limits(ask.reach).stop_tokens,
            prompt_logprobs: ask.prompt_logprobs,
            max_support: Some(MAX_SUPPORT),
            return_routes,
        };
        let ids = match self.subject.submit(&request, ask.size) {
            Ok(ids) => ids,
            Err(error) => return self.assert_never_fits(&error, ask.prompt.len(), ask.reach.max_new_tokens),
        };
        self.assert_fits(ask.prompt.len(), ask.reach.max_new_tokens);
        for (index, id) in (0..).zip(ids) {
            let expected = Expected {
                group,
                index,
                prompt_tokens: ask.prompt.len(),
                tokens: ask.prompt.clone(),
                rollout_logprobs: Vec::new(),
                versions: Vec::new(),
                turns: Vec::new(),
                turn_start: ask.prompt.len(),
                reach: ask.reach,
                prompt_logprobs: ask.prompt_logprobs,
                return_routes,
                replays: self.config.replays && return_routes == Some(0),
                stops_late: ask.stops_late,
                inherited_end: 0,
            };
            assert!(self.live.insert(id, expected).is_none(), "an id is given twice");
        }
    }

    fn resubmit(&mut self, which: usize, size: u32, reach: Reach) {
        let Some(at) = index(which, self.ended.len()) else { return };
        let prompt = self.ended[at].finished.tokens.clone();
        let return_routes = Some(0);
        self.submit(&Ask { prompt, size, reach, prompt_logprobs: false, return_routes, stops_late: false });
    }

    fn next_turn(&mut self, which: usize, given: &[TokenId], reach: Reach) {
        let Some(at) = index(which, self.ended.len()) else { return };
        let Ended { finished, mut expected, version } = self.ended.remove(at);
        let can = expected.n_sampled() > 0 && reach.max_new_tokens > 0;
        match self.subject.next_turn(finished, given, &limits(reach)) {
            Ok(id) => {
                assert!(can, "a turn follows a sampled token, and samples one");
                expected.give(given, reach);
                self.assert_fits(expected.tokens.len(), reach.max_new_tokens);
                assert!(self.live.insert(id, expected).is_none(), "an id is given twice");
                self.tally.next_turns += 1;
            }
            Err(refused) => {
                let n_tokens = expected.tokens.len() + given.len();
                if can {
                    self.assert_never_fits(&refused.error, n_tokens, reach.max_new_tokens);
                }
                self.give_back(refused.rollouts, vec![(expected, version)]);
            }
        }
    }

    fn resume(&mut self, which: usize, alone: bool, reach: Option<Reach>) {
        let Some(at) = index(which, self.aborted.len()) else { return };
        let Expected { group, index, reach: before, .. } = self.aborted[at].expected;
        let is_same = |Ended { expected, .. }: &mut Ended| {
            let is_of_group = expected.group == group && expected.reach == before;
            is_of_group && (!alone || expected.index == index)
        };
        let ended: Vec<_> = self.aborted.extract_if(.., is_same).collect();
        self.take_up(ended, reach.unwrap_or(before));
    }

    /// Resumes rollouts of one group.
    fn take_up(&mut self, ended: Vec<Ended>, reach: Reach) {
        let split = |Ended { finished, expected, version }| (finished, (expected, version));
        let (rollouts, known): (Vec<_>, Vec<_>) = ended.into_iter().map(split).unzip();
        let can = known.iter().all(|(expected, _)| expected.n_sampled() < reach.max_new_tokens);
        match self.subject.resume(rollouts, &limits(reach)) {
            Ok(ids) => {
                assert!(can, "a rollout that has sampled all it may goes on");
                self.tally.resumed += ids.len() as u64;
                for (id, (mut expected, _)) in ids.into_iter().zip(known) {
                    expected.go_on(reach);
                    self.assert_fits(expected.tokens.len(), reach.max_new_tokens - expected.n_sampled());
                    assert!(self.live.insert(id, expected).is_none(), "an id is given twice");
                }
            }
            Err(refused) => {
                if can {
                    let needed = |(expected, _): &(Expected, _)| expected.tokens.len() - expected.n_sampled();
                    let most = known.iter().map(needed).max().expect("a rollout");
                    self.assert_never_fits(&refused.error, most, reach.max_new_tokens);
                }
                self.give_back(refused.rollouts, known);
            }
        }
    }

    /// Asserts that refused rollouts came back whole, and keeps them.
    fn give_back(&mut self, rollouts: Vec<Finished>, known: Vec<(Expected, PolicyVersion)>) {
        assert_eq!(rollouts.len(), known.len(), "rollouts that came back");
        for (finished, (expected, version)) in rollouts.into_iter().zip(known) {
            self.compare(&finished, &expected, version);
            self.file(Ended { finished, expected, version });
        }
    }

    fn tick(&mut self, max_tokens: usize) {
        let has_ticked = self.subject.tick(max_tokens);
        assert_eq!(has_ticked, !self.live.is_empty(), "whoever has work makes progress, and nobody else");
        if !has_ticked {
            return;
        }
        self.tally.ticks += 1;
        let mut done = BTreeMap::new();
        for sample in self.subject.sampled() {
            let expected = self.live.get_mut(&sample.sequence).expect("whoever samples is on its way");
            if let Some(reason) = expected.push(sample.token, sample.logprob, self.version) {
                done.insert(sample.sequence, reason);
            }
        }
        self.tally.sampled_tokens += self.subject.sampled().len() as u64;
        while let Some(finished) = self.subject.take_finished() {
            let id = finished.sequence;
            let expected = self.live.remove(&id).expect("a request ends once");
            let is_prefill = expected.reach.max_new_tokens == 0;
            let reason = done.remove(&id).or(is_prefill.then_some(FinishReason::Length));
            assert_eq!(Some(finished.finish), reason, "why {id} ended");
            self.keep(finished, expected);
        }
        assert!(done.is_empty(), "{done:?} have not ended");
        self.settle();
        let late = |(&id, expected): (&SequenceId, &Expected)| expected.is_past_its_stop().then_some(id);
        for id in self.live.iter().filter_map(late).collect::<Vec<_>>() {
            self.tally.late_stops += 1;
            self.abort(id);
        }
    }

    /// Ticks until nothing is on its way.
    ///
    /// # Panics
    /// If anything is not as it must be, or there is no end.
    pub fn drain(&mut self) {
        for _ in 0..MAX_TICKS {
            if self.live.is_empty() {
                return;
            }
            self.tick(self.config.max_batch_tokens);
        }
        panic!("no end after {MAX_TICKS} ticks");
    }

    fn abort(&mut self, id: SequenceId) {
        assert!(self.subject.abort(id), "{id} is on its way");
        assert!(!self.subject.abort(id), "{id} is aborted twice");
        self.collect_aborted(1);
        assert!(!self.live.contains_key(&id), "{id} was aborted");
        self.settle();
    }

    fn abort_all(&mut self) {
        while let Some(id) = self.live_id(0) {
            self.abort(id);
        }
    }

    fn retract(&mut self, id: SequenceId) {
        let before = self.subject.stats();
        let ran = self.subject.retract(id);
        let after = self.subject.stats();
        let n = usize::from(ran);
        assert_eq!((after.n_running + n, after.n_waiting), (before.n_running, before.n_waiting + n), "{id}");
        assert!(!self.subject.retract(id), "{id} is retracted twice");
        self.settle();
    }

    /// Deals with what is in flight before the weights change.
    fn prepare(&mut self, in_flight: InFlight) {
        match in_flight {
            InFlight::Drain => self.drain(),
            InFlight::Abort => self.abort_all(),
            InFlight::Continue => {}
        }
    }

    fn refit(&mut self, in_flight: InFlight) {
        self.prepare(in_flight);
        let version = self.version.next();
        self.subject.refit(version);
        self.version = version;
        match in_flight {
            InFlight::Drain => self.tally.refits_drain += 1,
            InFlight::Abort => self.tally.refits_abort += 1,
            InFlight::Continue => self.tally.refits_continue += 1,
        }
    }

    fn failed_refit(&mut self, in_flight: InFlight) {
        self.prepare(in_flight);
        let before = self.subject.stats();
        self.subject.failed_refit(self.version.next());
        assert_eq!(self.subject.stats(), before, "a refit that failed changed something");
        self.snapshot();
        self.tally.failed_refits += 1;
    }

    /// What a checkpoint would have of all that is in flight, each compared with what it must be.
    fn snapshot(&mut self) -> Vec<Finished> {
        let before = self.subject.stats();
        let snapshot = self.subject.in_flight();
        assert_eq!(self.subject.stats(), before, "a snapshot changed something");
        assert!(snapshot.iter().map(|rollout| rollout.sequence).eq(self.live.keys().copied()), "in flight");
        for rollout in &snapshot {
            let prefill = |version, tokens: &[TokenId], replayed: Option<RouteView<'_>>| {
                self.subject.prefill(version, tokens, replayed)
            };
            self.live[&rollout.sequence].assert_is(rollout, self.version, prefill);
        }
        snapshot
    }

    fn crash(&mut self) {
        let snapshot = self.snapshot();
        self.tally.add_stats(&self.subject.stats());
        self.subject.rebuild(self.version);
        self.tally.crashes += 1;
        let mut groups: BTreeMap<(GroupId, Reach), Vec<Ended>> = BTreeMap::new();
        for finished in snapshot {
            let expected = self.live.remove(&finished.sequence).expect("in flight");
            let key = (expected.group, expected.reach);
            let version = self.version;
            groups.entry(key).or_default().push(Ended { finished, expected, version });
        }
        for ((_, reach), ended) in groups {
            self.take_up(ended, reach);
        }
    }

    /// Takes out what was taken back, at most `most` rollouts.
    fn collect_aborted(&mut self, most: usize) {
        for n in 0.. {
            let Some(finished) = self.subject.take_finished() else { break };
            assert!(n < most, "more than {most} ended");
            let expected = self.live.remove(&finished.sequence).expect("a request ends once");
            assert_eq!(finished.finish, FinishReason::Abort, "why {} ended", finished.sequence);
            self.tally.aborts += 1;
            self.keep(finished, expected);
        }
    }

    /// Compares a rollout that came out with what it must be, and keeps it for those who take it up again.
    fn keep(&mut self, finished: Finished, expected: Expected) {
        assert!(self.config.prefix_cache || finished.cached_tokens == 0, "a hit without a cache");
        let n_rows = self.compare(&finished, &expected, self.version);
        self.tally.rows_compared += n_rows as u64;
        self.tally.mixed_versions += u64::from(expected.versions.first() != expected.versions.last());
        self.tally.finished += u64::from(finished.finish != FinishReason::Abort);
        self.file(Ended { finished, expected, version: self.version });
    }

    fn file(&mut self, ended: Ended) {
        let pile = match ended.finished.finish {
            FinishReason::Abort => &mut self.aborted,
            FinishReason::Stop | FinishReason::Length => &mut self.ended,
        };
        pile.push(ended);
    }

    fn compare(&mut self, finished: &Finished, expected: &Expected, version: PolicyVersion) -> usize {
        let prefill = |version, tokens: &[TokenId], replayed: Option<RouteView<'_>>| {
            self.subject.prefill(version, tokens, replayed)
        };
        expected.assert_is(finished, version, prefill)
    }

    /// What holds between any two operations.
    fn settle(&self) {
        self.subject.check();
        assert_eq!(self.subject.n_open(), self.live.len(), "requests the engine knows");
    }

    fn live_id(&self, which: usize) -> Option<SequenceId> {
        index(which, self.live.len()).and_then(|at| self.live.keys().nth(at).copied())
    }

    fn capacity_tokens(&self) -> usize {
        self.config.n_blocks * self.config.block_tokens
    }

    /// The last sampled token is never fed, so it needs no slot.
    fn assert_fits(&self, n_tokens: usize, max_new_tokens: usize) {
        let needed = n_tokens + max_new_tokens.saturating_sub(1);
        assert!(needed <= self.capacity_tokens(), "{needed} tokens can never fit and were taken");
    }

    fn assert_never_fits(&mut self, error: &SchedulerError, n_tokens: usize, max_new_tokens: usize) {
        let needed = n_tokens + max_new_tokens.saturating_sub(1);
        assert!(matches!(error, SchedulerError::NeverFits { .. }), "{error}");
        assert!(needed > self.capacity_tokens(), "{needed} tokens were refused: {error}");
        self.tally.refused += 1;
    }
}

/// `which` of `len` things, around and around.
fn index(which: usize, len: usize) -> Option<usize> {
    which.checked_rem(len)
}

fn limits(reach: Reach) -> Limits {
    let stop_tokens = (0..).map(TokenId).take(reach.n_stops).collect();
    Limits { max_new_tokens: reach.max_new_tokens, stop_tokens, max_support: Some(MAX_SUPPORT) }
}
