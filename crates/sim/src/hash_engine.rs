//! The scheduler under a model without tensors: what it keeps in a KV slot is the [`State`] of everything before it.
//!
//! It trusts the scheduler with nothing. Each tick it reads every slot a sequence attends to and compares it with
//! the state of that sequence's own tokens under the weights now served, so a block shared, copied, evicted, reused or
//! kept across a refit wrongly shows at once.

use std::collections::BTreeMap;

use r3_core::ids::{GroupId, PolicyVersion, SequenceId, TokenId};
use r3_core::routes::{RouteDims, RouteRows, RouteView, write_ids};
use r3_scheduler::config::SchedulerConfig;
use r3_scheduler::error::SchedulerError;
use r3_scheduler::plan::{Chunk, Logits};
use r3_scheduler::request::{Finished, Limits, Refused, Request, Sample};
use r3_scheduler::scheduler::{Scheduler, SchedulerStats};

use crate::oracle::State;
use crate::program::FailsAfter;
use crate::rng::mix;
use crate::subject::{Prefill, Subject};

/// What the engine knows of a request without asking the scheduler.
struct Known {
    group: GroupId,
    index: u32,
    prompt_tokens: usize,
    tokens: Vec<TokenId>,
    /// Of as many of `tokens` as were needed so far, under the weights now served.
    states: Vec<State>,
    /// If other weights take the routes that it has.
    replay: Option<Replay>,
}

impl Known {
    fn of(rollout: &Finished, replay: Option<Replay>) -> Self {
        Self {
            group: rollout.group,
            index: rollout.index,
            prompt_tokens: rollout.prompt_tokens,
            tokens: rollout.tokens.clone(),
            states: Vec::new(),
            replay,
        }
    }

    /// States of the first `n` tokens.
    fn states(&mut self, version: PolicyVersion, n: usize) -> &[State] {
        let mut state = self.states.last().copied().unwrap_or(State::start(version));
        for position in self.states.len()..n {
            state = state.after(self.tokens[position]);
            if let Some(replay) = &mut self.replay {
                state = replay.run(position, state);
            }
            self.states.push(state);
        }
        &self.states[..n]
    }

    fn push(&mut self, token: TokenId) {
        if let Some(replay) = &mut self.replay {
            replay.n_emitted = self.tokens.len();
        }
        self.tokens.push(token);
    }
}

/// The routes that a request has, of the positions from 0 on.
struct Replay {
    dims: RouteDims,
    /// `[n, L, K]`.
    routes: Vec<u16>,
    /// Those that a token was sampled under.
    n_emitted: usize,
    /// Those that are taken, and not chosen again.
    n_replayed: usize,
}

impl Replay {
    fn new(dims: RouteDims) -> Self {
        Self { dims, routes: Vec::new(), n_emitted: 0, n_replayed: 0 }
    }

    /// Of a rollout that is taken up again.
    fn of(rollout: &Finished) -> Option<Self> {
        let routes = rollout.view().routes.filter(|_| rollout.routes_start == 0)?;
        let n_emitted = rollout.turns.last().map_or(0, |turn| turn.end - 1);
        let routes_of = |row| ids_of(routes, row);
        let ids = (0..n_emitted).flat_map(routes_of).collect();
        Some(Self { dims: routes.dims(), routes: ids, n_emitted, n_replayed: n_emitted })
    }

    /// From now on other weights compute.
    fn refit(&mut self) {
        self.n_replayed = self.n_emitted;
        self.routes.truncate(self.n_emitted * self.dims.row_ids());
    }

    /// The state of the token at `position` after those before it, of which the router makes `reached`.
    fn run(&mut self, position: usize, reached: State) -> State {
        let row = position * self.dims.row_ids()..(position + 1) * self.dims.row_ids();
        if position < self.n_replayed {
            return reached.on(&self.routes[row], self.dims);
        }
        if self.routes.len() == row.start {
            self.routes.resize(row.end, 0);
            reached.route(self.dims, &mut self.routes[row]);
        }
        reached
    }
}

/// An engine whose forward is exact and costs nothing.
pub struct HashEngine {
    scheduler: Scheduler,
    config: SchedulerConfig,
    version: PolicyVersion,
    /// By slot.
    kv: Vec<State>,
    /// By slot: the tick that wrote it last.
    written: Vec<u64>,
    n_ticks: u64,
    known: BTreeMap<SequenceId, Known>,
    /// By row of the plan.
    rows: Vec<State>,
    /// `[T, L, K]`: what the plan's rows ran; nothing if routes are off.
    ran: Vec<u16>,
    samples: Vec<Sample>,
    digest: u64,
    /// No tick has been since the last flush, so nobody is in the way of the oldest request.
    is_oldest_next: bool,
    /// Which request was the oldest when it last computed something as such, and the tokens it then had. Nobody may
    /// take those from it.
    oldest: Option<(SequenceId, usize)>,
}

