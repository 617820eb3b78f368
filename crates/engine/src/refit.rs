//! Loads trained weights into the engine: audited, whole or not at all, and followed by a flush.

use r3_core::ids::PolicyVersion;
use r3_kernels::gemm::Dtype;
use r3_kernels::team::in_team;
use r3_model::buffers::Buffers;
use r3_model::config::ModelConfig;
use r3_model::executor::Weights;
use r3_model::source::{TensorHash, TensorSource, hash_finite_tensors, hash_tensors};

use crate::engine::Engine;
use crate::error::EngineError;

/// Bytes of keys and values that are worth freeing. Memory that comes back is mapped page by page: for fewer bytes that would be a part
/// of a step, and nobody would miss them.
const WORTH_FREEING: u64 = 8 << 20;

/// What a refit did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefitReport {
    /// The version now served.
    pub version: PolicyVersion,
    /// The epoch that began.
    pub epoch: u64,
    /// Every tensor with its hash, equal on both sides.
    pub hashes: Vec<TensorHash>,
    /// Tensors whose hash is not what it was before.
    pub changed: usize,
}

impl Engine {
    /// Replaces all weights by those of `source`, then forgets KV, routes and prefix cache, which are the old ones'.
    ///
    /// The new weights are built beside the old ones and hashed on both sides first, so a refit that fails leaves
    /// the old epoch whole, and what runs running. Rollouts may be on their way: they keep what they emitted, compute
    /// their KV again, on the routes they recorded if [`EngineConfig::replay`] says so, and sample on with the new weights;
    /// their versions say which token is of which.
    ///
    /// [`EngineConfig::replay`]: crate::config::EngineConfig::replay
    ///
    /// # Errors
    /// If a tensor cannot be read or is not finite, or a hash differs.
    pub fn refit(
        &mut self,
        source: &dyn TensorSource,
        version: PolicyVersion,
    ) -> Result<RefitReport, EngineError> {
        let (exec, config, dtype) = (&mut self.exec, &self.weights.config, self.config.dtype);
        let (weights, hashes) = in_team(|| load(exec, config, source, dtype))?;
        let epoch = self.scheduler.epoch() + 1;
        self.scheduler.flush(epoch)?;
        let changed = hashes.iter().zip(&self.hashes).filter(|(new, old)| new != old).count();
        self.weights = weights;
        self.hashes.clone_from(&hashes);
        self.version = version;
        Ok(RefitReport { version, epoch, hashes, changed })
    }

    /// Forgets KV, routes and prefix cache as a refit does, and keeps the weights.
    ///
    /// # Panics
    /// Never: the epoch moves forward.
    pub fn flush(&mut self) {
        self.scheduler.flush(self.scheduler.epoch() + 1).expect("the epoch moves forward");
    }

    /// Flushes, and frees the memory of keys and values until a tick needs it: others may, while nothing is sampled. Other
    /// engines call this sleep, but nothing has to wake this one.
    pub fn free_cache(&mut self) {
        let block_bytes = self.config.block_bytes(self.model());
        let touched_bytes = self.scheduler.n_touched_blocks() as u64 * block_bytes;
        self.flush();
        if touched_bytes >= WORTH_FREEING {
            self.cache = None;
            self.scheduler.renew_cache();
        }
    }
}

/// Builds resident weights and checks, tensor by tensor, that they are what `source` holds.
pub(crate) fn load(
    exec: &mut Buffers,
    model: &ModelConfig,
    source: &dyn TensorSource,
    dtype: Dtype,
) -> Result<(Weights<Buffers>, Vec<TensorHash>), EngineError> {
    // What is loaded may be shared, and is then not looked at: nothing that is not finite gets past this.
    let trained = hash_finite_tensors(model, source, dtype)?;
    let weights = Weights::load(exec, model, source)?;
    let resident = hash_tensors(model, &weights, dtype)?;
    audit(&trained, &resident)?;
    Ok((weights, resident))
}

