//! `r3 rollout`: completions and their routes, to a file.

use std::path::PathBuf;

use clap::{ArgAction, value_parser};
use r3_kernels::gemm::Dtype;
use r3_orchestrator::out_file::OutFile;
use r3_orchestrator::rollout::{PromptSource, RolloutOptions, rollout};
use r3_orchestrator::shutdown::Shutdown;
use r3_recipe::bytes::Bytes;
use r3_recipe::check::Limit;
use r3_recipe::recipe::Recipe;
use r3_wire::record::SamplingParams;

use crate::args::DtypeArg;
use crate::error::CliError;
use crate::output;

/// Sample completions or conversations, with their expert routes, into a file
///
/// Each line of --prompts is {"prompt": "1+1="} or {"prompt": [{"role": "user", "content": "1+1?"}]}; "turns": ["and
/// 2+2?"] says what follows each sampled turn. The sampled tokens stay as they are: where the chat template renders them
/// otherwise in a later prompt, the conversation forks into another sample, and `trajectory_forks` counts it.
///
/// Each line written is one sample: tokens, logprobs, versions, turns, text and routes; docs/json.md explains every key.
/// `r3 score` replays them, `r3 routes` converts them. The file appears when it is whole. Ctrl-C or SIGTERM leaves whole lines
/// in FILE.partial and exits with 130.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("source").args(["prompts", "recipe"]).required(true))]
pub(crate) struct Args {
    /// A Hugging Face directory, a checkpoint, or a run, whose newest checkpoint is taken
    model: PathBuf,
    /// JSON lines to sample from
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Sample the training problems of this recipe's task instead, and score them
    #[arg(long, value_name = "RECIPE")]
    recipe: Option<PathBuf>,
    /// Put a value over the recipe's, as in --set task.arithmetic.digits=3; can be repeated
    #[arg(long, value_name = "KEY=VALUE", conflicts_with = "prompts")]
    set: Vec<String>,
    /// File to write; - is stdout
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Replace the file if it is there
    #[arg(long)]
    overwrite: bool,
    /// Take the first N prompts only
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..))]
    limit: Option<u32>,
    /// Completions of each prompt
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..=65536))]
    group_size: u32,
    /// Tokens of a turn at most
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = value_parser!(u32).range(1..=1 << 24))]
    max_new_tokens: u32,
    /// Divides the logits; 0 takes the most likely token
    #[arg(long, value_name = "T", default_value_t = 1.0, value_parser = temperature, allow_negative_numbers = true)]
    temperature: f32,
    /// Draws from the fewest most likely tokens that hold this much of what --top-k left; 1 takes all of them
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = top_p, allow_negative_numbers = true)]
    top_p: f32,
    /// Draws from this many most likely tokens; 0 takes all of them. With --top-p or --min-p it bounds what is kept for
    /// every token; without it, that may be the whole vocabulary
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = top_k, allow_negative_numbers = true)]
    top_k: usize,
    /// Draws from tokens at least this many times as likely as the most likely one; 0 takes all of them
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = min_p, allow_negative_numbers = true)]
    min_p: f32,
    /// Seed of all draws
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Format of weights, keys and values
    #[arg(long, value_enum, default_value_t = DtypeArg::Bf16)]
    dtype: DtypeArg,
    /// Memory for keys, values and routes of all resident tokens
    #[arg(long, value_name = "BYTES", default_value = "64MiB")]
    kv_memory: Bytes,
    /// Sequences decoded at once
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = value_parser!(u32).range(1..=65536))]
    max_running: u32,
    /// Whether to write the routes; without, no memory is held for them
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    return_routed_experts: bool,
    /// Position of the first row of routes to write; at most the length of the shortest prompt
    #[arg(long, value_name = "N", default_value_t = 0)]
    routed_experts_start_len: usize,
    /// Print one line of JSON at the end, the summary; docs/json.md explains it
    #[arg(long)]
    json: bool,
}

impl Args {
    pub(crate) fn execute(&self) -> Result<(), CliError> {
        if self.json && self.out.as_os_str() == "-" {
            return Err(CliError::TwoOnStdout);
        }
        let recipe = self.recipe.as_ref().map(|path| Recipe::load(path, &self.set)).transpose()?;
        let (source, input) = match (&recipe, &self.recipe, &self.prompts) {
            (Some(loaded), Some(path), _) => (PromptSource::Task(&loaded.recipe.task), path),
            (None, _, Some(path)) => (PromptSource::File(path), path),
            _ => unreachable!("clap asks for one of them"),
        };
        let out = OutFile::open_beside(input, &self.out, self.overwrite)?;
        let shutdown = Shutdown::on_signals("stopping after this token; once more ends at once")
            .map_err(|source| CliError::Signals { source })?;
        let summary = rollout(&self.model, source, &self.options(), (out, &shutdown))
            .map_err(|error| CliError::Rollout(Box::new(error)))?;
        if self.json {
            return output::print_json(&summary);
        }
        output::message(&summary.text());
        Ok(())
    }

    fn options(&self) -> RolloutOptions {
        RolloutOptions {
            limit: self.limit.map(|limit| limit as usize),
            group_size: self.group_size,
            max_new_tokens: self.max_new_tokens as usize,
            sampling: SamplingParams {
                temperature: self.temperature,
                sample_top_k: self.top_k,
                top_p: self.top_p,
                min_p: self.min_p,
            },
            seed: self.seed,
            dtype: Dtype::from(self.dtype),
            kv_bytes: self.kv_memory.0,
            max_running: self.max_running as usize,
            routes_start: self.return_routed_experts.then_some(self.routed_experts_start_len),
        }
    }
}

fn top_p(text: &str) -> Result<f32, String> {
    within(text, Limit::TOP_P)
}

fn min_p(text: &str) -> Result<f32, String> {
    within(text, Limit::MIN_P)
}

fn top_k(text: &str) -> Result<usize, String> {
    let value: i64 = text.parse().map_err(|_| "not a whole number".to_owned())?;
    let within = usize::try_from(value).ok().filter(|_| Limit::SAMPLE_TOP_K.holds(value as f64));
    within.ok_or_else(|| format!("must be {}", Limit::SAMPLE_TOP_K.instead_of(value as f64)))
}

/// A number within the limit that a recipe's has.
#[expect(clippy::cast_possible_truncation, reason = "sampling works in f32")]
fn within(text: &str, limit: Limit) -> Result<f32, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if limit.holds(value) { Ok(value as f32) } else { Err(format!("must be {}", limit.instead_of(value))) }
}

/// As a recipe's, and 0, which takes the most likely token.
fn temperature(text: &str) -> Result<f32, String> {
    if text.parse() == Ok(0.0) { Ok(0.0) } else { within(text, Limit::TEMPERATURE) }
}
