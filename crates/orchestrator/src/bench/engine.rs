//! `r3 bench engine`: how fast an engine samples, and what share of the machine that takes.

use r3_core::count::counted;
use r3_kernels::gemm::Dtype;
use r3_kernels::numerics::Numerics;
use r3_recipe::rollout::Engine as EngineSection;
use serde::Serialize;

use crate::bench::Spread;
use crate::bench::cost::ModelCost;
use crate::bench::machine;
use crate::bench::serving::{Load, Served, Server};
use crate::bench::subject::Subject;
use crate::error::RunError;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineSetup {
    /// Sequences, all submitted at once and run together.
    pub batch: usize,
    /// Tokens of each prompt.
    pub prompt: usize,
    /// Tokens that each sequence samples, at least 2, so that there is a tick behind the first.
    pub new: usize,
    /// Rounds, beside one to warm up.
    pub rounds: usize,
    /// Format of weights, keys and values.
    pub dtype: Dtype,
    /// Whether orders of sums may depend on the batch.
    pub numerics: Numerics,
    /// Whether routes are captured and given back.
    pub routes: bool,
}

/// Throughput, and how near it is to what the machine can do.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EngineBench {
    /// Sequences.
    pub batch: usize,
    /// Tokens of each prompt.
    pub prompt: usize,
    /// Tokens that each sequence samples.
    pub new: usize,
    /// Format of weights, keys and values.
    pub dtype: String,
    /// `exact` or `fast`.
    pub numerics: &'static str,
    /// Whether routes are captured.
    pub routes: bool,
    /// Rounds.
    pub rounds: usize,
    /// Sampled tokens a second, from submission until the last rollout was taken: prompts are computed in that time.
    pub tokens_per_second: Spread,
    /// Milliseconds until every prompt is computed.
    pub prefill_ms: Spread,
    /// Microseconds of a tick that decodes, over all rounds.
    pub decode_tick_us: Spread,
    /// The largest resident memory of the process, in bytes.
    pub peak_memory_bytes: u64,
    /// GFLOP/s of the products with weights, over the same time as the throughput.
    pub gflops: f64,
    /// GFLOP/s of the machine's fastest large product in this format.
    pub gemm_peak_gflops: f64,
    /// `gflops / gemm_peak_gflops`.
    pub gemm_share: f64,
    /// GB/s of weights, each that a tick touches counted once.
    pub gb_per_s: f64,
    /// GB/s at which the machine reads memory that no cache holds.
    pub dram_gb_per_s: f64,
    /// `gb_per_s / dram_gb_per_s`; above 1 where caches hold the weights.
    pub dram_share: f64,
    /// The time that each tick takes at least, by the peak or by the memory, whichever is longer, as a share of what the
    /// ticks took.
    pub bound_share: f64,
}

impl EngineBench {
    /// A table for people.
    #[must_use]
    pub fn table(&self) -> String {
        let Self { batch, prompt, new, dtype, numerics, rounds, .. } = self;
        let routes = if self.routes { "with" } else { "without" };
        let share = |name: &str, value: f64, of: f64, unit: &str, share: f64| {
            format!("{name:<28}{value:>12.1}{of:>12.1} {unit:<9}{:>6.1} %\n", share * 100.0)
        };
        [
            format!(
                "{} of {prompt} + {new} tokens, {dtype}, {numerics}, {routes} routes, {}\n",
                counted(*batch, "sequence"),
                counted(*rounds, "round")
            ),
            Spread::heading(),
            self.tokens_per_second.row("tokens/s"),
            self.prefill_ms.row("prompts, ms"),
            self.decode_tick_us.row("decode tick, us"),
            machine::memory_row(self.peak_memory_bytes),
            format!("{:<28}{:>12}{:>12}\n", "of the machine", "reached", "possible"),
            share("products with weights", self.gflops, self.gemm_peak_gflops, "GFLOP/s", self.gemm_share),
            share("weights read", self.gb_per_s, self.dram_gb_per_s, "GB/s", self.dram_share),
            format!("{:<52} {:<9}{:>6.1} %\n", "whichever binds", "", self.bound_share * 100.0),
        ]
        .concat()
    }
}

