//! The trainer: complete groups of rollouts in, better weights out.
//!
//! [`batch::Batch::pack`] turns groups into a packed, ragged step with group-relative advantages;
//! [`trainer::Trainer::step`] runs it: replayed forward, loss, backward, AdamW, and the mismatch with the
//! rollout at equal weights. [`sft`] is the supervised step that makes a starting point, [`checkpoint`] keeps
//! a run.
//!
//! This crate must never know text, files other than checkpoints, the ring, threads or clocks. Everything in
//! it is deterministic: the same batch and weights give the same bits.
//!
//! candle's `backward` recurses over the graph of a loss, which is shallow: the model's own gradients run back over a tape.
//!
//! Start with [`trainer`], then [`objective`], [`loss`] and [`batch`].

pub mod advantage;
pub mod batch;
pub mod batch_stats;
pub mod checkpoint;
pub mod error;
pub mod loads;
pub mod loss;
pub mod micro_batch;
pub mod mismatch;
pub mod objective;
pub mod optimiser;
pub mod optimiser_state;
pub mod overlong;
pub mod replay;
pub mod reward_kl;
pub mod schedule;
pub mod sft;
pub mod trainer;

mod contract;
mod cut;
mod learner;
mod step_tokens;

#[cfg(test)]
mod fixtures;
