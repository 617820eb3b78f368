//! Weights with a trained update of low rank: `W = W0 + scale B A` (LoRA, arXiv 2106.09685, section 4.1).

use crate::gemm::Dtype;
use crate::gemm::gradient::{Left, PlainProduct, Right};
use crate::parallel::{self, Disjoint};
use crate::scratch::Scratch;

/// The factors of the update of a matrix `[N, K]`, or of a stack of such matrices.
#[derive(Clone, Copy, Debug)]
pub struct Factors<'a> {
    /// `[r, K]`, or a stack of them.
    pub a: &'a [f32],
    /// `[N, r]`, or a stack of them.
    pub b: &'a [f32],
    /// `r`.
    pub rank: usize,
    /// What the product of both is multiplied with.
    pub scale: f32,
}

impl<'a> Factors<'a> {
    /// Those of matrix `index` of `count`.
    #[must_use]
    pub(crate) fn part(&self, index: usize, count: usize) -> Self {
        let part = |values: &'a [f32]| &values[index * (values.len() / count)..][..values.len() / count];
        Self { a: part(self.a), b: part(self.b), ..*self }
    }

    /// `scale x Aᵀ`: `x` is `[T, K]`, the result `[T, r]`.
    pub(crate) fn times_a(
        &self,
        x: &[f32],
        k: usize,
        run: impl Fn(&PlainProduct<'_>, &mut [f32]),
    ) -> Scratch<f32> {
        let rank = self.rank;
        assert_eq!(self.a.len(), rank * k, "A is [r, K]");
        let mut transposed = Scratch::<f32>::take(k * rank);
        for (i, row) in self.a.chunks_exact(k).enumerate() {
            for (column, value) in row.iter().enumerate() {
                transposed[column * rank + i] = *value;
            }
        }
        self.scaled(x, &transposed, x.len() / k, run)
    }

    /// `scale grad B`: `grad` is `[T, N]`, the result `[T, r]`.
    pub(crate) fn grad_times_b(
        &self,
        grad: &[f32],
        run: impl Fn(&PlainProduct<'_>, &mut [f32]),
    ) -> Scratch<f32> {
        self.scaled(grad, self.b, grad.len() / (self.b.len() / self.rank), run)
    }

    /// `scale left right`: `left` is `[T, n]`, `right` `[n, r]`.
    fn scaled(
        &self,
        left: &[f32],
        right: &[f32],
        n_rows: usize,
        run: impl Fn(&PlainProduct<'_>, &mut [f32]),
    ) -> Scratch<f32> {
        let (n, dtype) = (self.rank, Dtype::F32);
        let mut out = Scratch::<f32>::take(n_rows * n);
        let product = PlainProduct { a: Left::Plain(left), b: Right::Plain(right), n, dtype, onto: false };
        run(&product, &mut out);
        out.iter_mut().for_each(|value| *value *= self.scale);
        out
    }

    /// `out = base + scale B A`, for all of a stack of `count` matrices. An element of which the product is 0 keeps its
    /// bits, the sign of a zero too; so a `B` of zeros changes nothing.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn merge(&self, base: &[f32], count: usize, out: &mut [f32]) {
        let (len, k) = (base.len() / count, self.a.len() / count / self.rank);
        assert_eq!((base.len(), out.len()), (count * len, base.len()), "a stack of {count}");
        assert_eq!(self.b.len() * k, base.len() * self.rank, "B is [N, r] where the weight is [N, {k}]");
        let parts = Disjoint::new(out);
        let work = base.len() * self.rank;
        parallel::for_each(count, work, |index| {
            // SAFETY: each matrix is visited once.
            let out = unsafe { parts.part(index * len..(index + 1) * len) };
            let Self { a, b, .. } = self.part(index, count);
            let (left, right, dtype) = (Left::Plain(b), Right::Plain(a), Dtype::F32);
            let product = PlainProduct { a: left, b: right, n: k, dtype, onto: false };
            if count == 1 {
                product.run(out)
            } else {
                product.run_in(1, out)
            }
            for (out, &base) in out.iter_mut().zip(&base[index * len..][..len]) {
                let update = self.scale * *out;
                *out = if update == 0.0 { base } else { base + update };
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::linear::Linear;
    use crate::testing::{bits, in_pool, noise};
    use crate::weight_gradient::WeightGradient;

    #[test]
    fn a_merge_is_that_on_paper() {
        // Two matrices [2, 3] of rank 1.
        let factors =
            Factors { a: &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], b: &[1.0, -1.0, 0.5, 2.0], rank: 1, scale: 2.0 };
        let (base, mut out) = ([1.0; 12], [f32::NAN; 12]);
        factors.merge(&base, 2, &mut out);
        assert_eq!(out, [3.0, 5.0, 7.0, -1.0, -3.0, -5.0, 5.0, 6.0, 7.0, 17.0, 21.0, 25.0]);
    }

    #[test]
    fn a_b_of_zeros_keeps_every_bit() {
        let (a, base) = (noise(4 * 6, 1), [-0.0, 0.0, f32::MIN_POSITIVE / 2.0, -1.5, 3e38, 0.1]);
        let mut out = [f32::NAN; 6];
        for scale in [2.0, -2.0] {
            Factors { a: &a, b: &[0.0; 4], rank: 4, scale }.merge(&base, 1, &mut out);
            assert_eq!(bits(&out), bits(&base));
        }
    }

    #[test]
    fn threads_do_not_show_in_a_merge() {
        for (count, n, k) in [(1, 300, 500), (40, 60, 100)] {
            let (base, a, b) = (noise(count * n * k, 1), noise(count * 8 * k, 2), noise(count * n * 8, 3));
            let merge = || {
                let mut out = vec![0.0; base.len()];
                Factors { a: &a, b: &b, rank: 8, scale: 2.0 }.merge(&base, count, &mut out);
                bits(&out)
            };
            assert_eq!(in_pool(1, merge), in_pool(2, merge));
        }
    }

    #[test]
    fn gradients_of_factors_go_on_from_call_to_call_to_the_bit() {
        let (n_tokens, n, k, rank) = (37, 20, 50, 5);
        let (x, grad, w) = (noise(n_tokens * k, 1), noise(n_tokens * n, 2), noise(n * k, 3));
        let (a, b) = (noise(rank * k, 4), noise(n * rank, 5));
        let run = |cuts: &[usize]| {
            let (mut a_grad, mut b_grad) = (vec![0.0; a.len()], vec![0.0; b.len()]);
            for cut in cuts.windows(2) {
                let (x, lengths) = (&x[cut[0] * k..cut[1] * k], &[cut[1] - cut[0]][..]);
                let linear = Linear { x, w: &w, k, dtype: Dtype::Bf16, lengths };
                let factors = Factors { a: &a, b: &b, rank, scale: 0.3 };
                let out = WeightGradient::LowRank { factors, a: &mut a_grad, b: &mut b_grad };
                linear.add_w_gradient(&grad[cut[0] * n..cut[1] * n], out);
            }
            (bits(&a_grad), bits(&b_grad))
        };
        let whole = run(&[0, n_tokens]);
        assert_eq!(run(&[0, 1, 17, 17, n_tokens]), whole);
        assert_eq!(in_pool(2, || run(&[0, n_tokens])), whole);
    }
}