/// Tokens that a draw keeps at most.
pub(crate) const MAX_SUPPORT: usize = 2;

/// What the token at `position` was drawn from: as many tokens as [`MAX_SUPPORT`].
pub(crate) fn support_of(position: usize, token: TokenId) -> [u32; MAX_SUPPORT] {
    [token.0, token.0 + 1 + position as u32 % 5]
}

impl HashEngine {
    /// An engine that serves version 0.
    ///
    /// # Panics
    /// If the scheduler refuses the configuration.
    #[must_use]
    pub fn new(config: SchedulerConfig) -> Self {
        let n_slots = config.n_blocks * config.block_tokens;
        Self {
            scheduler: Scheduler::new(config).expect("programs have sizes above 0"),
            config,
            version: PolicyVersion(0),
            kv: vec![State::UNWRITTEN; n_slots],
            written: vec![0; n_slots],
            n_ticks: 0,
            known: BTreeMap::new(),
            rows: Vec::new(),
            ran: Vec::new(),
            samples: Vec::new(),
            digest: 0,
            is_oldest_next: false,
            oldest: None,
        }
    }

    /// A number that is the same in two runs if, and but for chance only if, all their plans were.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// The scheduler.
    #[must_use]
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Computes every row of the plan, and stores it in its slot after all that precedes it was read and compared.
    fn forward(&mut self) {
        let Self { scheduler, config, kv, written, rows, ran, known, .. } = self;
        let plan = scheduler.tick_plan();
        self.n_ticks += 1;
        self.digest = mix(self.digest ^ self.n_ticks);
        assert_eq!((plan.positions.len(), plan.slots.len()), (plan.n_tokens(), plan.n_tokens()));
        for &slot in plan.slots.iter().chain(&plan.copies_after_forward.to) {
            self.digest = mix(self.digest ^ u64::from(slot));
            let before = std::mem::replace(&mut written[slot as usize], self.n_ticks);
            assert_ne!(before, self.n_ticks, "slot {slot} is written twice");
        }
        let oldest = known.keys().next().copied();
        if std::mem::take(&mut self.is_oldest_next) {
            let is_planned = plan.chunks.iter().any(|chunk| Some(chunk.sequence) == oldest);
            assert!(is_planned, "{oldest:?} waits after a flush, although it is the oldest");
        }
        rows.clear();
        ran.clear();
        for chunk in &plan.chunks {
            let &Chunk { sequence, start, n_tokens, first_row, .. } = chunk;
            let replayed = scheduler.replayed_routes(chunk);
            self.digest = mix(self.digest ^ sequence.0 ^ (start as u64) << 32);
            assert!(n_tokens > 0 && first_row == rows.len(), "chunks cover the rows in order");
            let known = known.get_mut(&sequence).expect("a planned request was submitted and has not ended");
            if Some(sequence) == oldest {
                let before = self.oldest.replace((sequence, start + n_tokens));
                let is_kept = before.is_none_or(|(before, end)| before != sequence || end == start);
                assert!(is_kept, "{sequence} is the oldest, and was preempted");
            }
            known.states(self.version, start + n_tokens);
            let table = scheduler.block_table(sequence);
            let slot_of = |position: usize| {
                let block = table[position / config.block_tokens] as usize;
                block * config.block_tokens + position % config.block_tokens
            };
            for (position, &state) in known.states[..start].iter().enumerate() {
                let slot = slot_of(position);
                assert_eq!(
                    kv[slot], state,
                    "{sequence} reads at {position} what is not its own: slot {slot}"
                );
                assert_ne!(written[slot], self.n_ticks, "slot {slot} is read and written");
            }
            for position in start..start + n_tokens {
                let row = rows.len();
                assert_eq!(plan.tokens[row], known.tokens[position], "{sequence}: the token at {position}");
                assert_eq!(plan.positions[row] as usize, position, "{sequence}: a position");
                assert_eq!(plan.slots[row] as usize, slot_of(position), "{sequence}: the slot of {position}");
                let before =
                    position.checked_sub(1).map_or(State::start(self.version), |at| known.states[at]);
                let reached = before.after(known.tokens[position]);
                let given = replayed.filter(|routes| position - start < routes.rows());
                let given = given.map(|routes| ids_of(routes, position - start));
                let state = run(reached, given, config.routes, ran);
                assert_eq!(
                    state, known.states[position],
                    "{sequence} runs at {position} what is not its own"
                );
                rows.push(state);
            }
        }
        assert_eq!(rows.len(), plan.n_tokens(), "chunks cover all rows");
        for (&slot, &state) in plan.slots.iter().zip(&*rows) {
            kv[slot as usize] = state;
        }
    }

