//! `r3 routes`: files of routes, shown, compared and converted.

mod convert;
mod diff;
mod show;

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use r3_orchestrator::model_dir;
use r3_wire::document::{self, Reading};
use r3_wire::error::ModelError;
use r3_wire::layout::Layout;
use r3_wire::model::ModelShape;
use r3_wire::record::Record;

use crate::error::CliError;

/// Show, compare and convert files of expert routes, r3's own and other engines'
///
/// Read and written are r3's own file, and the layouts of vLLM, ATOM, SGLang, NeMo-RL and prime-rl.
/// Whatever is read is checked: ids in range and distinct, a row for every token but the last, the right layers, no layer
/// that was never captured. A refusal names the engine, the sample, the turn, the model's layer and the position.
/// docs/routes.md shows every layout.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Show(show::Args),
    Diff(diff::Args),
    Convert(convert::Args),
}

impl Args {
    pub(crate) fn execute(&self) -> Result<(), CliError> {
        match &self.command {
            Command::Show(args) => args.execute(),
            Command::Diff(args) => args.execute(),
            Command::Convert(args) => args.execute(),
        }
    }
}

/// A layout, as arguments name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LayoutArg {
    /// JSON lines of `r3 rollout`
    R3,
    /// .npy, or in base64 in a server's answers; dense layers 0
    Vllm,
    /// As vllm, dense layers -1
    Atom,
    /// int32 in base64, in `meta_info`
    Sglang,
    /// `nrlre1:` envelopes
    NemoRl,
    /// Objects of data, shape, start and dtype
    PrimeRl,
    /// Nested lists, as `r3 score` prints them; read only
    Lists,
}

impl From<LayoutArg> for Layout {
    fn from(layout: LayoutArg) -> Self {
        match layout {
            LayoutArg::R3 => Self::R3,
            LayoutArg::Vllm => Self::Vllm,
            LayoutArg::Atom => Self::Atom,
            LayoutArg::Sglang => Self::Sglang,
            LayoutArg::NemoRl => Self::NemoRl,
            LayoutArg::PrimeRl => Self::PrimeRl,
            LayoutArg::Lists => Self::Lists,
        }
    }
}

/// How a file is read, and what its routes must be of.
#[derive(Debug, clap::Args)]
struct InputArgs {
    /// Layout of the input; found by content where it can be no other
    #[arg(long, value_enum, value_name = "LAYOUT")]
    from: Option<LayoutArg>,
    /// Model that sampled: a Hugging Face directory, a checkpoint, or a run; r3's own files need none
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// In place of --model: its decoder layers, dense ones included
    #[arg(long, value_name = "N", conflicts_with = "model")]
    layers: Option<usize>,
    /// In place of --model: its MoE layers, as in 1-26 or 0,2,4
    #[arg(long, value_name = "LIST", conflicts_with = "model", value_parser = parse_layers)]
    moe_layers: Option<Layers>,
    /// In place of --model: experts of a MoE layer
    #[arg(long, value_name = "N", conflicts_with = "model")]
    experts: Option<usize>,
    /// In place of --model: experts a token takes
    #[arg(long, value_name = "N", conflicts_with = "model")]
    top_k: Option<usize>,
    /// Position of the first row, where the input does not say
    #[arg(long, value_name = "N", default_value_t = 0)]
    start: usize,
    /// Refuse routes that say they are of another weight epoch
    #[arg(long, value_name = "N")]
    weight_epoch: Option<u64>,
}

/// Layer ids, ascending as given.
#[derive(Clone, Debug)]
struct Layers(Vec<u32>);

/// The layers of `1-26` or `0,2,4-7`.
fn parse_layers(text: &str) -> Result<Layers, String> {
    let mut layers = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |digits: &str| {
            digits
                .parse::<u32>()
                .ok()
                .filter(|layer| *layer < 1 << 16)
                .ok_or_else(|| format!("`{part}` is not a layer or a range of layers, such as 3 or 3-26"))
        };
        layers.extend(number(first)?..=number(last)?);
    }
    Ok(Layers(layers))
}

/// The records of one file.
struct Loaded {
    /// Its name in messages.
    input: String,
    layout: Layout,
    records: Vec<Record>,
}

impl InputArgs {
    /// The model as arguments describe it; `None` if they do not.
    fn shape(&self) -> Result<Option<ModelShape>, CliError> {
        if let Some(dir) = &self.model {
            return Ok(Some(model_dir::route_shape(dir)?));
        }
        match (self.layers, &self.moe_layers, self.top_k, self.experts) {
            (Some(layers), Some(Layers(moe)), Some(top_k), Some(experts)) => {
                let shape = ModelShape::new(layers, moe.clone(), top_k, experts);
                Ok(Some(shape.map_err(unclear)?))
            }
            // How many layers there are is all that r3's own files leave out.
            (_, None, None, None) => Ok(None),
            _ => Err(unclear(ModelError::Undescribed)),
        }
    }

    /// Reads and checks every record of `path`.
    fn load(&self, path: &Path) -> Result<Loaded, CliError> {
        let input = input_name(path);
        let bytes = read_file(path)?;
        let layout = match self.from {
            Some(layout) => layout.into(),
            None => Layout::guess(&bytes).ok_or_else(|| CliError::UnknownLayout { input: input.clone() })?,
        };
        let shape = self.shape()?;
        let reading = Reading { layout, model: shape.as_ref(), start: self.start };
        let unreadable = |source| CliError::Unreadable { input: input.clone(), source };
        let records = document::read(&bytes, &reading).map_err(unreadable)?;
        for (number, record) in records.iter().enumerate() {
            let sample = record.sample(layout, number);
            record.check_weights(self.weight_epoch, None, &sample).map_err(unreadable)?;
        }
        Ok(Loaded { input, layout, records })
    }
}

impl Loaded {
    /// The records with their numbers: all, or the one of that number.
    fn selected(&self, sample: Option<usize>) -> Result<Vec<(usize, &Record)>, CliError> {
        let all = self.records.iter().enumerate();
        let n_samples = self.records.len();
        match sample {
            Some(sample) if sample >= n_samples => {
                Err(CliError::NoSample { input: self.input.clone(), sample, n_samples })
            }
            _ => Ok(all.filter(|(number, _)| sample.is_none_or(|sample| sample == *number)).collect()),
        }
    }
}

fn unclear(source: ModelError) -> CliError {
    CliError::UnclearModel { source }
}

fn input_name(path: &Path) -> String {
    if path == Path::new("-") { "stdin".into() } else { path.display().to_string() }
}

fn read_file(path: &Path) -> Result<Vec<u8>, CliError> {
    let mut bytes = Vec::new();
    let read = match path == Path::new("-") {
        true => io::stdin().lock().read_to_end(&mut bytes).map(|_| bytes),
        false => fs::read(path),
    };
    read.map_err(|source| CliError::RoutesInput { path: input_name(path).into(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_numbers_and_ranges() {
        let parsed = |text| parse_layers(text).map(|Layers(layers)| layers);
        assert_eq!(parsed("0,2,4-6").unwrap(), [0, 2, 4, 5, 6]);
        assert_eq!(parsed("7").unwrap(), [7]);
        for wrong in ["", "1,", "a", "-1", "1-", "1-2-3", "4294967296", "0-4294967295"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }
}
