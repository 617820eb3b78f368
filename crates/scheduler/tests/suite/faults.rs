//! Faults that other systems of this kind have had, each as the smallest program that would show it here.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use r3_core::ids::{PolicyVersion, TokenId};
use r3_core::rollout::FinishReason;
use r3_core::routes::RouteView;
use r3_scheduler::config::SchedulerConfig;
use r3_scheduler::request::{Finished, Request, Sample};
use r3_scheduler::scheduler::Scheduler;

use crate::naive_engine::{DIMS, NaiveEngine, request};

const CONFIG: SchedulerConfig = SchedulerConfig {
    block_tokens: 4,
    n_blocks: 16,
    max_running: 8,
    max_batch_tokens: 64,
    prefix_cache: true,
    routes: Some(DIMS),
};

/// A request that only ends by its length.
fn unstoppable(group: u64, prompt: &[u32], max_new_tokens: usize) -> Request {
    Request { stop_tokens: Arc::new([]), ..request(group, prompt, max_new_tokens) }
}

fn rows(finished: &Finished) -> usize {
    finished.view().routes.map_or(0, RouteView::rows)
}

fn row(finished: &Finished, row: usize) -> Vec<u16> {
    let view = finished.view().routes.unwrap();
    (0..4).map(|at| view.expert(row, at / 2, at % 2)).collect()
}

/// Ticks a bare scheduler once, with `write_row` as the routes and token 1 as every sample.
fn tick(scheduler: &mut Scheduler, write_row: impl FnMut(usize, &mut [u16])) {
    assert!(scheduler.plan());
    scheduler.record(write_row);
    let sites = scheduler.tick_plan().samples.iter();
    let samples: Vec<_> =
        sites.map(|site| Sample { sequence: site.sequence, token: TokenId(1), logprob: -1.0 }).collect();
    scheduler.advance(&samples, PolicyVersion(0));
    scheduler.check();
}

/// sgl-project/sglang#20964: rows were sliced to `T - 1` although all `T` tokens were forwarded.
#[test]
fn a_prefill_only_request_keeps_the_row_of_its_last_token() {
    let mut engine = NaiveEngine::new(CONFIG);
    engine.submit(&request(0, &[1, 2, 3, 4, 5], 0), 1);
    engine.submit(&unstoppable(1, &[1, 2, 3, 4, 6], 1), 1);
    engine.drain();
    engine.finished.sort_by_key(|finished| finished.group);
    let [prefill, sampled] = &engine.finished[..] else { panic!("two requests") };
    assert_eq!((rows(prefill), prefill.tokens.len()), (5, 5));
    assert_eq!((rows(sampled), sampled.tokens.len()), (5, 6));
}

/// sgl-project/sglang#12162: decoded tokens had no rows, or all the same one.
#[test]
fn every_decoded_token_has_its_own_row_but_the_last() {
    let mut engine = NaiveEngine::new(CONFIG);
    engine.submit(&unstoppable(0, &[1, 2, 3], 4), 1);
    engine.drain();
    // Submitted again as a prompt, the same tokens are prefilled at once, without a cache.
    let tokens: Vec<_> = engine.finished[0].tokens.iter().map(|token| token.0).collect();
    let mut oracle = NaiveEngine::new(SchedulerConfig { prefix_cache: false, ..CONFIG });
    oracle.submit(&unstoppable(0, &tokens, 0), 1);
    oracle.drain();
    assert_eq!((rows(&engine.finished[0]), rows(&oracle.finished[0])), (6, 7));
    for position in 0..6 {
        assert_eq!(row(&engine.finished[0], position), row(&oracle.finished[0], position), "{position}");
    }
}

/// sgl-project/sglang#23885: one path forgot to drain the captured rows, which then read as expert 0.
#[test]
fn a_tick_that_was_not_recorded_fails_instead_of_reading_expert_0() {
    let mut scheduler = Scheduler::new(CONFIG).unwrap();
    let sequence = scheduler.submit(&request(0, &[1, 2, 3], 4)).unwrap();
    assert!(scheduler.plan());
    let sample = Sample { sequence, token: TokenId(1), logprob: -1.0 };
    let advanced = catch_unwind(AssertUnwindSafe(|| scheduler.advance(&[sample], PolicyVersion(0))));
    assert!(advanced.is_err());
}

