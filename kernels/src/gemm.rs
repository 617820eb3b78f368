//! Matrix products against weights that were packed once: `y = x Wᵀ (+ bias)`, in f32 or bf16.
//!
//! A weight matrix `[N, K]` is stored as panels of 32 output columns: f32 as `[N/32][K][32]`, bf16 as
//! `[N/32][K/2][32][2]`, twice the layout of the `vdpbf16ps` instruction. Lanes are therefore output columns, and every
//! element of `y` is one chain of multiply-adds over `k = 0..K`. Tiles, tails, threads and the number of rows
//! decide only *when* a chain runs, never its order: the same row gives the same bits in any batch.
//!
//! bf16 rounds weights and activations (to nearest, ties to even) and accumulates in f32. Machines with AVX512-BF16
//! multiply pairs in one instruction; others widen to f32. The two may differ in the last bits, calls never do.

use std::fmt;
use std::ops::Range;

use crate::cast::round_rows;
use crate::parallel::{self, Disjoint};
use crate::scratch::Scratch;

pub(crate) mod gradient;
mod kernel;
pub mod linear;
mod pack;

use kernel::{COLUMNS, Job, Line, Tile};

/// How a matrix is stored and multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// 32-bit floats.
    F32,
    /// bfloat16 operands, f32 sums.
    Bf16,
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        })
    }
}

/// A weight matrix `W` `[N, K]`, packed for `y = x Wᵀ`.
#[derive(Clone, Debug)]
pub struct PackedMatrix {
    n: usize,
    k: usize,
    panels: Panels,
}

/// `[N/32][depth]` lines; rows beyond `N` and the odd half of a last pair are zero.
#[derive(Clone, Debug)]
enum Panels {
    /// Depth `K`.
    F32(Vec<Line<f32>>),
    /// Depth `K/2`: a word is two bf16, the lower `k` in the low half.
    Bf16(Vec<Line<u32>>),
}

impl PackedMatrix {
    /// Multiply-adds that packing an element takes, about.
    pub(crate) const PACK_WORK: usize = 4;

    /// Packs `w`, row-major `[n, k]`.
    ///
    /// # Panics
    /// If `w` is not `[n, k]`, or `n` or `k` is 0.
    #[must_use]
    pub fn pack(w: &[f32], n: usize, k: usize, dtype: Dtype) -> Self {
        assert!(n > 0 && k > 0, "a packed matrix has at least one row and column, not [{n}, {k}]");
        let n_panels = n.div_ceil(COLUMNS);
        // Memory that nobody has touched, where it is large: the thread that packs a panel is the first.
        let panels = match dtype {
            Dtype::F32 => Panels::F32(bytemuck::zeroed_vec(n_panels * k)),
            Dtype::Bf16 => Panels::Bf16(bytemuck::zeroed_vec(n_panels * k.div_ceil(2))),
        };
        let mut packed = Self { n, k, panels };
        packed.repack(w);
        packed
    }

    /// Replaces the matrix by `w`, `[N, K]` with any `N`; allocates only if that is larger than it ever was.
    ///
    /// # Panics
    /// If `w` has no rows, or they are not of `K`.
    pub fn repack(&mut self, w: &[f32]) {
        let k = self.k;
        assert!(
            !w.is_empty() && w.len().is_multiple_of(k),
            "a packed matrix has at least one row, of {k} columns"
        );
        self.n = w.len() / k;
        let n_panels = self.n.div_ceil(COLUMNS);
        match &mut self.panels {
            Panels::F32(lines) => {
                lines.resize(n_panels * k, Line::default());
                parallel::for_rows(lines, k, COLUMNS * k * Self::PACK_WORK, |first, lines| {
                    for (i, panel) in lines.chunks_exact_mut(k).enumerate() {
                        pack::pack_f32(panel_rows(w, k, first + i), k, panel);
                    }
                })
            }
            Panels::Bf16(lines) => {
                lines.resize(n_panels * k.div_ceil(2), Line::default());
                parallel::for_rows(lines, k.div_ceil(2), COLUMNS * k * Self::PACK_WORK, |first, lines| {
                    for (i, panel) in lines.chunks_exact_mut(k.div_ceil(2)).enumerate() {
                        pack::pack_bf16(panel_rows(w, k, first + i), k, panel);
                    }
                })
            }
        }
    }

