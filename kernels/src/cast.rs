//! Casts between f32 and the 16-bit formats of weights: bfloat16, and IEEE binary16, which is read only.
//!
//! Narrowing rounds to nearest, ties to even; what is too large becomes infinite, and a NaN stays one, with its sign, the
//! upper bits of its payload and the quiet bit. Widening is exact. Subnormal numbers are numbers like others on either
//! side, which is why AVX512-BF16, whose own conversion takes them for zero, is not asked for it.
//!
//! A 16-bit number is two bytes, the lower first, where files and hashes are concerned; products take pairs of them as
//! words, the earlier one in the low half. The loops are plain, without a branch, and vectorise as they are; the `half`
//! crate, whose branches for NaN do not, is the reference they are tested against.

use crate::isa::{Isa, multiversion};
use crate::parallel;

/// Multiply-adds that an element of a slice counts as. It takes no more than 8, but threads that are woken for less than
/// half a million elements cost more than they save.
const SLICE_WORK: usize = 1;

/// Multiply-adds that an element of activations takes, about.
const ROUND_WORK: usize = 8;

/// Rounds `values` `[n]` to bf16, little-endian.
///
/// # Panics
/// If `narrowed` is not `[n]`.
pub fn narrow_bf16(values: &[f32], narrowed: &mut [[u8; 2]]) {
    assert_eq!(values.len(), narrowed.len(), "as many numbers as before");
    parallel::for_rows(narrowed, 1, SLICE_WORK, |first, narrowed| {
        narrow_bf16_here(&values[first..][..narrowed.len()], narrowed);
    });
}

multiversion! {
    fn narrow_bf16_here(values: &[f32], narrowed: &mut [[u8; 2]]) = narrow_bf16_body;
}

#[inline(always)]
fn narrow_bf16_body<I: Isa>(values: &[f32], narrowed: &mut [[u8; 2]]) {
    for (narrowed, &value) in narrowed.iter_mut().zip(values) {
        *narrowed = nearest_bf16(value).to_le_bytes();
    }
}

/// Widens bf16 `[n]`, little-endian, to `values` `[n]`.
///
/// # Panics
/// If `values` is not `[n]`.
pub fn widen_bf16(narrow: &[[u8; 2]], values: &mut [f32]) {
    widen(Format::Bf16, narrow, values);
}

/// Widens IEEE binary16 `[n]`, little-endian, to `values` `[n]`. NaN come out quiet.
///
/// # Panics
/// If `values` is not `[n]`.
pub fn widen_f16(narrow: &[[u8; 2]], values: &mut [f32]) {
    widen(Format::F16, narrow, values);
}

/// What 16 bits are read as.
#[derive(Clone, Copy)]
enum Format {
    Bf16,
    F16,
}

fn widen(format: Format, narrow: &[[u8; 2]], values: &mut [f32]) {
    assert_eq!(narrow.len(), values.len(), "as many numbers as before");
    parallel::for_rows(values, 1, SLICE_WORK, |first, values| {
        widen_here(format, &narrow[first..][..values.len()], values);
    });
}

multiversion! {
    fn widen_here(format: Format, narrow: &[[u8; 2]], values: &mut [f32]) = widen_body;
}

#[inline(always)]
fn widen_body<I: Isa>(format: Format, narrow: &[[u8; 2]], values: &mut [f32]) {
    let numbers = values.iter_mut().zip(narrow.iter().map(|&bytes| u16::from_le_bytes(bytes)));
    match format {
        Format::Bf16 => numbers.for_each(|(value, bits)| *value = widened_bf16(bits)),
        Format::F16 => numbers.for_each(|(value, bits)| *value = widened_f16(bits)),
    }
}

/// Rounds `values` to numbers that bf16 has, in place.
pub fn round_to_bf16(values: &mut [f32]) {
    parallel::for_rows(values, 1, SLICE_WORK, |_, values| round_to_bf16_here(values));
}

