//! Weights as named f32 tensors: the one language of disk, trainer and engine.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use r3_kernels::cast::narrow_bf16;
use r3_kernels::experts::Experts;
use r3_kernels::gemm::{Dtype, PackedMatrix};
use r3_kernels::parallel;
use xxhash_rust::xxh3::Xxh3;

use crate::config::ModelConfig;
use crate::error::ModelError;

/// Somewhere weights can be read from, by canonical name (see [`canonical_tensors`]).
pub trait TensorSource: Sync {
    /// Reads tensor `name` into `out`, row-major f32, replacing what was there.
    ///
    /// What comes from outside is checked here, where it is in a cache: whoever reads a file refuses what is not finite.
    /// What an optimiser made is checked where it is hashed, by [`hash_finite_tensors`].
    ///
    /// # Errors
    /// If the tensor does not exist or cannot be read.
    fn read(&self, name: &str, out: &mut Vec<f32>) -> Result<(), ModelError>;

    /// The values of tensor `name` where they lie, if the source holds them as [`Self::read`] would give them.
    fn lend(&self, _name: &str) -> Option<Lent<'_>> {
        None
    }

    /// Calls `each` with the values of tensor `name`, one run after the other: a source that does not hold a tensor as it is
    /// read need not make all of it at once.
    ///
    /// # Errors
    /// As [`Self::read`]; `each` may have seen some of the values then.
    fn visit(&self, name: &str, each: &mut dyn FnMut(&[f32])) -> Result<(), ModelError> {
        if let Some(values) = self.lend(name) {
            each(&values);
            return Ok(());
        }
        let mut values = Vec::new();
        self.read(name, &mut values)?;
        each(&values);
        Ok(())
    }

    /// Hears that tensor `name`, a matrix, was packed by who read it: as long as it is held, the source may compute with it, too.
    fn packed_matrix(&self, _name: &str, _matrix: &Arc<PackedMatrix>) {}

    /// The same of the experts whose down projections are tensor `down`.
    fn packed_experts(&self, _down: &str, _experts: &Arc<Experts>) {}
}

/// Values of a tensor, row-major, in the source's own memory.
pub type Lent<'a> = Box<dyn Deref<Target = [f32]> + 'a>;

/// Every tensor of a model with its shape, in a fixed order.
///
/// Names are Hugging Face's, except that a layer's experts are fused as `transformers` 5 holds them
/// (`mlp.experts.gate_up_proj` `[E, 2I, D]`, gate rows first, and `mlp.experts.down_proj` `[E, D, I]`) and the gate and
/// up projections of dense layers and shared experts likewise (`mlp.gate_up_proj.weight` `[2F, D]`).
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
            if config.selection_bias {
                add(&format!("mlp.{SELECTION_BIAS}"), &[e]);
            }
            add("mlp.experts.gate_up_proj", &[e, 2 * inter, d]);
            add("mlp.experts.down_proj", &[e, d, inter]);
            if config.shared_inter > 0 {
                add("mlp.shared_experts.gate_up_proj.weight", &[2 * config.shared_inter, d]);
                add("mlp.shared_experts.down_proj.weight", &[d, config.shared_inter]);
            }
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

/// A router's bias, behind the name of its MLP.
pub const SELECTION_BIAS: &str = "gate.e_score_correction_bias";

/// Whether the engine keeps a tensor in f32 whatever its dtype: norms, biases and the router, where rounding
/// would flip choices for nothing.
#[must_use]
pub fn stays_f32(name: &str) -> bool {
    let kept = ["norm.weight", ".bias", "mlp.gate.weight", SELECTION_BIAS];
    kept.iter().any(|suffix| name.ends_with(suffix))
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
    hash_each(config, |name| hash(source, name, dtype, false))
}

/// [`hash_tensors`] of a source that is to be loaded.
///
/// # Errors
/// If a tensor cannot be read or is not finite: the first in canonical order.
pub fn hash_finite_tensors(
    config: &ModelConfig,
    source: &dyn TensorSource,
    dtype: Dtype,
) -> Result<Vec<TensorHash>, ModelError> {
    hash_each(config, |name| hash(source, name, dtype, true))
}