    /// Reads row `row` of `W` back into `out` `[K]`, exactly as stored.
    ///
    /// # Panics
    /// If `row` is out of range or `out` is not `[K]`.
    pub fn unpack_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.n, "row {row} of {}", self.n);
        assert_eq!(out.len(), self.k, "a row has {} elements", self.k);
        let (panel, column) = (row / COLUMNS, row % COLUMNS);
        match &self.panels {
            Panels::F32(lines) => {
                for (out, line) in out.iter_mut().zip(&lines[panel * self.k..]) {
                    *out = line.0.as_flattened()[column];
                }
            }
            Panels::Bf16(lines) => {
                pack::unpack_bf16(&lines[panel * self.k.div_ceil(2)..][..self.k.div_ceil(2)], column, out);
            }
        }
    }

    /// [`Self::unpack_row`] of row `row(t)` into each row `t` of `out` `[T, K]`.
    ///
    /// # Panics
    /// As [`Self::unpack_row`].
    pub fn unpack_rows(&self, row: impl Fn(usize) -> usize + Send + Sync, out: &mut [f32]) {
        // An element lies on a line of its own.
        const WORK: usize = 64;
        parallel::for_rows(out, self.k, WORK * self.k, |first, out| {
            for (t, out) in (first..).zip(out.chunks_exact_mut(self.k)) {
                self.unpack_row(row(t), out);
            }
        });
    }

    /// Rows of `W`: columns of the product.
    #[must_use]
    pub fn n(&self) -> usize {
        self.n
    }

    /// Columns of `W`: columns of `x`.
    #[must_use]
    pub fn k(&self) -> usize {
        self.k
    }

    /// How it is stored.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        match self.panels {
            Panels::F32(_) => Dtype::F32,
            Panels::Bf16(_) => Dtype::Bf16,
        }
    }

    fn f32_lines(&self) -> &[Line<f32>] {
        match &self.panels {
            Panels::F32(lines) => lines,
            Panels::Bf16(_) => &[],
        }
    }

    fn bf16_lines(&self) -> &[Line<u32>] {
        match &self.panels {
            Panels::F32(_) => &[],
            Panels::Bf16(lines) => lines,
        }
    }

    /// Memory held, with padding.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.panels {
            Panels::F32(lines) => size_of_val(lines.as_slice()),
            Panels::Bf16(lines) => size_of_val(lines.as_slice()),
        }
    }
}

/// `y = x Wᵀ + bias`: `x` `[T, K]`, `bias` `[N]`, `y` `[T, N]`, overwritten whole.
///
/// With bf16 weights `x` is rounded to bf16 first; sums are f32 either way. Batch-invariant: row `t` of `y`
/// depends on row `t` of `x` alone, to the bit.
///
/// # Panics
/// If the shapes do not fit.
pub fn matmul(x: &[f32], w: &PackedMatrix, bias: Option<&[f32]>, y: &mut [f32]) {
    matmul_all(x, [(w, bias)], [y]);
}

/// [`matmul`] of the same `x` by several matrices of one dtype, `x` rounded once and the products side by side.
///
/// # Panics
/// As [`matmul`], or if the dtypes differ.
pub fn matmul_all<const N: usize>(
    x: &[f32],
    weights: [(&PackedMatrix, Option<&[f32]>); N],
    y: [&mut [f32]; N],
) {
    let (k, dtype) = (weights[0].0.k, weights[0].0.dtype());
    assert!(x.len().is_multiple_of(k), "rows of x have {k} elements");
    let mut rounded = None;
    let rows = rows_in(dtype, x, k, &mut rounded);
    let n_tasks = parallel::task_count(y.iter().map(|y| y.len() * k).sum());
    let mut y = y.into_iter();
    let products = weights.map(|(w, bias)| {
        let y = y.next().expect("one result for each matrix");
        Product { x: rows, w, bias, then: None }.cut(n_tasks.div_ceil(N), y)
    });
    parallel::spread(products.iter().map(Tiles::len).sum(), n_tasks > 1, |mut index| {
        for tiles in &products {
            if index < tiles.len() {
                return tiles.run(index);
            }
            index -= tiles.len();
        }
    });
}

