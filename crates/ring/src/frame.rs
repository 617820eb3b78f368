//! A rollout as bytes: written by the worker straight into the ring, read by the trainer in place.
//!
//! ```text
//! header | layer_ids u32 [L] | versions u64 [N] | tokens u32 [T] | logprobs f32 [N] | mask u8 [N]
//!        | routes [rows, L, K] | validity bitmap [rows] | support sizes u32 [N] | supports u32
//! ```
//!
//! Little-endian; every section starts on eight bytes. [`Frame::decode`] takes nothing on trust, so a frame
//! may as well come from a file: it refuses whatever is damaged or contradicts itself, and names what it
//! refuses.

use std::ops::Range;

use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_core::rollout::{FinishReason, Reward, RolloutView};
use r3_core::routes::{RouteDims, RouteView};
use r3_core::support::SupportView;
use xxhash_rust::xxh3::xxh3_64;

use crate::error::{FrameError, SampleFault};
use crate::frame_layout::{
    Counts, FORMAT_VERSION, HEADER_BYTES, Header, Layout, MAGIC, SECTION_ALIGN, SUPPORT_VERSION,
};

/// What a frame says about a rollout beyond the rollout itself.
#[derive(Clone, Copy, Debug)]
pub struct FrameMeta<'a> {
    /// `[L]`: the model's layers that the routes are of, ascending. Not written if the rollout has no routes.
    pub layer_ids: &'a [u32],
    /// Weights the engine held when the rollout finished, counted by refits.
    pub weight_epoch: u64,
    /// Which weights: one hash over all tensors as the engine holds them.
    pub model_hash: u64,
    /// What the completion earned.
    pub reward: Reward,
    /// `[N]`, 1 where a sampled token is trained on; `None` for everywhere.
    pub mask: Option<&'a [u8]>,
}

/// Bytes of the frame of `rollout`: what to reserve before [`encode`].
///
/// # Panics
/// If the rollout contradicts itself: more prompt than tokens.
#[must_use]
pub fn frame_bytes(rollout: &RolloutView<'_>) -> usize {
    Layout::new(counts(rollout)).expect("a rollout in memory fits the address space").total_bytes
}

/// An upper bound on [`frame_bytes`] for any rollout of at most `max_tokens` tokens: what one frame may need
/// of a ring, to be checked before a run starts. `dims` is the shape of its route rows, `None` if replay is
/// off; `max_support` the tokens that a draw keeps at most, `None` if draws are not truncated.
#[must_use]
pub fn max_frame_bytes(max_tokens: usize, dims: Option<RouteDims>, max_support: Option<usize>) -> usize {
    let routes = dims.map(|dims| (max_tokens, dims));
    let n_kept = max_support.map_or(0, |max_support| max_tokens.saturating_mul(max_support));
    let layout = Layout::new(Counts { n_tokens: max_tokens, n_sampled: max_tokens, routes, n_kept });
    layout.map_or(usize::MAX, |layout| layout.total_bytes)
}

