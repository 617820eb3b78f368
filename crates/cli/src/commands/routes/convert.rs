//! `r3 routes convert`: routes from one layout to another.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use r3_core::count::counted;
use r3_orchestrator::out_file::OutFile;
use r3_wire::array::Element;
use r3_wire::document;
use r3_wire::error::{ModelError, WireError};
use r3_wire::layout::Layout;
use r3_wire::model::ModelShape;
use r3_wire::record::Record;
use r3_wire::{r3_file, vllm};
use serde::Deserialize;

use crate::commands::routes::{InputArgs, Loaded, input_name, read_file, unclear};
use crate::error::CliError;
use crate::output;

/// Convert routes from one layout to another; back again, they are the same bytes
///
/// Tokens go along, in the keys that the layout has for them; logprobs, versions and rewards stay in r3's own files, which
/// alone have a place for them. Layouts other than r3's have all layers of the model: say which it is with --model, or,
/// if IN is r3's own, how many layers it has with --layers.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A file of routes; - is stdin
    #[arg(value_name = "IN")]
    file: PathBuf,
    /// File to write, - for stdout; .npy is one array, anything else JSON lines
    out: PathBuf,
    #[command(flatten)]
    input: InputArgs,
    /// Layout of OUT; vllm if it ends in .npy, else r3 for any input but r3's own
    #[arg(long, value_enum, value_name = "LAYOUT")]
    to: Option<ToArg>,
    /// This sample only, from 0
    #[arg(long, value_name = "N")]
    sample: Option<usize>,
    /// JSON lines with the "tokens" and "prompt_tokens" of every sample, for input that lacks them
    #[arg(long, value_name = "FILE")]
    tokens: Option<PathBuf>,
    /// Element type of vLLM's and ATOM's array
    #[arg(long, value_enum, default_value_t = DtypeArg::Int16)]
    dtype: DtypeArg,
    /// Replace OUT if it is there
    #[arg(long)]
    overwrite: bool,
}

/// A layout that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ToArg {
    /// JSON lines, as `r3 rollout` writes them
    R3,
    /// .npy, or in base64 in a server's answer; dense layers 0
    Vllm,
    /// As vllm, dense layers -1
    Atom,
    /// int32 in base64, in `meta_info`
    Sglang,
    /// `nrlre1:` envelopes
    NemoRl,
    /// Objects of data, shape, start and dtype
    PrimeRl,
}

