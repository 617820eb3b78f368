//! The inner loops of attention: scores, softmax and weighted values of a few query rows at once.
//!
//! Keys lie in tiles of 16 slots with slots as lanes, `[hd, 16]`, so a score is one chain of multiply-adds over
//! `d = 0..hd` and never needs a horizontal sum. Values lie in rows, `[16, hd]`, and an output is one chain over
//! positions. Lanes, tiles, blocks and the rows that share a pass decide when a chain runs, never its order.

use std::ops::Range;

use half::bf16;

use crate::isa::{Isa, Lanes};
use crate::softmax::{exp_in_place, max};

pub(super) const LANES: usize = 16;

/// How a cache stores a number.
pub(super) trait Element: Copy + Default + Send + Sync {
    /// Rounds to nearest, ties to even.
    fn narrow(value: f32) -> Self;
    /// Exact.
    fn widen(values: &[Self; LANES]) -> [f32; LANES];
}

impl Element for f32 {
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn widen(values: &[Self; LANES]) -> [f32; LANES] {
        *values
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        Self::from_f32(value)
    }

    /// Not `to_f32`, whose care for signalling NaN would keep the loop from vectorising.
    #[inline(always)]
    fn widen(values: &[Self; LANES]) -> [f32; LANES] {
        values.map(|value| f32::from_bits(u32::from(value.to_bits()) << 16))
    }
}

/// Keys and values of one kv head of one sequence, found through its block table.
#[derive(Clone, Copy)]
pub(super) struct View<'a, E> {
    /// One layer, `[n_tiles, Hkv, hd, 16]`.
    pub(super) keys: &'a [E],
    /// One layer, `[n_tiles, Hkv, 16, hd]`.
    pub(super) values: &'a [E],
    /// `Hkv`.
    pub(super) n_kv_heads: usize,
    pub(super) kv_head: usize,
    pub(super) head_dim: usize,
    /// Position `p` lies in slot `blocks[p / block_tokens] * block_tokens + p % block_tokens`.
    pub(super) blocks: &'a [u32],
    pub(super) block_tokens: usize,
}

/// Consecutive positions in consecutive slots of one tile.
struct Run {
    position: usize,
    len: usize,
    /// Where the tile of this kv head starts in `keys` and in `values`.
    tile: usize,
    /// The first slot's place in its tile.
    lane: usize,
}

/// The runs of some positions. An iterator, because a closure with the kernel in it would not be inlined, and would
/// then be compiled without the instruction set.
struct Runs<'a, E> {
    view: &'a View<'a, E>,
    positions: Range<usize>,
}

impl<E: Element> Iterator for Runs<'_, E> {
    type Item = Run;

    #[inline(always)]
    fn next(&mut self) -> Option<Run> {
        let (view, position) = (self.view, self.positions.start);
        if position >= self.positions.end {
            return None;
        }
        let (block, offset) = (position / view.block_tokens, position % view.block_tokens);
        let slot = view.blocks[block] as usize * view.block_tokens + offset;
        let lane = slot % LANES;
        let len = (LANES - lane).min(view.block_tokens - offset).min(self.positions.end - position);
        let tile = (slot / LANES * view.n_kv_heads + view.kv_head) * LANES * view.head_dim;
        self.positions.start += len;
        Some(Run { position, len, tile, lane })
    }
}

impl<E: Element> View<'_, E> {
    /// The runs of `positions`, in order.
    #[inline(always)]
    fn runs(&self, positions: Range<usize>) -> Runs<'_, E> {
        Runs { view: self, positions }
    }

    /// `scores[r][p] = queries[r] . key[p]` for `p` in `0..n_keys`: `queries` `[R, hd]`, rows of `scores` `stride` apart.
    #[inline(always)]
    pub(super) fn score<I: Isa, const R: usize>(
        &self,
        queries: &[f32],
        n_keys: usize,
        scores: &mut [f32],
        stride: usize,
    ) {
        let queries: [&[f32]; R] = std::array::from_fn(|r| &queries[r * self.head_dim..][..self.head_dim]);
        for run in self.runs(0..n_keys) {
            let (lines, _) = self.keys[run.tile..][..LANES * self.head_dim].as_chunks::<LANES>();
            let mut sums = [I::Lanes::splat(0.0); R];
            for (d, line) in lines.iter().enumerate() {
                let key = I::Lanes::load(&E::widen(line));
                for (sum, query) in sums.iter_mut().zip(&queries) {
                    *sum = I::Lanes::splat(query[d]).mul_add(key, *sum);
                }
            }
            for (r, sum) in sums.into_iter().enumerate() {
                let mut lanes = [0.0; LANES];
                sum.store(&mut lanes);
                let row = &mut scores[r * stride + run.position..];
                match row.first_chunk_mut::<LANES>() {
                    Some(row) if run.len == LANES => *row = lanes,
                    _ => row[..run.len].copy_from_slice(&lanes[run.lane..][..run.len]),
                }
            }
        }
    }

    /// `out[r] += sum_p weights[r][p] * value[p]` over `positions`, in order: `out` `[R, hd]`, rows of `weights`
    /// `stride` apart.
    #[inline(always)]
    pub(super) fn add_weighted<I: Isa, const R: usize>(
        &self,
        weights: &[f32],
        stride: usize,
        positions: Range<usize>,
        out: &mut [f32],
    ) {
        let weighted = Weighted { view: self, weights, stride, positions };
        let whole = self.head_dim - self.head_dim % LANES;
        for column in (0..whole).step_by(LANES) {
            weighted.add_columns::<I, R>(column, LANES, out);
        }
        if whole < self.head_dim {
            weighted.add_columns::<I, R>(whole, self.head_dim - whole, out);
        }
    }
}

