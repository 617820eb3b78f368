//! CPU kernels of r3: every op of the mixture-of-experts transformer, one file each, forward and backward.
//!
//! The rollout engine and the trainer call the *same* functions, so with equal weights and dtype their
//! log-probabilities agree to the bit. That holds because every output element has one reduction order, fixed by
//! the model's dimensions alone: never by the number of tokens, their neighbours, the chunking or the threads.
//!
//! An op is a plain function over row-major f32 slices, which engine and trainer call, and a backward pass over such
//! slices. Backward passes are deterministic: no atomics, no order that depends on scheduling.
//!
//! This crate must never know configurations, files, text, sequences' lifetimes or policies. `unsafe` is allowed
//! here (and in `r3-ring` alone) for SIMD dispatch, for tasks that write disjoint parts of one buffer, and for memory.
//!
//! Start with [`gemm`], the layout everything rests on, then [`experts`]; `isa` says how code is compiled for
//! several instruction sets, [`parallel`] how work is split, [`team`] how threads get it, [`huge_pages`] where arrays lie.
#![expect(
    unsafe_code,
    reason = "SIMD behind run-time detection, disjoint writes from parallel tasks, memory"
)]

pub mod adamw;
pub mod attention;
pub mod cast;
pub mod draw;
pub mod experts;
pub mod gemm;
pub mod huge_pages;
pub mod lm_head;
pub mod logprob;
pub mod low_rank;
pub mod muon;
pub mod numerics;
pub mod parallel;
pub mod residual;
pub mod rms_norm;
pub mod rope;
pub mod route_record;
pub mod router;
pub mod stream;
pub mod swiglu;
pub mod team;
pub mod truncate;
pub mod weight_gradient;

mod exp;
mod isa;
mod rank;
mod scratch;
mod softmax;
#[cfg(test)]
mod testing;
