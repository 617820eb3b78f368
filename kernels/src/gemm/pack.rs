//! Weights into panels and back: up to 32 rows become the columns of a panel's lines. While a panel is packed, the rows of
//! the next are fetched: the processor sees so many streams coming only so well.

use super::kernel::{COLUMNS, LANES, Line, VECTORS};
use crate::cast::{round_rows_body, unpair};
use crate::isa::{Isa, Lanes, multiversion, prefetch, transposed};

multiversion! {
    /// Packs up to 32 rows `[.., k]` as one panel `[k]`. Lanes without a row are zeros.
    pub(super) fn pack_f32(rows: &[f32], k: usize, panel: &mut [Line<f32>]) = pack_f32_body;
}

#[inline(always)]
fn pack_f32_body<I: Isa>(rows: &[f32], k: usize, panel: &mut [Line<f32>]) {
    let (squares, rest) = panel.as_chunks_mut::<LANES>();
    let rest_at = squares.len() * LANES;
    for (i, square) in squares.iter_mut().enumerate() {
        for vector in 0..VECTORS {
            let mut lanes = [I::Lanes::splat(0.0); LANES];
            for (lane, row) in lanes.iter_mut().zip(rows_of(vector, rows, k).chunks_exact(k)) {
                let row = &row[i * LANES..];
                prefetch(row.as_ptr().wrapping_add(COLUMNS * k));
                *lane = I::Lanes::load(row.first_chunk().expect("a square is inside of its rows"));
            }
            for (line, column) in square.iter_mut().zip(transposed::<I>(lanes)) {
                column.store(&mut line.0[vector]);
            }
        }
    }
    for (line, at) in rest.iter_mut().zip(rest_at..) {
        *line = Line::default();
        for (lane, row) in line.0.as_flattened_mut().iter_mut().zip(rows.chunks_exact(k)) {
            *lane = row[at];
        }
    }
}

/// Those of a panel's `rows` that begin with the first of vector `vector`.
#[inline(always)]
fn rows_of(vector: usize, rows: &[f32], k: usize) -> &[f32] {
    rows.get(vector * LANES * k..).unwrap_or_default()
}

multiversion! {
    /// Packs up to 32 rows `[.., k]` as one panel `[k/2]` of bf16 pairs. Lanes without a row are zeros.
    pub(super) fn pack_bf16(rows: &[f32], k: usize, panel: &mut [Line<u32>]) = pack_bf16_body;
}

/// Vectors from what is packed to what is fetched, along a row and on into that of the next panel.
const NEAR: usize = 8;

#[inline(always)]
fn pack_bf16_body<I: Isa>(rows: &[f32], k: usize, panel: &mut [Line<u32>]) {
    for (i, square) in panel.chunks_mut(LANES).enumerate() {
        // Not as far ahead as the next panel, while there is more of this one: two lines of 32 rows and of 32 more would not fit
        // into the sets of the first-level cache that rows of such lengths share.
        let is_last = (2 * i + NEAR) * LANES >= k;
        let ahead = NEAR * LANES + if is_last { (COLUMNS - 1) * k } else { 0 };
        for vector in 0..VECTORS {
            let mut lanes = [I::Lanes::splat(0.0); LANES];
            for (lane, row) in lanes.iter_mut().zip(rows_of(vector, rows, k).chunks_exact(k)) {
                let row = &row[2 * LANES * i..];
                let row = &row[..row.len().min(2 * LANES)];
                for line in row.chunks(LANES) {
                    prefetch(line.as_ptr().wrapping_add(ahead));
                }
                let mut words = [0; LANES];
                round_rows_body::<I>(row, row.len(), &mut words[..row.len().div_ceil(2)]);
                *lane = I::Lanes::load(bytemuck::cast_ref(&words));
            }
            for (line, column) in square.iter_mut().zip(transposed::<I>(lanes)) {
                column.store(bytemuck::cast_mut(&mut line.0[vector]));
            }
        }
    }
}

multiversion! {
    /// Reads column `column` of a panel of bf16 pairs back into `row`.
    pub(super) fn unpack_bf16(panel: &[Line<u32>], column: usize, row: &mut [f32]) = unpack_bf16_body;
}

#[inline(always)]
fn unpack_bf16_body<I: Isa>(panel: &[Line<u32>], column: usize, row: &mut [f32]) {
    let (pairs, odd) = row.as_chunks_mut();
    for (pair, line) in pairs.iter_mut().zip(panel) {
        *pair = unpair(line.0.as_flattened()[column]);
    }
    if let ([value], Some(line)) = (odd, panel.last()) {
        [*value, _] = unpair(line.0.as_flattened()[column]);
    }
}
