//! The experts as the trainer runs them: a forward that keeps what the gradient needs, and that gradient.

use super::Experts;
use super::dispatch::Dispatch;
use crate::gemm::Dtype;
use crate::gemm::gradient::{Left, PlainProduct, Right};
use crate::isa::{Isa, Lanes, multiversion, sum_lanes};
use crate::parallel::{self, Disjoint};
use crate::router::Choice;
use crate::scratch::Scratch;
use crate::swiglu::{silu_mul_backward_rows, silu_mul_rows};
use crate::weight_gradient::{Outer, Stack, WeightGradient};

/// What a forward keeps for its gradient, in buffers that are used again.
#[derive(Debug, Default)]
pub struct ExpertTrace {
    dispatch: Dispatch,
    /// Gates and ups before the activation, sorted by expert, `[T K, 2 I]`.
    hidden: Vec<f32>,
}

impl ExpertTrace {
    /// Memory held, but for that of the order of rows.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.hidden.capacity() * size_of::<f32>()
    }

    /// [`super::forward`] with the same bits, keeping what [`Self::backward`] needs. Weights are packed where they are
    /// multiplied by, if there is no packed `copy` of them.
    ///
    /// # Panics
    /// If the shapes or dtypes do not fit.
    pub fn forward(
        &mut self,
        operands: &ExpertOperands<'_>,
        copy: Option<&Experts>,
        choice: &Choice,
        y: &mut [f32],
    ) {
        let &ExpertOperands { x, gates, width, inter, dtype, .. } = operands;
        let n_experts = choice.n_experts();
        assert_eq!((x.len(), y.len()), (choice.n_tokens() * width, x.len()), "x and y are [T, D]");
        assert_eq!(gates.len(), choice.ids().len(), "gates are [T, K]");
        let n_values = operands.gate_up.len() + operands.down.len();
        assert_eq!(n_values, n_experts * 3 * inter * width, "the choice is among these experts");
        self.dispatch.fill(choice);
        let (dispatch, n_rows) = (&self.dispatch, gates.len());
        self.hidden.resize(n_rows * 2 * inter, 0.0);
        let mut answers = Scratch::<f32>::take(n_rows * width);
        let (hidden, parts) = (Disjoint::new(&mut self.hidden), Disjoint::new(&mut answers));
        let pieces = dispatch.even_pieces();
        parallel::for_each(pieces.len(), n_rows * 3 * inter * width, |i| {
            let rows = pieces[i].rows.clone();
            // SAFETY: pieces share no row, and each is visited once.
            let hidden = unsafe { hidden.part(rows.start * 2 * inter..rows.end * 2 * inter) };
            // SAFETY: as above.
            let answers = unsafe { parts.part(rows.start * width..rows.end * width) };
            let mut gathered = Scratch::<f32>::take(rows.len() * width);
            dispatch.gather(x, width, rows.clone(), &mut gathered);
            let expert = pieces[i].expert;
            let (gate_up, down) = operands.expert(expert);
            let (gate_up, down) = match copy {
                Some(copy) => (Right::Packed(copy.gate_up(expert)), Right::Packed(copy.down(expert))),
                None => (Right::Transposed(gate_up), Right::Transposed(down)),
            };
            let times = |x: &[f32], b, n, y: &mut [f32]| {
                PlainProduct { a: Left::Plain(x), b, n, dtype, onto: false }.run_in(1, y);
            };
            times(&gathered, gate_up, 2 * inter, hidden);
            let mut act = Scratch::<f32>::take(rows.len() * inter);
            silu_mul_rows(hidden, inter, &mut act);
            times(&act, down, width, answers);
        });
        dispatch.combine(&answers, Some(gates), width, y);
    }

    /// Gradients of the forward that this trace is of.
    ///
    /// Deterministic: one task per expert, whose weights' gradients are chains over its tokens in order, which go on from
    /// call to call, and a sum in router order for `x`. The choice itself has no gradient: replay is hard assignment (R3, arXiv 2510.11370).
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn backward(&self, operands: &ExpertOperands<'_>, grad: &[f32], out: ExpertGrads<'_>) {
        let &ExpertOperands { x, gates, width, inter, .. } = operands;
        let (dispatch, n_rows) = (&self.dispatch, self.dispatch.n_rows());
        assert_eq!((gates.len(), grad.len()), (n_rows, x.len()), "gates are [T, K], the gradient is [T, D]");
        let row_gates = dispatch.to_rows(gates);
        let mut row_gates_grad = vec![0.0; n_rows];
        let mut rows_grad = out.x.is_some().then(|| Scratch::<f32>::take(n_rows * width));
        let parts = Parts {
            rows: rows_grad.as_mut().map(|rows| Disjoint::new(rows)),
            gates: Disjoint::new(&mut row_gates_grad),
            gate_up: Stack::new(out.gate_up),
            down: Stack::new(out.down),
        };
        let busy = dispatch.busy_experts();
        parallel::for_each(busy.len(), n_rows * 6 * inter * width, |i| {
            self.expert_backward(busy[i].expert, operands, (grad, &row_gates), &parts);
        });
        out.gates.copy_from_slice(&dispatch.to_pairs(&row_gates_grad));
        if let (Some(x), Some(rows_grad)) = (out.x, &rows_grad) {
            dispatch.combine(rows_grad, None, width, x);
        }
    }

    /// One expert's share, on this thread. `downᵀ grad` serves two gradients: an answer is `down act`, so `answer .
    /// grad = act . downᵀ grad`, and answers need not be kept.
    fn expert_backward(
        &self,
        expert: usize,
        operands: &ExpertOperands<'_>,
        (grad, row_gates): (&[f32], &[f32]),
        parts: &Parts<'_>,
    ) {
        let &ExpertOperands { x, width, inter, dtype, lengths, .. } = operands;
        let rows = self.dispatch.expert_rows(expert);
        let lengths = self.dispatch.lengths_of(rows.clone(), lengths);
        let row_grads = parts.rows.as_ref().map(|parts| {
            // SAFETY: experts share no row, and each is visited once.
            unsafe { parts.part(rows.start * width..rows.end * width) }
        });
        // SAFETY: as above.
        let gates_grad = unsafe { parts.gates.part(rows.clone()) };
        let n_experts = self.dispatch.n_experts();
        // SAFETY: each expert is visited once.
        let gate_up_grad = unsafe { parts.gate_up.part(expert, n_experts) };
        // SAFETY: as above.
        let down_grad = unsafe { parts.down.part(expert, n_experts) };
        let (gate_up, down) = operands.expert(expert);
        let hidden = &self.hidden[rows.start * 2 * inter..rows.end * 2 * inter];

        let mut gathered = Scratch::<f32>::take(rows.len() * width);
        let (mut act, mut act_grad) =
            (Scratch::<f32>::take(rows.len() * inter), Scratch::take(rows.len() * inter));
        let mut hidden_grad = Scratch::<f32>::take(hidden.len());
        let rows_times = |a: &[f32], w: &[f32], n, out: &mut [f32]| {
            PlainProduct { a: Left::Plain(a), b: Right::Plain(w), n, dtype, onto: false }.run_in(1, out);
        };
        let add_outer = |grad: &[f32], x: &[f32], k, out: WeightGradient<'_>| {
            out.add(&Outer { grad, x, k, dtype, lengths: &lengths, alone: true });
        };
        self.dispatch.gather(grad, width, rows.clone(), &mut gathered);
        silu_mul_rows(hidden, inter, &mut act);
        rows_times(&gathered, down, inter, &mut act_grad);
        dots(&act, &act_grad, inter, gates_grad);
        scale_rows(&row_gates[rows.clone()], width, &mut gathered);
        scale_rows(&row_gates[rows.clone()], inter, &mut act_grad);
        add_outer(&gathered, &act, inter, down_grad);
        silu_mul_backward_rows(hidden, &act_grad, inter, &mut hidden_grad);
        if let Some(row_grads) = row_grads {
            rows_times(&hidden_grad, gate_up, width, row_grads);
        }
        self.dispatch.gather(x, width, rows, &mut gathered);
        add_outer(&hidden_grad, &gathered, width, gate_up_grad);
    }
}