    /// Hands routes and prompt logprobs over, and makes the copies.
    fn store(&mut self) {
        let Self { scheduler, config, kv, rows, ran, known, .. } = self;
        if let Some(dims) = config.routes {
            scheduler.record(route_rows(ran, dims).view().bytes());
        }
        for at in 0..scheduler.tick_plan().chunks.len() {
            let Chunk { sequence, start, n_tokens, first_row, wants, .. } = scheduler.tick_plan().chunks[at];
            if wants == Logits::All {
                let known = &known[&sequence];
                let end = (start + n_tokens).min(known.prompt_tokens - 1);
                let logprob =
                    |position: usize| rows[first_row + position - start].logprob(known.tokens[position + 1]);
                let logprobs: Vec<f32> = (start..end).map(logprob).collect();
                scheduler.record_prompt_logprobs(sequence, start, &logprobs);
            }
        }
        let copies = &scheduler.tick_plan().copies_after_forward;
        assert_eq!(copies.from.len(), copies.to.len());
        assert!(copies.from.iter().all(|from| !copies.to.contains(from)), "a copy is copied in one tick");
        for (&from, &to) in copies.from.iter().zip(&copies.to) {
            kv[to as usize] = kv[from as usize];
        }
    }

    fn known_of(&self, rollout: &Finished) -> Known {
        Known::of(rollout, self.config.replays.then(|| Replay::of(rollout)).flatten())
    }

    fn sample(&mut self) {
        let Self { scheduler, version, rows, known, samples, .. } = self;
        samples.clear();
        let plan = scheduler.tick_plan();
        for site in &plan.samples {
            let at = plan.chunks.partition_point(|chunk| chunk.first_row <= site.row);
            let chunk = plan.chunks[at - 1];
            let has_logits = match chunk.wants {
                Logits::None => false,
                Logits::Last => site.row + 1 == chunk.first_row + chunk.n_tokens,
                Logits::All => true,
            };
            assert!(has_logits, "{} samples from row {}, which has no logits", site.sequence, site.row);
            let known = known.get_mut(&site.sequence).expect("whoever samples has not ended");
            let seen = scheduler.sequence(site.sequence);
            assert_eq!(
                (seen.group, seen.index, seen.position, seen.tokens),
                (known.group, known.index, known.tokens.len(), &known.tokens[..]),
                "what keys the sample of {}",
                site.sequence
            );
            let own = *known.states(*version, known.tokens.len()).last().expect("prompts have tokens");
            assert_eq!(rows[site.row], own, "{} samples from another's logits", site.sequence);
            let token = own.token(known.group, known.index, known.tokens.len());
            samples.push(Sample { sequence: site.sequence, token, logprob: own.logprob(token) });
        }
        for sample in samples {
            let position = scheduler.sequence(sample.sequence).position;
            scheduler.record_support(sample.sequence, &support_of(position, sample.token));
        }
    }
}

impl Subject for HashEngine {
    fn submit(&mut self, request: &Request, n: u32) -> Result<Vec<SequenceId>, SchedulerError> {
        let ids = self.scheduler.submit_group(request, n)?;
        for (index, &id) in (0..).zip(&ids) {
            let tokens = request.prompt.to_vec();
            let prompt_tokens = tokens.len();
            let (group, states) = (request.group, Vec::new());
            let dims = self.config.routes.filter(|_| request.return_routes == Some(0) && self.config.replays);
            let replay = dims.map(Replay::new);
            self.known.insert(id, Known { group, index, prompt_tokens, tokens, states, replay });
        }
        Ok(ids)
    }

    fn resume(&mut self, rollouts: Vec<Finished>, limits: &Limits) -> Result<Vec<SequenceId>, Refused> {
        let known: Vec<_> = rollouts.iter().map(|rollout| self.known_of(rollout)).collect();
        let ids = self.scheduler.resume(rollouts, limits)?;
        self.known.extend(ids.iter().copied().zip(known));
        Ok(ids)
    }

    fn next_turn(
        &mut self,
        rollout: Finished,
        given: &[TokenId],
        limits: &Limits,
    ) -> Result<SequenceId, Refused> {
        let mut known = self.known_of(&rollout);
        let id = self.scheduler.next_turn(rollout, given, limits)?;
        known.tokens.extend_from_slice(given);
        self.known.insert(id, known);
        Ok(id)
    }

    fn tick(&mut self, max_tokens: usize) -> bool {
        self.samples.clear();
        if !self.scheduler.plan_within(max_tokens) {
            return false;
        }
        let n_tokens = self.scheduler.tick_plan().n_tokens();
        assert!(n_tokens <= max_tokens, "{n_tokens} tokens in a tick of {max_tokens}");
        self.forward();
        self.store();
        self.sample();
        for sample in &self.samples {
            self.known.get_mut(&sample.sequence).expect("it was there").push(sample.token);
        }
        self.scheduler.advance(&self.samples, self.version);
        true
    }

