//! The words of r3 as plain data: ids, routes, rollouts and policy versions.
//!
//! Every other crate speaks in these types, so this one knows nothing: no tensors, no files, no threads,
//! nothing outside `std`. Start with [`routes`], the heart of r3, then read [`rollout`].

pub mod count;
pub mod ids;
pub mod rollout;
pub mod routes;
pub mod support;