multiversion! {
    fn round_to_bf16_here(values: &mut [f32]) = round_to_bf16_body;
}

#[inline(always)]
fn round_to_bf16_body<I: Isa>(values: &mut [f32]) {
    for value in values {
        *value = widened_bf16(nearest_bf16(*value));
    }
}

/// Rounds rows `[T, k]` to words `[T, k/2]` of two bf16; an odd last element is paired with zero.
pub(crate) fn round_rows(x: &[f32], k: usize, rounded: &mut [u32]) {
    let depth = k.div_ceil(2);
    parallel::for_rows(rounded, depth, ROUND_WORK * k, |first, rounded| {
        round_rows_here(&x[first * k..][..rounded.len() / depth * k], k, rounded);
    });
}

multiversion! {
    /// [`round_rows`] on the calling thread.
    pub(crate) fn round_rows_here(x: &[f32], k: usize, rounded: &mut [u32]) = round_rows_body;
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

/// Two elements as one word.
#[inline(always)]
pub(crate) fn pair(low: f32, high: f32) -> u32 {
    u32::from(nearest_bf16(low)) | (u32::from(nearest_bf16(high)) << 16)
}

/// The elements of a word.
#[inline(always)]
pub(crate) fn unpair(word: u32) -> [f32; 2] {
    [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)]
}

/// The bits of the bf16 nearest to `x`.
#[inline(always)]
pub(crate) fn nearest_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // Rounding would carry some NaN into the sign or make them infinite; setting the quiet bit keeps them.
    (if x.is_nan() { (bits >> 16) | 0x40 } else { nearest }) as u16
}

