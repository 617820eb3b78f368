//! Log-probabilities of chosen tokens and entropies of their distributions, in nats.
//!
//! Two passes over a row of logits: the maximum, then the sum of exponentials over blocks of 1 024 tokens. Block
//! sums are added up in order in f64, so the error does not grow with the vocabulary.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

use crate::candle_io::{f32_slice, with_f32};
use crate::exp::exp;
use crate::isa::{Isa, multiversion, sum_lanes};
use crate::parallel;
use crate::softmax::{exp_sum, max};

const LANES: usize = 16;
/// Tokens whose exponentials are summed up in f32: 64 per lane.
const BLOCK: usize = 1024;
/// Multiply-adds that one `exp` of a row costs, about.
const EXP_WORK: usize = 12;

/// `ln softmax(logits / temperature)` of each row's target: `logits` `[T, V]`, `targets` and `logprobs` `[T]`.
///
/// # Panics
/// If the shapes do not fit, a target is not below `V`, or `temperature` is not positive and finite.
pub fn chosen_logprobs(logits: &[f32], targets: &[u32], temperature: f32, logprobs: &mut [f32]) {
    assert_eq!(targets.len(), logprobs.len(), "one logprob per target");
    let vocab = logits.len() / targets.len().max(1);
    assert_eq!(logits.len(), vocab * targets.len(), "logits are not [{}, V]", targets.len());
    for (t, &target) in targets.iter().enumerate() {
        assert!((target as usize) < vocab, "target {target} of token {t} is not below {vocab}");
    }
    let scale = inverse(temperature);
    parallel::for_rows(logprobs, 1, EXP_WORK * vocab, |first, logprobs| {
        let targets = &targets[first..][..logprobs.len()];
        logprob_rows(&logits[first * vocab..][..logprobs.len() * vocab], targets, scale, logprobs);
    });
}

fn inverse(temperature: f32) -> f32 {
    let scale = 1.0 / temperature;
    assert!(temperature > 0.0 && temperature.is_finite() && scale.is_finite(), "temperature {temperature}");
    scale
}

multiversion! {
    fn logprob_rows(logits: &[f32], targets: &[u32], scale: f32, logprobs: &mut [f32]) = logprob_rows_body;
}

#[inline(always)]
fn logprob_rows_body<I: Isa>(logits: &[f32], targets: &[u32], scale: f32, logprobs: &mut [f32]) {
    let rows = logits.chunks_exact(logits.len() / targets.len());
    for ((row, &target), logprob) in rows.zip(targets).zip(logprobs) {
        let highest = max(row);
        let sum: f64 = row.chunks(BLOCK).map(|block| f64::from(exp_sum::<I>(block, highest, scale))).sum();
        *logprob = (f64::from(scale * (row[target as usize] - highest)) - sum.ln()) as f32;
    }
}

/// Entropy of `softmax(logits / temperature)` of each row: `logits` `[T, V]`, `out` `[T]`. Tokens of logit `-inf`
/// count nothing.
///
/// # Panics
/// If the shapes do not fit, or `temperature` is not positive and finite.
pub fn entropies(logits: &[f32], vocab: usize, temperature: f32, out: &mut [f32]) {
    assert_eq!(logits.len(), vocab * out.len(), "logits are not [{}, {vocab}]", out.len());
    let scale = inverse(temperature);
    parallel::for_rows(out, 1, EXP_WORK * vocab, |first, out| {
        entropy_rows(&logits[first * vocab..][..out.len() * vocab], scale, out);
    });
}

multiversion! {
    fn entropy_rows(logits: &[f32], scale: f32, out: &mut [f32]) = entropy_rows_body;
}

/// With `z = (x - max) / temperature` and `S = sum e^z` it is `ln S - sum(z e^z) / S`.
#[inline(always)]
fn entropy_rows_body<I: Isa>(logits: &[f32], scale: f32, out: &mut [f32]) {
    for (row, entropy) in logits.chunks_exact(logits.len() / out.len()).zip(out) {
        let highest = max(row);
        let (mut sum, mut moment) = (0.0, 0.0);
        for block in row.chunks(BLOCK) {
            let (block_sum, block_moment) = exp_moments::<I>(block, highest, scale);
            sum += f64::from(block_sum);
            moment += f64::from(block_moment);
        }
        *entropy = (sum.ln() - moment / sum) as f32;
    }
}

/// `sum e^z` and `sum z e^z` of a block.
#[inline(always)]
fn exp_moments<I: Isa>(block: &[f32], highest: f32, scale: f32) -> (f32, f32) {
    let (mut sums, mut moments) = ([0.0; LANES], [0.0; LANES]);
    for chunk in block.chunks(LANES) {
        for ((sum, moment), &x) in sums.iter_mut().zip(&mut moments).zip(chunk) {
            let z = scale * (x - highest);
            let e = exp::<I>(z);
            *sum += e;
            *moment += if e == 0.0 { 0.0 } else { z * e }; // `-inf * 0` would be NaN.
        }
    }
    (sum_lanes(sums), sum_lanes(moments))
}

