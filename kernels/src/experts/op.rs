//! The experts as two candle ops, since one takes at most three tensors: gate-up to activations, then down to sums.
//!
//! Rows between them stay sorted by expert, `[T K, ..]`.

use std::sync::{Arc, OnceLock};

use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail};

use super::dispatch::Dispatch;
use super::grouped::{self, Weights};
use crate::candle_io::{f32_slice, f32_view};
use crate::isa::{Isa, Lanes, multiversion, sum_lanes};
use crate::parallel;
use crate::router::Choice;
use crate::swiglu::{silu_mul, silu_mul_backward};

pub(super) fn apply(
    x: &Tensor,
    gates: &Tensor,
    (gate_up, down): (&Tensor, &Tensor),
    choice: &Choice,
) -> Result<Tensor> {
    let (n_tokens, width) = x.dims2()?;
    let (n_experts, inter) = (gate_up.dim(0)?, down.dim(2)?);
    if gate_up.dims() != [n_experts, 2 * inter, width] || down.dims() != [n_experts, width, inter] {
        let (gate_up, down) = (gate_up.dims(), down.dims());
        bail!(
            "experts: gate_up {gate_up:?} and down {down:?} are not [E, 2 I, D] and [E, D, I] with D = {width}"
        );
    }
    let chosen = (choice.n_tokens(), choice.top_k());
    if gates.dims2()? != chosen || chosen.0 != n_tokens || choice.n_experts() != n_experts {
        let (gates, among) = (gates.dims(), choice.n_experts());
        bail!(
            "experts: a choice {chosen:?} among {among} does not fit gates {gates:?} for {n_tokens} tokens and \
             {n_experts} experts"
        );
    }
    let mut dispatch = Dispatch::default();
    dispatch.fill(choice);
    let dispatch = Arc::new(dispatch);
    let gate_up_op = GateUp { dispatch: dispatch.clone(), hidden: OnceLock::new() };
    let act = x.contiguous()?.apply_op2(&gate_up.contiguous()?, gate_up_op)?;
    act.apply_op3(&down.contiguous()?, &gates.contiguous()?, Down { dispatch })
}

/// `x` `[T, D]`, `gate_up` `[E, 2 I, D]` to `silu(gate) * up` `[T K, I]`.
struct GateUp {
    dispatch: Arc<Dispatch>,
    /// Gates and ups before the activation, `[T K, 2 I]`, kept for the backward pass as long as the graph lives.
    hidden: OnceLock<Vec<f32>>,
}

impl CustomOp2 for GateUp {
    fn name(&self) -> &'static str {
        "experts-gate-up"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        w: &CpuStorage,
        w_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (dispatch, (_, n, k)) = (&*self.dispatch, w_layout.shape().dims3()?);
        let rows = dispatch.gathered(f32_slice(x, x_layout)?, k);
        let mut hidden = vec![0.0; dispatch.n_rows() * n];
        grouped::forward(dispatch, &rows, Weights { values: f32_slice(w, w_layout)?, n, k }, &mut hidden);
        let mut act = vec![0.0; dispatch.n_rows() * n / 2];
        silu_mul(&hidden, n / 2, &mut act);
        self.hidden.get_or_init(|| hidden);
        Ok((CpuStorage::F32(act), Shape::from((dispatch.n_rows(), n / 2))))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        _act: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (dispatch, (_, n, k)) = (&*self.dispatch, w.dims3()?);
        let hidden = self.hidden.get().expect("the forward ran before the backward");
        let mut hidden_grad = vec![0.0; hidden.len()];
        silu_mul_backward(hidden, &f32_view(&grad.contiguous()?)?, n / 2, &mut hidden_grad);
        let x_grad = || {
            let mut rows = vec![0.0; dispatch.n_rows() * k];
            let values = &f32_view(w)?;
            grouped::rows_gradient(dispatch, &hidden_grad, Weights { values, n, k }, &mut rows);
            let mut x_grad = vec![0.0; x.elem_count()];
            dispatch.combine(&rows, None, k, &mut x_grad);
            Tensor::from_vec(x_grad, x.shape(), x.device())
        };
        let w_grad = || {
            let rows = dispatch.gathered(&f32_view(x)?, k);
            let w_grad = grouped::weights_gradient(dispatch, &hidden_grad, &rows, (n, k));
            Tensor::from_vec(w_grad, w.shape(), w.device())
        };
        Ok((x.track_op().then(x_grad).transpose()?, w.track_op().then(w_grad).transpose()?))
    }
}

