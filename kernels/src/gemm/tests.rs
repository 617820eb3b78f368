//! Tests of packing and products, against plain loops.

use candle_core::{Device, Tensor, Var};
use half::bf16;
use proptest::prelude::{Just, Strategy, prop_assert, prop_assert_eq, prop_oneof, proptest};
use proptest::test_runner::TestCaseResult;

use super::kernel::{COLUMNS, Line, run_bf16, run_f32, run_f32_body, run_widened, run_widened_body};
use super::linear::Linear;
use super::*;
use crate::isa::{self, Baseline};
#[cfg(target_arch = "x86_64")]
use crate::isa::{Avx2, Level, level};
use crate::testing::{bits, in_pool, noise};
use crate::weight_gradient::WeightGradient;

fn rounded(values: &[f32]) -> Vec<f32> {
    values.iter().map(|&x| bf16::from_f32(x).to_f32()).collect()
}

/// Plain sums in f64, with the sum of magnitudes that bounds the rounding error.
fn naive(x: &[f32], w: &[f32], k: usize, bias: Option<&[f32]>) -> Vec<(f64, f64)> {
    let dot = |x: &[f32], w: &[f32], bias: f32| {
        let products = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w));
        let bias = f64::from(bias);
        products.fold((bias, bias.abs()), |(sum, size), p| (sum + p, size + p.abs()))
    };
    let row =
        |x| w.chunks_exact(k).enumerate().map(move |(n, w)| dot(x, w, bias.map_or(0.0, |bias| bias[n])));
    x.chunks_exact(k).flat_map(row).collect()
}

fn dtype() -> impl Strategy<Value = Dtype> {
    prop_oneof![Just(Dtype::F32), Just(Dtype::Bf16)]
}

/// Rows, columns and depth; now and then large enough to be split over threads, or cut along the depth.
fn shape() -> impl Strategy<Value = (usize, usize, usize)> {
    prop_oneof![
        4 => (0_usize..20, 1_usize..150, 1_usize..70),
        1 => (1_usize..300, 100_usize..200, 60_usize..80),
        1 => (1_usize..4, 600_usize..1400, 500_usize..700),
        1 => (1_usize..12, 1_usize..70, 2000_usize..4200),
    ]
}

fn product(x: &[f32], w: &PackedMatrix, bias: Option<&[f32]>) -> Vec<f32> {
    let mut y = vec![f32::NAN; x.len() / w.k() * w.n()];
    matmul(x, w, bias, &mut y);
    y
}

fn check_product((t, n, k): (usize, usize, usize), dtype: Dtype, with_bias: bool) -> TestCaseResult {
    let (x, w, bias) = (noise(t * k, 1), noise(n * k, 2), noise(n, 3));
    let bias = with_bias.then_some(bias.as_slice());
    let y = product(&x, &PackedMatrix::pack(&w, n, k, dtype), bias);
    let expected = match dtype {
        Dtype::F32 => naive(&x, &w, k, bias),
        Dtype::Bf16 => naive(&rounded(&x), &rounded(&w), k, bias),
    };
    for (&y, (exact, size)) in y.iter().zip(expected) {
        prop_assert!((f64::from(y) - exact).abs() <= 1e-6 * size, "{y}, not {exact}");
    }
    Ok(())
}

