//! Random schedules, played on an engine and compared with an oracle.
//!
//! A *program* is a configuration and a list of operations, and follows from a seed alone ([`program`],
//! [`generate`]). It is played on a [`subject::Subject`]: the scheduler under [`hash_engine::HashEngine`], whose
//! weights are a pure function, or the real engine in this crate's tests. [`player`] knows, without a scheduler, what
//! every request must end with, and says where that differs. A program that fails is made small by [`shrink`].
//!
//! This crate must never know how a plan is made, nor tensors: whatever it demands holds of every engine that r3 may
//! ever have. It is not part of the `r3` binary. Start with [`player::Player`]; [`simulate`] plays many seeds.

pub mod expected;
pub mod generate;
pub mod hash_engine;
pub mod oracle;
pub mod player;
pub mod program;
pub mod rng;
pub mod shrink;
pub mod simulate;
pub mod subject;
pub mod tally;
