//! The rollout engine: continuous batching over a paged KV cache, with every token's routes captured.
//!
//! Start with [`engine::Engine::tick`]: plan, forward, record, sample, advance. The engine must never know what a
//! recipe's task, a reward or a training step is, and uses no candle, no lock and no clock.

pub mod config;
pub mod engine;
pub mod error;
#[cfg(test)]
mod fixtures;
pub mod memory;
pub mod refit;
mod replayed;
pub mod resume;
pub mod sampler;
pub mod score;