fn audit(trained: &[TensorHash], resident: &[TensorHash]) -> Result<(), EngineError> {
    let differing: Vec<_> =
        trained.iter().zip(resident).filter(|(trained, resident)| trained != resident).collect();
    match differing.first() {
        None => Ok(()),
        Some((first, _)) => Err(EngineError::Audit {
            tensors: trained.len(),
            differing: differing.len(),
            first: first.name.clone(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::EngineConfig;
    use crate::fixtures::{config, engine, model, request};

    fn hashes(values: [u64; 3]) -> Vec<TensorHash> {
        let names = ["a", "b", "c"].map(str::to_owned);
        names.into_iter().zip(values).map(|(name, hash)| TensorHash { name, hash }).collect()
    }

    #[test]
    fn an_audit_counts_the_tensors_that_differ_and_names_the_first() {
        assert!(audit(&hashes([1, 2, 3]), &hashes([1, 2, 3])).is_ok());
        let error = audit(&hashes([1, 2, 3]), &hashes([1, 0, 0])).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the engine did not load what it was given: 2 of 3 tensors differ, first `b`"
        );
    }

    /// Blocks of which a single one is worth freeing.
    fn large(small: EngineConfig) -> EngineConfig {
        let kv_bytes = small.block_bytes(&model()) << 14;
        EngineConfig { block_tokens: small.block_tokens << 13, kv_bytes, ..small }
    }

    #[test]
    fn an_engine_whose_cache_was_freed_computes_everything_again_with_the_same_bits() {
        let sample = |engine: &mut Engine, freed_after: usize| {
            engine.submit(&request(9, 6)).unwrap();
            for tick in 0.. {
                if tick == freed_after {
                    let is_large = engine.scheduler.n_touched_blocks() > 0 && engine.config.block_tokens > 4;
                    engine.free_cache();
                    assert_eq!(engine.cache.is_none(), is_large);
                    assert_eq!(engine.stats().n_indexed_blocks, 0);
                }
                if !engine.has_work() {
                    break;
                }
                engine.tick().unwrap();
            }
            let finished = engine.take_finished().unwrap();
            (finished.tokens, finished.rollout_logprobs, finished.routes)
        };
        let small = EngineConfig { prefix_cache: true, ..config(1 << 20) };
        let mut kept = engine(small);
        for config in [small, large(small)] {
            let mut freed = engine(config);
            for freed_after in [0, 1, 3, 6] {
                assert_eq!(sample(&mut freed, freed_after), sample(&mut kept, usize::MAX), "{freed_after}");
            }
        }
    }

    #[test]
    fn what_an_evaluation_wrote_is_freed_although_it_was_flushed_before() {
        let mut engine = engine(large(config(1 << 20)));
        engine.submit(&request(9, 2)).unwrap();
        while engine.has_work() {
            engine.tick().unwrap();
        }
        engine.flush();
        engine.free_cache();
        assert!(engine.cache.is_none());
        assert_eq!(engine.scheduler.n_touched_blocks(), 0, "nothing of the next cache is written");
    }

    #[test]
    fn a_flush_forgets_the_cache_and_keeps_the_weights() {
        let config = EngineConfig { prefix_cache: true, ..config(1 << 20) };
        let mut engine = engine(config);
        let sample = |engine: &mut Engine| {
            engine.submit(&request(9, 2)).unwrap();
            while engine.has_work() {
                engine.tick().unwrap();
            }
            let finished = engine.take_finished().unwrap();
            (finished.cached_tokens, (finished.tokens, finished.rollout_logprobs, finished.routes))
        };
        let (_, first) = sample(&mut engine);
        let (cached_tokens, _) = sample(&mut engine);
        assert_eq!(cached_tokens, 8);
        let hashes = engine.hashes().to_vec();
        engine.flush();
        assert_eq!((sample(&mut engine), engine.hashes()), ((0, first), &hashes[..]));
    }
}
