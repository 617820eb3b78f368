use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::*;
use crate::fixtures::{config_with, grouped_config, grouped_json, tiny_json, try_config};

/// The one key that a refusal names.
fn refused(changes: Value) -> (&'static str, String) {
    match try_config(changes) {
        Err(ModelError::Config { key, found, .. }) => (key, found),
        other => panic!("{other:?}"),
    }
}

#[test]
fn both_spellings_of_the_experts_mean_the_same() {
    let four = config_with(json!({ "num_experts": 5, "num_local_experts": null }));
    let five = config_with(json!({ "num_experts": null, "num_local_experts": 5 }));
    assert_eq!((four.n_experts, five.n_experts), (5, 5));
    assert_eq!(config_with(json!({ "num_experts": 5, "num_local_experts": 5 })).n_experts, 5);
    let both = refused(json!({ "num_experts": 5, "num_local_experts": 6 }));
    assert_eq!(both, ("num_local_experts", "6".into()));
    assert_eq!(refused(json!({ "num_experts": null })), ("num_local_experts", "missing".into()));
    assert_eq!(refused(json!({ "num_experts": 65_537 })).0, "num_experts");
    let local = json!({ "num_experts": null, "num_local_experts": 65_537 });
    assert_eq!(refused(local).0, "num_local_experts");
}

#[test]
fn both_spellings_of_theta_mean_the_same() {
    let theta = |changes| config_with(changes).rope_theta;
    assert_eq!(theta(json!({ "rope_theta": 5e5 })), 5e5);
    assert_eq!(theta(json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 5e5 } })), 5e5);
    assert_eq!(theta(json!({ "rope_parameters": { "type": "default" }, "rope_theta": 5e5 })), 5e5);
    assert_eq!(theta(json!({ "rope_parameters": { "rope_theta": 7e5 }, "rope_theta": 5e5 })), 7e5);
    assert_eq!(theta(json!({ "rope_parameters": null })), 1e4);
}

#[test]
fn what_is_left_out_is_what_transformers_takes() {
    let sizes = [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "moe_intermediate_size",
        "num_experts",
        "num_experts_per_tok",
    ];
    let mut raw = tiny_json();
    raw.retain(|key, _| key == "model_type" || sizes.contains(&key.as_str()));
    for (key, value) in [("num_attention_heads", 8), ("hidden_size", 48)] {
        raw.insert(key.into(), json!(value));
    }
    let config = ModelConfig::parse(raw.clone(), Path::new("config.json")).unwrap();
    assert_eq!((config.n_kv_heads, config.head_dim, config.dense_inter), (4, 48 / 8, 6144));
    assert_eq!((config.rope_theta, config.rms_norm_eps, config.initializer_range), (1e4, 1e-6, 0.02));
    assert_eq!(config.max_positions, 32_768);
    assert!(!config.norm_topk_prob && !config.attention_bias && !config.tied_head);
    assert_eq!(config.is_moe, [true; 2]);
    for key in sizes {
        let mut raw = raw.clone();
        raw.remove(key);
        let error = ModelConfig::parse(raw, Path::new("config.json")).unwrap_err().to_string();
        let key = if key == "num_experts" { "num_local_experts" } else { key };
        let needed = "is missing, but r3 needs a whole number above 0";
        assert_eq!(error, format!("config.json: `{key}` {needed}"));
    }
}

#[test]
fn a_layer_is_dense_if_the_list_or_the_step_says_so() {
    let is_moe = |list: Value, step: u64| {
        let layers = json!({ "num_hidden_layers": 4 });
        let changes = json!({ "mlp_only_layers": list, "decoder_sparse_step": step });
        let mut raw = layers.as_object().unwrap().clone();
        raw.extend(changes.as_object().unwrap().clone());
        config_with(Value::Object(raw))
    };
    assert_eq!(is_moe(json!([]), 1).moe_layers(), [0, 1, 2, 3]);
    assert_eq!(is_moe(json!([0, 2]), 1).moe_layers(), [1, 3]);
    assert_eq!(is_moe(json!([]), 2).moe_layers(), [1, 3]);
    let both = is_moe(json!([1]), 2);
    assert_eq!(both.moe_layers(), [3]);
    assert_eq!(both.route_dims(), RouteDims { n_layers: 1, top_k: 2, n_experts: 3 });
}

