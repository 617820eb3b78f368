//! r3's own file: JSON lines, one rollout a line, routes as base64 of the rows as r3 holds them.
//!
//! What a person compares between two files is plain JSON, in a fixed order; `data` of `routed_experts` is `[rows, L,
//! K]`, u8 for at most 256 experts, else u16 little-endian. Hashes are hexadecimal text, since JSON numbers are not
//! exact at 64 bits. The keys are explained in `docs/json.md`.

use std::io::{self, BufRead, Write};
use std::ops::Range;

use base64::display::Base64Display;
use base64::engine::general_purpose::STANDARD;
use r3_core::count::counted;
use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_core::rollout::{FinishReason, Reward};
use r3_core::routes::{IdWidth, RouteRows, RouteView};
use r3_core::support::{SupportRows, SupportView};
use serde::{Deserialize, Serialize, Serializer};
use xxhash_rust::xxh3::Xxh3;

use crate::check::Sample;
use crate::error::{Fault, WireError, quoted};
use crate::layout::Layout;
use crate::model::checked_dims;
use crate::record::{Record, RecordView, Routes, RoutesView, SamplingParams};
use crate::vllm::decode;

/// What `"r3"` says at the start of a line.
pub const FORMAT_VERSION: u64 = 1;

/// The digest of tokens, as ring frames have it: xxh3 over little-endian 32-bit ids.
#[must_use]
pub fn token_digest(tokens: &[TokenId]) -> u64 {
    let mut hash = Xxh3::new();
    for token in tokens {
        hash.update(&token.0.to_le_bytes());
    }
    hash.digest()
}

/// Writes `record` as one line, its end included.
///
/// # Errors
/// If `out` cannot be written.
///
/// # Panics
/// If a logprob or a reward is not finite: the engine and the scorer made them, so that is a bug.
pub fn write(record: &RecordView<'_>, out: &mut impl Write) -> io::Result<()> {
    let finite = |logprobs: &[f32]| logprobs.iter().all(|logprob| logprob.is_finite());
    assert!(record.rollout_logprobs.is_none_or(finite), "logprobs are finite");
    assert!(record.reward.and_then(Reward::score).is_none_or(f32::is_finite), "a score is finite");
    serde_json::to_writer(&mut *out, &Line::new(record)).map_err(io::Error::from)?;
    out.write_all(b"\n")
}

/// A line as it is written.
#[derive(Serialize)]
struct Line<'a> {
    r3: u64,
    group: u64,
    index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    finish: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens: Option<usize>,
    cached_tokens: usize,
    turns: Vec<[usize; 2]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reward: Option<Option<f32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "write_tokens")]
    tokens: Option<&'a [TokenId]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<&'a [f32]>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "write_versions")]
    versions: Option<&'a [PolicyVersion]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sampling: Option<SamplingParams>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "write_supports")]
    supports: Option<SupportView<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    routed_experts: Option<RoutesLine<'a>>,
}

/// `routed_experts` as it is written.
#[derive(Serialize)]
struct RoutesLine<'a> {
    rows: usize,
    start: usize,
    layer_ids: &'a [u32],
    top_k: usize,
    n_experts: usize,
    dtype: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    weight_epoch: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    model_hash: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_digest: Option<String>,
    #[serde(serialize_with = "write_base64")]
    data: &'a [u8],
}

impl<'a> Line<'a> {
    fn new(record: &RecordView<'a>) -> Self {
        Self {
            r3: FORMAT_VERSION,
            group: record.group.0,
            index: record.index,
            finish: record.finish.map(|finish| finish.to_string()),
            prompt_tokens: record.prompt_tokens,
            cached_tokens: record.cached_tokens,
            turns: record.turns.iter().map(|turn| [turn.start, turn.end]).collect(),
            reward: record.reward.map(Reward::score),
            text: record.text,
            tokens: record.tokens,
            logprobs: record.rollout_logprobs,
            versions: record.versions,
            sampling: record.sampling,
            supports: record.support.filter(|support| !support.ids().is_empty()),
            routed_experts: record.routes.map(|routes| RoutesLine::new(&routes, record.tokens)),
        }
    }
}

