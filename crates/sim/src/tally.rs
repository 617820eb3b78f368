//! What schedules contained, so that "no violation" says something.

use std::fmt;
use std::ops::AddAssign;

use r3_scheduler::scheduler::SchedulerStats;

macro_rules! tally {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// Counts over one or many schedules.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Tally { $($(#[$doc])* pub $name: u64),+ }

        impl Tally {
            /// Every count with its name, in order.
            #[must_use]
            pub fn counts(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),+]
            }
        }

        impl AddAssign for Tally {
            fn add_assign(&mut self, other: Self) {
                $(self.$name += other.$name;)+
            }
        }
    };
}

tally! {
    /// Schedules played.
    schedules,
    /// Ticks that computed something.
    ticks,
    /// Ticks that failed on their way.
    failing_ticks,
    /// Tokens computed.
    computed_tokens,
    /// Tokens sampled.
    sampled_tokens,
    /// Groups and turns that were refused because they can never fit.
    refused,
    /// Admissions that found a cached prefix.
    prefix_hits,
    /// Tokens those did not compute.
    hit_tokens,
    /// Rollouts that began behind a prompt another one computed in the same tick.
    group_forks,
    /// Times blocks were taken from the youngest for want of blocks.
    preemptions,
    /// Times blocks were taken from a sequence by an operation or a refit.
    retractions,
    /// Rollouts taken back.
    aborts,
    /// Of these, by a reader that found a stop token late.
    late_stops,
    /// Rollouts that went on after an abort.
    resumed,
    /// Next turns.
    next_turns,
    /// Refits after draining.
    refits_drain,
    /// Refits after aborting.
    refits_abort,
    /// Refits with requests going on.
    refits_continue,
    /// Refits that failed.
    failed_refits,
    /// Flushes that kept the weights.
    flushes,
    /// Engines lost and rebuilt from a checkpoint.
    crashes,
    /// Rollouts that ended by a stop token or their length.
    finished,
    /// Of all that ended, those whose tokens are of more than one version.
    mixed_versions,
    /// Route rows compared with the oracle.
    rows_compared,
}

impl Tally {
    /// Takes over the counters of an engine that is done.
    pub fn add_stats(&mut self, stats: &SchedulerStats) {
        self.computed_tokens += stats.computed_tokens;
        self.prefix_hits += stats.n_hits;
        self.hit_tokens += stats.hit_tokens;
        self.group_forks += stats.n_forks;
        self.preemptions += stats.n_preemptions;
        self.retractions += stats.n_retractions;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, count) in self.counts() {
            writeln!(f, "{:18}{count:>14}", name.replace('_', " "))?;
        }
        Ok(())
    }
}
