//! NeMo-RL's envelope: `nrlre1:<dtype>:<S>x<L>x<K>:<base64>`.
//!
//! `S` is every token, the last included: it was never an input, so its row is padding, `0 .. K - 1` in every layer.
//! `L` is all decoder layers, as vLLM hands them out, or the MoE layers only; NeMo-RL's trainer tells them apart by
//! their number, and so does this reader. The dtype is the narrowest of int8, int16 and int32 that holds `E - 1` and -1;
//! a row of -1 is one that vLLM lost, for which NeMo-RL falls back to its own router, and r3 refuses.
//! Source: NeMo-RL, `nemo_rl/utils/routed_experts_codec.py`, `models/generation/vllm/utils.py`
//! (`pad_and_align_routed_expert_indices`), `models/generation/interfaces.py` (`resolve_routed_experts_dtype`) and
//! `models/megatron/router_replay.py` (`_payload_indices_for_moe_layers`).

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use r3_core::routes::{RouteRows, RouteView};

use crate::array::{Array, Element, LayerAxis, padding_fault, write_all_layers, write_padding_row};
use crate::check::Sample;
use crate::error::{Fault, WireError, quoted};
use crate::model::ModelShape;
use crate::vllm::decode;

/// What every envelope starts with.
pub const MAGIC: &str = "nrlre1:";

/// Reads an envelope. Its last row is checked to be padding, and dropped.
///
/// # Errors
/// If `text` is no envelope, its array is not the routes of `model`, or breaks the contract of `sample`.
pub fn read(text: &str, model: &ModelShape, sample: &Sample) -> Result<RouteRows, WireError> {
    let refuse = |reason| sample.refuse(Fault::Envelope { reason });
    let rest = text.strip_prefix(MAGIC).ok_or_else(|| refuse("it does not start with `nrlre1:`"))?;
    let (dtype, rest) = rest.split_once(':').ok_or_else(|| refuse("it ends after the dtype"))?;
    let (shape, payload) = rest.split_once(':').ok_or_else(|| refuse("it ends after the shape"))?;
    let element = match Element::from_name(dtype) {
        Some(element @ (Element::Int8 | Element::Int16 | Element::Int32)) => element,
        _ => {
            let fault = Fault::Dtype { found: quoted(dtype), allowed: "int8, int16, int32" };
            return Err(sample.refuse(fault));
        }
    };
    let sizes = shape.split('x').take(65).map(|size| size.parse().ok());
    let sizes: Vec<usize> = sizes.collect::<Option<_>>().ok_or_else(|| refuse("its shape is not numbers"))?;
    let shape: [usize; 3] = sizes.try_into().map_err(|found| sample.refuse(Fault::Shape { found }))?;
    let bytes = decode(payload, sample)?;
    let padded = Array::new(shape, element, &bytes, sample)?;

    let [rows, layers, top_k] = shape;
    let rows =
        rows.checked_sub(1).ok_or_else(|| refuse("it has no rows, not even that of the last token"))?;
    if let Some((layer, expert)) = padding_fault(&padded) {
        let position = sample.start.saturating_add(rows);
        let turn = sample.turn_of(position);
        return Err(sample.refuse(Fault::Padding { turn, layer, position, expert }));
    }
    let routed = &bytes[..rows * layers * top_k * element.bytes()];
    Array::new([rows, layers, top_k], element, routed, sample)?.rows(model, LayerAxis::AllOrMoe, sample)
}

/// Writes an envelope over all layers, dense ones 0, as NeMo-RL writes what vLLM hands it.
///
/// # Errors
/// If `routes` are not of `model`, or do not start at position 0, for which an envelope has no place.
pub fn write(routes: RouteView<'_>, model: &ModelShape, sample: &Sample) -> Result<String, WireError> {
    if sample.start != 0 {
        return Err(sample.refuse(Fault::StartUnsaid { start: sample.start }));
    }
    let (dims, n_layers) = (model.dims(), model.n_layers());
    let narrowest = [Element::Int8, Element::Int16, Element::Int32];
    let holds_all = |element: &Element| element.holds(dims.n_experts as i64 - 1);
    let element = narrowest.into_iter().find(holds_all).expect("65,536 experts fit 32 bits");
    let mut bytes = write_all_layers(routes, model, (element, 0), sample)?;
    write_padding_row(n_layers, dims.top_k, element, &mut bytes);
    let (rows, top_k) = (routes.rows() + 1, dims.top_k);
    Ok(format!("{MAGIC}{element}:{rows}x{n_layers}x{top_k}:{}", STANDARD.encode(bytes)))
}