/// Writes the frame of `rollout` into `out`, every byte of it.
///
/// # Panics
/// If `out` is not [`frame_bytes`] long, or the parts of rollout and meta do not fit each other: lengths that
/// are not `[T]`, `[N]`, `[L]`, a mask that is not 0 or 1, a score that is not finite. The engine and the
/// worker made them, so that is a bug. What the routes say is for [`Frame::decode`] to check.
pub fn encode(rollout: &RolloutView<'_>, meta: &FrameMeta<'_>, out: &mut [u8]) {
    let layout = Layout::new(counts(rollout)).expect("a rollout in memory fits the address space");
    assert_eq!(out.len(), layout.total_bytes, "a frame is written whole");
    assert_eq!(rollout.rollout_logprobs.len(), rollout.tokens.len() - rollout.prompt_tokens);
    assert_eq!(rollout.versions.len(), rollout.rollout_logprobs.len());

    for padding in layout.padding() {
        out[padding].fill(0);
    }

    put(&mut out[layout.versions], rollout.versions.iter().map(|version| version.0.to_le_bytes()));
    put(&mut out[layout.tokens.clone()], rollout.tokens.iter().map(|token| token.0.to_le_bytes()));
    put(&mut out[layout.logprobs], rollout.rollout_logprobs.iter().map(|logprob| logprob.to_le_bytes()));
    match meta.mask {
        Some(mask) => {
            assert!(mask.iter().all(|&on| on <= 1), "a mask is 0 or 1");
            out[layout.mask].copy_from_slice(mask);
        }
        None => out[layout.mask].fill(1),
    }
    if let Some(routes) = rollout.routes {
        put(&mut out[layout.layer_ids], meta.layer_ids.iter().map(|id| id.to_le_bytes()));
        out[layout.routes].copy_from_slice(routes.bytes());
        fill_bits(&mut out[layout.validity], routes.rows());
    }
    if let Some(support) = kept(rollout) {
        put(&mut out[layout.support_sizes], support.sizes().iter().map(|size| size.to_le_bytes()));
        put(&mut out[layout.support], support.ids().iter().map(|token| token.0.to_le_bytes()));
    }
    let token_digest = xxh3_64(&out[layout.tokens]);
    let header = header(rollout, meta, layout.total_bytes, token_digest);
    out[..HEADER_BYTES].copy_from_slice(bytemuck::bytes_of(&header));
    let checksum = xxh3_64(&out[size_of::<u64>()..]);
    out[..size_of::<u64>()].copy_from_slice(&checksum.to_le_bytes());
}

fn counts(rollout: &RolloutView<'_>) -> Counts {
    let n_tokens = rollout.tokens.len();
    let n_sampled = n_tokens.checked_sub(rollout.prompt_tokens).expect("the prompt is part of the tokens");
    let n_kept = kept(rollout).map_or(0, |support| support.ids().len());
    Counts {
        n_tokens,
        n_sampled,
        routes: rollout.routes.map(|routes| (routes.rows(), routes.dims())),
        n_kept,
    }
}

/// The supports of a rollout, if any token has one.
fn kept<'a>(rollout: &RolloutView<'a>) -> Option<SupportView<'a>> {
    rollout.support.filter(|support| !support.ids().is_empty())
}

/// The header without its checksum.
fn header(rollout: &RolloutView<'_>, meta: &FrameMeta<'_>, total_bytes: usize, token_digest: u64) -> Header {
    let narrow = |n: usize| u32::try_from(n).expect("dimensions of a model fit 32 bits");
    let reward = meta.reward.score().unwrap_or(0.0);
    assert!(reward.is_finite(), "a score is finite, what is not has failed");
    let dims = rollout.routes.map(RouteView::dims);
    let shape = |of: fn(RouteDims) -> usize| dims.map_or(0, of);
    let n_kept = narrow(kept(rollout).map_or(0, |support| support.ids().len()));
    Header {
        checksum: 0,
        magic: MAGIC,
        total_bytes: total_bytes as u64,
        weight_epoch: meta.weight_epoch,
        model_hash: meta.model_hash,
        token_digest,
        group: rollout.group.0,
        n_tokens: rollout.tokens.len() as u64,
        prompt_tokens: rollout.prompt_tokens as u64,
        cached_tokens: rollout.cached_tokens as u64,
        rows: rollout.routes.map_or(0, |routes| routes.rows() as u64),
        start: 0,
        format_version: if n_kept > 0 { SUPPORT_VERSION } else { FORMAT_VERSION },
        index: rollout.index,
        n_layers: narrow(shape(|dims| dims.n_layers)),
        top_k: narrow(shape(|dims| dims.top_k)),
        n_experts: narrow(shape(|dims| dims.n_experts)),
        reward,
        finish: rollout.finish.to_byte(),
        reward_failed: u8::from(meta.reward == Reward::Failed),
        has_routes: u8::from(dims.is_some()),
        id_bytes: dims.map_or(0, |dims| dims.width().bytes() as u8),
        n_kept,
    }
}

fn put<const WIDTH: usize>(out: &mut [u8], values: impl ExactSizeIterator<Item = [u8; WIDTH]>) {
    assert_eq!(out.len(), values.len() * WIDTH, "a section is written whole");
    for (place, value) in out.as_chunks_mut().0.iter_mut().zip(values) {
        *place = value;
    }
}

