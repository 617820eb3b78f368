//! An engine without a model: what it keeps in a KV slot is a hash of everything before it.
//!
//! It trusts the scheduler with nothing. Each tick it reads every slot a sequence attends to and compares it with the
//! hash of that sequence's own tokens, so a block shared, copied, evicted or reused wrongly shows at once. Routes and
//! samples are pure functions of that hash, so what a request must end with can be said without a scheduler.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use r3_core::ids::{GroupId, PolicyVersion, SequenceId, TokenId};
use r3_core::rollout::FinishReason;
use r3_core::routes::RouteDims;
use r3_scheduler::config::SchedulerConfig;
use r3_scheduler::plan::Logits;
use r3_scheduler::request::{Finished, Request, Sample};
use r3_scheduler::scheduler::Scheduler;

pub(crate) const DIMS: RouteDims = RouteDims { n_layers: 2, top_k: 2, n_experts: 5 };

/// The token that stops a completion in [`request`].
pub(crate) const STOP: TokenId = TokenId(0);

/// What is known of a request without looking into the scheduler.
struct Expected {
    request: Request,
    index: u32,
    tokens: Vec<TokenId>,
    logprobs: Vec<f32>,
    versions: Vec<PolicyVersion>,
}

pub(crate) struct NaiveEngine {
    pub(crate) scheduler: Scheduler,
    pub(crate) config: SchedulerConfig,
    /// Everything the plans said, for comparing two runs.
    pub(crate) log: Vec<String>,
    pub(crate) finished: Vec<Finished>,
    kv: Vec<u64>,
    expected: BTreeMap<SequenceId, Expected>,
}

impl NaiveEngine {
    pub(crate) fn new(config: SchedulerConfig) -> Self {
        Self {
            scheduler: Scheduler::new(config).unwrap(),
            config,
            log: Vec::new(),
            finished: Vec::new(),
            kv: vec![0; config.n_blocks * config.block_tokens],
            expected: BTreeMap::new(),
        }
    }

    pub(crate) fn submit(&mut self, request: &Request, n: u32) -> Vec<SequenceId> {
        let request = &Request { return_routes: self.config.routes.map(|_| 0), ..request.clone() };
        let Ok(ids) = self.scheduler.submit_group(request, n) else {
            let needed = request.prompt.len() + request.max_new_tokens.saturating_sub(1);
            assert!(needed > self.kv.len(), "a request that fits was refused");
            return Vec::new();
        };
        for (index, &id) in (0..).zip(&ids) {
            let (tokens, request) = (request.prompt.to_vec(), request.clone());
            let expected = Expected { request, index, tokens, logprobs: Vec::new(), versions: Vec::new() };
            self.expected.insert(id, expected);
        }
        self.scheduler.check();
        ids
    }

    /// One tick. Returns whether there was anything to do.
    pub(crate) fn tick(&mut self) -> bool {
        let has_work = self.scheduler.has_work();
        assert_eq!(self.scheduler.plan(), has_work, "whoever has work makes progress");
        if !has_work {
            return false;
        }
        let hashes = self.forward();
        self.log.push(format!("{:?}", self.scheduler.tick_plan()));
        self.scheduler.record(|row, out| out.copy_from_slice(&route_of(hashes[row])));
        self.record_prompt_logprobs(&hashes);
        let copies = self.scheduler.tick_plan().copies_after_forward.clone();
        assert_eq!(copies.from.len(), copies.to.len());
        for (&from, &to) in copies.from.iter().zip(&copies.to) {
            self.kv[to as usize] = self.kv[from as usize];
        }
        let samples = self.sample(&hashes);
        self.scheduler.advance(&samples, PolicyVersion(self.scheduler.epoch()));
        self.scheduler.check();
        self.collect();
        true
    }

    /// A tick whose forward fails, or whatever comes after it: everything is taken back.
    pub(crate) fn failing_tick(&mut self, is_recorded: bool) {
        if self.scheduler.plan() && is_recorded {
            let hashes = self.forward();
            self.scheduler.record(|row, out| out.copy_from_slice(&route_of(hashes[row])));
        }
        self.scheduler.abort_all();
        self.scheduler.check();
        self.collect();
        self.assert_empty();
    }

    /// Ticks until nothing is left. The bound is generous: each tick computes a token of the oldest.
    pub(crate) fn drain(&mut self) {
        for _ in 0..100_000 {
            if !self.tick() {
                return;
            }
        }
        panic!("no end after 100,000 ticks");
    }

    pub(crate) fn abort(&mut self, id: SequenceId) {
        assert_eq!(self.scheduler.abort(id), self.expected.contains_key(&id));
        self.scheduler.check();
        self.collect();
    }

