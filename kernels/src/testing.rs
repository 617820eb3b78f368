//! What the tests of several ops share.

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

/// The bits of every element: equality that tells zeros and NaN apart.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Runs `body` on a pool of its own.
pub(crate) fn in_pool<R: Send>(threads: usize, body: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(body)
}
