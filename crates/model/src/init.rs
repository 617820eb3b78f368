//! Fresh weights for a new model.

use std::collections::BTreeMap;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::source::{TensorSource, canonical_tensors};

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
        let (index, shape) =
            self.shapes.get(name).ok_or_else(|| ModelError::NoSuchTensor { name: name.to_owned() })?;
        let len = shape.iter().product();
        out.clear();
        if name.ends_with("norm.weight") {
            out.resize(len, 1.0);
        } else if name.ends_with(".bias") {
            out.resize(len, 0.0);
        } else {
            let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
            rng.set_stream(*index);
            out.extend((0..len).map(|_| self.std * normal(&mut rng)));
        }
        Ok(())
    }
}

/// One standard normal deviate (Box and Muller, 1958).
fn normal(rng: &mut ChaCha8Rng) -> f32 {
    let radius = (-2.0 * (1.0 - rng.random::<f32>()).ln()).sqrt();
    radius * (std::f32::consts::TAU * rng.random::<f32>()).cos()
}
