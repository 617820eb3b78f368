//! Products of plain f32 matrices, for training: the same kernels, so every element is one chain over the depth. Operands are
//! packed for the time of one product.

use bytemuck::Pod;

use super::kernel::{BLOCK_ROWS, COLUMNS, Job, LANES, Line, Tile, run_bf16, run_f32};
use super::{Dtype, Grid, PackedMatrix, pack, panel_rows};
use crate::cast::{pair, round_rows};
use crate::isa::{Isa, multiversion};
use crate::parallel::{self, Disjoint};
use crate::scratch::Scratch;

/// The left operand of a product.
#[derive(Clone, Copy)]
pub(crate) enum Left<'a> {
    /// `[m, k]`.
    Plain(&'a [f32]),
    /// `[k, m]`, to be read as its transpose, and how many of its rows belong together, summing to `k`: a pair of bf16
    /// is of one run, so that runs multiplied one after the other have the bits of all at once.
    Transposed(&'a [f32], &'a [usize]),
}

/// The right operand of a product.
#[derive(Clone, Copy)]
pub(crate) enum Right<'a> {
    /// `[k, n]`.
    Plain(&'a [f32]),
    /// `[n, k]`, to be read as its transpose: a weight, as a forward pass multiplies by it.
    Transposed(&'a [f32]),
    /// The same, packed before, in the product's dtype.
    Packed(&'a PackedMatrix),
}

impl Right<'_> {
    /// `k`, of `n` columns.
    fn depth(&self, n: usize) -> usize {
        match self {
            Self::Plain(b) | Self::Transposed(b) => {
                assert!(b.len().is_multiple_of(n), "the right operand has {n} columns");
                b.len() / n
            }
            Self::Packed(b) => {
                assert_eq!(b.n(), n, "the right operand has {n} columns");
                b.k()
            }
        }
    }
}

/// `a b`: `a` is `[m, k]`, `b` `[k, n]`. [`Dtype::Bf16`] rounds both first; sums are f32 either way.
#[derive(Clone, Copy)]
pub(crate) struct PlainProduct<'a> {
    pub(crate) a: Left<'a>,
    pub(crate) b: Right<'a>,
    pub(crate) n: usize,
    pub(crate) dtype: Dtype,
    /// Whether it is added to what the result holds instead of replacing it. Chains then go on from there, so matrices cut
    /// along `k` have the bits of whole ones: anywhere in f32, between runs in bf16.
    pub(crate) onto: bool,
}

impl PlainProduct<'_> {
    /// Computes it into `out` `[m, n]`; threads do not show.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub(crate) fn run(&self, out: &mut [f32]) {
        self.run_in(parallel::task_count(out.len() * self.b.depth(self.n)), out);
    }

    /// [`Self::run`] in about `n_tasks` tasks; one stays on the calling thread.
    pub(crate) fn run_in(&self, n_tasks: usize, out: &mut [f32]) {
        match self.dtype {
            Dtype::F32 => self.run_words::<f32>(n_tasks, out),
            Dtype::Bf16 => self.run_words::<u32>(n_tasks, out),
        }
    }

    fn run_words<W: Word>(&self, n_tasks: usize, out: &mut [f32]) {
        let &Self { a, b, n, onto, .. } = self;
        let (Left::Plain(values) | Left::Transposed(values, _)) = a;
        let (m, k) = (out.len() / n, b.depth(n));
        assert_eq!(out.len(), m * n, "the product has rows of {n}");
        assert_eq!(values.len(), m * k, "operands are [{m}, {k}] and [{k}, {n}]");
        if k == 0 && !onto {
            out.fill(0.0);
        }
        if k == 0 || m == 0 {
            return;
        }
        let whole = [k];
        let runs = if let Left::Transposed(_, runs) = a { runs } else { &whole };
        assert_eq!(runs.iter().sum::<usize>(), k, "every row is of a run");
        assert!(runs.len() == 1 || matches!(b, Right::Plain(_)), "what is read along its rows is one run");
        let depth = W::depth(runs);
        let n_lines = if matches!(b, Right::Packed(_)) { 0 } else { n.div_ceil(COLUMNS) * depth };
        let mut scratch = Scratch::<Line<W>>::take(n_lines);
        for_chunks(&mut scratch, depth, n_tasks, |panel, lines| match b {
            Right::Plain(b) => W::lines((b, n, runs), panel * COLUMNS, lines),
            Right::Transposed(b) => W::panel(panel_rows(b, k, panel), k, lines),
            Right::Packed(_) => unreachable!("it has its lines"),
        });
        let lines = if let Right::Packed(b) = b { W::packed(b) } else { &scratch };
        let (blocked, n_words) = match a {
            Left::Plain(_) => (false, W::rounded_len(values.len(), k)),
            Left::Transposed(..) => (true, m.next_multiple_of(LANES) * depth),
        };
        let mut words = Scratch::<W>::take(n_words);
        let x = if blocked {
            for_chunks(&mut words, LANES * depth, n_tasks, |two, words| {
                let (first, second) = words.split_at_mut(BLOCK_ROWS * depth);
                let blocks = [first, second].map(|words| words.as_chunks_mut().0);
                W::blocks((values, m, runs), two * LANES, blocks);
            });
            &words[..m.next_multiple_of(BLOCK_ROWS) * depth]
        } else {
            W::rows(values, k, &mut words)
        };
        let y = Disjoint::new(out);
        let job = Job { x, blocked, lines, depth, n, bias: None, onto, y, then: &[] };
        job.check(m);
        Grid::new(m, n.div_ceil(COLUMNS), n_tasks).for_each(n_tasks > 1, |tile| W::multiply(&job, tile));
    }
}

