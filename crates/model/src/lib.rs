//! One MoE transformer over two executors.
