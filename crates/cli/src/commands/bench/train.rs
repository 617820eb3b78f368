//! `r3 bench train`: tokens learned from a second.

use clap::value_parser;
use r3_orchestrator::bench::train::{TrainSetup, measure};

use crate::args::DtypeArg;
use crate::commands::bench::{ModelArgs, RoundsArgs, TrainerArgs, print};
use crate::error::{CliError, Sizes};

const SIZES: Sizes = Sizes { tokens: "--length", all: "--sequences or --length" };

/// Measure how fast the trainer learns: replayed forward, loss, backward, AdamW
///
/// Rollouts are made of the policy's own forward, with its logprobs and routes. They are then trained on, one optimiser
/// step a round, by what `r3 run` trains with: routes are replayed, and the mismatch is measured in the same forward.
/// Throughput counts all tokens fed to the model over the whole step; every one of them predicts a token that is trained
/// on. The forward's time includes gathering the batch and the loss, the backward's adding up the gradients.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Sequences of one optimiser step
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = value_parser!(u32).range(2..=65_536))]
    sequences: u32,
    /// Tokens of each that are fed to the model
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = value_parser!(u32).range(1..=1 << 20))]
    length: u32,
    /// Format of the products
    #[arg(long, value_enum, default_value_t = DtypeArg::F32)]
    dtype: DtypeArg,
    #[command(flatten)]
    trainer: TrainerArgs,
    #[command(flatten)]
    rounds: RoundsArgs,
}

impl Args {
    pub(super) fn execute(&self) -> Result<(), CliError> {
        let setup = TrainSetup {
            sequences: self.sequences as usize,
            length: self.length as usize,
            rounds: self.rounds.rounds as usize,
            train: self.trainer.section(self.dtype),
        };
        let measured = measure(&self.model.subject()?, &setup).map_err(|error| SIZES.refused(error))?;
        print(self.rounds.json, &measured, &measured.table())
    }
}