/// A matrix `[k, width]` to be read by columns, its width, and its runs of rows.
type Columns<'a> = (&'a [f32], usize, &'a [usize]);

/// What the kernels multiply: an f32, or two bf16 that are neighbours along the depth.
trait Word: Pod + Send + Sync {
    /// Words along `runs`.
    fn depth(runs: &[usize]) -> usize;
    /// Words that [`Self::rows`] needs for `len` elements in rows of `k`.
    fn rounded_len(len: usize, k: usize) -> usize;
    /// Rows of `k` as they are, along the depth.
    fn rows<'a>(values: &'a [f32], k: usize, words: &'a mut [Self]) -> &'a [Self];
    /// The 32 columns from `first` on of `matrix`, zeros beyond its end.
    fn lines(matrix: Columns<'_>, first: usize, lines: &mut [Line<Self>]);
    /// Up to 32 rows `[.., k]` as columns, zeros where there are fewer.
    fn panel(rows: &[f32], k: usize, lines: &mut [Line<Self>]);
    /// All panels of a matrix, none if it is of another dtype.
    fn packed(matrix: &PackedMatrix) -> &[Line<Self>];
    /// The 16 columns from `first` on, in two blocks of eight: a line of memory holds those of both.
    fn blocks(matrix: Columns<'_>, first: usize, blocks: [&mut [[Self; BLOCK_ROWS]]; 2]);
    /// The kernel.
    fn multiply(job: &Job<'_, Self>, tile: &Tile);
}

impl Word for f32 {
    fn depth(runs: &[usize]) -> usize {
        runs.iter().sum()
    }

    fn rounded_len(_: usize, _: usize) -> usize {
        0
    }

    fn rows<'a>(values: &'a [f32], _: usize, _: &'a mut [f32]) -> &'a [f32] {
        values
    }

    fn lines((matrix, width, _): Columns<'_>, first: usize, lines: &mut [Line<f32>]) {
        for (line, row) in lines.iter_mut().zip(matrix.chunks_exact(width)) {
            for (words, first) in line.0.iter_mut().zip((first..).step_by(LANES)) {
                *words = columns(row, first);
            }
        }
    }

    fn panel(rows: &[f32], k: usize, lines: &mut [Line<f32>]) {
        pack::pack_f32(rows, k, lines);
    }

    fn packed(matrix: &PackedMatrix) -> &[Line<f32>] {
        matrix.f32_lines()
    }

    fn blocks((matrix, width, _): Columns<'_>, first: usize, [low, high]: [&mut [[f32; BLOCK_ROWS]]; 2]) {
        for ((low, high), row) in low.iter_mut().zip(high).zip(matrix.chunks_exact(width)) {
            (*low, *high) = halves(columns(row, first));
        }
    }

    fn multiply(job: &Job<'_, f32>, tile: &Tile) {
        run_f32(job, tile);
    }
}

impl Word for u32 {
    fn depth(runs: &[usize]) -> usize {
        runs.iter().map(|rows| rows.div_ceil(2)).sum()
    }

    fn rounded_len(len: usize, k: usize) -> usize {
        len / k * k.div_ceil(2)
    }

    fn rows<'a>(values: &'a [f32], k: usize, words: &'a mut [u32]) -> &'a [u32] {
        round_rows(values, k, words);
        words
    }

    fn lines(matrix: Columns<'_>, first: usize, lines: &mut [Line<u32>]) {
        round_lines(matrix, first, lines);
    }

    fn panel(rows: &[f32], k: usize, lines: &mut [Line<u32>]) {
        pack::pack_bf16(rows, k, lines);
    }

    fn packed(matrix: &PackedMatrix) -> &[Line<u32>] {
        matrix.bf16_lines()
    }

    fn blocks(matrix: Columns<'_>, first: usize, blocks: [&mut [[u32; BLOCK_ROWS]]; 2]) {
        round_blocks(matrix, first, blocks);
    }

    fn multiply(job: &Job<'_, u32>, tile: &Tile) {
        run_bf16(job, tile);
    }
}

/// The first eight words of sixteen, and the others.
#[inline(always)]
fn halves<W: Copy>(words: [W; LANES]) -> ([W; BLOCK_ROWS], [W; BLOCK_ROWS]) {
    let (low, high) = words.split_at(BLOCK_ROWS);
    (*low.first_chunk().expect("half of them"), *high.first_chunk().expect("half of them"))
}

multiversion! {
    fn round_lines(matrix: Columns<'_>, first: usize, lines: &mut [Line<u32>]) = round_lines_body;
}

#[inline(always)]
fn round_lines_body<I: Isa>(matrix: Columns<'_>, first: usize, lines: &mut [Line<u32>]) {
    for_pairs(matrix, lines, |line, rows| {
        for (words, first) in line.0.iter_mut().zip((first..).step_by(LANES)) {
            *words = round_columns(rows, matrix.1, first);
        }
    });
}

multiversion! {
    fn round_blocks(matrix: Columns<'_>, first: usize, blocks: [&mut [[u32; BLOCK_ROWS]]; 2]) = round_blocks_body;
}

#[inline(always)]
fn round_blocks_body<I: Isa>(matrix: Columns<'_>, first: usize, [low, high]: [&mut [[u32; BLOCK_ROWS]]; 2]) {
    for_pairs(matrix, low.iter_mut().zip(high), |(low, high), rows| {
        (*low, *high) = halves(round_columns(rows, matrix.1, first));
    });
}

/// Gives each two rows of a run, which are rounded to pairs, or an odd last one, to `put`, with the next of `out`.
#[inline(always)]
fn for_pairs<O: IntoIterator>((mut matrix, width, runs): Columns<'_>, out: O, put: impl Fn(O::Item, &[f32])) {
    let mut out = out.into_iter();
    for rows in runs {
        let (run, rest) = matrix.split_at(rows * width);
        matrix = rest;
        for (rows, out) in run.chunks(2 * width).zip(out.by_ref()) {
            put(out, rows);
        }
    }
}

/// The 16 columns from `first` on of two rows, or of a last one paired with zeros, rounded.
#[inline(always)]
fn round_columns(rows: &[f32], width: usize, first: usize) -> [u32; LANES] {
    let (low, high) = rows.split_at(width);
    let (low, high) = (columns(low, first), columns(high, first));
    let mut words = [0; LANES];
    for (word, (low, high)) in words.iter_mut().zip(low.into_iter().zip(high)) {
        *word = pair(low, high);
    }
    words
}

/// The 16 elements of `row` from `first` on, zeros beyond its end.
#[inline(always)]
fn columns(row: &[f32], first: usize) -> [f32; LANES] {
    let Some(row) = row.get(first..) else { return [0.0; LANES] };
    if let Some(whole) = row.first_chunk() {
        return *whole;
    }
    let mut columns = [0.0; LANES];
    columns[..row.len()].copy_from_slice(row);
    columns
}

/// Calls `body(index, chunk)` on every whole chunk, over the threads if there are several tasks.
fn for_chunks<T: Send>(
    values: &mut [T],
    chunk_len: usize,
    n_tasks: usize,
    body: impl Fn(usize, &mut [T]) + Sync + Send,
) {
    let (n_chunks, parts) = (values.len() / chunk_len, Disjoint::new(values));
    parallel::spread(n_chunks, n_tasks > 1, |index| {
        // SAFETY: chunks do not overlap, and each is visited once.
        body(index, unsafe { parts.part(index * chunk_len..(index + 1) * chunk_len) });
    });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{Strategy, prop_assert, prop_assert_eq, prop_oneof, proptest};

    use super::*;
    use crate::isa;
    use crate::testing::{bits, in_pool, noise};

    fn product(a: Left<'_>, b: &[f32], n: usize, dtype: Dtype, out: &mut [f32]) {
        PlainProduct { a, b: Right::Plain(b), n, dtype, onto: false }.run(out);
    }

    #[test]
    fn transposes_and_empty_sums_multiply_as_on_paper() {
        let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, -1.0, 0.5, 2.0]);
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let mut out = [f32::NAN; 6];
            product(Left::Transposed(&a, &[2]), &b, 2, dtype, &mut out);
            assert_eq!(out, [3.0, 7.0, 4.5, 8.0, 6.0, 9.0]);
            product(Left::Plain(&a), &b, 2, dtype, &mut out);
            assert_eq!(out, [2.0, 3.0, 5.0, 5.0, 8.0, 7.0]);
            PlainProduct { a: Left::Plain(&a), b: Right::Plain(&b), n: 2, dtype, onto: true }.run(&mut out);
            assert_eq!(out, [4.0, 6.0, 10.0, 10.0, 16.0, 14.0]);
            PlainProduct { a: Left::Plain(&a), b: Right::Transposed(&b), n: 2, dtype, onto: false }
                .run(&mut out);
            assert_eq!(out, [-1.0, 4.5, -1.0, 9.5, -1.0, 14.5]);
            out = [4.0, 6.0, 10.0, 10.0, 16.0, 14.0];
            PlainProduct { a: Left::Plain(&[]), b: Right::Plain(&[]), n: 2, dtype, onto: true }.run(&mut out);
            assert_eq!(out, [4.0, 6.0, 10.0, 10.0, 16.0, 14.0]);
            product(Left::Transposed(&[], &[]), &[], 2, dtype, &mut out);
            assert_eq!(out, [0.0; 6]);
        }
    }

    /// Rows, depth and columns; the last are deep enough to be cut.
    fn shape() -> impl Strategy<Value = (usize, usize, usize)> {
        prop_oneof![
            4 => (0_usize..20, 0_usize..60, 1_usize..150),
            1 => (1_usize..6, 1000_usize..3000, 1_usize..90),
            1 => (100_usize..150, 60_usize..80, 100_usize..150),
        ]
    }

    fn transpose(a: &[f32], m: usize, k: usize) -> Vec<f32> {
        (0..k * m).map(|i| a[i % m * k + i / m]).collect()
    }

    proptest! {
        #[test]
        fn a_product_is_one_chain_over_k((m, k, n) in shape(), onto: bool) {
            let (a, b, first) = (noise(m * k, 1), noise(k * n, 2), noise(m * n, 3));
            let transposed = transpose(&a, m, k);
            let fused = isa::level() != isa::Level::Baseline || isa::BASELINE_FMA;
            let chain = |row: usize, column: usize| {
                let first = if onto { first[row * n + column] } else { 0.0 };
                (0..k).fold(first, |sum, i| {
                    let (a, b) = (a[row * k + i], b[i * n + column]);
                    if fused { a.mul_add(b, sum) } else { sum + a * b }
                })
            };
            let expected: Vec<f32> = (0..m * n).map(|i| chain(i / n, i % n)).collect();
            let columns = transpose(&b, k, n);
            let packed = (k > 0).then(|| PackedMatrix::pack(&columns, n, k, Dtype::F32));
            let packed = packed.as_ref().map_or(Right::Plain(&b), Right::Packed);
            for (threads, a, b) in [
                (1, Left::Plain(&a), Right::Plain(&b)),
                (2, Left::Plain(&a), Right::Plain(&b)),
                (2, Left::Transposed(&transposed, &[k]), Right::Plain(&b)),
                (1, Left::Plain(&a), Right::Transposed(&columns)),
                (2, Left::Plain(&a), Right::Transposed(&columns)),
                (2, Left::Transposed(&transposed, &[k]), Right::Transposed(&columns)),
                (2, Left::Plain(&a), packed),
            ] {
                let mut out = if onto { first.clone() } else { vec![f32::NAN; m * n] };
                let product = PlainProduct { a, b, n, dtype: Dtype::F32, onto };
                in_pool(threads, || product.run(&mut out));
                prop_assert_eq!(bits(&out), bits(&expected));
            }
        }

        #[test]
        fn a_bf16_product_rounds_its_operands_and_nothing_else((m, k, n) in shape(), threads in 1_usize..3) {
            let round = |values: Vec<f32>| -> Vec<f32> {
                values.into_iter().map(|x| half::bf16::from_f32(x).to_f32()).collect()
            };
            let (a, b) = (noise(m * k, 1), noise(k * n, 2));
            let (transposed, columns) = (transpose(&a, m, k), transpose(&b, k, n));
            let (mut plain, mut out) = (vec![f32::NAN; m * n], vec![f32::NAN; m * n]);
            in_pool(threads, || {
                product(Left::Plain(&a), &b, n, Dtype::Bf16, &mut plain);
                product(Left::Transposed(&transposed, &[k]), &b, n, Dtype::Bf16, &mut out);
            });
            prop_assert_eq!(bits(&out), bits(&plain));
            let of_rows = PlainProduct {
                a: Left::Plain(&a), b: Right::Transposed(&columns), n, dtype: Dtype::Bf16, onto: false,
            };
            in_pool(threads, || of_rows.run(&mut out));
            prop_assert_eq!(bits(&out), bits(&plain));
            product(Left::Plain(&round(a)), &round(b), n, Dtype::F32, &mut out);
            for (plain, exact) in plain.iter().zip(out) {
                // Sums of products of numbers below 1.
                prop_assert!((plain - exact).abs() <= 1e-6 * (k as f32 + 1.0), "{plain}, not {exact}");
            }
        }
    }
}
