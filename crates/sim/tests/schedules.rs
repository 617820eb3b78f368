//! Random schedules on the scheduler: what they keep, and what they contain.

use r3_core::ids::{GroupId, TokenId};
use r3_scheduler::config::SchedulerConfig;
use r3_scheduler::request::Finished;
use r3_sim::generate::NARROW;
use r3_sim::hash_engine::HashEngine;
use r3_sim::player::Player;
use r3_sim::program::{Op, Program};
use r3_sim::simulate::play_seeds;
use r3_sim::subject::Subject;

fn played(program: &Program) -> Player<HashEngine> {
    let mut player = Player::new(HashEngine::new(program.config), program.config);
    player.play(program);
    player
}

/// Tokens, logprobs, versions, turns, mask, prompt logprobs and routes of every rollout are those that its own tokens have
/// under the weights of their time, whatever it shared the engine with; nothing is lost and nothing is left.
#[test]
fn twenty_thousand_schedules_break_no_promise() {
    let tally = match play_seeds(0..20_000, 2, |_| ()) {
        Ok(tally) => tally,
        Err(failure) => panic!("{}", failure.explain()),
    };
    // What that is worth: nothing that can happen is rare.
    for (name, count) in tally.counts() {
        assert!(count >= 1000, "{name}: {count} in {} schedules", tally.schedules);
    }
    assert_eq!(tally.schedules, 20_000);
}

/// The same program makes the same plans, with routes on and off, and off holds no memory for them.
#[test]
fn routes_change_no_plan() {
    for seed in 0..2000 {
        let program = Program::from_seed(seed);
        let with = |routes| {
            let config = SchedulerConfig { routes, replays: false, ..program.config };
            played(&Program { config, ..program.clone() })
        };
        let (on, off) = (with(Some(NARROW)), with(None));
        assert_eq!(on.subject().digest(), off.subject().digest(), "seed {seed}");
        assert!(on.subject().stats().route_bytes > 0);
        assert_eq!(off.subject().stats().route_bytes, 0);
    }
}

/// Whoever is not taken back and sees one version ends with the same tokens in any pool, batch and cache.
#[test]
fn sizes_change_no_result() {
    let ends = |config, ops: &[Op]| {
        let player = played(&Program { config, ops: ops.to_vec() });
        let of = |finished: &Finished| (finished.group, finished.index, finished.tokens.clone());
        let mut ends: Vec<(GroupId, u32, Vec<TokenId>)> = player.ended().map(of).collect();
        ends.sort_unstable();
        ends
    };
    let mut n_ended = 0;
    for seed in 0..2000 {
        let Program { config, mut ops } = Program::from_seed(seed);
        let is_kept = |op: &Op| match op {
            Op::Submit(ask) => !ask.stops_late,
            op => matches!(op, Op::Tick { .. } | Op::Retract { .. }),
        };
        ops.retain(is_kept);
        let other = Program::from_seed(seed + 1).config;
        // Both pools hold the longest request and no more, so that none is refused and most are preempted.
        let needed = |op: &Op| match op {
            Op::Submit(ask) => ask.prompt.len() + ask.reach.max_new_tokens,
            _ => 0,
        };
        let needed = ops.iter().map(needed).max().unwrap_or(0);
        let tight = |config: SchedulerConfig| SchedulerConfig {
            n_blocks: needed.div_ceil(config.block_tokens).max(1),
            ..config
        };
        let one = ends(tight(config), &ops);
        assert_eq!(one, ends(tight(other), &ops), "seed {seed}");
        n_ended += one.len();
    }
    assert!(n_ended > 5000, "{n_ended} rollouts");
}