/// sgl-project/sglang#39633: re-prefill under new weights replaced routes whose logprobs had been emitted.
/// vllm-project/vllm#45635: and one version stood for the whole request.
#[test]
fn a_request_preempted_before_a_refit_keeps_its_rows_and_versions() {
    let mut engine = NaiveEngine::new(SchedulerConfig { n_blocks: 4, prefix_cache: false, ..CONFIG });
    let old = engine.submit(&unstoppable(0, &[1, 2, 3, 4], 13), 1)[0];
    engine.submit(&unstoppable(1, &[5, 6], 10), 1);
    while engine.scheduler.stats().n_preemptions == 0 {
        assert!(engine.tick());
    }
    engine.abort(old);
    engine.scheduler.flush(8).unwrap();
    engine.drain();
    let young = &engine.finished[1];
    let n_old = young.versions.iter().filter(|version| version.0 == 0).count();
    assert!((1..10).contains(&n_old), "{n_old} tokens were sampled before the refit");
    assert!(young.versions[n_old..].iter().all(|&version| version == PolicyVersion(8)));
    // The naive engine compared each row with the weights of its own time when the request ended.
    assert_eq!((rows(young), young.tokens.len()), (11, 12));
}

/// vllm-project/vllm#39917: rows of a preempted request were dropped silently.
#[test]
fn preempted_requests_keep_all_their_rows() {
    let mut engine = NaiveEngine::new(SchedulerConfig { n_blocks: 8, ..CONFIG });
    for group in 0..3 {
        engine.submit(&unstoppable(group, &[1 + group as u32, 2, 3, 4], 20), 1);
    }
    engine.drain();
    assert!(engine.scheduler.stats().n_preemptions > 0, "the pool is too small for three");
    assert_eq!(engine.finished.len(), 3);
    assert!(engine.finished.iter().all(|finished| rows(finished) == 23 && finished.tokens.len() == 24));
    assert!(engine.finished.iter().any(|finished| finished.n_preemptions > 0));
}

/// vllm-project/vllm#45635: the blocks of a preempted request were reused before its rows had been read.
#[test]
fn rows_outlive_the_blocks_they_were_written_in() {
    let mut scheduler = Scheduler::new(SchedulerConfig { n_blocks: 2, ..CONFIG }).unwrap();
    let first = scheduler.submit(&unstoppable(0, &[1, 2, 3, 4, 5], 4)).unwrap();
    tick(&mut scheduler, |row, out| out.copy_from_slice(&[row as u16, 4, 3, row as u16 / 2]));
    scheduler.abort(first);
    scheduler.submit(&unstoppable(1, &[9, 8, 7, 6, 5], 4)).unwrap();
    tick(&mut scheduler, |_, out| out.copy_from_slice(&[4, 3, 2, 1]));
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
    scheduler.submit(&unstoppable(0, &[1, 2, 3, 4, 5, 6, 7, 8], 0)).unwrap();
    for chunk in 0..2 {
        tick(&mut scheduler, |row, out| out.copy_from_slice(&[row as u16, 4, chunk, 3]));
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
    scheduler.submit(&unstoppable(0, &[1, 2], 3)).unwrap();
    let mut buffer = [[0; 4]; 2];
    for step in 0..3 {
        buffer = buffer.map(|_| [step, 4, 3, step]);
        tick(&mut scheduler, |row, out| out.copy_from_slice(&buffer[row]));
    }
    let finished = scheduler.take_finished().unwrap();
    let steps: Vec<_> = (0..4).map(|position| row(&finished, position)[0]).collect();
    assert_eq!(steps, [0, 0, 1, 2]);

    scheduler.submit(&unstoppable(1, &[1, 2], 3)).unwrap();
    assert!(scheduler.plan());
    assert!(catch_unwind(AssertUnwindSafe(|| scheduler.plan())).is_err(), "step N + 1 before N was advanced");
}

/// SGLang's route capture: padding rows of a batch wrote slot 0, and a reused slot returned its previous occupant.
#[test]
fn no_row_is_padding_and_no_slot_remembers_its_last_occupant() {
    let mut engine = NaiveEngine::new(SchedulerConfig { n_blocks: 3, ..CONFIG });
    engine.submit(&unstoppable(0, &[1, 2, 3, 4, 5, 6, 7, 8, 9], 1), 1);
    assert!(engine.tick());
    let plan = engine.scheduler.tick_plan();
    assert_eq!((plan.n_tokens(), plan.chunks.iter().map(|chunk| chunk.n_tokens).sum::<usize>()), (9, 9));
    // The same three blocks, other tokens, then a hit on them: the naive engine compares every row.
    engine.submit(&unstoppable(1, &[9, 8, 7, 6, 5, 4, 3, 2, 1], 1), 1);
    engine.drain();
    engine.submit(&unstoppable(2, &[9, 8, 7, 6, 5, 4, 3, 2, 0], 1), 1);
    engine.drain();
    assert_eq!(engine.finished.iter().map(|finished| finished.cached_tokens).collect::<Vec<_>>(), [0, 0, 8]);
    assert_ne!(row(&engine.finished[2], 1), row(&engine.finished[0], 1));
    assert_eq!(row(&engine.finished[2], 1), row(&engine.finished[1], 1));
}

/// vllm-project/vllm#9744, InternLM/lmdeploy#4917, pytorch/rl#4016: the prefix cache survived new weights.
#[test]
fn after_a_refit_nothing_is_cached() {
    let mut engine = NaiveEngine::new(CONFIG);
    let prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9];
    for _ in 0..2 {
        engine.submit(&unstoppable(0, &prompt, 2), 1);
        engine.drain();
    }
    engine.scheduler.flush(1).unwrap();
    engine.submit(&unstoppable(0, &prompt, 2), 1);
    engine.drain();
    let cached: Vec<_> = engine.finished.iter().map(|finished| finished.cached_tokens).collect();
    assert_eq!(cached, [0, 8, 0]);
    let mut fresh = NaiveEngine::new(CONFIG);
    fresh.scheduler.flush(1).unwrap();
    fresh.submit(&unstoppable(0, &prompt, 2), 1);
    fresh.drain();
    assert_eq!(engine.finished[2].tokens, fresh.finished[0].tokens);
    assert_eq!(engine.finished[2].rollout_logprobs, fresh.finished[0].rollout_logprobs);
    assert_eq!(engine.finished[2].routes, fresh.finished[0].routes);
}

