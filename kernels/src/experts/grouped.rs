//! Products of rows sorted by expert with each expert's own matrix, forward and backward, in f32.

use std::ops::Range;

use super::dispatch::Dispatch;
use crate::gemm::gradient::{Left, product};
use crate::gemm::{Dtype, PackedMatrix, Rows, multiply};
use crate::parallel::{self, Disjoint};

/// Plain weights of all experts, `[E, n, k]`.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a> {
    pub(super) values: &'a [f32],
    pub(super) n: usize,
    pub(super) k: usize,
}

impl<'a> Weights<'a> {
    fn of(self, expert: usize) -> &'a [f32] {
        &self.values[expert * self.n * self.k..][..self.n * self.k]
    }
}

/// `out[r] = W_e rows[r]`: `rows` `[T K, k]`, `out` `[T K, n]`; the engine's kernel, so the engine's bits.
pub(super) fn forward(dispatch: &Dispatch, rows: &[f32], w: Weights<'_>, out: &mut [f32]) {
    let Weights { n, k, .. } = w;
    let out = Disjoint::new(out);
    each_expert(dispatch, n * k, |expert, span| {
        if span.is_empty() {
            return;
        }
        let packed = PackedMatrix::pack(w.of(expert), n, k, Dtype::F32);
        // SAFETY: experts share no row, and each is visited once.
        let out = unsafe { out.part(span.start * n..span.end * n) };
        multiply(Rows::F32(&rows[span.start * k..span.end * k]), &packed, None, out);
    });
}

/// Gradient of [`forward`] with respect to `rows`: `out[r] = W_eᵀ grad[r]`, `grad` `[T K, n]`, `out` `[T K, k]`.
pub(super) fn rows_gradient(dispatch: &Dispatch, grad: &[f32], w: Weights<'_>, out: &mut [f32]) {
    let Weights { n, k, .. } = w;
    let out = Disjoint::new(out);
    each_expert(dispatch, n * k, |expert, span| {
        // SAFETY: experts share no row, and each is visited once.
        let out = unsafe { out.part(span.start * k..span.end * k) };
        product(Left::Plain(&grad[span.start * n..span.end * n]), w.of(expert), k, out);
    });
}

/// Gradient of [`forward`] with respect to the weights: `out_e = sum over r of grad[r] rows[r]ᵀ`, `[E, n, k]`; zero
/// for an expert nobody chose.
pub(super) fn weights_gradient(
    dispatch: &Dispatch,
    grad: &[f32],
    rows: &[f32],
    (n, k): (usize, usize),
) -> Vec<f32> {
    let mut weights = vec![0.0; dispatch.n_experts() * n * k];
    let parts = Disjoint::new(&mut weights);
    each_expert(dispatch, n * k, |expert, span| {
        // SAFETY: each expert is visited once.
        let out = unsafe { parts.part(expert * n * k..(expert + 1) * n * k) };
        let grad = Left::Transposed(&grad[span.start * n..span.end * n]);
        product(grad, &rows[span.start * k..span.end * k], k, out);
    });
    weights
}

/// Calls `body(expert, its rows)` for every expert, in parallel; a row costs `row_work` multiply-adds.
fn each_expert(dispatch: &Dispatch, row_work: usize, body: impl Fn(usize, Range<usize>) + Sync + Send) {
    parallel::for_each(dispatch.n_experts(), dispatch.n_rows() * row_work, |expert| {
        body(expert, dispatch.expert_rows(expert));
    });
}
