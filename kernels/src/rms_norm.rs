//! Root-mean-square layer normalisation (arXiv 1910.07467), over the last dimension.
//!
//! One row is one reduction in a fixed order, so a row's result depends on that row alone.

use crate::isa::{Isa, Lanes, multiversion, padded, sum_lanes};
use crate::parallel::{self, Disjoint};
use crate::scratch::Scratch;

const LANES: usize = 16;
/// Sets of lanes in a reduction, so that one addition need not wait for the last.
const SETS: usize = 4;

/// `y = x / sqrt(mean(x^2) + eps) * weight` for every row of `weight.len()`, `x` and `y` `[T, D]`.
///
/// With `D = head_dim` and `T` tokens times heads it is the query and key norm of Qwen3.
///
/// # Panics
/// If `x` is not whole rows or `y` is not of its length.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    let width = weight.len();
    assert!(width > 0 && x.len().is_multiple_of(width), "x of {} elements is not [T, {width}]", x.len());
    assert_eq!(x.len(), y.len(), "y is not of x's shape");
    parallel::for_rows(y, width, row_work(width), |first, y| {
        normalise_rows(&x[first * width..][..y.len()], weight, eps, y);
    });
}

/// `x += y`, then [`rms_norm`] of the new `x` into `out`: `x`, `y` and `out` are `[T, D]`.
///
/// # Panics
/// As [`rms_norm`].
pub fn add_rms_norm(x: &mut [f32], y: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    assert!(width > 0 && x.len().is_multiple_of(width), "x of {} elements is not [T, {width}]", x.len());
    assert_eq!((y.len(), out.len()), (x.len(), x.len()), "y and the result are of x's shape");
    let x = Disjoint::new(x);
    parallel::for_rows(out, width, row_work(width), |first, out| {
        // SAFETY: runs of rows do not overlap.
        let x = unsafe { x.part(first * width..first * width + out.len()) };
        for (x, y) in x.iter_mut().zip(&y[first * width..]) {
            *x += y;
        }
        normalise_rows(x, weight, eps, out);
    });
}

/// Multiply-adds that a row costs, about: memory, and a square root and a division that wait for all of it.
pub(crate) fn row_work(width: usize) -> usize {
    8 * width + 1024
}

multiversion! {
    fn normalise_rows(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) = normalise_rows_body;
}

#[inline(always)]
fn normalise_rows_body<I: Isa>(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    for (x, y) in x.chunks_exact(weight.len()).zip(y.chunks_exact_mut(weight.len())) {
        let scale = inverse_rms::<I>(x, eps);
        // Whole vectors by name: what is short and of unknown length is not worth a vector to the compiler.
        let scales = I::Lanes::splat(scale);
        let (y, last_y) = y.as_chunks_mut::<LANES>();
        let [(x, last_x), (weight, last_weight)] = [x, weight].map(|row| row.as_chunks::<LANES>());
        for ((y, x), weight) in y.iter_mut().zip(x).zip(weight) {
            I::Lanes::load(x).mul(scales).mul(I::Lanes::load(weight)).store(y);
        }
        for ((y, x), weight) in last_y.iter_mut().zip(last_x).zip(last_weight) {
            *y = x * scale * weight;
        }
    }
}

/// `1 / sqrt(mean(x^2) + eps)` of a row.
#[inline(always)]
pub(crate) fn inverse_rms<I: Isa>(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_of_products::<I, 2>([x, x]) / x.len() as f32 + eps).sqrt()
}

/// `sum_i a_i b_i ...` of `N` equally long rows: element `i` goes to lane `i % 64`, sets of 16 lanes are added up in
/// order, then the lanes.
#[inline(always)]
fn sum_of_products<I: Isa, const N: usize>(rows: [&[f32]; N]) -> f32 {
    let parts = rows.map(|row| row.as_chunks::<LANES>());
    let n = parts[0].0.len();
    let whole = parts.map(|(whole, _)| &whole[..n]);
    let mut sums = [I::Lanes::splat(0.0); SETS];
    let mut start = 0;
    while start + SETS <= n {
        for (set, sum) in sums.iter_mut().enumerate() {
            *sum = add_products::<I, N>(whole.map(|row| &row[start + set]), *sum);
        }
        start += SETS;
    }
    for (set, sum) in sums.iter_mut().enumerate() {
        if start + set < n {
            *sum = add_products::<I, N>(whole.map(|row| &row[start + set]), *sum);
        }
    }
    let n_last = parts[0].1.len();
    if n_last > 0 {
        let last = parts.map(|(_, rest)| padded(rest));
        sums[n - start] = add_products::<I, N>(last.each_ref(), sums[n - start]);
    }
    let [first, rest @ ..] = sums;
    let mut lanes = [0.0; LANES];
    rest.into_iter().fold(first, |sum, set| sum.add(set)).store(&mut lanes);
    sum_lanes(lanes)
}

