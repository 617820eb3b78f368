//! A schedule as plain data: what it is played with, and what is done in order.

use std::fmt;

use r3_core::ids::TokenId;
use r3_scheduler::config::SchedulerConfig;

/// One random schedule.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Sizes of the engine.
    pub config: SchedulerConfig,
    /// What is done, in order; afterwards the engine is drained.
    pub ops: Vec<Op>,
}

/// How far a request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reach {
    /// Tokens to sample at most.
    pub max_new_tokens: usize,
    /// Tokens `0..n_stops` end it.
    pub n_stops: usize,
}

/// A group of requests.
#[derive(Clone, Debug, PartialEq)]
pub struct Ask {
    /// What all begin with.
    pub prompt: Vec<TokenId>,
    /// How many.
    pub size: u32,
    /// How far each goes.
    pub reach: Reach,
    /// Whether the prompt's logprobs are wanted.
    pub prompt_logprobs: bool,
    /// The first route row that is wanted; `None` for none.
    pub return_routes: Option<usize>,
    /// The engine knows no stop token: who reads along finds token 0 a tick later, and takes the rollout back.
    pub stops_late: bool,
}

/// What becomes of the requests on their way when the weights change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InFlight {
    /// They are finished first.
    Drain,
    /// They are taken back, and may be resumed later.
    Abort,
    /// They go on under the new weights.
    Continue,
}

/// How far a tick gets that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailsAfter {
    /// The forward failed.
    Plan,
    /// Keys, values and routes were stored.
    Record,
    /// Tokens were drawn, and nobody was told.
    Sample,
}

/// One thing done to the engine, between ticks or as one. A `which` counts through those there are, and around.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// A new group.
    Submit(Ask),
    /// A new group whose prompt is all of a rollout that ended.
    Resubmit {
        /// Of those that ended.
        which: usize,
        /// How many.
        size: u32,
        /// How far.
        reach: Reach,
    },
    /// A rollout that ended goes on behind `given`.
    NextTurn {
        /// Of those that ended.
        which: usize,
        /// What is appended.
        given: Vec<TokenId>,
        /// How far.
        reach: Reach,
    },
    /// All of one group that were taken back go on, or one of them; perhaps to another length.
    Resume {
        /// Of those taken back: itself, or its group.
        which: usize,
        /// Itself.
        alone: bool,
        /// How far; `None`: as before.
        reach: Option<Reach>,
    },
    /// Ticks.
    Tick {
        /// How many.
        times: usize,
        /// Tokens of each; `None`: as many as the engine takes.
        max_tokens: Option<usize>,
    },
    /// A tick that fails, after which everything is taken back.
    FailingTick {
        /// Tokens; `None`: as many as the engine takes.
        max_tokens: Option<usize>,
        /// Where.
        after: FailsAfter,
    },
    /// One request is taken back.
    Abort {
        /// Of those on their way.
        which: usize,
    },
    /// The blocks of one are taken.
    Retract {
        /// Of those on their way.
        which: usize,
    },
    /// The blocks of all are taken.
    RetractAll,
    /// New weights.
    Refit(InFlight),
    /// New weights that turn out to be bad after the requests were dealt with: the old ones stay.
    FailedRefit(InFlight),
    /// The cache is emptied, as at a refit, and the weights stay.
    Flush,
    /// The engine is lost; a new one resumes what a checkpoint has.
    Crash,
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SchedulerConfig { block_tokens, n_blocks, max_running, max_batch_tokens, .. } = self.config;
        write!(f, "{n_blocks} blocks of {block_tokens} tokens, {max_running} running, ")?;
        write!(f, "{max_batch_tokens} tokens a tick, ")?;
        f.write_str(if self.config.prefix_cache { "prefix cache, " } else { "no prefix cache, " })?;
        match self.config.routes {
            None => f.write_str("no routes")?,
            Some(dims) => {
                write!(f, "{} of {} experts in {} layers", dims.top_k, dims.n_experts, dims.n_layers)?;
                f.write_str(if self.config.replays { ", replayed" } else { "" })?;
            }
        }
        for (number, op) in (1..).zip(&self.ops) {
            write!(f, "\n{number:3}. {op}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Submit(ask) => write!(f, "submit {ask}"),
            Self::Resubmit { which, size, reach } => {
                write!(f, "submit the tokens of ended rollout {which}, {size} times, {reach}")
            }
            Self::NextTurn { which, given, reach } => {
                write!(f, "next turn of ended rollout {which}: {}, {reach}", Tokens(given))
            }
            Self::Resume { which, alone, reach } => {
                let what = if *alone { "" } else { "the group of " };
                write!(f, "resume {what}aborted rollout {which}")?;
                reach.map_or(Ok(()), |reach| write!(f, ", now {reach}"))
            }
            Self::Tick { times, max_tokens } => write!(f, "tick {times} times{}", Budget(*max_tokens)),
            Self::FailingTick { max_tokens, after } => {
                write!(f, "tick{}, which fails after {after:?}", Budget(*max_tokens))
            }
            Self::Abort { which } => write!(f, "abort request {which}"),
            Self::Retract { which } => write!(f, "retract request {which}"),
            Self::RetractAll => f.write_str("retract all"),
            Self::Refit(in_flight) => write!(f, "refit, {in_flight:?} what is in flight"),
            Self::FailedRefit(in_flight) => write!(f, "refit, {in_flight:?} what is in flight; it fails"),
            Self::Flush => f.write_str("flush"),
            Self::Crash => f.write_str("crash, and resume from a checkpoint"),
        }
    }
}

impl fmt::Display for Ask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} times, {}", Tokens(&self.prompt), self.size, self.reach)?;
        if self.prompt_logprobs {
            f.write_str(", prompt logprobs")?;
        }
        match self.return_routes {
            Some(0) => {}
            Some(start) => write!(f, ", routes from {start}")?,
            None => f.write_str(", no routes")?,
        }
        f.write_str(if self.stops_late { ", taken back a tick after token 0" } else { "" })
    }
}

impl fmt::Display for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} new", self.max_new_tokens)?;
        match self.n_stops {
            0 => Ok(()),
            1 => f.write_str(", stop at 0"),
            n => write!(f, ", stop at 0 to {}", n - 1),
        }
    }
}

struct Tokens<'a>(&'a [TokenId]);

impl fmt::Display for Tokens<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ids: Vec<String> = self.0.iter().map(TokenId::to_string).collect();
        write!(f, "[{}]", ids.join(" "))
    }
}

struct Budget(Option<usize>);

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |max_tokens| write!(f, " of at most {max_tokens} tokens"))
    }
}
