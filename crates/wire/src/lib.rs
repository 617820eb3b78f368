//! Routes and rollouts outside r3: its own file, and what vLLM, ATOM, SGLang, NeMo-RL and prime-rl hand out.
//!
//! Everything read here comes from somebody else, so nothing is taken on trust: sizes are checked before anything is
//! allocated, no input panics, and a refusal names the engine, the sample, the turn, the model's layer and the
//! position. This crate knows bytes and JSON; it must never know a tensor, a file system, a scheduler or a terminal.
//!
//! Start with [`record`], what every layout is read into, then [`check`], the contract; each layout is one small file
//! ([`r3_file`], [`vllm`], [`sglang`], [`nemo_rl`], [`prime_rl`], [`lists`]), and [`document`] finds their payloads in JSON.

pub mod array;
pub mod check;
pub mod diff;
pub mod document;
pub mod error;
pub mod layout;
pub mod lists;
pub mod load;
pub mod model;
pub mod nemo_rl;
pub mod npy;
pub mod prime_rl;
pub mod r3_file;
pub mod record;
pub mod sglang;
pub mod vllm;
