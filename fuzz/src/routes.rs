//! Route rows from outside: the contract is what a search through every id says it is.

use r3_core::routes::{IdWidth, RouteDims, RouteError, RouteView};

use crate::bounded::bounded;
use crate::input::Input;
use crate::said::check_said;

/// Any bytes as rows of any shape.
///
/// # Panics
/// If a property does not hold.
pub fn rows(input: &[u8]) -> bool {
    let mut input = Input(input);
    let top_k = input.within(1, 16);
    let n_experts = top_k.max(usize::from(input.u16()) + 1);
    let dims = RouteDims { n_layers: input.within(1, 64), top_k, n_experts };
    let expected_rows = usize::from(input.u8());
    let bytes = input.0;
    let base_bytes = n_experts * size_of::<usize>();
    let checked = bounded(bytes, base_bytes, 0, || {
        RouteView::new(dims, bytes).and_then(|view| view.check(expected_rows).map(|()| view))
    });
    assert_eq!(checked.as_ref().err(), broken(dims, bytes, expected_rows).as_ref());
    match &checked {
        Ok(view) => assert_eq!((view.rows(), view.bytes(), view.dims()), (expected_rows, bytes, dims)),
        Err(error) => check_said(&error.to_string(), "core leaves the hint to whoever ingests"),
    }
    checked.is_ok()
}

/// The first way in which `bytes` break the contract, by searching.
fn broken(dims: RouteDims, bytes: &[u8], expected_rows: usize) -> Option<RouteError> {
    let RouteDims { n_layers, top_k, n_experts } = dims;
    let row_bytes = dims.row_bytes();
    if !bytes.len().is_multiple_of(row_bytes) {
        return Some(RouteError::RaggedBytes { bytes: bytes.len(), row_bytes });
    }
    let rows = bytes.len() / row_bytes;
    if rows != expected_rows {
        return Some(RouteError::RowCount { rows, expected_rows });
    }
    let ids: Vec<u16> = match dims.width() {
        IdWidth::U8 => bytes.iter().map(|&id| id.into()).collect(),
        IdWidth::U16 => bytes.chunks(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect(),
    };
    ids.chunks(top_k).enumerate().find_map(|(choice, ids)| {
        let (row, layer) = (choice / n_layers, choice % n_layers);
        ids.iter().enumerate().find_map(|(k, &expert)| {
            if usize::from(expert) >= n_experts {
                return Some(RouteError::OutOfRange { row, layer, expert, n_experts });
            }
            ids[..k].contains(&expert).then_some(RouteError::Duplicate { row, layer, expert })
        })
    })
}
