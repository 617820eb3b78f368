//! The loop: rollout → reward → ring → groups → step → refit → flush, and everything that keeps it running.
//!
//! Start with [`run::run`], which is the table of contents of r3. The engine lives on a worker thread
//! ([`worker`]); rollouts come back through the shared-memory ring and are trained on where they lie
//! ([`group_buffer`]). Only this crate records metrics, touches the ring, and knows a whole recipe.

pub mod bench;
pub mod compare;
pub mod error;
pub mod eval;
#[cfg(test)]
mod fixtures;
pub mod greedy;
pub mod group_buffer;
pub mod handle;
pub mod inputs;
mod lock;
mod memory;
pub mod model_dir;
pub mod out_file;
pub mod pending;
pub mod pending_file;
pub mod prompts;
pub mod record;
pub mod rollout;
mod rollouts;
pub mod run;
mod run_dir;
pub mod run_state;
pub mod sample_stats;
pub mod score;
pub mod score_input;
pub mod setup;
pub mod sft;
pub mod shutdown;
pub mod training;
pub mod worker;
