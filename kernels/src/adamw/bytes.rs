//! AdamW whose moments take a byte each instead of four.
//!
//! As in 8-bit optimisers (arXiv 2110.02861), elements share a scale, that of the largest of a block, and steps are computed
//! in f32. A byte holds a small float of its share of the scale. Of the mean, that is a sign, four bits of exponent and three
//! of mantissa; of the mean square its root, which has no sign and half as many octaves, with four of each. Shares reach down to `2^-15.9`.
//!
//! Numbers are rounded up or down at random, in proportion to what is nearer, so that a mean which moves by less than a
//! step of its code still moves, on average as far as it should. A root that is not 0 never becomes 0: what divides by it
//! would be out of all proportion. What is random is a hash of the element and of [`ByteMoments::update`]'s `seed`, and is the same on
//! any threads.

use super::{AdamwStep, ELEMENT_WORK, Rates, update_element};
use crate::isa::{Isa, multiversion};
use crate::parallel::{self, Disjoint};

/// Elements that share a scale.
pub const BLOCK: usize = 256;

/// Numbers of a tensor, a byte each.
#[derive(Clone, Debug, PartialEq)]
pub struct Bytes {
    /// One per element.
    pub codes: Vec<u8>,
    /// One per block of [`BLOCK`] elements: the largest magnitude.
    pub scales: Vec<f32>,
}

impl Bytes {
    fn zeros(len: usize) -> Self {
        Self { codes: vec![0; len], scales: vec![0.0; len.div_ceil(BLOCK)] }
    }
}

/// The moments of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct ByteMoments {
    /// Running mean of the gradient.
    pub mean: Bytes,
    /// Root of the running mean of its square.
    pub root: Bytes,
}

impl ByteMoments {
    /// Those of `len` elements before the first step.
    #[must_use]
    pub fn zeros(len: usize) -> Self {
        Self { mean: Bytes::zeros(len), root: Bytes::zeros(len) }
    }

    /// One step of [`adamw`](super::adamw) on `param`, of the moments that are stored; new ones are rounded by `seed`, which
    /// should be another in every step and for every tensor.
    ///
    /// # Panics
    /// If lengths differ or `step.step` is 0.
    pub fn update(&mut self, param: &mut [f32], grad: &[f32], step: &AdamwStep, seed: u64) {
        let (n, n_blocks) = (param.len(), param.len().div_ceil(BLOCK));
        let Self { mean, root } = self;
        assert_eq!(
            [grad.len(), mean.codes.len(), root.codes.len()],
            [n; 3],
            "moments have a code for each element"
        );
        assert_eq!([mean.scales.len(), root.scales.len()], [n_blocks; 2], "and a scale for each block");
        assert!(step.step > 0, "steps count from 1");
        let (rates, seed) = (Rates::of(step), mixed(seed as u32 ^ mixed((seed >> 32) as u32)));
        let run = n_blocks.div_ceil(parallel::task_count(n * 2 * ELEMENT_WORK)).max(1);
        let n_runs = n_blocks.div_ceil(run);
        let params = Disjoint::new(param);
        let [mean, root] =
            [mean, root].map(|Bytes { codes, scales }| (Disjoint::new(codes), Disjoint::new(scales)));
        parallel::spread(n_runs, n_runs > 1, |task| {
            let blocks = task * run..n_blocks.min((task + 1) * run);
            let elements = blocks.start * BLOCK..n.min(blocks.end * BLOCK);
            // SAFETY: runs of different tasks do not overlap.
            let param = unsafe { params.part(elements.clone()) };
            // SAFETY: as above.
            let mean_codes = unsafe { mean.0.part(elements.clone()) };
            // SAFETY: as above.
            let mean_scales = unsafe { mean.1.part(blocks.clone()) };
            // SAFETY: as above.
            let root_codes = unsafe { root.0.part(elements.clone()) };
            // SAFETY: as above.
            let root_scales = unsafe { root.1.part(blocks) };
            let moments = [(mean_codes, mean_scales), (root_codes, root_scales)];
            update(
                param,
                &grad[elements.clone()],
                moments,
                &Run { rates: &rates, seed, first: elements.start },
            );
        });
    }
}

/// What the elements of a task have in common.
struct Run<'a> {
    rates: &'a Rates,
    seed: u32,
    /// Number of the first element, a multiple of [`BLOCK`].
    first: usize,
}

