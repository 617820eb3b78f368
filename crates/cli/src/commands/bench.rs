//! `r3 bench`: how fast each part is.

use std::path::PathBuf;

use clap::value_parser;
use r3_orchestrator::bench::flat;
use r3_orchestrator::bench::subject::Subject;
use r3_recipe::learning::Train;
use serde::Serialize;

use crate::args::{DtypeArg, MomentsArg};
use crate::error::CliError;
use crate::output;

mod engine;
mod kernels;
mod ring;
mod routes;
mod step;
mod train;

/// Measure rollout, training, a whole step, kernels, the ring, and the cost of routes
///
/// Every measurement runs the code that a run runs, warms up with a round of its own, and says the median of the rounds
/// with the lowest and the highest. Figures of a busy machine say little: close other programs first.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Engine(engine::Args),
    Train(train::Args),
    Step(step::Args),
    Kernels(kernels::Args),
    Ring(ring::Args),
    Routes(routes::Args),
}

impl Args {
    pub(crate) fn execute(&self) -> Result<(), CliError> {
        match &self.what {
            What::Engine(args) => args.execute(),
            What::Train(args) => args.execute(),
            What::Step(args) => args.execute(),
            What::Kernels(args) => args.execute(),
            What::Ring(args) => args.execute(),
            What::Routes(args) => args.execute(),
        }
    }
}

/// Which model is measured.
#[derive(Debug, clap::Args)]
struct ModelArgs {
    /// A Hugging Face directory, a checkpoint, or a run, whose newest checkpoint is taken
    #[arg(long, value_name = "DIR", default_value = "assets/tiny-moe")]
    model: PathBuf,
    /// A config.json, or a directory with one: its shape with random weights, as `r3 new-model` makes them
    #[arg(long, value_name = "CONFIG", conflicts_with = "model")]
    config: Option<PathBuf>,
}

impl ModelArgs {
    fn subject(&self) -> Result<Subject, CliError> {
        Ok(match &self.config {
            Some(config) => Subject::fresh(config)?,
            None => Subject::open(&self.model)?,
        })
    }
}

/// How often, and how the result is told.
#[derive(Debug, clap::Args)]
struct RoundsArgs {
    /// Rounds, beside one that warms up
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// End stdout with one line of JSON instead of the table; docs/json.md explains the keys
    #[arg(long)]
    json: bool,
}

/// How the trainer goes about it.
#[derive(Debug, clap::Args)]
struct TrainerArgs {
    /// Tokens of one forward and backward; by default a recipe's
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=1 << 24))]
    micro_batch_tokens: Option<u32>,
    /// Compute activations again in the backward, which takes less memory and more time
    #[arg(long)]
    recompute: bool,
    /// Format of AdamW's moments, as `train.moments` of a recipe
    #[arg(long, value_enum, default_value_t = MomentsArg::F32)]
    moments: MomentsArg,
}

impl TrainerArgs {
    /// The section `train` of a recipe that says so.
    fn section(&self, dtype: DtypeArg) -> Train {
        let mut train = Train {
            dtype: dtype.into(),
            recompute: self.recompute,
            moments: self.moments.into(),
            ..Train::default()
        };
        if let Some(tokens) = self.micro_batch_tokens {
            train.micro_batch_tokens = tokens as usize;
        }
        train
    }
}

fn print(json: bool, measured: &impl Serialize, table: &str) -> Result<(), CliError> {
    if json { output::print_json(&flat(measured)) } else { output::print(table) }
}
