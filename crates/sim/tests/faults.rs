//! Faults that other systems of this kind have had, each as the smallest schedule that would show it here.
//!
//! Where a test looks at little, the player has looked at everything: each rollout that comes out was compared, token
//! by token and row by row, with the oracle.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_core::rollout::FinishReason;
use r3_core::routes::RouteView;
use r3_scheduler::config::SchedulerConfig;
use r3_scheduler::request::{Finished, Request, Sample};
use r3_scheduler::scheduler::Scheduler;
use r3_sim::generate::NARROW;
use r3_sim::hash_engine::HashEngine;
use r3_sim::player::Player;
use r3_sim::program::{Ask, FailsAfter, InFlight, Op, Reach};
use r3_sim::subject::Subject;

const CONFIG: SchedulerConfig = SchedulerConfig {
    block_tokens: 4,
    n_blocks: 16,
    max_running: 8,
    max_batch_tokens: 64,
    prefix_cache: true,
    routes: Some(NARROW),
    replays: false,
};

fn player(config: SchedulerConfig) -> Player<HashEngine> {
    Player::new(HashEngine::new(config), config)
}

fn ids(tokens: &[u32]) -> Vec<TokenId> {
    tokens.iter().copied().map(TokenId).collect()
}

/// No stop token: only its length ends it.
fn length(max_new_tokens: usize) -> Reach {
    Reach { max_new_tokens, n_stops: 0 }
}

/// One request that only ends by its length.
fn submit(prompt: &[u32], max_new_tokens: usize) -> Op {
    Op::Submit(Ask {
        prompt: ids(prompt),
        size: 1,
        reach: length(max_new_tokens),
        prompt_logprobs: false,
        return_routes: Some(0),
        stops_late: false,
    })
}

fn ticks(times: usize) -> Op {
    Op::Tick { times, max_tokens: None }
}

fn play(player: &mut Player<HashEngine>, ops: &[Op]) {
    ops.iter().for_each(|op| player.apply(op));
}

/// The rollouts that ended, by group.
fn ended(player: &Player<HashEngine>) -> Vec<&Finished> {
    let mut ended: Vec<_> = player.ended().collect();
    ended.sort_by_key(|finished| (finished.group, finished.index));
    ended
}

/// The same for a bare scheduler.
fn request(prompt: &[u32], max_new_tokens: usize) -> Request {
    Request {
        group: GroupId(0),
        prompt: ids(prompt).into(),
        max_new_tokens,
        stop_tokens: Arc::new([]),
        prompt_logprobs: false,
        max_support: None,
        return_routes: Some(0),
    }
}

fn versions(counts: &[usize]) -> Vec<PolicyVersion> {
    let of = |(version, &n)| std::iter::repeat_n(PolicyVersion(version), n);
    (0..).zip(counts).flat_map(of).collect()
}

fn rows(finished: &Finished) -> usize {
    finished.view().routes.map_or(0, RouteView::rows)
}

fn row(finished: &Finished, row: usize) -> Vec<u16> {
    let view = finished.view().routes.unwrap();
    (0..4).map(|at| view.expert(row, at / 2, at % 2)).collect()
}

/// Ticks a bare scheduler once, with the routes that `route` gives each row and token 1 as every sample.
fn tick(scheduler: &mut Scheduler, route: impl FnMut(u8) -> [u8; 4]) {
    assert!(scheduler.plan());
    let n_rows = u8::try_from(scheduler.tick_plan().n_tokens()).unwrap();
    scheduler.record((0..n_rows).map(route).collect::<Vec<_>>().as_flattened());
    let sites = scheduler.tick_plan().samples.iter();
    let samples: Vec<_> =
        sites.map(|site| Sample { sequence: site.sequence, token: TokenId(1), logprob: -1.0 }).collect();
    scheduler.advance(&samples, PolicyVersion(0));
    scheduler.check();
}

/// sgl-project/sglang#20964: rows were sliced to `T - 1` although all `T` tokens were forwarded.
#[test]
fn a_prefill_only_request_keeps_the_row_of_its_last_token() {
    let mut player = player(CONFIG);
    play(&mut player, &[submit(&[1, 2, 3, 4, 5], 0), submit(&[1, 2, 3, 4, 6], 1)]);
    player.drain();
    let [prefill, sampled] = ended(&player)[..] else { panic!("two requests") };
    assert_eq!((rows(prefill), prefill.tokens.len()), (5, 5));
    assert_eq!((rows(sampled), sampled.tokens.len()), (5, 6));
}

