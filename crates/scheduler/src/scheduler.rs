//! The scheduler: requests in, one plan per tick, finished rollouts out.

use std::collections::{BTreeMap, VecDeque};

use r3_core::ids::{BlockId, GroupId, PolicyVersion, SequenceId};
use r3_core::rollout::FinishReason;
use r3_core::routes::{RouteDims, RouteView};

use crate::config::SchedulerConfig;
use crate::error::SchedulerError;
use crate::kv_memory::KvMemory;
use crate::plan::{Chunk, TickPlan};
use crate::request::{Finished, Request, Sample, SequenceView};
use crate::sequence::Sequence;

/// Where the scheduler stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    /// Sequences that hold blocks.
    pub n_running: usize,
    /// Sequences that wait for blocks.
    pub n_waiting: usize,
    /// All blocks.
    pub n_blocks: usize,
    /// Blocks that sequences hold.
    pub n_held_blocks: usize,
    /// Blocks that nobody holds, kept for prefix hits.
    pub n_idle_blocks: usize,
    /// Blocks a prefix hit can find, held or not.
    pub n_indexed_blocks: usize,
    /// Bytes of the route pool.
    pub route_bytes: usize,
    /// Since the start: admissions that found a prefix.
    pub n_hits: u64,
    /// Since the start: tokens those did not have to compute.
    pub hit_tokens: u64,
    /// Since the start: sequences that began behind the prompt that another one of their group had just computed.
    pub n_forks: u64,
    /// Since the start: tokens those took over.
    pub forked_tokens: u64,
    /// Since the start: tokens computed.
    pub computed_tokens: u64,
    /// Since the start: times blocks were taken from a running sequence.
    pub n_preemptions: u64,
    /// Since the start: times a running sequence was retracted, for a refit or because somebody asked.
    pub n_retractions: u64,
}

/// Sequences that were submitted with one prompt, of which the first to compute it shares it with the others.
#[derive(Default)]
pub(crate) struct Family {
    /// The member computing the prompt now.
    pub(crate) leader: Option<SequenceId>,
    /// Members that wait and have sampled nothing, in the order in which they would lead.
    pub(crate) unstarted: VecDeque<SequenceId>,
}

/// A sequence that holds blocks.
#[derive(Clone, Copy)]
pub(crate) struct Running {
    pub(crate) id: SequenceId,
    /// Tokens it may compute this tick.
    pub(crate) granted: usize,
}

/// A group member that takes over what its leader computes this tick.
#[derive(Clone, Copy)]
pub(crate) struct Fork {
    pub(crate) leader: SequenceId,
    pub(crate) follower: SequenceId,
}

/// Continuous batching over block tables.
///
/// One tick is [`Self::plan`], the engine's forward over [`Self::tick_plan`], [`Self::record`] for the routes,
/// [`Self::advance`] with the samples, then [`Self::take_finished`]. Everything else happens between ticks.
///
/// - Decoding sequences come first, then prefill chunks, oldest first, under one token budget.
/// - A group's prompt is computed once; the others fork from it. Who finds no room waits, and computes it later.
/// - When a block is missing, the youngest running sequence gives up its blocks, keeps all it emitted, and waits at
///   the front. The oldest never does, so it always gets on.
pub struct Scheduler {
    pub(crate) config: SchedulerConfig,
    pub(crate) kv: KvMemory,
    pub(crate) sequences: BTreeMap<SequenceId, Sequence>,
    /// Ids ascend: age is the order of submission.
    pub(crate) running: Vec<Running>,
    pub(crate) waiting: VecDeque<SequenceId>,
    pub(crate) families: BTreeMap<SequenceId, Family>,
    pub(crate) finished: VecDeque<Finished>,
    pub(crate) plan: TickPlan,
    pub(crate) forks: Vec<Fork>,
    pub(crate) is_in_tick: bool,
    /// Whether the routes of this tick are in their slots.
    pub(crate) is_recorded: bool,
    pub(crate) counters: SchedulerStats,
    next_id: u64,
}

