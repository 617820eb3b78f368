//! The model that is measured.

use std::path::{Path, PathBuf};

use r3_model::config::ModelConfig;
use r3_model::init::FreshWeights;
use r3_model::source::TensorSource;

use crate::error::RunError;
use crate::model_dir;

/// A model, read from a directory or made of its configuration alone.
pub struct Subject {
    /// Its shape.
    pub config: ModelConfig,
    /// Its weights.
    pub source: Box<dyn TensorSource>,
    /// Where files beside it lie, those of a tokenizer if there are any.
    pub dir: PathBuf,
}

impl Subject {
    /// The model of `path`, found as [`model_dir::resolve`] finds it.
    ///
    /// # Errors
    /// As [`model_dir::open`].
    pub fn open(path: &Path) -> Result<Self, RunError> {
        let dir = model_dir::resolve(path)?;
        let checkpoint = model_dir::open(&dir)?;
        Ok(Self { config: checkpoint.config().clone(), source: Box::new(checkpoint), dir })
    }

    /// Random weights for `config`, a `config.json` or a directory with one, as `r3 new-model` makes them.
    ///
    /// # Errors
    /// If the configuration is not one r3 runs.
    pub fn fresh(config: &Path) -> Result<Self, RunError> {
        let path = if config.is_dir() { config.join("config.json") } else { config.to_path_buf() };
        let config = ModelConfig::read(&path)?;
        let source = Box::new(FreshWeights::new(&config, 0));
        Ok(Self { config, source, dir: path.parent().unwrap_or(Path::new("")).to_path_buf() })
    }
}