/// Hashes all tensors side by side: one is a single chain.
fn hash_each(
    config: &ModelConfig,
    hash: impl Fn(&str) -> Result<u64, ModelError> + Sync + Send,
) -> Result<Vec<TensorHash>, ModelError> {
    let tensors = canonical_tensors(config);
    let hashes: Vec<OnceLock<_>> = tensors.iter().map(|_| OnceLock::new()).collect();
    parallel::for_each(tensors.len(), HASH_WORK * config.n_parameters(), |at| {
        hashes[at].set(hash(&tensors[at].0)).expect("a tensor is hashed once");
    });
    let hashes = hashes.into_iter().map(|hash| hash.into_inner().expect("all were hashed"));
    tensors.into_iter().zip(hashes).map(|((name, _), hash)| Ok(TensorHash { name, hash: hash? })).collect()
}

/// Hashes one tensor, which may have to be finite.
fn hash(source: &dyn TensorSource, name: &str, dtype: Dtype, is_finite: bool) -> Result<u64, ModelError> {
    let dtype = if stays_f32(name) { Dtype::F32 } else { dtype };
    let (mut hasher, mut bytes) = (Xxh3::new(), Vec::new());
    let (mut first, mut checked) = (0, Ok(()));
    source.visit(name, &mut |run| {
        for chunk in run.chunks(HASH_CHUNK) {
            if is_finite && checked.is_ok() {
                checked = check_run(name, first, chunk);
            }
            first += chunk.len();
            match dtype {
                // The bytes are there already.
                Dtype::F32 if cfg!(target_endian = "little") => hasher.update(bytemuck::cast_slice(chunk)),
                Dtype::F32 | Dtype::Bf16 => {
                    bytes.clear();
                    append_bytes(chunk, dtype, &mut bytes);
                    hasher.update(&bytes);
                }
            }
        }
    })?;
    checked.map(|()| hasher.digest())
}

/// Multiply-adds that hashing a value takes, about.
const HASH_WORK: usize = 32;

/// Values hashed at once: 16 KiB of bytes stay in the first-level cache.
const HASH_CHUNK: usize = 4096;