impl<'a> RoutesLine<'a> {
    fn new(routes: &RoutesView<'a>, tokens: Option<&[TokenId]>) -> Self {
        let (dims, header) = (routes.rows.dims(), routes.header);
        Self {
            rows: routes.rows.rows(),
            start: header.start,
            layer_ids: header.layer_ids,
            top_k: dims.top_k,
            n_experts: dims.n_experts,
            dtype: dtype(dims.width()),
            weight_epoch: header.weight_epoch,
            model_hash: header.model_hash.map(hexadecimal),
            token_digest: tokens.map(|tokens| hexadecimal(token_digest(tokens))),
            data: routes.rows.bytes(),
        }
    }
}

fn dtype(width: IdWidth) -> &'static str {
    match width {
        IdWidth::U8 => "u8",
        IdWidth::U16 => "u16",
    }
}

fn hexadecimal(hash: u64) -> String {
    format!("{hash:016x}")
}

fn write_tokens<S: Serializer>(tokens: &Option<&[TokenId]>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(tokens.unwrap_or_default().iter().map(|token| token.0))
}

fn write_versions<S: Serializer>(
    versions: &Option<&[PolicyVersion]>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(versions.unwrap_or_default().iter().map(|version| version.0))
}

fn write_supports<S: Serializer>(
    supports: &Option<SupportView<'_>>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let ids = |row: &[TokenId]| row.iter().map(|token| token.0).collect::<Vec<_>>();
    serializer.collect_seq(supports.iter().flat_map(|supports| supports.iter()).map(ids))
}

fn write_base64<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&Base64Display::new(bytes, &STANDARD))
}

/// Reads the records of a file, one line after another. Empty lines are passed over.
pub struct Records<R> {
    lines: R,
    text: Vec<u8>,
    line: usize,
    sample: usize,
}

impl<R: BufRead> Records<R> {
    /// Reads from `lines`.
    pub fn new(lines: R) -> Self {
        Self { lines, text: Vec::new(), line: 0, sample: 0 }
    }

    /// Line of the record that was read last, from 1.
    #[must_use]
    pub fn line(&self) -> usize {
        self.line
    }
}

impl<R: BufRead> Iterator for Records<R> {
    type Item = Result<Record, WireError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            self.text.clear();
            self.line += 1;
            match self.lines.read_until(b'\n', &mut self.text) {
                Ok(0) => return None,
                Ok(_) if self.text.trim_ascii().is_empty() => {}
                Ok(_) => {
                    let record = read(&self.text, self.sample).map_err(|error| match error {
                        WireError::Json { layout, column, reason, .. } => {
                            WireError::Json { layout, line: self.line, column, reason }
                        }
                        error => error,
                    });
                    self.sample += 1;
                    return Some(record);
                }
                Err(source) => return Some(Err(WireError::Read { source })),
            }
        }
    }
}

/// A line as it is read. Keys of later versions are passed over.
#[derive(Deserialize)]
struct LineIn {
    r3: u64,
    group: u64,
    index: u32,
    finish: Option<String>,
    prompt_tokens: Option<usize>,
    #[serde(default)]
    cached_tokens: usize,
    #[serde(default)]
    turns: Vec<[usize; 2]>,
    #[serde(default, deserialize_with = "present")]
    reward: Option<Option<f32>>,
    text: Option<String>,
    tokens: Option<Vec<u32>>,
    logprobs: Option<Vec<f32>>,
    versions: Option<Vec<u64>>,
    sampling: Option<SamplingParams>,
    supports: Option<Vec<Vec<u32>>>,
    routed_experts: Option<RoutesIn>,
}

/// `routed_experts` as it is read.
#[derive(Deserialize)]
struct RoutesIn {
    rows: usize,
    start: usize,
    layer_ids: Vec<u32>,
    top_k: usize,
    n_experts: usize,
    dtype: String,
    weight_epoch: Option<u64>,
    model_hash: Option<String>,
    token_digest: Option<String>,
    data: String,
    /// A bit for each row, lowest first, in base64; left out if every row was written.
    validity: Option<String>,
}

