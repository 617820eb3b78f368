//! The gated activation of an expert: `silu(gate) * up` (SwiGLU, arXiv 2002.05202).

use crate::cast::round_rows_body;
use crate::exp::exp;
use crate::isa::{Isa, multiversion};
use crate::parallel;

/// What one element costs, in multiply-adds: most of it is `exp`.
const ELEMENT_WORK: usize = 40;

/// `out = silu(gate) * up` with `silu(g) = g / (1 + e^-g)`.
///
/// `gate_up` is `[T, 2 I]`, a row being `I` gates, then `I` ups; `inter` is `I`; `out` is `[T, I]`.
///
/// # Panics
/// If the shapes do not fit.
pub fn silu_mul(gate_up: &[f32], inter: usize, out: &mut [f32]) {
    assert_eq!(gate_up.len(), 2 * out.len(), "gates and ups are two rows for one");
    parallel::for_rows(out, inter, ELEMENT_WORK * inter, |first, out| {
        silu_mul_rows(&gate_up[2 * first * inter..][..2 * out.len()], inter, out);
    });
}

multiversion! {
    /// [`silu_mul`] on the calling thread.
    pub(crate) fn silu_mul_rows(gate_up: &[f32], inter: usize, out: &mut [f32]) = silu_mul_body;
}

#[inline(always)]
fn silu_mul_body<I: Isa>(gate_up: &[f32], inter: usize, out: &mut [f32]) {
    for (gate_up, out) in gate_up.chunks_exact(2 * inter).zip(out.chunks_exact_mut(inter)) {
        let (gate, up) = gate_up.split_at(inter);
        for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
            *out = silu_mul_of::<I>(gate, up);
        }
    }
}

multiversion! {
    /// [`silu_mul_rows`] rounded to bf16 pairs, `[T, I/2]`, an odd last element paired with zero.
    pub(crate) fn rounded_silu_mul_rows(gate_up: &[f32], inter: usize, out: &mut [u32]) = rounded_silu_mul_body;
}

#[inline(always)]
fn rounded_silu_mul_body<I: Isa>(gate_up: &[f32], inter: usize, out: &mut [u32]) {
    // A run at a time stays in registers or next to them.
    const RUN: usize = 64;
    for (gate_up, out) in gate_up.chunks_exact(2 * inter).zip(out.chunks_exact_mut(inter.div_ceil(2))) {
        let (gate, up) = gate_up.split_at(inter);
        for ((gate, up), out) in gate.chunks(RUN).zip(up.chunks(RUN)).zip(out.chunks_mut(RUN / 2)) {
            let mut act = [0.0; RUN];
            for ((act, &gate), &up) in act.iter_mut().zip(gate).zip(up) {
                *act = silu_mul_of::<I>(gate, up);
            }
            round_rows_body::<I>(&act[..gate.len()], gate.len(), out);
        }
    }
}

#[inline(always)]
fn silu_mul_of<I: Isa>(gate: f32, up: f32) -> f32 {
    gate / (1.0 + exp::<I>(-gate)) * up
}

/// Gradient of [`silu_mul`] with respect to `gate_up`: `grad` `[T, I]` in, `[T, 2 I]` out.
///
/// # Panics
/// If the shapes do not fit.
pub fn silu_mul_backward(gate_up: &[f32], grad: &[f32], inter: usize, out: &mut [f32]) {
    assert_eq!(gate_up.len(), 2 * grad.len(), "gates and ups are two rows for one");
    assert_eq!(gate_up.len(), out.len(), "the gradient has the shape of gates and ups");
    parallel::for_rows(out, 2 * inter, 2 * ELEMENT_WORK * inter, |first, out| {
        let gate_up = &gate_up[2 * first * inter..][..out.len()];
        silu_mul_backward_rows(gate_up, &grad[first * inter..][..out.len() / 2], inter, out);
    });
}

multiversion! {
    /// [`silu_mul_backward`] on the calling thread.
    pub(crate) fn silu_mul_backward_rows(gate_up: &[f32], grad: &[f32], inter: usize, out: &mut [f32]) = backward_body;
}

