//! One body, several instruction sets, chosen at run time.
//!
//! Write the loop once, as an `#[inline(always)]` function generic over [`Isa`], and name it in [`multiversion!`]:
//!
//! ```text
//! multiversion! {
//!     /// `y += a * x`, `[n]` each.
//!     fn axpy(a: f32, x: &[f32], y: &mut [f32]) = axpy_body;
//! }
//!
//! #[inline(always)]
//! fn axpy_body<I: Isa>(a: f32, x: &[f32], y: &mut [f32]) {
//!     for (y, &x) in y.iter_mut().zip(x) {
//!         *y = I::mul_add(a, x, *y);
//!     }
//! }
//! ```
//!
//! The macro compiles the body for AVX-512, for AVX2 with FMA, and for the target's baseline, so loops vectorise to
//! what the machine has. Rules that keep results independent of batch and split:
//!
//! - Use `I::mul_add` for `a * b + c`: one rounding where FMA exists, two where it does not, never a libm call.
//! - LLVM does not reorder float sums. A reduction vectorises only if it is written over lanes: keep `[f32; 16]`
//!   partial sums over a *row* (never over rows) and add them up with [`sum_lanes`], in one fixed order.
//! - Everything called in the body must be `#[inline(always)]` too (closures and std's iterators are fine), or it
//!   is compiled for the baseline. [`exp`](crate::exp::exp) is such a function.
//!
//! Bits may differ between instruction sets, never between two calls on one machine.

use crate::cast::unpair;

/// An instruction set, as a type. Its methods may only run where [`level`] says it exists: [`multiversion!`] sees
/// to that; tests that name an implementer ask [`level`] first.
///
/// Methods of implementers call intrinsics straight, not from closures: those would not always be inlined into the
/// function that has the instruction set, and then run a hundred times slower.
pub(crate) trait Isa: Copy {
    /// Sixteen f32 in registers.
    type Lanes: Lanes;

    /// Whether there are 32 vector registers of 16 lanes, enough for a tile of 12 rows by two of them.
    const WIDE: bool;

    /// `a * b + c`, rounded once if the instruction set has FMA, else after each operation.
    fn mul_add(a: f32, b: f32, c: f32) -> f32;
}

/// Sixteen f32 lanes, for kernels that must keep accumulators in registers.
pub(crate) trait Lanes: Copy {
    /// All lanes `value`.
    fn splat(value: f32) -> Self;
    /// Reads sixteen elements.
    fn load(from: &[f32; 16]) -> Self;
    /// Writes sixteen elements.
    fn store(self, to: &mut [f32; 16]);
    /// `self * b + c` per lane, rounded as [`Isa::mul_add`] does.
    fn mul_add(self, b: Self, c: Self) -> Self;
    /// `self + b` per lane.
    fn add(self, b: Self) -> Self;
    /// `self - b` per lane.
    fn sub(self, b: Self) -> Self;
    /// `self * b` per lane.
    fn mul(self, b: Self) -> Self;
    /// Sixteen pairs of bf16, widened: low halves, then high halves.
    fn widen(pairs: &[u32; 16]) -> (Self, Self);
    /// The lanes of both in turns: those of their lower halves, then those of their higher halves.
    fn zip(self, b: Self) -> (Self, Self);
}

/// A square of 16 by 16, its rows as columns: in four rounds, each of which shuffles all 256 elements as two halves of a
/// pack of cards are. Elements are moved and not looked at, so they may be any four bytes.
#[inline(always)]
pub(crate) fn transposed<I: Isa>(mut rows: [I::Lanes; 16]) -> [I::Lanes; 16] {
    for _ in 0..4 {
        let halves = rows;
        for i in 0..8 {
            (rows[2 * i], rows[2 * i + 1]) = halves[i].zip(halves[i + 8]);
        }
    }
    rows
}

/// At most sixteen elements, and zeros after them: what is left of a row, as whole lanes.
#[inline(always)]
pub(crate) fn padded<T: Copy + Default>(values: &[T]) -> [T; 16] {
    let mut lanes = [T::default(); 16];
    lanes[..values.len()].copy_from_slice(values);
    lanes
}