/// Rows of activations, as the kernels of a dtype read them.
#[derive(Clone, Copy)]
pub(crate) enum Rows<'a> {
    /// `[T, K]`.
    F32(&'a [f32]),
    /// `[T, K/2]` pairs, made by [`round_rows`].
    Bf16(&'a [u32]),
}

impl<'a> Rows<'a> {
    /// The rows `rows` of `k` elements.
    pub(crate) fn narrow(self, rows: Range<usize>, k: usize) -> Self {
        match self {
            Self::F32(x) => Self::F32(&x[rows.start * k..rows.end * k]),
            Self::Bf16(x) => Self::Bf16(&x[rows.start * k.div_ceil(2)..rows.end * k.div_ceil(2)]),
        }
    }
}

/// `x` `[T, k]` in `dtype`; what has to be rounded for it lies in `rounded`.
pub(crate) fn rows_in<'a>(
    dtype: Dtype,
    x: &'a [f32],
    k: usize,
    rounded: &'a mut Option<Scratch<u32>>,
) -> Rows<'a> {
    match dtype {
        Dtype::F32 => Rows::F32(x),
        Dtype::Bf16 => {
            let rounded = rounded.insert(Scratch::take(x.len() / k * k.div_ceil(2)));
            round_rows(x, k, rounded);
            Rows::Bf16(rounded)
        }
    }
}

/// A product whose activations are in the matrix's dtype.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    /// `[T, K]`.
    pub(crate) x: Rows<'a>,
    /// `[N, K]`.
    pub(crate) w: &'a PackedMatrix,
    /// `[N]`.
    pub(crate) bias: Option<&'a [f32]>,
    /// What the same thread multiplies by next, if that is known: it is fetched towards the end of this product.
    pub(crate) then: Option<&'a PackedMatrix>,
}

impl<'a> Product<'a> {
    /// Computes `y` in about `n_tasks` tasks.
    ///
    /// # Panics
    /// If shapes or dtypes do not fit.
    pub(crate) fn run(self, n_tasks: usize, y: &mut [f32]) {
        let tiles = self.cut(n_tasks, y);
        parallel::spread(tiles.len(), n_tasks > 1, |index| tiles.run(index));
    }

    fn cut(self, n_tasks: usize, y: &'a mut [f32]) -> Tiles<'a> {
        let Self { x, w, bias, then } = self;
        let n = w.n;
        assert!(bias.is_none_or(|bias| bias.len() == n), "a bias has {n} elements");
        assert!(y.len().is_multiple_of(n), "rows of the product have {n} elements");
        let n_rows = y.len() / n;
        let grid = Grid::new(n_rows, n.div_ceil(COLUMNS), n_tasks);
        let y = Disjoint::new(y);
        let job = match (x, &w.panels) {
            (Rows::F32(x), Panels::F32(lines)) => {
                let then = then.map_or(&[][..], PackedMatrix::f32_lines);
                Jobs::F32(Job { x, blocked: false, lines, depth: w.k, n, bias, onto: false, y, then })
            }
            (Rows::Bf16(x), Panels::Bf16(lines)) => {
                let then = then.map_or(&[][..], PackedMatrix::bf16_lines);
                Jobs::Bf16(Job {
                    x,
                    blocked: false,
                    lines,
                    depth: w.k.div_ceil(2),
                    n,
                    bias,
                    onto: false,
                    y,
                    then,
                })
            }
            _ => panic!("activations must be in the dtype of the weights"),
        };
        match &job {
            Jobs::F32(job) => job.check(n_rows),
            Jobs::Bf16(job) => job.check(n_rows),
        }
        Tiles { grid, job }
    }
}

/// A product cut into tiles.
struct Tiles<'a> {
    grid: Grid,
    job: Jobs<'a>,
}

enum Jobs<'a> {
    F32(Job<'a, f32>),
    Bf16(Job<'a, u32>),
}

impl Tiles<'_> {
    fn len(&self) -> usize {
        self.grid.len()
    }

    fn run(&self, index: usize) {
        let tile = self.grid.tile(index);
        match &self.job {
            Jobs::F32(job) => kernel::run_f32(job, &tile),
            Jobs::Bf16(job) => kernel::run_bf16(job, &tile),
        }
    }
}

