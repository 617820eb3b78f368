//! How one tick is planned: share the budget, secure blocks, admit, write the rows down, fork.

use r3_core::ids::{BlockId, SequenceId};
use r3_core::routes::RouteView;

use crate::plan::{Chunk, Logits, SampleSite};
use crate::scheduler::{Fork, Running, Scheduler};

impl Scheduler {
    /// Plans the next tick into [`Self::tick_plan`]. `false` if there is nothing to do; while
    /// [`Self::has_work`], there is.
    ///
    /// # Panics
    /// If the last tick was not advanced.
    pub fn plan(&mut self) -> bool {
        self.plan_within(self.config.max_batch_tokens)
    }

    /// [`Self::plan`] for a tick of at most `max_tokens` tokens, whatever the others are.
    ///
    /// # Panics
    /// If the last tick was not advanced, or `max_tokens` is 0.
    pub fn plan_within(&mut self, max_tokens: usize) -> bool {
        assert!(!self.is_in_tick, "the last tick was not advanced");
        assert!(max_tokens > 0, "a tick of no tokens gets nobody on");
        self.plan.clear();
        self.forks.clear();
        self.is_recorded = false;
        let mut budget = self.share(max_tokens);
        // Every grant may have gone to sequences that are preempted now. The others then get another turn.
        while self.secure_blocks() && self.running.iter().all(|running| running.granted == 0) {
            budget = self.share(max_tokens);
        }
        self.admit(budget);
        self.write_rows();
        self.sample_and_fork();
        self.is_in_tick = !self.plan.chunks.is_empty();
        self.is_in_tick
    }

    /// Grants `budget` tokens to what runs: one to each decoding sequence, the rest to prefills, both oldest first.
    /// Returns what is left.
    fn share(&mut self, mut budget: usize) -> usize {
        for is_prefill in [false, true] {
            for running in &mut self.running {
                let n_pending = self.sequences[&running.id].n_pending();
                if (n_pending > 1) == is_prefill {
                    running.granted = n_pending.min(budget);
                    budget -= running.granted;
                }
            }
        }
        budget
    }

    /// Gives everyone the blocks its grant fills, oldest first, and takes them from the youngest when none is free.
    /// Returns whether it had to.
    fn secure_blocks(&mut self) -> bool {
        let n_running = self.running.len();
        let mut at = 0;
        while let Some(&Running { id, granted }) = self.running.get(at) {
            let sequence = &self.sequences[&id];
            let n_missing = self.blocks_for(sequence.computed + granted) - sequence.blocks.len();
            if self.extend_table(id, n_missing) {
                at += 1;
            } else {
                // The youngest has no blocks of this tick yet, unless it is the one that asks.
                self.preempt_youngest();
            }
        }
        self.running.len() < n_running
    }

    /// Takes all blocks from the youngest running sequence. It keeps what it emitted and waits at the front.
    fn preempt_youngest(&mut self) {
        let Running { id, .. } = self.running.pop().expect("somebody asked for a block");
        assert!(!self.running.is_empty(), "a request that runs alone always fits");
        self.give_up_blocks(id);
        self.waiting.push_front(id);
        self.counters.n_preemptions += 1;
    }

    /// Starts waiting sequences in their order while budget, blocks and `max_running` allow; those whose prompt is being
    /// computed by another are passed over.
    fn admit(&mut self, mut budget: usize) {
        let mut at = 0;
        while budget > 0
            && let Some(&id) = self.waiting.get(at)
        {
            if self.is_follower(id) {
                at += 1;
                continue;
            }
            if self.running.len() + self.n_expected_forks() >= self.config.max_running {
                break;
            }
            let Some(granted) = self.start(id, budget) else { break };
            budget -= granted;
            self.waiting.remove(at);
        }
    }

    /// Whether another sequence is computing this one's prompt.
    fn is_follower(&self, id: SequenceId) -> bool {
        let sequence = self.get(id);
        sequence.n_sampled() == 0
            && self.families.get(&sequence.family).is_some_and(|family| family.leader.is_some())
    }

