//! `r3 new-model`: random weights for a configuration.

use std::path::PathBuf;

use r3_orchestrator::model_dir::create;

use crate::args::DtypeArg;
use crate::commands::export::written;
use crate::error::CliError;
use crate::output;

/// Write a model with random weights
///
/// OUT becomes a Hugging Face directory: config.json, model.safetensors and, if they lie beside CONFIG, the files of the
/// tokenizer. The same seed gives the same weights. A directory that holds a model already is refused.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A config.json of model type qwen3_moe or dots1, or a directory with one
    config: PathBuf,
    /// Directory to write
    out: PathBuf,
    /// Seed of the weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Format of the weights
    #[arg(long, value_enum, default_value_t = DtypeArg::Bf16)]
    dtype: DtypeArg,
}

impl Args {
    pub(crate) fn execute(&self) -> Result<(), CliError> {
        let model = create(&self.config, &self.out, self.seed, self.dtype.into())?;
        output::print(&written(&self.out, model))
    }
}
