//! AdamW (arXiv 1711.05101), one step in place, with PyTorch's semantics.

use crate::isa::{Isa, multiversion};
use crate::parallel::{self, Disjoint};

pub mod bytes;

/// What one element costs, in multiply-adds: a root, a division and seven reads or writes.
const ELEMENT_WORK: usize = 8;

/// Settings of one optimiser step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamwStep {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay: a step shrinks parameters by `lr * weight_decay` of themselves.
    pub weight_decay: f64,
    /// Number of this step, from 1; corrects the bias of moments that started at 0.
    pub step: u64,
    /// Multiplied into the gradient first: clipping, or the mean over devices.
    pub grad_scale: f64,
}

/// One step on `param` with gradient `grad` and moments `m` and `v`, all of one length:
///
/// ```text
/// g = grad_scale * grad
/// p = p - lr * weight_decay * p
/// m = m + (1 - beta1) * (g - m)
/// v = beta2 * v + (1 - beta2) * g * g
/// p = p - lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
/// ```
///
/// Elements do not depend on each other, so any split of a model over calls gives the same bits.
///
/// # Panics
/// If lengths differ or `step.step` is 0.
pub fn adamw(param: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32], step: &AdamwStep) {
    let n = param.len();
    assert!(
        [grad.len(), m.len(), v.len()] == [n; 3],
        "a parameter, its gradient and its moments have one length"
    );
    assert!(step.step > 0, "steps count from 1");
    let rates = Rates::of(step);
    let n_tasks = parallel::task_count(n * ELEMENT_WORK);
    if n_tasks == 1 {
        return update(param, grad, (m, v), &rates);
    }
    let run = n.div_ceil(n_tasks);
    let [params, means, squares] = [param, m, v].map(Disjoint::new);
    parallel::spread(n.div_ceil(run), true, |task| {
        let run = task * run..n.min((task + 1) * run);
        // SAFETY: runs of different tasks do not overlap.
        let param = unsafe { params.part(run.clone()) };
        // SAFETY: as above.
        let m = unsafe { means.part(run.clone()) };
        // SAFETY: as above.
        let v = unsafe { squares.part(run.clone()) };
        update(param, &grad[run], (m, v), &rates);
    });
}

/// The step's constants, computed in f64 and rounded once, as PyTorch does.
struct Rates {
    grad_scale: f32,
    /// `1 - lr * weight_decay`.
    keep: f32,
    /// `1 - beta1`.
    blend: f32,
    beta2: f32,
    /// `1 - beta2`.
    square_blend: f32,
    /// `lr / (1 - beta1^step)`.
    step_size: f32,
    /// `sqrt(1 - beta2^step)`.
    root_correction: f32,
    eps: f32,
}

impl Rates {
    fn of(step: &AdamwStep) -> Self {
        let AdamwStep { lr, beta1, beta2, eps, weight_decay, step, grad_scale } = *step;
        let n = step as f64;
        Self {
            grad_scale: grad_scale as f32,
            keep: (1.0 - lr * weight_decay) as f32,
            blend: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            square_blend: (1.0 - beta2) as f32,
            step_size: (lr / (1.0 - beta1.powf(n))) as f32,
            root_correction: (1.0 - beta2.powf(n)).sqrt() as f32,
            eps: eps as f32,
        }
    }
}

multiversion! {
    fn update(param: &mut [f32], grad: &[f32], moments: (&mut [f32], &mut [f32]), rates: &Rates) = update_body;
}

#[inline(always)]
fn update_body<I: Isa>(param: &mut [f32], grad: &[f32], (m, v): (&mut [f32], &mut [f32]), rates: &Rates) {
    for (((param, &grad), m), v) in param.iter_mut().zip(grad).zip(m).zip(v) {
        (*m, *v) = update_element::<I>(param, grad, (*m, *v), rates);
    }
}