/// The columns `columns` of a [`Product`], `y` `[T, columns.len()]`, on the calling thread.
///
/// # Panics
/// If shapes or dtypes do not fit, or `columns` does not start at a multiple of 32.
pub(crate) fn multiply_columns(x: Rows<'_>, w: &PackedMatrix, columns: Range<usize>, y: &mut [f32]) {
    let n = columns.len();
    assert!(columns.start.is_multiple_of(COLUMNS) && columns.end <= w.n, "columns {columns:?} of {}", w.n);
    let panels = columns.start / COLUMNS..columns.end.div_ceil(COLUMNS);
    let tile = Tile { rows: 0..y.len() / n, panels: 0..panels.len() };
    let y = Disjoint::new(y);
    match (x, &w.panels) {
        (Rows::F32(x), Panels::F32(lines)) => {
            let lines = &lines[panels.start * w.k..panels.end * w.k];
            let job = Job { x, blocked: false, lines, depth: w.k, n, bias: None, onto: false, y, then: &[] };
            job.check(tile.rows.len());
            kernel::run_f32(&job, &tile);
        }
        (Rows::Bf16(x), Panels::Bf16(lines)) => {
            let depth = w.k.div_ceil(2);
            let lines = &lines[panels.start * depth..panels.end * depth];
            let job = Job { x, blocked: false, lines, depth, n, bias: None, onto: false, y, then: &[] };
            job.check(tile.rows.len());
            kernel::run_bf16(&job, &tile);
        }
        _ => panic!("activations must be in the dtype of the weights"),
    }
}

/// The 32 rows of `w` that make panel `panel`; fewer at the end.
fn panel_rows(w: &[f32], k: usize, panel: usize) -> &[f32] {
    let from = panel * COLUMNS * k;
    &w[from..w.len().min(from + COLUMNS * k)]
}

/// A product `[rows, panels]` cut into tiles, one per task.
struct Grid {
    n_rows: usize,
    n_panels: usize,
    tile_rows: usize,
    /// Runs of panels, as even as the panels that are taken at once allow.
    n_columns: usize,
    /// Panels that begin and end together.
    strip: usize,
}

impl Grid {
    /// Rows a task works on at most: they stay in the second-level cache next to the panels they meet.
    const MAX_ROWS: usize = 128;

    /// Cuts into about `n_tasks` tiles: along columns first, which reads every weight once, then along rows. Runs of
    /// rows are whole blocks.
    fn new(n_rows: usize, n_panels: usize, n_tasks: usize) -> Self {
        let row_runs = n_rows.div_ceil(Self::MAX_ROWS).max(1);
        let strip = kernel::strip_panels(n_rows);
        let n_columns = n_tasks.div_ceil(row_runs).min(n_panels.div_ceil(strip)).max(1);
        let row_runs = n_tasks.div_ceil(n_columns).max(row_runs);
        let tile_rows = n_rows.div_ceil(row_runs).next_multiple_of(kernel::BLOCK_ROWS);
        Self { n_rows, n_panels, tile_rows, n_columns, strip }
    }

    fn len(&self) -> usize {
        self.n_rows.div_ceil(self.tile_rows.max(1)) * self.n_columns
    }

    fn for_each(&self, in_parallel: bool, body: impl Fn(&Tile) + Sync + Send) {
        parallel::spread(self.len(), in_parallel, |index| body(&self.tile(index)));
    }

    fn tile(&self, index: usize) -> Tile {
        let (row, column) = (index / self.n_columns * self.tile_rows, index % self.n_columns);
        Tile {
            rows: row..self.n_rows.min(row + self.tile_rows),
            panels: self.first_panel(column)..self.first_panel(column + 1),
        }
    }

    /// Where column `column` begins; the last ends with the product.
    fn first_panel(&self, column: usize) -> usize {
        let strips = self.n_panels.div_ceil(self.strip);
        self.n_panels.min(strips * column / self.n_columns * self.strip)
    }
}

#[cfg(test)]
mod tests;