/// Sets the first `n` bits, lowest first, and clears the others.
fn fill_bits(out: &mut [u8], n: usize) {
    out[..n / 8].fill(0xff);
    out[n / 8..].fill((1 << (n % 8)) - 1);
}

/// A frame that passed every check, borrowed from the bytes it was read from.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    rollout: RolloutView<'a>,
    layer_ids: &'a [u32],
    weight_epoch: u64,
    model_hash: u64,
    reward: Reward,
    mask: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Checks `bytes` and reads them as a frame, in place. Never panics, whatever the bytes.
    ///
    /// Checked are magic, format version, length, checksum, token digest, every count and dimension, that
    /// logprobs are finite and the mask is 0 or 1, and the route contract: layers in ascending order, one row per
    /// token that was fed (`T - 1`, or `T` if nothing was sampled), each of them written, ids in range and
    /// distinct ([`RouteView::check`]); supports ascend and hold what was drawn from them ([`SupportView::check`]). What
    /// belongs to nothing is 0, so a rollout has one frame: encoding what
    /// was decoded gives the same bytes.
    ///
    /// # Errors
    /// The first violation, with the sample, layer and position it is about.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, FrameError> {
        let header = checked_header(bytes)?;
        read_sample(bytes, &header).map_err(|fault| FrameError::Sample {
            group: header.group,
            index: header.index,
            fault,
        })
    }

    /// The rollout.
    #[must_use]
    pub fn rollout(&self) -> RolloutView<'a> {
        self.rollout
    }

    /// `[L]`: the model's layers that the routes are of; empty without routes.
    #[must_use]
    pub fn layer_ids(&self) -> &'a [u32] {
        self.layer_ids
    }

    /// Weights the engine held when the rollout finished, counted by refits.
    #[must_use]
    pub fn weight_epoch(&self) -> u64 {
        self.weight_epoch
    }

    /// Which weights: one hash over all tensors as the engine holds them.
    #[must_use]
    pub fn model_hash(&self) -> u64 {
        self.model_hash
    }

    /// What the completion earned.
    #[must_use]
    pub fn reward(&self) -> Reward {
        self.reward
    }

    /// `[N]`, 1 where a sampled token is trained on, else 0.
    #[must_use]
    pub fn mask(&self) -> &'a [u8] {
        self.mask
    }
}

/// Checks and reads frames that lie one after another, as in a file, in place.
///
/// # Errors
/// As [`Frame::decode`], of the first frame that is broken or cut off.
pub fn decode_all(mut bytes: &[u8]) -> Result<Vec<Frame<'_>>, FrameError> {
    let mut frames = Vec::new();
    while !bytes.is_empty() {
        // A length that is wrong makes a frame that is refused, as one too short for its header is.
        let header = bytes.get(..HEADER_BYTES).map(bytemuck::pod_read_unaligned::<Header>);
        let n_bytes =
            header.map_or(bytes.len(), |header| usize::try_from(header.total_bytes).unwrap_or(usize::MAX));
        let (frame, rest) = bytes.split_at(n_bytes.clamp(1, bytes.len()));
        frames.push(Frame::decode(frame)?);
        bytes = rest;
    }
    Ok(frames)
}

/// The header, once the bytes are known to be a whole and unharmed frame.
fn checked_header(bytes: &[u8]) -> Result<Header, FrameError> {
    let truncated = |needed_bytes| FrameError::Length { bytes: bytes.len() as u64, needed_bytes };
    let head = bytes.get(..HEADER_BYTES).ok_or(truncated(HEADER_BYTES as u64))?;
    let header: Header = bytemuck::pod_read_unaligned(head);
    if header.magic != MAGIC {
        return Err(FrameError::NotAFrame { magic: header.magic });
    }
    if !(FORMAT_VERSION..=SUPPORT_VERSION).contains(&header.format_version) {
        return Err(FrameError::FormatVersion { found: header.format_version, expected: SUPPORT_VERSION });
    }
    if header.total_bytes != bytes.len() as u64 {
        return Err(truncated(header.total_bytes));
    }
    if !bytes.as_ptr().addr().is_multiple_of(SECTION_ALIGN) {
        return Err(FrameError::Misaligned);
    }
    let checksum = xxh3_64(&bytes[size_of::<u64>()..]);
    if checksum != header.checksum {
        return Err(FrameError::Checksum { found: checksum, expected: header.checksum });
    }
    Ok(header)
}

