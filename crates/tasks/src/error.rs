//! What can be wrong with datasets, tokenizers, chat templates and rewards.

use std::io;
use std::path::{Path, PathBuf};

use r3_core::count::counted;

use crate::reward::RewardFailure;

/// Why text cannot become prompts, or completions scores.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum TaskError {
    #[error("cannot read {}: {source}", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{} holds no problem", path.display())]
    EmptyFile { path: PathBuf },
    #[error("{}:{line}: {fault}", path.display())]
    Line { path: PathBuf, line: usize, fault: Box<TaskError> },
    #[error("{set} problem {index}: {fault}")]
    Problem { set: &'static str, index: usize, fault: Box<TaskError> },
    #[error("not JSON: {reason}")]
    NotJson { reason: String },
    #[error("`{key}` is missing; the keys are {}", list(found))]
    MissingKey { key: String, found: Vec<String> },
    #[error("`{key}` is {found}, but has to be {expected}")]
    WrongType { key: String, found: &'static str, expected: &'static str },
    #[error("`{key}` is a key that a message cannot have")]
    UnknownMessageKey { key: String },
    #[error("the {what} is empty")]
    Empty { what: &'static str },
    #[error("the last message is the assistant's, which leaves nothing to complete")]
    AssistantLast,
    #[error("the held-out prompt is also on line {other_line} of {}", other.display())]
    HeldOutTwice { other: PathBuf, other_line: usize },
    #[error("the prompt `{prompt}` is there twice, so it could be trained on and held out")]
    DuplicatePrompt { prompt: String },
    #[error("holding out {held_out} of {} leaves none to train on", counted(*n_problems, "problem"))]
    NothingToTrainOn { held_out: usize, n_problems: usize },
    #[error("operands of {digits} digits were asked for, but 1 to 9 are possible")]
    DigitsOutOfRange { digits: u32 },

    #[error("{} is not a tokenizer: {reason}", path.display())]
    BadTokenizer { path: PathBuf, reason: String },
    #[error("{}: {fault}", path.display())]
    BadConfig { path: PathBuf, fault: Box<TaskError> },
    #[error("{} has token {id} (`{token}`), but the model's vocabulary ends at {vocab_size}", path.display())]
    TokenOutOfRange { path: PathBuf, token: String, id: u32, vocab_size: usize },
    #[error("{} sets `{key}` to {id}, but the model's vocabulary ends at {vocab_size}", path.display())]
    IdOutOfRange { path: PathBuf, key: &'static str, id: u64, vocab_size: usize },
    #[error("{} sets `{key}` to {token}, but {} has no such token", path.display(), tokenizer.display())]
    NoSuchToken { path: PathBuf, key: &'static str, token: String, tokenizer: PathBuf },
    #[error("no end token is set in {} (`eos_token`, `eos_token_id`)", list_paths(looked_in))]
    NoEndToken { looked_in: Vec<PathBuf> },
    #[error(
        "the vocabulary has no `{}` (character {position} of `{}`)",
        .piece.escape_debug(), excerpt(.text, *.position)
    )]
    NotInVocabulary { piece: char, position: usize, text: String },
    #[error("the tokenizer failed: {reason}")]
    TokenizerFailed { reason: String },

    #[error("the prompt is chat messages, but {} has no chat template", directory.display())]
    NoChatTemplate { directory: PathBuf },
    #[error("the chat template of {} failed: {reason}", path.display())]
    ChatTemplate { path: PathBuf, reason: String },

    #[error("the answer `{answer}` is not a number")]
    AnswerNotANumber { answer: String },
    #[error("the reward failed on all {n_failed} rollouts of a step; first: {first}")]
    EveryRewardFailed { n_failed: usize, first: RewardFailure },
}

impl TaskError {
    /// What the user can change, printed as `hint: ...`.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::Line { fault, .. } | Self::Problem { fault, .. } | Self::BadConfig { fault, .. } => {
                fault.hint()
            }
            Self::Unreadable { .. } => {
                "check the path and its permissions; paths are relative to where r3 runs".into()
            }
            Self::EmptyFile { .. } => {
                r#"write one JSON object a line, such as {"prompt": "1+1=", "answer": "2"}"#.into()
            }
            Self::NotJson { .. } => "every line has to be one whole JSON object in UTF-8".into(),
            Self::MissingKey { .. } => {
                "give every line this key; a recipe's task may name others for prompt and answer".into()
            }
            Self::WrongType { expected, .. } => format!("make it {expected}"),
            Self::UnknownMessageKey { .. } => "give every message a `role` and a `content` only".into(),
            Self::Empty { .. } => "fill it in, or take the problem out".into(),
            Self::AssistantLast => "end the prompt with a message by the user".into(),
            Self::HeldOutTwice { .. } => {
                "keep each held-out prompt once, and out of the training file".into()
            }
            Self::DuplicatePrompt { .. } => "keep each prompt once, or hold out a file of its own".into(),
            Self::NothingToTrainOn { .. } => "hold fewer problems out".into(),
            Self::DigitsOutOfRange { .. } => {
                "set `digits` to 2 for a task that a tiny model can learn".into()
            }
            Self::BadTokenizer { .. } => "it has to be a tokenizer.json as Hugging Face writes it".into(),
            Self::TokenOutOfRange { .. } | Self::IdOutOfRange { .. } | Self::NoSuchToken { .. } => {
                "use the tokenizer files that came with this model".into()
            }
            Self::NoEndToken { .. } => {
                "set `eos_token_id` in generation_config.json to the token that ends an answer".into()
            }
            Self::NotInVocabulary { .. } => {
                "rewrite the text with characters the tokenizer knows, or use a tokenizer with byte fallback"
                    .into()
            }
            Self::TokenizerFailed { .. } => {
                "try the same text with the Hugging Face `tokenizers` library".into()
            }
            Self::NoChatTemplate { .. } => {
                "put a chat_template.jinja beside the tokenizer, or write prompts as plain strings".into()
            }
            Self::ChatTemplate { .. } => "check roles and order of the messages against the template".into(),
            Self::AnswerNotANumber { .. } => {
                "use the `exact_match` reward, or write answers as numbers".into()
            }
            Self::EveryRewardFailed { .. } => {
                "score a completion with this reward outside a run, to see what breaks".into()
            }
        }
    }

    /// This error, about a line of a file.
    pub(crate) fn at_line(self, path: &Path, line: usize) -> Self {
        Self::Line { path: path.into(), line, fault: Box::new(self) }
    }

    /// This error, about the `index`-th problem of a set.
    pub(crate) fn of_problem(self, set: &'static str, index: usize) -> Self {
        Self::Problem { set, index, fault: Box::new(self) }
    }

    /// This error, about a configuration file.
    pub(crate) fn in_config(self, path: &Path) -> Self {
        Self::BadConfig { path: path.into(), fault: Box::new(self) }
    }
}

/// What stands around character `position` of `text`.
fn excerpt(text: &str, position: usize) -> String {
    const AROUND: usize = 20;
    let start = position.saturating_sub(AROUND);
    let shown: String = text.chars().skip(start).take(2 * AROUND).collect();
    let (before, after) = (
        if start > 0 { "…" } else { "" },
        if text.chars().nth(start + 2 * AROUND).is_some() { "…" } else { "" },
    );
    format!("{before}{}{after}", shown.escape_debug())
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

fn list_paths(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}
