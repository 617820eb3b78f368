//! The `r3` command as its users meet it: help, results, and every wrong input with its message and exit code.
//!
//! Each test runs the program in a directory of its own, with a model of six thousand weights.

mod bench;
mod bench_help;
mod directory;
mod docs;
mod help;
mod interrupt;
mod results;
mod rollout;
mod routes;
mod routes_help;
mod started_with;
mod wrong_machine;
mod wrong_model;
mod wrong_text;