multiversion! {
    fn update(param: &mut [f32], grad: &[f32], moments: [Stored<'_>; 2], run: &Run<'_>) = update_body;
}

/// Codes and scales.
type Stored<'a> = (&'a mut [u8], &'a mut [f32]);

#[inline(always)]
fn update_body<I: Isa>(param: &mut [f32], grad: &[f32], [mean, root]: [Stored<'_>; 2], run: &Run<'_>) {
    let blocks = param.chunks_mut(BLOCK).zip(grad.chunks(BLOCK));
    let means = mean.0.chunks_mut(BLOCK).zip(mean.1);
    let roots = root.0.chunks_mut(BLOCK).zip(root.1);
    for (index, (((param, grad), mean), root)) in blocks.zip(means).zip(roots).enumerate() {
        let (mut new_means, mut new_roots) = ([0.0; BLOCK], [0.0; BLOCK]);
        let (mean_unit, root_unit) = (MEAN.unit(*mean.1), ROOT.unit(*root.1));
        let stored = mean.0.iter().zip(root.0.iter()).zip(new_means.iter_mut().zip(&mut new_roots));
        for ((param, &grad), ((mean, root), (new_mean, new_root))) in param.iter_mut().zip(grad).zip(stored) {
            let mean = mean_unit * MEAN.decode_signed(*mean);
            let root = root_unit * ROOT.decode(u32::from(*root));
            let (mean, square) = update_element::<I>(param, grad, (mean, root * root), run.rates);
            (*new_mean, *new_root) = (mean, square.sqrt());
        }
        let number = (run.first + index * BLOCK) as u32;
        *mean.1 = largest(&new_means);
        *root.1 = largest(&new_roots);
        let (of_mean, of_root) = (MEAN.per_unit(*mean.1), ROOT.per_unit(*root.1));
        let new = new_means.iter().zip(&new_roots).zip(number..);
        for ((mean, root), ((new_mean, new_root), number)) in mean.0.iter_mut().zip(root.0).zip(new) {
            let noise = mixed(number ^ run.seed);
            *mean = MEAN.encode_signed(of_mean * new_mean, noise);
            let code = ROOT.encode(of_root * new_root, mixed(noise));
            *root = code.max(u32::from(*new_root > 0.0)) as u8;
        }
    }
}

/// The largest magnitude. Those of numbers are ordered as their bits.
#[inline(always)]
fn largest(values: &[f32; BLOCK]) -> f32 {
    let largest = values.iter().map(|value| value.to_bits() & 0x7fff_ffff).fold(0, u32::max);
    f32::from_bits(largest)
}

/// Thirty-two bits of which each depends on all of `x`: two rounds of shifting and multiplying.
#[inline(always)]
fn mixed(mut x: u32) -> u32 {
    x = (x ^ (x >> 16)).wrapping_mul(0x21f0_aaad);
    x = (x ^ (x >> 15)).wrapping_mul(0x735a_2d97);
    x ^ (x >> 15)
}

/// Small floats without a sign: 0, and the f32 whose upper bits are `base + 1` to `base + max`, their lower `shift` bits
/// being 0.
#[derive(Clone, Copy)]
struct Format {
    shift: u32,
    base: u32,
    max: u32,
}

/// Three bits of mantissa.
const MEAN: Format = Format { shift: 20, base: 0x380, max: 0x7f };
/// Four.
const ROOT: Format = Format { shift: 19, base: 0x700, max: 0xff };

impl Format {
    #[inline(always)]
    const fn decode(self, code: u32) -> f32 {
        if code == 0 { 0.0 } else { f32::from_bits((code + self.base) << self.shift) }
    }

    /// The code above or below `x`, which is not negative: above if `noise`, of 32 bits, is large enough.
    #[inline(always)]
    fn encode(self, x: f32, noise: u32) -> u32 {
        let (noise, least) = (noise >> (32 - self.shift), self.decode(1));
        let share = noise as f32 / (1_u32 << self.shift) as f32;
        // From the least on, a code is linear in the bits. What is rounded up beyond the greatest is the greatest.
        let rounded = ((x.to_bits() + noise) >> self.shift).wrapping_sub(self.base).min(self.max);
        if x < least { u32::from(x > share * least) } else { rounded }
    }

    #[inline(always)]
    fn decode_signed(self, code: u8) -> f32 {
        let magnitude = self.decode(u32::from(code & 0x7f));
        if code > 0x7f { -magnitude } else { magnitude }
    }

    #[inline(always)]
    fn encode_signed(self, x: f32, noise: u32) -> u8 {
        (self.encode(x.abs(), noise) | ((x.to_bits() >> 31) << 7)) as u8
    }

    /// What a decoded number is multiplied with in a block of `scale`.
    #[inline(always)]
    fn unit(self, scale: f32) -> f32 {
        scale / self.decode(self.max)
    }

    /// What a number is multiplied with before it is encoded; 0 where the largest is so small that its share cannot be told.
    #[inline(always)]
    fn per_unit(self, scale: f32) -> f32 {
        if scale > 1e-36 { self.decode(self.max) / scale } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

    use super::*;
    use crate::adamw::adamw;
    use crate::testing::{bits, in_pool, noise};

    const STEP: AdamwStep = AdamwStep {
        lr: 0.01,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.1,
        step: 1,
        grad_scale: 1.0,
    };

    /// What is stored, as numbers.
    fn stored(moments: &ByteMoments) -> [Vec<f32>; 2] {
        let numbers =
            |Bytes { codes, scales }: &Bytes, unit: &dyn Fn(f32) -> f32, decode: &dyn Fn(u8) -> f32| {
                codes.iter().enumerate().map(|(i, &code)| unit(scales[i / BLOCK]) * decode(code)).collect()
            };
        [
            numbers(&moments.mean, &|scale| MEAN.unit(scale), &|code| MEAN.decode_signed(code)),
            numbers(&moments.root, &|scale| ROOT.unit(scale), &|code| ROOT.decode(u32::from(code))),
        ]
    }

    #[test]
    fn every_code_stands_for_itself() {
        for (format, max) in [(MEAN, 0x7f), (ROOT, 0xff)] {
            let numbers: Vec<f32> = (0..=max).map(|code| format.decode(code)).collect();
            assert!(numbers.is_sorted_by(|a, b| a < b));
            for (code, &number) in (0..).zip(&numbers) {
                for noise in [0, 1 << 31, u32::MAX] {
                    assert_eq!(format.encode(number, noise), code);
                }
            }
            assert!(numbers[1] / numbers[max as usize] < 2e-5, "15 octaves and more");
        }
        for code in 0..=u8::MAX {
            assert_eq!(MEAN.encode_signed(MEAN.decode_signed(code), 7), code);
        }
    }

    proptest! {
        #[test]
        fn the_largest_has_the_greatest_code_or_the_one_below(scale in 1e-36_f32..1e30) {
            for (format, noise) in [(MEAN, 0), (MEAN, u32::MAX), (ROOT, 0), (ROOT, u32::MAX)] {
                let code = format.encode(format.per_unit(scale) * scale, noise);
                prop_assert!(code == format.max || code == format.max - 1, "{code}");
            }
        }

        #[test]
        fn a_number_lies_between_its_codes_and_is_their_mean(x in 1e-9_f32..1.87) {
            for format in [MEAN, ROOT] {
                let codes = (0..4096_u32).map(|i| format.encode(x, (i << 20) | (1 << 19)));
                let numbers: Vec<f32> = codes.map(|code| format.decode(code)).collect();
                let [down, up] = [0, u32::MAX].map(|noise| format.decode(format.encode(x, noise)));
                let (low, high) = (down.min(up), down.max(up));
                prop_assert!(numbers.iter().all(|&number| number == low || number == high));
                let step = (format.decode(1)).max(x / f32::from(1_u8 << (23 - format.shift)));
                prop_assert!(low <= x && x <= high + step && high - low <= step, "{low} {x} {high}");
                let mean = numbers.iter().map(|&n| f64::from(n)).sum::<f64>() / 4096.0;
                prop_assert!((mean - f64::from(x)).abs() <= f64::from(step) / 1000.0, "{mean}, not {x}");
            }
        }

        #[test]
        fn a_step_is_that_of_f32_from_what_is_stored(n in 1_usize..600, seed in any::<u64>(), steps in 1_u32..4) {
            let (mut param, mut moments) = (noise(n, 1), ByteMoments::zeros(n));
            for step in 1..=steps {
                let [mut m, root] = stored(&moments);
                let mut v: Vec<f32> = root.iter().map(|root| root * root).collect();
                let mut expected = param.clone();
                let (grad, step) = (noise(n, 10 + step), AdamwStep { step: step.into(), ..STEP });
                adamw(&mut expected, &grad, &mut m, &mut v, &step);
                moments.update(&mut param, &grad, &step, seed);
                prop_assert!(param.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 1e-6));
                let [new_m, new_root] = stored(&moments);
                for i in 0..n {
                    let (mean_scale, root_scale) = (moments.mean.scales[i / BLOCK], moments.root.scales[i / BLOCK]);
                    prop_assert!((new_m[i] - m[i]).abs() <= m[i].abs() / 8.0 + mean_scale * 2e-5);
                    prop_assert!((new_root[i] - v[i].sqrt()).abs() <= v[i].sqrt() / 16.0 + root_scale * 2e-5);
                    prop_assert_eq!(new_root[i] > 0.0, v[i] > 0.0);
                }
            }
        }
    }

    #[test]
    fn a_first_step_has_the_bits_of_f32() {
        let (n, grad) = (1000, noise(1000, 2));
        let (mut whole, mut bytes, mut m, mut v) = (noise(n, 1), noise(n, 1), vec![0.0; n], vec![0.0; n]);
        adamw(&mut whole, &grad, &mut m, &mut v, &STEP);
        ByteMoments::zeros(n).update(&mut bytes, &grad, &STEP, 1);
        assert_eq!(bits(&whole), bits(&bytes));
    }

    /// A mean square that moves by a thousandth a step, which is less than any step of its code, arrives all the same.
    #[test]
    fn moments_follow_a_gradient_that_changes_slowly() {
        let n = 64 * BLOCK;
        let (mut param, mut moments) = (vec![0.0; n], ByteMoments::zeros(n));
        let (mut m, mut v, mut exact) = (vec![0.0; n], vec![0.0; n], vec![0.0; n]);
        for step in 1..=3000 {
            let size = if step < 1500 { 1.0 } else { 0.25 };
            let grad: Vec<f32> = noise(n, step).iter().map(|x| size * x).collect();
            let step = AdamwStep { step: step.into(), lr: 1e-4, ..STEP };
            adamw(&mut exact, &grad, &mut m, &mut v, &step);
            moments.update(&mut param, &grad, &step, step.step);
        }
        let mean = |values: &mut dyn Iterator<Item = f32>| values.map(f64::from).sum::<f64>() / n as f64;
        let [_, root] = stored(&moments);
        let ratio = mean(&mut root.iter().map(|root| root * root)) / mean(&mut v.iter().copied());
        assert!((ratio - 1.0).abs() < 0.05, "a mean square of {ratio} of the exact one");
        let far = mean(&mut param.iter().zip(&exact).map(|(a, b)| (a - b).powi(2))).sqrt();
        let moved = mean(&mut exact.iter().map(|x| x * x)).sqrt();
        assert!(far < 0.2 * moved, "{far} apart after moving by {moved}");
    }

    /// An element whose gradients are a hundred thousandth of its neighbours' takes steps as large as theirs, not larger.
    #[test]
    fn the_smallest_of_a_block_takes_no_giant_steps() {
        let n = BLOCK;
        let (mut param, mut moments) = (vec![0.0; n], ByteMoments::zeros(n));
        for step in 1..=500 {
            let mut grad = noise(n, step);
            grad[7] *= 1e-5;
            grad[8] *= 1e-12;
            let before = [param[7], param[8]];
            let step = AdamwStep { step: step.into(), ..STEP };
            moments.update(&mut param, &grad, &step, step.step);
            for (before, after) in before.into_iter().zip([param[7], param[8]]) {
                assert!(
                    (after - before).abs() < 10.0 * STEP.lr as f32,
                    "{before} to {after} in step {}",
                    step.step
                );
            }
        }
        assert!(param.iter().all(|x| x.is_finite()));
    }

    #[test]
    fn nothing_comes_of_nothing() {
        let (mut param, mut moments) = (vec![1.0; 300], ByteMoments::zeros(300));
        let still = AdamwStep { weight_decay: 0.0, ..STEP };
        for size in [0.0, 1e-30, 1e-44] {
            moments.update(&mut param, &[size; 300], &still, 5);
            assert!(stored(&moments).concat().iter().all(|x| x.is_finite()));
        }
        let (mut moments, mut grad) = (ByteMoments::zeros(300), [0.0; 300]);
        grad[3] = 1e-38;
        moments.update(&mut [1.0; 300], &grad, &still, 5);
        assert_eq!(stored(&moments)[0][4..], [0.0; 296], "beside a number too small to have a share");
        let (mut param, mut moments) = (vec![1.0; 300], ByteMoments::zeros(300));
        moments.update(&mut param, &[0.0; 300], &still, 5);
        assert_eq!((param, moments), (vec![1.0; 300], ByteMoments::zeros(300)));
        ByteMoments::zeros(0).update(&mut [], &[], &STEP, 0);
    }

    #[test]
    fn threads_do_not_change_bits_and_seeds_do() {
        let (n, grad) = (200_001, noise(200_001, 2));
        let run = |threads, seed| {
            let (mut param, mut moments) = (noise(n, 1), ByteMoments::zeros(n));
            in_pool(threads, || {
                for step in 1..=2 {
                    moments.update(&mut param, &grad, &AdamwStep { step, ..STEP }, seed);
                }
            });
            (bits(&param), moments)
        };
        assert!(run(1, 3) == run(2, 3));
        assert!(run(1, 3) != run(1, 4) && run(1, 3) != run(1, 3 << 32));
    }
}
