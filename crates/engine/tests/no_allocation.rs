//! A decode tick allocates nothing, whether or not routes are captured or draws truncated, on one thread or as a team of
//! two.

use std::path::Path;

use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_engine::config::EngineConfig;
use r3_engine::engine::{Engine, GroupRequest};
use r3_engine::sampler::Sampling;
use r3_kernels::gemm::Dtype;
use r3_kernels::numerics::Numerics;
use r3_model::config::ModelConfig;
use r3_model::init::FreshWeights;

/// A model of this width: of 8 no work goes to other threads, of 128 a tick is worth a team. Its router scores with a softmax,
/// or, as a dots1, with sigmoids in groups, beside shared experts.
fn model(width: usize, is_grouped: bool) -> ModelConfig {
    let mut json = serde_json::json!({
        "model_type": "qwen3_moe", "vocab_size": 16, "hidden_size": width, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": width / 2, "intermediate_size": width,
        "moe_intermediate_size": width, "num_experts": 4, "num_experts_per_tok": 2,
    });
    if is_grouped {
        let grouped = serde_json::json!({
            "model_type": "dots1", "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
        });
        json.as_object_mut().unwrap().extend(grouped.as_object().unwrap().clone());
    }
    ModelConfig::parse(serde_json::from_value(json).unwrap(), Path::new("config.json")).unwrap()
}

fn engine(model: &ModelConfig, capture_routes: bool, prefix_cache: bool) -> Engine {
    let mut config = EngineConfig {
        dtype: Dtype::Bf16,
        numerics: Numerics::Exact,
        kv_bytes: 0,
        block_tokens: 4,
        max_batch_tokens: 64,
        max_running: 6,
        prefix_cache,
        capture_routes,
        replay: capture_routes.then_some(0.0),
    };
    config.kv_bytes = 256 * config.block_bytes(model);
    Engine::new(config, model, &FreshWeights::new(model, 1), PolicyVersion(0)).unwrap()
}

/// Three groups of two, which sample 60 tokens each.
fn submit(engine: &mut Engine, sampling: Sampling, seed: u64) {
    for group in 0..3 {
        let request = GroupRequest {
            group: GroupId(group),
            prompt: (0..7).map(|at| TokenId((at + 3 * group as u32) % 16)).collect(),
            size: 2,
            max_new_tokens: 60,
            stop_tokens: [].into(),
            sampling,
            seed,
            return_routes: engine.captures_routes().then_some(0),
        };
        engine.submit(&request).unwrap();
    }
}

#[test]
fn a_decode_tick_allocates_nothing() {
    decode(&model(8, false));
    decode(&model(8, true));
}

/// Counted on the thread that leads; who helps runs the same tasks.
#[test]
fn a_decode_tick_of_a_team_allocates_nothing() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    pool.install(|| [false, true].into_iter().for_each(|is_grouped| decode(&model(128, is_grouped))));
}

fn decode(model: &ModelConfig) {
    let whole = Sampling { temperature: 1.0, ..Sampling::GREEDY };
    let cut = Sampling { top_p: 0.9, sample_top_k: 10, min_p: 0.01, ..whole };
    for (capture_routes, prefix_cache, sampling) in
        [(false, false, whole), (false, true, cut), (true, false, cut), (true, true, whole)]
    {
        let mut engine = engine(model, capture_routes, prefix_cache);
        // Buffers grow with the largest batch that was seen.
        submit(&mut engine, sampling, 1);
        while engine.has_work() {
            engine.tick().unwrap();
        }
        while engine.take_finished().is_some() {}
        submit(&mut engine, sampling, 2);
        let started = allocation_counter::measure(|| {
            engine.tick().unwrap();
        });
        assert!(started.count_total > 0, "a first tick makes room, which is seen");
        // Far enough that every sequence fills blocks and takes new ones, and not so far that one ends.
        for tick in 1..59 {
            let info = allocation_counter::measure(|| {
                assert_eq!(engine.tick().unwrap().sampled_tokens, 6);
            });
            assert_eq!(
                info.count_total, 0,
                "tick {tick} allocates {} bytes, with routes: {capture_routes}, prefix cache: {prefix_cache}, {sampling:?}",
                info.bytes_total
            );
        }
        engine.tick().unwrap();
        assert!(!engine.has_work(), "all ended together");
    }
}

/// Behind rows that are replayed, as behind others: computing those again makes room, sampling on does not.
#[test]
fn a_decode_tick_behind_replayed_routes_allocates_nothing() {
    let model = model(8, false);
    for prefix_cache in [false, true] {
        let mut engine = engine(&model, true, prefix_cache);
        let whole = Sampling { temperature: 1.0, ..Sampling::GREEDY };
        submit(&mut engine, whole, 1);
        while engine.has_work() {
            engine.tick().unwrap();
        }
        while engine.take_finished().is_some() {}
        submit(&mut engine, whole, 2);
        for _ in 0..9 {
            engine.tick().unwrap();
        }
        engine.refit(&FreshWeights::new(&model, 2), PolicyVersion(1)).unwrap();
        while engine.tick().unwrap().sampled_tokens < 6 {}
        for tick in 0..40 {
            let info = allocation_counter::measure(|| {
                assert_eq!(engine.tick().unwrap().sampled_tokens, 6);
            });
            assert_eq!(info.count_total, 0, "tick {tick} allocates {} bytes", info.bytes_total);
        }
    }
}