#[test]
fn what_cannot_be_captured_or_computed_is_refused_by_key() {
    for (key, value) in [
        ("rope_scaling", json!({ "type": "yarn", "factor": 4.0 })),
        ("rope_parameters", json!({ "rope_type": "yarn", "rope_theta": 1e6 })),
        ("rope_parameters", json!({ "type": "linear", "factor": 2.0 })),
        ("rope_parameters", json!({ "rope_theta": 1e6, "partial_rotary_factor": 0.5 })),
        ("rope_parameters", json!({ "rope_theta": -1.0 })),
        ("use_sliding_window", json!(true)),
        ("quantization_config", json!({ "quant_method": "fp8" })),
        ("hidden_act", json!("gelu")),
        ("head_dim", json!(3)),
        ("num_key_value_heads", json!(3)),
        ("num_experts_per_tok", json!(4)),
        ("decoder_sparse_step", json!(3)),
    ] {
        let named = if key == "decoder_sparse_step" { "mlp_only_layers" } else { key };
        assert_eq!(refused(json!({ key: value })).0, named, "{value}");
    }
    assert_eq!(refused(json!({ "mlp_only_layers": [0, 1] })), ("mlp_only_layers", "[0,1]".into()));
    assert!(try_config(json!({ "sliding_window": 4096, "rope_scaling": null })).is_ok());
}

#[test]
fn a_value_of_the_wrong_type_is_refused_by_key() {
    for (key, value) in [
        ("vocab_size", json!("10")),
        ("hidden_size", json!(8.5)),
        ("num_hidden_layers", json!(0)),
        ("num_attention_heads", json!(-2)),
        ("num_experts", json!([3])),
        ("norm_topk_prob", json!(1)),
        ("attention_bias", json!("yes")),
        ("tie_word_embeddings", json!({})),
        ("rope_theta", json!("1e6")),
        ("rope_parameters", json!([1e6])),
        ("rms_norm_eps", json!(0.0)),
        ("mlp_only_layers", json!(0)),
        ("mlp_only_layers", json!(["0"])),
        ("hidden_act", json!(3)),
    ] {
        assert_eq!(refused(json!({ key: value })), (key, value.to_string()));
    }
}

#[test]
fn sizes_beyond_what_can_be_computed_with_are_refused_by_key() {
    for (key, largest) in [
        ("vocab_size", 1_u64 << 24),
        ("hidden_size", 1 << 24),
        ("num_hidden_layers", 1 << 10),
        ("intermediate_size", 1 << 24),
        ("moe_intermediate_size", 1 << 24),
    ] {
        assert!(try_config(json!({ key: largest })).is_ok(), "{key}: {largest}");
        for beyond in [largest + 1, u64::MAX] {
            assert_eq!(refused(json!({ key: beyond })), (key, beyond.to_string()));
        }
    }
    // Heads times their width is the width of a row; two heads here.
    assert!(try_config(json!({ "head_dim": 1 << 23, "max_position_embeddings": 1 })).is_ok());
    assert_eq!(refused(json!({ "head_dim": (1 << 23) + 2 })).0, "head_dim");
    assert_eq!(refused(json!({ "num_attention_heads": 1_u64 << 63 })).0, "num_attention_heads");
    // The table of angles, of head_dim / 2 for each position.
    assert!(try_config(json!({ "head_dim": 128, "max_position_embeddings": 1 << 23 })).is_ok());
    let beyond = json!({ "head_dim": 128, "max_position_embeddings": (1 << 23) + 1 });
    assert_eq!(refused(beyond).0, "max_position_embeddings");
    let experts = json!({ "num_experts": 1 << 16, "moe_intermediate_size": 1 << 24, "hidden_size": 1 << 24 });
    assert_eq!(refused(experts).0, "hidden_size");
}

#[test]
fn a_constant_that_f32_rounds_away_is_refused_by_key() {
    for key in ["rope_theta", "rms_norm_eps", "initializer_range"] {
        for value in [1e-60, 1e60] {
            assert_eq!(refused(json!({ key: value })).0, key, "{value}");
        }
    }
    let refused = refused(json!({ "rope_parameters": { "rope_theta": 1e60 } }));
    assert_eq!(refused.0, "rope_parameters");
}

#[test]
fn what_a_refusal_shows_is_short_and_moves_no_cursor() {
    let message = |changes| try_config(changes).unwrap_err().to_string();
    let wild = "\u{7f}\u{9b}2J";
    for changes in [
        json!({ "model_type": wild }),
        json!({ "hidden_act": wild }),
        json!({ "vocab_size": vec![wild; 10_000] }),
        json!({ "model_type": vec![wild; 10_000] }),
    ] {
        let message = message(changes);
        assert!(!message.contains(char::is_control) && message.len() < 400, "{message:?}");
    }
}

