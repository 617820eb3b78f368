//! The shared-memory ring of rollout frames.
