//! `r3 bench`: what capturing routes costs.

use std::path::PathBuf;

use clap::value_parser;
use r3_orchestrator::bench::engine::{self, EngineSetup};
use r3_orchestrator::bench::routes::{self, RoutesSetup};
use r3_orchestrator::model_dir;
use serde::Serialize;

use crate::args::DtypeArg;
use crate::error::CliError;
use crate::output;

/// Measure what capturing routes costs
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Routes(RoutesArgs),
    Engine(EngineArgs),
}

/// Measure what recording routes adds to a decode tick, without a model
///
/// A scheduler runs as many sequences as are asked for, one taking the place of another that ends, and records the routes
/// of choices made beforehand. Counted is all that this adds to a tick: narrowing the ids of every layer and turning them
/// into rows, writing these beside the keys and values with their stamps and validity, and what planning, ending ticks
/// and freeing rollouts costs more than in a scheduler without routes, which is where traces are copied. Not counted is
/// the router's own choosing. In the same ticks the same bytes are copied by two memcpys, and by a plain loop over
/// requests, layers and experts. Every trace is compared with the choices it was made of.
///
/// Figures are medians over the rounds, in microseconds a tick; one round more warms up.
#[derive(Debug, clap::Args)]
struct RoutesArgs {
    /// Running sequences
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = value_parser!(u32).range(1..=65_536))]
    sequences: u32,
    /// MoE layers
    #[arg(long, value_name = "N", default_value_t = 48, value_parser = value_parser!(u32).range(1..=1024))]
    layers: u32,
    /// Experts that a token takes in each layer
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = value_parser!(u32).range(1..=1024))]
    top_k: u32,
    /// Experts of each layer
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = value_parser!(u32).range(1..=65_536))]
    experts: u32,
    /// Tokens that every sequence samples, and ticks of a round
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = value_parser!(u32).range(1..=65_536))]
    tokens: u32,
    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// End stdout with one line of JSON instead of the table; docs/json.md explains the keys
    #[arg(long)]
    json: bool,
}

/// Measure an engine with routes captured and without, taking turns
///
/// In every round two engines of the same weights serve the same requests, tick by tick in turn and without a prefix
/// cache: all sequences at once, their prompts computed in one tick. They must sample the same tokens with the same
/// logprobs. Throughput counts sampled tokens over an engine's own time from submission until the last rollout was
/// taken; the first token is there at the end of its first tick. One round more warms up. There are two such pairs, made
/// in either order, since where its memory lies is worth a percent or two to an engine.
#[derive(Debug, clap::Args)]
struct EngineArgs {
    /// A Hugging Face directory, a checkpoint, or a run, whose newest checkpoint is taken
    #[arg(long, value_name = "DIR", default_value = "assets/tiny-moe")]
    model: PathBuf,
    /// Sequences
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = value_parser!(u32).range(1..=65_536))]
    sequences: u32,
    /// Tokens of each prompt
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = value_parser!(u32).range(1..=65_536))]
    prompt_tokens: u32,
    /// Tokens that each sequence samples, at least 2
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = value_parser!(u32).range(2..=65_536))]
    new_tokens: u32,
    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Format of weights, keys and values
    #[arg(long, value_enum, default_value_t = DtypeArg::Bf16)]
    dtype: DtypeArg,
    /// End stdout with one line of JSON instead of the table; docs/json.md explains the keys
    #[arg(long)]
    json: bool,
}

impl Args {
    pub(crate) fn execute(&self) -> Result<(), CliError> {
        match &self.what {
            What::Routes(args) => args.execute(),
            What::Engine(args) => args.execute(),
        }
    }
}

impl RoutesArgs {
    fn execute(&self) -> Result<(), CliError> {
        if self.top_k > self.experts {
            return Err(CliError::TooFewExperts { top_k: self.top_k, experts: self.experts });
        }
        let measured = routes::measure(&RoutesSetup {
            sequences: self.sequences as usize,
            layers: self.layers as usize,
            top_k: self.top_k as usize,
            experts: self.experts as usize,
            tokens: self.tokens as usize,
            rounds: self.rounds as usize,
        })?;
        print(self.json, &measured, &measured.table())
    }
}

impl EngineArgs {
    fn execute(&self) -> Result<(), CliError> {
        let checkpoint = model_dir::open(&self.model)?;
        let setup = EngineSetup {
            sequences: self.sequences as usize,
            prompt_tokens: self.prompt_tokens as usize,
            new_tokens: self.new_tokens as usize,
            rounds: self.rounds as usize,
            dtype: self.dtype.into(),
        };
        let measured = engine::measure(checkpoint.config(), &checkpoint, &setup)?;
        print(self.json, &measured, &measured.table())
    }
}

fn print(json: bool, measured: &impl Serialize, table: &str) -> Result<(), CliError> {
    if json { output::print_json(measured) } else { output::print(table) }
}
