//! JSON lists `[rows][layers][K]`, as `r3 score` prints them and older servers send them. Read, never written.
//!
//! Layers are all of the model, dense ones 0 or -1, or the MoE layers only; their number tells which.

use r3_core::routes::RouteRows;
use serde_json::Value;

use crate::array::{Array, Element, LayerAxis};
use crate::check::Sample;
use crate::error::{Fault, WireError};
use crate::model::ModelShape;

/// Reads the lists.
///
/// # Errors
/// If a row is not a list of as many lists of as many integers as the first, or the routes are not of `model` or break the
/// contract of `sample`.
pub fn read(rows: &[Value], model: &ModelShape, sample: &Sample) -> Result<RouteRows, WireError> {
    let lists = |list: &Value| list.as_array().map_or(0, Vec::len);
    let layers = rows.first().map_or(model.dims().n_layers, lists);
    let top_k = rows.first().and_then(|row| row.get(0)).map_or(model.dims().top_k, lists);
    let mut bytes = Vec::new();
    for (row, layer_lists) in rows.iter().enumerate() {
        let before = bytes.len();
        for number in layer_lists.as_array().into_iter().flatten().flat_map(|layer| {
            let is_whole = layer.as_array().filter(|experts| experts.len() == top_k);
            is_whole.into_iter().flatten().map(Value::as_i64)
        }) {
            let Some(number) = number else { break };
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        if lists(layer_lists) != layers || bytes.len() - before != layers * top_k * Element::Int64.bytes() {
            let position = sample.start.saturating_add(row);
            let turn = sample.turn_of(position);
            return Err(sample.refuse(Fault::RaggedList { turn, position, layers, top_k }));
        }
    }
    let shape = [rows.len(), layers, top_k];
    Array::new(shape, Element::Int64, &bytes, sample)?.rows(model, LayerAxis::AllOrMoe, sample)
}