/// Adds up lanes as a fixed tree: halves onto each other until one is left.
#[inline(always)]
pub(crate) fn sum_lanes(lanes: [f32; 16]) -> f32 {
    fold_lanes(lanes, |a, b| a + b)
}

/// Folds halves of lanes onto each other until one is left.
#[inline(always)]
pub(crate) fn fold_lanes(mut lanes: [f32; 16], fold: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = 8;
    while width > 0 {
        for i in 0..width {
            lanes[i] = fold(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// Asks for the line of memory at `at` to be brought into the first-level cache, which hands it on to the second. `at`
/// may point anywhere. Requests to the second level alone are dropped by a busy AMD processor: more than half of them
/// where there is nothing to do but fetch.
#[inline(always)]
pub(crate) fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads no value and never faults, and every x86-64 has it.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// What this machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// What the target promises: SSE2 on x86-64, NEON on aarch64.
    Baseline,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, VL, DQ.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// Whether the best level this machine has is [`Isa::WIDE`].
pub(crate) fn has_wide() -> bool {
    match level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => Avx512::WIDE,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => Avx2::WIDE,
        Level::Baseline => Baseline::WIDE,
    }
}

/// The best level this machine has. The standard library caches the answer, so asking costs a few loads.
#[inline]
pub(crate) fn level() -> Level {
    #[cfg(target_arch = "x86_64")]
    {
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq");
        if avx2 && avx512 {
            return Level::Avx512;
        }
        if avx2 {
            return Level::Avx2;
        }
    }
    Level::Baseline
}

/// Defines a function that runs `$body::<I>` for the best [`Isa`] of the machine; see the module's documentation.
macro_rules! multiversion {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident;) => {
        $(#[$meta])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                $body::<$crate::isa::Avx512>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                $body::<$crate::isa::Avx2>($($arg),*)
            }
            match $crate::isa::level() {
                // SAFETY: `level` found every feature the function is compiled for.
                #[cfg(target_arch = "x86_64")]
                $crate::isa::Level::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::isa::Level::Avx2 => unsafe { avx2($($arg),*) },
                $crate::isa::Level::Baseline => $body::<$crate::isa::Baseline>($($arg),*),
            }
        }
    };
}
pub(crate) use multiversion;

/// What the target promises.
#[derive(Clone, Copy)]
pub(crate) struct Baseline;

/// True where the baseline itself has FMA, so that `f32::mul_add` is one instruction.
pub(crate) const BASELINE_FMA: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

impl Isa for Baseline {
    type Lanes = [f32; 16];

    const WIDE: bool = false;

    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        if BASELINE_FMA { a.mul_add(b, c) } else { a * b + c }
    }
}

