//! Qwen3-MoE (arXiv 2505.09388).

use serde_json::Value;

use super::ModelConfig;
use super::keys::{Defaults, Keys};
use crate::error::ModelError;

const DEFAULTS: Defaults = Defaults { n_kv_heads: 4, dense_inter: 6144, max_positions: 32_768 };

pub(super) fn parse(keys: &Keys<'_>) -> Result<ModelConfig, ModelError> {
    if keys.flag("use_sliding_window")? {
        return Err(keys.refuse("use_sliding_window", "full attention".into()));
    }
    let base = keys.base(n_experts(keys)?, &DEFAULTS)?;
    Ok(ModelConfig { is_moe: moe_layers(keys, base.n_layers)?, ..base })
}

fn n_experts(keys: &Keys<'_>) -> Result<usize, ModelError> {
    let n_experts = keys.count(keys.experts_key(), None)?;
    match keys.optional_count("num_local_experts")? {
        Some(other) if other != n_experts => {
            Err(keys.refuse("num_local_experts", format!("the {n_experts} of `num_experts`")))
        }
        _ => Ok(n_experts),
    }
}

/// A layer is sparse unless `mlp_only_layers` lists it or `decoder_sparse_step` skips it.
fn moe_layers(keys: &Keys<'_>, n_layers: usize) -> Result<Vec<bool>, ModelError> {
    let step = keys.count("decoder_sparse_step", Some(1))?;
    let dense: Vec<u64> = match keys.raw.get("mlp_only_layers") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(layers)) if layers.iter().all(Value::is_u64) => {
            layers.iter().filter_map(Value::as_u64).collect()
        }
        Some(_) => return Err(keys.refuse("mlp_only_layers", "a list of layer indices".into())),
    };
    Ok((0..n_layers).map(|layer| !dense.contains(&(layer as u64)) && (layer + 1) % step == 0).collect())
}