/// Adds the product of all rows to `sum`.
#[inline(always)]
fn add_products<I: Isa, const N: usize>(rows: [&[f32; LANES]; N], sum: I::Lanes) -> I::Lanes {
    let mut factors = I::Lanes::load(rows[0]);
    for row in &rows[1..N - 1] {
        factors = factors.mul(I::Lanes::load(row));
    }
    factors.mul_add(I::Lanes::load(rows[N - 1]), sum)
}

/// The operands of a [`rms_norm`] whose gradients are wanted.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm<'a> {
    /// `[T, D]`.
    pub x: &'a [f32],
    /// `[D]`.
    pub weight: &'a [f32],
    /// As in the forward.
    pub eps: f32,
}

/// Columns whose weight gradients stay in registers while all rows pass by.
const RUN: usize = 64;

impl RmsNorm<'_> {
    /// Gradients from `grad` `[T, D]`: of `x`, written to `x_grad` `[T, D]` or, with `onto`, added to it; of the weight,
    /// added to `weight_grad` `[D]`, where every element is one chain over the rows, which goes on from call to call.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn backward(&self, grad: &[f32], onto: bool, x_grad: &mut [f32], weight_grad: &mut [f32]) {
        let width = self.weight.len();
        assert_eq!([self.x.len(), x_grad.len()], [grad.len(); 2], "x and its gradient have the shape of y");
        assert_eq!(weight_grad.len(), width, "the weight's gradient is [D]");
        let mut scales = Scratch::<f32>::take(grad.len() / width);
        let scale_parts = Disjoint::new(&mut scales);
        parallel::for_rows(x_grad, width, row_work(width), |first, x_grad| {
            let rows = first * width..first * width + x_grad.len();
            let operands = RmsNorm { x: &self.x[rows.clone()], ..*self };
            // SAFETY: runs of rows do not overlap.
            let scales = unsafe { scale_parts.part(first..first + x_grad.len() / width) };
            backward_rows(&operands, &grad[rows], onto, (x_grad, scales));
        });
        let n_runs = width.div_ceil(RUN);
        let weight_parts = Disjoint::new(weight_grad);
        parallel::for_each(n_runs, 2 * grad.len(), |run| {
            let columns = run * RUN..width.min((run + 1) * RUN);
            // SAFETY: runs of columns do not overlap.
            let out = unsafe { weight_parts.part(columns.clone()) };
            add_weight_gradient((self.x, grad), &scales, (columns.start, width), out);
        });
    }
}

multiversion! {
    fn backward_rows(
        operands: &RmsNorm<'_>, grad: &[f32], onto: bool, out: (&mut [f32], &mut [f32]),
    ) = backward_rows_body;
}

/// With `r = 1 / sqrt(mean(x^2) + eps)`: `x_grad = r (w grad - x r^2 mean(w grad x))`. `out` is that and each row's `r`.
#[inline(always)]
fn backward_rows_body<I: Isa>(
    operands: &RmsNorm<'_>,
    grad: &[f32],
    onto: bool,
    (x_grad, scales): (&mut [f32], &mut [f32]),
) {
    let &RmsNorm { x, weight, eps } = operands;
    let width = weight.len();
    let rows = x.chunks_exact(width).zip(grad.chunks_exact(width));
    for ((x, grad), (x_grad, out)) in rows.zip(x_grad.chunks_exact_mut(width).zip(scales)) {
        let scale = inverse_rms::<I>(x, eps);
        *out = scale;
        let mean = sum_of_products::<I, 3>([weight, grad, x]) / width as f32;
        let pull = scale * scale * mean;
        let (scales, pulls) = (I::Lanes::splat(scale), I::Lanes::splat(pull));
        let (x_grad, last_x_grad) = x_grad.as_chunks_mut::<LANES>();
        let rows = [x, grad, weight].map(|row| row.as_chunks::<LANES>());
        let [(x, last_x), (grad, last_grad), (weight, last_weight)] = rows;
        for (((x_grad, x), grad), weight) in x_grad.iter_mut().zip(x).zip(grad).zip(weight) {
            let [x, grad, weight] = [x, grad, weight].map(I::Lanes::load);
            let slope = scales.mul(weight.mul(grad).sub(x.mul(pulls)));
            if onto { I::Lanes::load(x_grad).add(slope) } else { slope }.store(x_grad);
        }
        for (((x_grad, x), grad), weight) in
            last_x_grad.iter_mut().zip(last_x).zip(last_grad).zip(last_weight)
        {
            let slope = scale * (weight * grad - x * pull);
            *x_grad = if onto { *x_grad + slope } else { slope };
        }
    }
}