impl Lanes for [f32; 16] {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        [value; 16]
    }

    #[inline(always)]
    fn load(from: &[f32; 16]) -> Self {
        *from
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; 16]) {
        *to = self;
    }

    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        std::array::from_fn(|i| Baseline::mul_add(self[i], b[i], c[i]))
    }

    #[inline(always)]
    fn add(self, b: Self) -> Self {
        std::array::from_fn(|i| self[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        std::array::from_fn(|i| self[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        std::array::from_fn(|i| self[i] * b[i])
    }

    #[inline(always)]
    fn widen(pairs: &[u32; 16]) -> (Self, Self) {
        (pairs.map(|pair| unpair(pair)[0]), pairs.map(|pair| unpair(pair)[1]))
    }

    #[inline(always)]
    fn zip(self, b: Self) -> (Self, Self) {
        let lane = |i: usize| if i.is_multiple_of(2) { self[i / 2] } else { b[i / 2] };
        (std::array::from_fn(lane), std::array::from_fn(|i| lane(i + 16)))
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

/// The x86 instruction sets.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256, __m512, __m512i, _mm256_add_ps, _mm256_and_si256, _mm256_castsi256_ps, _mm256_fmadd_ps,
        _mm256_loadu_ps, _mm256_loadu_si256, _mm256_mul_ps, _mm256_permute2f128_ps, _mm256_set1_epi32,
        _mm256_set1_ps, _mm256_slli_epi32, _mm256_storeu_ps, _mm256_sub_ps, _mm256_unpackhi_ps,
        _mm256_unpacklo_ps, _mm512_add_ps, _mm512_and_si512, _mm512_castsi512_ps, _mm512_fmadd_ps,
        _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mul_ps, _mm512_permutex2var_ps, _mm512_set1_epi32,
        _mm512_set1_ps, _mm512_setr_epi32, _mm512_slli_epi32, _mm512_storeu_ps, _mm512_sub_ps,
    };

    use super::{Isa, Lanes};

    /// AVX-512 F, BW, VL, DQ.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512;

    impl Isa for Avx512 {
        type Lanes = __m512;

        const WIDE: bool = true;

        #[inline(always)]
        fn mul_add(a: f32, b: f32, c: f32) -> f32 {
            a.mul_add(b, c)
        }
    }

    impl Lanes for __m512 {
        #[inline(always)]
        fn splat(value: f32) -> Self {
            // SAFETY: `Isa`'s rule: AVX-512 exists where this runs.
            unsafe { _mm512_set1_ps(value) }
        }

        #[inline(always)]
        fn load(from: &[f32; 16]) -> Self {
            // SAFETY: AVX-512 exists, and the reference covers the 64 bytes read.
            unsafe { _mm512_loadu_ps(from.as_ptr()) }
        }

        #[inline(always)]
        fn store(self, to: &mut [f32; 16]) {
            // SAFETY: AVX-512 exists, and the reference covers the 64 bytes written.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self) }
        }

        #[inline(always)]
        fn mul_add(self, b: Self, c: Self) -> Self {
            // SAFETY: AVX-512 exists where this runs.
            unsafe { _mm512_fmadd_ps(self, b, c) }
        }

        #[inline(always)]
        fn add(self, b: Self) -> Self {
            // SAFETY: AVX-512 exists where this runs.
            unsafe { _mm512_add_ps(self, b) }
        }

        #[inline(always)]
        fn sub(self, b: Self) -> Self {
            // SAFETY: AVX-512 exists where this runs.
            unsafe { _mm512_sub_ps(self, b) }
        }

        #[inline(always)]
        fn mul(self, b: Self) -> Self {
            // SAFETY: AVX-512 exists where this runs.
            unsafe { _mm512_mul_ps(self, b) }
        }

        #[inline(always)]
        fn widen(pairs: &[u32; 16]) -> (Self, Self) {
            // SAFETY: AVX-512 exists, and the reference covers the 64 bytes read.
            let pairs = unsafe { _mm512_loadu_si512(pairs.as_ptr().cast::<__m512i>()) };
            // SAFETY: AVX-512 exists where this runs.
            let low = unsafe { _mm512_slli_epi32::<16>(pairs) };
            // SAFETY: as above.
            let mask = unsafe { _mm512_set1_epi32(-0x1_0000) };
            // SAFETY: as above.
            let high = unsafe { _mm512_and_si512(pairs, mask) };
            // SAFETY: as above.
            (unsafe { _mm512_castsi512_ps(low) }, unsafe { _mm512_castsi512_ps(high) })
        }

        #[inline(always)]
        fn zip(self, b: Self) -> (Self, Self) {
            // Lane `i` of the first operand, or `i - 16` of the second.
            // SAFETY: AVX-512 exists where this runs.
            let low = unsafe { _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23) };
            // SAFETY: as above.
            let high =
                unsafe { _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31) };
            // SAFETY: as above.
            (unsafe { _mm512_permutex2var_ps(self, low, b) }, unsafe {
                _mm512_permutex2var_ps(self, high, b)
            })
        }
    }

    /// AVX2 and FMA.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2;

    impl Isa for Avx2 {
        type Lanes = [__m256; 2];

        const WIDE: bool = false;

        #[inline(always)]
        fn mul_add(a: f32, b: f32, c: f32) -> f32 {
            a.mul_add(b, c)
        }
    }

    impl Lanes for [__m256; 2] {
        #[inline(always)]
        fn splat(value: f32) -> Self {
            // SAFETY: `Isa`'s rule: AVX2 exists where this runs.
            [unsafe { _mm256_set1_ps(value) }; 2]
        }

        #[inline(always)]
        fn load(from: &[f32; 16]) -> Self {
            let (halves, _) = from.as_chunks::<8>();
            // SAFETY: AVX2 exists, and each half covers the 32 bytes read.
            [unsafe { _mm256_loadu_ps(halves[0].as_ptr()) }, unsafe { _mm256_loadu_ps(halves[1].as_ptr()) }]
        }

        #[inline(always)]
        fn store(self, to: &mut [f32; 16]) {
            let (halves, _) = to.as_chunks_mut::<8>();
            // SAFETY: AVX2 exists, and each half covers the 32 bytes written.
            unsafe { _mm256_storeu_ps(halves[0].as_mut_ptr(), self[0]) };
            // SAFETY: as above.
            unsafe { _mm256_storeu_ps(halves[1].as_mut_ptr(), self[1]) };
        }

        #[inline(always)]
        fn mul_add(self, b: Self, c: Self) -> Self {
            // SAFETY: AVX2 and FMA exist where this runs.
            [unsafe { _mm256_fmadd_ps(self[0], b[0], c[0]) }, unsafe { _mm256_fmadd_ps(self[1], b[1], c[1]) }]
        }

        #[inline(always)]
        fn add(self, b: Self) -> Self {
            // SAFETY: AVX2 exists where this runs.
            [unsafe { _mm256_add_ps(self[0], b[0]) }, unsafe { _mm256_add_ps(self[1], b[1]) }]
        }

        #[inline(always)]
        fn sub(self, b: Self) -> Self {
            // SAFETY: AVX2 exists where this runs.
            [unsafe { _mm256_sub_ps(self[0], b[0]) }, unsafe { _mm256_sub_ps(self[1], b[1]) }]
        }

        #[inline(always)]
        fn mul(self, b: Self) -> Self {
            // SAFETY: AVX2 exists where this runs.
            [unsafe { _mm256_mul_ps(self[0], b[0]) }, unsafe { _mm256_mul_ps(self[1], b[1]) }]
        }

        #[inline(always)]
        fn widen(pairs: &[u32; 16]) -> (Self, Self) {
            let (halves, _) = pairs.as_chunks::<8>();
            let ((low_0, high_0), (low_1, high_1)) = (widen_half(&halves[0]), widen_half(&halves[1]));
            ([low_0, low_1], [high_0, high_1])
        }

        #[inline(always)]
        fn zip(self, b: Self) -> (Self, Self) {
            (zip_half(self[0], b[0]), zip_half(self[1], b[1]))
        }
    }

    /// The lanes of both in turns.
    #[inline(always)]
    fn zip_half(a: __m256, b: __m256) -> [__m256; 2] {
        // Both of these work on 128 bits at a time.
        // SAFETY: only `Avx2` calls this, so AVX2 exists where it runs.
        let low = unsafe { _mm256_unpacklo_ps(a, b) };
        // SAFETY: as above.
        let high = unsafe { _mm256_unpackhi_ps(a, b) };
        // SAFETY: as above.
        [unsafe { _mm256_permute2f128_ps::<0x20>(low, high) }, unsafe {
            _mm256_permute2f128_ps::<0x31>(low, high)
        }]
    }

    /// Eight pairs of bf16, widened.
    #[inline(always)]
    fn widen_half(pairs: &[u32; 8]) -> (__m256, __m256) {
        // SAFETY: only `Avx2` calls this, so AVX2 exists, and the reference covers the 32 bytes read.
        let pairs = unsafe { _mm256_loadu_si256(pairs.as_ptr().cast()) };
        // SAFETY: AVX2 exists where this runs.
        let low = unsafe { _mm256_slli_epi32::<16>(pairs) };
        // SAFETY: as above.
        let mask = unsafe { _mm256_set1_epi32(-0x1_0000) };
        // SAFETY: as above.
        let high = unsafe { _mm256_and_si256(pairs, mask) };
        // SAFETY: as above.
        (unsafe { _mm256_castsi256_ps(low) }, unsafe { _mm256_castsi256_ps(high) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    multiversion! {
        fn widened(pairs: &[u32; 16]) -> ([f32; 16], [f32; 16]) = widened_body;
    }

    #[inline(always)]
    fn widened_body<I: Isa>(pairs: &[u32; 16]) -> ([f32; 16], [f32; 16]) {
        let (low, high) = I::Lanes::widen(pairs);
        let mut halves = ([0.0; 16], [0.0; 16]);
        low.mul_add(I::Lanes::splat(1.0), I::Lanes::splat(0.0)).store(&mut halves.0);
        high.store(&mut halves.1);
        halves
    }

    #[test]
    fn a_pair_widens_to_its_low_and_high_bf16() {
        let pairs = std::array::from_fn(|i| ((i as f32).to_bits() >> 16) | (-(i as f32) * 2.0).to_bits());
        let (low, high) = widened(&pairs);
        assert_eq!(low, std::array::from_fn(|i| i as f32));
        assert_eq!(high, std::array::from_fn(|i| i as f32 * -2.0));
    }

    multiversion! {
        fn square(rows: &[[f32; 16]; 16]) -> [[f32; 16]; 16] = square_body;
    }

    #[inline(always)]
    fn square_body<I: Isa>(rows: &[[f32; 16]; 16]) -> [[f32; 16]; 16] {
        let (mut lanes, mut columns) = ([I::Lanes::splat(0.0); 16], [[0.0; 16]; 16]);
        for (lanes, row) in lanes.iter_mut().zip(rows) {
            *lanes = I::Lanes::load(row);
        }
        for (column, lanes) in columns.iter_mut().zip(transposed::<I>(lanes)) {
            lanes.store(column);
        }
        columns
    }

    #[test]
    fn a_square_is_transposed_whatever_its_bytes_are() {
        // Among them are NaN that arithmetic would quieten, and pairs of bf16 that are no numbers.
        let bits = |row: usize, column: usize| 0x7f80_0001 ^ (row as u32 * 0x0101_0000) ^ column as u32;
        let rows = std::array::from_fn(|r| std::array::from_fn(|c| f32::from_bits(bits(r, c))));
        let mut found = vec![square(&rows), square_body::<Baseline>(&rows)];
        #[cfg(target_arch = "x86_64")]
        if level() != Level::Baseline {
            found.push(square_body::<Avx2>(&rows));
        }
        for columns in found {
            for (c, column) in columns.iter().enumerate() {
                let expected: [u32; 16] = std::array::from_fn(|r| bits(r, c));
                assert_eq!(column.map(f32::to_bits), expected);
            }
        }
    }

    multiversion! {
        fn triple(a: f32, b: f32, c: f32) -> f32 = triple_body;
    }

    #[inline(always)]
    fn triple_body<I: Isa>(a: f32, b: f32, c: f32) -> f32 {
        I::mul_add(a, b, c)
    }

    #[test]
    fn mul_add_rounds_once_where_fma_exists() {
        let (a, c) = (1.0 + f32::EPSILON, -1.0 - 2.0 * f32::EPSILON);
        let fused = level() != Level::Baseline || BASELINE_FMA;
        assert_eq!(triple(a, a, c), if fused { f32::EPSILON * f32::EPSILON } else { 0.0 });
    }

    #[test]
    fn lanes_are_summed_as_a_tree() {
        assert_eq!(sum_lanes(std::array::from_fn(|i| i as f32)), 120.0);
        let mut lanes = [0.0; 16];
        (lanes[0], lanes[8], lanes[1]) = (1e8, -1e8, 1.0);
        assert_eq!(sum_lanes(lanes), 1.0);
    }
}
