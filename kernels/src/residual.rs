//! Sums of the residual stream.

use crate::parallel;

/// `out += x`, of one length.
///
/// # Panics
/// If the lengths differ.
pub fn add(x: &[f32], out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "summands have one length");
    parallel::for_rows(out, 1, 1, |first, out| {
        for (out, x) in out.iter_mut().zip(&x[first..]) {
            *out += x;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_pool, noise};

    #[test]
    fn sums_are_those_of_plain_loops_on_any_threads() {
        let (x, y) = (noise(3_000_001, 1), noise(3_000_001, 2));
        let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        for threads in [1, 2] {
            let mut onto = y.clone();
            in_pool(threads, || add(&x, &mut onto));
            assert!(onto == expected);
        }
    }
}