fn read_sample<'a>(bytes: &'a [u8], header: &Header) -> Result<Frame<'a>, SampleFault> {
    let counts = checked_counts(header)?;
    let layout = Layout::new(counts).filter(|layout| layout.total_bytes == bytes.len());
    let layout = layout.ok_or(SampleFault::Lengths { total_bytes: header.total_bytes })?;

    if let Some(at) = layout.padding().into_iter().flatten().find(|&at| bytes[at] != 0) {
        return Err(SampleFault::Padding { at, byte: bytes[at] });
    }
    let token_digest = xxh3_64(&bytes[layout.tokens.clone()]);
    if token_digest != header.token_digest {
        return Err(SampleFault::TokenDigest { found: token_digest, expected: header.token_digest });
    }
    let rollout_logprobs: &[f32] = typed(&bytes[layout.logprobs]);
    let mask = &bytes[layout.mask];
    let prompt_tokens = counts.n_tokens - counts.n_sampled;
    if let Some(n) = rollout_logprobs.iter().position(|logprob| !logprob.is_finite()) {
        return Err(SampleFault::Logprob { position: prompt_tokens + n, logprob: rollout_logprobs[n] });
    }
    if let Some(n) = mask.iter().position(|&on| on > 1) {
        return Err(SampleFault::Mask { position: prompt_tokens + n, mask: mask[n] });
    }
    let layer_ids = typed(&bytes[layout.layer_ids]);
    let routes = match counts.routes {
        Some((_, dims)) => {
            check_layer_ids(layer_ids)?;
            let routes =
                checked_routes(&bytes[layout.routes], &bytes[layout.validity.clone()], dims, layer_ids)?;
            check_last_bits(bytes, layout.validity, routes.rows())?;
            Some(routes)
        }
        None => None,
    };
    let tokens = token_ids(typed(&bytes[layout.tokens]));
    let support = match counts.n_kept {
        0 => None,
        _ => Some(checked_support(
            bytes,
            (layout.support_sizes, layout.support),
            &tokens[prompt_tokens..],
            mask,
        )?),
    };
    let rollout = RolloutView {
        group: GroupId(header.group),
        index: header.index,
        tokens,
        prompt_tokens,
        rollout_logprobs,
        versions: policy_versions(typed(&bytes[layout.versions])),
        routes,
        support,
        finish: FinishReason::from_byte(header.finish).ok_or(SampleFault::Finish { byte: header.finish })?,
        cached_tokens: usize::try_from(header.cached_tokens).expect("at most prompt_tokens"),
    };
    Ok(Frame {
        rollout,
        layer_ids,
        weight_epoch: header.weight_epoch,
        model_hash: header.model_hash,
        reward: reward(header)?,
        mask,
    })
}

/// The counts of the header, once they fit each other and the route contract.
fn checked_counts(header: &Header) -> Result<Counts, SampleFault> {
    let lengths = SampleFault::Lengths { total_bytes: header.total_bytes };
    let (Ok(n_tokens), Ok(rows)) = (usize::try_from(header.n_tokens), usize::try_from(header.rows)) else {
        return Err(lengths);
    };
    let (prompt_tokens, cached_tokens) = (header.prompt_tokens, header.cached_tokens);
    if prompt_tokens == 0 || prompt_tokens > header.n_tokens || cached_tokens > prompt_tokens {
        return Err(SampleFault::Prompt { prompt_tokens, cached_tokens, n_tokens: header.n_tokens });
    }
    let n_sampled = usize::try_from(header.n_tokens - prompt_tokens).map_err(|_| lengths)?;
    let n_kept = header.n_kept;
    if (n_kept > 0) != (header.format_version == SUPPORT_VERSION) {
        return Err(SampleFault::Kept { n_kept, format_version: header.format_version });
    }
    if header.start != 0 {
        return Err(SampleFault::Start { start: header.start });
    }
    let shape = [header.n_layers, header.top_k, header.n_experts];
    let [n_layers, top_k, n_experts] = shape.map(|n| n as usize);
    let dims = RouteDims { n_layers, top_k, n_experts };
    let refused = SampleFault::Dims { dims, id_bytes: header.id_bytes };
    let routes = match header.has_routes {
        0 if shape == [0; 3] && rows == 0 && header.id_bytes == 0 => None,
        1 => {
            let possible = n_layers >= 1 && (1..=n_experts).contains(&top_k) && n_experts <= 1 << 16;
            if !possible || usize::from(header.id_bytes) != dims.width().bytes() {
                return Err(refused);
            }
            // The last token was never fed, unless nothing was sampled after it.
            let expected_rows = n_tokens - usize::from(n_sampled > 0);
            if rows != expected_rows {
                return Err(SampleFault::Rows { rows, expected_rows });
            }
            Some((rows, dims))
        }
        _ => return Err(refused),
    };
    Ok(Counts { n_tokens, n_sampled, routes, n_kept: n_kept as usize })
}

