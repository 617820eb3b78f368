//! One request on its way: what it emitted, which survives everything, and the KV it holds, which does not.

use std::ops::Range;
use std::sync::Arc;

use r3_core::ids::{BlockId, GroupId, PolicyVersion, SequenceId, TokenId};
use r3_core::rollout::FinishReason;
use r3_core::routes::{RouteDims, RouteView};
use r3_core::support::SupportRows;

use crate::kv_memory::{Hit, KvMemory};
use crate::prefix_cache::Prefix;
use crate::request::{Finished, Limits, Request};
use crate::trace::Trace;

/// How far a sequence's full blocks are in the prefix cache.
#[derive(Clone, Copy)]
pub(crate) struct Published {
    /// Blocks from the first on that are indexed, here or as equal blocks of another sequence.
    n_blocks: usize,
    /// The prefix that ends there.
    end: Option<Prefix>,
    /// The prefix was evicted: nothing after it can be found any more.
    is_cut: bool,
}

impl Published {
    const NOTHING: Self = Self { n_blocks: 0, end: None, is_cut: false };
}

/// Two halves. *Emitted* (tokens, logprobs, versions, trace) only grows. *Resident* (blocks, `computed`,
/// `published`) is given up on preemption and computed again: by the weights that computed it first, or on the routes that
/// the trace has of it.
#[derive(Clone)]
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    pub(crate) group: GroupId,
    pub(crate) index: u32,
    /// The first sequence of the same `submit_group`: its members have one prompt.
    pub(crate) family: SequenceId,
    /// Of this turn.
    pub(crate) max_new_tokens: usize,
    stop_tokens: Arc<[TokenId]>,
    /// Of the first turn.
    pub(crate) prompt_tokens: usize,
    /// Position of the first token this turn samples.
    turn_start: usize,
    /// End of the trace that came along from earlier turns or attempts.
    inherited_rows: usize,
    /// Tokens that a draw keeps at most, if draws are truncated.
    max_support: Option<usize>,

    pub(crate) tokens: Vec<TokenId>,
    /// Positions sampled, one range for each turn.
    pub(crate) turns: Vec<Range<usize>>,
    pub(crate) rollout_logprobs: Vec<f32>,
    pub(crate) versions: Vec<PolicyVersion>,
    /// What the tokens after the prompt were drawn from; inside a tick also the one that is drawn in it.
    pub(crate) support: Option<SupportRows>,
    pub(crate) prompt_logprobs: Option<Vec<f32>>,
    pub(crate) trace: Option<Trace>,
    /// Positions from 0 on for which the router of now is not asked: logprobs of other weights were emitted under their
    /// rows, and what is sampled behind them is trained on with these replayed.
    pub(crate) n_replayed: usize,
    pub(crate) cached_tokens: usize,
    pub(crate) n_preemptions: usize,

    /// Block ids by position; plain numbers, because attention reads them as they are.
    pub(crate) blocks: Vec<u32>,
    /// Tokens whose keys and values are in `blocks`.
    pub(crate) computed: usize,
    published: Published,
}

impl Sequence {
    pub(crate) fn new(
        (id, family): (SequenceId, SequenceId),
        index: u32,
        request: &Request,
        routes: Option<RouteDims>,
    ) -> Self {
        Self {
            id,
            group: request.group,
            index,
            family,
            max_new_tokens: request.max_new_tokens,
            stop_tokens: Arc::clone(&request.stop_tokens),
            prompt_tokens: request.prompt.len(),
            turn_start: request.prompt.len(),
            inherited_rows: 0,
            max_support: request.max_support,
            tokens: request.prompt.to_vec(),
            turns: Vec::new(),
            rollout_logprobs: Vec::new(),
            versions: Vec::new(),
            support: request.max_support.map(|_| SupportRows::default()),
            prompt_logprobs: request.prompt_logprobs.then(Vec::new),
            trace: routes.zip(request.return_routes).map(|(dims, start)| Trace::new(dims, start)),
            n_replayed: 0,
            cached_tokens: 0,
            n_preemptions: 0,
            blocks: Vec::new(),
            computed: 0,
            published: Published::NOTHING,
        }
    }

