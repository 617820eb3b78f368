//! How much memory and batching an engine gets.

use r3_kernels::attention::KvCache;
use r3_kernels::gemm::Dtype;
use r3_kernels::numerics::Numerics;
use r3_model::config::ModelConfig;
use r3_recipe::numerics::Numerics as RecipeNumerics;
use r3_recipe::rollout::{Dtype as RecipeDtype, Engine as EngineSection};
use r3_scheduler::config::SchedulerConfig;

use crate::error::EngineError;

/// Everything an engine is built from, beside its weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineConfig {
    /// Format of weights, keys and values.
    pub dtype: Dtype,
    /// Order of sums.
    pub numerics: Numerics,
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
    /// For rollouts that a trainer replays: a sequence that goes on under other weights, and is computed again by these,
    /// takes the routes it recorded under the old ones, for experts that score at least this share of the least that the
    /// router itself would choose, in `0..=1`; 0 takes all. So what is sampled behind them has the logprob that the trainer
    /// computes. `None`: the new router chooses there, as it does for a trainer that replays nothing.
    pub replay: Option<f32>,
}

impl EngineConfig {
    /// Takes a recipe's `engine` section, its `rollout.dtype` and its numerics. Nothing is replayed.
    #[must_use]
    pub fn from_recipe(
        section: &EngineSection,
        (dtype, numerics): (RecipeDtype, RecipeNumerics),
        capture_routes: bool,
    ) -> Self {
        Self {
            dtype: match dtype {
                RecipeDtype::F32 => Dtype::F32,
                RecipeDtype::Bf16 => Dtype::Bf16,
            },
            numerics: match numerics {
                RecipeNumerics::Exact => Numerics::Exact,
                RecipeNumerics::Fast => Numerics::Fast,
            },
            kv_bytes: section.kv_memory.0,
            block_tokens: section.block_tokens,
            max_batch_tokens: section.max_batch_tokens,
            max_running: section.max_running,
            prefix_cache: section.prefix_cache,
            capture_routes,
            replay: None,
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
            replays: self.replay.is_some(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{ProptestConfig, prop_assert, prop_assert_eq, proptest};

    use super::*;
    use crate::fixtures::{config, engine, model, request};

    #[test]
    fn a_recipe_says_all_of_it() {
        let section = EngineSection {
            kv_memory: r3_recipe::bytes::Bytes::mib(3),
            block_tokens: 5,
            max_batch_tokens: 6,
            max_running: 7,
            prefix_cache: false,
        };
        let expected = EngineConfig {
            dtype: Dtype::Bf16,
            numerics: Numerics::Fast,
            kv_bytes: 3 << 20,
            block_tokens: 5,
            max_batch_tokens: 6,
            max_running: 7,
            prefix_cache: false,
            capture_routes: true,
            replay: None,
        };
        assert_eq!(
            EngineConfig::from_recipe(&section, (RecipeDtype::Bf16, RecipeNumerics::Fast), true),
            expected
        );
        let changed =
            EngineConfig { dtype: Dtype::F32, numerics: Numerics::Exact, capture_routes: false, ..expected };
        assert_eq!(
            EngineConfig::from_recipe(&section, (RecipeDtype::F32, RecipeNumerics::Exact), false),
            changed
        );
    }

    #[test]
    fn a_block_is_charged_for_keys_values_and_captured_routes_only() {
        let model = model();
        let routed = config(0);
        let free = EngineConfig { capture_routes: false, ..routed };
        let kv = 2 * model.n_layers * model.n_kv_heads * model.head_dim * 2 * 4;
        assert_eq!(free.block_bytes(&model), kv as u64);
        assert_eq!(EngineConfig { dtype: Dtype::F32, ..free }.block_bytes(&model), 2 * kv as u64);
        let row_bytes = model.route_dims().row_bytes();
        assert!(routed.block_bytes(&model) >= (kv + 4 * row_bytes) as u64);
        let sizes = EngineConfig { kv_bytes: 1 << 20, ..routed }.scheduler(&model).unwrap();
        assert_eq!(routed.block_bytes(&model), (kv + sizes.route_bytes_per_block()) as u64);
        let sizes = EngineConfig { kv_bytes: 1 << 20, ..free }.scheduler(&model).unwrap();
        assert_eq!((sizes.route_bytes_per_block(), sizes.routes), (0, None));
    }

    #[test]
    fn there_are_as_many_blocks_as_the_memory_pays_for() {
        let model = model();
        let block_bytes = config(0).block_bytes(&model);
        let n_blocks = |kv_bytes| config(kv_bytes).scheduler(&model).map(|sizes| sizes.n_blocks);
        assert_eq!(n_blocks(block_bytes).unwrap(), 1);
        assert_eq!(n_blocks(4 * block_bytes - 1).unwrap(), 3);
        match n_blocks(block_bytes - 1) {
            Err(EngineError::NoBlock { kv_bytes, block_bytes: needed, block_tokens }) => {
                assert_eq!((kv_bytes, needed, block_tokens), (block_bytes - 1, block_bytes, 4));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_sequence_longer_than_the_models_positions_is_refused() {
        let model = model();
        let room = |new| config(1 << 30).check_room(&model, 3, new);
        assert!(room(model.max_positions - 3).is_ok());
        match room(model.max_positions - 2) {
            Err(EngineError::TooLong { tokens, max_positions }) => {
                assert_eq!((tokens, max_positions), (model.max_positions + 1, model.max_positions));
            }
            other => panic!("{other:?}"),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_bytes_that_a_refusal_asks_for_are_enough_and_no_fewer_are(
            prompt in 1_usize..40, new in 0_usize..40, block_tokens in 1_usize..9, capture_routes: bool
        ) {
            let model = model();
            let sized = |kv_bytes| EngineConfig { block_tokens, capture_routes, ..config(kv_bytes) };
            let one_block = sized(0).block_bytes(&model);
            match sized(one_block).check_room(&model, prompt, new) {
                Ok(()) => prop_assert!(prompt + new.saturating_sub(1) <= block_tokens),
                Err(EngineError::KvTooSmall { kv_bytes, capacity_tokens, needed_bytes, .. }) => {
                    prop_assert_eq!((kv_bytes, capacity_tokens), (one_block, block_tokens));
                    prop_assert!(sized(needed_bytes).check_room(&model, prompt, new).is_ok());
                    prop_assert!(sized(needed_bytes - 1).check_room(&model, prompt, new).is_err());
                }
                Err(other) => panic!("{other}"),
            }
        }
    }

    #[test]
    fn a_cache_of_the_bytes_asked_for_serves_the_sequence_to_its_end() {
        let Err(EngineError::KvTooSmall { needed_bytes, .. }) =
            config(config(0).block_bytes(&model())).check_room(&model(), 7, 6)
        else {
            panic!("one block of 4 tokens does not hold 12");
        };
        let mut engine = engine(config(needed_bytes));
        engine.submit(&request(7, 6)).unwrap();
        while engine.has_work() {
            engine.tick().unwrap();
        }
        let finished = engine.take_finished().unwrap();
        assert_eq!((finished.tokens.len(), engine.stats().n_preemptions), (13, 0));
        assert!(engine.submit(&request(8, 6)).is_err(), "one token more does not fit");
    }
}
