//! `r3 bench kernels`: every op at the shapes of decoding and of training, as a share of what binds it.

use std::time::Instant;

use r3_kernels::gemm::Dtype;
use r3_kernels::team;
use serde::Serialize;

use crate::bench::Spread;
use crate::bench::machine;

mod cases;

use cases::Case;

/// How long the calls of one round take together.
const ROUND_SECONDS: f64 = 0.02;

/// What the machine can do, and what the kernels do.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KernelsBench {
    /// Rounds.
    pub rounds: usize,
    /// GFLOP/s of the machine's fastest large product.
    pub gemm_peak_gflops: Peaks,
    /// GB/s at which the machine reads memory that no cache holds.
    pub dram_gb_per_s: f64,
    /// The kernels.
    pub cases: Vec<KernelBench>,
}

/// One figure for each format.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Peaks {
    /// 32-bit floats.
    pub f32: f64,
    /// bfloat16 operands, f32 sums.
    pub bf16: f64,
}

/// One op at one shape.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KernelBench {
    /// The op.
    pub op: &'static str,
    /// Its sizes.
    pub shape: String,
    /// Format of weights, or of keys and values.
    pub dtype: &'static str,
    /// Microseconds of a call.
    pub us: Spread,
    /// GFLOP/s, of products alone; 0 where there are none.
    pub gflops: f64,
    /// GB/s of what has to be read at least; what is written is on top.
    pub gb_per_s: f64,
    /// GB/s at which the machine reads a working set of this size, wherever it lies: in a cache or in memory.
    pub read_gb_per_s: f64,
    /// What takes longer at the machine's best: `products` or `reads`.
    pub bound: &'static str,
    /// That time as a share of the median call.
    pub share: f64,
}

impl KernelsBench {
    /// A table for people.
    #[must_use]
    pub fn table(&self) -> String {
        let mut table = format!(
            "fastest product: {:.0} GFLOP/s in f32, {:.0} in bf16; memory: {:.1} GB/s\n\
             {:<18}{:<34}{:<6}{:>11}{:>10}{:>9}{:>10}{:>16}\n",
            self.gemm_peak_gflops.f32,
            self.gemm_peak_gflops.bf16,
            self.dram_gb_per_s,
            "op",
            "shape",
            "dtype",
            "us",
            "GFLOP/s",
            "GB/s",
            "possible",
            "of its bound"
        );
        for case in &self.cases {
            table += &format!(
                "{:<18}{:<34}{:<6}{:>11.2}{:>10.1}{:>9.1}{:>10.0}{:>6.0} % {:<8}\n",
                case.op,
                case.shape,
                case.dtype,
                case.us.median,
                case.gflops,
                case.gb_per_s,
                case.read_gb_per_s,
                case.share * 100.0,
                case.bound
            );
        }
        table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
    }
}

/// Names of all ops.
pub fn ops() -> impl Iterator<Item = &'static str> {
    cases::OPS.into_iter().map(|(op, _)| op)
}

/// Measures every op whose name contains `filter`.
#[must_use]
pub fn measure(filter: &str, rounds: usize) -> KernelsBench {
    let gemm_peak_gflops =
        Peaks { f32: machine::gemm_peak_gflops(Dtype::F32), bf16: machine::gemm_peak_gflops(Dtype::Bf16) };
    let mut bench = KernelsBench {
        rounds: rounds.max(1),
        gemm_peak_gflops,
        dram_gb_per_s: machine::dram_gb_per_s(),
        cases: Vec::new(),
    };
    for (op, make) in cases::OPS.into_iter().filter(|(op, _)| op.contains(filter)) {
        for case in make() {
            let measured = bench.measured(op, case);
            bench.cases.push(measured);
        }
    }
    bench
}

impl KernelsBench {
    fn measured(&self, op: &'static str, mut case: Case) -> KernelBench {
        // Threads are awake, as they are in a tick and in a pass.
        let us = team::in_team(|| timed(&mut *case.call, self.rounds));
        let (peak, dtype) = match case.dtype {
            Dtype::F32 => (self.gemm_peak_gflops.f32, "f32"),
            Dtype::Bf16 => (self.gemm_peak_gflops.bf16, "bf16"),
        };
        let read_gb_per_s = machine::read_gb_per_s(case.working_set);
        let (by_products, by_reads) = (case.flops / peak / 1e3, case.bytes / read_gb_per_s / 1e3);
        let bound = if by_products > by_reads { "products" } else { "reads" };
        KernelBench {
            op,
            shape: case.shape,
            dtype,
            us,
            gflops: case.flops / us.median / 1e3,
            gb_per_s: case.bytes / us.median / 1e3,
            read_gb_per_s,
            bound,
            share: by_products.max(by_reads) / us.median,
        }
    }
}

/// Microseconds of a call, in each round the mean of as many as fit its time.
fn timed(call: &mut (dyn FnMut() + Send), rounds: usize) -> Spread {
    call(); // Buffers grow, caches fill.
    let start = Instant::now();
    call();
    let calls = (ROUND_SECONDS / start.elapsed().as_secs_f64().max(1e-9)).clamp(1.0, 1e5) as usize;
    let round = |_| {
        let start = Instant::now();
        (0..calls).for_each(|_| call());
        start.elapsed().as_secs_f64() / calls as f64 * 1e6
    };
    Spread::of((0..rounds).map(round).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_op_is_measured_against_what_binds_it() {
        let measured = measure("norm", 2);
        assert!(measured.cases.len() >= 2 && measured.cases.iter().all(|case| case.op.contains("norm")));
        assert!(measured.gemm_peak_gflops.f32 > 0.0 && measured.dram_gb_per_s > 0.0);
        for case in &measured.cases {
            assert!(case.us.min > 0.0 && case.share > 0.0 && case.gflops == 0.0);
            assert_eq!(case.bound, "reads", "{case:?}");
        }
        assert!(measured.table().contains("rms_norm"), "{}", measured.table());
    }

    #[test]
    fn the_longer_of_the_two_times_is_what_binds() {
        let peaks = Peaks { f32: 1.0, bf16: 2.0 };
        let bench = KernelsBench { rounds: 1, gemm_peak_gflops: peaks, dram_gb_per_s: 1.0, cases: vec![] };
        let case = |flops, dtype| Case {
            shape: String::new(),
            dtype,
            flops,
            bytes: 1e3,
            working_set: 1000,
            call: Box::new(|| {}),
        };
        let reads = bench.measured("a", case(1e-3, Dtype::F32));
        assert_eq!((reads.bound, reads.dtype), ("reads", "f32"));
        assert!((reads.share * reads.us.median * reads.read_gb_per_s - 1.0).abs() < 1e-9);
        let products = bench.measured("a", case(1e9, Dtype::Bf16));
        assert_eq!((products.bound, products.dtype), ("products", "bf16"));
        assert!((products.share * products.us.median - 1e9 / 2.0 / 1e3).abs() < 1e-3);
    }
}