impl Scheduler {
    /// A scheduler in weight epoch 0, with all its memory.
    ///
    /// # Errors
    /// If a size is 0 or the slots outnumber their ids.
    pub fn new(config: SchedulerConfig) -> Result<Self, SchedulerError> {
        config.check()?;
        Ok(Self {
            config,
            kv: KvMemory::new(config.n_blocks, config.block_tokens, config.prefix_cache, config.routes),
            sequences: BTreeMap::new(),
            running: Vec::with_capacity(config.max_running),
            waiting: VecDeque::new(),
            families: BTreeMap::new(),
            finished: VecDeque::new(),
            plan: TickPlan::default(),
            forks: Vec::new(),
            is_in_tick: false,
            is_recorded: false,
            counters: SchedulerStats::default(),
            next_id: 0,
        })
    }

    /// Queues one completion of a prompt, as index 0 of its group.
    ///
    /// # Errors
    /// If the prompt is empty, or could not be completed even with the whole cache to itself.
    pub fn submit(&mut self, request: &Request) -> Result<SequenceId, SchedulerError> {
        Ok(self.submit_group(request, 1)?[0])
    }

    /// Queues `n` completions of one prompt, indices `0..n`.
    ///
    /// # Errors
    /// If `n` is 0, the prompt is empty, one completion does not fit the whole cache, or routes are wanted that nobody
    /// captures or that begin behind the prompt.
    pub fn submit_group(&mut self, request: &Request, n: u32) -> Result<Vec<SequenceId>, SchedulerError> {
        let group = request.group;
        if n == 0 {
            return Err(SchedulerError::EmptyGroup { group });
        }
        if request.prompt.is_empty() {
            return Err(SchedulerError::EmptyPrompt { group });
        }
        if let Some(start) = request.return_routes {
            self.check_routes(group, start, request.prompt.len())?;
        }
        self.check_room(group, request.prompt.len(), request.max_new_tokens)?;
        let family = SequenceId(self.next_id);
        let members = (0..n).map(|index| {
            let id = SequenceId(family.0 + u64::from(index));
            Sequence::new((id, family), index, request, self.config.routes)
        });
        let members = members.collect();
        Ok(self.queue(members))
    }

    /// Lets new sequences of one family wait, whose ids are the next ones. Those that sampled nothing yet share a prompt.
    pub(crate) fn queue(&mut self, members: Vec<Sequence>) -> Vec<SequenceId> {
        let ids = members.iter().map(|member| member.id).collect();
        let unstarted: Vec<_> = members.iter().filter(|member| member.turns.is_empty()).collect();
        if let [first, _, ..] = unstarted[..] {
            let ids = unstarted.iter().map(|member| member.id).collect();
            self.families.insert(first.family, Family { leader: None, unstarted: ids });
        }
        for member in members {
            assert_eq!(member.id.0, self.next_id, "ids are given in order");
            self.next_id += 1;
            self.waiting.push_back(member.id);
            self.sequences.insert(member.id, member);
        }
        ids
    }

    /// Refuses a sequence that could not be completed even with the whole cache to itself.
    pub(crate) fn check_room(
        &self,
        group: GroupId,
        n_tokens: usize,
        max_new_tokens: usize,
    ) -> Result<(), SchedulerError> {
        // The last sampled token is never fed, so it needs no slot.
        let needed_tokens = n_tokens.saturating_add(max_new_tokens.saturating_sub(1));
        let capacity_tokens = self.config.n_blocks * self.config.block_tokens;
        if needed_tokens > capacity_tokens {
            return Err(SchedulerError::NeverFits { group, needed_tokens, capacity_tokens });
        }
        Ok(())
    }

    /// Refuses routes that nobody captures, or that begin behind the prompt.
    pub(crate) fn check_routes(
        &self,
        group: GroupId,
        start: usize,
        prompt_tokens: usize,
    ) -> Result<(), SchedulerError> {
        if self.config.routes.is_none() {
            return Err(SchedulerError::RoutesOff { group });
        }
        if start > prompt_tokens {
            return Err(SchedulerError::RoutesStart { group, start, prompt_tokens });
        }
        Ok(())
    }

