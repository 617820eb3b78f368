//! Why a model directory cannot be used, or a forward cannot run.

use std::path::PathBuf;

/// What went wrong with a model, named so that the file or tensor can be found.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum ModelError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: std::io::Error },
    #[error("{} is not valid JSON", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{}: `{key}` is {found}, but r3 needs {needed}", path.display())]
    Config { path: PathBuf, key: &'static str, found: String, needed: String },
    #[error("{}: model type `{model_type}` is not supported", path.display())]
    ModelType { path: PathBuf, model_type: String },
    #[error("{} is not a whole safetensors file: {reason}", path.display())]
    Safetensors { path: PathBuf, reason: String },
    #[error("{} is a Git LFS pointer and not the file itself", path.display())]
    LfsPointer { path: PathBuf },
    #[error("{}: no model.safetensors and no model.safetensors.index.json", dir.display())]
    NoWeights { dir: PathBuf },
    #[error("{}: tensor `{name}` is missing", dir.display())]
    Missing { dir: PathBuf, name: String },
    #[error("{}: tensor `{name}` is not part of this model", dir.display())]
    Surplus { dir: PathBuf, name: String },
    #[error("{}: tensor `{name}` has shape {found:?}, but config.json implies {needed:?}", dir.display())]
    Shape { dir: PathBuf, name: String, found: Vec<usize>, needed: Vec<usize> },
    #[error("{}: tensor `{name}` is stored as {found}", dir.display())]
    Dtype { dir: PathBuf, name: String, found: String },
    #[error("tensor `{name}` is {value} at element {index}")]
    NotFinite { name: String, index: usize, value: f32 },
    #[error("no tensor `{name}` in these weights")]
    NoSuchTensor { name: String },
    #[error("token {token} at position {position} is outside the vocabulary of {vocab_size}")]
    TokenOutOfRange { token: u32, position: usize, vocab_size: usize },
    #[error("a sequence of {tokens} tokens exceeds the model's {max_positions} positions")]
    TooLong { tokens: usize, max_positions: usize },
    #[error("a tensor operation failed")]
    Tensor(#[from] candle_core::Error),
}

impl ModelError {
    /// What the user can change.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::Read { path, .. } if path.ends_with("config.json") => {
                "name a Hugging Face model directory, with config.json and *.safetensors".into()
            }
            Self::Read { .. } => "check that the file exists and is readable".into(),
            Self::Write { .. } => "free some space or choose another directory; nothing was replaced".into(),
            Self::Json { path, .. } | Self::Config { path, .. } => {
                let file = path.file_name().unwrap_or_default().to_string_lossy();
                format!("fix {file} or export the model again")
            }
            Self::ModelType { .. } => "r3 runs `qwen3_moe` and `dots1` models".into(),
            Self::Safetensors { .. } => "the file is truncated or corrupt: copy or download it again".into(),
            Self::LfsPointer { .. } => {
                "fetch what it points to with `git lfs pull`, or download the model again".into()
            }
            Self::NoWeights { .. } => "r3 reads safetensors only; convert other formats first".into(),
            Self::Missing { .. } | Self::Surplus { .. } | Self::Shape { .. } => {
                "config.json and the weights do not belong together: check both come from one model".into()
            }
            Self::Dtype { .. } => "r3 reads bf16, f16 and f32 weights; convert quantised models first".into(),
            Self::NotFinite { .. } => "the weights are damaged: go back to an earlier checkpoint".into(),
            Self::TokenOutOfRange { .. } => "the tokenizer and the model do not belong together".into(),
            Self::TooLong { .. } => "shorten the sequences, or take a model with more positions".into(),
            Self::NoSuchTensor { .. } | Self::Tensor(_) => "this is a bug in r3; please report it".into(),
        }
    }
}
