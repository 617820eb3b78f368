//! `r3 bench ring`: rollouts from one thread to another.

use clap::value_parser;
use r3_orchestrator::bench::ring::{RingSetup, measure};

use crate::commands::bench::{RoundsArgs, print};
use crate::error::{CliError, Sizes};

const SIZES: Sizes = Sizes { tokens: "--tokens", all: "--tokens, --layers or --top-k" };

/// Measure the ring: latency, and GB/s of rollouts beside a memcpy
///
/// One thread writes the same rollout over and over, another reads it in place. Latency is half of a word's way there and
/// back through two rings.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Tokens of the rollout, half of them sampled
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = value_parser!(u32).range(2..=1 << 20))]
    tokens: u32,
    /// MoE layers
    #[arg(long, value_name = "N", default_value_t = 48, value_parser = value_parser!(u32).range(1..=1024))]
    layers: u32,
    /// Experts that a token takes in each layer
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = value_parser!(u32).range(1..=1024))]
    top_k: u32,
    /// Experts of each layer
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = value_parser!(u32).range(1..=65_536))]
    experts: u32,
    /// Frames of a round
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = value_parser!(u32).range(1..=1 << 24))]
    frames: u32,
    #[command(flatten)]
    rounds: RoundsArgs,
}

impl Args {
    pub(super) fn execute(&self) -> Result<(), CliError> {
        let (top_k, experts) = (self.top_k, self.experts);
        if top_k > experts {
            return Err(CliError::TooFewExperts { top_k, experts });
        }
        let setup = RingSetup {
            tokens: self.tokens as usize,
            layers: self.layers as usize,
            top_k: top_k as usize,
            experts: experts as usize,
            frames: self.frames as usize,
            rounds: self.rounds.rounds as usize,
        };
        let measured = measure(&setup).map_err(|error| SIZES.refused(error))?;
        print(self.rounds.json, &measured, &measured.table())
    }
}
