//! The experts of a mixture-of-experts layer: each token through the `K` experts its router chose.
//!
//! Tokens are sorted by expert, each expert runs two packed products over its rows, and every token adds up its
//! `K` results *in router order*, weighted by its gates. A token's result depends on that token alone, to the bit.

use crate::gemm::{Dtype, PackedMatrix, Product, Rows, rows_in};
use crate::parallel::{self, Disjoint};
use crate::router::Choice;
use crate::swiglu::{rounded_silu_mul_rows, silu_mul_rows};
use crate::team;

mod dispatch;
pub mod trained;

use dispatch::{Dispatch, Segment};

/// Shape of a layer's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertDims {
    /// Experts, `E`.
    pub n_experts: usize,
    /// Width of the model, `D`.
    pub width: usize,
    /// Width inside an expert, `I`.
    pub inter: usize,
}

/// The weights of a layer's experts, packed.
#[derive(Clone, Debug)]
pub struct Experts {
    dims: ExpertDims,
    /// `E` times `[2 I, D]`.
    gate_up: Vec<PackedMatrix>,
    /// `E` times `[D, I]`.
    down: Vec<PackedMatrix>,
}

impl Experts {
    /// Packs `gate_up` `[E, 2 I, D]` (an expert's gate rows, then its up rows) and `down` `[E, D, I]`.
    ///
    /// # Panics
    /// If a shape does not fit `dims`, or a dimension is 0.
    #[must_use]
    pub fn pack(gate_up: &[f32], down: &[f32], dims: ExpertDims, dtype: Dtype) -> Self {
        let ExpertDims { n_experts, width, inter } = dims;
        assert!(n_experts > 0 && width > 0 && inter > 0, "experts have no dimension of 0: {dims:?}");
        assert_eq!(gate_up.len(), n_experts * 2 * inter * width, "gate_up is [E, 2 I, D]");
        assert_eq!(down.len(), n_experts * width * inter, "down is [E, D, I]");
        let pack = |w, n, k| pack(w, (n_experts, n, k), dtype);
        Self { dims, gate_up: pack(gate_up, 2 * inter, width), down: pack(down, width, inter) }
    }

    /// Gate and up weights of `expert`, `[2 I, D]`.
    #[must_use]
    pub fn gate_up(&self, expert: usize) -> &PackedMatrix {
        &self.gate_up[expert]
    }

    /// Down weights of `expert`, `[D, I]`.
    #[must_use]
    pub fn down(&self, expert: usize) -> &PackedMatrix {
        &self.down[expert]
    }

    /// Shape.
    #[must_use]
    pub fn dims(&self) -> ExpertDims {
        self.dims
    }

    /// How the weights are stored.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.gate_up[0].dtype()
    }

    /// Memory held, with padding.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.gate_up.iter().chain(&self.down).map(PackedMatrix::bytes).sum()
    }
}

/// Packs `w` `[count, n, k]` as `count` matrices. One alone may not be worth another thread: they go side by side if there is
/// one for every thread.
fn pack(w: &[f32], (count, n, k): (usize, usize, usize), dtype: Dtype) -> Vec<PackedMatrix> {
    let mut packed: Vec<Option<PackedMatrix>> = vec![None; count];
    let pack = |first: usize, packed: &mut [Option<PackedMatrix>]| {
        for (packed, w) in packed.iter_mut().zip(w[first * n * k..].chunks_exact(n * k)) {
            *packed = Some(PackedMatrix::pack(w, n, k, dtype));
        }
    };
    if count < team::n_threads() {
        pack(0, &mut packed);
    } else {
        // Their memory, too, is got and touched on all threads.
        parallel::for_rows(&mut packed, 1, PackedMatrix::PACK_WORK * n * k, pack);
    }
    packed.into_iter().flatten().collect()
}

/// Where tokens go and how much each expert's answer counts.
#[derive(Clone, Copy, Debug)]
pub struct Routed<'a> {
    /// The experts of each token, in router order.
    pub choice: &'a Choice,
    /// Their weights, `[T, K]`.
    pub gates: &'a [f32],
}

/// Buffers of [`forward`]: they grow to the largest batch seen, and are reused.
#[derive(Debug, Default)]
pub struct ExpertScratch {
    dispatch: Dispatch,
    /// One per thread.
    workers: Vec<Worker>,
    /// `[T K, D]`: answers, sorted by expert.
    out: Vec<f32>,
}

