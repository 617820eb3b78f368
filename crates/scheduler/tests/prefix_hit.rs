//! What a prefix hit costs in memory: the rows its trace gains, and nothing beside them.
//!
//! The only test of its process, since it measures the memory of all of it.

use std::fs;
use std::sync::Arc;

use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_core::routes::RouteDims;
use r3_scheduler::config::SchedulerConfig;
use r3_scheduler::request::Request;
use r3_scheduler::scheduler::Scheduler;

/// The shape of Qwen3-30B-A3B.
const DIMS: RouteDims = RouteDims { n_layers: 48, top_k: 8, n_experts: 128 };
const BLOCK_TOKENS: usize = 16;
const PROMPT_TOKENS: usize = 100_000;

/// A value in kB of this process's status, as bytes.
fn status_bytes(key: &str) -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(key)).unwrap();
    let kib: usize = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib << 10
}

fn scheduler() -> Scheduler {
    Scheduler::new(SchedulerConfig {
        block_tokens: BLOCK_TOKENS,
        n_blocks: PROMPT_TOKENS.div_ceil(BLOCK_TOKENS) + 2,
        max_running: 2,
        max_batch_tokens: 4096,
        prefix_cache: true,
        routes: Some(DIMS),
        replays: false,
    })
    .unwrap()
}

/// Computes a prompt without sampling, as `plan` and `advance` see it.
fn prefill(scheduler: &mut Scheduler, prompt: &Arc<[TokenId]>, return_routes: Option<usize>) {
    let request = Request {
        group: GroupId(0),
        prompt: Arc::clone(prompt),
        max_new_tokens: 0,
        stop_tokens: [].into(),
        prompt_logprobs: false,
        max_support: None,
        return_routes,
    };
    scheduler.submit(&request).unwrap();
}

fn tick(scheduler: &mut Scheduler) {
    assert!(scheduler.plan());
    let n_bytes = scheduler.tick_plan().n_tokens() * DIMS.row_bytes();
    scheduler.record(&(0..n_bytes).map(|at| (at % 128) as u8).collect::<Vec<_>>());
    scheduler.advance(&[], PolicyVersion(0));
}

#[test]
fn a_hit_of_a_hundred_thousand_tokens_takes_no_memory_beside_its_trace() {
    let mut scheduler = scheduler();
    let prompt: Arc<[TokenId]> = (0..PROMPT_TOKENS).map(|at| TokenId(at as u32 % 50_000)).collect();
    // Without a trace, so that the highest mark so far is that of the pool.
    prefill(&mut scheduler, &prompt, None);
    while scheduler.has_work() {
        tick(&mut scheduler);
    }
    assert!(scheduler.take_finished().unwrap().routes.is_none());

    prefill(&mut scheduler, &prompt, Some(0));
    let before = status_bytes("VmRSS");
    tick(&mut scheduler);
    let peak = status_bytes("VmHWM") - before;
    let finished = scheduler.take_finished().unwrap();
    let (rows, hit) = (finished.routes.unwrap(), scheduler.stats().hit_tokens);
    assert_eq!((rows.rows() as u64, finished.cached_tokens as u64), (PROMPT_TOKENS as u64, hit));
    assert!(hit as usize >= PROMPT_TOKENS - BLOCK_TOKENS, "{hit} tokens found");
    let trace_bytes = rows.view().bytes().len();
    assert!(peak >= trace_bytes / 2, "{peak} bytes are too few to be measured");
    assert!(peak < trace_bytes + (4 << 20), "{peak} bytes at the peak for a trace of {trace_bytes}");
}
