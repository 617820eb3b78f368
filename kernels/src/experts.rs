//! The experts of a mixture-of-experts layer: each token through the `K` experts its router chose.
//!
//! Tokens are sorted by expert, each expert runs two packed products over its rows, and every token adds up its
//! `K` results *in router order*, weighted by its gates. A token's result depends on that token alone, to the bit.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use crate::gemm::{Dtype, PackedMatrix, Rows, multiply, round_rows};
use crate::parallel::{self, Disjoint};
use crate::router::Choice;
use crate::swiglu::silu_mul_rows;

mod dispatch;
mod grouped;
mod op;

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
        assert_eq!(gate_up.len(), n_experts * 2 * inter * width, "gate_up is [E, 2 I, D]");
        assert_eq!(down.len(), n_experts * width * inter, "down is [E, D, I]");
        let pack =
            |w: &[f32], n, k| w.chunks_exact(n * k).map(|w| PackedMatrix::pack(w, n, k, dtype)).collect();
        Self { dims, gate_up: pack(gate_up, 2 * inter, width), down: pack(down, width, inter) }
    }

    /// Replaces all gate and up weights by `gate_up` `[E, 2 I, D]`, without allocating.
    ///
    /// # Panics
    /// If the shape does not fit.
    pub fn repack_gate_up(&mut self, gate_up: &[f32]) {
        repack(&mut self.gate_up, gate_up);
    }

    /// Replaces all down weights by `down` `[E, D, I]`, without allocating.
    ///
    /// # Panics
    /// If the shape does not fit.
    pub fn repack_down(&mut self, down: &[f32]) {
        repack(&mut self.down, down);
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

fn repack(matrices: &mut [PackedMatrix], w: &[f32]) {
    let len = matrices[0].n() * matrices[0].k();
    assert_eq!(w.len(), matrices.len() * len, "weights must keep their shape");
    for (matrix, w) in matrices.iter_mut().zip(w.chunks_exact(len)) {
        matrix.repack(w);
    }
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
    /// `[T K, D]`: tokens sorted by expert, for f32 experts.
    x: Vec<f32>,
    /// `[T K, D/2]`: the same rounded, for bf16 experts.
    x_rounded: Vec<u32>,
    /// `[T K, 2 I]`.
    gate_up: Vec<f32>,
    /// `[T K, I]`.
    act: Vec<f32>,
    /// `[T K, I/2]`.
    act_rounded: Vec<u32>,
    /// `[T K, D]`.
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

    scratch.dispatch.fill(choice);
    let is_bf16 = experts.dtype() == Dtype::Bf16;
    let (f32_pairs, bf16_pairs) = if is_bf16 { (0, n_pairs) } else { (n_pairs, 0) };
    let buffers = Buffers {
        x: grown(&mut scratch.x, f32_pairs * width),
        x_rounded: grown(&mut scratch.x_rounded, bf16_pairs * width.div_ceil(2)),
        gate_up: grown(&mut scratch.gate_up, n_pairs * 2 * inter),
        act: grown(&mut scratch.act, n_pairs * inter),
        act_rounded: grown(&mut scratch.act_rounded, bf16_pairs * inter.div_ceil(2)),
        out: grown(&mut scratch.out, n_pairs * width),
    };
    let dispatch = &scratch.dispatch;
    let segments = dispatch.segments();
    parallel::for_each(segments.len(), n_pairs * 3 * inter * width, |i| {
        buffers.run(&segments[i], x, dispatch, experts);
    });
    dispatch.combine(&scratch.out[..n_pairs * width], Some(gates), width, y);
}

/// The first `len` elements of `buffer`, which grows if it must, to be shared by tasks.
fn grown<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) -> Disjoint<'_, T> {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    Disjoint::new(&mut buffer[..len])
}

/// The scratch as tasks share it: a segment touches its own rows of each buffer.
struct Buffers<'a> {
    x: Disjoint<'a, f32>,
    x_rounded: Disjoint<'a, u32>,
    gate_up: Disjoint<'a, f32>,
    act: Disjoint<'a, f32>,
    act_rounded: Disjoint<'a, u32>,
    out: Disjoint<'a, f32>,
}

impl Buffers<'_> {
    /// Runs one expert over the tokens of `segment`, leaving its answers in `out`.
    fn run(&self, segment: &Segment, x: &[f32], dispatch: &Dispatch, experts: &Experts) {
        let ExpertDims { width, inter, .. } = experts.dims;
        let span = |width: usize| segment.rows.start * width..segment.rows.end * width;
        let (gate_up_w, down_w) = (experts.gate_up(segment.expert), experts.down(segment.expert));

        // SAFETY: here and below: segments share no row, `run` is called once for each, and it takes one part of
        // each buffer.
        let gate_up = unsafe { self.gate_up.part(span(2 * inter)) };
        // SAFETY: as above.
        let act = unsafe { self.act.part(span(inter)) };
        // SAFETY: as above.
        let out = unsafe { self.out.part(span(width)) };
        match experts.dtype() {
            Dtype::F32 => {
                // SAFETY: as above.
                let rows = unsafe { self.x.part(span(width)) };
                dispatch.gather(x, width, segment.rows.clone(), rows);
                multiply(Rows::F32(rows), gate_up_w, None, gate_up);
                silu_mul_rows(gate_up, inter, act);
                multiply(Rows::F32(act), down_w, None, out);
            }
            Dtype::Bf16 => {
                // SAFETY: as above.
                let rows = unsafe { self.x_rounded.part(span(width.div_ceil(2))) };
                // SAFETY: as above.
                let act_rounded = unsafe { self.act_rounded.part(span(inter.div_ceil(2))) };
                let tokens = dispatch.tokens(segment.rows.clone());
                for (row, &token) in rows.chunks_exact_mut(width.div_ceil(2)).zip(tokens) {
                    round_rows(&x[token as usize * width..][..width], width, row);
                }
                multiply(Rows::Bf16(rows), gate_up_w, None, gate_up);
                silu_mul_rows(gate_up, inter, act);
                round_rows(act, inter, act_rounded);
                multiply(Rows::Bf16(act_rounded), down_w, None, out);
            }
        }
    }
}

/// [`forward`] in f32 for tensors, differentiable in all four: `x` `[T, D]`, `gates` `[T, K]`, and the weights
/// `gate_up` `[E, 2 I, D]` and `down` `[E, D, I]`. The result is `[T, D]` and has the bits of [`forward`].
///
/// The choice itself has no gradient: replay is hard assignment (R3, arXiv 2510.11370). Gradients are
/// deterministic: one task per expert for its weights, a sum in router order for `x`.
///
/// # Errors
/// If shapes, dtypes or devices do not fit each other or `choice`.
pub fn experts_op(
    x: &Tensor,
    gates: &Tensor,
    weights: (&Tensor, &Tensor),
    choice: Arc<Choice>,
) -> Result<Tensor> {
    op::apply(x, gates, weights, &choice)
}

#[cfg(test)]
mod tests;