fn checked_support<'a>(
    bytes: &'a [u8],
    (sizes, ids): (Range<usize>, Range<usize>),
    drawn: &[TokenId],
    mask: &[u8],
) -> Result<SupportView<'a>, SampleFault> {
    let support = SupportView::new(typed(&bytes[sizes]), token_ids(typed(&bytes[ids])));
    let support = support.map_err(SampleFault::Support)?;
    support.check(drawn, Some(mask)).map_err(SampleFault::Support)?;
    Ok(support)
}

fn check_layer_ids(layer_ids: &[u32]) -> Result<(), SampleFault> {
    match layer_ids.windows(2).position(|pair| pair[0] >= pair[1]) {
        None => Ok(()),
        Some(before) => {
            let (layer_id, previous_id) = (layer_ids[before + 1], layer_ids[before]);
            Err(SampleFault::LayerIds { layer: before + 1, layer_id, previous_id })
        }
    }
}

/// No row is behind the bits that are left of the last byte of the bitmap.
fn check_last_bits(bytes: &[u8], validity: Range<usize>, rows: usize) -> Result<(), SampleFault> {
    let at = validity.end - 1;
    let used = rows - 8 * (validity.len() - 1);
    let is_unused = |bit: usize| bytes[at] >> bit & 1 == 1;
    if (used..8).any(is_unused) { Err(SampleFault::Padding { at, byte: bytes[at] }) } else { Ok(()) }
}

fn checked_routes<'a>(
    bytes: &'a [u8],
    validity: &[u8],
    dims: RouteDims,
    layer_ids: &[u32],
) -> Result<RouteView<'a>, SampleFault> {
    let named = |error| SampleFault::routes(error, layer_ids);
    let routes = RouteView::new(dims, bytes).map_err(named)?;
    let written = |row: usize| validity[row / 8] >> (row % 8) & 1 == 1;
    if let Some(position) = (0..routes.rows()).find(|row| !written(*row)) {
        return Err(SampleFault::Unwritten { position });
    }
    routes.check(routes.rows()).map_err(named)?;
    Ok(routes)
}

fn reward(header: &Header) -> Result<Reward, SampleFault> {
    match header.reward_failed {
        0 if header.reward.is_finite() => Ok(Reward::Score(header.reward)),
        1 if header.reward.to_bits() == 0 => Ok(Reward::Failed),
        failed => Err(SampleFault::Reward { reward: header.reward, failed }),
    }
}

/// A section as what it holds.
fn typed<T: bytemuck::Pod>(section: &[u8]) -> &[T] {
    bytemuck::try_cast_slice(section).expect("sections are aligned and hold whole elements")
}

fn token_ids(raw: &[u32]) -> &[TokenId] {
    // SAFETY: `TokenId` is a transparent `u32`, for which every bit pattern is valid.
    unsafe { std::slice::from_raw_parts(raw.as_ptr().cast(), raw.len()) }
}

fn policy_versions(raw: &[u64]) -> &[PolicyVersion] {
    // SAFETY: `PolicyVersion` is a transparent `u64`, for which every bit pattern is valid.
    unsafe { std::slice::from_raw_parts(raw.as_ptr().cast(), raw.len()) }
}
