//! Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"), one step in place: the momentum of a
//! matrix, made nearly orthogonal, with the scale and the decay of Moonlight (arXiv 2502.16982, equation 4).

use crate::gemm::Dtype;
use crate::gemm::gradient::{Left, PlainProduct, Right};
use crate::parallel::{self, Disjoint};
use crate::scratch::Scratch;

/// Settings of one optimiser step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MuonStep {
    /// Learning rate; that of AdamW does, since updates are as large as AdamW's.
    pub lr: f64,
    /// Decay of the running sum of gradients.
    pub momentum: f64,
    /// Whether the step looks ahead by one more decay (Nesterov).
    pub nesterov: bool,
    /// Newton-Schulz iterations; 5 bring singular values to about 0.7 to 1.2.
    pub iterations: usize,
    /// Decoupled decay: a step shrinks parameters by `lr * weight_decay` of themselves.
    pub weight_decay: f64,
    /// Multiplied into the gradient first: clipping, or the mean over devices.
    pub grad_scale: f64,
}

/// Of the iteration `X = a X + (b A + c A^2) X` with `A = X Xᵀ`: steepest at 0 among those that stay near 1.
const NEWTON_SCHULZ: [f32; 3] = [3.4445, -4.7750, 2.0315];

/// Root mean square of a typical AdamW update, which updates are scaled to.
const ADAMW_RMS: f64 = 0.2;

/// One step on the matrices of `param`, each `[rows, cols]`, with gradient `grad` and running sum `sum`:
///
/// ```text
/// g = grad_scale * grad
/// s = momentum * s + g
/// u = g + momentum * s, or s without Nesterov
/// p = p - lr * weight_decay * p - lr * 0.2 sqrt(max(rows, cols)) * orthogonal(u)
/// ```
///
/// Matrices do not depend on each other, and threads do not show.
///
/// # Panics
/// If lengths differ or are not whole matrices.
pub fn muon(param: &mut [f32], grad: &[f32], sum: &mut [f32], (rows, cols): (usize, usize), step: &MuonStep) {
    let (n, len) = (param.len(), rows * cols);
    assert_eq!([grad.len(), sum.len()], [n; 2], "a parameter, its gradient and its sum have one length");
    assert!(len > 0 && n.is_multiple_of(len), "{n} elements are no matrices of [{rows}, {cols}]");
    let n_tasks = if n == len { parallel::task_count(len * rows.min(cols)) } else { 1 };
    let rate = (step.lr * ADAMW_RMS * (rows.max(cols) as f64).sqrt()) as f32;
    let keep = (1.0 - step.lr * step.weight_decay) as f32;
    let [params, sums] = [param, sum].map(Disjoint::new);
    parallel::spread(n / len, true, |matrix| {
        let matrix = matrix * len..(matrix + 1) * len;
        // SAFETY: each task has a matrix of its own.
        let param = unsafe { params.part(matrix.clone()) };
        // SAFETY: as above.
        let sum = unsafe { sums.part(matrix.clone()) };
        let mut direction = Scratch::take(len);
        add_to_sum(&grad[matrix], sum, step, &mut direction);
        orthogonalise(&mut direction, (rows, cols), step.iterations, n_tasks);
        for (param, direction) in param.iter_mut().zip(&*direction) {
            *param = keep * *param - rate * direction;
        }
    });
}

/// Adds a gradient to its running sum, and says where to go.
fn add_to_sum(grad: &[f32], sum: &mut [f32], step: &MuonStep, direction: &mut [f32]) {
    let (scale, decay) = (step.grad_scale as f32, step.momentum as f32);
    for ((direction, sum), grad) in direction.iter_mut().zip(sum).zip(grad) {
        let grad = scale * grad;
        *sum = decay * *sum + grad;
        *direction = if step.nesterov { grad + decay * *sum } else { *sum };
    }
}

