//! `config.json` of a Qwen3-MoE or dots1 directory, in the spellings of `transformers` 4 and 5.

use std::fs;
use std::path::Path;

use r3_core::routes::RouteDims;
use r3_kernels::attention::Heads;
use r3_kernels::router::{RouterConfig, Scoring};
use serde_json::{Map, Value};

use crate::error::ModelError;

mod dots1;
mod keys;
mod qwen3_moe;

use keys::Keys;

/// The largest of the sizes below, and of a row of queries; recipes count as far.
const MAX_SIZE: usize = 1 << 24;

/// Decoder layers at most, dense ones included.
const MAX_LAYERS: usize = 1 << 10;

/// Angles of all positions at most: a table of 4 GiB.
const MAX_ANGLES: usize = 1 << 29;

/// Parameters at most: sixteen times those of the largest models there are, and their bytes can still be counted.
const MAX_PARAMETERS: usize = 1 << 44;

/// Experts at most where each score goes through a sigmoid.
const MAX_SIGMOID_EXPERTS: usize = 1 << 10;

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
    /// What the router makes of its logits.
    pub scoring: Scoring,
    /// Whether gates are renormalised over the `K` chosen experts.
    pub norm_topk_prob: bool,
    /// What gates are multiplied by.
    pub gate_scaling: f32,
    /// Whether each router has a bias that is added to scores for the choice alone.
    pub selection_bias: bool,
    /// Inner width of the MLP that every token of a MoE layer takes beside its experts; 0 where there is none.
    pub shared_inter: usize,
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
        let config = match keys.model_type()? {
            "dots1" => dots1::parse(&keys)?,
            _ => qwen3_moe::parse(&keys)?,
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
            return Err(keys.refuse(keys.dense_key(), "at least one MoE layer to route".into()));
        }
        if let Scoring::Sigmoid { n_groups, top_groups } = self.scoring {
            self.check_groups(keys, (n_groups, top_groups))?;
        }
        self.check_size(keys)
    }

    /// A group is ranked by its two best experts, and the best groups have to hold the experts of a token.
    fn check_groups(
        &self,
        keys: &Keys<'_>,
        (n_groups, top_groups): (usize, usize),
    ) -> Result<(), ModelError> {
        let n_experts = self.n_experts;
        if n_experts > MAX_SIGMOID_EXPERTS {
            let needed = format!("at most {MAX_SIGMOID_EXPERTS} experts for a sigmoid");
            return Err(keys.refuse(keys.experts_key(), needed));
        }
        if !n_experts.is_multiple_of(n_groups) || (n_groups > 1 && n_experts / n_groups < 2) {
            let needed = format!("groups of equal size, of two or more of the {n_experts} experts");
            return Err(keys.refuse("n_group", needed));
        }
        if top_groups > n_groups || top_groups * (n_experts / n_groups) < self.top_k {
            let needed = format!("at most {n_groups} groups, that hold a token's {} experts", self.top_k);
            return Err(keys.refuse("topk_group", needed));
        }
        Ok(())
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
        RouterConfig {
            n_experts: self.n_experts,
            top_k: self.top_k,
            scoring: self.scoring,
            norm_topk_prob: self.norm_topk_prob,
            scaling: self.gate_scaling,
        }
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

#[cfg(test)]
mod tests;
