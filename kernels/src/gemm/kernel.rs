//! The inner loops of [`matmul`](super::matmul): register tiles of up to 8 rows by 3 panels.

use std::ops::Range;

use crate::isa::{Isa, Lanes, multiversion};
use crate::parallel::Disjoint;

/// Output columns of a panel.
pub(super) const LANES: usize = 16;
/// Rows of the largest register tile.
pub(super) const TILE_ROWS: usize = 8;
/// Panels of the largest register tile.
pub(super) const TILE_PANELS: usize = 3;

/// The 16 words of a panel at one depth, aligned so that no load straddles two cache lines.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Line<W>(pub(super) [W; LANES]);

/// One product `y = x Wᵀ + bias`, to be worked on by tiles. A word is one f32 or two bf16 along `K`.
pub(super) struct Job<'a, W> {
    /// `[T, depth]`.
    pub(super) x: &'a [W],
    /// `[N/16, depth]`.
    pub(super) lines: &'a [Line<W>],
    /// Words along `K`.
    pub(super) depth: usize,
    /// Columns of `y`.
    pub(super) n: usize,
    /// `[N]`.
    pub(super) bias: Option<&'a [f32]>,
    /// `[T, N]`.
    pub(super) y: Disjoint<'a, f32>,
}

impl<W> Job<'_, W> {
    /// # Panics
    /// If the operands do not fit `n_rows` rows.
    pub(super) fn check(&self, n_rows: usize) {
        assert_eq!(self.x.len(), n_rows * self.depth, "activations are [{n_rows}, {}] words", self.depth);
        assert_eq!(self.lines.len(), self.n.div_ceil(LANES) * self.depth);
    }
}

/// The part of a product that one task computes.
pub(super) struct Tile {
    pub(super) rows: Range<usize>,
    pub(super) panels: Range<usize>,
}

/// One step of a chain: how a word of `x` meets a line of weights.
trait Dot {
    type Word: Copy;
    type Weights: Copy;
    type Activation: Copy;
    type Sums: Copy;
    /// Whether registers hold the largest tile.
    const WIDE: bool;

    fn zero() -> Self::Sums;
    fn weights(line: &[Self::Word; LANES]) -> Self::Weights;
    fn activation(word: Self::Word) -> Self::Activation;
    fn add(sums: Self::Sums, weights: Self::Weights, activation: Self::Activation) -> Self::Sums;
    fn store(sums: Self::Sums, to: &mut [f32; LANES]);
}

