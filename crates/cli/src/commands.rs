//! The commands, one a file: each reads its arguments and hands them to the orchestrator.

pub(crate) mod bench;
pub(crate) mod check;
pub(crate) mod compare;
pub(crate) mod eval;
pub(crate) mod export;
pub(crate) mod new_model;
pub(crate) mod rollout;
pub(crate) mod routes;
pub(crate) mod run;
pub(crate) mod schema;
pub(crate) mod score;
pub(crate) mod sft;