/// What a forward is computed of.
#[derive(Clone, Copy, Debug)]
pub struct ExpertOperands<'a> {
    /// `[T, D]`.
    pub x: &'a [f32],
    /// `[T, K]`.
    pub gates: &'a [f32],
    /// `[E, 2 I, D]`, plain.
    pub gate_up: &'a [f32],
    /// `[E, D, I]`, plain.
    pub down: &'a [f32],
    /// `D`.
    pub width: usize,
    /// `I`.
    pub inter: usize,
    /// What both operands of a product are rounded to.
    pub dtype: Dtype,
    /// `[S]`: tokens of each sequence, summing to `T`. Sequences that are multiplied in several calls, one after the other,
    /// have the weights' gradients of one call, in every bit.
    pub lengths: &'a [usize],
}

impl<'a> ExpertOperands<'a> {
    /// Gate and up weights of `expert`, `[2 I, D]`, and its down weights, `[D, I]`.
    fn expert(&self, expert: usize) -> (&'a [f32], &'a [f32]) {
        let len = self.inter * self.width;
        (&self.gate_up[expert * 2 * len..][..2 * len], &self.down[expert * len..][..len])
    }
}

/// Where gradients go.
#[derive(Debug)]
pub struct ExpertGrads<'a> {
    /// `[T, D]`, replaced; `None` where nothing below learns.
    pub x: Option<&'a mut [f32]>,
    /// `[T, K]`, replaced.
    pub gates: &'a mut [f32],
    /// Of `[E, 2 I, D]`, added to.
    pub gate_up: WeightGradient<'a>,
    /// Of `[E, D, I]`, added to.
    pub down: WeightGradient<'a>,
}

/// The same, cut among the experts.
struct Parts<'a> {
    rows: Option<Disjoint<'a, f32>>,
    gates: Disjoint<'a, f32>,
    gate_up: Stack<'a>,
    down: Stack<'a>,
}

/// Multiplies row `r` of `rows` `[.., width]` by `factors[r]`.
fn scale_rows(factors: &[f32], width: usize, rows: &mut [f32]) {
    for (row, factor) in rows.chunks_exact_mut(width).zip(factors) {
        row.iter_mut().for_each(|value| *value *= factor);
    }
}

multiversion! {
    /// `out[r] = a[r] . b[r]` for rows of `width`.
    fn dots(a: &[f32], b: &[f32], width: usize, out: &mut [f32]) = dots_body;
}

#[inline(always)]
fn dots_body<I: Isa>(a: &[f32], b: &[f32], width: usize, out: &mut [f32]) {
    for ((a, b), out) in a.chunks_exact(width).zip(b.chunks_exact(width)).zip(out) {
        let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
        let mut sums = I::Lanes::splat(0.0);
        for (a, b) in a.iter().zip(b) {
            sums = I::Lanes::load(a).mul_add(I::Lanes::load(b), sums);
        }
        let mut lanes = [0.0; 16];
        sums.store(&mut lanes);
        *out = a_rest.iter().zip(b_rest).fold(sum_lanes(lanes), |sum, (&a, &b)| I::mul_add(a, b, sum));
    }
}
