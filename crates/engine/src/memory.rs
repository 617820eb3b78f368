//! What an engine's memory holds and costs, known before weights are read.

use r3_kernels::attention::KvCache;
use r3_model::config::ModelConfig;

use crate::config::EngineConfig;
use crate::error::EngineError;

/// How the KV memory is spent, and what is held beside it.
///
/// Keys, values and captured routes of resident tokens come out of `kv_bytes`, block by block, and are allocated at
/// the start. Traces do not: a trace is the result of its request, copied out of the blocks when these are given up.
/// Nothing else grows with the length of a prompt or of a prefix hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryBudget {
    /// Bytes that were asked for.
    pub kv_bytes: u64,
    /// Slots of a block.
    pub block_tokens: usize,
    /// Blocks that the memory pays for.
    pub n_blocks: usize,
    /// Keys and values of one block.
    pub kv_block_bytes: usize,
    /// Route rows of one block, with its stamp and validity bits; 0 without capture.
    pub route_block_bytes: usize,
    /// One row of a trace; 0 without capture.
    pub trace_row_bytes: usize,
    /// Sequences that run at once, and so may end at once and leave a trace each.
    pub max_running: usize,
}

impl MemoryBudget {
    /// Tokens that can be resident at once.
    #[must_use]
    pub fn capacity_tokens(&self) -> usize {
        self.n_blocks * self.block_tokens
    }

    /// Bytes a resident token takes, its routes included.
    #[must_use]
    pub fn bytes_per_token(&self) -> f64 {
        (self.kv_block_bytes + self.route_block_bytes) as f64 / self.block_tokens as f64
    }

    /// Bytes that the routes of a resident token take.
    #[must_use]
    pub fn route_bytes_per_token(&self) -> f64 {
        self.route_block_bytes as f64 / self.block_tokens as f64
    }

    /// Share of the KV memory that routes take, 0 to 1.
    #[must_use]
    pub fn route_share(&self) -> f64 {
        self.route_block_bytes as f64 / (self.kv_block_bytes + self.route_block_bytes) as f64
    }

    /// Bytes of all traces, at worst: every running sequence has `max_tokens` tokens, of which the last has no row.
    #[must_use]
    pub fn trace_bytes(&self, max_tokens: usize) -> u64 {
        let rows = self.max_running.saturating_mul(max_tokens.saturating_sub(1));
        rows.saturating_mul(self.trace_row_bytes) as u64
    }

    /// Bytes that are held for supports while every running sequence samples `max_new_tokens` tokens, of whose draws each
    /// keeps up to `max_support`: room is made for all of them, so that no tick makes any.
    #[must_use]
    pub fn support_bytes(&self, max_new_tokens: usize, max_support: usize) -> u64 {
        let row_bytes = max_support.saturating_add(1).saturating_mul(size_of::<u32>());
        self.max_running.saturating_mul(max_new_tokens).saturating_mul(row_bytes) as u64
    }
}

impl EngineConfig {
    /// What this configuration holds of `model`.
    ///
    /// # Errors
    /// If the KV memory holds no block.
    pub fn budget(&self, model: &ModelConfig) -> Result<MemoryBudget, EngineError> {
        let sizes = self.scheduler(model)?;
        let kv_slot_bytes = KvCache::bytes_per_slot(model.n_layers, model.heads(), self.dtype);
        Ok(MemoryBudget {
            kv_bytes: self.kv_bytes,
            block_tokens: self.block_tokens,
            n_blocks: sizes.n_blocks,
            kv_block_bytes: kv_slot_bytes * self.block_tokens,
            route_block_bytes: sizes.route_bytes_per_block(),
            trace_row_bytes: sizes.routes.map_or(0, |dims| dims.row_bytes()),
            max_running: self.max_running,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{config, engine, model};

    #[test]
    fn a_budget_adds_up_to_what_the_engine_holds() {
        let config = config(1 << 20);
        let budget = config.budget(&model()).unwrap();
        let stats = engine(config).stats();
        assert_eq!((budget.n_blocks, budget.block_tokens), (stats.n_blocks, 4));
        assert_eq!(budget.route_block_bytes * budget.n_blocks, stats.route_bytes);
        let block_bytes = config.block_bytes(&model());
        assert_eq!((budget.kv_block_bytes + budget.route_block_bytes) as u64, block_bytes);
        assert!(block_bytes * budget.n_blocks as u64 <= budget.kv_bytes);
        assert!(block_bytes * (budget.n_blocks as u64 + 1) > budget.kv_bytes);
    }

    #[test]
    fn what_is_said_per_token_is_a_blocks_share() {
        let budget = config(1 << 20).budget(&model()).unwrap();
        // 8 layers of keys and values, 2 heads of 16 elements, bf16; and 8 x 4 experts of one byte, with 24 bytes a block
        // of stamp and validity bits.
        let (kv, routes) = (8.0 * 2.0 * 32.0 * 2.0, 32.0 + 24.0 / 4.0);
        assert_eq!((budget.bytes_per_token(), budget.route_bytes_per_token()), (kv + routes, routes));
        assert_eq!(budget.route_share(), routes / (kv + routes));
        assert_eq!(budget.capacity_tokens(), 4 * budget.n_blocks);
        assert_eq!(budget.trace_bytes(100), 4 * 99 * 32, "4 sequences run");
        assert_eq!((budget.trace_bytes(0), budget.trace_bytes(usize::MAX)), (0, usize::MAX as u64));
        assert_eq!(budget.support_bytes(100, 20), 4 * 100 * 21 * 4);
        assert_eq!(budget.support_bytes(usize::MAX, 20), usize::MAX as u64);
    }

    #[test]
    fn without_capture_routes_cost_nothing() {
        let off = EngineConfig { capture_routes: false, ..config(1 << 20) };
        let budget = off.budget(&model()).unwrap();
        assert_eq!((budget.route_bytes_per_token(), budget.route_share()), (0.0, 0.0));
        assert_eq!(budget.trace_bytes(1000), 0);
        assert!(EngineConfig { kv_bytes: 10, ..off }.budget(&model()).is_err());
    }
}