    /// Members that will join when the prompts being computed are done; their places are kept.
    fn n_expected_forks(&self) -> usize {
        let is_leader = |&Running { id, .. }: &Running| {
            let family = self.families.get(&self.sequences[&id].family)?;
            (family.leader == Some(id)).then_some(family.unstarted.len())
        };
        self.running.iter().filter_map(is_leader).sum()
    }

    /// Starts a sequence behind the longest prefix the cache has, and returns its grant; or leaves it as it was, if
    /// all its tokens do not fit now.
    fn start(&mut self, id: SequenceId, budget: usize) -> Option<usize> {
        let block_tokens = self.config.block_tokens;
        let sequence = self.sequences.get_mut(&id).expect("waiting sequences exist");
        let replayed = sequence.replayed().map_or(&[][..], RouteView::bytes);
        let hit = self.kv.hit(&sequence.tokens, sequence.max_hit_tokens(), replayed);
        let n_hit = hit.blocks.len();
        let n_missing = sequence.tokens.len().div_ceil(block_tokens) - n_hit;
        if self.kv.n_available() < n_missing + self.running.len() {
            hit.blocks.into_iter().rev().for_each(|block| self.kv.release(block));
            return None;
        }
        sequence.adopt(hit, block_tokens);
        let granted = sequence.n_pending().min(budget);
        let n_blocks = (sequence.computed + granted).div_ceil(block_tokens) - n_hit;
        if sequence.n_sampled() == 0
            && let Some(family) = self.families.get_mut(&sequence.family)
        {
            family.leader = Some(id);
            family.unstarted.retain(|&member| member != id);
        }
        self.counters.n_hits += u64::from(n_hit > 0);
        self.counters.hit_tokens += (n_hit * block_tokens) as u64;
        assert!(
            self.extend_table(id, n_blocks),
            "there are {n_missing} blocks, of which {n_blocks} are taken"
        );
        self.run(id, granted);
        Some(granted)
    }

    /// Writes the granted tokens down, decoding sequences first.
    fn write_rows(&mut self) {
        let block_tokens = self.config.block_tokens;
        for is_prefill in [false, true] {
            for &Running { id, granted } in &self.running {
                let sequence = &self.sequences[&id];
                if granted == 0 || (sequence.n_pending() > 1) != is_prefill {
                    continue;
                }
                let (start, end) = (sequence.computed, sequence.computed + granted);
                let first_row = self.plan.n_tokens();
                for block in &sequence.blocks[start / block_tokens..] {
                    assert!(
                        self.kv.is_private(BlockId(*block)),
                        "sequence {id} would write into a shared block"
                    );
                }
                for position in start..end {
                    let slot = sequence.blocks[position / block_tokens] as usize * block_tokens
                        + position % block_tokens;
                    self.plan.slots.push(u32::try_from(slot).expect("slot ids are u32"));
                    self.plan.positions.push(u32::try_from(position).expect("a position is below the slots"));
                }
                self.plan.tokens.extend_from_slice(&sequence.tokens[start..end]);
                let wants = match sequence.first_wanted_logprob() {
                    Some(row) if row < end => Logits::All,
                    _ if end == sequence.tokens.len() && sequence.max_new_tokens > 0 => Logits::Last,
                    _ => Logits::None,
                };
                let n_replayed = sequence.n_replayed.clamp(start, end) - start;
                let chunk = Chunk { sequence: id, start, n_tokens: granted, first_row, wants, n_replayed };
                self.plan.chunks.push(chunk);
            }
        }
    }

    /// Lets every sequence sample whose last token is computed this tick; and, where that ends a group's prompt, the
    /// waiting members from the same row.
    fn sample_and_fork(&mut self) {
        for at in 0..self.plan.chunks.len() {
            let Chunk { sequence: id, start, n_tokens, first_row, .. } = self.plan.chunks[at];
            let sequence = &self.sequences[&id];
            if start + n_tokens < sequence.tokens.len() {
                continue;
            }
            let is_prompt_done = sequence.n_sampled() == 0;
            let (family, row) = (sequence.family, first_row + n_tokens - 1);
            self.sample(id, row);
            if is_prompt_done {
                while let Some(follower) = self.fork(id) {
                    self.sample(follower, row);
                }
                if let Some(of_prompt) = self.families.get_mut(&family) {
                    of_prompt.leader = None;
                    if of_prompt.unstarted.is_empty() {
                        self.families.remove(&family);
                    }
                }
            }
        }
    }

