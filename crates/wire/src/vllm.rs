//! vLLM's `routed_experts`, and ATOM's: a NumPy file of `[rows, all layers, K]`.
//!
//! The array has a row for each token but the last, and a column for each decoder layer, dense ones included: 0 there
//! in vLLM, -1 in ATOM, and both are read. As a file it is `.npy`; vLLM's server sends the file's bytes in base64, as
//! `choices[].routed_experts`. With `routed_experts_prompt_start` in the request the rows begin there, which the answer
//! does not repeat. The contract is int16; newer servers send uint8, uint16 or int32, and all are read.
//! Source: vLLM, `vllm/entrypoints/openai/chat_completion/protocol.py` (`ChatCompletionResponseChoice`), pull requests
//! 39568 and 51906.

use base64::engine::general_purpose::STANDARD;
use base64::{DecodeError, Engine};
use r3_core::count::counted;
use r3_core::routes::{RouteRows, RouteView};

use crate::array::{Element, LayerAxis, write_all_layers};
use crate::check::Sample;
use crate::error::{Fault, WireError};
use crate::layout::Layout;
use crate::model::ModelShape;
use crate::npy;

/// Reads the bytes of a `.npy` file.
///
/// # Errors
/// If they are no such file, or its array is not the routes of `model` or breaks the contract of `sample`.
pub fn read_npy(bytes: &[u8], model: &ModelShape, sample: &Sample) -> Result<RouteRows, WireError> {
    npy::read(bytes, sample)?.rows(model, LayerAxis::All, sample)
}

/// Reads such a file in base64.
///
/// # Errors
/// As [`read_npy`], and if `text` is not base64.
pub fn read_base64(text: &str, model: &ModelShape, sample: &Sample) -> Result<RouteRows, WireError> {
    read_npy(&decode(text, sample)?, model, sample)
}

/// Writes `.npy`: `element` is int16 by contract, and dense layers are -1 if `sample.layout` is ATOM, else 0.
///
/// # Errors
/// If `routes` are not of `model`, or an id does not fit `element`.
pub fn write_npy(
    routes: RouteView<'_>,
    model: &ModelShape,
    element: Element,
    sample: &Sample,
) -> Result<Vec<u8>, WireError> {
    let dense = if sample.layout == Layout::Atom { -1 } else { 0 };
    let bytes = write_all_layers(routes, model, (element, dense), sample)?;
    Ok(npy::write([routes.rows(), model.n_layers(), model.dims().top_k], element, &bytes))
}

/// Writes such a file in base64, as the server sends it.
///
/// # Errors
/// As [`write_npy`].
pub fn write_base64(
    routes: RouteView<'_>,
    model: &ModelShape,
    element: Element,
    sample: &Sample,
) -> Result<String, WireError> {
    Ok(STANDARD.encode(write_npy(routes, model, element, sample)?))
}

/// Standard base64 with padding, as Python's `b64encode` writes it; all layouts use this one.
pub(crate) fn decode(text: &str, sample: &Sample) -> Result<Vec<u8>, WireError> {
    STANDARD.decode(text).map_err(|error| {
        let reason = match error {
            DecodeError::InvalidByte(at, byte) => format!("byte {byte:#04x} at {at}"),
            DecodeError::InvalidLength(length) => counted(length, "character"),
            DecodeError::InvalidLastSymbol(at, byte) => {
                format!("byte {byte:#04x} at {at}, the last, says too much")
            }
            DecodeError::InvalidPadding => "the padding at its end".into(),
        };
        sample.refuse(Fault::Base64 { reason })
    })
}
