//! `r3 export`: a model for other programs.

use std::path::{Path, PathBuf};

use r3_orchestrator::model_dir::{Written, export, export_adapter};

use crate::args::DtypeArg;
use crate::error::CliError;
use crate::output;

/// Write a checkpoint as a model that `transformers`, vLLM and SGLang load
///
/// OUT becomes a Hugging Face directory: config.json, safetensors with one tensor an expert, and the files of the
/// tokenizer. The optimiser's state stays behind. A directory that holds a model already is refused.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A checkpoint, a run, whose newest checkpoint is taken, or any model r3 reads
    checkpoint: PathBuf,
    /// Directory to write
    out: PathBuf,
    /// Format of the weights
    #[arg(long, value_enum, default_value_t = DtypeArg::Bf16)]
    dtype: DtypeArg,
    /// Write the updates of `train.lora` alone, as an adapter for PEFT
    #[arg(long, conflicts_with = "dtype")]
    adapter: bool,
}

impl Args {
    pub(crate) fn execute(&self) -> Result<(), CliError> {
        if self.adapter {
            let parameters = grouped(export_adapter(&self.checkpoint, &self.out)?);
            return output::print(&format!(
                "wrote {}: an adapter of {parameters} parameters, f32\n",
                self.out.display()
            ));
        }
        let model = export(&self.checkpoint, &self.out, self.dtype.into())?;
        output::print(&written(&self.out, model))
    }
}

/// One line about a model that was written.
pub(crate) fn written(out: &Path, model: Written) -> String {
    format!("wrote {}: {} parameters, {}\n", out.display(), grouped(model.parameters), model.dtype)
}

/// `1234567` as `1,234,567`.
fn grouped(count: usize) -> String {
    let digits = count.to_string();
    let commas = |(at, digit): (usize, char)| {
        let comma = at > 0 && (digits.len() - at).is_multiple_of(3);
        comma.then_some(',').into_iter().chain([digit])
    };
    digits.chars().enumerate().flat_map(commas).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_set_apart() {
        let cases = [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")];
        assert!(cases.iter().all(|&(count, text)| grouped(count) == text));
    }
}
