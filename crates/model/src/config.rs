//! `config.json` of a Qwen3-MoE directory, in the spellings of `transformers` 4 and 5.

use std::fs;
use std::path::Path;

use r3_core::routes::RouteDims;
use r3_kernels::attention::Heads;
use r3_kernels::router::RouterConfig;
use serde_json::{Map, Value};

use crate::error::ModelError;

/// The largest of the sizes below, and of a row of queries; recipes count as far.
const MAX_SIZE: usize = 1 << 24;

/// Decoder layers at most, dense ones included.
const MAX_LAYERS: usize = 1 << 10;

/// Angles of all positions at most: a table of 4 GiB.
const MAX_ANGLES: usize = 1 << 29;

/// Parameters at most: sixteen times those of the largest models there are, and their bytes can still be counted.
const MAX_PARAMETERS: usize = 1 << 44;

/// Characters of a wrong value shown at most.
const SHOWN_CHARS: usize = 80;

/// Shape and constants of one model; every field is already checked, and so is every size computed of them: a
/// file can ask for nothing that overflows.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// `V`.
    pub vocab_size: usize,
    /// `D`.
    pub hidden_size: usize,
    /// Decoder layers, dense ones included.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Elements of one head; even.
    pub head_dim: usize,
    /// Inner width of a dense layer's MLP.
    pub dense_inter: usize,
    /// `I`, the inner width of one expert.
    pub moe_inter: usize,
    /// `E`.
    pub n_experts: usize,
    /// `K`.
    pub top_k: usize,
    /// Whether gates are renormalised over the `K` chosen experts.
    pub norm_topk_prob: bool,
    /// Whether q, k, v and o projections have a bias.
    pub attention_bias: bool,
    /// Whether the head is the embedding table.
    pub tied_head: bool,
    /// Base of the rotary embedding.
    pub rope_theta: f64,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f32,
    /// Longest sequence.
    pub max_positions: usize,
    /// Standard deviation of freshly initialised matrices.
    pub initializer_range: f32,
    /// Whether each layer is a MoE layer, `[n_layers]`.
    pub is_moe: Vec<bool>,
    /// The file as it was read, for writing it back with the keys r3 does not use.
    pub raw: Map<String, Value>,
}

impl ModelConfig {
    /// Reads `dir/config.json`.
    ///
    /// # Errors
    /// If the file is missing, is not JSON, or asks for something r3 cannot capture or replay.
    pub fn load(dir: &Path) -> Result<Self, ModelError> {
        Self::read(&dir.join("config.json"))
    }

