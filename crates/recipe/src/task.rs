//! What is trained, and on what: the model and the task.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The policy to start from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Hugging Face directory with `config.json` and safetensors, relative to the current directory.
    pub path: PathBuf,
    /// File or directory of `tokenizer.json`; the model's own by default.
    #[serde(default)]
    pub tokenizer: Option<PathBuf>,
}

impl Model {
    /// Where the tokenizer lies.
    #[must_use]
    pub fn tokenizer_path(&self) -> &Path {
        self.tokenizer.as_deref().unwrap_or(&self.path)
    }
}

/// A model that does not exist yet: `r3 sft` initialises it at random from the run's seed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NewModel {
    /// A Hugging Face `config.json`, relative to the current directory.
    pub config: PathBuf,
    /// File or directory of `tokenizer.json`; the directory of `config` by default.
    #[serde(default)]
    pub tokenizer: Option<PathBuf>,
}

impl NewModel {
    /// Where the tokenizer lies.
    #[must_use]
    pub fn tokenizer_path(&self) -> &Path {
        self.tokenizer.as_deref().unwrap_or_else(|| self.config.parent().unwrap_or(Path::new("")))
    }
}

/// What `r3 sft` starts from, in YAML `new: { config: … }` or `existing: { path: … }`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum NewOrExistingModel {
    /// Random weights for a configuration.
    New(NewModel),
    /// The weights of a directory.
    Existing(Model),
}

/// Where prompts come from and how completions are judged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Task {
    /// Sums of two numbers, generated.
    Arithmetic(Arithmetic),
    /// Prompts and answers from files of JSON lines.
    Jsonl(Jsonl),
}

impl Task {
    /// How completions are judged.
    #[must_use]
    pub fn reward(&self) -> Reward {
        match self {
            Self::Arithmetic(arithmetic) => arithmetic.reward,
            Self::Jsonl(jsonl) => jsonl.reward,
        }
    }

    /// Answers that a rollout may give.
    #[must_use]
    pub fn attempts(&self) -> usize {
        match self {
            Self::Arithmetic(arithmetic) => arithmetic.attempts as usize,
            Self::Jsonl(_) => 1,
        }
    }
}

/// `47+38=` → `85`: every pair of operands from `10^(digits - 1)` to `10^digits - 1`, or 65,536
/// pairs where there are more.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Arithmetic {
    /// Digits of each operand, 1 to 9.
    pub digits: u32,
    /// Pairs kept for evaluation and never trained on.
    pub held_out: usize,
    /// Seed of the split into trained and held-out pairs. Not the run's, so that runs share their evaluation.
    pub seed: u64,
    /// How a completion is judged.
    pub reward: Reward,
    /// Answers a rollout may give, 1 to 16: after a wrong one it is told so and tries again, and the last one counts.
    /// Evaluations take the first.
    pub attempts: u32,
}

impl Arithmetic {
    /// Problems there are, trained and held out: `(9 * 10^(digits - 1))^2`, or 65,536 where there would be more.
    #[must_use]
    pub fn n_problems(&self) -> u64 {
        (9 * 10_u64.pow(self.digits.clamp(1, 9) - 1)).pow(2).min(1 << 16)
    }
}

impl Default for Arithmetic {
    fn default() -> Self {
        Self { digits: 2, held_out: 1000, seed: 0, reward: Reward::ExactMatch, attempts: 1 }
    }
}

/// JSON lines, one object per prompt. Paths are relative to the current directory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Jsonl {
    /// File to train on.
    pub train: PathBuf,
    /// File to evaluate on.
    #[serde(default)]
    pub eval: Option<PathBuf>,
    /// Key of the prompt: a string, or a list of chat messages.
    #[serde(default = "prompt_key")]
    pub prompt_key: String,
    /// Key of the expected answer, a string.
    #[serde(default = "answer_key")]
    pub answer_key: String,
    /// Last lines of `train` kept for evaluation when there is no `eval`.
    #[serde(default)]
    pub held_out: usize,
    /// How a completion is judged.
    #[serde(default)]
    pub reward: Reward,
}

fn prompt_key() -> String {
    "prompt".into()
}

fn answer_key() -> String {
    "answer".into()
}

/// How a completion becomes a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Reward {
    /// 1 if the completion is the answer and ends with a stop token, else 0.
    #[default]
    ExactMatch,
    /// 1 if the last number in the completion has the answer's value and a stop token ended it, else 0.
    NumericMatch,
}
