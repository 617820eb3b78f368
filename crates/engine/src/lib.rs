//! The rollout engine.