    /// Reads a `config.json` by its own path.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn read(path: &Path) -> Result<Self, ModelError> {
        let text = fs::read_to_string(path)
            .map_err(|source| ModelError::Read { path: path.to_path_buf(), source })?;
        let raw = serde_json::from_str(&text)
            .map_err(|source| ModelError::Json { path: path.to_path_buf(), source })?;
        Self::parse(raw, path)
    }

    /// Checks the keys of `raw`; `path` is only for messages.
    ///
    /// The model's type and sizes have to be there. Any other missing key means what it means to `transformers`.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn parse(raw: Map<String, Value>, path: &Path) -> Result<Self, ModelError> {
        let keys = Keys { raw: &raw, path };
        keys.check_model_type()?;
        keys.refuse_unsupported()?;
        let n_layers = keys.count("num_hidden_layers", None)?;
        if n_layers > MAX_LAYERS {
            return Err(keys.refuse("num_hidden_layers", format!("at most {MAX_LAYERS} layers")));
        }
        let hidden_size = keys.count("hidden_size", None)?;
        let n_heads = keys.count("num_attention_heads", None)?;
        let config = Self {
            vocab_size: keys.count("vocab_size", None)?,
            hidden_size,
            n_layers,
            n_heads,
            n_kv_heads: keys.count("num_key_value_heads", Some(4))?,
            head_dim: keys.count("head_dim", Some(hidden_size / n_heads))?,
            dense_inter: keys.count("intermediate_size", Some(6144))?,
            moe_inter: keys.count("moe_intermediate_size", None)?,
            n_experts: keys.n_experts()?,
            top_k: keys.count("num_experts_per_tok", None)?,
            norm_topk_prob: keys.flag("norm_topk_prob")?,
            attention_bias: keys.flag("attention_bias")?,
            tied_head: keys.flag("tie_word_embeddings")?,
            rope_theta: keys.rope_theta()?,
            rms_norm_eps: narrow(keys.number("rms_norm_eps", 1e-6)?),
            max_positions: keys.count("max_position_embeddings", Some(32_768))?,
            initializer_range: narrow(keys.number("initializer_range", 0.02)?),
            is_moe: keys.moe_layers(n_layers)?,
            raw: Map::new(),
        };
        config.check_shape(&keys)?;
        Ok(Self { raw, ..config })
    }

    fn check_shape(&self, keys: &Keys<'_>) -> Result<(), ModelError> {
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            let needed = format!("a divisor of the {} attention heads", self.n_heads);
            return Err(keys.refuse("num_key_value_heads", needed));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(keys.refuse("head_dim", "an even number, for the rotary embedding".into()));
        }
        if self.top_k > self.n_experts {
            return Err(keys.refuse("num_experts_per_tok", format!("at most the {} experts", self.n_experts)));
        }
        if self.n_experts > usize::from(u16::MAX) + 1 {
            return Err(keys.refuse(keys.experts_key(), "at most 65536 experts".into()));
        }
        if !self.is_moe.contains(&true) {
            return Err(keys.refuse("mlp_only_layers", "at least one MoE layer to route".into()));
        }
        self.check_size(keys)
    }

    fn check_size(&self, keys: &Keys<'_>) -> Result<(), ModelError> {
        if self.n_heads * self.head_dim > MAX_SIZE {
            return Err(keys.refuse("head_dim", format!("at most {MAX_SIZE} elements in all heads")));
        }
        if self.max_positions * (self.head_dim / 2) > MAX_ANGLES {
            let most = MAX_ANGLES / (self.head_dim / 2);
            return Err(keys.refuse("max_position_embeddings", format!("at most {most} for this head_dim")));
        }
        let elements = |shape: &[usize]| shape.iter().try_fold(1, |n: usize, &size| n.checked_mul(size));
        let mut tensors = crate::source::canonical_tensors(self).into_iter();
        let n_parameters = tensors.try_fold(0, |n: usize, (_, shape)| n.checked_add(elements(&shape)?));
        if n_parameters.is_none_or(|n| n > MAX_PARAMETERS) {
            return Err(keys.refuse("hidden_size", format!("at most {MAX_PARAMETERS} parameters in all")));
        }
        Ok(())
    }

    /// Layer ids of the MoE layers, ascending, `[L]`.
    #[must_use]
    pub fn moe_layers(&self) -> Vec<u32> {
        (0u32..).zip(&self.is_moe).filter(|(_, is_moe)| **is_moe).map(|(layer, _)| layer).collect()
    }

    /// Shape of a route row of this model.
    #[must_use]
    pub fn route_dims(&self) -> RouteDims {
        let n_layers = self.is_moe.iter().filter(|is_moe| **is_moe).count();
        RouteDims { n_layers, top_k: self.top_k, n_experts: self.n_experts }
    }

    /// How scores become choices and gates.
    #[must_use]
    pub fn router(&self) -> RouterConfig {
        RouterConfig::softmax(self.n_experts, self.top_k, self.norm_topk_prob)
    }

    /// Attention heads.
    #[must_use]
    pub fn heads(&self) -> Heads {
        Heads { n_heads: self.n_heads, n_kv_heads: self.n_kv_heads, head_dim: self.head_dim }
    }

    /// Parameters of the model.
    #[must_use]
    pub fn n_parameters(&self) -> usize {
        crate::source::canonical_tensors(self).iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }

    /// Parameters that a token is multiplied by: those of its `K` experts, and not the embedding table, unless that is
    /// the head as well.
    #[must_use]
    pub fn active_parameters(&self) -> usize {
        let idle_experts = self.moe_layers().len() * (self.n_experts - self.top_k);
        let embedding = if self.tied_head { 0 } else { self.vocab_size * self.hidden_size };
        self.n_parameters() - idle_experts * 3 * self.moe_inter * self.hidden_size - embedding
    }
}

