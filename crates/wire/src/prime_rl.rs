//! prime-rl's object: `{"data": base64, "shape": [rows, layers, K], "start": position, "dtype": "uint8" | "uint16"}`.
//!
//! It is vLLM's array, so over all layers, dense ones 0; its type follows the largest id in it, not the model: uint8 up
//! to 255, else uint16. `start` is the position of the first row. NVIDIA's Dynamo sends the same object.
//! Source: prime-rl, `src/prime_rl/inference/vllm/routed_experts.py` (`serialize_routed_experts`); Dynamo, pull
//! request 10529.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use r3_core::routes::{RouteRows, RouteView};
use serde::{Deserialize, Serialize};

use crate::array::{Array, Element, LayerAxis, write_all_layers};
use crate::check::Sample;
use crate::error::{Fault, WireError, quoted};
use crate::model::ModelShape;
use crate::vllm::decode;

/// The object, as JSON has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Payload {
    /// The array in base64.
    pub data: String,
    /// `[rows, layers, K]`.
    pub shape: Vec<usize>,
    /// Position of the first row.
    #[serde(default)]
    pub start: usize,
    /// NumPy's name of the element type.
    pub dtype: String,
}

/// Reads the object. Its own `start` counts, not `sample.start`.
///
/// # Errors
/// If the array is not the routes of `model`, or breaks the contract of `sample`.
pub fn read(payload: &Payload, model: &ModelShape, sample: &Sample) -> Result<RouteRows, WireError> {
    let sample = &Sample { start: payload.start, ..sample.clone() };
    let Some(element) = Element::from_name(&payload.dtype) else {
        let found = quoted(&payload.dtype);
        let allowed = "int8, uint8, int16, uint16, int32, uint32, int64";
        return Err(sample.refuse(Fault::Dtype { found, allowed }));
    };
    let shape: [usize; 3] = payload.shape.as_slice().try_into().map_err(|_| {
        let found = payload.shape.iter().take(65).copied().collect();
        sample.refuse(Fault::Shape { found })
    })?;
    let bytes = decode(&payload.data, sample)?;
    Array::new(shape, element, &bytes, sample)?.rows(model, LayerAxis::All, sample)
}

/// Writes the object.
///
/// # Errors
/// If `routes` are not of `model`.
pub fn write(routes: RouteView<'_>, model: &ModelShape, sample: &Sample) -> Result<Payload, WireError> {
    let bytes = match write_all_layers(routes, model, (Element::Uint8, 0), sample) {
        Err(WireError::Sample { fault: Fault::TooWide { .. }, .. }) => None,
        written => Some((Element::Uint8, written?)),
    };
    let (element, bytes) = match bytes {
        Some(written) => written,
        None => (Element::Uint16, write_all_layers(routes, model, (Element::Uint16, 0), sample)?),
    };
    Ok(Payload {
        data: STANDARD.encode(bytes),
        shape: vec![routes.rows(), model.n_layers(), model.dims().top_k],
        start: sample.start,
        dtype: element.name().into(),
    })
}
