//! dots.llm1 (arXiv 2506.05767): Qwen3's attention under the router of DeepSeek-V3 (arXiv 2412.19437), with shared experts.

use r3_kernels::router::Scoring;
use serde_json::Value;

use super::ModelConfig;
use super::keys::{Defaults, Keys, narrow};
use crate::error::ModelError;

const DEFAULTS: Defaults = Defaults { n_kv_heads: 32, dense_inter: 10_944, max_positions: 2048 };
/// `max_window_layers` where it is not there.
const WINDOW_FROM: usize = 62;

pub(super) fn parse(keys: &Keys<'_>) -> Result<ModelConfig, ModelError> {
    let base = keys.base(keys.count("n_routed_experts", None)?, &DEFAULTS)?;
    refuse_windows(keys, base.n_layers)?;
    let n_dense = match keys.raw.get("first_k_dense_replace") {
        None | Some(Value::Null) => 0,
        Some(value) => match value.as_u64().and_then(|count| usize::try_from(count).ok()) {
            Some(count) => count,
            None => return Err(keys.refuse("first_k_dense_replace", "a whole number".into())),
        },
    };
    let groups = keys.count("n_group", Some(1))?;
    let n_kv_heads = match keys.raw.get("num_key_value_heads") {
        Some(Value::Null) => base.n_heads,
        _ => base.n_kv_heads,
    };
    Ok(ModelConfig {
        n_kv_heads,
        scoring: Scoring::Sigmoid { n_groups: groups, top_groups: keys.count("topk_group", Some(1))? },
        gate_scaling: narrow(keys.number("routed_scaling_factor", 1.0)?),
        selection_bias: true,
        shared_inter: base.moe_inter * keys.count("n_shared_experts", None)?,
        is_moe: (0..base.n_layers).map(|layer| layer >= n_dense).collect(),
        ..base
    })
}

/// A layer attends to everything unless `layer_types` says otherwise, or, where that is not there, it comes after
/// `max_window_layers` and there is a window.
fn refuse_windows(keys: &Keys<'_>, n_layers: usize) -> Result<(), ModelError> {
    let full = || "full attention".to_owned();
    match keys.raw.get("layer_types") {
        None | Some(Value::Null) => {}
        Some(Value::Array(types)) if types.iter().all(|kind| kind == "full_attention") => return Ok(()),
        Some(_) => return Err(keys.refuse("layer_types", full())),
    }
    let has_window = keys.raw.get("sliding_window").is_none_or(|window| !window.is_null());
    let from = keys.count("max_window_layers", Some(WINDOW_FROM))?;
    if has_window && n_layers > from {
        return Err(keys.refuse("max_window_layers", full()));
    }
    Ok(())
}
