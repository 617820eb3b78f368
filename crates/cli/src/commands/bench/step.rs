//! `r3 bench step`: a whole step of reinforcement learning.

use clap::value_parser;
use r3_orchestrator::bench::step::{StepSetup, measure};

use crate::args::DtypeArg;
use crate::commands::bench::{ModelArgs, RoundsArgs, TrainerArgs, print};
use crate::error::{CliError, Sizes};

const SIZES: Sizes = Sizes { tokens: "--prompt or --new", all: "--completions, --prompt or --new" };

/// Measure a whole GRPO step: rollout, ring, replayed training, refit
///
/// The parts are those of `r3 run`, without files and metrics: the worker's thread samples and scores, frames pass the
/// ring, the trainer replays their routes, and the engine loads the weights. Completions have the length that is asked for,
/// and the reward only tells them apart. The tokenizer lies beside the model, or beside CONFIG.
///
/// The first step warms up. Its optimiser step ends the time from the start of the process, which includes loading.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Completions of a step, a multiple of the group size
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = value_parser!(u32).range(2..=65_536))]
    completions: u32,
    /// Completions of one prompt
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = value_parser!(u32).range(2..=65_536))]
    group_size: u32,
    /// Tokens of each prompt
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = value_parser!(u32).range(1..=1 << 20))]
    prompt: u32,
    /// Tokens of each completion
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = value_parser!(u32).range(1..=1 << 20))]
    new: u32,
    /// Format of the engine's weights, keys and values
    #[arg(long, value_enum, default_value_t = DtypeArg::Bf16)]
    dtype: DtypeArg,
    /// Format of the trainer's products
    #[arg(long, value_enum, default_value_t = DtypeArg::F32)]
    train_dtype: DtypeArg,
    #[command(flatten)]
    trainer: TrainerArgs,
    #[command(flatten)]
    rounds: RoundsArgs,
}

impl Args {
    pub(super) fn execute(&self) -> Result<(), CliError> {
        let (completions, group_size) = (self.completions, self.group_size);
        if !completions.is_multiple_of(group_size) {
            return Err(CliError::BrokenGroups { completions, group_size });
        }
        let setup = StepSetup {
            groups: (completions / group_size) as usize,
            group_size,
            prompt: self.prompt as usize,
            new: self.new as usize,
            rounds: self.rounds.rounds as usize,
            dtype: self.dtype.into(),
            train: self.trainer.section(self.train_dtype),
        };
        let measured = measure(&self.model.subject()?, &setup).map_err(|error| SIZES.refused(error))?;
        print(self.rounds.json, &measured, &measured.table())
    }
}