multiversion! {
    /// Computes `tile` of an f32 product.
    pub(super) fn run_f32(job: &Job<'_, f32>, tile: &Tile) = run_f32_body;
}

#[inline(always)]
fn run_f32_body<I: Isa>(job: &Job<'_, f32>, tile: &Tile) {
    run::<F32<I>>(job, tile);
}

/// Computes `tile` of a bf16 product, natively where the machine can.
pub(super) fn run_bf16(job: &Job<'_, u32>, tile: &Tile) {
    #[cfg(target_arch = "x86_64")]
    if x86::has_bf16() {
        // SAFETY: `has_bf16` found every feature the function is compiled for.
        return unsafe { x86::run_native(job, tile) };
    }
    run_widened(job, tile);
}

multiversion! {
    /// Computes `tile` of a bf16 product by widening both operands to f32.
    pub(super) fn run_widened(job: &Job<'_, u32>, tile: &Tile) = run_widened_body;
}

#[inline(always)]
fn run_widened_body<I: Isa>(job: &Job<'_, u32>, tile: &Tile) {
    run::<Widened<I>>(job, tile);
}

/// Panels outside, rows inside: a strip of panels stays in the second-level cache while all rows pass by.
#[inline(always)]
fn run<D: Dot>(job: &Job<'_, D::Word>, tile: &Tile) {
    let mut panel = tile.panels.start;
    if !D::WIDE {
        while panel < tile.panels.end {
            strip_narrow::<D>(job, tile.rows.clone(), panel);
            panel += 1;
        }
        return;
    }
    if tile.rows.len() <= 2 {
        // One or two rows are too few chains to hide the latency of an addition: take more panels at once.
        while panel + 8 <= tile.panels.end {
            tile.rows.clone().for_each(|row| register_tile::<D, 1, 8>(job, row, panel));
            panel += 8;
        }
    }
    while panel < tile.panels.end {
        // 4 = 2 + 2: a strip of one panel would leave the multipliers waiting for activations.
        panel += match tile.panels.end - panel {
            1 => strip::<D, 1>(job, tile.rows.clone(), panel),
            2 | 4 => strip::<D, 2>(job, tile.rows.clone(), panel),
            _ => strip::<D, 3>(job, tile.rows.clone(), panel),
        };
    }
}

/// All rows of `PANELS` panels, 8, 4, 2 and 1 at a time.
#[inline(always)]
fn strip<D: Dot, const PANELS: usize>(job: &Job<'_, D::Word>, rows: Range<usize>, panel: usize) -> usize {
    let mut row = rows.start;
    while row + 8 <= rows.end {
        register_tile::<D, 8, PANELS>(job, row, panel);
        row += 8;
    }
    if row + 4 <= rows.end {
        register_tile::<D, 4, PANELS>(job, row, panel);
        row += 4;
    }
    if row + 2 <= rows.end {
        register_tile::<D, 2, PANELS>(job, row, panel);
        row += 2;
    }
    if row < rows.end {
        register_tile::<D, 1, PANELS>(job, row, panel);
    }
    PANELS
}

/// All rows of one panel, 4 at a time: what 16 vector registers of 8 lanes or 32 of 4 hold.
#[inline(always)]
fn strip_narrow<D: Dot>(job: &Job<'_, D::Word>, rows: Range<usize>, panel: usize) {
    let mut row = rows.start;
    while row + 4 <= rows.end {
        register_tile::<D, 4, 1>(job, row, panel);
        row += 4;
    }
    while row < rows.end {
        register_tile::<D, 1, 1>(job, row, panel);
        row += 1;
    }
}

/// `ROWS` by `PANELS` sums in registers, each one chain over the depth.
#[inline(always)]
fn register_tile<D: Dot, const ROWS: usize, const PANELS: usize>(
    job: &Job<'_, D::Word>,
    row: usize,
    panel: usize,
) {
    let depth = job.depth;
    let x: [&[D::Word]; ROWS] = std::array::from_fn(|r| &job.x[(row + r) * depth..][..depth]);
    let lines: [&[Line<D::Word>]; PANELS] =
        std::array::from_fn(|p| &job.lines[(panel + p) * depth..][..depth]);
    let mut sums = [[D::zero(); PANELS]; ROWS];
    for k in 0..depth {
        let weights: [D::Weights; PANELS] = std::array::from_fn(|p| D::weights(&lines[p][k].0));
        for r in 0..ROWS {
            let activation = D::activation(x[r][k]);
            for p in 0..PANELS {
                sums[r][p] = D::add(sums[r][p], weights[p], activation);
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        for (p, &sums) in sums.iter().enumerate() {
            let mut values = [0.0; LANES];
            D::store(sums, &mut values);
            let column = (panel + p) * LANES;
            let end = job.n.min(column + LANES);
            if let Some(bias) = job.bias {
                for (value, bias) in values.iter_mut().zip(&bias[column..end]) {
                    *value += bias;
                }
            }
            let at = (row + r) * job.n;
            // SAFETY: tiles of one job share no row of a panel, so no other task touches these elements, and this
            // task holds one part at a time.
            let y = unsafe { job.y.part(at + column..at + end) };
            match <&mut [f32; LANES]>::try_from(&mut *y) {
                Ok(whole) => *whole = values,
                Err(_) => y.copy_from_slice(&values[..end - column]),
            }
        }
    }
}

/// f32 times f32.
struct F32<I>(std::marker::PhantomData<I>);

impl<I: Isa> Dot for F32<I> {
    type Word = f32;
    type Weights = I::Lanes;
    type Activation = I::Lanes;
    type Sums = I::Lanes;
    const WIDE: bool = I::WIDE;

    #[inline(always)]
    fn zero() -> I::Lanes {
        I::Lanes::splat(0.0)
    }

    #[inline(always)]
    fn weights(line: &[f32; LANES]) -> I::Lanes {
        I::Lanes::load(line)
    }

    #[inline(always)]
    fn activation(word: f32) -> I::Lanes {
        I::Lanes::splat(word)
    }

    #[inline(always)]
    fn add(sums: I::Lanes, weights: I::Lanes, activation: I::Lanes) -> I::Lanes {
        weights.mul_add(activation, sums)
    }

    #[inline(always)]
    fn store(sums: I::Lanes, to: &mut [f32; LANES]) {
        sums.store(to);
    }
}

/// bf16 times bf16, both widened; the lower `k` of a pair is added first.
struct Widened<I>(std::marker::PhantomData<I>);

impl<I: Isa> Dot for Widened<I> {
    type Word = u32;
    type Weights = (I::Lanes, I::Lanes);
    type Activation = (I::Lanes, I::Lanes);
    type Sums = I::Lanes;
    const WIDE: bool = I::WIDE;

    #[inline(always)]
    fn zero() -> I::Lanes {
        I::Lanes::splat(0.0)
    }

    #[inline(always)]
    fn weights(line: &[u32; LANES]) -> (I::Lanes, I::Lanes) {
        I::Lanes::widen(line)
    }

    #[inline(always)]
    fn activation(word: u32) -> (I::Lanes, I::Lanes) {
        let [low, high] = super::bf16::unpair(word);
        (I::Lanes::splat(low), I::Lanes::splat(high))
    }

    #[inline(always)]
    fn add(sums: I::Lanes, weights: (I::Lanes, I::Lanes), activation: (I::Lanes, I::Lanes)) -> I::Lanes {
        weights.1.mul_add(activation.1, weights.0.mul_add(activation.0, sums))
    }

    #[inline(always)]
    fn store(sums: I::Lanes, to: &mut [f32; LANES]) {
        sums.store(to);
    }
}

/// Packs up to 16 rows `[.., k]` as one panel.
pub(super) fn pack_f32(rows: &[f32], k: usize, panel: &mut [Line<f32>]) {
    for (lane, row) in rows.chunks_exact(k).enumerate() {
        for (line, &value) in panel.iter_mut().zip(row) {
            line.0[lane] = value;
        }
    }
}

/// Packs up to 16 rows `[.., k]` as one panel of bf16 pairs.
pub(super) fn pack_bf16(rows: &[f32], k: usize, panel: &mut [Line<u32>]) {
    for (lane, row) in rows.chunks_exact(k).enumerate() {
        for (line, pair) in panel.iter_mut().zip(row.chunks(2)) {
            line.0[lane] = super::bf16::pair(pair[0], pair.get(1).copied().unwrap_or(0.0));
        }
    }
}

/// AVX512-BF16.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m512, __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_set1_epi32,
        _mm512_setzero_ps, _mm512_storeu_ps,
    };

    use super::{Dot, Job, LANES, Tile, run};
    use crate::isa::{Level, level};

    /// Whether the machine multiplies pairs of bf16.
    pub(super) fn has_bf16() -> bool {
        level() == Level::Avx512 && is_x86_feature_detected!("avx512bf16")
    }

    /// Computes `tile` with `vdpbf16ps`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")]
    pub(super) fn run_native(job: &Job<'_, u32>, tile: &Tile) {
        run::<Native>(job, tile);
    }

    /// bf16 times bf16 in pairs. Only [`run_native`] names it, so AVX512-BF16 exists where its methods run.
    struct Native;

    impl Dot for Native {
        type Word = u32;
        type Weights = __m512bh;
        type Activation = __m512bh;
        type Sums = __m512;
        const WIDE: bool = true;

        #[inline(always)]
        fn zero() -> __m512 {
            // SAFETY: AVX-512 exists where this runs.
            unsafe { _mm512_setzero_ps() }
        }

        #[inline(always)]
        fn weights(line: &[u32; LANES]) -> __m512bh {
            // SAFETY: AVX-512 exists, and the reference covers the 64 bytes read.
            let words = unsafe { _mm512_loadu_si512(line.as_ptr().cast::<__m512i>()) };
            // SAFETY: both are 64 plain bytes.
            unsafe { std::mem::transmute::<__m512i, __m512bh>(words) }
        }

        #[inline(always)]
        fn activation(word: u32) -> __m512bh {
            // SAFETY: AVX-512 exists where this runs.
            let words = unsafe { _mm512_set1_epi32(word.cast_signed()) };
            // SAFETY: both are 64 plain bytes.
            unsafe { std::mem::transmute::<__m512i, __m512bh>(words) }
        }

        #[inline(always)]
        fn add(sums: __m512, weights: __m512bh, activation: __m512bh) -> __m512 {
            // SAFETY: AVX512-BF16 exists where this runs.
            unsafe { _mm512_dpbf16_ps(sums, weights, activation) }
        }

        #[inline(always)]
        fn store(sums: __m512, to: &mut [f32; LANES]) {
            // SAFETY: AVX-512 exists, and the reference covers the 64 bytes written.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), sums) }
        }
    }
}
