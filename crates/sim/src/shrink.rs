//! Makes a failing program small.

use r3_scheduler::config::SchedulerConfig;

use crate::program::{Ask, InFlight, Op, Program, Reach};

/// The smallest program that `fails`, as far as taking away one thing at a time leads: operations, then what they ask for,
/// then sizes, again and again until nothing more can go or `max_tries` programs were tried. Equal programs shrink equally.
pub fn shrink(program: &Program, max_tries: usize, fails: impl Fn(&Program) -> bool) -> Program {
    let mut smallest = program.clone();
    let mut n_tries = 0;
    let mut still_fails = |candidate: &Program| {
        n_tries += 1;
        n_tries <= max_tries && fails(candidate)
    };
    loop {
        let smaller = candidates(&smallest).find(&mut still_fails);
        let Some(smaller) = smaller else { return smallest };
        smallest = smaller;
    }
}

/// Programs that are a little smaller, those that are much smaller first.
fn candidates(program: &Program) -> impl Iterator<Item = Program> {
    let without = move |at: usize, n: usize| {
        let mut ops = program.ops.clone();
        ops.drain(at..at + n);
        Program { ops, ..program.clone() }
    };
    let n_ops = program.ops.len();
    let sizes = std::iter::successors(Some(n_ops), |n| Some(n / 2)).take_while(|&n| n > 0);
    let dropped = sizes.flat_map(move |n| (0..=n_ops - n).rev().step_by(n).map(move |at| without(at, n)));
    let simpler = program.ops.iter().enumerate().flat_map(move |(at, op)| {
        op.simpler().into_iter().map(move |op| {
            let mut ops = program.ops.clone();
            ops[at] = op;
            Program { ops, ..program.clone() }
        })
    });
    let configs = configs(&program.config).into_iter();
    dropped.chain(simpler).chain(configs.map(move |config| Program { config, ..program.clone() }))
}

fn configs(config: &SchedulerConfig) -> Vec<SchedulerConfig> {
    let mut configs = vec![
        SchedulerConfig { prefix_cache: false, ..*config },
        SchedulerConfig { routes: None, ..*config },
        SchedulerConfig { replays: false, ..*config },
        SchedulerConfig { routes: config.routes.map(|_| crate::generate::NARROW), ..*config },
        SchedulerConfig { max_batch_tokens: 64, ..*config },
    ];
    for block_tokens in smaller(config.block_tokens, 1) {
        configs.push(SchedulerConfig { block_tokens, ..*config });
    }
    for max_running in smaller(config.max_running, 1) {
        configs.push(SchedulerConfig { max_running, ..*config });
    }
    for n_blocks in smaller(config.n_blocks, 1) {
        configs.push(SchedulerConfig { n_blocks, ..*config });
    }
    configs.retain(|smaller| smaller != config);
    configs
}

/// Numbers from `least` on that are less than `n`: the least, half, and one less.
fn smaller(n: usize, least: usize) -> Vec<usize> {
    let mut numbers = vec![least, n / 2, n.saturating_sub(1)];
    numbers.retain(|&number| number >= least && number < n);
    numbers.dedup();
    numbers
}

/// [`smaller`] for a count from 1.
fn fewer(size: u32) -> Vec<u32> {
    let mut sizes = vec![1, size.saturating_sub(1)];
    sizes.retain(|&fewer| fewer >= 1 && fewer < size);
    sizes.dedup();
    sizes
}

impl Reach {
    fn simpler(self) -> Vec<Self> {
        let mut reaches = Vec::new();
        for max_new_tokens in smaller(self.max_new_tokens, 0) {
            reaches.push(Self { max_new_tokens, ..self });
        }
        if self.n_stops > 0 {
            reaches.push(Self { n_stops: self.n_stops - 1, ..self });
        }
        reaches
    }
}

