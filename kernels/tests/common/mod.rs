//! What the tests of kernels from outside share.

use proptest::prelude::Strategy;
use proptest::sample::select;

/// `n` numbers in `[-1, 1)` that look random and are the same on every run.
pub(crate) fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let next = || {
        // Marsaglia's xorshift32; the top 24 bits become the fraction.
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1_u32 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(n).collect()
}

/// One size below, at and above each width of a register, a panel and a tile.
pub(crate) fn edge() -> impl Strategy<Value = usize> {
    select(vec![1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65])
}

/// `n` ids `[T, K]` out of `E`, distinct within each row and in no order of their own.
pub(crate) fn ids(n_tokens: usize, top_k: usize, n_experts: usize, seed: u32) -> Vec<u16> {
    let mut all = Vec::with_capacity(n_tokens * top_k);
    for token in 0..n_tokens {
        let keys = noise(n_experts, seed + token as u32);
        let mut order: Vec<usize> = (0..n_experts).collect();
        order.sort_by(|&a, &b| keys[a].total_cmp(&keys[b]));
        all.extend(order[..top_k].iter().map(|&id| u16::try_from(id).unwrap()));
    }
    all
}