    /// The id the next sequence gets.
    pub(crate) fn next_id(&self) -> u64 {
        self.next_id
    }

    /// The tick that [`Self::plan`] made.
    #[must_use]
    pub fn tick_plan(&self) -> &TickPlan {
        &self.plan
    }

    /// Blocks of a running sequence: position `p` lies in slot `blocks[p / block_tokens] * block_tokens + p %
    /// block_tokens`.
    ///
    /// # Panics
    /// If there is no such sequence.
    #[must_use]
    pub fn block_table(&self, id: SequenceId) -> &[u32] {
        &self.get(id).blocks
    }

    /// A sequence that runs or waits.
    ///
    /// # Panics
    /// If there is no such sequence.
    #[must_use]
    pub fn sequence(&self, id: SequenceId) -> SequenceView<'_> {
        let sequence = self.get(id);
        SequenceView {
            group: sequence.group,
            index: sequence.index,
            position: sequence.tokens.len(),
            tokens: &sequence.tokens,
            prompt_tokens: sequence.prompt_tokens,
        }
    }

    /// The routes that the first `n_replayed` tokens of a chunk take, `[n_replayed, L, K]`: older weights emitted logprobs
    /// under them. `None` if the router chooses for all of the chunk.
    ///
    /// # Panics
    /// If the chunk is not of the plan.
    #[must_use]
    pub fn replayed_routes(&self, chunk: &Chunk) -> Option<RouteView<'_>> {
        let &Chunk { sequence, start, n_replayed, .. } = chunk;
        (n_replayed > 0).then(|| {
            let routes = self.get(sequence).replayed().expect("what is replayed was recorded");
            routes.slice(start..start + n_replayed)
        })
    }

    /// Stores the routes of this tick: `rows`, bytes `[T, L, K]` in router order, are those of the plan's rows. Does
    /// nothing when routes are off.
    ///
    /// Every row goes to the slot the plan gave it, under its block's stamp. Its sequence copies it into its trace before
    /// it gives the block up, unless the trace has that position already.
    ///
    /// # Panics
    /// Outside a tick, if it was recorded before, or if `rows` are not exactly as many bytes as the plan's rows have.
    pub fn record(&mut self, rows: &[u8]) {
        assert!(self.is_in_tick, "routes are recorded between `plan` and `advance`");
        let Some(row_bytes) = self.config.routes.map(RouteDims::row_bytes) else { return };
        assert_eq!(rows.len(), self.plan.n_tokens() * row_bytes, "routes are [T, L, K] bytes");
        let n_slots = u32::try_from(self.config.block_tokens).expect("slot ids are u32");
        self.kv.fetch_routes(&self.plan.slots);
        let mut rest = rows;
        // A chunk's slots of one block follow each other, and no two sequences write into one block.
        for run in self.plan.slots.chunk_by(|slot, next| slot + 1 == *next && next % n_slots > 0) {
            let (of_run, behind) = rest.split_at(run.len() * row_bytes);
            let (block, first) = (BlockId(run[0] / n_slots), (run[0] % n_slots) as usize);
            self.kv.record(block, first, of_run);
            rest = behind;
        }
        self.is_recorded = true;
    }

    /// Stores logprobs (nats) of prompt tokens: `logprobs[i]` is that of token `start + i + 1`, from the logits of row
    /// `start + i` of `sequence`. Called for chunks that want [`crate::plan::Logits::All`]; what is already known stays.
    ///
    /// # Panics
    /// If the sequence did not ask for them, or they leave a hole or the prompt.
    pub fn record_prompt_logprobs(&mut self, sequence: SequenceId, start: usize, logprobs: &[f32]) {
        assert!(self.is_in_tick, "prompt logprobs are recorded between `plan` and `advance`");
        let sequence = self.sequences.get_mut(&sequence).expect("planned sequences exist");
        assert!(
            start + logprobs.len() < sequence.prompt_tokens,
            "the last prompt row predicts no prompt token"
        );
        let held = sequence.prompt_logprobs.as_mut().expect("the request wants prompt logprobs");
        let known = held.len().checked_sub(start).expect("prompt logprobs are taken in order");
        held.extend_from_slice(logprobs.get(known..).unwrap_or_default());
    }

    /// Stores what the token that `sequence` samples in this tick was drawn from: `kept`, ascending, are the tokens that
    /// truncation left. Called for every sample of a request that has a `max_support`.
    ///
    /// # Panics
    /// Outside a tick, if the request has none, or if it keeps fewer.
    pub fn record_support(&mut self, sequence: SequenceId, kept: &[u32]) {
        assert!(self.is_in_tick, "supports are recorded between `plan` and `advance`");
        self.sequences.get_mut(&sequence).expect("planned sequences exist").record_support(kept);
    }

    /// Ends the tick: `samples` answers the plan's sample sites in their order, and `version` made them.
    ///
    /// # Panics
    /// Outside a tick, if the samples are not those of the plan, or if routes are on and were not recorded: a row that
    /// is not there must never be taken for expert 0. Also if the support of a truncated draw was not recorded.
    pub fn advance(&mut self, samples: &[Sample], version: PolicyVersion) {
        assert!(self.is_in_tick, "`advance` ends what `plan` began");
        assert!(self.config.routes.is_none() || self.is_recorded, "a tick whose routes were not recorded");
        self.is_in_tick = false;
        for chunk in &self.plan.chunks {
            let sequence = self.sequences.get_mut(&chunk.sequence).expect("planned sequences exist");
            sequence.settle(&mut self.kv, chunk.start + chunk.n_tokens);
            assert_recorded(sequence);
        }
        self.counters.computed_tokens += self.plan.n_tokens() as u64;
        self.complete_forks();

        let sites = self.plan.samples.iter().map(|site| site.sequence);
        assert!(
            sites.eq(samples.iter().map(|sample| sample.sequence)),
            "one sample per site of the plan, in order"
        );
        for sample in samples {
            let sequence = self.sequences.get_mut(&sample.sequence).expect("sampling sequences exist");
            if let Some(reason) = sequence.push(sample.token, sample.logprob, version) {
                self.finish(sample.sequence, reason);
            }
        }
        self.finish_prefills();
    }

    /// Whether a request ended that nobody has taken.
    #[must_use]
    pub fn has_finished(&self) -> bool {
        !self.finished.is_empty()
    }

    /// The next request that ended, in the order in which they did.
    pub fn take_finished(&mut self) -> Option<Finished> {
        let mut finished = self.finished.pop_front()?;
        if let Some(support) = &mut finished.support {
            support.shrink_to_fit(); // Room was made for the most that every draw may keep.
        }
        Some(finished)
    }

    /// Takes a request back: it ends with what it has. `false` if it is not here (any more).
    ///
    /// # Panics
    /// Inside a tick.
    pub fn abort(&mut self, id: SequenceId) -> bool {
        assert!(!self.is_in_tick, "requests are aborted between ticks");
        let is_known = self.sequences.contains_key(&id);
        if is_known {
            self.finish(id, FinishReason::Abort);
        }
        is_known
    }

    /// Takes all requests back, oldest first. Inside a tick, as after a forward that failed, it also gives up the tick:
    /// nothing that was planned counts as computed.
    pub fn abort_all(&mut self) {
        self.is_in_tick = false;
        self.plan.clear();
        while let Some((&id, _)) = self.sequences.first_key_value() {
            self.finish(id, FinishReason::Abort);
        }
    }

    /// Whether a tick would do anything.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.sequences.is_empty()
    }

    /// Sequences that hold blocks.
    #[must_use]
    pub fn n_running(&self) -> usize {
        self.running.len()
    }

    /// Sequences that wait for blocks.
    #[must_use]
    pub fn n_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The weight epoch of everything findable.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.kv.epoch()
    }

    /// Bytes held for routes; 0 when they are off.
    #[must_use]
    pub fn route_bytes(&self) -> usize {
        self.kv.route_bytes()
    }

    /// Where the scheduler stands.
    #[must_use]
    pub fn stats(&self) -> SchedulerStats {
        SchedulerStats {
            n_running: self.n_running(),
            n_waiting: self.n_waiting(),
            n_blocks: self.kv.n_blocks(),
            n_held_blocks: self.kv.n_blocks() - self.kv.n_available(),
            n_idle_blocks: self.kv.n_idle(),
            n_indexed_blocks: self.kv.n_indexed(),
            route_bytes: self.route_bytes(),
            ..self.counters
        }
    }

    pub(crate) fn get(&self, id: SequenceId) -> &Sequence {
        self.sequences.get(&id).unwrap_or_else(|| panic!("sequence {id} is not here"))
    }

    /// Hands followers what their leader computed: after its blocks were settled, before anyone can finish.
    fn complete_forks(&mut self) {
        for Fork { leader, follower } in self.forks.drain(..) {
            // Out and in again: two entries of one map are borrowed at once.
            let mut member = self.sequences.remove(&follower).expect("followers exist");
            let of_leader = &self.sequences[&leader];
            let shared = of_leader.computed / self.config.block_tokens;
            if let (Some(&from), Some(&to)) = (of_leader.blocks.get(shared), member.blocks.get(shared)) {
                let n_slots = of_leader.computed % self.config.block_tokens;
                self.kv.copy_routes(BlockId(from), BlockId(to), n_slots);
            }
            member.inherit(of_leader);
            self.counters.n_forks += 1;
            self.counters.forked_tokens += member.computed as u64;
            self.sequences.insert(follower, member);
        }
    }

    /// Ends requests that wanted nothing but their prompt computed.
    fn finish_prefills(&mut self) {
        let is_done = |sequence: &Sequence| sequence.max_new_tokens == 0 && sequence.n_pending() == 0;
        while let Some(done) = self.running.iter().find(|running| is_done(&self.sequences[&running.id])) {
            self.finish(done.id, FinishReason::Length);
        }
    }

    /// Moves a sequence out, whatever it was doing.
    pub(crate) fn finish(&mut self, id: SequenceId, reason: FinishReason) {
        self.leave_family(id);
        match self.running.binary_search_by_key(&id, |running| running.id) {
            Ok(at) => drop(self.running.remove(at)),
            Err(_) => self.waiting.retain(|&waiting| waiting != id),
        }
        let mut sequence = self.sequences.remove(&id).expect("a sequence ends once");
        sequence.release_blocks(&mut self.kv);
        self.finished.push_back(sequence.finish(reason));
    }

    /// The sequence leads no longer and waits for nobody.
    pub(crate) fn leave_family(&mut self, id: SequenceId) {
        let key = self.get(id).family;
        if let Some(family) = self.families.get_mut(&key) {
            family.leader = family.leader.filter(|&leader| leader != id);
            family.unstarted.retain(|&member| member != id);
            if family.leader.is_none() && family.unstarted.is_empty() {
                self.families.remove(&key);
            }
        }
    }
}

