//! Why routes from outside are refused, and what can be done about it.

use std::io;

use r3_core::count::counted;
use r3_core::support::SupportError;

use crate::array::Element;
use crate::layout::Layout;

/// What stopped the reading or writing of routes.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum WireError {
    #[error("cannot read the routes")]
    Read { source: io::Error },
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("line {line}, column {column}: not {layout} JSON: {reason}")]
    Json { layout: Layout, line: usize, column: usize, reason: String },
    #[error("{layout}, sample {sample}: {fault}")]
    Sample { layout: Layout, sample: usize, fault: Fault },
}

/// Characters of somebody's file that a refusal quotes at most.
const QUOTED_CHARS: usize = 160;

/// `text` of somebody's file as a refusal may quote it: not at any length, and without what would move a cursor.
pub(crate) fn quoted(text: &str) -> String {
    let shown = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    text.chars().take(QUOTED_CHARS).map(shown).collect()
}

/// Why a model cannot be as it is described.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum ModelError {
    #[error("which model sampled is not said, and these routes do not say it")]
    Undescribed,
    #[error("no layer is a MoE layer")]
    NoMoeLayer,
    #[error("MoE layer {after} is listed after layer {before}, but their ids ascend")]
    LayerOrder { before: u32, after: u32 },
    #[error("MoE layer {layer_id} does not exist in a model of {}", counted(*n_layers, "layer"))]
    LayerBeyond { layer_id: u32, n_layers: usize },
    #[error("a model of {n_layers} layers is more than the {max_layers} r3 knows how to read")]
    TooDeep { n_layers: usize, max_layers: usize },
    #[error(
        "{top_k} of {} a token do not exist: there are 1 to 65536, and a token takes 1 to all",
        counted(*n_experts, "expert")
    )]
    Experts { top_k: usize, n_experts: usize },
}

/// What is wrong with one sample. `layer` is the model's own number of a layer, `position` that of a token.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum Fault {
    #[error("turn {turn}: `routed_experts` is missing")]
    Missing { turn: usize },
    #[error("`{key}` is {found}, not {needed}")]
    Key { key: &'static str, found: String, needed: &'static str },
    #[error(transparent)]
    Header(#[from] ModelError),
    #[error("format version {found}, but this build reads {expected}")]
    FormatVersion { found: u64, expected: u64 },
    #[error("the routes are not base64: {reason}")]
    Base64 { reason: String },
    #[error("not a NumPy array file: {reason}")]
    Npy { reason: &'static str },
    #[error("not an envelope `nrlre1:<dtype>:<S>x<L>x<K>:<base64>`: {reason}")]
    Envelope { reason: &'static str },
    #[error("expert ids are `{found}`, not one of {allowed}")]
    Dtype { found: String, allowed: &'static str },
    #[error("the shape is {found:?}, not [rows, layers, experts of a token]")]
    Shape { found: Vec<usize> },
    #[error("the routes are {}, but the shape {shape:?} of {element} needs {needed_bytes}", counted(*bytes, "byte"))]
    Length { bytes: usize, shape: [usize; 3], element: Element, needed_bytes: u128 },
    #[error("the routes are {}, not a multiple of the {row_bytes} bytes of a row", counted(*bytes, "byte"))]
    Ragged { bytes: usize, row_bytes: usize },
    #[error(
        "turn {turn}, position {position}: not {} of {}, as the first row is",
        counted(*layers, "list"),
        counted(*top_k, "integer")
    )]
    RaggedList { turn: usize, position: usize, layers: usize, top_k: usize },
    #[error(
        "the routes are of {}, but the model has {}, {} among them",
        counted(*found, "layer"),
        counted(*n_layers, "layer"),
        counted(*moe_layers, "MoE layer")
    )]
    Layers { found: usize, n_layers: usize, moe_layers: usize },
    #[error("the routes are of layers {found:?}, but the model's MoE layers are {expected:?}")]
    LayerIds { found: Vec<u32>, expected: Vec<u32> },
    #[error("the routes are of {} a token, but the model takes {expected}", counted(*found, "expert"))]
    TopK { found: usize, expected: usize },
    #[error("the routes are over {}, but the model has {expected}", counted(*found, "expert"))]
    Experts { found: usize, expected: usize },
    #[error("routes start at position {start}, but the rows of {} end at {end}", counted(*n_tokens, "token"))]
    Start { start: usize, n_tokens: usize, end: usize },
    #[error("routes start at position {start}, which no token has")]
    StartBeyond { start: usize },
    #[error("this layout has no place for routes that start at position {start}")]
    StartUnsaid { start: usize },
    #[error(
        "turn {turn}: routes have {} from position {start} on, instead of {expected_rows} for {}",
        counted(*rows, "row"),
        counted(*n_tokens, "token")
    )]
    Rows { turn: usize, start: usize, rows: usize, expected_rows: usize, n_tokens: usize },
    #[error(
        "turn {turn}, layer {layer}: nothing but expert 0 was sent for {} from {position} on; \
        the engine never captured this layer",
        counted(*rows, "position")
    )]
    NeverCaptured { turn: usize, layer: u32, position: usize, rows: usize },
    #[error("turn {turn}, layer {layer}, position {position}: the routes were never written")]
    Unwritten { turn: usize, layer: u32, position: usize },
    #[error(
        "turn {turn}, layer {layer}, position {position}: expert {expert} does not exist (the layer has {n_experts})"
    )]
    OutOfRange { turn: usize, layer: u32, position: usize, expert: i64, n_experts: usize },
    #[error("turn {turn}, layer {layer}, position {position}: expert {expert} appears twice")]
    Duplicate { turn: usize, layer: u32, position: usize, expert: u16 },
    #[error(
        "turn {turn}, layer {layer}, position {position}: expert {expert} in a dense layer, which routes nothing"
    )]
    Dense { turn: usize, layer: usize, position: usize, expert: i64 },
    #[error(
        "turn {turn}, layer {layer}, position {position}: expert {expert} in the row of the last token, which is \
        padding: 0 to K - 1"
    )]
    Padding { turn: usize, layer: usize, position: usize, expert: i64 },
    #[error("turn {turn}, layer {layer}, position {position}: expert {expert} does not fit {element}")]
    TooWide { turn: usize, layer: u32, position: usize, expert: u16, element: Element },
    #[error("{element} cannot say -1, which marks dense layers")]
    Unsigned { element: Element },
    #[error("tokens hash to {found:016x}, but the routes are of tokens that hash to {expected:016x}")]
    TokenDigest { found: u64, expected: u64 },
    #[error("the routes are of weight epoch {found}, not {expected}")]
    WeightEpoch { found: u64, expected: u64 },
    #[error("the routes are of the weights {found:016x}, not {expected:016x}")]
    ModelHash { found: u64, expected: u64 },
    #[error(
        "a prompt of {}, {cached_tokens} of them cached, in {}",
        counted(*prompt_tokens, "token"),
        counted(*n_tokens, "token")
    )]
    Prompt { prompt_tokens: usize, cached_tokens: usize, n_tokens: usize },
    #[error("the tokens differ from those sent at position {position}")]
    OtherTokens { position: usize },
    #[error(
        "`{key}` has {} for {} after the prompt", counted(*found, "value"), counted(*expected, "token")
    )]
    PerToken { key: &'static str, found: usize, expected: usize },
    #[error("turn {turn}: sampled positions {start} to {end} are not in order, or outside the completion")]
    Turn { turn: usize, start: usize, end: usize },
    #[error("position {position}: the logprob is {logprob}")]
    Logprob { position: usize, logprob: f32 },
    #[error("{0}")]
    Support(SupportError),
}