/// [`chosen_logprobs`] of `logits` `[T, V]` as a differentiable `[T]`.
///
/// # Errors
/// If `logits` is not f32 on the CPU, or not one row per target.
///
/// # Panics
/// If a target is not below `V`, or `temperature` is not positive and finite.
pub fn chosen_logprobs_op(logits: &Tensor, targets: Arc<[u32]>, temperature: f32) -> Result<Tensor> {
    if logits.dims2()?.0 != targets.len() {
        candle_core::bail!("logits of {:?} for {} targets", logits.shape(), targets.len());
    }
    logits.contiguous()?.apply_op1(ChosenLogprobs { targets, temperature })
}

struct ChosenLogprobs {
    targets: Arc<[u32]>,
    temperature: f32,
}

impl CustomOp1 for ChosenLogprobs {
    fn name(&self) -> &'static str {
        "chosen-logprobs"
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let mut logprobs = vec![0.0; self.targets.len()];
        chosen_logprobs(f32_slice(logits, layout)?, &self.targets, self.temperature, &mut logprobs);
        Ok((CpuStorage::F32(logprobs), Shape::from(self.targets.len())))
    }

    fn bwd(&self, logits: &Tensor, logprobs: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let mut out = vec![0.0; logits.elem_count()];
        with_f32(logits, |logits| {
            with_f32(logprobs, |logprobs| {
                with_f32(grad, |grad| {
                    self.backward(logits, (logprobs, grad), &mut out);
                    Ok(())
                })
            })
        })?;
        Tensor::from_vec(out, logits.shape(), logits.device()).map(Some)
    }
}

impl ChosenLogprobs {
    fn backward(&self, logits: &[f32], (logprobs, grad): (&[f32], &[f32]), out: &mut [f32]) {
        let scale = inverse(self.temperature);
        let vocab = logits.len() / self.targets.len().max(1);
        parallel::for_rows(out, vocab, EXP_WORK * vocab, |first, out| {
            for (i, out) in out.chunks_exact_mut(vocab).enumerate() {
                let t = first + i;
                let chosen = Chosen { target: self.targets[t] as usize, logprob: logprobs[t], grad: grad[t] };
                backward_row(&logits[t * vocab..][..vocab], &chosen, scale, out);
            }
        });
    }
}

/// What a row's gradient depends on besides its logits.
struct Chosen {
    target: usize,
    logprob: f32,
    grad: f32,
}

multiversion! {
    fn backward_row(logits: &[f32], chosen: &Chosen, scale: f32, out: &mut [f32]) = backward_row_body;
}

/// `grad / temperature * (1[j = target] - p_j)`, where `ln p_j` is the target's logprob plus the difference of the
/// scaled logits: one pass.
#[inline(always)]
fn backward_row_body<I: Isa>(logits: &[f32], chosen: &Chosen, scale: f32, out: &mut [f32]) {
    let &Chosen { target, logprob, grad } = chosen;
    let from = logits[target];
    let pull = grad * scale;
    for (out, &x) in out.iter_mut().zip(logits) {
        *out = -pull * exp::<I>(I::mul_add(scale, x - from, logprob));
    }
    out[target] += pull;
}

#[cfg(test)]
mod tests {
    use candle_core::{D, Device, Var};
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    use super::*;

