//! How much memory and batching an engine gets.

use r3_kernels::attention::KvCache;
use r3_kernels::gemm::Dtype;
use r3_model::config::ModelConfig;
use r3_recipe::rollout::{Dtype as RecipeDtype, Engine as EngineSection};
use r3_scheduler::config::SchedulerConfig;

use crate::error::EngineError;

/// Everything an engine is built from, beside its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Format of weights, keys and values.
    pub dtype: Dtype,
    /// Bytes for keys, values and routes of all resident tokens.
    pub kv_bytes: u64,
    /// Slots of a block.
    pub block_tokens: usize,
    /// Tokens of one tick.
    pub max_batch_tokens: usize,
    /// Sequences decoded at once.
    pub max_running: usize,
    /// Whether finished sequences stay findable by their tokens.
    pub prefix_cache: bool,
    /// Whether routes are captured. Without, no memory is held for them.
    pub capture_routes: bool,
}

impl EngineConfig {
    /// Takes a recipe's `engine` section.
    #[must_use]
    pub fn from_recipe(section: &EngineSection, dtype: RecipeDtype, capture_routes: bool) -> Self {
        Self {
            dtype: match dtype {
                RecipeDtype::F32 => Dtype::F32,
                RecipeDtype::Bf16 => Dtype::Bf16,
            },
            kv_bytes: section.kv_memory.0,
            block_tokens: section.block_tokens,
            max_batch_tokens: section.max_batch_tokens,
            max_running: section.max_running,
            prefix_cache: section.prefix_cache,
            capture_routes,
        }
    }

    /// Bytes one block takes: keys and values of every layer, and route rows with their validity bits.
    #[must_use]
    pub fn block_bytes(&self, model: &ModelConfig) -> u64 {
        let kv = KvCache::bytes_per_slot(model.n_layers, model.heads(), self.dtype) * self.block_tokens;
        (kv + self.sizes(model, 0).route_bytes_per_block()) as u64
    }

    /// The scheduler's share of this configuration: as many blocks as `kv_bytes` pays for.
    ///
    /// # Errors
    /// If not even one block fits.
    pub fn scheduler(&self, model: &ModelConfig) -> Result<SchedulerConfig, EngineError> {
        let block_bytes = self.block_bytes(model);
        let n_blocks = usize::try_from(self.kv_bytes / block_bytes).unwrap_or(usize::MAX);
        if n_blocks == 0 {
            let (kv_bytes, block_tokens) = (self.kv_bytes, self.block_tokens);
            return Err(EngineError::NoBlock { kv_bytes, block_bytes, block_tokens });
        }
        Ok(self.sizes(model, n_blocks))
    }

    /// Refuses a cache that could not hold one prompt with its completion, and sequences the model cannot place.
    ///
    /// # Errors
    /// With the numbers that do not fit.
    pub fn check_room(
        &self,
        model: &ModelConfig,
        prompt_tokens: usize,
        max_new_tokens: usize,
    ) -> Result<(), EngineError> {
        let tokens = prompt_tokens + max_new_tokens;
        if tokens > model.max_positions {
            return Err(EngineError::TooLong { tokens, max_positions: model.max_positions });
        }
        let capacity_tokens = self.scheduler(model)?.n_blocks * self.block_tokens;
        // The last sampled token is never fed, so it needs no slot.
        let needed_tokens = prompt_tokens + max_new_tokens.saturating_sub(1);
        if needed_tokens > capacity_tokens {
            let needed_bytes = self.block_bytes(model) * needed_tokens.div_ceil(self.block_tokens) as u64;
            let kv_bytes = self.kv_bytes;
            return Err(EngineError::KvTooSmall { kv_bytes, capacity_tokens, needed_tokens, needed_bytes });
        }
        Ok(())
    }

    fn sizes(&self, model: &ModelConfig, n_blocks: usize) -> SchedulerConfig {
        SchedulerConfig {
            block_tokens: self.block_tokens,
            n_blocks,
            max_running: self.max_running,
            max_batch_tokens: self.max_batch_tokens,
            prefix_cache: self.prefix_cache,
            routes: self.capture_routes.then(|| model.route_dims()),
        }
    }
}