    fn sample(&mut self, sequence: SequenceId, row: usize) {
        if self.sequences[&sequence].max_new_tokens > 0 {
            self.plan.samples.push(SampleSite { sequence, row });
        }
    }

    /// Starts the next member behind the prompt that `leader` completes this tick: full blocks are shared, the partly
    /// filled one is copied. `None` if nobody waits or there is no room.
    fn fork(&mut self, leader: SequenceId) -> Option<SequenceId> {
        let block_tokens = self.config.block_tokens;
        let source = &self.sequences[&leader];
        let family = self.families.get_mut(&source.family)?;
        let &follower = family.unstarted.front()?;
        let n_shared = source.prompt_tokens / block_tokens;
        let n_copied = source.prompt_tokens % block_tokens;
        let n_missing = usize::from(n_copied > 0);
        if self.running.len() >= self.config.max_running
            || self.kv.n_available() < n_missing + self.running.len()
        {
            return None;
        }
        family.unstarted.pop_front();
        let mut table = Vec::with_capacity(n_shared + n_missing);
        table.extend_from_slice(&source.blocks[..n_shared]);
        table.iter().for_each(|&block| self.kv.hold(BlockId(block)));
        if n_copied > 0 {
            let tail = self.kv.allocate().expect("a block is available");
            let n_copied = u32::try_from(n_copied).expect("a block holds fewer slots than there are");
            let n_slots = u32::try_from(block_tokens).expect("slot ids are u32");
            let copies = &mut self.plan.copies_after_forward;
            copies.from.extend((0..n_copied).map(|slot| source.blocks[n_shared] * n_slots + slot));
            copies.to.extend((0..n_copied).map(|slot| tail.0 * n_slots + slot));
            table.push(tail.0);
        }
        self.sequences.get_mut(&follower).expect("waiting sequences exist").blocks = table;
        let at = self.waiting.iter().position(|&id| id == follower).expect("unstarted members wait");
        self.waiting.remove(at);
        self.forks.push(Fork { leader, follower });
        self.run(follower, 0);
        Some(follower)
    }

    /// Puts a sequence among the running, by age.
    fn run(&mut self, id: SequenceId, granted: usize) {
        let sequence = self.sequences.get_mut(&id).expect("whoever starts exists");
        sequence.reserve(self.config.block_tokens);
        let at = self.running.partition_point(|running| running.id < id);
        self.running.insert(at, Running { id, granted });
    }

    /// Adds `n` blocks to a table, as many as there are. `false` if they ran out.
    fn extend_table(&mut self, id: SequenceId, n: usize) -> bool {
        let sequence = self.sequences.get_mut(&id).expect("running sequences exist");
        for _ in 0..n {
            let Some(block) = self.kv.allocate() else { return false };
            sequence.blocks.push(block.0);
        }
        true
    }

