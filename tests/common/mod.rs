//! Engines over the models of this repository, requests to them, and what comes out.

use std::path::PathBuf;

use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_core::routes::RouteRows;
use r3_core::support::SupportRows;
use r3_engine::config::EngineConfig;
use r3_engine::engine::{Engine, GroupRequest};
use r3_engine::sampler::Sampling;
use r3_kernels::gemm::Dtype;
use r3_kernels::numerics::Numerics;
use r3_model::checkpoint::Checkpoint;
use r3_scheduler::request::Finished;

/// A model with random weights (4 MoE layers of 8 experts, top-2), one that was trained (8 of 32, top-4), and a dots1 with
/// random weights (a dense layer, then 3 of 12 experts, top-3 of 2 groups of 4).
pub(crate) const MODELS: [&str; 3] = ["tests/golden/nano", "assets/tiny-moe", "tests/golden/grouped"];

/// Samples from all of the vocabulary, unchanged.
pub(crate) const SAMPLED: Sampling = Sampling { temperature: 1.0, ..Sampling::GREEDY };

/// The model at `path` of the repository.
pub(crate) fn checkpoint(path: &str) -> Checkpoint {
    let dir: PathBuf = [env!("CARGO_MANIFEST_DIR"), "../..", path].iter().collect();
    Checkpoint::open(&dir).unwrap()
}

/// An engine that computes everything of these tests in one chunk and finds nothing in a cache.
pub(crate) fn plain(dtype: Dtype) -> EngineConfig {
    EngineConfig {
        dtype,
        numerics: Numerics::Exact,
        kv_bytes: 16 << 20,
        block_tokens: 16,
        max_batch_tokens: 4096,
        max_running: 128,
        prefix_cache: false,
        capture_routes: true,
        replay: None,
    }
}

/// An engine over the model's own weights.
pub(crate) fn engine(checkpoint: &Checkpoint, config: EngineConfig) -> Engine {
    Engine::new(config, checkpoint.config(), checkpoint, PolicyVersion(0)).unwrap()
}

/// `n` tokens that follow from `seed`; none of them is special.
pub(crate) fn tokens(seed: u32, n: u32) -> Vec<TokenId> {
    (0..n).map(|i| TokenId(3 + (seed * 17 + i * i * 5 + i * 3) % 13)).collect()
}

/// `size` rollouts of 12 tokens.
pub(crate) fn request(group: u64, prompt: Vec<TokenId>, size: u32) -> GroupRequest {
    GroupRequest {
        group: GroupId(group),
        prompt: prompt.into(),
        size,
        max_new_tokens: 12,
        stop_tokens: [].into(),
        sampling: SAMPLED,
        seed: 7,
        return_routes: Some(0),
    }
}

/// What may never depend on how it was computed: a rollout, with logprobs as bits, so that equal means equal.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rollout {
    pub(crate) group: GroupId,
    pub(crate) index: u32,
    /// Prompt, then completion.
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) prompt_tokens: usize,
    /// Of the completion.
    pub(crate) logprobs: Vec<u32>,
    pub(crate) routes: Option<RouteRows>,
    pub(crate) support: Option<SupportRows>,
}

impl Rollout {
    pub(crate) fn of(finished: Finished) -> Self {
        Self {
            group: finished.group,
            index: finished.index,
            tokens: finished.tokens,
            prompt_tokens: finished.prompt_tokens,
            logprobs: bits(&finished.rollout_logprobs),
            routes: finished.routes,
            support: finished.support,
        }
    }
}

/// Rollouts, by group and index, and prompt tokens that came from the prefix cache.
#[derive(Clone, Debug)]
pub(crate) struct Sampled {
    pub(crate) rollouts: Vec<Rollout>,
    pub(crate) cached_tokens: usize,
}

/// Submits `requests` together and runs the engine until it is idle.
pub(crate) fn sample(engine: &mut Engine, requests: &[GroupRequest]) -> Sampled {
    for request in requests {
        engine.submit(request).unwrap();
    }
    finish(engine)
}

/// Runs the engine until it is idle.
pub(crate) fn finish(engine: &mut Engine) -> Sampled {
    let mut sampled = Sampled { rollouts: Vec::new(), cached_tokens: 0 };
    loop {
        while let Some(finished) = engine.take_finished() {
            sampled.cached_tokens += finished.cached_tokens;
            sampled.rollouts.push(Rollout::of(finished));
        }
        if !engine.has_work() {
            break;
        }
        engine.tick().unwrap();
    }
    sampled.rollouts.sort_by_key(|rollout| (rollout.group, rollout.index));
    sampled
}

/// Floats as bits: `==` on floats calls -0 and 0 equal, and NaN unequal to itself.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
