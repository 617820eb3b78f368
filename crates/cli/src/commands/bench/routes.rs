//! `r3 bench routes`: what capturing routes costs.

use std::path::PathBuf;

use clap::value_parser;
use r3_orchestrator::bench::capture::{self, CaptureSetup};
use r3_orchestrator::bench::routes::{self, RoutesSetup};
use r3_orchestrator::bench::subject::Subject;

use crate::args::DtypeArg;
use crate::commands::bench::print;
use crate::error::{CliError, Sizes};

const SIZES: Sizes = Sizes { tokens: "--tokens", all: "--sequences or --tokens" };

/// With --model.
const MODEL_SIZES: Sizes = Sizes { tokens: "--prompt or --new", all: "--sequences, --prompt or --new" };

/// Measure what recording routes adds to a decode tick, or to a whole engine
///
/// Without --model, a scheduler runs as many sequences as are asked for, one taking the place of another that ends, and
/// records the routes of choices made beforehand. Counted is all that this adds to a tick: narrowing the ids of every
/// layer and turning them into rows, writing these beside the keys and values with their stamps and validity, and what
/// planning, ending ticks and freeing rollouts costs more than in a scheduler without routes, which is where traces are
/// copied. Not counted is the router's own choosing. In the same ticks the same bytes are copied by two memcpys, and by a
/// plain loop over requests, layers and experts. Every trace is compared with the choices it was made of. Figures are
/// medians over the rounds, in microseconds a tick.
///
/// With --model, two engines of the same weights serve the same requests in every round, one with routes and one without,
/// tick by tick in turn and without a prefix cache: all sequences at once, their prompts computed in one tick. They must
/// sample the same tokens with the same logprobs. Throughput counts sampled tokens over an engine's own time from
/// submission until the last rollout was taken; the first token is there at the end of its first tick. There are two such
/// pairs, made in either order, since where its memory lies is worth a percent or two to an engine.
///
/// One round more warms up.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Measure engines of this model: a Hugging Face directory, a checkpoint, or a run, whose newest checkpoint is taken
    #[arg(long, value_name = "DIR", conflicts_with_all = ["layers", "top_k", "experts", "tokens"])]
    model: Option<PathBuf>,
    /// Running sequences; 256 by default, 64 with --model
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=65_536))]
    sequences: Option<u32>,
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
    /// With --model: tokens of each prompt
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = value_parser!(u32).range(1..=65_536), requires = "model")]
    prompt: u32,
    /// With --model: tokens that each sequence samples, at least 2
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = value_parser!(u32).range(2..=65_536), requires = "model")]
    new: u32,
    /// With --model: format of weights, keys and values
    #[arg(long, value_enum, default_value_t = DtypeArg::Bf16, requires = "model")]
    dtype: DtypeArg,
    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// End stdout with one line of JSON instead of the table; docs/json.md explains the keys
    #[arg(long)]
    json: bool,
}

impl Args {
    pub(super) fn execute(&self) -> Result<(), CliError> {
        if let Some(model) = &self.model {
            let setup = CaptureSetup {
                sequences: self.sequences.unwrap_or(64) as usize,
                prompt_tokens: self.prompt as usize,
                new_tokens: self.new as usize,
                rounds: self.rounds as usize,
                dtype: self.dtype.into(),
            };
            let measured = capture::measure(&Subject::open(model)?, &setup)
                .map_err(|error| MODEL_SIZES.refused(error))?;
            return print(self.json, &measured, &measured.table());
        }
        let (top_k, experts) = (self.top_k, self.experts);
        if top_k > experts {
            return Err(CliError::TooFewExperts { top_k, experts });
        }
        let setup = RoutesSetup {
            sequences: self.sequences.unwrap_or(256) as usize,
            layers: self.layers as usize,
            top_k: top_k as usize,
            experts: experts as usize,
            tokens: self.tokens as usize,
            rounds: self.rounds as usize,
        };
        let measured = routes::measure(&setup).map_err(|error| SIZES.refused(error))?;
        print(self.json, &measured, &measured.table())
    }
}
