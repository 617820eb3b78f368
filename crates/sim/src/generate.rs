//! Programs from seeds.
//!
//! Sizes are chosen so that everything is scarce: a pool of a few sequences, blocks that a prompt does not fill, budgets
//! below one prompt. A schedule is short, because many short ones reach more states a second than few long ones.

use r3_core::ids::TokenId;
use r3_core::routes::RouteDims;
use r3_scheduler::config::SchedulerConfig;

use crate::oracle::VOCAB;
use crate::program::{Ask, FailsAfter, InFlight, Op, Program, Reach};
use crate::rng::Rng;

/// Experts of a byte each. Five is prime, which [`crate::oracle::State::route`] relies on.
pub const NARROW: RouteDims = RouteDims { n_layers: 2, top_k: 2, n_experts: 5 };
/// Experts of two bytes each; prime, too.
pub const WIDE: RouteDims = RouteDims { n_layers: 1, top_k: 3, n_experts: 257 };

/// Tokens that several prompts begin with.
const STEM_TOKENS: usize = 12;
/// The same where blocks are large.
const LONG_STEM_TOKENS: usize = 150;
/// Sizes of large blocks: the validity bits of one fill a word, or not quite, or are in two.
const LARGE_BLOCKS: [usize; 4] = [16, 63, 64, 70];

impl Program {
    /// The program of `seed`: equal seeds give equal programs.
    #[must_use]
    pub fn from_seed(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        // A stream of its own, so that it changes nothing else.
        let replays = Rng::new(!seed).one_in(2);
        let config = SchedulerConfig { replays, ..config(&mut rng) };
        let is_large = LARGE_BLOCKS.contains(&config.block_tokens);
        let stem_tokens = if is_large { LONG_STEM_TOKENS } else { STEM_TOKENS };
        let stems = [(); 2].map(|()| tokens(&mut rng, stem_tokens));
        // A few are long enough for states that take many steps to reach.
        let n_ops = if rng.one_in(10) { rng.between(25, 80) } else { rng.between(3, 24) };
        let mut ops = vec![submit(&mut rng, &config, &stems)];
        while ops.len() < n_ops {
            ops.push(op(&mut rng, &config, &stems));
        }
        Self { config, ops }
    }
}

fn config(rng: &mut Rng) -> SchedulerConfig {
    let routes = match rng.below(12) {
        0 => None,
        1 => Some(WIDE),
        _ => Some(NARROW),
    };
    let prefix_cache = !rng.one_in(4);
    if rng.one_in(16) {
        return SchedulerConfig {
            block_tokens: LARGE_BLOCKS[rng.below(LARGE_BLOCKS.len())],
            n_blocks: rng.between(3, 8),
            max_running: rng.between(1, 6),
            max_batch_tokens: rng.between(8, 200),
            prefix_cache,
            routes,
            replays: false,
        };
    }
    let block_tokens = rng.between(1, 5);
    let (most_tokens, most_running) = if rng.one_in(5) { (120, 12) } else { (48, 6) };
    SchedulerConfig {
        block_tokens,
        n_blocks: rng.between(8, most_tokens).div_ceil(block_tokens),
        max_running: rng.between(1, most_running),
        max_batch_tokens: rng.between(1, 16),
        prefix_cache,
        routes,
        replays: false,
    }
}

fn op(rng: &mut Rng, config: &SchedulerConfig, stems: &[Vec<TokenId>]) -> Op {
    let which = rng.below(16);
    match rng.below(64) {
        0..12 => submit(rng, config, stems),
        12..14 => Op::Resubmit { which, size: small(rng), reach: reach(rng) },
        14..19 => {
            let n_given = rng.between(1, 4);
            Op::NextTurn { which, given: tokens(rng, n_given), reach: reach(rng) }
        }
        19..24 => Op::Resume { which, alone: rng.one_in(4), reach: rng.one_in(3).then(|| reach(rng)) },
        24..45 => Op::Tick { times: rng.between(1, 8), max_tokens: budget(rng) },
        45..47 => {
            let after = [FailsAfter::Plan, FailsAfter::Record, FailsAfter::Sample][rng.below(3)];
            Op::FailingTick { max_tokens: budget(rng), after }
        }
        47..50 => Op::Abort { which },
        50..53 => Op::Retract { which },
        53 => [Op::RetractAll, Op::Flush][rng.below(2)].clone(),
        54..59 => Op::Refit(in_flight(rng)),
        59..62 => Op::FailedRefit(in_flight(rng)),
        _ => Op::Crash,
    }
}

fn submit(rng: &mut Rng, config: &SchedulerConfig, stems: &[Vec<TokenId>]) -> Op {
    let n_shared = rng.below(stems[0].len() + 1);
    let n_own = rng.between(usize::from(n_shared == 0), 3);
    let mut prompt = stems[rng.below(stems.len())][..n_shared].to_vec();
    prompt.extend(tokens(rng, n_own));
    let stops_late = rng.one_in(16);
    let mut reach = reach(rng);
    // The last sampled token needs no slot.
    let most = (config.n_blocks * config.block_tokens + 1).saturating_sub(prompt.len());
    reach.max_new_tokens = match rng.below(40) {
        // Too long for the pool by up to two tokens, or just as long as it.
        0 => most + rng.below(3),
        1..6 => reach.max_new_tokens,
        _ => reach.max_new_tokens.min(most),
    };
    if stops_late {
        reach.n_stops = 0;
    }
    Op::Submit(Ask {
        size: small(rng),
        reach,
        prompt_logprobs: rng.one_in(6),
        return_routes: match rng.below(10) {
            0 => None,
            1 => Some(rng.below(prompt.len() + 1)),
            _ => Some(0),
        },
        stops_late,
        prompt,
    })
}

fn reach(rng: &mut Rng) -> Reach {
    let most = if rng.one_in(2) { 6 } else { 20 };
    Reach { max_new_tokens: rng.below(most), n_stops: [0, 0, 1, 2][rng.below(4)] }
}

/// Mostly 1, at most 5.
fn small(rng: &mut Rng) -> u32 {
    u32::try_from(if rng.one_in(2) { 1 } else { rng.between(2, 5) }).expect("at most 5")
}

fn budget(rng: &mut Rng) -> Option<usize> {
    rng.one_in(2).then(|| rng.between(1, 10))
}

fn in_flight(rng: &mut Rng) -> InFlight {
    [InFlight::Drain, InFlight::Abort, InFlight::Continue, InFlight::Continue, InFlight::Continue]
        [rng.below(5)]
}

fn tokens(rng: &mut Rng, n: usize) -> Vec<TokenId> {
    (0..n).map(|_| TokenId(u32::try_from(rng.below(VOCAB)).expect("below the vocabulary"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_program() {
        for seed in 0..100 {
            assert_eq!(Program::from_seed(seed), Program::from_seed(seed));
            assert_ne!(Program::from_seed(seed), Program::from_seed(seed + 1));
        }
    }
}