/// Tells a key that is `null` from one that is not there.
fn present<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Option<f32>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// Reads one line; `number` is what a refusal calls the sample.
///
/// # Errors
/// If it is not such a line, or contradicts itself: lengths, turns, digest, or the contract of the routes, of which
/// every row must have been written.
pub fn read(line: &[u8], number: usize) -> Result<Record, WireError> {
    let line: LineIn = serde_json::from_slice(line).map_err(|error| json_error(Layout::R3, &error))?;
    let mut sample = Sample::new(Layout::R3, number);
    if line.r3 != FORMAT_VERSION {
        let (found, expected) = (line.r3, FORMAT_VERSION);
        return Err(sample.refuse(Fault::FormatVersion { found, expected }));
    }
    let mut record = Record {
        finish: line.finish.map(|finish| finish_reason(&finish, &sample)).transpose()?,
        tokens: line.tokens.map(|tokens| tokens.into_iter().map(TokenId).collect()),
        prompt_tokens: line.prompt_tokens,
        cached_tokens: line.cached_tokens,
        turns: line.turns.into_iter().map(|[start, end]| start..end).collect(),
        rollout_logprobs: line.logprobs,
        versions: line.versions.map(|versions| versions.into_iter().map(PolicyVersion).collect()),
        sampling: line.sampling,
        support: line.supports.map(|supports| support_rows(&supports)),
        reward: line.reward.map(|score| score.map_or(Reward::Failed, Reward::Score)),
        text: line.text,
        ..Record::unknown(GroupId(line.group), line.index)
    };
    check_lengths(&record, &sample)?;
    // Of which every list is empty, it says nothing.
    record.support = record.support.filter(|support| !support.view().ids().is_empty());
    if let Some(routes) = line.routed_experts {
        sample = record.sample(Layout::R3, number);
        sample.start = routes.start;
        record.routes = Some(read_routes(routes, record.tokens.as_deref(), &sample)?);
    }
    Ok(record)
}

pub(crate) fn json_error(layout: Layout, error: &serde_json::Error) -> WireError {
    let message = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    let reason = quoted(message.strip_suffix(&place).unwrap_or(&message));
    WireError::Json { layout, line: error.line(), column: error.column(), reason }
}

fn finish_reason(finish: &str, sample: &Sample) -> Result<FinishReason, WireError> {
    let known = [FinishReason::Stop, FinishReason::Length, FinishReason::Abort];
    known.into_iter().find(|reason| reason.to_string() == finish).ok_or_else(|| {
        let found = quoted(finish);
        sample.refuse(Fault::Key { key: "finish", found, needed: "stop, length or abort" })
    })
}

fn support_rows(supports: &[Vec<u32>]) -> SupportRows {
    let mut rows = SupportRows::default();
    supports.iter().for_each(|support| rows.push(support));
    rows
}

/// What a record says of its tokens fits them.
fn check_lengths(record: &Record, sample: &Sample) -> Result<(), WireError> {
    let n_tokens = record.tokens.as_ref().map(Vec::len);
    let first = record.prompt_tokens.or(n_tokens).unwrap_or(0);
    if let Some(n_tokens) = n_tokens {
        check_token_counts(record, n_tokens, sample)?;
    }
    for (n, &logprob) in record.rollout_logprobs.iter().flatten().enumerate() {
        if !logprob.is_finite() {
            return Err(sample.refuse(Fault::Logprob { position: first.saturating_add(n), logprob }));
        }
    }
    if let Some(score) = record.reward.and_then(Reward::score).filter(|score| !score.is_finite()) {
        let (found, needed) = (score.to_string(), "a finite number, or null if it failed");
        return Err(sample.refuse(Fault::Key { key: "reward", found, needed }));
    }
    if let Some(sampling) = record.sampling.filter(|sampling| !sampling.is_valid()) {
        let found = quoted(&serde_json::to_string(&sampling).unwrap_or_default());
        let needed = "a temperature of 0 or more, top_p and min_p from 0 to 1";
        return Err(sample.refuse(Fault::Key { key: "sampling", found, needed }));
    }
    let mut free_from = first;
    for (turn, &Range { start, end }) in record.turns.iter().enumerate() {
        if start < free_from || start >= end || n_tokens.is_some_and(|n_tokens| end > n_tokens) {
            return Err(sample.refuse(Fault::Turn { turn, start, end }));
        }
        free_from = end;
    }
    Ok(())
}