    /// Blocks that hold `n_tokens` tokens.
    fn blocks_for(&self, n_tokens: usize) -> usize {
        n_tokens.div_ceil(self.config.block_tokens)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use r3_core::ids::{GroupId, PolicyVersion, TokenId};

    use super::*;
    use crate::config::SchedulerConfig;
    use crate::request::{Request, Sample};

    const CONFIG: SchedulerConfig = SchedulerConfig {
        block_tokens: 4,
        n_blocks: 16,
        max_running: 8,
        max_batch_tokens: 8,
        prefix_cache: true,
        routes: None,
        replays: false,
    };

    fn scheduler(config: SchedulerConfig) -> Scheduler {
        Scheduler::new(config).unwrap()
    }

    /// A prompt of `first..first + n`.
    fn request(first: u32, n: u32, max_new_tokens: usize) -> Request {
        Request {
            group: GroupId(u64::from(first)),
            prompt: (first..first + n).map(TokenId).collect(),
            max_new_tokens,
            stop_tokens: Arc::new([]),
            prompt_logprobs: false,
            max_support: None,
            return_routes: None,
        }
    }

    /// One tick in which every site samples token 0. Returns (sequence, start, tokens) of the chunks.
    fn tick(scheduler: &mut Scheduler) -> Vec<(u64, usize, usize)> {
        assert!(scheduler.plan());
        let chunks = scheduler.tick_plan().chunks.iter();
        let chunks = chunks.map(|chunk| (chunk.sequence.0, chunk.start, chunk.n_tokens)).collect();
        let sites = scheduler.tick_plan().samples.iter();
        let samples: Vec<_> =
            sites.map(|site| Sample { sequence: site.sequence, token: TokenId(0), logprob: 0.0 }).collect();
        scheduler.advance(&samples, PolicyVersion(0));
        scheduler.check();
        chunks
    }

    fn sampling(scheduler: &Scheduler) -> Vec<(u64, usize)> {
        scheduler.tick_plan().samples.iter().map(|site| (site.sequence.0, site.row)).collect()
    }

    #[test]
    fn decoding_comes_first_and_prefill_takes_what_is_left_in_order() {
        let mut scheduler = scheduler(CONFIG);
        scheduler.submit(&request(10, 3, 9)).unwrap();
        scheduler.submit(&request(20, 7, 9)).unwrap();
        scheduler.submit(&request(30, 6, 9)).unwrap();
        assert_eq!(tick(&mut scheduler), [(0, 0, 3), (1, 0, 5)]);
        assert_eq!(sampling(&scheduler), [(0, 2)]);
        assert_eq!(tick(&mut scheduler), [(0, 3, 1), (1, 5, 2), (2, 0, 5)]);
        assert_eq!(tick(&mut scheduler), [(0, 4, 1), (1, 7, 1), (2, 5, 1)]);
        assert_eq!(sampling(&scheduler), [(0, 0), (1, 1), (2, 2)]);
    }

    #[test]
    fn rows_name_token_position_and_slot() {
        let mut scheduler = scheduler(SchedulerConfig { block_tokens: 2, ..CONFIG });
        scheduler.submit(&request(10, 3, 2)).unwrap();
        tick(&mut scheduler);
        let plan = scheduler.tick_plan();
        assert_eq!(plan.tokens, [10, 11, 12].map(TokenId));
        assert_eq!((&plan.positions[..], &plan.slots[..]), (&[0, 1, 2][..], &[0, 1, 2][..]));
        assert_eq!(scheduler.block_table(SequenceId(0)), [0, 1]);
        tick(&mut scheduler);
        assert_eq!(
            (&scheduler.tick_plan().positions[..], &scheduler.tick_plan().slots[..]),
            (&[3][..], &[3][..])
        );
    }

    #[test]
    fn a_group_computes_its_prompt_once_and_samples_from_one_row() {
        let mut scheduler = scheduler(CONFIG);
        scheduler.submit_group(&request(10, 6, 3), 3).unwrap();
        scheduler.submit(&request(20, 4, 3)).unwrap();
        assert_eq!(tick(&mut scheduler), [(0, 0, 6), (3, 0, 2)]);
        assert_eq!(sampling(&scheduler), [(0, 5), (1, 5), (2, 5)]);
        let copies = &scheduler.tick_plan().copies_after_forward;
        assert_eq!((&copies.from[..], &copies.to[..]), (&[4, 5, 4, 5][..], &[12, 13, 16, 17][..]));
        assert_eq!(
            scheduler.block_table(SequenceId(1)),
            [0, 3],
            "the full block is shared, the other is its own"
        );
        assert_eq!(tick(&mut scheduler), [(0, 6, 1), (1, 6, 1), (2, 6, 1), (3, 2, 2)]);
        assert_eq!(scheduler.stats().computed_tokens, 6 + 2 + 3 + 2);
        assert_eq!(scheduler.stats().forked_tokens, 12);
    }

    #[test]
    fn places_of_a_group_are_kept_while_its_prompt_is_computed() {
        let mut scheduler = scheduler(SchedulerConfig { max_running: 3, ..CONFIG });
        scheduler.submit_group(&request(10, 9, 3), 3).unwrap();
        scheduler.submit(&request(20, 4, 3)).unwrap();
        assert_eq!(tick(&mut scheduler), [(0, 0, 8)]);
        assert_eq!(tick(&mut scheduler), [(0, 8, 1)]);
        assert_eq!((scheduler.n_running(), scheduler.n_waiting()), (3, 1));
    }

    #[test]
    fn members_without_a_place_follow_through_the_prefix_cache() {
        let mut scheduler = scheduler(SchedulerConfig { max_running: 2, ..CONFIG });
        scheduler.submit_group(&request(10, 8, 2), 4).unwrap();
        assert_eq!(tick(&mut scheduler), [(0, 0, 8)]);
        assert_eq!(tick(&mut scheduler), [(0, 8, 1), (1, 8, 1)]);
        assert_eq!(tick(&mut scheduler), [(2, 4, 4)], "its last token is computed again, for its logits");
        assert_eq!(sampling(&scheduler), [(2, 3), (3, 3)]);
    }

    #[test]
    fn without_its_leader_a_group_finds_another() {
        let mut scheduler = scheduler(CONFIG);
        scheduler.submit_group(&request(10, 12, 2), 3).unwrap();
        assert_eq!(tick(&mut scheduler), [(0, 0, 8)]);
        assert!(scheduler.abort(SequenceId(0)));
        scheduler.check();
        assert_eq!(tick(&mut scheduler), [(1, 8, 4)]);
        assert_eq!(sampling(&scheduler), [(1, 3), (2, 3)]);
    }

    #[test]
    fn a_hit_never_covers_the_whole_prompt() {
        let mut scheduler = scheduler(CONFIG);
        for expected in [(0, 0, 8), (1, 4, 4)] {
            scheduler.submit(&request(10, 8, 1)).unwrap();
            assert_eq!(tick(&mut scheduler), [expected]);
        }
    }

    #[test]
    fn a_request_for_prompt_logprobs_computes_its_rows() {
        let mut scheduler = scheduler(CONFIG);
        scheduler.submit(&request(10, 6, 1)).unwrap();
        tick(&mut scheduler);
        let sequence = scheduler.submit(&Request { prompt_logprobs: true, ..request(10, 6, 1) }).unwrap();
        assert!(scheduler.plan());
        let chunk = scheduler.tick_plan().chunks[0];
        assert_eq!((chunk.start, chunk.n_tokens, chunk.wants), (0, 6, Logits::All));
        scheduler.record_prompt_logprobs(sequence, 0, &[-1.0, -2.0, -3.0, -4.0, -5.0]);
        scheduler.advance(&[Sample { sequence, token: TokenId(0), logprob: 0.0 }], PolicyVersion(0));
        let logprobs = scheduler.finished.pop_back().unwrap().prompt_logprobs;
        assert_eq!(logprobs, Some(vec![-1.0, -2.0, -3.0, -4.0, -5.0]));
    }

    #[test]
    fn the_youngest_is_preempted_and_goes_on_where_it_was() {
        let mut scheduler = scheduler(SchedulerConfig { n_blocks: 4, ..CONFIG });
        scheduler.submit(&request(10, 4, 9)).unwrap();
        scheduler.submit(&request(20, 4, 9)).unwrap();
        assert_eq!(tick(&mut scheduler), [(0, 0, 4), (1, 0, 4)]);
        for position in 4..8 {
            assert_eq!(tick(&mut scheduler), [(0, position, 1), (1, position, 1)]);
        }
        for position in 8..12 {
            assert_eq!(
                tick(&mut scheduler),
                [(0, position, 1)],
                "both need a third block, and four there are"
            );
        }
        assert_eq!(scheduler.sequence(SequenceId(1)).position, 9, "what it sampled stays");
        assert_eq!(tick(&mut scheduler), [(1, 4, 5)], "its second block was evicted, its first is a hit");
        assert_eq!(scheduler.sequence(SequenceId(1)).position, 10);
        assert_eq!(scheduler.stats().n_preemptions, 1);
        assert_eq!(scheduler.get(SequenceId(1)).cached_tokens, 0, "it had computed that prompt itself");
    }

    #[test]
    fn the_preempted_waits_before_all_others_and_nobody_passes_it() {
        let mut scheduler = scheduler(SchedulerConfig { n_blocks: 6, prefix_cache: false, ..CONFIG });
        scheduler.submit(&request(10, 8, 9)).unwrap();
        tick(&mut scheduler);
        scheduler.submit(&request(20, 8, 9)).unwrap();
        tick(&mut scheduler);
        tick(&mut scheduler);
        assert_eq!(scheduler.stats().n_held_blocks, 5);
        let taken = scheduler.kv.allocate();
        scheduler.submit(&request(30, 1, 1)).unwrap();
        assert!(scheduler.plan());
        assert_eq!(
            scheduler.tick_plan().chunks.len(),
            1,
            "1 lacks a block and yields two, but 2 does not start"
        );
        assert_eq!(scheduler.waiting, [1, 2].map(SequenceId));
        scheduler.kv.release(taken.unwrap());
    }

    #[test]
    fn a_newcomer_leaves_a_block_for_everyone_who_runs() {
        for (n_blocks, n_running) in [(2, 1), (3, 2)] {
            let mut scheduler = scheduler(SchedulerConfig { n_blocks, ..CONFIG });
            scheduler.submit(&request(10, 4, 4)).unwrap();
            scheduler.submit(&request(20, 4, 4)).unwrap();
            tick(&mut scheduler);
            assert_eq!(scheduler.n_running(), n_running, "{n_blocks} blocks");
        }
        for (n_blocks, n_running) in [(3, 1), (4, 2)] {
            let mut scheduler = scheduler(SchedulerConfig { n_blocks, ..CONFIG });
            scheduler.submit_group(&request(10, 6, 4), 2).unwrap();
            tick(&mut scheduler);
            assert_eq!(scheduler.n_running(), n_running, "{n_blocks} blocks, of which a fork needs one");
        }
    }

    #[test]
    fn a_fork_counts_as_cached_what_its_leader_found_in_the_cache() {
        let mut scheduler = scheduler(CONFIG);
        for cached_tokens in [0, 4] {
            scheduler.submit_group(&request(10, 6, 1), 3).unwrap();
            tick(&mut scheduler);
            let ends = std::iter::from_fn(|| scheduler.take_finished());
            assert_eq!(ends.map(|end| end.cached_tokens).collect::<Vec<_>>(), [cached_tokens; 3]);
        }
    }

    #[test]
    fn a_tick_whose_every_grant_was_preempted_is_shared_out_again() {
        let mut scheduler = scheduler(SchedulerConfig { max_batch_tokens: 5, ..CONFIG });
        scheduler.submit(&request(10, 12, 1)).unwrap();
        scheduler.submit(&request(20, 4, 9)).unwrap();
        // The older comes late, as a group member does that had no place.
        scheduler.waiting.swap(0, 1);
        assert_eq!(tick(&mut scheduler), [(0, 0, 1), (1, 0, 4)]);
        while scheduler.kv.allocate().is_some() {}
        scheduler.config.max_batch_tokens = 1;
        assert!(scheduler.plan(), "1 takes the budget, lacks a block and yields; 0 goes on");
        assert_eq!(scheduler.tick_plan().chunks[0].sequence, SequenceId(0));
    }

    #[test]
    fn whoever_wants_logits_says_which() {
        let mut scheduler = scheduler(SchedulerConfig { max_batch_tokens: 4, ..CONFIG });
        scheduler.submit(&request(10, 6, 1)).unwrap();
        scheduler.submit(&request(20, 2, 0)).unwrap();
        tick(&mut scheduler);
        assert_eq!(scheduler.tick_plan().chunks[0].wants, Logits::None);
        tick(&mut scheduler);
        let wants: Vec<_> = scheduler.tick_plan().chunks.iter().map(|chunk| chunk.wants).collect();
        assert_eq!(wants, [Logits::Last, Logits::None], "nothing is sampled for the second");
        assert_eq!(sampling(&scheduler), [(0, 1)]);
    }
}