impl WireError {
    /// What the user can change, printed as `hint: ...`.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::Read { .. } => "name a file that can be read to its end".into(),
            Self::Model(error) => error.hint(),
            Self::Json { layout, .. } => format!("docs/routes.md shows what {layout} sends"),
            Self::Sample { layout, fault, .. } => fault.hint(*layout),
        }
    }
}

impl ModelError {
    /// What the user can change, printed as `hint: ...`.
    #[must_use]
    pub fn hint(&self) -> String {
        "describe the model that sampled: with --model DIR, or with --layers, --moe-layers, --experts and --top-k"
            .into()
    }
}

impl Fault {
    /// What the user can change, printed as `hint: ...`.
    #[must_use]
    pub fn hint(&self, layout: Layout) -> String {
        match self {
            Self::Header(_) => "the header of the routes was changed: write the file again".into(),
            Self::Missing { .. } => match layout {
                Layout::R3 => "sample with `router_replay: { mode: r3 }`".into(),
                Layout::Sglang => {
                    "start SGLang with --enable-return-routed-experts, and ask for `return_routed_experts`".into()
                }
                _ => format!("start {layout} with `enable_return_routed_experts`"),
            },
            Self::Layers { .. } | Self::LayerIds { .. } | Self::TopK { .. } | Self::Experts { .. }
                if layout == Layout::R3 =>
            {
                "another model sampled this: name the one that did".into()
            }
            Self::Layers { .. } | Self::LayerIds { .. } | Self::TopK { .. } | Self::Experts { .. } => {
                "describe the model that sampled: with --model DIR, or with --layers, --moe-layers, --experts and \
                --top-k"
                    .into()
            }
            Self::Dense { .. } | Self::Padding { .. } | Self::OutOfRange { .. } | Self::Ragged { .. } => {
                "if the model is described as it was sampled, the engine sent other routes than its own".into()
            }
            Self::Rows { .. } | Self::Start { .. } | Self::StartBeyond { .. } => {
                "a token has a row once it was an input, so all but the last; say with --start where they begin".into()
            }
            Self::NeverCaptured { .. } => {
                "the MoE kernel in use captures nothing, as vLLM's on CPUs: choose another, or turn router replay off"
                    .into()
            }
            Self::Unwritten { .. } | Self::Duplicate { .. } => {
                format!("{layout} lost or mixed up rows: sample again, and report it to its authors")
            }
            Self::TooWide { .. } => "write a layout with wider ids: sglang, nemo-rl, prime-rl or r3".into(),
            Self::Unsigned { .. } => "write a signed dtype: int16 or int32".into(),
            Self::StartUnsaid { .. } => "ask for the rows of all tokens, or write another layout".into(),
            Self::OtherTokens { .. } => "give the tokens of the same samples, in the same order".into(),
            Self::WeightEpoch { .. } | Self::ModelHash { .. } | Self::TokenDigest { .. } => {
                "tokens and routes belong together, and to the weights that sampled them: take both from one rollout"
                    .into()
            }
            Self::Base64 { .. } | Self::Length { .. } | Self::Npy { .. } | Self::Envelope { .. } => {
                format!("the file was cut short or changed, or is not {layout}'s: name its layout with --from")
            }
            Self::Key { .. }
            | Self::Dtype { .. }
            | Self::Shape { .. }
            | Self::RaggedList { .. }
            | Self::Prompt { .. }
            | Self::PerToken { .. }
            | Self::Turn { .. }
            | Self::Support(_)
            | Self::Logprob { .. } => format!("docs/routes.md shows what {layout} sends"),
            Self::FormatVersion { .. } => "read the file with the r3 that wrote it".into(),
        }
    }
}
