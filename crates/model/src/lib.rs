//! One Mixture-of-Experts transformer, written once over an [`executor::Executor`], and its Hugging Face files.
//!
//! [`forward::forward`] is the model. It runs on [`buffers::Buffers`] (the rollout engine: plain reused buffers
//! and a paged KV cache) and on [`autograd::tape::Tape`] (the trainer: the same, and it remembers what it did), and both call the same
//! kernels, so equal weights of equal dtype give equal bits. Weights move between disk, trainer and engine as a
//! [`source::TensorSource`]. This crate must never know what a rollout, a recipe or a reward is.

pub mod adapter;
pub mod autograd;
pub mod buffers;
pub mod checkpoint;
pub mod config;
pub mod error;
pub mod executor;
pub mod export;
#[cfg(test)]
mod fixtures;
pub mod forward;
pub mod init;
pub mod rows;
pub mod source;