multiversion! {
    /// `out += sum_t x_t r_t grad_t`, row by row, for the columns from `first` on of rows of `width`.
    fn add_weight_gradient(
        operands: (&[f32], &[f32]), scales: &[f32], columns: (usize, usize), out: &mut [f32],
    ) = add_weight_gradient_body;
}

#[inline(always)]
fn add_weight_gradient_body<I: Isa>(
    (x, grad): (&[f32], &[f32]),
    scales: &[f32],
    (first, width): (usize, usize),
    out: &mut [f32],
) {
    let mut column = 0;
    // As many columns as there are registers for sums.
    while column + LANES <= out.len() {
        let (at, rest) = (first + column, &mut out[column..]);
        column += match rest.len() / LANES {
            4.. => add_columns::<I, 4>((x, grad), scales, (at, width), rest),
            2.. => add_columns::<I, 2>((x, grad), scales, (at, width), rest),
            _ => add_columns::<I, 1>((x, grad), scales, (at, width), rest),
        };
    }
    let last = first + column..first + out.len();
    for ((x, grad), &scale) in x.chunks_exact(width).zip(grad.chunks_exact(width)).zip(scales) {
        for ((sum, x), &grad) in out[column..].iter_mut().zip(&x[last.clone()]).zip(&grad[last.clone()]) {
            *sum = I::mul_add(x * scale, grad, *sum);
        }
    }
}