#[expect(clippy::cast_possible_truncation, reason = "constants of the model are used as f32")]
fn narrow(value: f64) -> f32 {
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

struct Keys<'a> {
    raw: &'a Map<String, Value>,
    path: &'a Path,
}

impl Keys<'_> {
    fn refuse(&self, key: &'static str, needed: String) -> ModelError {
        let found = self.raw.get(key).map_or_else(|| "missing".to_owned(), |value| shown(&value.to_string()));
        ModelError::Config { path: self.path.to_path_buf(), key, found, needed }
    }

    fn check_model_type(&self) -> Result<(), ModelError> {
        let model_type = match self.raw.get("model_type") {
            Some(Value::String(model_type)) if model_type == "qwen3_moe" => return Ok(()),
            Some(Value::String(model_type)) => shown(model_type),
            Some(other) => shown(&other.to_string()),
            None => "(missing)".into(),
        };
        Err(ModelError::ModelType { path: self.path.to_path_buf(), model_type })
    }

    /// What this file calls its number of experts: `num_experts` (transformers 4) or `num_local_experts` (5).
    fn experts_key(&self) -> &'static str {
        if self.raw.contains_key("num_experts") { "num_experts" } else { "num_local_experts" }
    }

    fn n_experts(&self) -> Result<usize, ModelError> {
        let n_experts = self.count(self.experts_key(), None)?;
        match self.optional_count("num_local_experts")? {
            Some(other) if other != n_experts => {
                Err(self.refuse("num_local_experts", format!("the {n_experts} of `num_experts`")))
            }
            _ => Ok(n_experts),
        }
    }

    fn optional_count(&self, key: &'static str) -> Result<Option<usize>, ModelError> {
        match self.raw.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_u64().and_then(|count| usize::try_from(count).ok()) {
                Some(count) if count > 0 => Ok(Some(count)),
                _ => Err(self.refuse(key, "a whole number above 0".into())),
            },
        }
    }

    fn count(&self, key: &'static str, default: Option<usize>) -> Result<usize, ModelError> {
        match self.optional_count(key)?.or(default) {
            Some(count) if count > MAX_SIZE => Err(self.refuse(key, format!("at most {MAX_SIZE}"))),
            Some(count) if count > 0 => Ok(count),
            _ => Err(self.refuse(key, "a whole number above 0".into())),
        }
    }

    fn number(&self, key: &'static str, default: f64) -> Result<f64, ModelError> {
        match self.raw.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(value) => match value.as_f64() {
                Some(number) if is_positive(number) => Ok(number),
                _ => Err(self.refuse(key, "a number above 0 in the range of f32".into())),
            },
        }
    }

    fn flag(&self, key: &'static str) -> Result<bool, ModelError> {
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

    /// A layer is sparse unless `mlp_only_layers` lists it or `decoder_sparse_step` skips it.
    fn moe_layers(&self, n_layers: usize) -> Result<Vec<bool>, ModelError> {
        let step = self.count("decoder_sparse_step", Some(1))?;
        let dense: Vec<u64> = match self.raw.get("mlp_only_layers") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(layers)) if layers.iter().all(Value::is_u64) => {
                layers.iter().filter_map(Value::as_u64).collect()
            }
            Some(_) => return Err(self.refuse("mlp_only_layers", "a list of layer indices".into())),
        };
        Ok((0..n_layers).map(|layer| !dense.contains(&(layer as u64)) && (layer + 1) % step == 0).collect())
    }

    fn refuse_unsupported(&self) -> Result<(), ModelError> {
        let is_set = |key: &str| self.raw.get(key).is_some_and(|value| !value.is_null());
        if is_set("rope_scaling") {
            return Err(self.refuse("rope_scaling", "no rope scaling".into()));
        }
        if self.flag("use_sliding_window")? {
            return Err(self.refuse("use_sliding_window", "full attention".into()));
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixtures::{config_with, tiny_json, try_config};

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
        let experts =
            json!({ "num_experts": 1 << 16, "moe_intermediate_size": 1 << 24, "hidden_size": 1 << 24 });
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
}
