//! Random programs: submissions with shared prefixes, groups, ticks, aborts, flushes, under every kind of pressure.

use proptest::prelude::{
    Just, ProptestConfig, Strategy, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest,
};
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use r3_core::ids::SequenceId;
use r3_core::rollout::FinishReason;
use r3_scheduler::config::SchedulerConfig;
use r3_scheduler::request::Finished;

use crate::naive_engine::{DIMS, NaiveEngine, request};

#[derive(Clone, Debug)]
enum Op {
    /// A prompt is the first `n_shared` tokens of one of three stems, then tokens of its own.
    Submit {
        stem: u32,
        n_shared: usize,
        own: Vec<u32>,
        max_new_tokens: usize,
        n: u32,
        prompt_logprobs: bool,
    },
    Tick(usize),
    FailingTick {
        is_recorded: bool,
    },
    Abort(usize),
    /// A refit around what was preempted: it is still waiting when everything else is taken back.
    FlushPreempted,
    DrainAndFlush,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let submit = (0..3u32, 0..12usize, prop::collection::vec(1..4u32, 0..4), 0..14usize, 1..5u32, 0..6u8)
        .prop_map(|(stem, n_shared, own, max_new_tokens, n, logprobs)| Op::Submit {
            stem,
            n_shared,
            own,
            max_new_tokens,
            n,
            prompt_logprobs: logprobs == 0,
        });
    let op = prop_oneof![
        8 => submit,
        10 => (1..6usize).prop_map(Op::Tick),
        1 => any::<bool>().prop_map(|is_recorded| Op::FailingTick { is_recorded }),
        2 => any::<usize>().prop_map(Op::Abort),
        2 => Just(Op::FlushPreempted),
        1 => Just(Op::DrainAndFlush),
    ];
    prop::collection::vec(op, 1..24)
}

fn configs() -> impl Strategy<Value = SchedulerConfig> {
    (1..6usize, 4..20usize, 1..8usize, 1..14usize, any::<bool>(), prop::bool::weighted(0.8)).prop_map(
        |(block_tokens, n_blocks, max_running, max_batch_tokens, prefix_cache, has_routes)| SchedulerConfig {
            block_tokens,
            n_blocks,
            max_running,
            max_batch_tokens,
            prefix_cache,
            routes: has_routes.then_some(DIMS),
        },
    )
}

/// Runs a program to its end; the engine and `check()` assert after every operation.
fn run(config: SchedulerConfig, ops: &[Op]) -> NaiveEngine {
    let mut engine = NaiveEngine::new(config);
    let mut submitted: Vec<SequenceId> = Vec::new();
    for (group, op) in (0..).zip(ops) {
        match op {
            Op::Submit { stem, n_shared, own, max_new_tokens, n, prompt_logprobs } => {
                let stem = (0..*n_shared as u32).map(|at| 1 + (at * (stem + 1) + stem) % 5);
                let prompt: Vec<_> = stem.chain([7]).chain(own.iter().copied()).collect();
                let mut request = request(group, &prompt, *max_new_tokens);
                request.prompt_logprobs = *prompt_logprobs;
                submitted.extend(engine.submit(&request, *n));
            }
            Op::Tick(n) => {
                for _ in 0..*n {
                    engine.tick();
                }
            }
            Op::FailingTick { is_recorded } => engine.failing_tick(*is_recorded),
            Op::Abort(at) if !submitted.is_empty() => engine.abort(submitted[at % submitted.len()]),
            Op::Abort(_) => {}
            Op::FlushPreempted => {
                for _ in 0..60 {
                    if engine.has_preempted() || !engine.tick() {
                        break;
                    }
                }
                engine.flush();
            }
            Op::DrainAndFlush => {
                engine.drain();
                engine.flush();
            }
        }
    }
    engine.drain();
    engine.assert_empty();
    engine
}

/// What the programs below are worth: they preempt, hit, fork and straddle flushes, or this fails.
#[test]
fn random_programs_reach_every_kind_of_pressure() {
    let mut runner = TestRunner::deterministic();
    let mut reached = [0; 5];
    for _ in 0..300 {
        let (config, ops) = (configs(), ops()).new_tree(&mut runner).unwrap().current();
        let engine = run(config, &ops);
        let stats = engine.scheduler.stats();
        let is_straddling = |finished: &Finished| {
            finished.versions.first() != finished.versions.last() && finished.finish != FinishReason::Abort
        };
        reached[0] += u64::from(stats.n_preemptions > 0);
        reached[1] += u64::from(stats.n_hits > 0);
        reached[2] += u64::from(stats.forked_tokens > 0);
        reached[3] += u64::from(engine.log.iter().any(|plan| !plan.ends_with("{ from: [], to: [] } }")));
        reached[4] += u64::from(engine.finished.iter().any(is_straddling));
    }
    assert!(reached.iter().all(|&programs| programs >= 9), "{reached:?} of 300");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Tokens, logprobs, versions, routes and prompt logprobs of every request are those of its own prefix, whatever it
    /// shared the engine with; nothing is lost and nothing is left.
    #[test]
    fn every_request_ends_as_if_it_had_been_alone(config in configs(), ops in ops()) {
        run(config, &ops);
    }

    /// The same program makes the same plans, with routes on and off.
    #[test]
    fn routes_change_no_plan(config in configs(), ops in ops()) {
        let on = run(SchedulerConfig { routes: Some(DIMS), ..config }, &ops);
        let off = run(SchedulerConfig { routes: None, ..config }, &ops);
        prop_assert_eq!(on.log, off.log);
        prop_assert_eq!(off.scheduler.route_bytes(), 0);
        prop_assert!(on.scheduler.route_bytes() > 0);
    }

    /// Who is not aborted and sees one epoch ends with the same tokens in any pool, batch and cache.
    #[test]
    fn sizes_change_no_result(one in configs(), other in configs(), ops in ops()) {
        let ops: Vec<_> = ops.into_iter().filter(|op| matches!(op, Op::Submit { .. } | Op::Tick(_))).collect();
        let roomy = |config| SchedulerConfig { n_blocks: 30, ..config };
        let ends = |config| {
            let mut finished = run(roomy(config), &ops).finished;
            finished.retain(|finished| finished.finish != FinishReason::Abort);
            finished.sort_by_key(|finished| (finished.group, finished.index));
            let of = |finished: Finished| (finished.group, finished.index, finished.tokens);
            finished.into_iter().map(of).collect::<Vec<_>>()
        };
        prop_assert_eq!(ends(one), ends(other));
    }
}
