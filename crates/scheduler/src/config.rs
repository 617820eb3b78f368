//! How large everything is.

use r3_core::routes::RouteDims;

use crate::error::SchedulerError;
use crate::route_pool::RoutePool;

/// Sizes of everything the scheduler hands out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Tokens of a KV block.
    pub block_tokens: usize,
    /// KV blocks.
    pub n_blocks: usize,
    /// Sequences that hold blocks at the same time, at most.
    pub max_running: usize,
    /// Tokens of one tick, at most.
    pub max_batch_tokens: usize,
    /// Whether full blocks are kept and found again by their tokens.
    pub prefix_cache: bool,
    /// Shape of a route row; `None` when routes are off, and then no byte is held for them.
    pub routes: Option<RouteDims>,
    /// Whether a sequence that is computed again under other weights takes the routes it recorded under the old ones, as
    /// a trainer does that replays them. Else the new router chooses there.
    pub replays: bool,
}

impl SchedulerConfig {
    /// Bytes of routes per block, to be charged to the KV budget; 0 when routes are off.
    #[must_use]
    pub fn route_bytes_per_block(&self) -> usize {
        self.routes.map_or(0, |dims| RoutePool::bytes_per_block(dims, self.block_tokens))
    }

    pub(crate) fn check(&self) -> Result<(), SchedulerError> {
        let sizes = [
            ("block_tokens", self.block_tokens),
            ("n_blocks", self.n_blocks),
            ("max_running", self.max_running),
            ("max_batch_tokens", self.max_batch_tokens),
        ];
        if let Some((field, _)) = sizes.into_iter().find(|&(_, size)| size == 0) {
            return Err(SchedulerError::ZeroSize { field });
        }
        let n_slots = self.n_blocks.checked_mul(self.block_tokens);
        if n_slots.is_none_or(|n_slots| n_slots >= u32::MAX as usize) {
            let Self { n_blocks, block_tokens, .. } = *self;
            return Err(SchedulerError::TooManySlots { n_blocks, block_tokens });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::Scheduler;

    const CONFIG: SchedulerConfig = SchedulerConfig {
        block_tokens: 4,
        n_blocks: 4,
        max_running: 2,
        max_batch_tokens: 8,
        prefix_cache: true,
        routes: None,
        replays: false,
    };

    #[test]
    fn sizes_that_hold_nothing_or_too_much_are_refused() {
        let refusal = |config| Scheduler::new(config).err();
        let zero = SchedulerConfig { max_running: 0, ..CONFIG };
        assert_eq!(refusal(zero), Some(SchedulerError::ZeroSize { field: "max_running" }));
        let many = SchedulerConfig { n_blocks: 1 << 30, ..CONFIG };
        assert_eq!(refusal(many), Some(SchedulerError::TooManySlots { n_blocks: 1 << 30, block_tokens: 4 }));
    }

    #[test]
    fn routes_cost_what_a_block_says() {
        let dims = RouteDims { n_layers: 3, top_k: 2, n_experts: 16 };
        let config = SchedulerConfig { routes: Some(dims), ..CONFIG };
        assert_eq!(config.route_bytes_per_block(), 4 * 6 + 16 + 8);
        assert_eq!(Scheduler::new(config).unwrap().route_bytes(), 4 * config.route_bytes_per_block());
        assert_eq!((CONFIG.route_bytes_per_block(), Scheduler::new(CONFIG).unwrap().route_bytes()), (0, 0));
    }
}
