//! What can go wrong with a ring, and what the user can do about it.

use std::fmt;
use std::io;
use std::time::Duration;

use r3_core::routes::{RouteDims, RouteError};
use r3_core::support::SupportError;

/// One of the two ends of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The end that rollouts go in at.
    Writer,
    /// The end that the trainer reads from.
    Reader,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Writer => "writer",
            Self::Reader => "reader",
        })
    }
}

/// What an end of the ring waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The reader: a committed frame.
    Frame,
    /// The writer: released frames that make this much room.
    Space {
        /// Free bytes the record needs, its header included.
        bytes: u64,
    },
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Frame => f.write_str("a frame from the writer"),
            Self::Space { bytes } => write!(f, "the reader to release {bytes} bytes"),
        }
    }
}

/// Why a ring cannot be made, opened, written or read.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum RingError {
    #[error("the ring needs {needed_bytes} bytes of memory, but {available_bytes} are available")]
    NoRoom { needed_bytes: u64, available_bytes: u64 },
    #[error("{call} failed for a ring of {needed_bytes} bytes")]
    System { call: &'static str, needed_bytes: u64, source: io::Error },
    #[error("cannot read {what}")]
    Unreadable { what: &'static str, source: io::Error },
    #[error("not a ring: it starts with {magic:#018x}")]
    NotARing { magic: u64 },
    #[error("the ring has format version {found}, but this build speaks {expected}")]
    FormatVersion { found: u32, expected: u32 },
    #[error("the ring says it holds {header_bytes} bytes, but its file has room for {file_bytes}")]
    Capacity { header_bytes: u64, file_bytes: u64 },
    #[error("the ring's file may still shrink, which would crash whoever has it mapped")]
    Unsealed,
    #[error("the ring already has a {side}, process {pid}")]
    Taken { side: Side, pid: u32 },
    #[error("the ring holds {ring_bytes} bytes, but one frame needs {frame_bytes}")]
    FrameTooLarge { frame_bytes: u64, ring_bytes: u64 },
    #[error("waited {waited:.1?} for {wait}")]
    Timeout { wait: Wait, waited: Duration },
    #[error("the ring's writer, process {pid}, died; every frame it committed has been read")]
    WriterDied { pid: u32 },
    #[error("the ring's reader, process {pid}, died")]
    ReaderDied { pid: u32 },
    #[error("the ring's {side} is closed")]
    Closed { side: Side },
    #[error("the ring is corrupt: {what} is {value} at byte {position} of the stream")]
    Corrupt { what: &'static str, value: u64, position: u64 },
}

impl RingError {
    /// What the user can change, printed as `hint: ...`.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::NoRoom { available_bytes, .. } => {
                format!("set `ring.bytes` below {available_bytes}, or free memory")
            }
            Self::System { .. } | Self::Unreadable { .. } => {
                "a ring needs memfd_create (Linux 3.17) and /proc; look at this process's limits \
                (`ulimit -a`)"
                    .into()
            }
            Self::NotARing { .. } | Self::Capacity { .. } | Self::Unsealed | Self::Corrupt { .. } => {
                "start writer and reader from the same build, on the file of `Ring::create_shared`".into()
            }
            Self::FormatVersion { .. } => "start writer and reader from the same build".into(),
            Self::Taken { side, .. } => format!("a ring has one {side}: make a new ring for the next"),
            Self::FrameTooLarge { frame_bytes, .. } => {
                format!("set `ring.bytes` to at least {}", frame_bytes.saturating_mul(2))
            }
            Self::Timeout { wait: Wait::Frame, .. } => {
                "the rollout worker is slow or stuck: raise the deadline, or generate fewer tokens".into()
            }
            Self::Timeout { wait: Wait::Space { .. }, .. } => {
                "the trainer is slow, or holds too many frames: raise \
                the deadline, or set `ring.bytes` to the frames of two steps"
                    .into()
            }
            Self::WriterDied { .. } => "look at the rollout worker's last lines, then resume the run".into(),
            Self::ReaderDied { .. } => "look at the trainer's last lines, then resume the run".into(),
            Self::Closed { .. } => "the other end has finished: nothing more comes through this ring".into(),
        }
    }
}

