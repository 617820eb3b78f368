//! Fresh weights for a new model.

use std::collections::BTreeMap;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::source::{SELECTION_BIAS, TensorSource, canonical_tensors};

/// Randomly initialised weights: norms are 1, biases 0, matrices normal with `initializer_range`.
///
/// That is what `transformers` does, with a generator of our own: the same seed gives the same weights.
#[derive(Debug)]
pub struct FreshWeights {
    std: f32,
    seed: u64,
    shapes: BTreeMap<String, (u64, Vec<usize>)>,
}

impl FreshWeights {
    /// Weights for `config` from `seed`.
    #[must_use]
    pub fn new(config: &ModelConfig, seed: u64) -> Self {
        let tensors = canonical_tensors(config);
        let shapes =
            tensors.into_iter().zip(0..).map(|((name, shape), index)| (name, (index, shape))).collect();
        Self { std: config.initializer_range, seed, shapes }
    }
}

impl TensorSource for FreshWeights {
    fn read(&self, name: &str, out: &mut Vec<f32>) -> Result<(), ModelError> {
        out.clear();
        self.visit(name, &mut |run| out.extend_from_slice(run))
    }

    fn visit(&self, name: &str, each: &mut dyn FnMut(&[f32])) -> Result<(), ModelError> {
        let (index, shape) =
            self.shapes.get(name).ok_or_else(|| ModelError::NoSuchTensor { name: name.to_owned() })?;
        let len: usize = shape.iter().product();
        let is_bias = name.ends_with(".bias") || name.ends_with(SELECTION_BIAS);
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(*index);
        let mut run = Vec::new();
        for first in (0..len).step_by(RUN) {
            run.clear();
            run.extend((first..len.min(first + RUN)).map(|_| {
                match (name.ends_with("norm.weight"), is_bias) {
                    (true, _) => 1.0,
                    (false, true) => 0.0,
                    (false, false) => self.std * normal(&mut rng),
                }
            }));
            each(&run);
        }
        Ok(())
    }
}

/// Values made at once.
const RUN: usize = 1 << 14;

/// One standard normal deviate (Box and Muller, 1958).
fn normal(rng: &mut ChaCha8Rng) -> f32 {
    let radius = (-2.0 * (1.0 - rng.random::<f32>()).ln()).sqrt();
    radius * (std::f32::consts::TAU * rng.random::<f32>()).cos()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixtures::{config_with, mixed_config};

    fn read(weights: &FreshWeights, name: &str) -> Vec<f32> {
        let mut values = vec![7.0];
        weights.read(name, &mut values).unwrap();
        values
    }

    #[test]
    fn the_same_seed_gives_the_same_weights_and_another_seed_others() {
        let config = mixed_config();
        let [one, same, other] = [3, 3, 4].map(|seed| FreshWeights::new(&config, seed));
        for (name, shape) in canonical_tensors(&config) {
            let values = read(&one, &name);
            assert_eq!(values.len(), shape.iter().product::<usize>());
            assert_eq!(values, read(&same, &name));
            let is_drawn = !name.ends_with("norm.weight") && !name.ends_with(".bias");
            assert_eq!(values != read(&other, &name), is_drawn, "{name}");
        }
        assert!(one.read("lm_head.bias", &mut Vec::new()).is_err());
    }

    #[test]
    fn tensors_of_one_shape_share_no_values() {
        let weights = FreshWeights::new(&mixed_config(), 3);
        let of = |layer| read(&weights, &format!("model.layers.{layer}.self_attn.q_proj.weight"));
        assert!(of(0).iter().zip(of(1)).all(|(a, b)| *a != b));
    }

    #[test]
    fn norms_are_one_biases_zero_and_matrices_normal_at_the_range() {
        let config =
            config_with(json!({ "vocab_size": 4000, "initializer_range": 0.05, "attention_bias": true }));
        let weights = FreshWeights::new(&config, 1);
        assert_eq!(read(&weights, "model.layers.0.self_attn.q_norm.weight"), [1.0; 4]);
        assert_eq!(read(&weights, "model.layers.0.self_attn.k_proj.bias"), [0.0; 4]);
        let embedding = read(&weights, "model.embed_tokens.weight");
        let n = embedding.len() as f64;
        let moment =
            |power: i32| embedding.iter().map(|v| (f64::from(*v) / 0.05).powi(power)).sum::<f64>() / n;
        // Five standard errors of each moment of 32,000 normal deviates.
        assert!(moment(1).abs() < 0.03, "{}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.04, "{}", moment(2));
        assert!((moment(4) - 3.0).abs() < 0.28, "{}", moment(4));
    }
}