/// Values waiting to be summed up.
struct Weighted<'a, E> {
    view: &'a View<'a, E>,
    weights: &'a [f32],
    stride: usize,
    positions: Range<usize>,
}

impl<E: Element> Weighted<'_, E> {
    /// The columns `column..column + width` of [`View::add_weighted`], with the sums in registers.
    #[inline(always)]
    fn add_columns<I: Isa, const R: usize>(&self, column: usize, width: usize, out: &mut [f32]) {
        let head_dim = self.view.head_dim;
        let mut sums: [I::Lanes; R] =
            std::array::from_fn(|r| I::Lanes::load(&padded(&out[r * head_dim + column..][..width])));
        for run in self.view.runs(self.positions.clone()) {
            let weights: [&[f32]; R] =
                std::array::from_fn(|r| &self.weights[r * self.stride + run.position..][..run.len]);
            let values = &self.view.values[run.tile + run.lane * head_dim..][..run.len * head_dim];
            for (i, value) in values.chunks_exact(head_dim).enumerate() {
                let value = I::Lanes::load(&E::widen(&padded(&value[column..][..width])));
                for (sum, weights) in sums.iter_mut().zip(&weights) {
                    *sum = I::Lanes::splat(weights[i]).mul_add(value, *sum);
                }
            }
        }
        for (r, sum) in sums.into_iter().enumerate() {
            let mut lanes = [0.0; LANES];
            sum.store(&mut lanes);
            out[r * head_dim + column..][..width].copy_from_slice(&lanes[..width]);
        }
    }
}

/// At most 16 elements and zeros.
#[inline(always)]
pub(super) fn padded<E: Element>(values: &[E]) -> [E; LANES] {
    let mut lanes = [E::default(); LANES];
    lanes[..values.len()].copy_from_slice(values);
    lanes
}

/// Query rows of one sequence and kv head: row `r` is head `r % group` of query `r / group`, which sees the keys of
/// positions `0..=start + r / group`.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    /// Query heads per kv head.
    pub(super) group: usize,
    /// Position of the first row's query.
    pub(super) start: usize,
    pub(super) n_rows: usize,
}

impl Rows {
    /// Keys that row `row` sees.
    #[inline(always)]
    pub(super) fn n_keys(&self, row: usize) -> usize {
        self.start + row / self.group + 1
    }

    /// Rows of the pass that starts with row `first`: a power of two, at most what the registers hold.
    #[inline(always)]
    pub(super) fn pass_len<I: Isa>(&self, first: usize) -> usize {
        match self.n_rows - first {
            8.. if I::WIDE => 8,
            4.. => 4,
            2.. => 2,
            _ => 1,
        }
    }
}

/// Most rows of a pass.
pub(super) const MAX_PASS: usize = 8;

/// Buffers of [`attend`], grown to the largest task and kept.
#[derive(Default)]
pub(super) struct Scratch {
    /// Scaled queries, `[n_rows, hd]`.
    pub(super) queries: Vec<f32>,
    /// Results, `[n_rows, hd]`.
    pub(super) out: Vec<f32>,
    /// Highest score of each row, and its sum of exponentials.
    pub(super) softmax: Vec<(f32, f32)>,
    scores: Vec<f32>,
}

/// Softmax attention of the scaled `scratch.queries` into `scratch.out`.
#[inline(always)]
pub(super) fn attend<I: Isa, E: Element>(view: &View<'_, E>, rows: Rows, scratch: &mut Scratch) {
    let stride = rows.n_keys(rows.n_rows - 1).next_multiple_of(LANES);
    scratch.scores.resize(MAX_PASS * stride, 0.0);
    scratch.out.clear();
    scratch.out.resize(rows.n_rows * view.head_dim, 0.0);
    scratch.softmax.resize(rows.n_rows, (0.0, 0.0));
    let mut first = 0;
    while first < rows.n_rows {
        let n = rows.pass_len::<I>(first);
        match n {
            8 => attend_pass::<I, E, 8>(view, rows, first, scratch),
            4 => attend_pass::<I, E, 4>(view, rows, first, scratch),
            2 => attend_pass::<I, E, 2>(view, rows, first, scratch),
            _ => attend_pass::<I, E, 1>(view, rows, first, scratch),
        }
        first += n;
    }
}

#[inline(always)]
fn attend_pass<I: Isa, E: Element, const R: usize>(
    view: &View<'_, E>,
    rows: Rows,
    first: usize,
    scratch: &mut Scratch,
) {
    let stride = scratch.scores.len() / MAX_PASS;
    let span = first * view.head_dim..(first + R) * view.head_dim;
    let (queries, out) = (&scratch.queries[span.clone()], &mut scratch.out[span]);
    let scores = &mut scratch.scores;
    let seen_by_all = rows.n_keys(first);
    view.score::<I, R>(queries, rows.n_keys(first + R - 1), scores, stride);
    let softmax = &mut scratch.softmax[first..first + R];
    for (r, softmax) in softmax.iter_mut().enumerate() {
        let row = &mut scores[r * stride..][..rows.n_keys(first + r)];
        let highest = max(row);
        *softmax = (highest, exp_in_place::<I>(row, highest));
    }
    view.add_weighted::<I, R>(scores, stride, 0..seen_by_all, out);
    for (r, (out, &(_, sum))) in out.chunks_exact_mut(view.head_dim).zip(&*softmax).enumerate() {
        // A later query's own keys go to its row alone: zero times a key that is not finite is not zero.
        view.add_weighted::<I, 1>(&scores[r * stride..], stride, seen_by_all..rows.n_keys(first + r), out);
        for value in out {
            *value /= sum;
        }
    }
}