/// sgl-project/sglang#12162: decoded tokens had no rows, or all the same one.
#[test]
fn every_decoded_token_has_its_own_row_but_the_last() {
    let mut sampling = player(CONFIG);
    play(&mut sampling, &[submit(&[1, 2, 3], 4)]);
    sampling.drain();
    // Submitted again as a prompt, the same tokens are prefilled at once, without a cache.
    let sampled = ended(&sampling)[0];
    let tokens: Vec<_> = sampled.tokens.iter().map(|token| token.0).collect();
    let mut prefilling = player(SchedulerConfig { prefix_cache: false, ..CONFIG });
    play(&mut prefilling, &[submit(&tokens, 0)]);
    prefilling.drain();
    let prefilled = ended(&prefilling)[0];
    assert_eq!((rows(sampled), rows(prefilled)), (6, 7));
    for position in 0..6 {
        assert_eq!(row(sampled, position), row(prefilled, position), "{position}");
    }
}

/// sgl-project/sglang#23885: one path forgot to drain the captured rows, which then read as expert 0.
#[test]
fn a_tick_that_was_not_recorded_fails_instead_of_reading_expert_0() {
    let mut scheduler = Scheduler::new(CONFIG).unwrap();
    let sequence = scheduler.submit(&request(&[1, 2, 3], 4)).unwrap();
    assert!(scheduler.plan());
    let sample = Sample { sequence, token: TokenId(1), logprob: -1.0 };
    let advanced = catch_unwind(AssertUnwindSafe(|| scheduler.advance(&[sample], PolicyVersion(0))));
    assert!(advanced.is_err());
}

/// sgl-project/sglang#39633: re-prefill under new weights replaced routes whose logprobs had been emitted.
/// vllm-project/vllm#45635: and one version stood for the whole request.
#[test]
fn a_request_preempted_before_a_refit_keeps_its_rows_and_versions() {
    let mut player = player(SchedulerConfig { n_blocks: 4, prefix_cache: false, ..CONFIG });
    play(&mut player, &[submit(&[1, 2, 3, 4], 13), submit(&[5, 6], 10)]);
    while player.subject().stats().n_preemptions == 0 {
        player.apply(&ticks(1));
    }
    play(&mut player, &[Op::Abort { which: 0 }, Op::Refit(InFlight::Continue)]);
    player.drain();
    let young = ended(&player)[0];
    let n_old = young.versions.iter().filter(|version| version.0 == 0).count();
    assert!((1..10).contains(&n_old), "{n_old} tokens were sampled before the refit");
    assert_eq!(young.versions, versions(&[n_old, 10 - n_old]));
    assert_eq!((rows(young), young.tokens.len()), (11, 12));
}

/// sgl-project/sglang#39633, radixark/miles#3277: a retraction around a refit kept the logprobs and overwrote their
/// routes. vllm-project/vllm#54443: one version for a request that straddles a refit.
#[test]
fn a_refit_in_mid_request_keeps_the_rows_of_what_was_sampled() {
    let mut player = player(CONFIG);
    play(&mut player, &[submit(&[1, 2, 3, 4], 10), ticks(6)]);
    let before = player.subject().in_flight().remove(0);
    assert_eq!((before.tokens.len(), rows(&before)), (10, 9));
    player.apply(&Op::Refit(InFlight::Continue));
    player.drain();
    let after = ended(&player)[0];
    assert_eq!(rows(after), 13);
    for position in 0..9 {
        assert_eq!(row(after, position), row(&before, position), "row {position}");
    }
    assert_eq!(after.versions, versions(&[6, 4]));
}

/// vllm-project/vllm#39917: rows of a preempted request were dropped silently.
#[test]
fn preempted_requests_keep_all_their_rows() {
    let mut player = player(SchedulerConfig { n_blocks: 8, ..CONFIG });
    play(&mut player, &[1, 2, 3].map(|first| submit(&[first, 2, 3, 4], 20)));
    player.drain();
    assert!(player.subject().stats().n_preemptions > 0, "the pool is too small for three");
    let ended = ended(&player);
    assert_eq!(ended.len(), 3);
    assert!(ended.iter().all(|finished| rows(finished) == 23 && finished.tokens.len() == 24));
    assert!(ended.iter().any(|finished| finished.n_preemptions > 0));
}

