//! `r3 bench engine`: sampled tokens a second.

use clap::{ValueEnum, value_parser};
use r3_kernels::numerics::Numerics;
use r3_orchestrator::bench::engine::{EngineSetup, measure};

use crate::args::DtypeArg;
use crate::commands::bench::{ModelArgs, RoundsArgs, print};
use crate::error::{CliError, Sizes};

const SIZES: Sizes = Sizes { tokens: "--prompt or --new", all: "--batch, --prompt or --new" };

/// Measure how fast the engine samples, and what share of the machine it reaches
///
/// All sequences are submitted at once, without a prefix cache, and sample as many tokens as are asked for. Throughput
/// counts sampled tokens over the time from submission until the last rollout was taken, in which prompts are computed,
/// too.
///
/// Of the machine it says two things, measured at the end: the GFLOP/s of its fastest large product in this format, beside
/// those of the products with weights; and the GB/s at which it reads memory, beside the bytes of weights, each counted
/// once in every tick that touches it. Attention to earlier tokens counts in neither.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Sequences
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = value_parser!(u32).range(1..=65_536))]
    batch: u32,
    /// Tokens of each prompt
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = value_parser!(u32).range(1..=1 << 20))]
    prompt: u32,
    /// Tokens that each sequence samples, at least 2
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = value_parser!(u32).range(2..=1 << 20))]
    new: u32,
    /// Format of weights, keys and values
    #[arg(long, value_enum, default_value_t = DtypeArg::Bf16)]
    dtype: DtypeArg,
    /// Whether orders of sums may depend on the batch, as `numerics` in a recipe
    #[arg(long, value_enum, default_value_t = NumericsArg::Exact)]
    numerics: NumericsArg,
    /// Whether routes are captured and given back
    #[arg(long, value_enum, default_value_t = RoutesArg::On)]
    routes: RoutesArg,
    #[command(flatten)]
    rounds: RoundsArgs,
}

/// Whether orders of sums may depend on the batch.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum NumericsArg {
    Exact,
    Fast,
}

/// Whether routes are captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RoutesArg {
    On,
    Off,
}

impl Args {
    pub(super) fn execute(&self) -> Result<(), CliError> {
        let setup = EngineSetup {
            batch: self.batch as usize,
            prompt: self.prompt as usize,
            new: self.new as usize,
            rounds: self.rounds.rounds as usize,
            dtype: self.dtype.into(),
            numerics: match self.numerics {
                NumericsArg::Exact => Numerics::Exact,
                NumericsArg::Fast => Numerics::Fast,
            },
            routes: self.routes == RoutesArg::On,
        };
        let measured = measure(&self.model.subject()?, &setup).map_err(|error| SIZES.refused(error))?;
        print(self.rounds.json, &measured, &measured.table())
    }
}
