//! Why a command ends early.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use r3_core::count::counted;
use r3_orchestrator::error::{Excess, ExitClass, RunError};
use r3_orchestrator::out_file::STDOUT;
use r3_orchestrator::score_input::InputError;
use r3_recipe::error::RecipeError;
use r3_wire::diff::Incomparable;
use r3_wire::error::{ModelError, WireError};

/// What stopped a command.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    #[error(transparent)]
    Run(Box<RunError>),
    #[error(transparent)]
    Rollout(Box<RunError>),
    #[error("{source}")]
    Bench { source: Box<RunError>, sizes: Sizes },
    #[error("{} holds {what} already", path.display())]
    OutTaken { path: PathBuf, what: &'static str },
    #[error("interrupted; the other half of the comparison is missing")]
    ComparisonInterrupted,
    #[error("the recipe evaluates no problems")]
    NoProblems,
    #[error("--problems is {problems}, but the task holds out only {}", counted(*held_out, "problem"))]
    TooFewHeldOut { problems: usize, held_out: usize },
    #[error("cannot read {}", path.display())]
    Input { path: PathBuf, source: io::Error },
    #[error("{input}:{line}{}: {source}", column_of(source))]
    BadLine { input: String, line: usize, source: Box<InputError> },
    #[error("{input}:{line}: {tokens} tokens, but at most {max_tokens} are scored")]
    LongLine { input: String, line: usize, tokens: usize, max_tokens: usize },
    #[error("cannot score {input}:{line}")]
    Unscored { input: String, line: usize, source: Box<RunError> },
    #[error("the rollouts and the summary cannot both go to stdout")]
    TwoOnStdout,
    #[error("no op of `r3 bench kernels` has `{op}` in its name")]
    NoOp { op: String, known: Vec<&'static str> },
    #[error("cannot read {}", path.display())]
    RoutesInput { path: PathBuf, source: io::Error },
    #[error("cannot tell the layout of {input} by its content")]
    UnknownLayout { input: String },
    #[error("cannot read the routes of {input}")]
    Unreadable { input: String, source: WireError },
    #[error("what model the routes are of is not clear")]
    UnclearModel { source: ModelError },
    #[error("cannot write the routes as asked")]
    Unwritable { source: WireError },
    #[error("{input} has no sample {sample}: it has {n_samples}")]
    NoSample { input: String, sample: usize, n_samples: usize },
    #[error("{input} has no routes of layer {layer}")]
    NoLayer { input: String, layer: u32 },
    #[error("one array cannot hold {}", counted(*n_samples, "sample"))]
    ManySamples { n_samples: usize },
    #[error("what {} is to be written as is not said", path.display())]
    NoTarget { path: PathBuf },
    #[error("the tokens of {input} are of {}, but the routes of {expected}", counted(*found, "sample"))]
    TokenSamples { input: String, found: usize, expected: usize },
    #[error("{input}:{line}:{column}: not the tokens of a sample: {reason}")]
    BadTokens { input: String, line: usize, column: usize, reason: String },
    #[error("{a} and {b} cannot be compared")]
    Incomparable { a: String, b: String, source: Incomparable },
    #[error("a layer has {}, but a token takes {top_k}", counted(*experts, "expert"))]
    TooFewExperts { top_k: u32, experts: u32 },
    #[error("{completions} completions do not make whole groups of {group_size}")]
    BrokenGroups { completions: u32, group_size: u32 },
    #[error("cannot start {}", counted(*n_threads, "thread"))]
    Threads { n_threads: usize, source: rayon::ThreadPoolBuildError },
    #[error("cannot listen for signals")]
    Signals { source: io::Error },
    #[error("cannot write to stdout")]
    Stdout { source: io::Error },
}

/// The arguments that say how much is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Those for the tokens of a sequence.
    pub(crate) tokens: &'static str,
    /// All of them.
    pub(crate) all: &'static str,
}

impl Sizes {
    /// An error of what is measured.
    pub(crate) fn refused(self, source: RunError) -> CliError {
        CliError::Bench { source: Box::new(source), sizes: self }
    }
}

impl From<RunError> for CliError {
    fn from(error: RunError) -> Self {
        Self::Run(Box::new(error))
    }
}

impl From<RecipeError> for CliError {
    fn from(error: RecipeError) -> Self {
        RunError::from(error).into()
    }
}

