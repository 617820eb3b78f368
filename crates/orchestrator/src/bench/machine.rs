//! What the machine itself can do, and what this process took of it.

use std::fs;
use std::hint::black_box;
use std::time::Instant;

use r3_kernels::gemm::{Dtype, PackedMatrix, matmul};
use r3_kernels::stream;

/// Rows, columns and depth of the products that are taken for the peak: weights and activations stay in the caches.
const PEAK_SHAPES: [[usize; 3]; 2] = [[256, 768, 768], [512, 1024, 512]];

/// Bytes that no cache holds; more are not read to find out how fast the machine is.
const DRAM_BYTES: usize = 256 << 20;

/// How long one figure is measured, beside a warm-up.
const SECONDS: f64 = 0.15;

/// GFLOP/s of the fastest large product, on all threads.
#[must_use]
pub fn gemm_peak_gflops(dtype: Dtype) -> f64 {
    PEAK_SHAPES.into_iter().map(|shape| product_gflops(shape, dtype)).fold(0.0, f64::max)
}

fn product_gflops([rows, n, k]: [usize; 3], dtype: Dtype) -> f64 {
    let x: Vec<f32> = (0..rows * k).map(|i| (i % 7) as f32 - 3.0).collect();
    let w = PackedMatrix::pack(&vec![0.5; n * k], n, k, dtype);
    let mut y = vec![0.0; rows * n];
    let seconds = fastest(|| matmul(black_box(&x), &w, None, black_box(&mut y)));
    2.0 * (rows * n * k) as f64 / seconds / 1e9
}

/// GB/s at which all threads read memory that no cache holds.
#[must_use]
pub fn dram_gb_per_s() -> f64 {
    read_gb_per_s(DRAM_BYTES)
}

/// GB/s at which all threads read a working set of `bytes`, wherever it lies: in a cache or in memory.
#[must_use]
pub fn read_gb_per_s(bytes: usize) -> f64 {
    let words = vec![1_u64; bytes.clamp(size_of::<u64>(), DRAM_BYTES) / size_of::<u64>()];
    let seconds = fastest(|| {
        black_box(stream::read(black_box(&words)));
    });
    (words.len() * size_of::<u64>()) as f64 / seconds / 1e9
}

/// Seconds of the fastest of the calls that fit the time: what the machine can do when nothing disturbs it.
fn fastest(mut call: impl FnMut()) -> f64 {
    call();
    let (began, mut fastest) = (Instant::now(), f64::INFINITY);
    while began.elapsed().as_secs_f64() < SECONDS {
        let start = Instant::now();
        call();
        fastest = fastest.min(start.elapsed().as_secs_f64());
    }
    fastest
}

/// The largest resident memory that this process ever had, in bytes; 0 where the system does not tell.
#[must_use]
pub fn peak_memory_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// [`peak_memory_bytes`] as a row of a table.
pub(crate) fn memory_row(bytes: u64) -> String {
    format!("{:<28}{:>12.1}\n", "peak memory, MiB", bytes as f64 / f64::from(1 << 20))
}

/// Seconds since the system started this process, to a hundredth; `None` where the system does not tell.
#[must_use]
pub fn process_age_seconds() -> Option<f64> {
    /// Ticks of a second in `/proc`, on every Linux there is.
    const TICKS: f64 = 100.0;
    /// The time the process started, counted behind its name, which may hold spaces.
    const START_TIME: usize = 19;
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    let started = fields.split_whitespace().nth(START_TIME)?.parse::<f64>().ok()? / TICKS;
    let uptime = fs::read_to_string("/proc/uptime").ok()?;
    Some(uptime.split_whitespace().next()?.parse::<f64>().ok()? - started)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_touched_is_counted() {
        let before = peak_memory_bytes();
        let bytes = 2 * usize::try_from(before).unwrap();
        black_box(vec![1_u8; bytes]);
        assert!(peak_memory_bytes() >= 2 * before && before > 0, "{before} bytes and {bytes} more");
    }

    #[test]
    fn a_process_gets_older() {
        let (age, start) = (process_age_seconds().unwrap(), Instant::now());
        assert!((0.0..100_000.0).contains(&age), "{age} seconds");
        while start.elapsed().as_secs_f64() < 0.03 {}
        let passed = process_age_seconds().unwrap() - age;
        assert!(passed > 0.0, "{passed} seconds");
    }
}
