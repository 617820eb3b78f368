//! SGLang's `meta_info.routed_experts`: a flat array of int32 in base64, with its shape left out.
//!
//! The rows are `[rows, all layers, K]`, dense layers included (0, or -1 in newer versions); what is missing of the
//! shape is the model's. Rows begin at `routed_experts_start_len` of the request, at most the tokens of its prompt, and
//! end before the last token. The server does not repeat the start; where a client kept it in `meta_info`, it is read.
//! Source: SGLang, `python/sglang/srt/state_capturer/routed_experts.py` and `managers/io_struct.py`
//! (`GenerateReqInput`), pull request 12162.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use r3_core::routes::{RouteRows, RouteView};

use crate::array::{Array, Element, LayerAxis, write_all_layers};
use crate::check::Sample;
use crate::error::{Fault, WireError};
use crate::model::ModelShape;
use crate::vllm::decode;

/// Reads the string; `sample.start` is the request's `routed_experts_start_len`.
///
/// # Errors
/// If `text` is not base64, is no whole number of rows of `model`, or its routes break the contract of `sample`.
pub fn read(text: &str, model: &ModelShape, sample: &Sample) -> Result<RouteRows, WireError> {
    let bytes = decode(text, sample)?;
    let row_bytes = model.n_layers() * model.dims().top_k * Element::Int32.bytes();
    if !bytes.len().is_multiple_of(row_bytes) {
        return Err(sample.refuse(Fault::Ragged { bytes: bytes.len(), row_bytes }));
    }
    let shape = [bytes.len() / row_bytes, model.n_layers(), model.dims().top_k];
    Array::new(shape, Element::Int32, &bytes, sample)?.rows(model, LayerAxis::All, sample)
}

/// Writes the string; dense layers are 0.
///
/// # Errors
/// If `routes` are not of `model`.
pub fn write(routes: RouteView<'_>, model: &ModelShape, sample: &Sample) -> Result<String, WireError> {
    Ok(STANDARD.encode(write_all_layers(routes, model, (Element::Int32, 0), sample)?))
}