impl Ask {
    fn simpler(&self) -> Vec<Self> {
        let mut asks = Vec::new();
        for n in smaller(self.prompt.len(), 1) {
            let return_routes = self.return_routes.map(|start| start.min(n));
            asks.push(Self { prompt: self.prompt[..n].to_vec(), return_routes, ..self.clone() });
        }
        asks.extend(fewer(self.size).into_iter().map(|size| Self { size, ..self.clone() }));
        asks.extend(self.reach.simpler().into_iter().map(|reach| Self { reach, ..self.clone() }));
        if self.prompt_logprobs {
            asks.push(Self { prompt_logprobs: false, ..self.clone() });
        }
        if self.return_routes != Some(0) {
            asks.push(Self { return_routes: Some(0), ..self.clone() });
        }
        if self.stops_late {
            asks.push(Self { stops_late: false, ..self.clone() });
        }
        asks
    }
}

impl Op {
    /// The same with less in it.
    fn simpler(&self) -> Vec<Self> {
        match self {
            Self::Submit(ask) => ask.simpler().into_iter().map(Self::Submit).collect(),
            &Self::Resubmit { which, size, reach } => {
                let first = (which > 0).then_some(Self::Resubmit { which: 0, size, reach });
                let fewer = fewer(size).into_iter().map(|size| Self::Resubmit { which, size, reach });
                let shorter = reach.simpler().into_iter().map(|reach| Self::Resubmit { which, size, reach });
                first.into_iter().chain(fewer).chain(shorter).collect()
            }
            Self::NextTurn { which, given, reach } => {
                let turn =
                    |which, n: usize, reach| Self::NextTurn { which, given: given[..n].to_vec(), reach };
                let first = (*which > 0).then(|| turn(0, given.len(), *reach));
                let shorter = smaller(given.len(), 1).into_iter().map(|n| turn(*which, n, *reach));
                let less = reach.simpler().into_iter().map(|reach| turn(*which, given.len(), reach));
                first.into_iter().chain(shorter).chain(less).collect()
            }
            &Self::Resume { which, alone, reach } => {
                let first = (which > 0).then_some(Self::Resume { which: 0, alone, reach });
                let same = reach.map(|_| Self::Resume { which, alone, reach: None });
                first.into_iter().chain(same).collect()
            }
            &Self::Tick { times, max_tokens } => {
                let fewer = smaller(times, 1).into_iter().map(|times| Self::Tick { times, max_tokens });
                let any = max_tokens.map(|_| Self::Tick { times, max_tokens: None });
                fewer.chain(any).collect()
            }
            &Self::FailingTick { max_tokens, after } => {
                max_tokens.map(|_| Self::FailingTick { max_tokens: None, after }).into_iter().collect()
            }
            &Self::Abort { which } => (which > 0).then_some(Self::Abort { which: 0 }).into_iter().collect(),
            &Self::Retract { which } => {
                (which > 0).then_some(Self::Retract { which: 0 }).into_iter().collect()
            }
            &Self::Refit(in_flight) => (in_flight != InFlight::Continue)
                .then_some(Self::Refit(InFlight::Continue))
                .into_iter()
                .collect(),
            Self::FailedRefit(_) | Self::RetractAll | Self::Flush | Self::Crash => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn n_tokens(program: &Program) -> usize {
        let of = |op: &Op| if let Op::Submit(ask) = op { ask.prompt.len() } else { 0 };
        program.ops.iter().map(of).sum()
    }

    #[test]
    fn only_what_fails_is_left() {
        let is_refit = |op: &Op| matches!(op, Op::Refit(_));
        let fails = |program: &Program| program.ops.iter().any(is_refit) && n_tokens(program) >= 5;
        let program = (0..).map(Program::from_seed).find(fails).unwrap();
        let shrunk = shrink(&program, 10_000, fails);
        assert!(fails(&shrunk));
        assert_eq!((shrunk.ops.len(), n_tokens(&shrunk)), (2, 5), "{shrunk}");
        assert!(shrunk.ops.contains(&Op::Refit(InFlight::Continue)));
        assert_eq!((shrunk.config.n_blocks, shrunk.config.max_running), (1, 1));
        assert_eq!(shrunk, shrink(&program, 10_000, fails));
    }

    #[test]
    fn a_program_that_always_fails_ends_empty() {
        let shrunk = shrink(&Program::from_seed(3), 10_000, |_| true);
        assert_eq!(shrunk.ops, []);
        assert_eq!((shrunk.config.routes, shrunk.config.prefix_cache), (None, false));
    }
}