    fn wave(n: usize, size: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 1.7).sin() * size).collect()
    }

    fn logprobs_of(logits: &[f32], targets: &[u32], temperature: f32) -> Vec<f32> {
        let mut out = vec![f32::NAN; targets.len()];
        chosen_logprobs(logits, targets, temperature, &mut out);
        out
    }

    fn entropies_of(logits: &[f32], vocab: usize, temperature: f32) -> Vec<f32> {
        let mut out = vec![f32::NAN; logits.len() / vocab];
        entropies(logits, vocab, temperature, &mut out);
        out
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|x| x.to_bits()).collect()
    }

    /// Logits `0.6 ln [1, 3, 4]` at temperature 0.6 are the probabilities 1/8, 3/8, 4/8.
    #[test]
    fn at_temperature_six_tenths_the_probabilities_are_those_by_hand() {
        let logits: Vec<f32> = [1.0_f32, 3.0, 4.0].map(|p| 0.6 * p.ln()).repeat(3);
        let got = logprobs_of(&logits, &[0, 1, 2], 0.6);
        for (got, p) in got.into_iter().zip([0.125_f32, 0.375, 0.5]) {
            assert!((got - p.ln()).abs() < 1e-6, "{got} is not ln {p}");
        }
        let entropy = -(0.125 * 0.125_f32.ln() + 0.375 * 0.375_f32.ln() + 0.5 * 0.5_f32.ln());
        assert!((entropies_of(&logits, 3, 0.6)[2] - entropy).abs() < 1e-6);
    }

    #[test]
    fn the_entropy_of_a_uniform_row_is_the_logarithm_of_its_length() {
        for vocab in [1, 2, 17, 5_000, 151_936] {
            let want = (vocab as f32).ln();
            assert!((entropies_of(&vec![0.7; vocab], vocab, 0.8)[0] - want).abs() <= 1e-6 * want);
            let logprob = logprobs_of(&vec![0.7; vocab], &[0], 0.8)[0];
            assert!((logprob + want).abs() <= 1e-6 * want);
        }
    }

    #[test]
    fn tokens_cut_off_count_nothing_and_nan_is_not_hidden() {
        let cut = [1.0, f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY];
        assert!((entropies_of(&cut, 4, 1.0)[0] - 2_f32.ln()).abs() < 1e-6);
        assert_eq!(logprobs_of(&cut, &[1], 1.0), [f32::NEG_INFINITY]);
        let mut broken = wave(100, 1.0);
        broken[77] = f32::NAN;
        assert!(logprobs_of(&broken, &[3], 1.0)[0].is_nan() && entropies_of(&broken, 100, 1.0)[0].is_nan());
    }

    proptest! {
        #[test]
        fn rows_are_those_of_f64(vocab in 1_usize..3_000, target in 0_usize..3_000, temperature in 0.05_f32..3.0) {
            let target = target % vocab;
            let logits = wave(vocab, 8.0);
            let z: Vec<f64> = logits.iter().map(|&x| f64::from(x) / f64::from(temperature)).collect();
            let total = z.iter().map(|z| z.exp()).sum::<f64>();
            let want = z[target] - total.ln();
            let got = f64::from(logprobs_of(&logits, &[target as u32], temperature)[0]);
            prop_assert!((got - want).abs() < 1e-6 * (1.0 + want.abs()), "{} {}", got, want);
            let want = total.ln() - z.iter().map(|z| z.exp() * z).sum::<f64>() / total;
            let got = f64::from(entropies_of(&logits, vocab, temperature)[0]);
            prop_assert!((got - want).abs() < 1e-5 * (1.0 + want.abs()), "{} {}", got, want);
        }

        #[test]
        fn a_token_is_scored_the_same_alone_and_among_others(vocab in 1_usize..2_000, n_tokens in 1_usize..60) {
            let logits = wave(vocab * n_tokens, 5.0);
            let targets: Vec<u32> = (0..n_tokens).map(|t| (t * 31 % vocab) as u32).collect();
            let (logprobs, entropy) = (logprobs_of(&logits, &targets, 0.9), entropies_of(&logits, vocab, 0.9));
            for (t, row) in logits.chunks(vocab).enumerate() {
                prop_assert_eq!(bits(&logprobs[t..=t]), bits(&logprobs_of(row, &targets[t..=t], 0.9)));
                prop_assert_eq!(bits(&entropy[t..=t]), bits(&entropies_of(row, vocab, 0.9)));
            }
        }
    }

    #[test]
    fn a_target_past_the_vocabulary_is_named() {
        let panic = std::panic::catch_unwind(|| logprobs_of(&[0.0; 6], &[0, 3], 1.0)).unwrap_err();
        assert_eq!(*panic.downcast::<String>().unwrap(), "target 3 of token 1 is not below 3");
        assert!(std::panic::catch_unwind(|| logprobs_of(&[0.0; 6], &[0, 2], 0.0)).is_err());
    }

    #[test]
    fn the_op_has_the_bits_of_the_function_and_the_gradient_of_candle() {
        let (n_tokens, vocab, temperature) = (5, 37, 0.6);
        let targets: Arc<[u32]> = Arc::from([0, 36, 7, 7, 20]);
        let logits = Var::from_vec(wave(n_tokens * vocab, 4.0), (n_tokens, vocab), &Device::Cpu).unwrap();
        let ours = chosen_logprobs_op(&logits, targets.clone(), temperature).unwrap();
        let want = logprobs_of(&wave(n_tokens * vocab, 4.0), &targets, temperature);
        assert_eq!(bits(&ours.to_vec1().unwrap()), bits(&want));

        let z = (&*logits / f64::from(temperature)).unwrap();
        let total = z.exp().unwrap().sum_keepdim(D::Minus1).unwrap().log().unwrap();
        let index = Tensor::from_slice(&targets, (n_tokens, 1), &Device::Cpu).unwrap();
        let naive = z.broadcast_sub(&total).unwrap().gather(&index, 1).unwrap().squeeze(1).unwrap();
        let pull = Tensor::from_slice(&[1.0_f32, -2.0, 0.5, 3.0, 0.0], n_tokens, &Device::Cpu).unwrap();
        let grad = |logprobs: Tensor| -> Vec<f32> {
            let grads = (logprobs * &pull).unwrap().sum_all().unwrap().backward().unwrap();
            grads.get(&logits).unwrap().flatten_all().unwrap().to_vec1().unwrap()
        };
        for (ours, naive) in grad(ours).into_iter().zip(grad(naive)) {
            assert!((ours - naive).abs() < 5e-6, "{ours} {naive}");
        }
        assert!(chosen_logprobs_op(&logits, Arc::from([0]), temperature).is_err());
    }
}
