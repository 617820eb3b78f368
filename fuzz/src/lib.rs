//! Fuzz targets: whatever reads what others wrote, with the properties that hold for any bytes.
//!
//! A target is a function of bytes that panics if a property does not hold. [`TARGETS`] names them all; each has
//! a binary of a few lines in `src/bin`, which libFuzzer drives (`fuzz/run`), and a corpus in `fuzz/corpus`,
//! which `cargo test` replays without any fuzzer. This crate must never know how a property is broken: what it
//! finds is fixed, and first tested, in the crate it was found in.
//!
//! Start with [`frame`]; `docs/fuzzing.md` says how to run it and what to do with what it finds.

pub mod bounded;
pub mod config;
pub mod frame;
pub mod input;
pub mod recipe;
pub mod routes;
pub mod said;
pub mod wire;

/// Something to fuzz.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Name of its binary and of its corpus.
    pub name: &'static str,
    /// Panics if a property does not hold for these bytes; says whether what was fuzzed let them in.
    pub body: fn(&[u8]) -> bool,
}

/// All targets.
pub const TARGETS: [Target; 12] = [
    Target { name: "frame_bytes", body: frame::any_bytes },
    Target { name: "frame_file", body: frame::file },
    Target { name: "frame_resealed", body: frame::resealed },
    Target { name: "frame_round_trip", body: frame::round_trip },
    Target { name: "model_config", body: config::text },
    Target { name: "recipe", body: recipe::text },
    Target { name: "recipe_set", body: recipe::overrides },
    Target { name: "recipe_values", body: recipe::values },
    Target { name: "route_rows", body: routes::rows },
    Target { name: "wire_foreign", body: wire::foreign },
    Target { name: "wire_payloads", body: wire::payloads },
    Target { name: "wire_r3_lines", body: wire::r3_lines },
];

/// The `main` of a target's binary: libFuzzer's, or, in an ordinary build, one that replays the files it is given.
#[macro_export]
macro_rules! target {
    ($body:path) => {
        #[cfg(fuzzing)]
        libfuzzer_sys::fuzz_target!(|input: &[u8]| {
            $body(input);
        });

        #[cfg(not(fuzzing))]
        fn main() -> std::io::Result<()> {
            for path in std::env::args_os().skip(1) {
                $body(&std::fs::read(path)?);
            }
            Ok(())
        }
    };
}
