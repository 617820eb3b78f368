//! `exp` that vectorises: no calls, no branches, within 2 ulp.

use crate::isa::Isa;

/// `e^x`, within 2 ulp; 0 below -104, infinite above 88.73, NaN for NaN. Subnormal results are kept.
///
/// `x = n ln 2 + r` with `n` whole and `|r| <= ln 2 / 2`; a polynomial in `r`, times `2^n` in two factors so that
/// neither overflows before the product does. The minimax coefficients are those of Cephes' `expf`.
#[inline(always)]
pub(crate) fn exp<I: Isa>(x: f32) -> f32 {
    // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 = HIGH + LOW; HIGH has 9 trailing zero bits, so that `n * HIGH` is exact even without FMA.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;

    // Written as comparisons, not `clamp`, to compile to one instruction each and let NaN through.
    let x = if x < -105.0 { -105.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let shifted = I::mul_add(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = I::mul_add(n, -LN2_LOW, I::mul_add(n, -LN2_HIGH, x));

    let mut p = 1.987_569_1e-4;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = I::mul_add(p, r, coefficient);
    }
    let p = I::mul_add(p, r * r, r) + 1.0;
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// `2^n` for `-126 <= n <= 127`.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) << 23) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::multiversion;

    multiversion! {
        fn exps(x: &mut [f32]) = exps_body;
    }

    #[inline(always)]
    fn exps_body<I: Isa>(x: &mut [f32]) {
        for x in x {
            *x = exp::<I>(*x);
        }
    }

    fn check(body: fn(&mut [f32])) {
        let inputs: Vec<f32> = (-1_040_000..=887_000).step_by(7).map(|i| i as f32 * 1e-4).collect();
        let mut results = inputs.clone();
        body(&mut results);
        for (&x, &y) in inputs.iter().zip(&results) {
            let exact = f64::from(x).exp();
            let ulp = f64::from(f32::EPSILON) * exact.max(f64::from(f32::MIN_POSITIVE));
            assert!((f64::from(y) - exact).abs() <= 2.0 * ulp, "exp({x}) = {y:e}, not {exact:e}");
        }
        let mut edges = [0.0, -0.0, -200.0, f32::NEG_INFINITY, 88.8, f32::INFINITY, f32::NAN];
        body(&mut edges);
        assert_eq!(edges[..6], [1.0, 1.0, 0.0, 0.0, f32::INFINITY, f32::INFINITY]);
        assert!(edges[6].is_nan());
    }

    #[test]
    fn exp_is_within_two_ulp_and_exact_at_the_edges() {
        check(exps);
        check(exps_body::<crate::isa::Baseline>);
    }
}