/// The bf16 of these bits.
#[inline(always)]
pub(crate) fn widened_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The binary16 of these bits.
#[inline(always)]
fn widened_f16(bits: u16) -> f32 {
    const INFINITY: u32 = 0x7c00 << 13;
    /// `2^112`, by which the exponents' biases differ.
    const REBIAS: f32 = f32::from_bits((127 + 112) << 23);
    let magnitude = u32::from(bits & 0x7fff) << 13;
    // A product is exact, and normalises what is subnormal. Infinity and NaN get the exponent they have in f32.
    let scaled = (f32::from_bits(magnitude) * REBIAS).to_bits();
    let special = if magnitude >= INFINITY { 0xff << 23 } else { 0 };
    let quiet = if magnitude > INFINITY { 1 << 22 } else { 0 };
    f32::from_bits(scaled | special | quiet | (u32::from(bits & 0x8000) << 16))
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};

    use super::*;
    use crate::isa::Baseline;
    use crate::testing::{bits, in_pool};

    /// Every 16-bit number.
    fn every() -> Vec<[u8; 2]> {
        (0..=u16::MAX).map(u16::to_le_bytes).collect()
    }

    fn narrowed(values: &[f32]) -> Vec<u16> {
        let mut narrowed = vec![[7; 2]; values.len()];
        narrow_bf16(values, &mut narrowed);
        narrowed.into_iter().map(u16::from_le_bytes).collect()
    }

    type Widen = fn(&[[u8; 2]], &mut [f32]);

    fn widened(widen: Widen, narrow: &[[u8; 2]]) -> Vec<f32> {
        let mut values = vec![7.0; narrow.len()];
        widen(narrow, &mut values);
        values
    }

    #[test]
    fn every_bf16_widens_to_its_bits_and_narrows_back() {
        for widen in
            [widen_bf16 as Widen, |narrow, values| widen_body::<Baseline>(Format::Bf16, narrow, values)]
        {
            let values = widened(widen, &every());
            for (value, narrow) in values.iter().zip(0..=u16::MAX) {
                assert_eq!(value.to_bits(), u32::from(narrow) << 16);
                let expected = bf16::from_bits(narrow).to_f32();
                assert!(*value == expected || (value.is_nan() && expected.is_nan()), "{narrow:#x}");
            }
            for (back, narrow) in narrowed(&values).into_iter().zip(0..=u16::MAX) {
                let is_nan = bf16::from_bits(narrow).is_nan();
                assert_eq!(back, if is_nan { narrow | 0x40 } else { narrow }, "{narrow:#x}");
            }
        }
    }

    #[test]
    fn every_f16_widens_as_that_of_the_half_crate() {
        for widen in
            [widen_f16 as Widen, |narrow, values| widen_body::<Baseline>(Format::F16, narrow, values)]
        {
            for (value, narrow) in widened(widen, &every()).into_iter().zip(0..=u16::MAX) {
                assert_eq!(value.to_bits(), f16::from_bits(narrow).to_f32().to_bits(), "{narrow:#x}");
            }
        }
    }

    /// Between any bf16 and the one that follows it: next to it, next to the middle, in it, and next to the other.
    #[test]
    fn what_lies_between_two_bf16_goes_to_the_nearer_one_and_ties_to_the_even_one() {
        for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
            let values: Vec<f32> =
                (0..=u16::MAX).map(|high| f32::from_bits(u32::from(high) << 16 | low)).collect();
            let mut here = vec![[7; 2]; values.len()];
            narrow_bf16_body::<Baseline>(&values, &mut here);
            let expected: Vec<u16> = values.iter().map(|&value| bf16::from_f32(value).to_bits()).collect();
            assert_eq!(narrowed(&values), expected, "{low:#x}");
            assert_eq!(here.into_iter().map(u16::from_le_bytes).collect::<Vec<_>>(), expected, "{low:#x}");
            let mut rounded = values.clone();
            round_to_bf16(&mut rounded);
            let words: Vec<u32> = expected.iter().map(|&narrow| u32::from(narrow) << 16).collect();
            assert_eq!(bits(&rounded), words, "{low:#x}");
        }
        let [even, odd] = [0x3f80_8000, 0x3f81_8000].map(f32::from_bits);
        assert_eq!(narrowed(&[even, odd, f32::MAX, -f32::MAX]), [0x3f80, 0x3f82, 0x7f80, 0xff80]);
        let least = f32::from_bits(1);
        assert_eq!(narrowed(&[least, -least, f32::NAN, f32::INFINITY]), [0, 0x8000, 0x7fc0, 0x7f80]);
    }

    /// That all casts of `values`, or of the bf16 nearest to them, are those of the `half` crate.
    fn check(values: &[f32]) {
        let narrow: Vec<u16> = values.iter().map(|&value| bf16::from_f32(value).to_bits()).collect();
        let bytes: Vec<[u8; 2]> = narrow.iter().map(|narrow| narrow.to_le_bytes()).collect();
        let wide: Vec<u32> = narrow.iter().map(|&narrow| u32::from(narrow) << 16).collect();
        let halves: Vec<f32> = narrow.iter().map(|&narrow| f16::from_bits(narrow).to_f32()).collect();
        let mut rounded = values.to_vec();
        round_to_bf16(&mut rounded);
        assert!(narrowed(values) == narrow);
        assert!(bits(&rounded) == wide);
        assert!(bits(&widened(widen_bf16, &bytes)) == wide);
        assert!(bits(&widened(widen_f16, &bytes)) == bits(&halves));
    }

    #[test]
    fn threads_do_not_show() {
        let n = 3 * (1 << 18) + 5;
        let values: Vec<f32> = (0..n).map(|i: u32| f32::from_bits(i.wrapping_mul(0x9e37_79b9))).collect();
        in_pool(3, || check(&values));
    }

    proptest! {
        #[test]
        fn any_length_is_cast_one_by_one(numbers in prop::collection::vec(any::<u32>(), 0..100)) {
            check(&numbers.into_iter().map(f32::from_bits).collect::<Vec<_>>());
        }

        #[test]
        fn rows_are_rounded_to_pairs_one_by_one(n_rows in 0_usize..4, k in 1_usize..70, scale in -1e3_f32..1e3) {
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