/// vllm-project/vllm#45635: the blocks of a preempted request were reused before its rows had been read.
#[test]
fn rows_outlive_the_blocks_they_were_written_in() {
    let mut scheduler = Scheduler::new(SchedulerConfig { n_blocks: 2, ..CONFIG }).unwrap();
    let first = scheduler.submit(&request(&[1, 2, 3, 4, 5], 4)).unwrap();
    tick(&mut scheduler, |row| [row, 4, 3, row / 2]);
    scheduler.abort(first);
    scheduler.submit(&request(&[9, 8, 7, 6, 5], 4)).unwrap();
    tick(&mut scheduler, |_| [4, 3, 2, 1]);
    let finished = scheduler.take_finished().unwrap();
    assert_eq!((finished.sequence, finished.finish, rows(&finished)), (first, FinishReason::Abort, 5));
    for position in 0..5 {
        assert_eq!(row(&finished, position), [position as u16, 4, 3, position as u16 / 2]);
    }
}

/// vllm-project/tpu-inference#2965: the start was read after it had moved, and the rows of a chunk with it.
#[test]
fn rows_of_a_chunk_begin_where_the_chunk_did() {
    let mut scheduler = Scheduler::new(SchedulerConfig { max_batch_tokens: 4, ..CONFIG }).unwrap();
    scheduler.submit(&request(&[1, 2, 3, 4, 5, 6, 7, 8], 0)).unwrap();
    for chunk in 0..2 {
        tick(&mut scheduler, |row| [row, 4, chunk, 3]);
    }
    let finished = scheduler.take_finished().unwrap();
    for position in 0..8 {
        assert_eq!(row(&finished, position), [position as u16 % 4, 4, position as u16 / 4, 3]);
    }
}

/// vllm-ascend#10727: the buffer that rows were read from was overwritten by the next step.
#[test]
fn rows_are_out_of_the_engines_buffer_before_the_next_tick_can_begin() {
    let mut scheduler = Scheduler::new(CONFIG).unwrap();
    scheduler.submit(&request(&[1, 2], 3)).unwrap();
    let mut buffer = [[0; 4]; 2];
    for step in 0..3 {
        buffer = buffer.map(|_| [step, 4, 3, step]);
        tick(&mut scheduler, |row| buffer[usize::from(row)]);
    }
    let finished = scheduler.take_finished().unwrap();
    let steps: Vec<_> = (0..4).map(|position| row(&finished, position)[0]).collect();
    assert_eq!(steps, [0, 0, 1, 2]);

    scheduler.submit(&request(&[1, 2], 3)).unwrap();
    assert!(scheduler.plan());
    assert!(catch_unwind(AssertUnwindSafe(|| scheduler.plan())).is_err(), "step N + 1 before N was advanced");
}

/// SGLang's route capture: padding rows of a batch wrote slot 0, and a reused slot returned its previous occupant.
#[test]
fn no_row_is_padding_and_no_slot_remembers_its_last_occupant() {
    let mut player = player(SchedulerConfig { n_blocks: 3, ..CONFIG });
    play(&mut player, &[submit(&[1, 2, 3, 4, 5, 6, 7, 0, 1], 1), ticks(1)]);
    let plan = player.subject().scheduler().tick_plan();
    assert_eq!((plan.n_tokens(), plan.chunks.iter().map(|chunk| chunk.n_tokens).sum::<usize>()), (9, 9));
    // The same three blocks, other tokens, then a hit on them.
    play(&mut player, &[submit(&[7, 6, 5, 4, 3, 2, 1, 0, 1], 1), ticks(1)]);
    play(&mut player, &[submit(&[7, 6, 5, 4, 3, 2, 1, 0, 0], 1), ticks(1)]);
    let [first, second, hit] = ended(&player)[..] else { panic!("three requests") };
    assert_eq!([first, second, hit].map(|finished| finished.cached_tokens), [0, 0, 8]);
    assert_ne!(row(hit, 1), row(first, 1));
    assert_eq!(row(hit, 1), row(second, 1));
}

/// vllm-project/vllm#9744, InternLM/lmdeploy#4917, pytorch/rl#4016: the prefix cache survived new weights.
#[test]
fn after_a_refit_nothing_is_cached() {
    let mut player = player(CONFIG);
    let submit = submit(&[1, 2, 3, 4, 5, 6, 7, 0, 1], 2);
    for refit in [false, false, true] {
        if refit {
            player.apply(&Op::Refit(InFlight::Drain));
        }
        play(&mut player, &[submit.clone(), ticks(2)]);
    }
    assert_eq!(ended(&player).iter().map(|finished| finished.cached_tokens).collect::<Vec<_>>(), [0, 8, 0]);
}

