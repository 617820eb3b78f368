//! Prints `docs/metrics.md`.

fn main() {
    print!("{}", r3_telemetry::metrics::markdown());
}
