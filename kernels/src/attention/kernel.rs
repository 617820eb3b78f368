//! The inner loops of attention: scores, softmax and weighted values of a few query rows at once.
//!
//! Keys lie in tiles of 16 slots with slots as lanes, `[hd, 16]`, so a score is one chain of multiply-adds over
//! `d = 0..hd` and never needs a horizontal sum. Values lie in rows, `[16, hd]`, and an output is one chain over
//! positions. Lanes, tiles, blocks and the rows that share a pass decide when a chain runs, never its order.

use std::ops::Range;

use half::bf16;

use crate::cast::{nearest_bf16, widened_bf16};
use crate::isa::{self, Isa, Lanes, padded, prefetch};
use crate::softmax::{exp_in_place, max};

pub(super) const LANES: usize = 16;
/// What memory is fetched by.
const LINE_BYTES: usize = 64;
/// How far ahead of its use memory is asked for: as much as comes while a first line is on its way. With half of it decoding
/// waits, with twice as much what was fetched leaves the first-level cache before it is used.
const AHEAD_BYTES: usize = 8 << 10;

/// How a cache stores a number.
pub(super) trait Element: Copy + Default + Send + Sync {
    /// Rounds to nearest, ties to even.
    fn narrow(values: &[f32; LANES]) -> [Self; LANES];
    /// Exact.
    fn widen(values: &[Self; LANES]) -> [f32; LANES];
}

impl Element for f32 {
    #[inline(always)]
    fn narrow(values: &[f32; LANES]) -> [Self; LANES] {
        *values
    }

    #[inline(always)]
    fn widen(values: &[Self; LANES]) -> [f32; LANES] {
        *values
    }
}

impl Element for bf16 {
    /// Not `from_f32`, which does not vectorise.
    #[inline(always)]
    fn narrow(values: &[f32; LANES]) -> [Self; LANES] {
        values.map(|value| Self::from_bits(nearest_bf16(value)))
    }

    /// Not `to_f32`, whose care for signalling NaN would keep the loop from vectorising.
    #[inline(always)]
    fn widen(values: &[Self; LANES]) -> [f32; LANES] {
        values.map(|value| widened_bf16(value.to_bits()))
    }
}

/// One kv head of one sequence.
#[derive(Clone, Copy)]
pub(super) struct KvHead<'a> {
    /// Among those of the model.
    pub(super) index: usize,
    /// Position `p` lies in slot `blocks[p / block_tokens] * block_tokens + p % block_tokens`.
    pub(super) blocks: &'a [u32],
    pub(super) block_tokens: usize,
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
    pub(super) head_dim: usize,
    pub(super) head: KvHead<'a>,
    /// What this thread attends to next, if that is known: it is fetched towards the end.
    pub(super) next: Option<KvHead<'a>>,
}

/// Consecutive positions in consecutive slots of one tile.
#[derive(Clone, Copy)]
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
        let KvHead { blocks, block_tokens, .. } = view.head;
        let (block, offset) = (position / block_tokens, position % block_tokens);
        let slot = blocks[block] as usize * block_tokens + offset;
        let lane = slot % LANES;
        let len = (LANES - lane).min(block_tokens - offset).min(self.positions.end - position);
        let tile = view.tile(view.head, slot);
        self.positions.start += len;
        Some(Run { position, len, tile, lane })
    }
}

impl<E: Element> Runs<'_, E> {
    /// The next `T` runs and how many there are, none at the end; the first stands in for those that are missing.
    #[inline(always)]
    fn take_some<const T: usize>(&mut self) -> Option<([Run; T], usize)> {
        let mut runs = [self.next()?; T];
        let mut n = 1;
        while n < T {
            let Some(run) = self.next() else { break };
            runs[n] = run;
            n += 1;
        }
        Some((runs, n))
    }
}