impl CliError {
    /// What the user can change.
    pub(crate) fn hint(&self) -> String {
        match self {
            Self::Run(error) => error.hint(),
            // What are keys of a recipe elsewhere are arguments of `r3 rollout`.
            Self::Rollout(error) => error
                .hint()
                .replace("`engine.kv_memory`", "--kv-memory")
                .replace("`engine.max_running`", "--max-running")
                .replace("`rollout.sample_top_k`", "--top-k")
                .replace("`rollout.max_new_tokens`", "--max-new-tokens"),
            Self::Bench { source, sizes } => match source.excess() {
                Some(Excess::Tokens) => format!("lower {}", sizes.tokens),
                Some(Excess::Slots) => format!("lower {}", sizes.all),
                Some(Excess::Bytes) => format!("lower {}, or free memory", sizes.all),
                None => source.hint(),
            },
            Self::OutTaken { .. } => {
                "replace it with --overwrite, or choose another directory with --set run.out=DIR".into()
            }
            Self::ComparisonInterrupted => "start it again with --overwrite".into(),
            Self::NoProblems => "say how many with --problems, or set `eval.problems`".into(),
            Self::TooFewHeldOut { .. } => "lower --problems, or hold out more problems in `task`".into(),
            Self::Input { .. } => "name a readable file of JSON lines, or - for stdin".into(),
            Self::BadLine { source, .. } => source.hint(),
            Self::LongLine { tokens, .. } => format!("make room with --max-tokens {tokens}"),
            Self::Unscored { source, .. } => source.hint(),
            Self::NoOp { known, .. } => format!("there are {}", known.join(", ")),
            Self::TwoOnStdout => "leave out --json, or name a file with --out".into(),
            Self::RoutesInput { .. } => "name a readable file, or - for stdin".into(),
            Self::UnknownLayout { .. } => {
                "name it with --from: r3, vllm, atom, sglang, nemo-rl, prime-rl or lists; docs/routes.md shows each"
                    .into()
            }
            Self::UnclearModel { source } => source.hint(),
            Self::Unreadable { source, .. } | Self::Unwritable { source } => source.hint(),
            Self::NoSample { .. } => "samples are counted from 0, in the order of the file".into(),
            Self::NoLayer { .. } => "name a MoE layer by the model's own number, dense layers counted".into(),
            Self::ManySamples { .. } => {
                "choose one with --sample N, or write JSON lines: name OUT other than .npy".into()
            }
            Self::NoTarget { .. } => "name it with --to: r3, vllm, atom, sglang, nemo-rl or prime-rl".into(),
            Self::TokenSamples { .. } => "give one line of tokens for each sample, in the same order".into(),
            Self::BadTokens { .. } => {
                r#"write one object a line, such as {"tokens": [5, 17, 9], "prompt_tokens": 2}"#.into()
            }
            Self::Incomparable { source, .. } => source.hint(),
            Self::TooFewExperts { .. } => "raise --experts or lower --top-k".into(),
            Self::BrokenGroups { .. } => "make --completions a multiple of --group-size".into(),
            Self::Threads { .. } => "ask for fewer with --threads, or raise `ulimit -u`".into(),
            Self::Signals { .. } => "raise `ulimit -n` and `ulimit -u`".into(),
            Self::Stdout { .. } => "free some space where stdout goes".into(),
        }
    }

    /// How the process ends.
    pub(crate) fn exit_code(&self) -> ExitCode {
        let class = match self {
            Self::Run(error)
            | Self::Rollout(error)
            | Self::Bench { source: error, .. }
            | Self::Unscored { source: error, .. } => error.exit_class(),
            Self::ComparisonInterrupted => ExitClass::Interrupted,
            Self::OutTaken { .. }
            | Self::NoProblems
            | Self::TooFewHeldOut { .. }
            | Self::Input { .. }
            | Self::BadLine { .. }
            | Self::LongLine { .. }
            | Self::TwoOnStdout
            | Self::NoOp { .. }
            | Self::TooFewExperts { .. }
            | Self::BrokenGroups { .. }
            | Self::RoutesInput { .. }
            | Self::UnknownLayout { .. }
            | Self::UnclearModel { .. }
            | Self::Unreadable { .. }
            | Self::Unwritable { .. }
            | Self::NoSample { .. }
            | Self::NoLayer { .. }
            | Self::ManySamples { .. }
            | Self::NoTarget { .. }
            | Self::TokenSamples { .. }
            | Self::BadTokens { .. }
            | Self::Incomparable { .. } => ExitClass::Usage,
            Self::Threads { .. } | Self::Signals { .. } | Self::Stdout { .. } => ExitClass::Machine,
        };
        ExitCode::from(class as u8)
    }

    /// Whether whoever read stdout has gone, as `| head` does: no reason to complain.
    pub(crate) fn is_closed_pipe(&self) -> bool {
        let source = match self {
            Self::Stdout { source } => source,
            Self::Rollout(error) => match &**error {
                RunError::Io { path, source } if path == Path::new(STDOUT) => source,
                _ => return false,
            },
            _ => return false,
        };
        source.kind() == io::ErrorKind::BrokenPipe
    }
}

/// `:7` of a line whose fault has a column.
fn column_of(error: &InputError) -> String {
    match error {
        InputError::Json { column, .. } => format!(":{column}"),
        _ => String::new(),
    }
}