/// `y[t] = sum over k of gates[t, k] * expert(choice[t, k], x[t])`, added in router order `k = 0..K`.
///
/// `x` and `y` are `[T, D]`; `expert(e, x) = down_e (silu(gate_e x) * (up_e x))`. With bf16 weights each product
/// rounds its activations; everything else is f32.
///
/// # Panics
/// If the shapes do not fit.
pub fn forward(x: &[f32], routed: Routed<'_>, experts: &Experts, scratch: &mut ExpertScratch, y: &mut [f32]) {
    let Routed { choice, gates } = routed;
    let ExpertDims { n_experts, width, inter } = experts.dims;
    let n_pairs = choice.ids().len();
    assert_eq!(x.len(), choice.n_tokens() * width, "x is [T, D]");
    assert_eq!(y.len(), x.len(), "y is [T, D]");
    assert_eq!(gates.len(), n_pairs, "gates are [T, K]");
    if n_pairs == 0 {
        return;
    }
    assert_eq!(choice.n_experts(), n_experts, "the choice is among these experts");

    scratch.fit(choice, experts);
    let ExpertScratch { dispatch, workers, out } = scratch;
    let mut rounded = None;
    let x = rows_in(experts.dtype(), x, width, &mut rounded);
    let segments = dispatch.segments();
    // Either segments run side by side, each on one thread, or, if they are too few for that, one after the other
    // with their products spread over the threads.
    let is_worth_it = parallel::task_count(n_pairs * 3 * inter * width) > 1;
    let side_by_side = is_worth_it && segments.len() >= team::n_threads();
    // Threads take turns, more or less: the segment after the next ones is this thread's.
    let stride = if side_by_side { team::n_threads() } else { 1 };
    let (parts, workers) = (Disjoint::new(&mut out[..n_pairs * width]), Disjoint::new(workers));
    parallel::spread(segments.len(), side_by_side, |i| {
        let (segment, member) = (&segments[i], team::member());
        // SAFETY: segments share no row, and each is visited once.
        let out = unsafe { parts.part(segment.rows.start * width..segment.rows.end * width) };
        // SAFETY: no two threads are the same member, and a member runs one segment at a time.
        let worker = &mut unsafe { workers.part(member..member + 1) }[0];
        let next = segments.get(i + stride).map(|segment| segment.expert);
        worker.gather(x, dispatch, segment, width);
        worker.run(experts, (segment.expert, next), side_by_side, out);
    });
    dispatch.combine(&out[..n_pairs * width], Some(gates), width, y);
}

/// What one thread needs for one segment.
#[derive(Debug, Default)]
struct Worker {
    /// Operands of a product of f32 experts: `[rows, D]`, then `[rows, I]`.
    rows: Vec<f32>,
    /// The same of bf16 experts, in pairs.
    rounded: Vec<u32>,
    /// `[rows, 2 I]`.
    hidden: Vec<f32>,
}

impl ExpertScratch {
    /// Sorts `choice` and makes room for it.
    fn fit(&mut self, choice: &Choice, experts: &Experts) {
        let ExpertDims { width, inter, .. } = experts.dims;
        self.dispatch.fill(choice);
        grow(&mut self.out, choice.ids().len() * width);
        self.workers.resize_with(rayon::current_num_threads().max(self.workers.len()), Worker::default);
        let n_rows = choice.n_tokens().min(Dispatch::MAX_ROWS);
        let operand = width.max(inter);
        let (rows, rounded) = match experts.dtype() {
            Dtype::F32 => (n_rows * operand, 0),
            Dtype::Bf16 => (0, n_rows * operand.div_ceil(2)),
        };
        for worker in &mut self.workers {
            grow(&mut worker.rows, rows);
            grow(&mut worker.rounded, rounded);
            grow(&mut worker.hidden, n_rows * 2 * inter);
        }
    }
}

fn grow<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
}

impl Worker {
    /// Copies the segment's tokens out of `x`, `[T, D]`.
    fn gather(&mut self, x: Rows<'_>, dispatch: &Dispatch, segment: &Segment, width: usize) {
        let n_rows = segment.rows.len();
        match x {
            Rows::F32(x) => dispatch.gather(x, width, segment.rows.clone(), &mut self.rows[..n_rows * width]),
            Rows::Bf16(x) => {
                let depth = width.div_ceil(2);
                dispatch.gather(x, depth, segment.rows.clone(), &mut self.rounded[..n_rows * depth]);
            }
        }
    }

    /// Runs `expert` over the gathered tokens; the answers go to `out` `[rows, D]`. With `inline` nothing leaves this
    /// thread. The weights of expert `next` are fetched towards the end.
    fn run(
        &mut self,
        experts: &Experts,
        (expert, next): (usize, Option<usize>),
        inline: bool,
        out: &mut [f32],
    ) {
        let ExpertDims { width, inter, .. } = experts.dims;
        let n_rows = out.len() / width;
        let n_tasks =
            |work: usize| if inline { 1 } else { parallel::task_count(n_rows * inter * width * work) };
        let (gate_up, down) = (experts.gate_up(expert), experts.down(expert));
        let hidden = &mut self.hidden[..n_rows * 2 * inter];
        let is_f32 = experts.dtype() == Dtype::F32;
        let x = if is_f32 {
            Rows::F32(&self.rows[..n_rows * width])
        } else {
            Rows::Bf16(&self.rounded[..n_rows * width.div_ceil(2)])
        };
        Product { x, w: gate_up, bias: None, then: Some(down) }.run(n_tasks(2), hidden);
        let x = if is_f32 {
            let act = &mut self.rows[..n_rows * inter];
            silu_mul_rows(hidden, inter, act);
            Rows::F32(act)
        } else {
            let act = &mut self.rounded[..n_rows * inter.div_ceil(2)];
            rounded_silu_mul_rows(hidden, inter, act);
            Rows::Bf16(act)
        };
        let then = next.map(|next| experts.gate_up(next));
        Product { x, w: down, bias: None, then }.run(n_tasks(1), out);
    }
}

#[cfg(test)]
mod tests;