/// Takes a matrix to the nearest one with orthonormal rows or columns, about; zeros stay.
fn orthogonalise(matrix: &mut [f32], (rows, cols): (usize, usize), iterations: usize, n_tasks: usize) {
    let norm = matrix.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
    if norm == 0.0 {
        return;
    }
    // Upright, so that the products are of the short side.
    let (long, short) = (rows.max(cols), rows.min(cols));
    let upright = |at: usize| if rows >= cols { at } else { at % cols * rows + at / cols };
    let [mut x, mut next] = [(); 2].map(|()| Scratch::<f32>::take(rows * cols));
    let [mut square, mut polynomial] = [(); 2].map(|()| Scratch::<f32>::take(short * short));
    for (at, &value) in matrix.iter().enumerate() {
        x[upright(at)] = (f64::from(value) / norm) as f32;
    }
    let [a, b, c] = NEWTON_SCHULZ;
    for _ in 0..iterations {
        product(Left::Transposed(&x, &[long]), &x, short).run_in(n_tasks, &mut square);
        product(Left::Plain(&square), &square, short).run_in(n_tasks, &mut polynomial);
        for (polynomial, square) in polynomial.iter_mut().zip(&*square) {
            *polynomial = b * square + c * *polynomial;
        }
        for (next, x) in next.iter_mut().zip(&*x) {
            *next = a * x;
        }
        PlainProduct { onto: true, ..product(Left::Plain(&x), &polynomial, short) }
            .run_in(n_tasks, &mut next);
        std::mem::swap(&mut x, &mut next);
    }
    for (at, value) in matrix.iter_mut().enumerate() {
        *value = x[upright(at)];
    }
}