    fn failing_tick(&mut self, max_tokens: usize, after: FailsAfter) {
        if self.scheduler.plan_within(max_tokens) && after != FailsAfter::Plan {
            self.forward();
            self.store();
            if after == FailsAfter::Sample {
                self.sample();
            }
        }
        self.samples.clear();
        self.scheduler.abort_all();
    }

    fn sampled(&self) -> &[Sample] {
        &self.samples
    }

    fn abort(&mut self, id: SequenceId) -> bool {
        self.scheduler.abort(id)
    }

    fn retract(&mut self, id: SequenceId) -> bool {
        self.oldest = self.oldest.filter(|&(oldest, _)| oldest != id);
        self.scheduler.retract(id)
    }

    fn refit(&mut self, version: PolicyVersion) {
        self.flush();
        self.version = version;
        for known in self.known.values_mut() {
            known.states.clear();
            known.replay.iter_mut().for_each(Replay::refit);
        }
    }

    fn flush(&mut self) {
        self.scheduler.flush(self.scheduler.epoch() + 1).expect("the epoch moves forward");
        self.is_oldest_next = true;
        self.oldest = None;
        let stats = self.scheduler.stats();
        let findable = (stats.n_held_blocks, stats.n_idle_blocks, stats.n_indexed_blocks);
        assert_eq!(findable, (0, 0, 0), "blocks held, idle and indexed after a flush");
    }

    fn failed_refit(&mut self, _version: PolicyVersion) {
        let epoch = self.scheduler.epoch();
        assert!(self.scheduler.flush(epoch).is_err(), "epoch {epoch} began twice");
    }

    fn in_flight(&self) -> Vec<Finished> {
        self.scheduler.in_flight()
    }

    fn take_finished(&mut self) -> Option<Finished> {
        let finished = self.scheduler.take_finished()?;
        assert!(finished.support.is_some(), "every draw is truncated");
        self.known.remove(&finished.sequence).expect("a request ends once");
        Some(finished)
    }

    fn rebuild(&mut self, version: PolicyVersion) {
        *self = Self { version, ..Self::new(self.config) };
    }

    fn stats(&self) -> SchedulerStats {
        self.scheduler.stats()
    }

    fn n_open(&self) -> usize {
        let stats = self.scheduler.stats();
        assert_eq!(
            stats.n_running + stats.n_waiting,
            self.known.len(),
            "a request is lost, or came from nowhere"
        );
        assert_eq!(self.scheduler.has_work(), !self.known.is_empty());
        self.known.len()
    }

    fn check(&self) {
        self.scheduler.check();
    }

    fn prefill(
        &mut self,
        version: PolicyVersion,
        tokens: &[TokenId],
        replayed: Option<RouteView<'_>>,
    ) -> Prefill {
        let mut state = State::start(version);
        let mut logprobs = Vec::with_capacity(tokens.len());
        let mut chosen = Vec::new();
        for (at, &token) in tokens.iter().enumerate() {
            let reached = state.after(token);
            run(reached, None, self.config.routes, &mut chosen);
            let given = replayed.filter(|routes| at < routes.rows()).map(|routes| ids_of(routes, at));
            state = run(reached, given, self.config.routes, &mut Vec::new());
            logprobs.extend(tokens.get(at + 1).map(|&next| state.logprob(next)));
        }
        Prefill { rows: self.config.routes.map(|dims| route_rows(&chosen, dims)), logprobs }
    }
}

/// The state of a token on the experts `given`, or those that the router chooses; `ran` gets them.
fn run(reached: State, given: Option<Vec<u16>>, dims: Option<RouteDims>, ran: &mut Vec<u16>) -> State {
    let Some(dims) = dims else { return reached };
    if let Some(ids) = given {
        ran.extend(&ids);
        return reached.on(&ids, dims);
    }
    let start = ran.len();
    ran.resize(start + dims.row_ids(), 0);
    reached.route(dims, &mut ran[start..]);
    reached
}

/// The experts of a row, `[L, K]`.
fn ids_of(routes: RouteView<'_>, row: usize) -> Vec<u16> {
    (0..routes.dims().n_layers).flat_map(|layer| routes.choice(row, layer)).collect()
}

/// Experts `[n, L, K]` as rows.
fn route_rows(ids: &[u16], dims: RouteDims) -> RouteRows {
    let mut rows = RouteRows::with_capacity(dims, ids.len() / dims.row_ids());
    let mut bytes = vec![0; dims.row_bytes()];
    for ids in ids.chunks_exact(dims.row_ids()) {
        write_ids(ids, dims.width(), &mut bytes);
        rows.append(&bytes);
    }
    rows
}
