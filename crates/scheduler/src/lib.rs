//! Sequences, KV blocks, prefix cache and route pool, without tensors.