/// Measures. There is no prefix cache; prompts are computed in ticks of as many tokens as a recipe has by default.
///
/// # Errors
/// If the weights cannot be loaded or the sequences do not fit the model.
pub fn measure(subject: &Subject, setup: &EngineSetup) -> Result<EngineBench, RunError> {
    let load = Load {
        batch: setup.batch,
        prompt: setup.prompt,
        new: setup.new,
        max_batch_tokens: EngineSection::default().max_batch_tokens.max(setup.batch),
        dtype: setup.dtype,
        numerics: setup.numerics,
    };
    let mut server = Server::new(subject, load, setup.routes)?;
    let mut rounds = Vec::new();
    for round in 0..=setup.rounds.max(1) {
        let mut served = server.submit(round)?;
        server.serve(&mut served)?;
        server.take(&mut served);
        // The first round warms up.
        if round > 0 {
            rounds.push(served);
        }
    }
    let peak_memory_bytes = machine::peak_memory_bytes();
    drop(server);
    let machine = (machine::gemm_peak_gflops(setup.dtype), machine::dram_gb_per_s());
    let cost = ModelCost::new(&subject.config, setup.dtype, &rounds[0].rollouts);
    Ok(EngineBench { peak_memory_bytes, ..summary(setup, &rounds, &cost, machine) })
}

fn summary(
    setup: &EngineSetup,
    rounds: &[Served],
    cost: &ModelCost,
    (gemm_peak_gflops, dram_gb_per_s): (f64, f64),
) -> EngineBench {
    let n_tokens = (setup.batch * setup.new) as f64;
    let over = |value: fn(&Served) -> f64| Spread::of(rounds.iter().map(value).collect());
    let (mut flops, mut bytes, mut least) = (0.0, 0.0, 0.0);
    for tick in rounds.iter().flat_map(|served| &served.ticks) {
        let (tick_flops, tick_bytes) =
            (cost.flops(tick.computed, tick.sampled), cost.bytes(tick.computed, tick.sampled));
        flops += tick_flops / 1e9;
        bytes += tick_bytes / 1e9;
        least += (tick_flops / 1e9 / gemm_peak_gflops).max(tick_bytes / 1e9 / dram_gb_per_s);
    }
    let seconds: f64 = rounds.iter().map(|served| served.all.as_secs_f64()).sum();
    let (gflops, gb_per_s) = (flops / seconds, bytes / seconds);
    EngineBench {
        batch: setup.batch,
        prompt: setup.prompt,
        new: setup.new,
        dtype: setup.dtype.to_string(),
        numerics: match setup.numerics {
            Numerics::Exact => "exact",
            Numerics::Fast => "fast",
        },
        routes: setup.routes,
        rounds: rounds.len(),
        tokens_per_second: Spread::of(
            rounds.iter().map(|served| n_tokens / served.all.as_secs_f64()).collect(),
        ),
        prefill_ms: over(|served| served.prefill_seconds() * 1e3),
        decode_tick_us: Spread::of(rounds.iter().flat_map(Served::decode_seconds).map(|s| s * 1e6).collect()),
        peak_memory_bytes: 0,
        gflops,
        gemm_peak_gflops,
        gemm_share: gflops / gemm_peak_gflops,
        gb_per_s,
        dram_gb_per_s,
        dram_share: gb_per_s / dram_gb_per_s,
        bound_share: least / seconds,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    #[test]
    fn every_sequence_is_sampled_to_its_end_and_shares_add_up() {
        let subject = Subject::fresh(&fixtures::model_dir()).unwrap();
        for routes in [true, false] {
            let setup = EngineSetup {
                batch: 3,
                prompt: 4,
                new: 5,
                rounds: 2,
                dtype: Dtype::Bf16,
                numerics: Numerics::Exact,
                routes,
            };
            let measured = measure(&subject, &setup).unwrap();
            assert_eq!((measured.rounds, measured.routes), (2, routes));
            assert!(measured.tokens_per_second.min > 0.0 && measured.decode_tick_us.min > 0.0);
            assert!(measured.peak_memory_bytes > 1 << 20);
            assert!(measured.bound_share >= measured.gemm_share.max(measured.dram_share) * 0.99);
            assert!(measured.table().contains("whichever binds"), "{}", measured.table());
        }
    }

    #[test]
    fn sequences_that_the_model_cannot_place_are_refused() {
        let subject = Subject::fresh(&fixtures::model_dir()).unwrap();
        let new = subject.config.max_positions;
        let setup = EngineSetup {
            batch: 1,
            prompt: 1,
            new,
            rounds: 1,
            dtype: Dtype::F32,
            numerics: Numerics::Fast,
            routes: true,
        };
        assert!(measure(&subject, &setup).is_err());
    }
}
