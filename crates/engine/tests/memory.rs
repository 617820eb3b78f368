//! An engine that has served a hundred thousand requests holds what it held after a few.
//!
//! The only test of its process, since it measures the memory of all of it.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_engine::config::EngineConfig;
use r3_engine::engine::{Engine, GroupRequest};
use r3_engine::sampler::Sampling;
use r3_kernels::gemm::Dtype;
use r3_kernels::numerics::Numerics;
use r3_model::config::ModelConfig;
use r3_model::init::FreshWeights;

/// The smallest model there is: a tick is a few microseconds, so that the test is about what is around it.
fn model() -> ModelConfig {
    let json = r#"{ "model_type": "qwen3_moe", "vocab_size": 16, "hidden_size": 4, "num_hidden_layers": 1,
                    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 4,
                    "moe_intermediate_size": 2, "num_experts": 2, "num_experts_per_tok": 1 }"#;
    ModelConfig::parse(serde_json::from_str(json).unwrap(), Path::new("config.json")).unwrap()
}

/// Bytes of this process in memory.
fn resident_bytes() -> i64 {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: i64 = pages.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

/// Two rollouts of a prompt that no other cycle has, of which the first part is shared.
fn request(cycle: u64) -> GroupRequest {
    let digit = |at: u32| TokenId(u32::try_from(cycle >> (3 * at) & 7).unwrap());
    GroupRequest {
        group: GroupId(cycle),
        prompt: (0..6).map(|_| TokenId(9)).chain((0..6).map(digit)).collect(),
        size: 2,
        max_new_tokens: 4,
        stop_tokens: Arc::new([]),
        sampling: Sampling { temperature: 1.0, ..Sampling::GREEDY },
        seed: 1,
        return_routes: Some(0),
    }
}

/// Submits, computes some of it and takes it back, in every stage that a request can be in.
fn serve(engine: &mut Engine, cycles: std::ops::Range<u64>) {
    for cycle in cycles {
        let ids = engine.submit(&request(cycle)).unwrap();
        for _ in 0..cycle % 3 {
            engine.tick().unwrap();
        }
        if cycle % 2 == 0 {
            assert!(engine.abort(ids[1]));
        }
        engine.abort_all();
        let n_taken = std::iter::from_fn(|| engine.take_finished()).count();
        assert_eq!((n_taken, engine.n_open_requests(), engine.has_work()), (2, 0, false));
    }
}

#[test]
fn memory_is_flat_over_a_hundred_thousand_requests() {
    let config = EngineConfig {
        dtype: Dtype::F32,
        numerics: Numerics::Exact,
        kv_bytes: 16 << 10,
        block_tokens: 4,
        max_batch_tokens: 8,
        max_running: 4,
        prefix_cache: true,
        capture_routes: true,
        replay: None,
    };
    let model = model();
    let mut engine = Engine::new(config, &model, &FreshWeights::new(&model, 1), PolicyVersion(0)).unwrap();
    serve(&mut engine, 0..5_000);
    let before = resident_bytes();
    serve(&mut engine, 5_000..105_000);
    let grown = resident_bytes() - before;
    assert!(grown < 512 << 10, "{grown} bytes more after 100,000 requests");
    let stats = engine.stats();
    assert_eq!((stats.n_running, stats.n_waiting, stats.n_held_blocks), (0, 0, 0));
    assert!(stats.n_hits > 0 && stats.computed_tokens > 100_000, "{stats:?}");
}