#[test]
fn a_model_of_another_type_is_refused_with_its_type() {
    for (value, named) in
        [(json!("qwen3"), "qwen3"), (json!(3), "3"), (json!(["qwen3_moe"]), "[\"qwen3_moe\"]")]
    {
        match try_config(json!({ "model_type": value })) {
            Err(ModelError::ModelType { model_type, .. }) => assert_eq!(model_type, named),
            other => panic!("{other:?}"),
        }
    }
    let mut raw = tiny_json();
    raw.remove("model_type");
    let error = ModelConfig::parse(raw, Path::new("a/config.json")).unwrap_err();
    assert_eq!(error.to_string(), "a/config.json: model type `(missing)` is not supported");
}

#[test]
fn a_config_that_is_no_object_of_json_is_refused_by_path() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(ModelConfig::load(dir.path()), Err(ModelError::Read { .. })));
    for text in ["{", "[]", "{\"model_type\": }"] {
        fs::write(dir.path().join("config.json"), text).unwrap();
        let Err(ModelError::Json { path, .. }) = ModelConfig::load(dir.path()) else { panic!("{text}") };
        assert_eq!(path, dir.path().join("config.json"));
    }
}

/// The dots1 with `key` set.
fn grouped_with(key: &str, value: Value) -> Result<ModelConfig, ModelError> {
    let mut raw = grouped_json();
    raw.insert(key.into(), value);
    ModelConfig::parse(raw, Path::new("config.json"))
}

#[test]
fn a_dots1_scores_with_a_sigmoid_and_has_shared_experts() {
    let config = grouped_config();
    let scoring = Scoring::Sigmoid { n_groups: 3, top_groups: 2 };
    let expected = RouterConfig { n_experts: 6, top_k: 3, scoring, norm_topk_prob: true, scaling: 2.5 };
    assert_eq!((config.router(), config.is_moe.as_slice()), (expected, &[false, true][..]));
    assert_eq!((config.shared_inter, config.selection_bias), (12, true));
    assert_eq!(config_with(json!({})).router(), RouterConfig::softmax(3, 2, false));
}

#[test]
fn what_a_dots1_leaves_out_is_what_transformers_takes() {
    let mut raw = grouped_json();
    let sizes = ["n_group", "topk_group", "first_k_dense_replace", "norm_topk_prob", "routed_scaling_factor"];
    for key in sizes.into_iter().chain(["num_key_value_heads", "head_dim", "intermediate_size"]) {
        raw.remove(key);
    }
    raw.insert("num_attention_heads".into(), json!(32));
    raw.insert("hidden_size".into(), json!(64));
    let config = ModelConfig::parse(raw.clone(), Path::new("config.json")).unwrap();
    assert_eq!(config.scoring, Scoring::Sigmoid { n_groups: 1, top_groups: 1 });
    assert_eq!((config.gate_scaling, config.norm_topk_prob, config.is_moe), (1.0, false, vec![true; 2]));
    assert_eq!((config.n_kv_heads, config.head_dim, config.dense_inter), (32, 2, 10_944));
    assert_eq!((config.max_positions, config.rope_theta), (2048, 1e4));
    raw.insert("num_attention_heads".into(), json!(16));
    raw.insert("num_key_value_heads".into(), Value::Null);
    assert_eq!(ModelConfig::parse(raw, Path::new("config.json")).unwrap().n_kv_heads, 16);
}

#[test]
fn what_a_dots1_cannot_choose_by_or_attend_with_is_refused_by_key() {
    for (key, value, named) in [
        ("n_routed_experts", json!(2000), "n_routed_experts"),
        ("n_routed_experts", Value::Null, "n_routed_experts"),
        ("n_group", json!(4), "n_group"),
        ("n_group", json!(6), "n_group"),
        ("topk_group", json!(4), "topk_group"),
        ("topk_group", json!(1), "topk_group"),
        ("n_shared_experts", Value::Null, "n_shared_experts"),
        ("first_k_dense_replace", json!(2), "first_k_dense_replace"),
        ("first_k_dense_replace", json!(-1), "first_k_dense_replace"),
        ("routed_scaling_factor", json!(0), "routed_scaling_factor"),
        ("layer_types", json!(["full_attention", "sliding_attention"]), "layer_types"),
        ("max_window_layers", json!(1), "max_window_layers"),
    ] {
        match grouped_with(key, value.clone()) {
            Err(ModelError::Config { key, .. }) => assert_eq!(key, named, "{value}"),
            other => panic!("{key}: {value}: {other:?}"),
        }
    }
    let mut raw = grouped_json();
    raw.extend([("max_window_layers".into(), json!(1)), ("sliding_window".into(), Value::Null)]);
    assert!(ModelConfig::parse(raw, Path::new("config.json")).is_ok(), "no window, no limit");
}