/// `act` `[T K, I]`, `down` `[E, D, I]`, `gates` `[T, K]` to `y` `[T, D]`.
struct Down {
    dispatch: Arc<Dispatch>,
}

impl CustomOp3 for Down {
    fn name(&self) -> &'static str {
        "experts-down"
    }

    fn cpu_fwd(
        &self,
        act: &CpuStorage,
        act_layout: &Layout,
        w: &CpuStorage,
        w_layout: &Layout,
        gates: &CpuStorage,
        gates_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (dispatch, (_, n, k)) = (&*self.dispatch, w_layout.shape().dims3()?);
        let mut out = vec![0.0; dispatch.n_rows() * n];
        let w = Weights { values: f32_slice(w, w_layout)?, n, k };
        grouped::forward(dispatch, f32_slice(act, act_layout)?, w, &mut out);
        let n_tokens = gates_layout.dims()[0];
        let mut y = vec![0.0; n_tokens * n];
        dispatch.combine(&out, Some(f32_slice(gates, gates_layout)?), n, &mut y);
        Ok((CpuStorage::F32(y), Shape::from((n_tokens, n))))
    }

    fn bwd(
        &self,
        act: &Tensor,
        w: &Tensor,
        gates: &Tensor,
        _y: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (dispatch, (_, n, k)) = (&*self.dispatch, w.dims3()?);
        let act_values = &*f32_view(act)?;
        let row_gates = dispatch.to_rows(&f32_view(gates)?);
        let mut grad = dispatch.gathered(&f32_view(&grad.contiguous()?)?, n);
        // `downᵀ grad` serves two gradients: an answer is `down act`, so `answer . grad = act . downᵀ grad`, and the
        // answers themselves need not be kept.
        let mut act_grad = vec![0.0; dispatch.n_rows() * k];
        grouped::rows_gradient(dispatch, &grad, Weights { values: &f32_view(w)?, n, k }, &mut act_grad);
        let mut row_gates_grad = vec![0.0; dispatch.n_rows()];
        parallel::for_rows(&mut row_gates_grad, 1, k, |first, out| {
            let span = first * k..(first + out.len()) * k;
            dots(&act_values[span.clone()], &act_grad[span], k, out);
        });
        let gates_grad = Tensor::from_vec(dispatch.to_pairs(&row_gates_grad), gates.shape(), gates.device())?;
        scale_rows(&row_gates, k, &mut act_grad);
        let act_grad = Tensor::from_vec(act_grad, act.shape(), act.device())?;
        let w_grad = || {
            scale_rows(&row_gates, n, &mut grad);
            let w_grad = grouped::weights_gradient(dispatch, &grad, act_values, (n, k));
            Tensor::from_vec(w_grad, w.shape(), w.device())
        };
        Ok((Some(act_grad), w.track_op().then(w_grad).transpose()?, Some(gates_grad)))
    }
}

/// Multiplies row `r` of `rows` `[.., width]` by `factors[r]`.
fn scale_rows(factors: &[f32], width: usize, rows: &mut [f32]) {
    parallel::for_rows(rows, width, width, |first, rows| {
        for (row, factor) in rows.chunks_exact_mut(width).zip(&factors[first..]) {
            row.iter_mut().for_each(|value| *value *= factor);
        }
    });
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
