//! What must hold between any two calls.

use std::collections::BTreeSet;

use r3_core::ids::{BlockId, SequenceId};
use r3_core::rollout::FinishReason;
use r3_core::routes::RouteView;

use crate::request::Finished;
use crate::scheduler::Scheduler;
use crate::sequence::Sequence;

impl Scheduler {
    /// Asserts every invariant of the scheduler, between ticks. For tests: it visits all there is.
    ///
    /// 1. Every block is in exactly one state: free, idle in the prefix cache, or held; its holders are the tables
    ///    that name it.
    /// 2. The prefix index holds full blocks of the current weight epoch only, under the stamp they were handed out
    ///    with, and the tokens it knows are those of every sequence that holds the block.
    /// 3. A sequence either runs or waits. Who waits holds nothing; who runs holds exactly the blocks its computed
    ///    tokens fill, and nobody else holds or finds the block it writes next.
    /// 4. Running sequences are in order of age and at most `max_running`.
    /// 5. Every computed slot has a readable route row.
    /// 6. A sequence that sampled in this turn has rows, in its trace or behind that in its slots, up to `T - 1`, one logprob, one version and, if its draws are truncated, one support per token after
    ///    the prompt, turns that ascend, and is not done. No row under which a logprob was emitted is ever missing.
    /// 7. A family exists while a member waits for or computes the shared prompt; its leader runs.
    /// 8. A finished request has the rows of its contract: up to `T - 1`, or to `T` if nothing was to be sampled.
    /// 9. Without routes there is no route memory and no trace.
    ///
    /// # Panics
    /// If one does not hold.
    pub fn check(&self) {
        assert!(!self.is_in_tick, "the invariants hold between ticks");
        let mut holders = vec![0; self.config.n_blocks];
        for sequence in self.sequences.values() {
            for &block in &sequence.blocks {
                holders[BlockId(block).index()] += 1;
            }
            self.check_sequence(sequence);
        }
        self.kv.check(&holders);
        self.check_queues();
        self.check_families();
        self.finished.iter().for_each(|finished| self.check_finished(finished));
        assert_eq!(self.config.routes.is_none(), self.route_bytes() == 0, "route memory without routes");
    }

    fn check_sequence(&self, sequence: &Sequence) {
        let id = sequence.id;
        let block_tokens = self.config.block_tokens;
        assert_eq!(sequence.blocks.len(), sequence.computed.div_ceil(block_tokens), "sequence {id}: blocks");
        for (at, &block) in sequence.blocks.iter().enumerate() {
            let n_filled = (sequence.computed - at * block_tokens).min(block_tokens);
            let tokens = &sequence.tokens[at * block_tokens..][..n_filled];
            let indexed = self.kv.indexed_tokens(BlockId(block));
            assert!(
                indexed.is_none_or(|indexed| indexed == tokens),
                "block {block} is found by other tokens"
            );
            let is_private = self.kv.is_private(BlockId(block));
            assert!(n_filled == block_tokens || is_private, "block {block} is written by {id}, but shared");
            assert!(self.kv.is_readable(BlockId(block), n_filled), "block {block} of {id} lacks a route");
        }
        assert!(sequence.computed < sequence.tokens.len(), "sequence {id} has nothing to compute");
        assert!(sequence.trace.is_none() || self.config.routes.is_some(), "sequence {id}: trace");
        if let Some(trace) = &sequence.trace {
            let is_empty = trace.start() == trace.end();
            let is_complete = sequence.trace_end() == trace.start().max(sequence.tokens.len() - 1);
            assert!(
                sequence.trace_end() >= sequence.emitted_rows(),
                "sequence {id} lacks rows it emitted under"
            );
            assert!(is_complete || sequence.n_sampled() == 0, "sequence {id} sampled without its routes");
            assert!(
                is_empty || trace.end() < sequence.tokens.len(),
                "sequence {id}: a row of what was never fed"
            );
        }
        let n_after_prompt = sequence.tokens.len() - sequence.prompt_tokens;
        assert_eq!(sequence.rollout_logprobs.len(), n_after_prompt, "sequence {id}: logprobs");
        assert_eq!(sequence.versions.len(), n_after_prompt, "sequence {id}: versions");
        if let Some(support) = &sequence.support {
            let checked = support.view().check(&sequence.tokens[sequence.prompt_tokens..], None);
            assert_eq!(checked, Ok(()), "sequence {id}: supports");
        }
        let is_ascending = sequence.turns.windows(2).all(|pair| pair[0].end < pair[1].start);
        let is_inside = sequence.turns.iter().all(|turn| {
            !turn.is_empty() && turn.start >= sequence.prompt_tokens && turn.end <= sequence.tokens.len()
        });
        assert!(is_ascending && is_inside, "sequence {id}: turns {:?}", sequence.turns);
        assert!(sequence.n_sampled() < sequence.max_new_tokens.max(1), "sequence {id} is done");
    }

    fn check_queues(&self) {
        assert!(self.running.is_sorted_by_key(|running| running.id), "running sequences are in order of age");
        assert!(self.running.len() <= self.config.max_running, "{} sequences run", self.running.len());
        let running: BTreeSet<_> = self.running.iter().map(|running| running.id).collect();
        let waiting: BTreeSet<_> = self.waiting.iter().copied().collect();
        assert_eq!(running.len() + waiting.len(), self.running.len() + self.waiting.len(), "queued twice");
        let queued: BTreeSet<_> = running.union(&waiting).copied().collect();
        assert_eq!(queued.len(), running.len() + waiting.len(), "runs and waits");
        let known: BTreeSet<SequenceId> = self.sequences.keys().copied().collect();
        assert_eq!(queued, known, "every sequence is in one queue");
        for id in waiting {
            assert!(self.get(id).blocks.is_empty(), "sequence {id} waits, but holds blocks");
        }
    }

    fn check_families(&self) {
        for (&key, family) in &self.families {
            assert!(family.leader.is_some() || !family.unstarted.is_empty(), "family {key} is over");
            for &id in family.leader.iter().chain(&family.unstarted) {
                assert_eq!((self.get(id).family, self.get(id).n_sampled()), (key, 0), "sequence {id}");
            }
            if let Some(leader) = family.leader {
                assert!(self.running.iter().any(|running| running.id == leader), "leader {leader} waits");
            }
            let waits = |id: &&SequenceId| self.waiting.contains(id);
            assert_eq!(family.unstarted.iter().filter(waits).count(), family.unstarted.len());
        }
    }

    fn check_finished(&self, finished: &Finished) {
        let (n_tokens, n_after_prompt) = (finished.tokens.len(), finished.rollout_logprobs.len());
        assert_eq!(n_tokens, finished.prompt_tokens + n_after_prompt);
        assert_eq!(n_after_prompt, finished.versions.len());
        assert!(finished.routes.is_none() || self.config.routes.is_some());
        let Some(rows) = finished.view().routes.map(RouteView::rows) else { return };
        assert!(finished.new_rows <= rows);
        let end = finished.routes_start + rows;
        let is_whole = match (finished.n_sampled_in_last_turn(), finished.finish) {
            (0, FinishReason::Abort) => rows == 0 || end < n_tokens,
            (0, _) => end == n_tokens,
            _ => end + 1 == n_tokens,
        };
        assert!(is_whole, "sequence {} has rows to {end} for {n_tokens} tokens", finished.sequence);
    }
}
