//! Keys of a `config.json`, each read with its check.

use std::path::Path;

use r3_kernels::router::Scoring;
use serde_json::{Map, Value};

use super::{MAX_LAYERS, MAX_SIZE, ModelConfig};
use crate::error::ModelError;

/// Characters of a wrong value shown at most.
const SHOWN_CHARS: usize = 80;

/// What a kind of model takes for keys that are not there.
pub(super) struct Defaults {
    /// `num_key_value_heads`.
    pub(super) n_kv_heads: usize,
    /// `intermediate_size`.
    pub(super) dense_inter: usize,
    /// `max_position_embeddings`.
    pub(super) max_positions: usize,
}

#[expect(clippy::cast_possible_truncation, reason = "constants of the model are used as f32")]
pub(super) fn narrow(value: f64) -> f32 {
    value as f32
}

/// Whether `value` is above 0 and stays so, and finite, when rounded to f32.
fn is_positive(value: f64) -> bool {
    let value = narrow(value);
    value.is_finite() && value > 0.0
}

/// `value` as a message may show it: not at any length, and without what would move a cursor.
fn shown(value: &str) -> String {
    let mut chars = value.chars();
    let shown = chars.by_ref().take(SHOWN_CHARS);
    let mut shown: String =
        shown.map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect();
    if chars.next().is_some() {
        shown.push('…');
    }
    shown
}

/// The keys of one file.
pub(super) struct Keys<'a> {
    pub(super) raw: &'a Map<String, Value>,
    pub(super) path: &'a Path,
}

