//! CPU kernels, one file per op.