proptest! {
    #[test]
    fn a_product_is_that_of_plain_loops(shape in shape(), dtype in dtype(), with_bias: bool) {
        check_product(shape, dtype, with_bias)?;
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_in_any_batch((t, n, k) in shape(), dtype in dtype(), with_bias: bool) {
        let (x, bias) = (noise(t * k, 1), noise(n, 3));
        let bias = with_bias.then_some(bias.as_slice());
        let w = PackedMatrix::pack(&noise(n * k, 2), n, k, dtype);
        let y = in_pool(2, || product(&x, &w, bias));
        prop_assert_eq!(bits(&y), bits(&in_pool(1, || product(&x, &w, bias))));
        for (x, y) in x.chunks_exact(k).zip(y.chunks_exact(n)) {
            prop_assert_eq!(bits(&product(x, &w, bias)), bits(y));
        }
        let part = t / 2 * k;
        prop_assert_eq!(bits(&product(&x[part..], &w, bias)), bits(&y[t / 2 * n..]));
    }

    #[test]
    fn an_f32_product_is_one_chain_over_k((t, n, k) in shape()) {
        let (x, w) = (noise(t * k, 1), noise(n * k, 2));
        let fused = isa::level() != isa::Level::Baseline || isa::BASELINE_FMA;
        let y = product(&x, &PackedMatrix::pack(&w, n, k, Dtype::F32), None);
        for (x, y) in x.chunks_exact(k).zip(y.chunks_exact(n)) {
            for (w, y) in w.chunks_exact(k).zip(y) {
                let add = |sum: f32, (x, w): (&f32, &f32)| if fused { w.mul_add(*x, sum) } else { sum + w * x };
                prop_assert_eq!(x.iter().zip(w).fold(0.0, add).to_bits(), y.to_bits());
            }
        }
    }

    #[test]
    fn packing_keeps_every_value(n in 1_usize..70, before in 1_usize..70, k in 1_usize..40, dtype in dtype()) {
        let w = match dtype {
            Dtype::F32 => noise(n * k, 1),
            Dtype::Bf16 => rounded(&noise(n * k, 1)),
        };
        let bytes = PackedMatrix::pack(&w, n, k, dtype).bytes();
        let mut packed = PackedMatrix::pack(&noise(before * k, 2), before, k, dtype);
        packed.repack(&w);
        let mut row = vec![f32::NAN; k];
        for (i, expected) in w.chunks_exact(k).enumerate() {
            packed.unpack_row(i, &mut row);
            prop_assert_eq!(bits(&row), bits(expected));
        }
        prop_assert_eq!((packed.n(), packed.k(), packed.dtype(), packed.bytes()), (n, k, dtype, bytes));
    }

    #[test]
    fn bf16_is_close_to_f32((t, n, k) in shape()) {
        let (x, w) = (noise(t * k, 1), noise(n * k, 2));
        let y = product(&x, &PackedMatrix::pack(&w, n, k, Dtype::Bf16), None);
        // Rounding moves either operand by at most 2^-8 of itself.
        for (&y, (exact, size)) in y.iter().zip(naive(&x, &w, k, None)) {
            prop_assert!((f64::from(y) - exact).abs() <= size * 0.00785, "{y}, not {exact}");
        }
    }

    #[test]
    fn every_grid_covers_a_product_once_and_evenly(n_rows in 0_usize..400, n_panels in 1_usize..60, n_tasks in 1_usize..70) {
        let grid = Grid::new(n_rows, n_panels, n_tasks);
        let mut seen = vec![0; n_rows * n_panels];
        for index in 0..grid.len() {
            let tile = grid.tile(index);
            prop_assert!(!tile.rows.is_empty() && !tile.panels.is_empty());
            for row in tile.rows {
                tile.panels.clone().for_each(|panel| seen[row * n_panels + panel] += 1);
            }
        }
        prop_assert!(seen.iter().all(|&times| times == 1));
        let widths = (0..grid.len()).map(|index| grid.tile(index).panels.len());
        let uneven = widths.clone().max().unwrap_or(0) - widths.min().unwrap_or(0);
        prop_assert!(uneven <= 1 || n_rows <= 2, "a thread waits for {uneven} panels");
    }
}

/// Every way this machine can compute a tile of an f32 product; those with FMA come first.
fn f32_kernels() -> Vec<Kernel<f32>> {
    let mut kernels: Vec<Kernel<f32>> = vec![run_f32, run_f32_body::<Baseline>];
    #[cfg(target_arch = "x86_64")]
    if level() != Level::Baseline {
        kernels.insert(0, run_f32_body::<Avx2>);
    }
    kernels
}

/// The same for bf16.
fn bf16_kernels() -> Vec<Kernel<u32>> {
    let mut kernels: Vec<Kernel<u32>> = vec![run_bf16, run_widened, run_widened_body::<Baseline>];
    #[cfg(target_arch = "x86_64")]
    if level() != Level::Baseline {
        kernels.push(run_widened_body::<Avx2>);
    }
    kernels
}

type Kernel<W> = fn(&Job<'_, W>, &Tile);

/// The whole product by one kernel, in one tile.
fn by<W>(kernel: Kernel<W>, x: &[W], lines: &[Line<W>], (t, n): (usize, usize)) -> Vec<f32> {
    let mut y = vec![f32::NAN; t * n];
    let n_panels = n.div_ceil(COLUMNS);
    let (depth, y_parts) = (lines.len() / n_panels, Disjoint::new(&mut y));
    let job = Job { x, blocked: false, lines, depth, n, bias: None, onto: false, y: y_parts, then: &[] };
    kernel(&job, &Tile { rows: 0..t, panels: 0..n_panels });
    y
}

/// Of a product in two parts along `K`, the second on top of the first; the first takes whole words.
fn by_parts<W: Copy>(kernel: Kernel<W>, parts: [(&[W], &[Line<W>]); 2], (t, n): (usize, usize)) -> Vec<f32> {
    let mut y = vec![f32::NAN; t * n];
    let n_panels = n.div_ceil(COLUMNS);
    for (onto, (x, lines)) in [false, true].into_iter().zip(parts) {
        let (depth, y) = (lines.len() / n_panels, Disjoint::new(&mut y));
        let job = Job { x, blocked: false, lines, depth, n, bias: None, onto, y, then: &[] };
        kernel(&job, &Tile { rows: 0..t, panels: 0..n_panels });
    }
    y
}

#[test]
fn every_instruction_set_goes_on_where_it_stopped() {
    for (t, n, k, cut) in [(1, 300, 64, 2), (3, 130, 33, 32), (15, 70, 41, 6), (9, 64, 1200, 1100)] {
        let (x, w) = (noise(t * k, 1), noise(n * k, 2));
        let columns = |values: &[f32], columns: std::ops::Range<usize>| -> Vec<f32> {
            values.chunks(k).flat_map(|row| row[columns.clone()].to_vec()).collect()
        };
        let spans = [0..k, 0..cut, cut..k];
        let [x, x_first, x_rest] = spans.clone().map(|span| columns(&x, span));
        let pack = |dtype| {
            spans
                .clone()
                .map(|span| PackedMatrix::pack(&columns(&w, span.clone()), n, span.len(), dtype).panels)
        };
        let [Panels::F32(whole), Panels::F32(first), Panels::F32(rest)] = pack(Dtype::F32) else {
            panic!("not f32")
        };
        for kernel in f32_kernels() {
            let parts = [(&x_first[..], &first[..]), (&x_rest[..], &rest[..])];
            assert_eq!(bits(&by_parts(kernel, parts, (t, n))), bits(&by(kernel, &x, &whole, (t, n))));
        }
        let [Panels::Bf16(whole), Panels::Bf16(first), Panels::Bf16(rest)] = pack(Dtype::Bf16) else {
            panic!("not bf16")
        };
        let [x, x_first, x_rest] = [(&x, k), (&x_first, cut), (&x_rest, k - cut)].map(|(x, k)| {
            let mut pairs = vec![0; t * k.div_ceil(2)];
            round_rows(x, k, &mut pairs);
            pairs
        });
        for kernel in bf16_kernels() {
            let parts = [(&x_first[..], &first[..]), (&x_rest[..], &rest[..])];
            assert_eq!(bits(&by_parts(kernel, parts, (t, n))), bits(&by(kernel, &x, &whole, (t, n))));
        }
    }
}

#[test]
fn instruction_sets_agree() {
    for (t, n, k) in [(1, 300, 64), (2, 130, 33), (15, 70, 40), (9, 64, 128), (4, 16, 1)] {
        let (x, w) = (noise(t * k, 1), noise(n * k, 2));
        let expected = naive(&x, &w, k, None);
        let Panels::F32(lines) = PackedMatrix::pack(&w, n, k, Dtype::F32).panels else { panic!("not f32") };
        let results: Vec<_> =
            f32_kernels().into_iter().map(|kernel| by(kernel, &x, &lines, (t, n))).collect();
        for (y, (exact, size)) in results.iter().flat_map(|y| y.iter().zip(&expected)) {
            assert!((f64::from(*y) - exact).abs() <= 1e-6 * size, "{y}, not {exact}");
        }
        if results.len() > 2 {
            assert_eq!(bits(&results[0]), bits(&results[1]), "AVX2 and AVX-512 round alike");
        }

        let expected = naive(&rounded(&x), &rounded(&w), k, None);
        let Panels::Bf16(lines) = PackedMatrix::pack(&w, n, k, Dtype::Bf16).panels else {
            panic!("not bf16")
        };
        let mut pairs = vec![0; t * k.div_ceil(2)];
        round_rows(&x, k, &mut pairs);
        for kernel in bf16_kernels() {
            for (y, (exact, size)) in by(kernel, &pairs, &lines, (t, n)).into_iter().zip(&expected) {
                assert!((f64::from(y) - exact).abs() <= 1e-6 * size, "{y}, not {exact}");
            }
        }
    }
}

/// Gradients of `sum(y * upstream)` for `y = x Wᵀ`, each added to ones.
fn gradients((t, n, k): (usize, usize, usize), dtype: Dtype) -> [Vec<f32>; 2] {
    let (x, w, upstream) = (noise(t * k, 1), noise(n * k, 2), noise(t * n, 3));
    let linear = Linear { x: &x, w: &w, k, dtype, lengths: &[t] };
    let (mut x_grad, mut w_grad) = (vec![1.0; t * k], vec![1.0; n * k]);
    linear.x_gradient(&upstream, true, &mut x_grad);
    linear.add_w_gradient(&upstream, WeightGradient::Whole(&mut w_grad));
    let mut replaced = vec![f32::NAN; t * k];
    linear.x_gradient(&upstream, false, &mut replaced);
    assert!(replaced.iter().zip(&x_grad).all(|(replaced, onto)| (replaced + 1.0 - onto).abs() < 1e-4));
    [x_grad, w_grad]
}

#[test]
fn gradients_are_those_of_candle() {
    let (t, n, k) = (13, 21, 10);
    let x = Var::from_vec(noise(t * k, 1), (t, k), &Device::Cpu).unwrap();
    let w = Var::from_vec(noise(n * k, 2), (n, k), &Device::Cpu).unwrap();
    let upstream = Tensor::from_vec(noise(t * n, 3), (t, n), &Device::Cpu).unwrap();
    let store =
        (x.matmul(&w.t().unwrap()).unwrap() * &upstream).unwrap().sum_all().unwrap().backward().unwrap();
    let candles =
        [&x, &w].map(|var| store.get(var).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap());
    for (dtype, tolerance) in [(Dtype::F32, 1e-4), (Dtype::Bf16, 0.03)] {
        let ours = gradients((t, n, k), dtype);
        for (ours, candles) in ours.iter().flatten().zip(candles.iter().flatten()) {
            assert!((ours - 1.0 - candles).abs() <= tolerance, "{dtype}: {ours}, not 1 and {candles}");
        }
    }
}

#[test]
fn gradients_are_the_same_on_one_thread_and_on_two() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let run = || gradients((130, 96, 160), dtype).map(|gradient| bits(&gradient));
        assert_eq!(in_pool(1, run), in_pool(2, run));
    }
}