impl Keys<'_> {
    /// What all kinds have in common: a softmax over `n_experts` in layers that are all MoE layers.
    pub(super) fn base(&self, n_experts: usize, defaults: &Defaults) -> Result<ModelConfig, ModelError> {
        self.refuse_unsupported()?;
        let n_layers = self.count("num_hidden_layers", None)?;
        if n_layers > MAX_LAYERS {
            return Err(self.refuse("num_hidden_layers", format!("at most {MAX_LAYERS} layers")));
        }
        let hidden_size = self.count("hidden_size", None)?;
        let n_heads = self.count("num_attention_heads", None)?;
        Ok(ModelConfig {
            vocab_size: self.count("vocab_size", None)?,
            hidden_size,
            n_layers,
            n_heads,
            n_kv_heads: self.count("num_key_value_heads", Some(defaults.n_kv_heads))?,
            head_dim: self.count("head_dim", Some(hidden_size / n_heads))?,
            dense_inter: self.count("intermediate_size", Some(defaults.dense_inter))?,
            moe_inter: self.count("moe_intermediate_size", None)?,
            n_experts,
            top_k: self.count("num_experts_per_tok", None)?,
            scoring: Scoring::Softmax,
            norm_topk_prob: self.flag("norm_topk_prob")?,
            gate_scaling: 1.0,
            selection_bias: false,
            shared_inter: 0,
            attention_bias: self.flag("attention_bias")?,
            tied_head: self.flag("tie_word_embeddings")?,
            rope_theta: self.rope_theta()?,
            rms_norm_eps: narrow(self.number("rms_norm_eps", 1e-6)?),
            max_positions: self.count("max_position_embeddings", Some(defaults.max_positions))?,
            initializer_range: narrow(self.number("initializer_range", 0.02)?),
            is_moe: vec![true; n_layers],
            raw: Map::new(),
        })
    }

    pub(super) fn refuse(&self, key: &'static str, needed: String) -> ModelError {
        let found = self.raw.get(key).map_or_else(|| "missing".to_owned(), |value| shown(&value.to_string()));
        ModelError::Config { path: self.path.to_path_buf(), key, found, needed }
    }

    /// What kind of model it is, of those that r3 runs.
    pub(super) fn model_type(&self) -> Result<&str, ModelError> {
        let model_type = match self.raw.get("model_type") {
            Some(Value::String(model_type)) if ["qwen3_moe", "dots1"].contains(&model_type.as_str()) => {
                return Ok(model_type);
            }
            Some(Value::String(model_type)) => shown(model_type),
            Some(other) => shown(&other.to_string()),
            None => "(missing)".into(),
        };
        Err(ModelError::ModelType { path: self.path.to_path_buf(), model_type })
    }

    /// What this file calls its number of experts: `num_experts` (transformers 4), `num_local_experts` (5), or, of a dots1,
    /// `n_routed_experts`.
    pub(super) fn experts_key(&self) -> &'static str {
        match self.is_dots1() {
            true => "n_routed_experts",
            false if self.raw.contains_key("num_experts") => "num_experts",
            false => "num_local_experts",
        }
    }

    /// What says which layers are dense.
    pub(super) fn dense_key(&self) -> &'static str {
        if self.is_dots1() { "first_k_dense_replace" } else { "mlp_only_layers" }
    }

    fn is_dots1(&self) -> bool {
        self.raw.get("model_type").is_some_and(|model_type| model_type == "dots1")
    }

    pub(super) fn optional_count(&self, key: &'static str) -> Result<Option<usize>, ModelError> {
        match self.raw.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_u64().and_then(|count| usize::try_from(count).ok()) {
                Some(count) if count > 0 => Ok(Some(count)),
                _ => Err(self.refuse(key, "a whole number above 0".into())),
            },
        }
    }

    pub(super) fn count(&self, key: &'static str, default: Option<usize>) -> Result<usize, ModelError> {
        match self.optional_count(key)?.or(default) {
            Some(count) if count > MAX_SIZE => Err(self.refuse(key, format!("at most {MAX_SIZE}"))),
            Some(count) if count > 0 => Ok(count),
            _ => Err(self.refuse(key, "a whole number above 0".into())),
        }
    }

    pub(super) fn number(&self, key: &'static str, default: f64) -> Result<f64, ModelError> {
        match self.raw.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(value) => match value.as_f64() {
                Some(number) if is_positive(number) => Ok(number),
                _ => Err(self.refuse(key, "a number above 0 in the range of f32".into())),
            },
        }
    }

    pub(super) fn flag(&self, key: &'static str) -> Result<bool, ModelError> {
        match self.raw.get(key) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.refuse(key, "true or false".into())),
        }
    }

    /// `rope_theta` (transformers 4) or `rope_parameters.rope_theta` (transformers 5).
    fn rope_theta(&self) -> Result<f64, ModelError> {
        let theta = self.number("rope_theta", 1e4)?;
        let parameters = match self.raw.get("rope_parameters") {
            None | Some(Value::Null) => return Ok(theta),
            Some(parameters) => parameters,
        };
        let refuse =
            || self.refuse("rope_parameters", "rope_type `default` and a positive rope_theta".into());
        let parameters = parameters.as_object().ok_or_else(refuse)?;
        let is_plain = |(key, value): (&String, &Value)| match key.as_str() {
            "rope_theta" => value.as_f64().is_some_and(is_positive),
            "rope_type" | "type" => value == "default",
            _ => value.is_null(),
        };
        if !parameters.iter().all(is_plain) {
            return Err(refuse());
        }
        Ok(parameters.get("rope_theta").and_then(Value::as_f64).unwrap_or(theta))
    }

    fn refuse_unsupported(&self) -> Result<(), ModelError> {
        let is_set = |key: &str| self.raw.get(key).is_some_and(|value| !value.is_null());
        if is_set("rope_scaling") {
            return Err(self.refuse("rope_scaling", "no rope scaling".into()));
        }
        if is_set("quantization_config") {
            return Err(self.refuse("quantization_config", "weights that are not quantised".into()));
        }
        if self.raw.get("hidden_act").is_some_and(|activation| activation != "silu") {
            return Err(self.refuse("hidden_act", "`silu`".into()));
        }
        Ok(())
    }
}