/// Asserts that the engine recorded every prompt logprob it computed.
fn assert_recorded(sequence: &Sequence) {
    let logprobs = sequence.prompt_logprobs.as_ref().map_or(usize::MAX, Vec::len);
    assert!(
        logprobs >= sequence.computed.min(sequence.prompt_tokens - 1),
        "sequence {} computed {} tokens, but recorded {logprobs} prompt logprobs",
        sequence.id,
        sequence.computed,
    );
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use r3_core::ids::TokenId;

    use super::*;

    const CONFIG: SchedulerConfig = SchedulerConfig {
        block_tokens: 4,
        n_blocks: 4,
        max_running: 2,
        max_batch_tokens: 8,
        prefix_cache: true,
        routes: None,
        replays: false,
    };

    fn request(n_prompt: usize, max_new_tokens: usize) -> Request {
        Request {
            group: GroupId(7),
            prompt: vec![TokenId(5); n_prompt].into(),
            max_new_tokens,
            stop_tokens: Arc::new([TokenId(0)]),
            prompt_logprobs: false,
            max_support: None,
            return_routes: None,
        }
    }

    /// One tick in which every site samples `token`.
    fn tick(scheduler: &mut Scheduler, token: u32) {
        assert!(scheduler.plan());
        let sites = scheduler.tick_plan().samples.iter();
        let samples: Vec<_> = sites
            .map(|site| Sample { sequence: site.sequence, token: TokenId(token), logprob: -0.5 })
            .collect();
        scheduler.advance(&samples, PolicyVersion(3));
        scheduler.check();
    }

    #[test]
    fn what_can_never_run_is_refused() {
        let mut scheduler = Scheduler::new(CONFIG).unwrap();
        let group = GroupId(7);
        assert_eq!(scheduler.submit(&request(0, 1)), Err(SchedulerError::EmptyPrompt { group }));
        assert_eq!(scheduler.submit_group(&request(1, 1), 0), Err(SchedulerError::EmptyGroup { group }));
        let too_long = SchedulerError::NeverFits { group, needed_tokens: 17, capacity_tokens: 16 };
        assert_eq!(scheduler.submit(&request(10, 8)), Err(too_long));
        assert_eq!(scheduler.submit(&request(17, 0)), Err(too_long));
        assert!(!scheduler.has_work());
        assert!(scheduler.submit(&request(10, 7)).is_ok(), "the last sampled token needs no slot");
        assert!(scheduler.submit(&request(16, 0)).is_ok());
    }

    #[test]
    fn a_stop_token_is_the_last_token_and_a_length_is_exact() {
        let mut scheduler = Scheduler::new(CONFIG).unwrap();
        scheduler.submit(&request(2, 3)).unwrap();
        tick(&mut scheduler, 9);
        tick(&mut scheduler, 0);
        let stopped = scheduler.take_finished().unwrap();
        assert_eq!(
            (stopped.finish, stopped.view().completion()),
            (FinishReason::Stop, &[9, 0].map(TokenId)[..])
        );
        assert_eq!(
            (&stopped.rollout_logprobs[..], &stopped.versions[..]),
            (&[-0.5; 2][..], &[PolicyVersion(3); 2][..])
        );
        scheduler.submit(&request(2, 3)).unwrap();
        (0..3).for_each(|_| tick(&mut scheduler, 9));
        assert_eq!(scheduler.take_finished().unwrap().finish, FinishReason::Length);
        assert!(!scheduler.plan() && scheduler.tick_plan().chunks.is_empty(), "nothing is left to do");
    }

    #[test]
    fn an_abort_ends_what_waits_and_what_runs_once() {
        let mut scheduler = Scheduler::new(CONFIG).unwrap();
        let ids = scheduler.submit_group(&request(3, 4), 3).unwrap();
        tick(&mut scheduler, 9);
        assert_eq!((scheduler.n_running(), scheduler.n_waiting()), (2, 1));
        assert!(scheduler.abort(ids[1]) && !scheduler.abort(ids[1]));
        scheduler.check();
        scheduler.abort_all();
        scheduler.check();
        let ends: Vec<_> = std::iter::from_fn(|| scheduler.take_finished()).collect();
        assert_eq!(ends.iter().map(|end| end.sequence).collect::<Vec<_>>(), [ids[1], ids[0], ids[2]]);
        assert_eq!(ends.iter().map(|end| end.tokens.len()).collect::<Vec<_>>(), [4, 4, 3]);
        assert!(!scheduler.has_work() && scheduler.families.is_empty());
        assert_eq!(scheduler.stats().n_held_blocks, 0);
    }

    #[test]
    fn samples_must_answer_the_plan() {
        let mut scheduler = Scheduler::new(CONFIG).unwrap();
        scheduler.submit(&request(2, 3)).unwrap();
        assert!(scheduler.plan());
        let advanced = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            scheduler.advance(&[], PolicyVersion(0));
        }));
        assert!(advanced.is_err());
    }
}