    /// Whether a request waits that has sampled already.
    pub(crate) fn has_preempted(&self) -> bool {
        let is_preempted = |(&id, expected): (&SequenceId, &Expected)| {
            !expected.versions.is_empty() && self.scheduler.block_table(id).is_empty()
        };
        self.expected.iter().any(is_preempted)
    }

    /// Begins the next epoch, whatever runs.
    pub(crate) fn flush(&mut self) {
        self.scheduler.flush(self.scheduler.epoch() + 1).unwrap();
        self.scheduler.check();
        let stats = self.scheduler.stats();
        assert_eq!((stats.n_held_blocks, stats.n_idle_blocks, stats.n_indexed_blocks), (0, 0, 0));
    }

    /// Asserts that nothing is left of any request.
    pub(crate) fn assert_empty(&self) {
        assert!(self.expected.is_empty(), "{} requests never ended", self.expected.len());
        let stats = self.scheduler.stats();
        assert_eq!((stats.n_running, stats.n_waiting, stats.n_held_blocks), (0, 0, 0));
        assert!(!self.scheduler.has_work());
        assert!(self.config.prefix_cache || stats.n_idle_blocks == 0);
    }

    /// The hash of every row of the plan, written to its slot after all that precedes it was read and compared.
    fn forward(&mut self) -> Vec<u64> {
        let (plan, epoch) = (self.scheduler.tick_plan(), self.scheduler.epoch());
        assert!(plan.n_tokens() <= self.config.max_batch_tokens, "{} tokens", plan.n_tokens());
        assert_eq!((plan.positions.len(), plan.slots.len()), (plan.n_tokens(), plan.n_tokens()));
        assert_eq!(
            plan.slots.iter().collect::<BTreeSet<_>>().len(),
            plan.n_tokens(),
            "a slot is written twice"
        );
        let written: BTreeSet<_> = plan.slots.iter().chain(&plan.copies_after_forward.to).collect();
        assert_eq!(
            written.len(),
            plan.n_tokens() + plan.copies_after_forward.to.len(),
            "a copy lands on a row"
        );
        let mut hashes = Vec::new();
        for chunk in &plan.chunks {
            let tokens = &self.expected[&chunk.sequence].tokens;
            let table = self.scheduler.block_table(chunk.sequence);
            let slot_of = |position: usize| {
                table[position / self.config.block_tokens] as usize * self.config.block_tokens
                    + position % self.config.block_tokens
            };
            assert!(chunk.n_tokens > 0 && chunk.first_row == hashes.len(), "chunks cover the rows in order");
            let past = prefix_hashes(epoch, &tokens[..chunk.start]);
            for (position, hash) in past.iter().enumerate() {
                assert_eq!(self.kv[slot_of(position)], *hash, "{} reads a foreign slot", chunk.sequence);
                assert!(!written.contains(&(slot_of(position) as u32)), "a slot is read and written");
            }
            let end = chunk.start + chunk.n_tokens;
            for (position, hash) in
                prefix_hashes(epoch, &tokens[..end]).into_iter().enumerate().skip(chunk.start)
            {
                let row = hashes.len();
                assert_eq!(plan.tokens[row], tokens[position]);
                assert_eq!(plan.positions[row] as usize, position);
                assert_eq!(plan.slots[row] as usize, slot_of(position));
                hashes.push(hash);
            }
        }
        for (&slot, &hash) in plan.slots.iter().zip(&hashes) {
            self.kv[slot as usize] = hash;
        }
        hashes
    }

    fn record_prompt_logprobs(&mut self, hashes: &[u64]) {
        for chunk in self.scheduler.tick_plan().chunks.clone() {
            let prompt = &self.expected[&chunk.sequence].request.prompt;
            let end = (chunk.start + chunk.n_tokens).min(prompt.len() - 1);
            if chunk.wants == Logits::All {
                let logprobs: Vec<_> = (chunk.start..end)
                    .map(|position| {
                        logprob_of(hashes[chunk.first_row + position - chunk.start], prompt[position + 1])
                    })
                    .collect();
                self.scheduler.record_prompt_logprobs(chunk.sequence, chunk.start, &logprobs);
            }
        }
    }

    /// Samples at every site, from the row's hash, and keeps what the request must end with.
    fn sample(&mut self, hashes: &[u64]) -> Vec<Sample> {
        let version = PolicyVersion(self.scheduler.epoch());
        let mut samples = Vec::new();
        for site in &self.scheduler.tick_plan().samples {
            let expected = self.expected.get_mut(&site.sequence).unwrap();
            let seen = self.scheduler.sequence(site.sequence);
            assert_eq!(
                (seen.index, seen.position),
                (expected.index, expected.tokens.len()),
                "the key of the sample"
            );
            assert_eq!((seen.tokens, seen.group), (&expected.tokens[..], expected.request.group));
            let own = *prefix_hashes(version.0, &expected.tokens).last().unwrap();
            assert_eq!(hashes[site.row], own, "{} samples from another's logits", site.sequence);
            let token = token_of(own, expected.request.group, seen.index, seen.position);
            let logprob = logprob_of(own, token);
            expected.tokens.push(token);
            expected.logprobs.push(logprob);
            expected.versions.push(version);
            samples.push(Sample { sequence: site.sequence, token, logprob });
        }
        samples
    }