/// NVIDIA-NeMo/RL#4018: a shared system prompt was served from blocks up to 17 refits old.
#[test]
fn a_shared_prompt_is_computed_again_after_each_of_many_refits() {
    let mut player = player(CONFIG);
    for _ in 0..5 {
        for user in 0..3 {
            play(&mut player, &[submit(&[1, 2, 3, 4, 5, 6, 7, 0, user], 1), ticks(1)]);
        }
        player.apply(&Op::Refit(InFlight::Continue));
    }
    let cached: Vec<_> = ended(&player).iter().map(|finished| finished.cached_tokens).collect();
    assert_eq!(cached, [0, 8, 8].repeat(5));
}

/// NovaSky-AI/SkyRL#1471, NVIDIA-NeMo/RL#3403, sgl-project/sglang#26015: a refit that failed half way was half applied.
#[test]
fn a_refit_that_fails_leaves_requests_cache_and_version_as_they_were() {
    let mut player = player(CONFIG);
    let prompt = [1, 2, 3, 4, 5, 6, 7, 0, 1];
    play(&mut player, &[submit(&prompt, 6), ticks(3), Op::FailedRefit(InFlight::Continue)]);
    assert_eq!((player.subject().stats().n_running, player.subject().stats().n_retractions), (1, 0));
    play(&mut player, &[submit(&prompt, 1), ticks(3)]);
    let [going_on, hit] = ended(&player)[..] else { panic!("two requests") };
    assert_eq!((&going_on.versions, hit.cached_tokens), (&versions(&[6]), 8));
}

/// vllm-project/vllm#39568, sgl-project/sglang#26975: a request that ended early must not claim rows it never had.
#[test]
fn an_aborted_prefill_has_the_rows_it_computed() {
    let mut player = player(SchedulerConfig { max_batch_tokens: 3, ..CONFIG });
    play(&mut player, &[submit(&[1, 2, 3, 4, 5, 6, 7], 4), ticks(1), Op::Abort { which: 0 }]);
    assert_eq!(
        player.aborted().map(|aborted| (rows(aborted), aborted.finish)).collect::<Vec<_>>(),
        [(3, FinishReason::Abort)]
    );
}

/// inclusionAI/AReaL, code of `main` in 2026: rows of the attempts of a resumed rollout were joined end to end.
#[test]
fn a_resumed_rollout_has_each_row_once() {
    let mut player = player(CONFIG);
    let resume = Op::Resume { which: 0, alone: false, reach: None };
    play(&mut player, &[submit(&[1, 2, 3], 6), ticks(3), Op::Refit(InFlight::Abort), resume]);
    player.drain();
    let resumed = ended(&player)[0];
    assert_eq!((rows(resumed), resumed.new_rows, &resumed.versions), (8, 3, &versions(&[3, 3])));
}

/// NVIDIA-NeMo/RL#3485, PrimeIntellect-ai/prime-rl#1807: the row of the last token of a turn stayed empty.
/// radixark/miles#3307: and the next turn overwrote the rows before it. sgl-project/sglang#24851: or sent them again.
#[test]
fn the_boundary_row_is_of_the_next_turn_and_those_before_it_stay() {
    let mut player = player(SchedulerConfig { prefix_cache: false, ..CONFIG });
    play(&mut player, &[submit(&[1, 2], 2), ticks(2)]);
    let first = ended(&player)[0].clone();
    assert_eq!((first.tokens.len(), rows(&first), first.new_rows), (4, 3, 3));
    let turn = Op::NextTurn { which: 0, given: ids(&[5, 6]), reach: length(2) };
    play(&mut player, &[Op::Refit(InFlight::Continue), turn, ticks(2)]);
    let second = ended(&player)[0];
    assert_eq!((second.tokens.len(), rows(second), second.new_rows), (8, 7, 4), "4 rows, not 7, are new");
    for position in 0..3 {
        assert_eq!(row(second, position), row(&first, position), "row {position}");
    }
    assert_eq!((&second.turns[..], second.mask()), (&[2..4, 6..8][..], Some(vec![1, 1, 0, 0, 1, 1])));
}

/// A forward that fails after routes and tokens were stored, or before: what it did is not seen again.
#[test]
fn a_failing_tick_gives_everything_back_and_leaves_nothing() {
    for after in [FailsAfter::Plan, FailsAfter::Record, FailsAfter::Sample] {
        let mut player = player(CONFIG);
        let fail = Op::FailingTick { max_tokens: None, after };
        play(&mut player, &[submit(&[1, 2, 3, 4, 5], 4), ticks(2), fail]);
        assert_eq!(player.aborted().map(|aborted| aborted.tokens.len()).collect::<Vec<_>>(), [7]);
        play(&mut player, &[Op::Resume { which: 0, alone: false, reach: None }, ticks(2)]);
        assert_eq!(ended(&player)[0].tokens.len(), 9);
    }
}