#[inline(always)]
fn backward_body<I: Isa>(gate_up: &[f32], grad: &[f32], inter: usize, out: &mut [f32]) {
    let rows =
        gate_up.chunks_exact(2 * inter).zip(grad.chunks_exact(inter)).zip(out.chunks_exact_mut(2 * inter));
    for ((gate_up, grad), out) in rows {
        let (gate, up) = gate_up.split_at(inter);
        let (gate_grad, up_grad) = out.split_at_mut(inter);
        for (i, &grad) in grad.iter().enumerate() {
            let sigmoid = 1.0 / (1.0 + exp::<I>(-gate[i]));
            // Away from zero a gate's sigmoid saturates: `gate * (1 - sigmoid)` is then 0, as `1 - sigmoid` is
            // exactly 0 for large gates and `sigmoid` is for small ones.
            let slope = sigmoid * I::mul_add(gate[i], 1.0 - sigmoid, 1.0);
            gate_grad[i] = grad * up[i] * slope;
            up_grad[i] = grad * gate[i] * sigmoid;
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor, Var};
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    use super::*;
    use crate::testing::noise;

    fn scaled(n: usize, scale: f32) -> Vec<f32> {
        noise(n, 1).into_iter().map(|x| scale * x).collect()
    }

    fn exact(gate: f32, up: f32) -> f64 {
        let gate = f64::from(gate);
        gate / (1.0 + (-gate).exp()) * f64::from(up)
    }

    proptest! {
        #[test]
        fn rows_are_silu_times_up_and_do_not_depend_on_each_other(
            n_rows in 0_usize..40, inter in 1_usize..70, scale in 0.1_f32..60.0,
        ) {
            let gate_up = scaled(n_rows * 2 * inter, scale);
            let mut out = vec![f32::NAN; n_rows * inter];
            silu_mul(&gate_up, inter, &mut out);
            for (row, out) in gate_up.chunks_exact(2 * inter).zip(out.chunks_exact(inter)) {
                let mut alone = vec![f32::NAN; inter];
                silu_mul(row, inter, &mut alone);
                prop_assert_eq!(out, &alone[..]);
                for i in 0..inter {
                    let expected = exact(row[i], row[inter + i]);
                    prop_assert!((f64::from(out[i]) - expected).abs() <= 1e-6 * expected.abs());
                }
            }
        }

        #[test]
        fn the_gradient_is_that_of_finite_differences(inter in 1_usize..20, scale in 0.1_f32..30.0) {
            let (gate_up, grad) = (scaled(4 * inter, scale), noise(2 * inter, 2));
            let mut out = vec![f32::NAN; 4 * inter];
            silu_mul_backward(&gate_up, &grad, inter, &mut out);
            for row in 0..2 {
                for i in 0..inter {
                    let (gate, up) = (gate_up[2 * row * inter + i], gate_up[(2 * row + 1) * inter + i]);
                    let (step, grad) = (1.0 / 64.0, f64::from(grad[row * inter + i]));
                    let across_gate = exact(gate + step, up) - exact(gate - step, up);
                    let across_up = exact(gate, up + step) - exact(gate, up - step);
                    let expected = [across_gate, across_up].map(|d| d * grad / f64::from(2.0 * step));
                    let got = [out[2 * row * inter + i], out[(2 * row + 1) * inter + i]].map(f64::from);
                    for (got, expected) in got.into_iter().zip(expected) {
                        prop_assert!((got - expected).abs() <= 2e-4 * f64::from(scale), "{got}, not {expected}");
                    }
                }
            }
        }
    }

    #[test]
    fn rounding_along_the_way_gives_the_bits_of_rounding_after() {
        for (n_rows, inter) in [(3, 1), (2, 63), (1, 64), (2, 129), (3, 192)] {
            let gate_up = scaled(n_rows * 2 * inter, 8.0);
            let (mut act, mut expected) = (vec![0.0; n_rows * inter], vec![0; n_rows * inter.div_ceil(2)]);
            silu_mul(&gate_up, inter, &mut act);
            crate::cast::round_rows(&act, inter, &mut expected);
            let mut rounded = vec![u32::MAX; expected.len()];
            rounded_silu_mul_rows(&gate_up, inter, &mut rounded);
            assert_eq!(rounded, expected, "[{n_rows}, {inter}]");
        }
    }

    #[test]
    fn saturated_gates_are_finite_forward_and_backward() {
        let gate_up = [-200.0, 0.0, 200.0, 3.0, 3.0, 3.0];
        let (mut out, mut grad) = ([f32::NAN; 3], [f32::NAN; 6]);
        silu_mul(&gate_up, 3, &mut out);
        silu_mul_backward(&gate_up, &[1.0; 3], 3, &mut grad);
        assert_eq!(out, [0.0, 0.0, 600.0]);
        assert_eq!(grad, [0.0, 1.5, 3.0, 0.0, 0.0, 200.0]);
    }

    #[test]
    fn the_gradient_is_that_of_candle() {
        let (t, inter) = (5, 19);
        let gate_up = Var::from_vec(scaled(t * 2 * inter, 4.0), (t, 2 * inter), &Device::Cpu).unwrap();
        let upstream = Tensor::from_vec(noise(t * inter, 2), (t, inter), &Device::Cpu).unwrap();
        let (gate, up) = (gate_up.narrow(1, 0, inter).unwrap(), gate_up.narrow(1, inter, inter).unwrap());
        let y = (gate.silu().unwrap() * up).unwrap();
        let store = (y * upstream).unwrap().sum_all().unwrap().backward().unwrap();
        let candles = store.get(&gate_up).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let mut ours = vec![f32::NAN; candles.len()];
        silu_mul_backward(&scaled(t * 2 * inter, 4.0), &noise(t * inter, 2), inter, &mut ours);
        for (ours, candles) in ours.into_iter().zip(candles) {
            assert!((ours - candles).abs() <= 1e-5, "{ours}, not {candles}");
        }
    }
}
