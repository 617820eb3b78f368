//! Models of a few hundred parameters for the tests of this crate.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::config::ModelConfig;
use crate::error::ModelError;

/// Two MoE layers of three experts.
pub(crate) fn tiny_json() -> Map<String, Value> {
    let raw = json!({
        "model_type": "qwen3_moe", "vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 12,
        "moe_intermediate_size": 6, "num_experts": 3, "num_experts_per_tok": 2
    });
    raw.as_object().unwrap().clone()
}

/// The tiny model with `changes` put over its keys; `null` removes a key.
pub(crate) fn try_config(changes: Value) -> Result<ModelConfig, ModelError> {
    let mut raw = tiny_json();
    for (key, value) in changes.as_object().unwrap() {
        match value {
            Value::Null => raw.remove(key),
            value => raw.insert(key.clone(), value.clone()),
        };
    }
    ModelConfig::parse(raw, Path::new("config.json"))
}

/// As [`try_config`], of a model that r3 runs.
pub(crate) fn config_with(changes: Value) -> ModelConfig {
    try_config(changes).unwrap()
}

/// A dense layer, then a MoE layer, with attention biases.
pub(crate) fn mixed_config() -> ModelConfig {
    config_with(json!({ "mlp_only_layers": [0], "attention_bias": true, "some_future_key": [1, 2] }))
}

/// A dots1: a dense layer, then a MoE layer of six experts in three groups, with a bias of its router and shared experts.
pub(crate) fn grouped_json() -> Map<String, Value> {
    let raw = json!({
        "model_type": "dots1", "vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 12,
        "moe_intermediate_size": 6, "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 3,
        "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1, "norm_topk_prob": true,
        "routed_scaling_factor": 2.5
    });
    raw.as_object().unwrap().clone()
}

/// That dots1 as r3 runs it.
pub(crate) fn grouped_config() -> ModelConfig {
    ModelConfig::parse(grouped_json(), Path::new("config.json")).unwrap()
}