/// The first `16 C` columns of `out`, with the sums in registers; `16 C`.
#[inline(always)]
fn add_columns<I: Isa, const C: usize>(
    (x, grad): (&[f32], &[f32]),
    scales: &[f32],
    (first, width): (usize, usize),
    out: &mut [f32],
) -> usize {
    let (out, _) = out.as_chunks_mut::<LANES>();
    let mut sums = [I::Lanes::splat(0.0); C];
    for (sum, out) in sums.iter_mut().zip(&*out) {
        *sum = I::Lanes::load(out);
    }
    for ((x, grad), &scale) in x.chunks_exact(width).zip(grad.chunks_exact(width)).zip(scales) {
        let scale = I::Lanes::splat(scale);
        let [x, grad] = [x, grad].map(|row| row[first..first + C * LANES].as_chunks::<LANES>().0);
        for ((sum, x), grad) in sums.iter_mut().zip(x).zip(grad) {
            *sum = I::Lanes::load(x).mul(scale).mul_add(I::Lanes::load(grad), *sum);
        }
    }
    for (sum, out) in sums.into_iter().zip(out) {
        sum.store(out);
    }
    C * LANES
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    use super::*;

    fn wave(n: usize, seed: f32) -> Vec<f32> {
        (0..n).map(|i| ((i as f32 + seed) * 1.7).sin() * 3.0).collect()
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|x| x.to_bits()).collect()
    }

    #[test]
    fn a_row_of_threes_and_fours_is_that_by_hand() {
        let mut y = [0.0; 2];
        rms_norm(&[3.0, 4.0], &[1.0, 2.0], 0.0, &mut y);
        let rms = 12.5_f32.sqrt();
        assert!((y[0] - 3.0 / rms).abs() < 1e-6 && (y[1] - 8.0 / rms).abs() < 1e-6);
        rms_norm(&[0.0, 0.0], &[1.0, 2.0], 1e-6, &mut y);
        assert_eq!(y, [0.0, 0.0]);
    }

    proptest! {
        #[test]
        fn rows_are_those_of_f64(width in 1_usize..300, n_rows in 0_usize..5, seed in 0.0_f32..100.0) {
            let (x, weight) = (wave(n_rows * width, seed), wave(width, seed + 0.5));
            let mut y = vec![f32::NAN; x.len()];
            rms_norm(&x, &weight, 1e-5, &mut y);
            for (x, y) in x.chunks(width).zip(y.chunks(width)) {
                let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / width as f64;
                for i in 0..width {
                    let want = f64::from(x[i]) / (mean + f64::from(1e-5_f32)).sqrt() * f64::from(weight[i]);
                    prop_assert!((f64::from(y[i]) - want).abs() < 1e-6 + 1e-6 * want.abs());
                }
            }
        }

        #[test]
        fn a_row_is_the_same_alone_and_among_others(width in 1_usize..300, n_rows in 1_usize..40) {
            let (x, weight) = (wave(n_rows * width, 0.0), wave(width, 9.0));
            let mut y = vec![0.0; x.len()];
            rms_norm(&x, &weight, 1e-6, &mut y);
            for (x, y) in x.chunks(width).zip(y.chunks(width)) {
                let mut alone = vec![0.0; width];
                rms_norm(x, &weight, 1e-6, &mut alone);
                prop_assert_eq!(bits(&alone), bits(y));
            }
        }
    }

    #[test]
    fn adding_on_the_way_gives_the_bits_of_adding_before() {
        let (x, y, weight) = (wave(6 * 40, 0.0), wave(6 * 40, 5.0), wave(40, 9.0));
        let sums: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        let mut expected = vec![0.0; x.len()];
        rms_norm(&sums, &weight, 1e-6, &mut expected);
        let (mut added, mut out) = (x, vec![f32::NAN; sums.len()]);
        add_rms_norm(&mut added, &y, &weight, 1e-6, &mut out);
        assert_eq!((added, out), (sums, expected));
    }

    /// The same formula in candle's own operations, whose gradient is candle's; more columns than one run.
    #[test]
    fn the_gradients_are_those_of_candle() {
        for (n_rows, width) in [(1, 1), (5, 67), (131, 16), (40, 2 * RUN)] {
            let (x, weight, pull) = (wave(n_rows * width, 0.0), wave(width, 3.0), wave(n_rows * width, 7.0));
            let tensor = |values: &[f32]| {
                Var::from_slice(values, (values.len() / width, width), &Device::Cpu).unwrap()
            };
            let (x_var, weight_var) = (tensor(&x), tensor(&weight));
            let mean = x_var.sqr().unwrap().mean_keepdim(1).unwrap();
            let rms = (mean + 1e-5).unwrap().sqrt().unwrap();
            let y = x_var.broadcast_div(&rms).unwrap().broadcast_mul(&weight_var).unwrap();
            let store = (y * tensor(&pull).as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
            let candles = [x_var, weight_var].map(|var| -> Vec<f32> {
                store.get(&var).unwrap().flatten_all().unwrap().to_vec1().unwrap()
            });
            for onto in [false, true] {
                let (mut x_grad, mut weight_grad) =
                    (vec![if onto { 1.0 } else { f32::NAN }; x.len()], vec![2.0; width]);
                RmsNorm { x: &x, weight: &weight, eps: 1e-5 }.backward(
                    &pull,
                    onto,
                    &mut x_grad,
                    &mut weight_grad,
                );
                let before = [f32::from(u8::from(onto)), 2.0];
                for ((ours, candles), before) in [x_grad, weight_grad].iter().zip(&candles).zip(before) {
                    for (ours, candles) in ours.iter().zip(candles) {
                        let expected = before + candles;
                        assert!((ours - expected).abs() < 2e-5 * (1.0 + candles.abs()), "{ours} {expected}");
                    }
                }
            }
        }
    }

    proptest! {
        #[test]
        fn the_weights_gradient_is_one_chain_over_rows(width in 1_usize..200, n_rows in 0_usize..40, cut in 0_usize..40) {
            let (x, weight, pull) = (wave(n_rows * width, 0.0), wave(width, 3.0), wave(n_rows * width, 7.0));
            let run = |rows: std::ops::Range<usize>, weight_grad: &mut [f32]| {
                let rows = rows.start * width..rows.end * width;
                let mut x_grad = vec![f32::NAN; rows.len()];
                let norm = RmsNorm { x: &x[rows.clone()], weight: &weight, eps: 1e-5 };
                norm.backward(&pull[rows], false, &mut x_grad, weight_grad);
                x_grad
            };
            let (mut whole, mut parts, cut) = (wave(width, 1.0), wave(width, 1.0), cut.min(n_rows));
            let x_grad = run(0..n_rows, &mut whole);
            prop_assert_eq!([run(0..cut, &mut parts), run(cut..n_rows, &mut parts)].concat(), x_grad);
            prop_assert_eq!(bits(&parts), bits(&whole));
        }
    }

    #[test]
    fn gradients_do_not_depend_on_threads() {
        let (n_rows, width) = (500, 300);
        let (x, weight, pull) = (wave(n_rows * width, 0.0), wave(width, 3.0), wave(n_rows * width, 7.0));
        let run = || {
            let (mut x_grad, mut weight_grad) = (vec![0.0; x.len()], vec![0.0; width]);
            RmsNorm { x: &x, weight: &weight, eps: 1e-5 }.backward(
                &pull,
                false,
                &mut x_grad,
                &mut weight_grad,
            );
            (bits(&x_grad), bits(&weight_grad))
        };
        assert_eq!(crate::testing::in_pool(1, run), crate::testing::in_pool(2, run));
    }
}
