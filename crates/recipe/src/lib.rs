//! Recipes: one YAML file as checked plain structs; the whole experiment, with nothing read from the environment.
//!
//! Knows names, units, defaults and limits, never tensors, devices or models: a recipe is checked before anything
//! is loaded. Start with [`recipe::Recipe`]; its sections are plain structs, to be passed down by reference. Enums
//! are externally tagged, so that a variant carries its own knobs and an error keeps its line and column.

pub mod algorithm;
pub mod bytes;
pub mod check;
mod check_learning;
mod check_objective;
pub mod check_replay;
pub mod error;
pub mod learning;
pub mod numerics;
pub mod objective;
pub mod pattern;
pub mod place;
mod reader;
pub mod recipe;
pub mod reference;
pub mod rollout;
pub mod run;
pub mod task;
mod tree;
