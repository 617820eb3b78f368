//! Products of plain f32 matrices, for backward passes: same kernels, same guarantees.

use super::Grid;
use super::kernel::{Job, LANES, Line, run_f32, run_f32_transposed};
use crate::parallel::{self, Disjoint};

/// The left operand of a product.
#[derive(Clone, Copy)]
pub(crate) enum Left<'a> {
    /// `[m, k]`.
    Plain(&'a [f32]),
    /// `[k, m]`, to be read as its transpose.
    Transposed(&'a [f32]),
}

/// `out = a b`: `a` is `[m, k]`, `b` `[k, n]`, `out` `[m, n]`, overwritten whole. Every element is one chain over
/// `k`, whatever the threads.
///
/// # Panics
/// If the shapes do not fit.
pub(crate) fn product(a: Left<'_>, b: &[f32], n: usize, out: &mut [f32]) {
    multiply((a, b), n, false, out);
}

/// `out += a b`: [`product`], with every chain going on from what `out` holds. So the product of matrices that are cut
/// along `k` has the bits of that of the whole.
///
/// # Panics
/// If the shapes do not fit.
pub(crate) fn add_product(a: Left<'_>, b: &[f32], n: usize, out: &mut [f32]) {
    multiply((a, b), n, true, out);
}

fn multiply((a, b): (Left<'_>, &[f32]), n: usize, onto: bool, out: &mut [f32]) {
    let (Left::Plain(x) | Left::Transposed(x)) = a;
    let (m, k) = (out.len() / n, b.len() / n);
    assert_eq!(out.len(), m * n, "the product has rows of {n}");
    assert_eq!((b.len(), x.len()), (k * n, m * k), "operands are [{m}, {k}] and [{k}, {n}]");
    if k == 0 {
        if !onto {
            out.fill(0.0);
        }
        return;
    }
    let lines = pack(b, n, k);
    let n_tasks = parallel::task_count(out.len() * k);
    let grid = Grid::new(m, n.div_ceil(LANES), n_tasks);
    let job = Job { x, lines: &lines, depth: k, n, bias: None, onto, y: Disjoint::new(out), then: &[] };
    let kernel = match a {
        Left::Plain(_) => run_f32,
        Left::Transposed(_) => run_f32_transposed,
    };
    grid.for_each(n_tasks > 1, |tile| kernel(&job, tile));
}

/// `b` `[k, n]` as panels of columns: unlike weights, its rows already lie along the lanes.
fn pack(b: &[f32], n: usize, k: usize) -> Vec<Line<f32>> {
    let mut lines = vec![Line::default(); n.div_ceil(LANES) * k];
    parallel::for_rows(&mut lines, k, LANES * k, |first, lines| {
        for (panel, lines) in (first..).zip(lines.chunks_exact_mut(k)) {
            let columns = panel * LANES..n.min((panel + 1) * LANES);
            for (line, row) in lines.iter_mut().zip(b.chunks_exact(n)) {
                line.0[..columns.len()].copy_from_slice(&row[columns.clone()]);
            }
        }
    });
    lines
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{Strategy, prop_assert_eq, prop_oneof, proptest};

    use super::*;
    use crate::isa;
    use crate::testing::{bits, in_pool, noise};

    #[test]
    fn transposes_and_empty_sums_multiply_as_on_paper() {
        let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, -1.0, 0.5, 2.0]);
        let mut out = [f32::NAN; 6];
        product(Left::Transposed(&a), &b, 2, &mut out);
        assert_eq!(out, [3.0, 7.0, 4.5, 8.0, 6.0, 9.0]);
        product(Left::Plain(&a), &b, 2, &mut out);
        assert_eq!(out, [2.0, 3.0, 5.0, 5.0, 8.0, 7.0]);
        product(Left::Transposed(&[]), &[], 2, &mut out);
        assert_eq!(out, [0.0; 6]);
    }

    /// Rows, depth and columns; the last are deep enough to be cut.
    fn shape() -> impl Strategy<Value = (usize, usize, usize)> {
        prop_oneof![
            4 => (0_usize..20, 0_usize..60, 1_usize..150),
            1 => (1_usize..6, 1000_usize..3000, 1_usize..90),
            1 => (100_usize..150, 60_usize..80, 100_usize..150),
        ]
    }

    proptest! {
        #[test]
        fn a_product_is_one_chain_over_k((m, k, n) in shape()) {
            let (a, b) = (noise(m * k, 1), noise(k * n, 2));
            let transposed: Vec<f32> = (0..k * m).map(|i| a[i % m * k + i / m]).collect();
            let fused = isa::level() != isa::Level::Baseline || isa::BASELINE_FMA;
            let chain = |row: usize, column: usize| {
                (0..k).fold(0.0_f32, |sum, i| {
                    let (a, b) = (a[row * k + i], b[i * n + column]);
                    if fused { a.mul_add(b, sum) } else { sum + a * b }
                })
            };
            let expected: Vec<f32> = (0..m * n).map(|i| chain(i / n, i % n)).collect();
            for (threads, a) in [(1, Left::Plain(&a)), (2, Left::Plain(&a)), (2, Left::Transposed(&transposed))] {
                let mut out = vec![f32::NAN; m * n];
                in_pool(threads, || product(a, &b, n, &mut out));
                prop_assert_eq!(bits(&out), bits(&expected));
            }
        }
    }
}