/// Appends `values` to `bytes` as little-endian `dtype`, rounding to nearest even.
pub(crate) fn append_bytes(values: &[f32], dtype: Dtype, bytes: &mut Vec<u8>) {
    match dtype {
        Dtype::F32 => bytes.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        Dtype::Bf16 => {
            let start = bytes.len();
            bytes.resize(start + 2 * values.len(), 0);
            narrow_bf16(values, bytes[start..].as_chunks_mut().0);
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

/// Refuses the first NaN or infinity among those values of a tensor that start with number `first`.
pub(crate) fn check_run(name: &str, first: usize, values: &[f32]) -> Result<(), ModelError> {
    if is_finite(values) {
        return Ok(());
    }
    let found = values.iter().copied().enumerate().find(|(_, value)| !value.is_finite());
    found.map_or(Ok(()), |(at, value)| {
        Err(ModelError::NotFinite { name: name.to_owned(), index: first + at, value })
    })
}

/// Without a way out the loop vectorises; which element it is, is asked only where there is one.
fn is_finite(values: &[f32]) -> bool {
    values.iter().fold(true, |finite, value| finite & value.is_finite())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::fixtures::{config_with, grouped_config, mixed_config};

    /// Tensors in memory.
    struct Held(BTreeMap<String, Vec<f32>>);

    impl Held {
        fn new(config: &ModelConfig) -> Self {
            let filled = |shape: &[usize]| vec![1.0; shape.iter().product()];
            Self(canonical_tensors(config).into_iter().map(|(name, shape)| (name, filled(&shape))).collect())
        }
    }

    impl TensorSource for Held {
        fn read(&self, name: &str, out: &mut Vec<f32>) -> Result<(), ModelError> {
            out.clone_from(&self.0[name]);
            Ok(())
        }
    }

    #[test]
    fn a_mixed_model_lists_its_tensors_in_the_order_of_the_forward() {
        let attention = |layer: usize| {
            [("q_proj", 8, 8), ("k_proj", 4, 8), ("v_proj", 4, 8), ("o_proj", 8, 8)].map(
                |(name, rows, columns)| {
                    let at = format!("model.layers.{layer}.self_attn.{name}");
                    [(format!("{at}.weight"), vec![rows, columns]), (format!("{at}.bias"), vec![rows])]
                },
            )
        };
        let mut expected: Vec<(String, Vec<usize>)> = vec![("model.embed_tokens.weight".into(), vec![10, 8])];
        for layer in 0..2 {
            let at = |suffix: &str| format!("model.layers.{layer}.{suffix}");
            expected.push((at("input_layernorm.weight"), vec![8]));
            expected.extend(attention(layer).into_iter().flatten());
            expected.push((at("self_attn.q_norm.weight"), vec![4]));
            expected.push((at("self_attn.k_norm.weight"), vec![4]));
            expected.push((at("post_attention_layernorm.weight"), vec![8]));
            if layer == 0 {
                expected.push((at("mlp.gate_up_proj.weight"), vec![24, 8]));
                expected.push((at("mlp.down_proj.weight"), vec![8, 12]));
            } else {
                expected.push((at("mlp.gate.weight"), vec![3, 8]));
                expected.push((at("mlp.experts.gate_up_proj"), vec![3, 12, 8]));
                expected.push((at("mlp.experts.down_proj"), vec![3, 8, 6]));
            }
        }
        expected.push(("model.norm.weight".into(), vec![8]));
        expected.push(("lm_head.weight".into(), vec![10, 8]));
        let config = mixed_config();
        assert_eq!(canonical_tensors(&config), expected);
        let n_parameters: usize = expected.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
        assert_eq!(config.n_parameters(), n_parameters);
        let tied = config_with(serde_json::json!({ "tie_word_embeddings": true }));
        assert!(!canonical_tensors(&tied).iter().any(|(name, _)| name == "lm_head.weight"));
    }

    #[test]
    fn a_dots1_lists_the_bias_of_its_router_and_its_shared_experts() {
        let tensors = canonical_tensors(&grouped_config());
        let mlp =
            tensors.iter().filter_map(|(name, shape)| Some((name.split_once("layers.1.mlp.")?.1, shape)));
        let expected = [
            ("gate.weight", vec![6, 8]),
            ("gate.e_score_correction_bias", vec![6]),
            ("experts.gate_up_proj", vec![6, 12, 8]),
            ("experts.down_proj", vec![6, 8, 6]),
            ("shared_experts.gate_up_proj.weight", vec![24, 8]),
            ("shared_experts.down_proj.weight", vec![8, 12]),
        ];
        assert!(mlp.eq(expected.iter().map(|(name, shape)| (*name, shape))));
        assert!(stays_f32("model.layers.1.mlp.gate.e_score_correction_bias"));
        assert!(!stays_f32("model.layers.1.mlp.shared_experts.down_proj.weight"));
    }

    #[test]
    fn one_bit_of_one_tensor_changes_its_hash_and_no_other() {
        let config = mixed_config();
        let mut held = Held::new(&config);
        let before = hash_tensors(&config, &held, Dtype::F32).unwrap();
        let name = "model.layers.1.mlp.experts.down_proj";
        let last = held.0.get_mut(name).unwrap().last_mut().unwrap();
        *last = f32::from_bits(last.to_bits() ^ 1);
        let after = hash_tensors(&config, &held, Dtype::F32).unwrap();
        let changed: Vec<_> =
            before.iter().zip(&after).filter(|(b, a)| b != a).map(|(b, _)| &b.name).collect();
        assert_eq!(changed, [name]);
        assert_ne!(model_hash(&before), model_hash(&after));
    }

    #[test]
    fn a_bf16_engine_hashes_what_rounding_leaves_and_keeps_routing_in_f32() {
        let config = mixed_config();
        let mut held = Held::new(&config);
        let before = hash_tensors(&config, &held, Dtype::Bf16).unwrap();
        for values in held.0.values_mut() {
            values[0] += 1e-3; // Less than half a step of bf16 at 1.
        }
        let after = hash_tensors(&config, &held, Dtype::Bf16).unwrap();
        for (before, after) in before.iter().zip(&after) {
            assert_eq!(before.hash != after.hash, stays_f32(&before.name), "{}", before.name);
        }
    }

    #[test]
    fn norms_biases_and_the_router_stay_in_f32_and_projections_do_not() {
        let kept: Vec<String> = canonical_tensors(&mixed_config())
            .into_iter()
            .map(|(name, _)| name)
            .filter(|name| stays_f32(name))
            .collect();
        let projections = ["q_proj", "k_proj", "v_proj", "o_proj"];
        let mut expected = vec!["model.norm.weight".to_owned(), "model.layers.1.mlp.gate.weight".to_owned()];
        for layer in 0..2 {
            let at = |suffix: &str| format!("model.layers.{layer}.{suffix}");
            expected.extend(projections.map(|name| at(&format!("self_attn.{name}.bias"))));
            let norms =
                ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"];
            expected.extend(norms.map(|name| at(&format!("{name}.weight"))));
        }
        let sorted = |mut names: Vec<String>| {
            names.sort();
            names
        };
        assert_eq!(sorted(kept), sorted(expected));
    }

    #[test]
    fn the_first_value_that_is_not_finite_is_named_with_its_place() {
        let config = mixed_config();
        let mut held = Held::new(&config);
        let name = "model.layers.0.self_attn.q_proj.weight";
        let mut values = vec![1.0; 3 * HASH_CHUNK];
        for (at, value) in [(HASH_CHUNK + 7, f32::NAN), (2 * HASH_CHUNK, f32::INFINITY)] {
            values[at] = value;
        }
        held.0.insert(name.into(), values);
        held.0.get_mut("model.norm.weight").unwrap()[0] = f32::NAN;
        let expected = format!("tensor `{name}` is NaN at element {}", HASH_CHUNK + 7);
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                for dtype in [Dtype::F32, Dtype::Bf16] {
                    let refused = hash_finite_tensors(&config, &held, dtype).unwrap_err();
                    assert_eq!(refused.to_string(), expected, "{threads} threads");
                }
            });
        }
        held = Held::new(&config);
        let hashes = hash_tensors(&config, &held, Dtype::Bf16).unwrap();
        assert_eq!(hash_finite_tensors(&config, &held, Dtype::Bf16).unwrap(), hashes);
    }

    #[test]
    fn a_models_hash_depends_on_names_values_and_order() {
        let hash = |name: &str, hash| TensorHash { name: name.into(), hash };
        let of = |hashes: &[TensorHash]| model_hash(hashes);
        let plain = of(&[hash("a", 1), hash("b", 2)]);
        assert_eq!(plain, of(&[hash("a", 1), hash("b", 2)]));
        assert_ne!(plain, of(&[hash("c", 1), hash("b", 2)]));
        assert_ne!(plain, of(&[hash("a", 3), hash("b", 2)]));
        assert_ne!(plain, of(&[hash("b", 2), hash("a", 1)]));
        assert_ne!(plain, of(&[hash("a", 1)]));
    }

    #[test]
    fn a_hash_does_not_depend_on_how_values_are_cut() {
        let values: Vec<f32> = (0..HASH_CHUNK + 3).map(|i| i as f32).collect();
        let config = config_with(serde_json::json!({}));
        let mut held = Held::new(&config);
        held.0.insert("model.norm.weight".into(), values.clone());
        let hashes = hash_tensors(&config, &held, Dtype::F32).unwrap();
        let mut bytes = Vec::new();
        append_bytes(&values, Dtype::F32, &mut bytes);
        let norm = hashes.iter().find(|tensor| tensor.name == "model.norm.weight").unwrap();
        assert_eq!(norm.hash, xxhash_rust::xxh3::xxh3_64(&bytes));
    }
}
