//! A projection by a plain weight, and its gradients.

use super::Dtype;
use super::gradient::{Left, PlainProduct, Right};
use crate::parallel;
use crate::residual;
use crate::weight_gradient::{Outer, WeightGradient};

/// `y = x Wᵀ + bias`, in the bits of [`matmul`](super::matmul): `x` `[T, K]`, `w` `[N, K]` row-major, `bias` `[N]`, `y` `[T, N]`,
/// overwritten whole. What is packed for it lives as long as the call.
///
/// # Panics
/// If the shapes do not fit.
pub fn linear(x: &[f32], (w, k): (&[f32], usize), dtype: Dtype, bias: Option<&[f32]>, y: &mut [f32]) {
    let n = w.len() / k;
    PlainProduct { a: Left::Plain(x), b: Right::Transposed(w), n, dtype, onto: false }.run(y);
    if let Some(bias) = bias {
        assert_eq!(bias.len(), n, "a bias has {n} elements");
        parallel::for_rows(y, n, n, |_, rows| {
            rows.chunks_exact_mut(n).for_each(|row| residual::add(bias, row));
        });
    }
}

/// The operands of a product `y = x Wᵀ` whose gradients are wanted.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    /// `[T, K]`.
    pub x: &'a [f32],
    /// `[N, K]`, plain.
    pub w: &'a [f32],
    /// `K`.
    pub k: usize,
    /// What both operands of a product are rounded to; the gradient passes through the rounding as if it were not there.
    pub dtype: Dtype,
    /// `[S]`: tokens of each sequence, summing to `T`. Sequences that are multiplied in several calls, one after the other,
    /// have the weight's gradient of one call, in every bit.
    pub lengths: &'a [usize],
}

impl Linear<'_> {
    /// `out = grad W`, or with `onto` `out += grad W`: `grad` `[T, N]`, `out` `[T, K]`.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn x_gradient(&self, grad: &[f32], onto: bool, out: &mut [f32]) {
        let &Self { w, k, dtype, .. } = self;
        PlainProduct { a: Left::Plain(grad), b: Right::Plain(w), n: k, dtype, onto }.run(out);
    }

    /// `out += gradᵀ x`, or the gradients of the factors of `W`: `grad` `[T, N]`, `out` `[N, K]`. Every element is one
    /// chain over the tokens, which goes on from call to call.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn add_w_gradient(&self, grad: &[f32], out: WeightGradient<'_>) {
        let &Self { x, k, dtype, lengths, .. } = self;
        out.add(&Outer { grad, x, k, dtype, lengths, alone: false });
    }
}
