//! `config.json`: what is let in has sizes that can be computed.

use std::path::Path;

use r3_engine::config::EngineConfig;
use r3_model::config::ModelConfig;
use r3_model::source::canonical_tensors;
use r3_recipe::check::Limit;
use serde_json::{Map, Value};

use crate::bounded::bounded;
use crate::said::check_said;

/// Reading a model's configuration may hold the names of all tensors of a thousand layers, and [`READ_FACTOR`] bytes for each of its bytes.
const READ_BYTES: usize = 1 << 21;
const READ_FACTOR: usize = 1 << 6;

/// Any text as a `config.json`.
///
/// # Panics
/// If a property does not hold.
pub fn text(input: &[u8]) -> bool {
    let Ok(raw) = serde_json::from_slice::<Map<String, Value>>(input) else { return false };
    let path = Path::new("config.json");
    let parsed = bounded(input, READ_BYTES, READ_FACTOR, || ModelConfig::parse(raw.clone(), path));
    match &parsed {
        Ok(config) => {
            assert_eq!(config.raw, raw);
            check_sizes(config);
        }
        Err(error) => check_said(&error.to_string(), &error.hint()),
    }
    parsed.is_ok()
}

/// Every size that is computed of a model is a number, and holds for the others.
fn check_sizes(config: &ModelConfig) {
    let dims = config.route_dims();
    assert_eq!(config.moe_layers().len(), dims.n_layers);
    assert!(config.moe_layers().iter().all(|&layer| (layer as usize) < config.n_layers));
    assert!((1..=config.n_layers).contains(&dims.n_layers) && config.is_moe.len() == config.n_layers);
    assert!((1..=dims.n_experts).contains(&dims.top_k) && dims.n_experts <= 1 << 16);
    assert!(dims.row_bytes() >= dims.n_layers * dims.top_k);
    assert!(config.n_heads.is_multiple_of(config.n_kv_heads) && config.head_dim.is_multiple_of(2));
    let constants = [config.rope_theta, config.rms_norm_eps.into(), config.initializer_range.into()];
    assert!(constants.iter().all(|constant| constant.is_finite() && *constant > 0.0), "{constants:?}");

    let bytes = |(_, shape): &(String, Vec<usize>)| shape.iter().product::<usize>() * size_of::<f32>();
    let total_bytes: usize = canonical_tensors(config).iter().map(bytes).sum();
    assert_eq!(config.n_parameters() * size_of::<f32>(), total_bytes);
    let most = Limit::MAX_COUNT as usize;
    for block_tokens in [1, most] {
        let engine = engine(block_tokens);
        assert!(engine.block_bytes(config) > 0);
        // Both may refuse, and neither may fail to compute.
        let _ = engine.scheduler(config);
        let _ = engine.check_room(config, most, most);
    }
}

/// The largest engine that a recipe can ask for.
fn engine(block_tokens: usize) -> EngineConfig {
    EngineConfig {
        dtype: r3_kernels::gemm::Dtype::F32,
        numerics: r3_kernels::numerics::Numerics::Exact,
        kv_bytes: u64::MAX,
        block_tokens,
        max_batch_tokens: Limit::MAX_COUNT as usize,
        max_running: Limit::MAX_COUNT as usize,
        prefix_cache: true,
        capture_routes: true,
        replay: None,
    }
}
