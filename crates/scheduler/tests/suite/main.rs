//! The scheduler against a naive engine: random programs, and the known faults of this kind of system.

mod faults;
mod naive_engine;
mod properties;