    /// Takes a rollout up again: to sample on behind its last sampled token or, if it was aborted before this turn's
    /// first, to begin with that one. What it emitted moves in.
    pub(crate) fn resumed(
        (id, family): (SequenceId, SequenceId),
        rollout: Finished,
        limits: &Limits,
        replays: bool,
    ) -> Self {
        let start = rollout.routes_start;
        let mut sequence = Self {
            id,
            group: rollout.group,
            index: rollout.index,
            family,
            max_new_tokens: limits.max_new_tokens,
            stop_tokens: Arc::clone(&limits.stop_tokens),
            prompt_tokens: rollout.prompt_tokens,
            turn_start: rollout.tokens.len() - rollout.n_sampled_in_last_turn(),
            inherited_rows: 0,
            max_support: limits.max_support,
            tokens: rollout.tokens,
            turns: rollout.turns,
            rollout_logprobs: rollout.rollout_logprobs,
            versions: rollout.versions,
            support: rollout.support.or_else(|| limits.max_support.map(|_| SupportRows::default())),
            prompt_logprobs: rollout.prompt_logprobs,
            trace: rollout.routes.map(|rows| Trace::of(start, rows)),
            n_replayed: 0,
            cached_tokens: rollout.cached_tokens,
            n_preemptions: rollout.n_preemptions,
            blocks: Vec::new(),
            computed: 0,
            published: Published::NOTHING,
        };
        sequence.fill_support();
        sequence.drop_unemitted(replays);
        sequence.inherited_rows = sequence.trace_end();
        sequence
    }

    /// Appends tokens that nobody sampled, as the next turn's prompt.
    pub(crate) fn give(&mut self, given: &[TokenId]) {
        let version = *self.versions.last().expect("a turn follows a sampled token");
        self.tokens.extend_from_slice(given);
        self.rollout_logprobs.resize(self.rollout_logprobs.len() + given.len(), 0.0);
        self.versions.resize(self.versions.len() + given.len(), version);
        self.fill_support();
        self.turn_start = self.tokens.len();
    }

    /// Tokens sampled in this turn.
    pub(crate) fn n_sampled(&self) -> usize {
        self.tokens.len() - self.turn_start
    }

    /// Rows under which a logprob was emitted: all before the last sampled token.
    pub(crate) fn emitted_rows(&self) -> usize {
        self.turns.last().map_or(0, |turn| turn.end - 1)
    }

    /// Tokens that must be computed before the next one can be sampled.
    pub(crate) fn n_pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Position after the last route row it has, in the trace or beside the keys and values; 0 without a trace.
    pub(crate) fn trace_end(&self) -> usize {
        self.trace.as_ref().map_or(0, |trace| trace.end().max(self.computed))
    }