fn product<'a>(a: Left<'a>, b: &'a [f32], n: usize) -> PlainProduct<'a> {
    PlainProduct { a, b: Right::Plain(b), n, dtype: Dtype::F32, onto: false }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert, proptest};

    use super::*;
    use crate::testing::{bits, in_pool, noise};

    const STEP: MuonStep = MuonStep {
        lr: 0.1,
        momentum: 0.9,
        nesterov: true,
        iterations: 5,
        weight_decay: 0.5,
        grad_scale: 1.0,
    };

    fn transposed(matrix: &[f32], (rows, cols): (usize, usize)) -> Vec<f32> {
        (0..rows * cols).map(|at| matrix[at % rows * cols + at / rows]).collect()
    }

    /// `x (a + (b + c A) A)` with `A = Xᵀ X`, in f64 and lying as it comes: `X` is `[rows, cols]`.
    fn newton_schulz(x: &[f64], cols: usize) -> Vec<f64> {
        let rows = x.len() / cols;
        let [a, b, c] = NEWTON_SCHULZ.map(f64::from);
        let sum = |n: usize, term: &dyn Fn(usize) -> f64| (0..n).map(term).sum::<f64>();
        let square: Vec<f64> = (0..cols * cols)
            .map(|at| sum(rows, &|k| x[k * cols + at / cols] * x[k * cols + at % cols]))
            .collect();
        let fourth = |at: usize| sum(cols, &|k| square[at / cols * cols + k] * square[k * cols + at % cols]);
        let inner: Vec<f64> = (0..cols * cols).map(|at| b * square[at] + c * fourth(at)).collect();
        (0..x.len())
            .map(|at| a * x[at] + sum(cols, &|k| x[at / cols * cols + k] * inner[k * cols + at % cols]))
            .collect()
    }

    proptest! {
        #[test]
        fn two_steps_are_those_of_f64(rows in 1_usize..20, cols in 1_usize..20, n in 1_usize..4, seed in 0_u32..999) {
            let len = rows * cols;
            let mut param = noise(n * len, seed);
            let mut sum = vec![0.0; n * len];
            let (mut expected, mut momentum) = (param.iter().copied().map(f64::from).collect::<Vec<_>>(), vec![0.0; n * len]);
            for (round, nesterov) in [true, false].into_iter().enumerate() {
                let grad = noise(n * len, seed + 1 + round as u32);
                let step = MuonStep { nesterov, grad_scale: 0.5, ..STEP };
                muon(&mut param, &grad, &mut sum, (rows, cols), &step);
                for at in 0..n {
                    let part = at * len..(at + 1) * len;
                    let grad = grad[part.clone()].iter().map(|&g| 0.5 * f64::from(g));
                    let mut direction: Vec<f64> = grad.zip(&mut momentum[part.clone()]).map(|(g, s)| {
                        *s = 0.9 * *s + g;
                        if nesterov { g + 0.9 * *s } else { *s }
                    }).collect();
                    let norm = direction.iter().map(|d| d * d).sum::<f64>().sqrt();
                    direction.iter_mut().for_each(|d| *d /= norm);
                    (0..5).for_each(|_| direction = newton_schulz(&direction, cols));
                    for (p, d) in expected[part].iter_mut().zip(direction) {
                        *p = *p * 0.95 - 0.1 * 0.2 * (rows.max(cols) as f64).sqrt() * d;
                    }
                }
            }
            for (got, expected) in param.iter().zip(&expected) {
                prop_assert!((f64::from(*got) - expected).abs() < 2e-4, "{} is not {}", got, expected);
            }
        }
    }

    #[test]
    fn a_matrix_and_its_transpose_are_updated_alike() {
        let (rows, cols) = (5, 9);
        let run = |is_transposed| {
            let lie =
                |matrix: Vec<f32>| if is_transposed { transposed(&matrix, (rows, cols)) } else { matrix };
            let (mut param, mut sum) = (lie(noise(45, 1)), lie(noise(45, 3)));
            let shape = if is_transposed { (cols, rows) } else { (rows, cols) };
            muon(&mut param, &lie(noise(45, 2)), &mut sum, shape, &STEP);
            if is_transposed { transposed(&param, (cols, rows)) } else { param }
        };
        assert_eq!(bits(&run(false)), bits(&run(true)));
    }

    #[test]
    fn directions_are_nearly_orthonormal_whatever_the_gradients_scale() {
        let step = MuonStep { lr: 1.0, momentum: 0.0, weight_decay: 0.0, ..STEP };
        for scale in [1e-20_f32, 1.0, 1e20] {
            let grad: Vec<f32> = noise(8 * 64, 1).iter().map(|x| scale * x).collect();
            let (mut param, mut sum) = (vec![0.0; 8 * 64], vec![0.0; 8 * 64]);
            muon(&mut param, &grad, &mut sum, (8, 64), &step);
            for row in param.chunks_exact(64) {
                // Each of the 64 elements is scaled by 0.2 * 8.
                let length = row.iter().map(|x| x * x).sum::<f32>().sqrt() / 1.6;
                assert!((0.6..1.3).contains(&length), "a row of length {length}");
            }
        }
    }

    #[test]
    fn without_a_gradient_a_weight_only_decays() {
        let (mut param, mut sum) = (vec![2.0; 6], vec![0.0; 6]);
        muon(&mut param, &[0.0; 6], &mut sum, (2, 3), &STEP);
        assert_eq!((param, sum), (vec![1.9; 6], vec![0.0; 6]));
    }

    #[test]
    fn threads_and_neighbours_do_not_change_bits() {
        let (shape, len) = ((96, 160), 96 * 160);
        let run = |threads, whole: bool| {
            let (mut param, grad, mut sum) = (noise(2 * len, 1), noise(2 * len, 2), noise(2 * len, 3));
            in_pool(threads, || {
                let run = if whole { 2 * len } else { len };
                for part in [0..run, run..2 * len].into_iter().filter(|part| !part.is_empty()) {
                    muon(&mut param[part.clone()], &grad[part.clone()], &mut sum[part], shape, &STEP);
                }
            });
            [bits(&param), bits(&sum)]
        };
        let alone = run(1, false);
        assert!(alone == run(2, false) && alone == run(1, true) && alone == run(2, true));
    }
}
