//! Blocks taken back while their sequence is on its way: for one that must wait, or for all when the weights change.

use r3_core::ids::SequenceId;

use crate::error::SchedulerError;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Takes all blocks of a running sequence. It keeps what it emitted and waits, in order of age. `false` if it does
    /// not run.
    ///
    /// # Panics
    /// Inside a tick.
    pub fn retract(&mut self, id: SequenceId) -> bool {
        assert!(!self.is_in_tick, "sequences are retracted between ticks");
        let Ok(at) = self.running.binary_search_by_key(&id, |running| running.id) else { return false };
        self.running.remove(at);
        self.give_up_blocks(id);
        let older = self.waiting.iter().take_while(|&&waiting| waiting < id).count();
        self.waiting.insert(older, id);
        self.counters.n_retractions += 1;
        true
    }

    /// Begins weight epoch `epoch`: no block, route row or prefix of an older epoch can be found afterwards.
    ///
    /// Whatever runs is retracted, and all that wait do so in order of age, as if they had been submitted again. What they
    /// emitted stays as it is, since it was sampled under the old weights. Rows under which no logprob was emitted are
    /// dropped: they will be computed again by the weights that sample the next token.
    ///
    /// # Errors
    /// If the epoch does not move forward. Nothing changes then.
    ///
    /// # Panics
    /// Inside a tick.
    pub fn flush(&mut self, epoch: u64) -> Result<(), SchedulerError> {
        assert!(!self.is_in_tick, "a flush happens between ticks");
        if epoch <= self.kv.epoch() {
            return Err(SchedulerError::StaleEpoch { epoch, current: self.kv.epoch() });
        }
        while let Some(running) = self.running.last() {
            self.retract(running.id);
        }
        self.waiting.make_contiguous().sort_unstable();
        for family in self.families.values_mut() {
            family.unstarted.make_contiguous().sort_unstable();
        }
        self.kv.flush(epoch);
        let replays = self.config.replays;
        self.sequences.values_mut().for_each(|sequence| sequence.drop_unemitted(replays));
        Ok(())
    }

    /// Blocks that were ever handed out: so much of the cache has been written, from its beginning on.
    #[must_use]
    pub fn n_touched_blocks(&self) -> usize {
        self.kv.n_touched()
    }

    /// Notes that the cache is going to be another one, in which nothing has been written. To be called behind a flush.
    pub fn renew_cache(&mut self) {
        self.kv.renew();
    }

    /// What a sequence that stops running leaves behind: its blocks, and the lead of its family.
    pub(crate) fn give_up_blocks(&mut self, id: SequenceId) {
        let sequence = self.sequences.get_mut(&id).expect("running sequences exist");
        sequence.release_blocks(&mut self.kv);
        sequence.n_preemptions += 1;
        if sequence.turns.is_empty()
            && let Some(family) = self.families.get_mut(&sequence.family)
        {
            family.leader = family.leader.filter(|&leader| leader != id);
            family.unstarted.push_front(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use r3_core::ids::{GroupId, PolicyVersion, TokenId};
    use r3_core::routes::RouteDims;

    use super::*;
    use crate::config::SchedulerConfig;
    use crate::request::{Request, Sample};

    const CONFIG: SchedulerConfig = SchedulerConfig {
        block_tokens: 4,
        n_blocks: 16,
        max_running: 3,
        max_batch_tokens: 8,
        prefix_cache: true,
        routes: Some(RouteDims { n_layers: 1, top_k: 1, n_experts: 4 }),
        replays: false,
    };

    fn scheduler(n_requests: u32, prompt_tokens: u32) -> Scheduler {
        let mut scheduler = Scheduler::new(CONFIG).unwrap();
        for at in 0..n_requests {
            let request = Request {
                group: GroupId(at.into()),
                prompt: (0..prompt_tokens).map(|token| TokenId(10 * at + token)).collect(),
                max_new_tokens: 4,
                stop_tokens: Arc::new([]),
                prompt_logprobs: false,
                max_support: None,
                return_routes: Some(0),
            };
            scheduler.submit(&request).unwrap();
        }
        scheduler
    }

    fn tick(scheduler: &mut Scheduler) {
        assert!(scheduler.plan());
        scheduler.record(&vec![3; scheduler.tick_plan().n_tokens()]);
        let sites = scheduler.tick_plan().samples.iter();
        let sample = |sequence| Sample { sequence, token: TokenId(0), logprob: 0.0 };
        let samples: Vec<_> = sites.map(|site| sample(site.sequence)).collect();
        scheduler.advance(&samples, PolicyVersion(0));
        scheduler.check();
    }

    #[test]
    fn the_retracted_waits_among_its_age_and_keeps_what_it_emitted() {
        let mut scheduler = scheduler(4, 2);
        tick(&mut scheduler);
        assert!(scheduler.retract(SequenceId(1)) && !scheduler.retract(SequenceId(1)));
        scheduler.check();
        assert!(!scheduler.retract(SequenceId(3)), "it waits");
        assert_eq!(scheduler.waiting, [1, 3].map(SequenceId));
        assert!(scheduler.retract(SequenceId(0)));
        assert_eq!(scheduler.waiting, [0, 1, 3].map(SequenceId));
        assert_eq!(
            (scheduler.get(SequenceId(1)).tokens.len(), scheduler.get(SequenceId(1)).trace_end()),
            (3, 2)
        );
        assert_eq!((scheduler.stats().n_retractions, scheduler.stats().n_preemptions), (2, 0));
        tick(&mut scheduler);
        assert_eq!(scheduler.n_running(), 3);
    }

    #[test]
    fn a_flush_takes_everything_back_in_order_of_age() {
        let mut scheduler = scheduler(5, 2);
        tick(&mut scheduler);
        scheduler.waiting.swap(0, 1);
        scheduler.flush(1).unwrap();
        scheduler.check();
        assert_eq!(scheduler.waiting, [0, 1, 2, 3, 4].map(SequenceId));
        let stats = scheduler.stats();
        assert_eq!((stats.n_held_blocks, stats.n_idle_blocks, stats.n_indexed_blocks), (0, 0, 0));
        assert_eq!(scheduler.flush(1), Err(SchedulerError::StaleEpoch { epoch: 1, current: 1 }));
    }

    #[test]
    fn a_flush_drops_the_rows_of_who_sampled_nothing() {
        let mut scheduler = scheduler(1, 12);
        tick(&mut scheduler);
        assert_eq!(scheduler.get(SequenceId(0)).trace_end(), 8);
        assert_eq!(scheduler.flush(0), Err(SchedulerError::StaleEpoch { epoch: 0, current: 0 }));
        assert_eq!(
            (scheduler.get(SequenceId(0)).trace_end(), scheduler.n_running()),
            (8, 1),
            "nothing changed"
        );
        scheduler.flush(1).unwrap();
        assert_eq!(scheduler.get(SequenceId(0)).trace_end(), 0);
    }
}
