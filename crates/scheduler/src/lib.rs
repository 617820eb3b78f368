//! Sequences, KV blocks, prefix cache and route pool: everything the rollout engine decides, and nothing it computes.
//!
//! This crate must never know tensors, clocks, threads, randomness or I/O: the same calls give the same plans, so
//! `r3-sim` plays random schedules on it by the million. It holds the first two lifetimes of a route:
//! the *pool* row, which lives exactly as long as the keys and values of its slot, and the *trace* row, which is
//! copied out of the pool once, before its block is given up, and survives preemption, re-prefill and the flush after a
//! refit. Weights that a sequence was not begun with compute its positions again on these rows, if so configured.
//!
//! Start with [`scheduler::Scheduler`], whose methods in order are one tick; what a tick asks of the engine is
//! [`plan::TickPlan`], what goes in and comes out is in [`request`].

mod block_pool;
mod check;
mod kv_memory;
mod planner;
mod prefix_cache;
mod resume;
mod retract;
mod route_pool;
mod sequence;
mod trace;

pub mod config;
pub mod error;
pub mod plan;
pub mod request;
pub mod scheduler;