/// NVIDIA-NeMo/RL#4018: a shared system prompt was served from blocks up to 17 refits old.
#[test]
fn a_shared_prompt_is_computed_again_after_each_of_many_refits() {
    let mut engine = NaiveEngine::new(CONFIG);
    for refit in 1..=5 {
        for user in 0..3 {
            engine.submit(&unstoppable(user, &[1, 2, 3, 4, 5, 6, 7, 8, 10 + user as u32], 1), 1);
            engine.drain();
        }
        let cached: Vec<_> = engine.finished.drain(..).map(|finished| finished.cached_tokens).collect();
        assert_eq!(cached, [0, 8, 8], "before refit {refit}");
        engine.scheduler.flush(refit).unwrap();
        engine.scheduler.check();
    }
}

/// sgl-project/sglang#39633, radixark/miles#3277: a retraction around a refit kept the logprobs and overwrote their
/// routes. vllm-project/vllm#54443: one version for a request that straddles a refit.
#[test]
fn a_refit_in_mid_request_keeps_the_rows_of_what_was_sampled() {
    let mut engine = NaiveEngine::new(CONFIG);
    let sequence = engine.submit(&unstoppable(0, &[1, 2, 3, 4], 10), 1)[0];
    (0..6).for_each(|_| assert!(engine.tick()));
    let before = engine.scheduler.in_flight().remove(0);
    assert_eq!((before.sequence, before.tokens.len(), rows(&before)), (sequence, 10, 9));
    engine.flush();
    engine.drain();
    let after = &engine.finished[0];
    assert_eq!(rows(after), 13);
    for position in 0..9 {
        assert_eq!(row(after, position), row(&before, position), "row {position}");
    }
    assert_eq!(
        after.versions,
        [[0; 6].as_slice(), &[1; 4]].concat().into_iter().map(PolicyVersion).collect::<Vec<_>>()
    );
    assert!(engine.scheduler.flush(1).is_err(), "an epoch begins once");
}

/// vllm-project/vllm#39568, sgl-project/sglang#26975: a request that ended early must not claim rows it never had.
#[test]
fn an_aborted_prefill_has_the_rows_it_computed() {
    let mut engine = NaiveEngine::new(SchedulerConfig { max_batch_tokens: 3, ..CONFIG });
    let sequence = engine.submit(&unstoppable(0, &[1, 2, 3, 4, 5, 6, 7], 4), 1)[0];
    assert!(engine.tick());
    engine.abort(sequence);
    assert_eq!((rows(&engine.finished[0]), engine.finished[0].finish), (3, FinishReason::Abort));
}
