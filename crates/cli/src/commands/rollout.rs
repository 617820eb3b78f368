//! `r3 rollout`: completions and their routes, to a file.

use std::path::PathBuf;

use clap::{ArgAction, value_parser};
use r3_kernels::gemm::Dtype;
use r3_orchestrator::out_file::OutFile;
use r3_orchestrator::rollout::{PromptSource, RolloutOptions, rollout};
use r3_recipe::bytes::Bytes;
use r3_recipe::recipe::Recipe;

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
/// `r3 score` replays them, `r3 routes` converts them. The file appears when it is whole.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A Hugging Face directory, a checkpoint, or a run, whose newest checkpoint is taken
    model: PathBuf,
    /// JSON lines to sample from
    #[arg(long, value_name = "FILE", required_unless_present = "recipe", conflicts_with = "recipe")]
    prompts: Option<PathBuf>,
    /// Sample the training problems of this recipe's task instead, and score them
    #[arg(long, value_name = "RECIPE")]
    recipe: Option<PathBuf>,
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
    #[arg(long, value_name = "T", default_value_t = 1.0, value_parser = temperature)]
    temperature: f32,
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
        let recipe = self.recipe.as_ref().map(|path| Recipe::load(path, &[])).transpose()?;
        let source = match (&recipe, &self.prompts) {
            (Some(loaded), _) => PromptSource::Task(&loaded.recipe.task),
            (None, Some(path)) => PromptSource::File(path),
            (None, None) => unreachable!("clap asks for one of them"),
        };
        let out = OutFile::open(&self.out, self.overwrite)?;
        let summary = rollout(&self.model, source, &self.options(), out)
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
            temperature: self.temperature,
            seed: self.seed,
            dtype: Dtype::from(self.dtype),
            kv_bytes: self.kv_memory.0,
            max_running: self.max_running as usize,
            routes_start: self.return_routed_experts.then_some(self.routed_experts_start_len),
        }
    }
}

fn temperature(text: &str) -> Result<f32, String> {
    let value: f32 = text.parse().map_err(|_| "not a number".to_owned())?;
    if value >= 0.0 && value.is_finite() { Ok(value) } else { Err("has to be 0 or more".into()) }
}
