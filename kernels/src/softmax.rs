//! The parts of a softmax that router, attention and logprobs share.
//!
//! One reduction order, fixed by the row's length: element `i` goes to lane `i % 16`, and [`sum_lanes`] adds up
//! the lanes. NaN anywhere in a row makes its sum NaN: nothing here may hide a diverged model.

use crate::exp::exp;
use crate::isa::{Isa, fold_lanes, sum_lanes};

const LANES: usize = 16;

/// Largest number of `row`, NaN skipped; `-inf` if there is none.
#[inline(always)]
pub(crate) fn max(row: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, value);
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(rest) {
        *lane = larger(*lane, value);
    }
    fold_lanes(lanes, larger)
}

/// Sum of `exp(scale * (x - max))` over `row`.
#[inline(always)]
pub(crate) fn exp_sum<I: Isa>(row: &[f32], max: f32, scale: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane += exp::<I>(scale * (value - max));
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(rest) {
        *lane += exp::<I>(scale * (value - max));
    }
    sum_lanes(lanes)
}

/// Replaces every `x` of `row` by `exp(x - max)` and returns their sum: the bits of [`exp_sum`] at scale 1.
#[inline(always)]
pub(crate) fn exp_in_place<I: Isa>(row: &mut [f32], max: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (chunks, rest) = row.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *value = exp::<I>(*value - max);
            *lane += *value;
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *value = exp::<I>(*value - max);
        *lane += *value;
    }
    sum_lanes(lanes)
}

#[cfg(test)]
mod tests {
    use super::{LANES, exp_in_place, exp_sum, max};
    use crate::isa::Baseline;

    #[test]
    fn the_maximum_skips_nan_and_finds_every_position() {
        for len in 2..3 * LANES {
            for at in 0..len {
                let mut row = vec![-3.0; len];
                row[(at + 1) % len] = f32::NAN;
                row[at] = 2.0;
                assert_eq!(max(&row), 2.0);
            }
        }
        assert_eq!(max(&[]), f32::NEG_INFINITY);
    }

    #[test]
    fn summing_and_exponentiating_in_place_give_the_same_bits() {
        for len in 0..3 * LANES {
            let row: Vec<f32> = (0..len).map(|i| (i as f32 * 0.7).sin()).collect();
            let top = max(&row);
            let mut exps = row.clone();
            let sum = exp_in_place::<Baseline>(&mut exps, top);
            assert_eq!(sum.to_bits(), exp_sum::<Baseline>(&row, top, 1.0).to_bits());
            let want: f64 = row.iter().map(|&x| (f64::from(x) - f64::from(top)).exp()).sum();
            assert!(len == 0 || (f64::from(sum) / want - 1.0).abs() < 1e-6);
        }
    }

    #[test]
    fn nan_reaches_the_sum() {
        for at in 0..2 * LANES {
            let mut row = vec![0.5; 2 * LANES];
            row[at] = f32::NAN;
            assert!(exp_sum::<Baseline>(&row, 0.5, 1.0).is_nan());
        }
    }
}