/// Why bytes are not a frame.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum FrameError {
    #[error("a frame of {needed_bytes} bytes cannot be {bytes} bytes long")]
    Length { bytes: u64, needed_bytes: u64 },
    #[error("not a frame: the magic is {magic:#018x}")]
    NotAFrame { magic: u64 },
    #[error("the frame has format version {found}, but this build speaks {expected}")]
    FormatVersion { found: u32, expected: u32 },
    #[error("the frame does not start on a multiple of 8 bytes")]
    Misaligned,
    #[error("the frame's bytes hash to {found:#018x}, but it was written as {expected:#018x}")]
    Checksum { found: u64, expected: u64 },
    #[error("rollout {index} of group {group}: {fault}")]
    Sample { group: u64, index: u32, fault: SampleFault },
}

/// What is wrong with the sample in a frame that is whole and unharmed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum SampleFault {
    #[error("its lengths do not add up to {total_bytes} bytes")]
    Lengths { total_bytes: u64 },
    #[error("a prompt of {prompt_tokens} tokens, {cached_tokens} of them cached, in {n_tokens} tokens")]
    Prompt { prompt_tokens: u64, cached_tokens: u64, n_tokens: u64 },
    #[error("tokens hash to {found:#018x}, but were sampled as {expected:#018x}")]
    TokenDigest { found: u64, expected: u64 },
    #[error("position {position}: the logprob is {logprob}")]
    Logprob { position: usize, logprob: f32 },
    #[error("position {position}: the mask is {mask}, neither 0 nor 1")]
    Mask { position: usize, mask: u8 },
    #[error("finish reason {byte} does not exist")]
    Finish { byte: u8 },
    #[error("the reward is {reward} with failure flag {failed}")]
    Reward { reward: f32, failed: u8 },
    #[error("a frame of format version {format_version} cannot have {n_kept} tokens in supports")]
    Kept { n_kept: u32, format_version: u32 },
    #[error("{0}")]
    Support(SupportError),
    #[error("byte {at} of the frame belongs to nothing, but is {byte:#04x}")]
    Padding { at: usize, byte: u8 },
    #[error(
        "MoE layer {layer} is layer {layer_id} of the model, but the one before it is layer {previous_id}"
    )]
    LayerIds { layer: usize, layer_id: u32, previous_id: u32 },
    #[error("routes start at position {start}, not at 0")]
    Start { start: u64 },
    #[error(
        "routes of {} layers, {} of {} experts, {id_bytes} bytes an id, do not exist",
        dims.n_layers, dims.top_k, dims.n_experts
    )]
    Dims { dims: RouteDims, id_bytes: u8 },
    #[error("routes have {rows} rows, but the tokens need {expected_rows}")]
    Rows { rows: usize, expected_rows: usize },
    #[error("position {position}: its routes were never written")]
    Unwritten { position: usize },
    #[error("{error}{}", DisplayLayer(*layer_id))]
    Routes { error: RouteError, layer_id: Option<u32> },
}

impl SampleFault {
    /// A broken route contract, with the model's own number of the layer that broke it.
    pub(crate) fn routes(error: RouteError, layer_ids: &[u32]) -> Self {
        let layer = match error {
            RouteError::OutOfRange { layer, .. } | RouteError::Duplicate { layer, .. } => Some(layer),
            RouteError::RaggedBytes { .. } | RouteError::RowCount { .. } => None,
        };
        Self::Routes { error, layer_id: layer.and_then(|layer| layer_ids.get(layer).copied()) }
    }
}

struct DisplayLayer(Option<u32>);

impl fmt::Display for DisplayLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |layer_id| write!(f, " (layer {layer_id} of the model)"))
    }
}

impl FrameError {
    /// What the user can change, printed as `hint: ...`.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::NotAFrame { .. } | Self::FormatVersion { .. } => {
                "start writer and reader from the same build".into()
            }
            Self::Length { .. } | Self::Misaligned | Self::Checksum { .. } => {
                "the bytes were damaged on their way: check this machine's memory, or their file".into()
            }
            Self::Sample { fault: SampleFault::Reward { .. }, .. } => {
                "a reward is a finite number: look at the reward function".into()
            }
            Self::Sample { .. } => {
                "the engine broke the contract: check that it captures routes for every token \
                and layer of this model, or set `router_replay: { mode: off }`"
                    .into()
            }
        }
    }
}