fn check_token_counts(record: &Record, n_tokens: usize, sample: &Sample) -> Result<(), WireError> {
    let (prompt_tokens, cached_tokens) = (record.prompt_tokens.unwrap_or(n_tokens), record.cached_tokens);
    if prompt_tokens == 0 || prompt_tokens > n_tokens || cached_tokens > prompt_tokens {
        return Err(sample.refuse(Fault::Prompt { prompt_tokens, cached_tokens, n_tokens }));
    }
    let expected = n_tokens - prompt_tokens;
    let per_token = [
        ("logprobs", record.rollout_logprobs.as_ref().map(Vec::len)),
        ("versions", record.versions.as_ref().map(Vec::len)),
        ("supports", record.support.as_ref().map(SupportRows::rows)),
    ];
    for (key, found) in per_token {
        if let Some(found) = found.filter(|&found| found != expected) {
            return Err(sample.refuse(Fault::PerToken { key, found, expected }));
        }
    }
    if let (Some(support), Some(tokens)) = (&record.support, &record.tokens) {
        let checked = support.view().check(&tokens[prompt_tokens..], None);
        checked.map_err(|error| sample.refuse(Fault::Support(error)))?;
    }
    Ok(())
}

fn read_routes(routes: RoutesIn, tokens: Option<&[TokenId]>, sample: &Sample) -> Result<Routes, WireError> {
    let dims = checked_dims(&routes.layer_ids, routes.top_k, routes.n_experts);
    let dims = dims.map_err(|error| sample.refuse(error.into()))?;
    if routes.dtype != dtype(dims.width()) {
        let found = quoted(&routes.dtype);
        return Err(sample.refuse(Fault::Dtype { found, allowed: dtype(dims.width()) }));
    }
    let digest = hash(routes.token_digest.as_deref(), "token_digest", sample)?;
    if let (Some(expected), Some(found)) = (digest, tokens.map(token_digest))
        && expected != found
    {
        return Err(sample.refuse(Fault::TokenDigest { found, expected }));
    }
    let bytes = decode(&routes.data, sample)?;
    let view = RouteView::new(dims, &bytes)
        .map_err(|_| sample.refuse(Fault::Ragged { bytes: bytes.len(), row_bytes: dims.row_bytes() }))?;
    if view.rows() != routes.rows {
        let (found, needed) = (routes.rows.to_string(), "the number of rows in `data`");
        return Err(sample.refuse(Fault::Key { key: "rows", found, needed }));
    }
    if let Some(validity) = &routes.validity {
        check_written(&decode(validity, sample)?, view.rows(), routes.layer_ids[0], sample)?;
    }
    sample.check(view, &routes.layer_ids)?;
    let mut rows = RouteRows::with_capacity(dims, view.rows());
    rows.append(&bytes);
    Ok(Routes {
        weight_epoch: routes.weight_epoch,
        model_hash: hash(routes.model_hash.as_deref(), "model_hash", sample)?,
        ..Routes::new(rows, routes.start, routes.layer_ids)
    })
}

fn check_written(validity: &[u8], rows: usize, layer: u32, sample: &Sample) -> Result<(), WireError> {
    if validity.len() != rows.div_ceil(8) {
        let found = counted(validity.len(), "byte");
        return Err(sample.refuse(Fault::Key { key: "validity", found, needed: "a bit for each row" }));
    }
    match (0..rows).find(|row| validity[row / 8] >> (row % 8) & 1 == 0) {
        None => Ok(()),
        Some(row) => {
            let position = sample.start.saturating_add(row);
            Err(sample.refuse(Fault::Unwritten { turn: sample.turn_of(position), layer, position }))
        }
    }
}

fn hash(text: Option<&str>, key: &'static str, sample: &Sample) -> Result<Option<u64>, WireError> {
    let Some(text) = text else { return Ok(None) };
    let digits = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    match digits.then(|| u64::from_str_radix(text, 16).ok()).flatten() {
        Some(hash) => Ok(Some(hash)),
        None => {
            let found = quoted(text);
            Err(sample.refuse(Fault::Key { key, found, needed: "16 hexadecimal digits" }))
        }
    }
}

#[cfg(test)]
mod tests {
    use xxhash_rust::xxh3::xxh3_64;

    use super::*;

    #[test]
    fn the_digest_is_that_of_the_tokens_of_a_frame() {
        // More than the 256 bytes that xxh3 takes at once when it is streamed.
        let tokens: Vec<TokenId> = (0..300).map(|n| TokenId(n * 7919)).collect();
        let section: Vec<u8> = tokens.iter().flat_map(|token| token.0.to_le_bytes()).collect();
        assert_eq!(token_digest(&tokens), xxh3_64(&section));
    }
}