    /// The routes of the positions that are replayed; `None` if there are none.
    pub(crate) fn replayed(&self) -> Option<RouteView<'_>> {
        let trace = self.trace.as_ref().filter(|_| self.n_replayed > 0)?;
        Some(trace.view().first(self.n_replayed))
    }

    /// Tokens a prefix hit may cover: never the last, whose logits are needed, nor a row whose logprob is.
    pub(crate) fn max_hit_tokens(&self) -> usize {
        let last = self.tokens.len() - 1;
        self.first_wanted_logprob().map_or(last, |row| row.min(last))
    }

    /// The row after which a prompt logprob is still to be taken.
    pub(crate) fn first_wanted_logprob(&self) -> Option<usize> {
        let held = self.prompt_logprobs.as_ref()?.len();
        (held + 1 < self.prompt_tokens).then_some(held)
    }

    /// Takes over a cached prefix: its blocks, in which its routes lie, and how far it is published.
    pub(crate) fn adopt(&mut self, hit: Hit, block_tokens: usize) {
        self.blocks.extend(hit.blocks.iter().map(|block| block.0));
        self.computed = hit.blocks.len() * block_tokens;
        self.published = Published { n_blocks: hit.blocks.len(), end: hit.end, is_cut: false };
        if self.turns.is_empty() {
            self.cached_tokens = self.computed;
        }
    }

    /// Makes room for all that this turn may sample, so that no tick has to: at most as many tokens as the cache holds.
    pub(crate) fn reserve(&mut self, block_tokens: usize) {
        let n = self.max_new_tokens.saturating_sub(self.n_sampled());
        self.tokens.reserve(n);
        self.rollout_logprobs.reserve(n);
        self.versions.reserve(n);
        if let Some(support) = &mut self.support {
            support.reserve(n, self.max_support.unwrap_or(0));
        }
        let n_blocks = (self.tokens.len() + n).div_ceil(block_tokens);
        self.blocks.reserve(n_blocks.saturating_sub(self.blocks.len()));
    }

    /// Takes over from `leader`, which has just computed the prompt of both, what is not in blocks.
    pub(crate) fn inherit(&mut self, leader: &Self) {
        self.computed = leader.computed;
        self.published = leader.published;
        self.cached_tokens = leader.cached_tokens;
        if let (Some(own), Some(of_leader)) = (&mut self.prompt_logprobs, &leader.prompt_logprobs) {
            own.extend_from_slice(&of_leader[own.len()..]);
        }
    }

    /// Notes that the tokens before `end` are computed, and makes the blocks this filled findable.
    pub(crate) fn settle(&mut self, kv: &mut KvMemory, end: usize) {
        let block_tokens = kv.block_tokens();
        self.computed = end;
        while !self.published.is_cut && (self.published.n_blocks + 1) * block_tokens <= end {
            let at = self.published.n_blocks;
            let tokens = &self.tokens[at * block_tokens..(at + 1) * block_tokens];
            let n_replayed = self.n_replayed.saturating_sub(at * block_tokens).min(block_tokens);
            match kv.publish(self.published.end, tokens, BlockId(self.blocks[at]), n_replayed) {
                Some(end) => self.published = Published { n_blocks: at + 1, end: Some(end), is_cut: false },
                None => self.published.is_cut = true,
            }
        }
    }

    /// Notes what the token that is drawn in this tick was drawn from.
    ///
    /// # Panics
    /// If the request's draws are not truncated, or keep fewer.
    pub(crate) fn record_support(&mut self, kept: &[u32]) {
        let max_support = self.max_support.expect("the draws of the request are truncated");
        assert!(kept.len() <= max_support, "a draw keeps {} tokens, not more than {max_support}", kept.len());
        self.support.as_mut().expect("truncated draws have supports").push(kept);
    }

    /// Gives tokens that were not drawn by this request's truncated draws the support they have: none.
    fn fill_support(&mut self) {
        if let Some(support) = &mut self.support {
            support.fill(self.versions.len());
        }
    }

    /// Appends a sampled token; says why this was the last, if it was.
    pub(crate) fn push(
        &mut self,
        token: TokenId,
        logprob: f32,
        version: PolicyVersion,
    ) -> Option<FinishReason> {
        let position = self.tokens.len();
        match self.turns.last_mut() {
            Some(turn) if position > self.turn_start => turn.end = position + 1,
            _ => self.turns.push(position..position + 1),
        }
        self.tokens.push(token);
        self.rollout_logprobs.push(logprob);
        self.versions.push(version);
        self.check_support(token);
        if self.stop_tokens.contains(&token) {
            Some(FinishReason::Stop)
        } else {
            (self.n_sampled() == self.max_new_tokens).then_some(FinishReason::Length)
        }
    }

    /// Asserts that the support of `token`, which was sampled last, is there.
    fn check_support(&mut self, token: TokenId) {
        if self.max_support.is_none() {
            return self.fill_support();
        }
        let support = self.support.as_ref().expect("truncated draws have supports");
        assert_eq!(support.rows(), self.versions.len(), "a truncated draw whose support was not recorded");
        let last = support.last().unwrap_or_default();
        assert!(last.binary_search(&token).is_ok(), "token {token} was not drawn from its support");
    }

    /// Copies into the trace what it lacks of the rows of computed positions.
    ///
    /// While a sequence holds its blocks, their rows are as safe as its keys and values: nobody can write them, not even
    /// the sequence itself a second time. Whoever gives the blocks up or reads the trace copies them first, once and in
    /// whole blocks; a decode tick copies nothing.
    ///
    /// # Panics
    /// If such a row is not readable: what was never recorded must not be taken for expert 0.
    pub(crate) fn keep_routes(&mut self, kv: &KvMemory) {
        let Some(trace) = &mut self.trace else { return };
        trace.reserve(self.computed.saturating_sub(trace.end()));
        while trace.end() < self.computed {
            let (at, first) = (trace.end() / kv.block_tokens(), trace.end() % kv.block_tokens());
            let end = (self.computed - at * kv.block_tokens()).min(kv.block_tokens());
            let rows = kv.routes(BlockId(self.blocks[at]), first..end);
            trace.append(rows.expect("every computed slot has a readable row"));
        }
    }

    /// Gives up the resident half. The tail goes first, so that eviction shortens a cached prefix from its end.
    pub(crate) fn release_blocks(&mut self, kv: &mut KvMemory) {
        self.keep_routes(kv);
        for block in self.blocks.drain(..).rev() {
            kv.release(BlockId(block));
        }
        self.computed = 0;
        self.published = Published::NOTHING;
    }

    /// Forgets the rows under which no logprob was emitted, and the prompt logprobs of who sampled nothing: they are
    /// of weights that will not sample the next token. Those that are left are replayed from now on, if anything is and they
    /// are of all positions from 0 on: nobody can replay a part.
    pub(crate) fn drop_unemitted(&mut self, replays: bool) {
        assert!(self.blocks.is_empty(), "rows of resident tokens are needed");
        let end = self.emitted_rows();
        let is_whole = self.trace.as_ref().is_some_and(|trace| trace.start() == 0);
        self.n_replayed = if replays && is_whole { end } else { 0 };
        if let Some(trace) = &mut self.trace {
            trace.truncate(end);
        }
        if self.turns.is_empty() {
            self.cached_tokens = 0;
            if let Some(logprobs) = &mut self.prompt_logprobs {
                logprobs.clear();
            }
        }
    }

    pub(crate) fn finish(mut self, finish: FinishReason) -> Finished {
        // The last token of a prompt that was computed for its own sake is the only last token with a row. Another is
        // there only if a tick was given up after its routes were recorded.
        let max_rows = self.tokens.len() - usize::from(finish == FinishReason::Abort);
        if let Some(trace) = &mut self.trace {
            trace.truncate(max_rows);
        }
        let routes_start = self.trace.as_ref().map_or(0, Trace::start);
        if let Some(support) = &mut self.support {
            support.truncate(self.versions.len());
        }
        Finished {
            sequence: self.id,
            group: self.group,
            index: self.index,
            new_rows: self.trace_end().saturating_sub(self.inherited_rows.max(routes_start)),
            tokens: self.tokens,
            prompt_tokens: self.prompt_tokens,
            turns: self.turns,
            rollout_logprobs: self.rollout_logprobs,
            versions: self.versions,
            support: self.support,
            routes: self.trace.map(Trace::into_rows),
            routes_start,
            prompt_logprobs: self.prompt_logprobs,
            finish,
            cached_tokens: self.cached_tokens,
            n_preemptions: self.n_preemptions,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIMS: RouteDims = RouteDims { n_layers: 1, top_k: 1, n_experts: 4 };

    fn sequence(prompt_logprobs: bool) -> Sequence {
        let request = Request {
            group: GroupId(0),
            prompt: [1, 2, 3].map(TokenId).into(),
            max_new_tokens: 2,
            stop_tokens: [TokenId(0)].into(),
            prompt_logprobs,
            max_support: None,
            return_routes: Some(0),
        };
        Sequence::new((SequenceId(0), SequenceId(0)), 0, &request, Some(DIMS))
    }

    #[test]
    fn a_stop_token_ends_before_the_length_does() {
        let mut both = sequence(false);
        assert_eq!(both.push(TokenId(4), -1.0, PolicyVersion(1)), None);
        assert_eq!(both.push(TokenId(0), -2.0, PolicyVersion(2)), Some(FinishReason::Stop));
        assert_eq!(both.versions, [PolicyVersion(1), PolicyVersion(2)]);
    }

    #[test]
    fn a_hit_leaves_the_rows_whose_logits_are_needed() {
        assert_eq!(sequence(false).max_hit_tokens(), 2, "the last token's");
        let mut wanting = sequence(true);
        assert_eq!((wanting.max_hit_tokens(), wanting.first_wanted_logprob()), (0, Some(0)));
        wanting.prompt_logprobs = Some(vec![-1.0]);
        assert_eq!((wanting.max_hit_tokens(), wanting.first_wanted_logprob()), (1, Some(1)));
        wanting.prompt_logprobs = Some(vec![-1.0, -2.0]);
        assert_eq!((wanting.max_hit_tokens(), wanting.first_wanted_logprob()), (2, None));
    }

    #[test]
    fn the_trace_takes_only_the_rows_it_lacks_and_only_of_computed_positions() {
        let mut kv = KvMemory::new(2, 2, true, Some(DIMS));
        let blocks = vec![kv.allocate().unwrap(), kv.allocate().unwrap()];
        kv.record(blocks[0], 0, &[2, 3]);
        kv.record(blocks[1], 0, &[0, 1]);
        let mut again = sequence(false);
        again.trace.as_mut().unwrap().append(&[1]);
        again.adopt(Hit { blocks, end: None }, 2);
        assert_eq!((again.computed, again.cached_tokens, &again.blocks[..]), (4, 4, &[0, 1][..]));
        again.computed = 3;
        assert_eq!(again.trace_end(), 3);
        again.keep_routes(&kv);
        again.release_blocks(&mut kv);
        assert_eq!(
            again.trace.clone().unwrap().into_rows().view().bytes(),
            [1, 3, 0],
            "row 0 was written before"
        );
        assert_eq!(again.trace_end(), 3);
    }

    #[test]
    fn a_computed_slot_without_a_row_is_a_bug_and_not_a_row_of_zeros() {
        let mut kv = KvMemory::new(1, 2, true, Some(DIMS));
        let block = kv.allocate().unwrap();
        kv.record(block, 0, &[2]);
        let mut hole = sequence(false);
        hole.adopt(Hit { blocks: vec![block], end: None }, 2);
        let kept = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| hole.keep_routes(&kv)));
        assert!(kept.is_err());
        assert_eq!(hole.trace.unwrap().end(), 0);
    }

    #[test]
    fn preemption_gives_up_what_is_resident_and_nothing_emitted() {
        let mut kv = KvMemory::new(2, 2, true, Some(DIMS));
        let mut preempted = sequence(false);
        let full = kv.allocate().unwrap();
        kv.record(full, 0, &[1, 1]);
        let partly = kv.allocate().unwrap();
        kv.record(partly, 0, &[2]);
        preempted.blocks = vec![full.0, partly.0];
        preempted.settle(&mut kv, 3);
        preempted.push(TokenId(4), -1.0, PolicyVersion(1));
        preempted.release_blocks(&mut kv);
        assert_eq!((preempted.computed, preempted.n_pending(), preempted.trace_end()), (0, 4, 3));
        assert_eq!(preempted.trace.clone().unwrap().into_rows().view().bytes(), [1, 1, 2]);
        assert_eq!((kv.n_idle(), kv.n_available()), (1, 2), "the full block can be found again");
        assert_eq!(kv.hit(&preempted.tokens, 3, &[]).blocks, [full]);
    }
}