/// The step of one element: its new moments.
#[inline(always)]
fn update_element<I: Isa>(param: &mut f32, grad: f32, (m, v): (f32, f32), rates: &Rates) -> (f32, f32) {
    let grad = rates.grad_scale * grad;
    let m = I::mul_add(rates.blend, grad - m, m);
    let v = I::mul_add(rates.square_blend * grad, grad, rates.beta2 * v);
    let denominator = v.sqrt() / rates.root_correction + rates.eps;
    *param = I::mul_add(-rates.step_size, m / denominator, rates.keep * *param);
    (m, v)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert, proptest};

    use super::*;
    use crate::testing::{bits, in_pool, noise};

    const STEP: AdamwStep = AdamwStep {
        lr: 0.1,
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-8,
        weight_decay: 0.5,
        step: 1,
        grad_scale: 1.0,
    };

    #[test]
    fn two_steps_are_those_by_hand() {
        let step = AdamwStep { beta1: 0.5, beta2: 0.75, ..STEP };
        let (mut p, mut m, mut v) = ([1.0_f32], [0.0], [0.0]);
        // m = 0.5 * 2, v = 0.25 * 4; corrected by 1 - 0.5 and 1 - 0.75 to 2 and 4: p = 1 - 0.05 - 0.1 * 2 / 2.
        adamw(&mut p, &[2.0], &mut m, &mut v, &step);
        assert!((p[0] - 0.85).abs() < 1e-6, "{}", p[0]);
        assert_eq!((m[0], v[0]), (1.0, 1.0));
        // m = 0.5 * 1 + 0.5 * 3, v = 0.75 * 1 + 0.25 * 9; corrected by 1 - 0.25 and 1 - 0.5625 to 2.666667 and
        // 6.857143, whose root is 2.618615: p = 0.85 * 0.95 - 0.1 * 2.666667 / 2.618615.
        adamw(&mut p, &[3.0], &mut m, &mut v, &AdamwStep { step: 2, ..step });
        assert!((p[0] - 0.705_665).abs() < 1e-6, "{}", p[0]);
        assert_eq!((m[0], v[0]), (2.0, 3.0));
    }

    #[test]
    fn what_a_beta_leaves_is_rounded_once() {
        let (mut p, mut m, mut v) = ([1.0], [0.0], [0.0]);
        adamw(&mut p, &[1.0], &mut m, &mut v, &AdamwStep { beta2: 0.999, ..STEP });
        // 1 - 0.999 taken in f32 would be 0.00099998713.
        assert_eq!((m[0], v[0]), (0.1, 0.001));
    }

    #[test]
    fn the_gradient_is_scaled_first() {
        let run = |grad: f32, grad_scale: f64| {
            let (mut p, mut m, mut v) = ([1.0], [0.5], [0.25]);
            adamw(&mut p, &[grad], &mut m, &mut v, &AdamwStep { grad_scale, ..STEP });
            [p, m, v]
        };
        assert_eq!(run(8.0, 0.25), run(2.0, 1.0));
        assert_ne!(run(8.0, 0.25), run(8.0, 1.0));
    }

    proptest! {
        #[test]
        fn a_step_is_that_of_f64(n in 0_usize..70, step in 1_u64..1000) {
            let (mut p, grad, mut m) = (noise(n, 1), noise(n, 2), noise(n, 3));
            let mut v: Vec<f32> = noise(n, 4).iter().map(|x| x * x).collect();
            let (old_p, old_m, old_v) = (p.clone(), m.clone(), v.clone());
            let step = AdamwStep { step, ..STEP };
            adamw(&mut p, &grad, &mut m, &mut v, &step);
            let power = step.step as f64;
            for i in 0..n {
                let [old_p, grad, old_m, old_v] = [old_p[i], grad[i], old_m[i], old_v[i]].map(f64::from);
                let expected_m = 0.9 * old_m + 0.1 * grad;
                let expected_v = 0.99 * old_v + 0.01 * grad * grad;
                let corrected = (expected_v / (1.0 - 0.99_f64.powf(power))).sqrt() + 1e-8;
                let expected_p = old_p * 0.95 - 0.1 * expected_m / (1.0 - 0.9_f64.powf(power)) / corrected;
                for (got, expected) in [(m[i], expected_m), (v[i], expected_v), (p[i], expected_p)] {
                    prop_assert!((f64::from(got) - expected).abs() <= 1e-5 * (1.0 + expected.abs()));
                }
            }
        }
    }

    #[test]
    fn threads_and_splits_do_not_change_bits() {
        let n = 200_001;
        let run = |threads, split: usize| {
            let (mut p, grad, mut m, mut v) = (noise(n, 1), noise(n, 2), vec![0.0; n], vec![0.0; n]);
            in_pool(threads, || {
                for start in (0..n).step_by(split) {
                    let part = start..n.min(start + split);
                    let (m, v) = (&mut m[part.clone()], &mut v[part.clone()]);
                    adamw(&mut p[part.clone()], &grad[part], m, v, &STEP);
                }
            });
            [bits(&p), bits(&m), bits(&v)]
        };
        let whole = run(1, n);
        assert!(whole == run(2, n) && whole == run(2, 777));
    }
}
