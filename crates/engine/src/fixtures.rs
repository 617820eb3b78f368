//! A small model with random weights for the tests of this crate.

use std::path::PathBuf;

use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_kernels::gemm::Dtype;
use r3_kernels::numerics::Numerics;
use r3_model::config::ModelConfig;
use r3_model::init::FreshWeights;

use crate::config::EngineConfig;
use crate::engine::{Engine, GroupRequest};
use crate::sampler::Sampling;

/// The shape of the model in `assets/`: 8 MoE layers of 32 experts, top-4.
pub(crate) fn model() -> ModelConfig {
    let path: PathBuf = [env!("CARGO_MANIFEST_DIR"), "../../assets/tiny-moe/config.json"].iter().collect();
    ModelConfig::read(&path).unwrap()
}

/// Blocks of 4 tokens in `kv_bytes` bytes.
pub(crate) fn config(kv_bytes: u64) -> EngineConfig {
    EngineConfig {
        dtype: Dtype::Bf16,
        numerics: Numerics::Exact,
        kv_bytes,
        block_tokens: 4,
        max_batch_tokens: 64,
        max_running: 4,
        prefix_cache: false,
        capture_routes: true,
        replay: None,
    }
}

/// An engine over random weights.
pub(crate) fn engine(config: EngineConfig) -> Engine {
    let model = model();
    Engine::new(config, &model, &FreshWeights::new(&model, 1), PolicyVersion(0)).unwrap()
}

/// One greedy rollout that only its length ends.
pub(crate) fn request(prompt_tokens: u32, max_new_tokens: usize) -> GroupRequest {
    GroupRequest {
        group: GroupId(0),
        prompt: (1..=prompt_tokens).map(|id| TokenId(id % 16)).collect(),
        size: 1,
        max_new_tokens,
        stop_tokens: [].into(),
        sampling: Sampling::GREEDY,
        seed: 0,
        return_routes: Some(0),
    }
}
