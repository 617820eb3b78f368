//! Rounding to bfloat16, two elements to a 32-bit word: the earlier one in the low half.

use crate::isa::{Isa, multiversion};

/// The bf16 nearest to `x`, ties to even; NaN stays NaN.
#[inline(always)]
pub(crate) fn round(x: f32) -> u32 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // Rounding would carry some NaN into the sign or make them infinite; setting the quiet bit keeps them.
    if x.is_nan() { (bits >> 16) | 0x40 } else { nearest }
}

/// Two elements as one word.
#[inline(always)]
pub(super) fn pair(low: f32, high: f32) -> u32 {
    round(low) | (round(high) << 16)
}

/// The elements of a word.
#[inline(always)]
pub(super) fn unpair(word: u32) -> [f32; 2] {
    [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)]
}

multiversion! {
    /// Rounds rows `[T, k]` to words `[T, k/2]`; an odd last element is paired with zero.
    pub(crate) fn round_rows(x: &[f32], k: usize, rounded: &mut [u32]) = round_rows_body;
}

#[inline(always)]
pub(crate) fn round_rows_body<I: Isa>(x: &[f32], k: usize, rounded: &mut [u32]) {
    for (row, rounded) in x.chunks_exact(k).zip(rounded.chunks_exact_mut(k.div_ceil(2))) {
        let (pairs, rest) = row.as_chunks::<2>();
        for (word, &[low, high]) in rounded.iter_mut().zip(pairs) {
            *word = pair(low, high);
        }
        if let ([last], [.., word]) = (rest, rounded) {
            *word = pair(*last, 0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

    use super::*;

    proptest! {
        #[test]
        fn rounding_is_that_of_the_half_crate(low in any::<u32>(), high in any::<u32>()) {
            for (bits, half) in [low, high].into_iter().zip(unpair(pair(f32::from_bits(low), f32::from_bits(high)))) {
                let expected = bf16::from_f32(f32::from_bits(bits)).to_f32();
                prop_assert!(half.to_bits() == expected.to_bits() || (half.is_nan() && expected.is_nan()));
            }
        }

        #[test]
        fn rows_are_rounded_one_by_one(n_rows in 0_usize..4, k in 1_usize..70, scale in -1e3_f32..1e3) {
            let x: Vec<f32> = (0..n_rows * k).map(|i| scale * (i as f32).sin()).collect();
            let mut rounded = vec![u32::MAX; n_rows * k.div_ceil(2)];
            round_rows(&x, k, &mut rounded);
            for (row, words) in x.chunks_exact(k).zip(rounded.chunks_exact(k.div_ceil(2))) {
                let halves: Vec<f32> = words.iter().copied().flat_map(unpair).collect();
                let expected: Vec<f32> = row.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
                prop_assert_eq!(&halves[..k], &expected[..]);
                prop_assert!(halves[k..].iter().all(|&pad| pad == 0.0));
            }
        }
    }
}
