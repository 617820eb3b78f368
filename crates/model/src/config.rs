//! `config.json` of a Qwen3-MoE directory, in the spellings of `transformers` 4 and 5.

use std::fs;
use std::path::Path;

use r3_core::routes::RouteDims;
use r3_kernels::attention::Heads;
use r3_kernels::experts::ExpertDims;
use r3_kernels::router::RouterConfig;
use serde_json::{Map, Value};

use crate::error::ModelError;

/// Shape and constants of one model; every field is already checked.
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
    /// # Errors
    /// As [`Self::load`].
    pub fn parse(raw: Map<String, Value>, path: &Path) -> Result<Self, ModelError> {
        let keys = Keys { raw: &raw, path };
        let model_type = keys.raw.get("model_type").and_then(Value::as_str).unwrap_or("(missing)");
        if model_type != "qwen3_moe" {
            return Err(ModelError::ModelType { path: path.to_path_buf(), model_type: model_type.into() });
        }
        keys.refuse_unsupported()?;
        let n_layers = keys.count("num_hidden_layers", None)?;
        let hidden_size = keys.count("hidden_size", None)?;
        let n_heads = keys.count("num_attention_heads", None)?;
        let n_experts = match keys.optional_count("num_experts")? {
            Some(n_experts) => n_experts,
            None => keys.count("num_local_experts", None)?,
        };
        let config = Self {
            vocab_size: keys.count("vocab_size", None)?,
            hidden_size,
            n_layers,
            n_heads,
            n_kv_heads: keys.count("num_key_value_heads", Some(n_heads))?,
            head_dim: keys.count("head_dim", Some(hidden_size / n_heads))?,
            dense_inter: keys.count("intermediate_size", Some(4 * hidden_size))?,
            moe_inter: keys.count("moe_intermediate_size", None)?,
            n_experts,
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
            return Err(keys.refuse("num_experts", "at most 65536 experts".into()));
        }
        if !self.is_moe.contains(&true) {
            return Err(keys.refuse("mlp_only_layers", "at least one MoE layer to route".into()));
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
        RouterConfig { n_experts: self.n_experts, top_k: self.top_k, norm_topk_prob: self.norm_topk_prob }
    }

    /// Attention heads.
    #[must_use]
    pub fn heads(&self) -> Heads {
        Heads { n_heads: self.n_heads, n_kv_heads: self.n_kv_heads, head_dim: self.head_dim }
    }

    /// Shape of one layer's experts.
    #[must_use]
    pub fn expert_dims(&self) -> ExpertDims {
        ExpertDims { n_experts: self.n_experts, width: self.hidden_size, inter: self.moe_inter }
    }

    /// Parameters of the model.
    #[must_use]
    pub fn n_parameters(&self) -> usize {
        crate::source::canonical_tensors(self).iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }
}

#[expect(clippy::cast_possible_truncation, reason = "constants of the model are used as f32")]
fn narrow(value: f64) -> f32 {
    value as f32
}

struct Keys<'a> {
    raw: &'a Map<String, Value>,
    path: &'a Path,
}

impl Keys<'_> {
    fn refuse(&self, key: &'static str, needed: String) -> ModelError {
        let found = self.raw.get(key).map_or_else(|| "missing".to_owned(), Value::to_string);
        ModelError::Config { path: self.path.to_path_buf(), key, found, needed }
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
            Some(count) if count > 0 => Ok(count),
            _ => Err(self.refuse(key, "a whole number above 0".into())),
        }
    }

    fn number(&self, key: &'static str, default: f64) -> Result<f64, ModelError> {
        match self.raw.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(value) => match value.as_f64() {
                Some(number) if number.is_finite() && number > 0.0 => Ok(number),
                _ => Err(self.refuse(key, "a number above 0".into())),
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
        let Some(parameters) = self.raw.get("rope_parameters").filter(|value| !value.is_null()) else {
            return self.number("rope_theta", 1e6);
        };
        let kind = parameters.get("rope_type").and_then(Value::as_str).unwrap_or("default");
        let theta = parameters.get("rope_theta").and_then(Value::as_f64);
        match theta {
            Some(theta) if kind == "default" && theta > 0.0 => Ok(theta),
            _ => Err(self.refuse("rope_parameters", "rope_type `default` and a positive rope_theta".into())),
        }
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
        match self.raw.get("hidden_act").and_then(Value::as_str) {
            None | Some("silu") => Ok(()),
            Some(_) => Err(self.refuse("hidden_act", "`silu`".into())),
        }
    }
}
