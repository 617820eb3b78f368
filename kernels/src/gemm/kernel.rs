//! The inner loops of [`matmul`](super::matmul): register tiles of up to 12 rows by a panel, or of few rows by several.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};

use crate::cast::unpair;
use crate::isa::{Isa, Lanes, multiversion, prefetch};
use crate::parallel::Disjoint;

/// Elements of a vector register.
pub(super) const LANES: usize = 16;
/// Vectors of a panel, side by side: so panels are read as one stream, which memory gives faster than several.
pub(super) const VECTORS: usize = 2;
/// Output columns of a panel.
pub(super) const COLUMNS: usize = LANES * VECTORS;
/// Rows that lie side by side in a matrix that is read as its transpose.
pub(super) const BLOCK_ROWS: usize = 8;
/// Rows of the largest register tile.
const TILE_ROWS: usize = 12;
/// The same where 16 vector registers hold 8 lanes each.
const NARROW_TILE_ROWS: usize = 2;
/// Depth of a strip: a panel of it takes 128 KiB of the second-level cache.
const MAX_DEPTH: usize = 1024;

/// The words of a panel at one depth, aligned so that no load straddles two cache lines.
#[derive(Clone, Copy, Debug, Default, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Line<W>(pub(super) [[W; LANES]; VECTORS]);

// SAFETY: a line is 32 words, and those of the kernels take four bytes, so that none of its 128 is padding.
unsafe impl<W: Pod> Pod for Line<W> {}

/// One product `y = x Wᵀ + bias`, to be worked on by tiles. A word is one f32 or two bf16 along `K`.
pub(super) struct Job<'a, W> {
    /// `[T, depth]`, or `[T/8, depth, 8]` if `blocked`.
    pub(super) x: &'a [W],
    /// Whether eight rows of `x` lie side by side: a matrix that is read as its transpose.
    pub(super) blocked: bool,
    /// `[N/32, depth]`.
    pub(super) lines: &'a [Line<W>],
    /// Words along `K`, at least one.
    pub(super) depth: usize,
    /// Columns of `y`.
    pub(super) n: usize,
    /// `[N]`.
    pub(super) bias: Option<&'a [f32]>,
    /// Whether chains go on from what `y` holds.
    pub(super) onto: bool,
    /// `[T, N]`.
    pub(super) y: Disjoint<'a, f32>,
    /// Weights that whoever works on the last panels multiplies by next; their first lines are fetched meanwhile.
    pub(super) then: &'a [Line<W>],
}

impl<W> Job<'_, W> {
    /// # Panics
    /// If the operands do not fit `n_rows` rows.
    pub(super) fn check(&self, n_rows: usize) {
        let n_rows = if self.blocked { n_rows.next_multiple_of(BLOCK_ROWS) } else { n_rows };
        assert_eq!(self.x.len(), n_rows * self.depth, "activations are [{n_rows}, {}] words", self.depth);
        assert_eq!(self.lines.len(), self.n.div_ceil(COLUMNS) * self.depth);
    }
}