impl From<ToArg> for Layout {
    fn from(to: ToArg) -> Self {
        match to {
            ToArg::R3 => Self::R3,
            ToArg::Vllm => Self::Vllm,
            ToArg::Atom => Self::Atom,
            ToArg::Sglang => Self::Sglang,
            ToArg::NemoRl => Self::NemoRl,
            ToArg::PrimeRl => Self::PrimeRl,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DtypeArg {
    Int8,
    Uint8,
    Int16,
    Uint16,
    Int32,
}

impl From<DtypeArg> for Element {
    fn from(dtype: DtypeArg) -> Self {
        match dtype {
            DtypeArg::Int8 => Self::Int8,
            DtypeArg::Uint8 => Self::Uint8,
            DtypeArg::Int16 => Self::Int16,
            DtypeArg::Uint16 => Self::Uint16,
            DtypeArg::Int32 => Self::Int32,
        }
    }
}

/// What `--tokens` needs of a line; other keys are passed over.
#[derive(Deserialize)]
struct TokensLine {
    tokens: Vec<u32>,
    prompt_tokens: usize,
}

impl Args {
    pub(crate) fn execute(&self) -> Result<(), CliError> {
        let mut file = self.input.load(&self.file)?;
        let to = self.target(file.layout)?;
        if let Some(path) = &self.tokens {
            put_in_tokens(&mut file, path)?;
        }
        let selected = file.selected(self.sample)?;
        let bytes = self.convert(&selected, to)?;
        let mut out = OutFile::open(&self.out, self.overwrite)?;
        out.write(|out| out.write_all(&bytes))?;
        out.commit()?;
        let (n_samples, input) = (selected.len(), &file.input);
        output::message(&format!(
            "{input}: {}, from {} to {to}\n",
            counted(n_samples, "sample"),
            file.layout
        ));
        Ok(())
    }

    fn is_array(&self) -> bool {
        self.out.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("npy"))
    }

    fn target(&self, from: Layout) -> Result<Layout, CliError> {
        match (self.to, from) {
            (Some(to), _) => Ok(to.into()),
            (None, _) if self.is_array() => Ok(Layout::Vllm),
            (None, Layout::R3) => Err(CliError::NoTarget { path: self.out.clone() }),
            (None, _) => Ok(Layout::R3),
        }
    }

    fn convert(&self, selected: &[(usize, &Record)], to: Layout) -> Result<Vec<u8>, CliError> {
        let mut out = Vec::new();
        let element = Element::from(self.dtype);
        if to == Layout::R3 {
            for (_, record) in selected {
                r3_file::write(&record.view(), &mut out).expect("memory can be written");
            }
            return Ok(out);
        }
        if self.is_array() && matches!(to, Layout::Vllm | Layout::Atom) {
            let [(number, record)] = selected else {
                return Err(CliError::ManySamples { n_samples: selected.len() });
            };
            let sample = record.sample(to, *number);
            let model = self.model_of(record)?;
            // Refuses what is not of this model.
            document::write(record, &model, element, &sample).map_err(unwritable)?;
            let routes = record.routes.as_ref().expect("it was written");
            return vllm::write_npy(routes.rows.view(), &model, element, &sample).map_err(unwritable);
        }
        for (number, record) in selected {
            let sample = record.sample(to, *number);
            let value =
                document::write(record, &self.model_of(record)?, element, &sample).map_err(unwritable)?;
            serde_json::to_writer(&mut out, &value).expect("plain values always serialise");
            out.push(b'\n');
        }
        Ok(out)
    }

    /// The model of the arguments, or of the record's own header and `--layers`.
    fn model_of(&self, record: &Record) -> Result<ModelShape, CliError> {
        if let Some(shape) = self.input.shape()? {
            return Ok(shape);
        }
        let (Some(layers), Some(routes)) = (self.input.layers, &record.routes) else {
            return Err(unclear(ModelError::Undescribed));
        };
        let dims = routes.rows.view().dims();
        let shape = ModelShape::new(layers, routes.layer_ids.clone(), dims.top_k, dims.n_experts);
        shape.map_err(unclear)
    }
}

fn unwritable(source: WireError) -> CliError {
    CliError::Unwritable { source }
}

fn put_in_tokens(file: &mut Loaded, path: &Path) -> Result<(), CliError> {
    let bytes = read_file(path)?;
    let input = input_name(path);
    let lines = bytes.split(|byte| *byte == b'\n').zip(1..).filter(|(line, _)| !line.trim_ascii().is_empty());
    let lines: Vec<_> = lines.collect();
    if lines.len() != file.records.len() {
        let (found, expected) = (lines.len(), file.records.len());
        return Err(CliError::TokenSamples { input, found, expected });
    }
    for (number, (record, (text, line))) in file.records.iter_mut().zip(lines).enumerate() {
        let tokens: TokensLine = serde_json::from_slice(text).map_err(|error| {
            let message = error.to_string();
            let reason = message.split(" at line 1 column").next().unwrap_or(&message).to_owned();
            CliError::BadTokens { input: input.clone(), line, column: error.column(), reason }
        })?;
        let sample = record.sample(file.layout, number);
        let put_in = record.set_tokens(tokens.tokens, tokens.prompt_tokens, &sample);
        put_in.map_err(|source| CliError::Unreadable { input: file.input.clone(), source })?;
    }
    Ok(())
}
