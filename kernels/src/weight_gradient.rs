//! Where the gradient of a weight goes: nowhere, to all of its elements, or to the factors of a low-rank update.

use crate::gemm::Dtype;
use crate::gemm::gradient::{Left, PlainProduct, Right};
use crate::low_rank::Factors;
use crate::parallel::Disjoint;

/// Where the gradient of a matrix `[N, K]`, or of a stack of them, goes. Each is added to.
#[derive(Debug)]
pub enum WeightGradient<'a> {
    /// Nowhere: the weight is frozen, and nothing is computed for it.
    Frozen,
    /// To every element.
    Whole(&'a mut [f32]),
    /// To the factors of a low-rank update: that of the whole is never formed.
    LowRank {
        /// The factors.
        factors: Factors<'a>,
        /// Gradient of `A`.
        a: &'a mut [f32],
        /// Gradient of `B`.
        b: &'a mut [f32],
    },
}

/// A product `y = x Wᵀ`, as the gradient of `W` needs it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outer<'a> {
    /// Gradient of `y`, `[T, N]`.
    pub(crate) grad: &'a [f32],
    /// `[T, K]`.
    pub(crate) x: &'a [f32],
    /// `K`.
    pub(crate) k: usize,
    /// What the operands of the whole product are rounded to. Products with factors are f32: they are few and small.
    pub(crate) dtype: Dtype,
    /// How many rows belong together, summing to `T`.
    pub(crate) lengths: &'a [usize],
    /// Whether everything stays on the calling thread.
    pub(crate) alone: bool,
}

impl Outer<'_> {
    fn run(&self, product: &PlainProduct<'_>, out: &mut [f32]) {
        if self.alone { product.run_in(1, out) } else { product.run(out) }
    }
}

impl WeightGradient<'_> {
    /// Adds the gradient of one product. Every element is a chain over the tokens, which goes on from call to call.
    pub(crate) fn add(self, outer: &Outer<'_>) {
        let &Outer { grad, x, k, dtype, lengths, .. } = outer;
        let transposed = |a, b, n, dtype| {
            let (a, b) = (Left::Transposed(a, lengths), Right::Plain(b));
            PlainProduct { a, b, n, dtype, onto: true }
        };
        match self {
            Self::Frozen => {}
            Self::Whole(out) => outer.run(&transposed(grad, x, k, dtype), out),
            Self::LowRank { factors, a, b } => {
                let rank = factors.rank;
                let of_b = factors.times_a(x, k, |product, out| outer.run(product, out));
                outer.run(&transposed(grad, &of_b, rank, Dtype::F32), b);
                let of_a = factors.grad_times_b(grad, |product, out| outer.run(product, out));
                outer.run(&transposed(&of_a, x, k, Dtype::F32), a);
            }
        }
    }
}

/// The gradient of a stack, cut among its matrices.
pub(crate) enum Stack<'a> {
    Frozen,
    Whole(Disjoint<'a, f32>),
    LowRank { factors: Factors<'a>, a: Disjoint<'a, f32>, b: Disjoint<'a, f32> },
}

impl<'a> Stack<'a> {
    pub(crate) fn new(gradient: WeightGradient<'a>) -> Self {
        match gradient {
            WeightGradient::Frozen => Self::Frozen,
            WeightGradient::Whole(out) => Self::Whole(Disjoint::new(out)),
            WeightGradient::LowRank { factors, a, b } => {
                Self::LowRank { factors, a: Disjoint::new(a), b: Disjoint::new(b) }
            }
        }
    }

    /// That of matrix `index` of `count`.
    ///
    /// # Safety
    /// No other live part, on any thread, is of the same matrix.
    pub(crate) unsafe fn part(&self, index: usize, count: usize) -> WeightGradient<'_> {
        let range = |len: usize| index * (len / count)..(index + 1) * (len / count);
        match self {
            Self::Frozen => WeightGradient::Frozen,
            // SAFETY: ranges of two matrices do not overlap, and the caller keeps to one of this.
            Self::Whole(out) => WeightGradient::Whole(unsafe { out.part(range(out.len())) }),
            Self::LowRank { factors, a, b } => WeightGradient::LowRank {
                factors: factors.part(index, count),
                // SAFETY: as above.
                a: unsafe { a.part(range(a.len())) },
                // SAFETY: as above.
                b: unsafe { b.part(range(b.len())) },
            },
        }
    }
}