/// The part of a product that one task computes.
#[derive(Clone)]
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

    fn load(from: &[f32; LANES]) -> Self::Sums;
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
pub(super) fn run_f32_body<I: Isa>(job: &Job<'_, f32>, tile: &Tile) {
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
pub(super) fn run_widened_body<I: Isa>(job: &Job<'_, u32>, tile: &Tile) {
    run::<Widened<I>>(job, tile);
}

/// Panels that are multiplied at once with `n_rows` rows, and so should stay together: one alone would make too few chains
/// to hide the latency of an addition.
pub(super) fn strip_panels(n_rows: usize) -> usize {
    match n_rows {
        1 => 4,
        2 => 2,
        _ => 1,
    }
}

/// Depth outside, then panels, rows inside: a strip of panels stays in the second-level cache while all rows pass
/// by. A chain that is cut here goes on from where it was, so cutting changes no bit.
#[inline(always)]
fn run<D: Dot>(job: &Job<'_, D::Word>, tile: &Tile) {
    if job.blocked {
        run_tile::<D, true>(job, tile);
    } else {
        run_tile::<D, false>(job, tile);
    }
}

#[inline(always)]
fn run_tile<D: Dot, const BLOCKED: bool>(job: &Job<'_, D::Word>, tile: &Tile) {
    for start in (0..job.depth).step_by(MAX_DEPTH) {
        let block = Block {
            rows: tile.rows.clone(),
            depth: start..job.depth.min(start + MAX_DEPTH),
            last_panel: tile.panels.end,
        };
        let mut panel = tile.panels.start;
        while panel < tile.panels.end {
            panel += match (tile.rows.len(), tile.panels.end - panel) {
                (1, 4..) if D::WIDE => few_rows::<D, BLOCKED, 1, 4>(job, &block, panel),
                (1, 2..) => few_rows::<D, BLOCKED, 1, 2>(job, &block, panel),
                (2, 2..) if D::WIDE => few_rows::<D, BLOCKED, 2, 2>(job, &block, panel),
                _ if job.n <= panel * COLUMNS + LANES => strip::<D, BLOCKED, 1>(job, &block, panel),
                _ => strip::<D, BLOCKED, VECTORS>(job, &block, panel),
            };
        }
    }
}

/// What a strip works on.
struct Block {
    rows: Range<usize>,
    depth: Range<usize>,
    /// The tile's end.
    last_panel: usize,
}

impl Block {
    /// Where the lines lie that follow the strip `panels`: those of the next strip, or of what comes after the tile.
    /// While a strip is multiplied the next one is fetched, since the processor's own prefetching stops at every page
    /// and starts anew for every panel.
    #[inline(always)]
    fn next<W>(&self, job: &Job<'_, W>, panels: Range<usize>) -> Option<*const Line<W>> {
        if panels.end < self.last_panel {
            return Some(job.lines[panels.end * job.depth + self.depth.start..].as_ptr());
        }
        // Not of an empty slice: asking for an address that is not there takes as long as looking for it.
        job.then.first().map(std::ptr::from_ref)
    }
}

/// All rows of `PANELS` panels in one register tile.
#[inline(always)]
fn few_rows<D: Dot, const BLOCKED: bool, const ROWS: usize, const PANELS: usize>(
    job: &Job<'_, D::Word>,
    block: &Block,
    panel: usize,
) -> usize {
    let next = block.next(job, panel..panel + PANELS);
    let ahead = next.map(|next| Ahead::share(next, block.depth.len(), (0, 1)));
    register_tile::<D, BLOCKED, ROWS, PANELS, VECTORS>(job, block, (block.rows.start, panel), ahead);
    PANELS
}

/// All rows of the first `VECS` vectors of a panel, in as few register tiles as hold them, which share the rows evenly: a
/// tile of one or two rows has too few chains to hide the latency of an addition.
#[inline(always)]
fn strip<D: Dot, const BLOCKED: bool, const VECS: usize>(
    job: &Job<'_, D::Word>,
    block: &Block,
    panel: usize,
) -> usize {
    let most = match D::WIDE {
        true if BLOCKED => BLOCK_ROWS,
        true => TILE_ROWS,
        false => NARROW_TILE_ROWS,
    };
    let next = block.next(job, panel..panel + 1);
    let n_tiles = block.rows.len().div_ceil(most);
    let Range { start: mut row, end } = block.rows;
    for tile in 0..n_tiles {
        let ahead = next.map(|next| Ahead::share(next, block.depth.len(), (tile, n_tiles)));
        let at = (row, panel);
        // Rows of two blocks do not lie side by side.
        let n_rows = if BLOCKED { most.min(end - row) } else { (end - row).div_ceil(n_tiles - tile) };
        match n_rows {
            1 => register_tile::<D, BLOCKED, 1, 1, VECS>(job, block, at, ahead),
            2 => register_tile::<D, BLOCKED, 2, 1, VECS>(job, block, at, ahead),
            3 if D::WIDE => register_tile::<D, BLOCKED, 3, 1, VECS>(job, block, at, ahead),
            4 if D::WIDE => register_tile::<D, BLOCKED, 4, 1, VECS>(job, block, at, ahead),
            5 if D::WIDE => register_tile::<D, BLOCKED, 5, 1, VECS>(job, block, at, ahead),
            6 if D::WIDE => register_tile::<D, BLOCKED, 6, 1, VECS>(job, block, at, ahead),
            7 if D::WIDE => register_tile::<D, BLOCKED, 7, 1, VECS>(job, block, at, ahead),
            8 if D::WIDE => register_tile::<D, BLOCKED, 8, 1, VECS>(job, block, at, ahead),
            9 if D::WIDE && !BLOCKED => register_tile::<D, false, 9, 1, VECS>(job, block, at, ahead),
            10 if D::WIDE && !BLOCKED => register_tile::<D, false, 10, 1, VECS>(job, block, at, ahead),
            11 if D::WIDE && !BLOCKED => register_tile::<D, false, 11, 1, VECS>(job, block, at, ahead),
            12 if D::WIDE && !BLOCKED => register_tile::<D, false, 12, 1, VECS>(job, block, at, ahead),
            _ => unreachable!("tiles have {most} rows at most"),
        }
        row += n_rows;
    }
    1
}

/// Lines to be fetched while others are multiplied, for each word of depth one from each panel.
#[derive(Clone, Copy)]
struct Ahead<L> {
    first: *const L,
    /// Bytes between two of them.
    step: usize,
}

impl<L> Ahead<L> {
    /// The share of tile `tile` of `n_tiles` in the strip at `next`: were all of it fetched during the first tile, memory
    /// would rest during the others, and the first would wait for it. Where tiles are many, lines are asked for more
    /// than once, which costs nothing.
    #[inline(always)]
    fn share(next: *const L, len: usize, (tile, n_tiles): (usize, usize)) -> Self {
        Self { first: next.wrapping_add(tile * len / n_tiles), step: size_of::<L>().div_ceil(n_tiles) }
    }

    /// Asks for line `index`.
    #[inline(always)]
    fn fetch(self, index: usize) {
        let line = self.first.wrapping_byte_add(index * self.step);
        prefetch(line);
        prefetch(line.wrapping_byte_add(self.step / 2));
    }
}

/// `ROWS` by `PANELS` by `VECS` vectors of sums in registers, each one chain over the block's depth.
#[inline(always)]
fn register_tile<D: Dot, const BLOCKED: bool, const ROWS: usize, const PANELS: usize, const VECS: usize>(
    job: &Job<'_, D::Word>,
    block: &Block,
    (row, panel): (usize, usize),
    ahead: Option<Ahead<Line<D::Word>>>,
) {
    let (depth, len) = (job.depth, block.depth.len());
    let (row_step, k_step) = if BLOCKED { (1, BLOCK_ROWS) } else { (depth, 1) };
    let in_block = if BLOCKED { row % BLOCK_ROWS } else { 0 };
    let x = &job.x[(row - in_block) * depth + in_block + block.depth.start * k_step..];
    let lines = &job.lines[panel * depth + block.depth.start..];
    // Checked here once: a slice a row would take the registers that hold addresses, and a check a word.
    assert!(len > 0 && (ROWS - 1) * row_step + (len - 1) * k_step < x.len());
    assert!((PANELS - 1) * depth + len <= lines.len());
    let mut sums = [[[D::load(&[0.0; LANES]); VECS]; PANELS]; ROWS];
    // Whether every panel has all its columns.
    let is_whole = (panel + PANELS - 1) * COLUMNS + VECS * LANES <= job.n;
    let part = |i: usize| {
        let start = (row + i / PANELS) * job.n + (panel + i % PANELS) * COLUMNS;
        // SAFETY: tiles of one job share no row of a panel, and nothing else here holds a part.
        unsafe { job.y.part(start..start + VECS * LANES) }.as_chunks_mut().0
    };
    if (job.onto || block.depth.start > 0) && is_whole {
        for (i, sums) in sums.as_flattened_mut().iter_mut().enumerate() {
            for (sum, y) in sums.iter_mut().zip(part(i)) {
                *sum = D::load(y);
            }
        }
    } else if job.onto || block.depth.start > 0 {
        let mut values = [[[[0.0; LANES]; VECS]; PANELS]; ROWS];
        job.read((row, panel), values.as_flattened_mut().as_flattened_mut(), (PANELS, VECS));
        for (sums, values) in sums.as_flattened_mut().iter_mut().zip(values.as_flattened()) {
            for (sum, values) in sums.iter_mut().zip(values) {
                *sum = D::load(values);
            }
        }
    }
    let mut weights = [[D::weights(&lines[0].0[0]); VECS]; PANELS];
    for k in 0..len {
        if let Some(ahead) = ahead {
            for p in 0..PANELS {
                ahead.fetch(k * PANELS + p);
            }
        }
        // Loops, not `array::from_fn`: a closure over vectors is not always inlined; see `Isa`.
        for (p, weights) in weights.iter_mut().enumerate() {
            // SAFETY: the index is at most `(PANELS - 1) * depth + len - 1`.
            let line = unsafe { lines.get_unchecked(p * depth + k) };
            for (weights, words) in weights.iter_mut().zip(&line.0) {
                *weights = D::weights(words);
            }
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the index is at most `(ROWS - 1) * row_step + (len - 1) * k_step`.
            let word = unsafe { *x.get_unchecked(r * row_step + k * k_step) };
            let activation = D::activation(word);
            for (sums, weights) in sums.iter_mut().zip(&weights) {
                for (sum, &weights) in sums.iter_mut().zip(weights) {
                    *sum = D::add(*sum, weights, activation);
                }
            }
        }
    }
    let bias = job.bias.filter(|_| block.depth.end == depth);
    if bias.is_none() && is_whole {
        for (i, sums) in sums.as_flattened().iter().enumerate() {
            for (&sum, y) in sums.iter().zip(part(i)) {
                D::store(sum, y);
            }
        }
        return;
    }
    let mut values = [[[[0.0; LANES]; VECS]; PANELS]; ROWS];
    for (sums, values) in sums.as_flattened().iter().zip(values.as_flattened_mut()) {
        for (&sum, values) in sums.iter().zip(values) {
            D::store(sum, values);
        }
    }
    job.write((row, panel), values.as_flattened().as_flattened(), (PANELS, VECS), bias);
}

impl<W> Job<'_, W> {
    /// Reads sums that earlier blocks left in `y`: `values` `[rows, n_panels, n_vectors]`, from row and panel `at` on, where
    /// a panel lacks columns. Beside the kernels, which would otherwise be long with what happens rarely.
    #[inline(never)]
    fn read(&self, at: (usize, usize), values: &mut [[f32; LANES]], (n_panels, n_vectors): (usize, usize)) {
        for (i, values) in values.chunks_exact_mut(n_vectors).enumerate() {
            let y = self.part(at.0 + i / n_panels, at.1 + i % n_panels);
            values.as_flattened_mut()[..y.len()].copy_from_slice(y);
        }
    }

    /// Writes to `y` what [`Self::read`] reads, with `bias` added: the way of tiles that reach past the last column.
    #[inline(never)]
    fn write(
        &self,
        at: (usize, usize),
        values: &[[f32; LANES]],
        (n_panels, n_vectors): (usize, usize),
        bias: Option<&[f32]>,
    ) {
        for (i, values) in values.chunks_exact(n_vectors).enumerate() {
            let panel = at.1 + i % n_panels;
            let y = self.part(at.0 + i / n_panels, panel);
            y.copy_from_slice(&values.as_flattened()[..y.len()]);
            if let Some(bias) = bias {
                for (y, bias) in y.iter_mut().zip(&bias[panel * COLUMNS..]) {
                    *y += bias;
                }
            }
        }
    }

    /// The elements of `y` in `row` and `panel`.
    #[expect(clippy::mut_from_ref, reason = "tiles do not overlap; see the safety comment")]
    fn part(&self, row: usize, panel: usize) -> &mut [f32] {
        let (start, end) = (panel * COLUMNS, self.n.min((panel + 1) * COLUMNS));
        // SAFETY: tiles of one job share no row of a panel, so no other task touches these elements, and callers here
        // hold one part at a time.
        unsafe { self.y.part(row * self.n + start..row * self.n + end) }
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
    fn load(from: &[f32; LANES]) -> I::Lanes {
        I::Lanes::load(from)
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
    fn load(from: &[f32; LANES]) -> I::Lanes {
        I::Lanes::load(from)
    }

    #[inline(always)]
    fn weights(line: &[u32; LANES]) -> (I::Lanes, I::Lanes) {
        I::Lanes::widen(line)
    }

    #[inline(always)]
    fn activation(word: u32) -> (I::Lanes, I::Lanes) {
        let [low, high] = unpair(word);
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

/// AVX512-BF16.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m512, __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_set1_epi32,
        _mm512_storeu_ps,
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
        fn load(from: &[f32; LANES]) -> __m512 {
            // SAFETY: AVX-512 exists, and the reference covers the 64 bytes read.
            unsafe { _mm512_loadu_ps(from.as_ptr()) }
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