impl<E: Element> View<'_, E> {
    /// The runs of `positions`, in order.
    #[inline(always)]
    fn runs(&self, positions: Range<usize>) -> Runs<'_, E> {
        Runs { view: self, positions }
    }

    /// `scores[r][p] = queries[r] . key[p]` for `p` in `0..n_keys`: `queries` `[R, hd]`, rows of `scores` `stride` apart.
    ///
    /// `T` tiles at once make enough chains to hide the latency of an addition where rows are few. Meanwhile the values
    /// of these tiles are fetched, and the keys of the next ones: at the end those of the next head, which follow. With `FAR`
    /// it is [`Self::ahead`] that is fetched, and so it is while values are added up: memory never rests then.
    #[inline(always)]
    pub(super) fn score<I: Isa, const R: usize, const T: usize, const FAR: bool>(
        &self,
        queries: &[f32],
        n_keys: usize,
        scores: &mut [f32],
        stride: usize,
    ) {
        let head_dim = self.head_dim;
        // Checked here once: a slice a row would take the registers that hold addresses, and a check a number.
        assert!(queries.len() >= R * head_dim && scores.len() >= R * stride && n_keys <= stride);
        let mut runs = self.runs(0..n_keys);
        let mut following = runs.take_some::<T>();
        let step = if self.head.index + 1 < self.n_kv_heads { LANES * head_dim } else { 0 };
        let next_head = following.map_or([0; T], |(tiles, _)| tiles.map(|run| run.tile + step));
        while let Some((tiles, n_tiles)) = following {
            following = runs.take_some::<T>();
            let lines: [&[[E; LANES]]; T] = std::array::from_fn(|t| self.key_lines(tiles[t]));
            let mut next = [[self.values.as_ptr(); T]; 2];
            for t in 0..T {
                if FAR {
                    next[0][t] = self.ahead(tiles[t].position, n_keys);
                } else {
                    next[0][t] = self.values[tiles[t].tile..].as_ptr();
                    let tile = following.map_or(next_head[t], |(tiles, _)| tiles[t].tile);
                    next[1][t] = self.keys.as_ptr().wrapping_add(tile);
                }
            }
            let mut sums = [[I::Lanes::splat(0.0); T]; R];
            for d in 0..head_dim {
                let mut keys = [I::Lanes::splat(0.0); T];
                for t in 0..T {
                    // SAFETY: `key_lines` are `head_dim`.
                    keys[t] = I::Lanes::load(&E::widen(unsafe { lines[t].get_unchecked(d) }));
                    if (d * LANES * size_of::<E>()).is_multiple_of(LINE_BYTES) {
                        prefetch(next[0][t].wrapping_add(d * LANES));
                        if !FAR {
                            prefetch(next[1][t].wrapping_add(d * LANES));
                        }
                    }
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: the index is below `R * head_dim`, which `queries` have.
                    let query = I::Lanes::splat(unsafe { *queries.get_unchecked(r * head_dim + d) });
                    for t in 0..T {
                        sums[t] = query.mul_add(keys[t], sums[t]);
                    }
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                let row = &mut scores[r * stride..][..stride];
                for (run, sum) in tiles[..n_tiles].iter().zip(sums) {
                    let row = &mut row[run.position..];
                    match row.first_chunk_mut() {
                        // What lies behind a run that ends early is a later run's, or nobody's.
                        Some(row) if run.lane == 0 => sum.store(row),
                        _ => {
                            let mut lanes = [0.0; LANES];
                            sum.store(&mut lanes);
                            row[..run.len].copy_from_slice(&lanes[run.lane..][..run.len]);
                        }
                    }
                }
            }
        }
    }

    /// Where the tile of a slot starts in `keys` and in `values`.
    #[inline(always)]
    fn tile(&self, head: KvHead<'_>, slot: usize) -> usize {
        (slot / LANES * self.n_kv_heads + head.index) * LANES * self.head_dim
    }

    /// The tile that is read [`AHEAD_BYTES`] after that of `at` in a pass over `n_keys` positions, which reads the keys of all,
    /// then at `n_keys + position` their values, then the keys of what is next. The processor's own prefetching stops at
    /// every page, and a tile may be one.
    #[inline(always)]
    fn ahead(&self, at: usize, n_keys: usize) -> *const E {
        let distance = (AHEAD_BYTES / (self.head_dim * size_of::<E>())).min(n_keys);
        let at = at + distance.next_multiple_of(LANES);
        let (head, tiles, position) = if at < n_keys {
            (self.head, self.keys, at)
        } else if at < 2 * n_keys {
            (self.head, self.values, at - n_keys)
        } else {
            (self.next.unwrap_or(self.head), self.keys, at - 2 * n_keys)
        };
        // What is next may be shorter.
        let block = head.blocks.get(position / head.block_tokens).map_or(0, |&block| block as usize);
        let slot = block * head.block_tokens + position % head.block_tokens;
        tiles.as_ptr().wrapping_add(self.tile(head, slot))
    }

    /// The keys of a run's tile, `[hd, 16]`.
    #[inline(always)]
    fn key_lines(&self, run: Run) -> &[[E; LANES]] {
        &self.keys[run.tile..][..LANES * self.head_dim].as_chunks::<LANES>().0[..self.head_dim]
    }

    /// `out[r] += sum_p weights[r][p] * value[p]` over `positions`, in order: `out` `[R, hd]`, rows of `weights`
    /// `stride` apart.
    #[inline(always)]
    pub(super) fn add_weighted<I: Isa, const R: usize, const FAR: bool>(
        &self,
        weights: &[f32],
        stride: usize,
        positions: Range<usize>,
        out: &mut [f32],
    ) {
        if positions.is_empty() {
            return;
        }
        let weighted = Weighted { view: self, weights, stride, positions };
        let mut column = 0;
        // As many columns as there are registers for sums: each weight is loaded once for all of them.
        while column + LANES <= self.head_dim {
            column += match (self.head_dim - column) / LANES {
                4.. if I::WIDE && R <= 4 => weighted.add_columns::<I, R, 4, FAR>(column, out),
                2.. if I::WIDE => weighted.add_columns::<I, R, 2, FAR>(column, out),
                _ => weighted.add_columns::<I, R, 1, FAR>(column, out),
            };
        }
        if column < self.head_dim {
            weighted.add_last_columns::<I, R>(column, out);
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
    /// The columns `column..column + 16 C` of [`View::add_weighted`], with the sums in registers; `16 C`.
    #[inline(always)]
    fn add_columns<I: Isa, const R: usize, const C: usize, const FAR: bool>(
        &self,
        column: usize,
        out: &mut [f32],
    ) -> usize {
        let head_dim = self.view.head_dim;
        let mut sums = [[I::Lanes::splat(0.0); C]; R];
        for (r, sums) in sums.iter_mut().enumerate() {
            for (c, sum) in sums.iter_mut().enumerate() {
                *sum = I::Lanes::load(lanes_of(&out[r * head_dim + column + c * LANES..]));
            }
        }
        // Checked here once, as in `View::score`.
        let n_keys = self.positions.end;
        assert!(n_keys <= self.stride && R * self.stride <= self.weights.len());
        for run in self.view.runs(self.positions.clone()) {
            let values = &self.view.values[run.tile + run.lane * head_dim..][..run.len * head_dim];
            let ahead = if FAR { self.view.ahead(n_keys + run.position, n_keys) } else { values.as_ptr() };
            for (i, value) in values.chunks_exact(head_dim).enumerate() {
                if FAR {
                    for at in (0..C * LANES * size_of::<E>()).step_by(LINE_BYTES) {
                        prefetch(ahead.wrapping_add(i * head_dim + column).wrapping_byte_add(at));
                    }
                }
                let value = &value[column..][..C * LANES];
                let mut columns = [I::Lanes::splat(0.0); C];
                for c in 0..C {
                    columns[c] = I::Lanes::load(&E::widen(lanes_of(&value[c * LANES..])));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: `run.position + i` is one of the positions, and so below `stride`.
                    let weight = unsafe { *self.weights.get_unchecked(r * self.stride + run.position + i) };
                    let weight = I::Lanes::splat(weight);
                    for c in 0..C {
                        sums[c] = weight.mul_add(columns[c], sums[c]);
                    }
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (c, sum) in sums.iter().enumerate() {
                let out = &mut out[r * head_dim + column + c * LANES..];
                sum.store(out.first_chunk_mut().expect("columns lie inside a head"));
            }
        }
        C * LANES
    }

    /// The columns from `column` on, fewer than 16.
    #[inline(always)]
    fn add_last_columns<I: Isa, const R: usize>(&self, column: usize, out: &mut [f32]) {
        let head_dim = self.view.head_dim;
        let width = head_dim - column;
        let mut sums: [I::Lanes; R] =
            std::array::from_fn(|r| I::Lanes::load(&padded(&out[r * head_dim + column..][..width])));
        for run in self.view.runs(self.positions.clone()) {
            let values = &self.view.values[run.tile + run.lane * head_dim..][..run.len * head_dim];
            for (i, value) in values.chunks_exact(head_dim).enumerate() {
                let value = I::Lanes::load(&E::widen(&padded(&value[column..])));
                for (r, sum) in sums.iter_mut().enumerate() {
                    *sum = I::Lanes::splat(self.weights[r * self.stride + run.position + i])
                        .mul_add(value, *sum);
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

/// The first 16 of at least as many elements.
#[inline(always)]
pub(super) fn lanes_of<E>(values: &[E]) -> &[E; LANES] {
    values.first_chunk().expect("columns lie inside a head")
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

    /// Rows of the pass that starts with row `first`, at most what the registers hold.
    #[inline(always)]
    pub(super) fn pass_len<I: Isa>(&self, first: usize) -> usize {
        match self.n_rows - first {
            8.. if I::WIDE => 8,
            4.. => 4,
            n_rows => n_rows,
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

/// Softmax attention of the scaled `scratch.queries` into `scratch.out`, looking ahead as [`View::score`] does.
#[inline(always)]
pub(super) fn attend<I: Isa>(view: &View<'_, impl Element>, rows: Rows, scratch: &mut Scratch) {
    attend_passes::<I, _, false>(view, rows, scratch);
}

/// The same, looking far ahead, where [`looks_far`] says so.
#[inline(always)]
pub(super) fn attend_far<I: Isa>(view: &View<'_, impl Element>, rows: Rows, scratch: &mut Scratch) {
    assert!(I::WIDE, "narrow registers look near");
    attend_passes::<I, _, true>(view, rows, scratch);
}

/// Whether looking far ahead is faster. It is not where several queries of a sequence share what the first has read, where
/// keys are few, or without AVX-512, where it is the arithmetic that takes the time.
pub(super) fn looks_far<E>(view: &View<'_, E>, rows: Rows) -> bool {
    let key_bytes = rows.n_keys(rows.n_rows - 1) * view.head_dim * size_of::<E>();
    rows.n_rows <= rows.group && key_bytes >= AHEAD_BYTES && isa::has_wide()
}

#[inline(always)]
fn attend_passes<I: Isa, E: Element, const FAR: bool>(view: &View<'_, E>, rows: Rows, scratch: &mut Scratch) {
    let stride = rows.n_keys(rows.n_rows - 1).next_multiple_of(LANES);
    scratch.scores.resize(MAX_PASS * stride, 0.0);
    scratch.out.clear();
    scratch.out.resize(rows.n_rows * view.head_dim, 0.0);
    scratch.softmax.resize(rows.n_rows, (0.0, 0.0));
    let mut first = 0;
    while first < rows.n_rows {
        let n = rows.pass_len::<I>(first);
        match n {
            8 if I::WIDE => attend_pass::<I, E, 8, 2, FAR>(view, rows, first, scratch),
            4 if I::WIDE => attend_pass::<I, E, 4, 2, FAR>(view, rows, first, scratch),
            3 if I::WIDE => attend_pass::<I, E, 3, 3, FAR>(view, rows, first, scratch),
            2 if I::WIDE => attend_pass::<I, E, 2, 4, FAR>(view, rows, first, scratch),
            1 if I::WIDE => attend_pass::<I, E, 1, 8, FAR>(view, rows, first, scratch),
            4 => attend_pass::<I, E, 4, 1, FAR>(view, rows, first, scratch),
            3 => attend_pass::<I, E, 3, 1, FAR>(view, rows, first, scratch),
            2 => attend_pass::<I, E, 2, 1, FAR>(view, rows, first, scratch),
            _ => attend_pass::<I, E, 1, 1, FAR>(view, rows, first, scratch),
        }
        first += n;
    }
}

#[inline(always)]
fn attend_pass<I: Isa, E: Element, const R: usize, const T: usize, const FAR: bool>(
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
    view.score::<I, R, T, FAR>(queries, rows.n_keys(first + R - 1), scores, stride);
    let softmax = &mut scratch.softmax[first..first + R];
    for (r, softmax) in softmax.iter_mut().enumerate() {
        let row = whole_tiles(scores, (r, stride), rows.n_keys(first + r));
        let highest = max(row);
        *softmax = (highest, exp_in_place::<I>(row, highest));
    }
    view.add_weighted::<I, R, FAR>(scores, stride, 0..seen_by_all, out);
    for (r, (out, &(_, sum))) in out.chunks_exact_mut(view.head_dim).zip(&*softmax).enumerate() {
        // A later query's own keys go to its row alone: zero times a key that is not finite is not zero.
        view.add_weighted::<I, 1, false>(
            &scores[r * stride..],
            stride,
            seen_by_all..rows.n_keys(first + r),
            out,
        );
        for value in out {
            *value /= sum;
        }
    }
}

/// The first `n_keys` of row `r` of `scores`, and minus infinity up to a whole tile: whole vectors are faster than the rest
/// of one, and what is added to a sum of exponentials is zero.
#[inline(always)]
pub(super) fn whole_tiles(scores: &mut [f32], (r, stride): (usize, usize), n_keys: usize) -> &mut [f32] {
    let row = &mut scores[r * stride..][..n_keys.next_multiple_of(LANES)];
    row[n_keys..].fill(f32::NEG_INFINITY);
    row
}
