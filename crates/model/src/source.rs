//! Weights as named f32 tensors: the one language of disk, trainer and engine.

use r3_kernels::gemm::Dtype;
use xxhash_rust::xxh3::Xxh3;

use crate::config::ModelConfig;
use crate::error::ModelError;

/// Somewhere weights can be read from, by canonical name (see [`canonical_tensors`]).
pub trait TensorSource {
    /// Reads tensor `name` into `out`, row-major f32, replacing what was there.
    ///
    /// # Errors
    /// If the tensor does not exist or cannot be read.
    fn read(&self, name: &str, out: &mut Vec<f32>) -> Result<(), ModelError>;
}

/// Every tensor of a model with its shape, in a fixed order.
///
/// Names are Hugging Face's, except that a layer's experts are fused as `transformers` 5 holds them
/// (`mlp.experts.gate_up_proj` `[E, 2I, D]`, gate rows first, and `mlp.experts.down_proj` `[E, D, I]`) and a dense
/// layer's gate and up projections likewise (`mlp.gate_up_proj.weight` `[2F, D]`).
#[must_use]
pub fn canonical_tensors(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let (d, hd) = (config.hidden_size, config.head_dim);
    let (q_rows, kv_rows) = (config.n_heads * hd, config.n_kv_heads * hd);
    let mut tensors = vec![("model.embed_tokens.weight".to_owned(), vec![config.vocab_size, d])];
    for (layer, &is_moe) in config.is_moe.iter().enumerate() {
        let mut add = |suffix: &str, shape: &[usize]| {
            tensors.push((format!("model.layers.{layer}.{suffix}"), shape.to_vec()));
        };
        add("input_layernorm.weight", &[d]);
        for (projection, rows, columns) in
            [("q_proj", q_rows, d), ("k_proj", kv_rows, d), ("v_proj", kv_rows, d), ("o_proj", d, q_rows)]
        {
            add(&format!("self_attn.{projection}.weight"), &[rows, columns]);
            if config.attention_bias {
                add(&format!("self_attn.{projection}.bias"), &[rows]);
            }
        }
        add("self_attn.q_norm.weight", &[hd]);
        add("self_attn.k_norm.weight", &[hd]);
        add("post_attention_layernorm.weight", &[d]);
        if is_moe {
            let (e, inter) = (config.n_experts, config.moe_inter);
            add("mlp.gate.weight", &[e, d]);
            add("mlp.experts.gate_up_proj", &[e, 2 * inter, d]);
            add("mlp.experts.down_proj", &[e, d, inter]);
        } else {
            add("mlp.gate_up_proj.weight", &[2 * config.dense_inter, d]);
            add("mlp.down_proj.weight", &[d, config.dense_inter]);
        }
    }
    tensors.push(("model.norm.weight".to_owned(), vec![d]));
    if !config.tied_head {
        tensors.push(("lm_head.weight".to_owned(), vec![config.vocab_size, d]));
    }
    tensors
}

/// Whether the engine keeps a tensor in f32 whatever its dtype: norms, biases and the router, where rounding
/// would flip choices for nothing.
#[must_use]
pub fn stays_f32(name: &str) -> bool {
    name.ends_with("norm.weight") || name.ends_with(".bias") || name.ends_with("mlp.gate.weight")
}

/// One tensor's line in a refit audit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorHash {
    /// Canonical name.
    pub name: String,
    /// XXH3-64 of the values, rounded to the dtype the engine keeps them in.
    pub hash: u64,
}

/// Hashes every tensor of `source` as an engine of `dtype` would hold it, in canonical order.
///
/// # Errors
/// If a tensor cannot be read.
pub fn hash_tensors(
    config: &ModelConfig,
    source: &dyn TensorSource,
    dtype: Dtype,
) -> Result<Vec<TensorHash>, ModelError> {
    let (mut values, mut bytes) = (Vec::new(), Vec::new());
    let mut hashes = Vec::new();
    for (name, _) in canonical_tensors(config) {
        source.read(&name, &mut values)?;
        let kept_dtype = if stays_f32(&name) { Dtype::F32 } else { dtype };
        let mut hasher = Xxh3::new();
        for chunk in values.chunks(HASH_CHUNK) {
            bytes.clear();
            append_bytes(chunk, kept_dtype, &mut bytes);
            hasher.update(&bytes);
        }
        hashes.push(TensorHash { name, hash: hasher.digest() });
    }
    Ok(hashes)
}

/// Values hashed at once: 16 KiB of bytes stay in the first-level cache.
const HASH_CHUNK: usize = 4096;

/// Appends `values` to `bytes` as little-endian `dtype`, rounding to nearest even.
pub(crate) fn append_bytes(values: &[f32], dtype: Dtype, bytes: &mut Vec<u8>) {
    match dtype {
        Dtype::F32 => bytes.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        Dtype::Bf16 => {
            bytes.extend(values.iter().flat_map(|value| half::bf16::from_f32(*value).to_le_bytes()))
        }
    }
}

/// One hash for a whole model: what a frame carries to say which weights made it.
#[must_use]
pub fn model_hash(hashes: &[TensorHash]) -> u64 {
    let mut hasher = Xxh3::new();
    for tensor in hashes {
        hasher.update(tensor.name.as_bytes());
        hasher.update(&tensor.hash.to_le_bytes());
    }
    hasher.digest()
}

/// Refuses a tensor with a NaN or an infinity in it.
///
/// # Errors
/// The first such element.
pub fn check_finite(name: &str, values: &[f32]) -> Result<(), ModelError> {
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(index) => Err(ModelError::NotFinite { name: name.to_owned(), index, value: values[index] }),
    }
}