    fn collect(&mut self) {
        while let Some(finished) = self.scheduler.take_finished() {
            let expected = self.expected.remove(&finished.sequence).expect("a request ends once");
            assert_finished(&finished, &expected, self.scheduler.epoch(), self.config.routes.is_some());
            self.finished.push(finished);
        }
        let n_queued = self.scheduler.n_running() + self.scheduler.n_waiting();
        assert_eq!(n_queued, self.expected.len(), "a request is dropped silently");
    }
}

fn assert_finished(finished: &Finished, expected: &Expected, epoch: u64, has_routes: bool) {
    let Expected { request, tokens, versions, .. } = expected;
    assert_eq!((finished.group, finished.index), (request.group, expected.index));
    assert_eq!((&finished.tokens, finished.prompt_tokens), (tokens, request.prompt.len()));
    assert_eq!((&finished.rollout_logprobs, &finished.versions), (&expected.logprobs, versions));
    let n_sampled = tokens.len() - request.prompt.len();
    if finished.finish != FinishReason::Abort {
        let has_stopped = n_sampled > 0 && request.stop_tokens.contains(tokens.last().unwrap());
        let reason = if has_stopped { FinishReason::Stop } else { FinishReason::Length };
        assert_eq!(finished.finish, reason);
        assert!(has_stopped || n_sampled == request.max_new_tokens);
    }
    // What was routed before the first sample was so under its weights; later rows under those of the token after.
    let epoch_of = |position: usize| {
        let next_sampled = (position + 1).saturating_sub(request.prompt.len());
        versions.get(next_sampled).map_or(epoch, |version| version.0)
    };
    let hash_of = |position: usize| *prefix_hashes(epoch_of(position), &tokens[..=position]).last().unwrap();
    assert_eq!(finished.routes.is_some(), has_routes);
    if let Some(routes) = finished.view().routes {
        if finished.finish != FinishReason::Abort || n_sampled > 0 {
            let n_rows = if n_sampled == 0 { tokens.len() } else { tokens.len() - 1 };
            assert_eq!(routes.check(n_rows), Ok(()));
        }
        for row in 0..routes.rows() {
            let ids: Vec<_> = (0..4).map(|at| routes.expert(row, at / 2, at % 2)).collect();
            assert_eq!(ids, route_of(hash_of(row)), "{} row {row}", finished.sequence);
        }
    }
    assert_eq!(finished.prompt_logprobs.is_some(), request.prompt_logprobs);
    if let Some(logprobs) = &finished.prompt_logprobs {
        assert!(finished.finish == FinishReason::Abort || logprobs.len() == request.prompt.len() - 1);
        for (row, &logprob) in logprobs.iter().enumerate() {
            assert_eq!(logprob, logprob_of(hash_of(row), tokens[row + 1]), "prompt logprob {row}");
        }
    }
}

/// A prompt of small tokens: equal starts share prefixes.
pub(crate) fn request(group: u64, prompt: &[u32], max_new_tokens: usize) -> Request {
    Request {
        group: GroupId(group),
        prompt: prompt.iter().map(|&token| TokenId(token)).collect(),
        max_new_tokens,
        stop_tokens: Arc::new([STOP]),
        prompt_logprobs: false,
        return_routes: Some(0),
    }
}

/// What every position of `tokens` leaves in its slot: all before it, and the weights.
fn prefix_hashes(epoch: u64, tokens: &[TokenId]) -> Vec<u64> {
    let chain = |before: &mut u64, token: &TokenId| {
        *before = hash(&(*before, epoch, *token));
        Some(*before)
    };
    tokens.iter().scan(1, chain).collect()
}

pub(crate) fn route_of(prefix: u64) -> [u16; 4] {
    let choice = |layer: u64| {
        let drawn = hash(&(prefix, layer));
        let first = (drawn % 5) as u16;
        [first, (first + 1 + (drawn / 5 % 4) as u16) % 5]
    };
    let [[a, b], [c, d]] = [choice(0), choice(1)];
    [a, b, c, d]
}

fn token_of(prefix: u64, group: GroupId, index: u32, position: usize) -> TokenId {
    TokenId((hash(&(prefix, group, index, position)) % 8) as u32)
}

fn logprob_of(prefix: u64, token: TokenId) -> f32 {
    -((hash(&(prefix, token)) % 1000) as f32)
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
