//! `r3 score`: logprobs and routes of given tokens.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use r3_kernels::gemm::Dtype;
use r3_orchestrator::model_dir;
use r3_orchestrator::score::{ScoreInput, Scorer};
use r3_orchestrator::score_input::parse;

use crate::args::DtypeArg;
use crate::error::CliError;
use crate::output;

/// Print the logprobs and expert routes of given tokens: the same-weight check
///
/// For each line {"tokens": [...]} of T tokens it prints a line {"logprobs": [...], "routed_experts": [...],
/// "layer_ids": [...]}: T - 1 logprobs, of tokens 1 on, in nats, at temperature 1 unless a "temperature" is given, and T -
/// 1 rows of routes, one list of experts, in router order, for each MoE layer. Given "routed_experts" as well, it replays
/// them, and adds "live_differs": where the router would have chosen otherwise. docs/json.md explains every key.
///
/// Lines may also be those that `r3 rollout` wrote: they are scored under the distribution that their tokens were drawn
/// from, and in the same format their own logprobs come out again, to the bit.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A Hugging Face directory, a checkpoint, or a run, whose newest checkpoint is taken
    model: PathBuf,
    /// JSON lines to score; - is stdin
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// Which of the two forward passes scores
    #[arg(long, value_enum, default_value_t = Side::Engine)]
    side: Side,
    /// Format of weights, keys and values; of the trainer side, what products round to
    #[arg(long, value_enum, default_value_t = DtypeArg::F32)]
    dtype: DtypeArg,
    /// Longest sequence the engine side makes room for
    #[arg(long, value_name = "N", default_value_t = 8192)]
    max_tokens: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Side {
    /// The rollout engine: paged cache, chunked prefill
    Engine,
    /// The trainer: packed sequences
    Trainer,
}

impl Args {
    pub(crate) fn execute(&self) -> Result<(), CliError> {
        let dtype = Dtype::from(self.dtype);
        let input = Input::open(&self.input)?;
        let checkpoint = model_dir::open(&model_dir::resolve(&self.model)?)?;
        let mut scorer = match self.side {
            Side::Engine => Scorer::engine(&checkpoint, dtype, self.max_tokens)?,
            Side::Trainer => Scorer::trainer(&checkpoint, dtype)?,
        };
        for line in input {
            let (line, sequence) = line?;
            self.check_length(line, &sequence)?;
            let scored = scorer.score(&sequence).map_err(|error| CliError::Unscored {
                input: self.input_name(),
                line,
                source: Box::new(error),
            })?;
            output::print_json(&scored)?;
        }
        Ok(())
    }

    fn check_length(&self, line: usize, sequence: &ScoreInput) -> Result<(), CliError> {
        let (tokens, max_tokens) = (sequence.tokens.len(), self.max_tokens);
        if self.side == Side::Engine && tokens > max_tokens {
            return Err(CliError::LongLine { input: self.input_name(), line, tokens, max_tokens });
        }
        Ok(())
    }

    fn input_name(&self) -> String {
        input_name(&self.input)
    }
}

fn input_name(path: &Path) -> String {
    if path == Path::new("-") { "stdin".into() } else { path.display().to_string() }
}

/// Sequences of a file or of stdin, with their line numbers, from 1. Empty lines are passed over.
struct Input {
    path: PathBuf,
    lines: io::Lines<Box<dyn BufRead>>,
    line: usize,
}

impl Input {
    fn open(path: &Path) -> Result<Self, CliError> {
        let unreadable = |source| CliError::Input { path: path.to_path_buf(), source };
        let reader: Box<dyn BufRead> = match path == Path::new("-") {
            true => Box::new(io::stdin().lock()),
            false => Box::new(BufReader::new(File::open(path).map_err(unreadable)?)),
        };
        Ok(Self { path: path.to_path_buf(), lines: reader.lines(), line: 0 })
    }
}

impl Iterator for Input {
    type Item = Result<(usize, ScoreInput), CliError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            self.line += 1;
            let text = match self.lines.next()? {
                Ok(text) if text.trim().is_empty() => continue,
                Ok(text) => text,
                Err(source) => {
                    return Some(Err(CliError::Input { path: input_name(&self.path).into(), source }));
                }
            };
            let read = parse(&text, self.line).map(|sequence| (self.line, sequence));
            return Some(read.map_err(|source| CliError::BadLine {
                input: input_name(&self.path),
                line: self.line,
                source: Box::new(source),
            }));
        }
    }
}
