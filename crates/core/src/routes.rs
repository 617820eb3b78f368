//! Routes: which experts each token took, as bytes `[rows, L, K]`, and the contract they obey.
//!
//! Row `t` is the routing of token `t` *as model input*, so a sequence of `T` tokens of which at least one was
//! sampled has `T - 1` rows. Ids are logical, in router order (the order changes floating-point sums), for the
//! MoE layers only, whose ids travel along. Ids are one byte wide for up to 256 experts and two
//! (little-endian) otherwise; 256 experts fill a byte, so "never written" is never an id: validity lives elsewhere.

use std::fmt;
use std::ops::Range;

use crate::count::counted;

/// Bytes of one expert id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IdWidth {
    /// One byte, for at most 256 experts.
    U8,
    /// Two bytes, little-endian, for at most 65,536 experts.
    U16,
}

impl IdWidth {
    /// The narrowest width that holds ids `0..n_experts`.
    #[must_use]
    pub fn for_experts(n_experts: usize) -> Self {
        if n_experts <= 256 { Self::U8 } else { Self::U16 }
    }

    /// Bytes of one id.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::U16 => 2,
        }
    }
}

/// Shape of a route row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RouteDims {
    /// MoE layers, `L`.
    pub n_layers: usize,
    /// Experts a token takes in each of them, `K`.
    pub top_k: usize,
    /// Experts in each of them, `E`.
    pub n_experts: usize,
}

impl RouteDims {
    /// Width of one id.
    #[must_use]
    pub fn width(self) -> IdWidth {
        IdWidth::for_experts(self.n_experts)
    }

    /// Expert ids in one row, `L * K`.
    #[must_use]
    pub fn row_ids(self) -> usize {
        self.n_layers * self.top_k
    }

    /// Bytes of one row, `L * K * width`.
    #[must_use]
    pub fn row_bytes(self) -> usize {
        self.row_ids() * self.width().bytes()
    }
}

/// Rows of routes, borrowed: from a ring frame, a trace or a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteView<'a> {
    dims: RouteDims,
    bytes: &'a [u8],
}

impl<'a> RouteView<'a> {
    /// Views `bytes` as whole rows.
    ///
    /// # Errors
    /// If `bytes` is not a whole number of rows.
    pub fn new(dims: RouteDims, bytes: &'a [u8]) -> Result<Self, RouteError> {
        let row_bytes = dims.row_bytes();
        if row_bytes == 0 || !bytes.len().is_multiple_of(row_bytes) {
            return Err(RouteError::RaggedBytes { bytes: bytes.len(), row_bytes });
        }
        Ok(Self { dims, bytes })
    }

    /// Shape of a row.
    #[must_use]
    pub fn dims(self) -> RouteDims {
        self.dims
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(self) -> usize {
        self.bytes.len() / self.dims.row_bytes()
    }

    /// The first `n` rows.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    pub fn first(self, n: usize) -> Self {
        self.slice(0..n)
    }

    /// The rows `rows`.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    pub fn slice(self, rows: Range<usize>) -> Self {
        let row_bytes = self.dims.row_bytes();
        Self { bytes: &self.bytes[rows.start * row_bytes..rows.end * row_bytes], ..self }
    }

    /// The rows as they lie in memory, `[rows, L, K]`.
    #[must_use]
    pub fn bytes(self) -> &'a [u8] {
        self.bytes
    }

    /// The `k`-th expert that `layer` (an index into the MoE layers) gave to row `row`.
    ///
    /// # Panics
    /// If an index is out of range.
    #[must_use]
    pub fn expert(self, row: usize, layer: usize, k: usize) -> u16 {
        assert!(layer < self.dims.n_layers && k < self.dims.top_k);
        let at = (row * self.dims.n_layers + layer) * self.dims.top_k + k;
        match self.dims.width() {
            IdWidth::U8 => u16::from(self.bytes[at]),
            IdWidth::U16 => u16::from_le_bytes([self.bytes[2 * at], self.bytes[2 * at + 1]]),
        }
    }

    /// What `layer` chose for row `row`, `[K]`.
    ///
    /// # Panics
    /// If an index is out of range.
    pub fn choice(self, row: usize, layer: usize) -> impl Iterator<Item = u16> + use<'a> {
        (0..self.dims.top_k).map(move |k| self.expert(row, layer, k))
    }

    /// What `layer` chose for each row, `[rows, K]`: of one layer after another, `[L, rows, K]`.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn layer(self, layer: usize) -> impl Iterator<Item = u16> + use<'a> {
        (0..self.rows()).flat_map(move |row| self.choice(row, layer))
    }

    /// Copies what `layer` chose for row `row` into `out` `[K]`.
    ///
    /// # Panics
    /// If an index is out of range or `out` is not `[K]`.
    pub fn copy_layer(self, row: usize, layer: usize, out: &mut [u16]) {
        assert_eq!(out.len(), self.dims.top_k);
        for (id, expert) in out.iter_mut().zip(self.choice(row, layer)) {
            *id = expert;
        }
    }

    /// Checks the contract: exactly `expected_rows` rows, every id below `E`, and no id twice in one layer's choice.
    /// An engine that captured nothing and sends zeros breaks the last of these for every `K` above 1.
    ///
    /// # Errors
    /// The first violation, with row, layer and the ids that broke the contract.
    pub fn check(self, expected_rows: usize) -> Result<(), RouteError> {
        if self.rows() != expected_rows {
            return Err(RouteError::RowCount { rows: self.rows(), expected_rows });
        }
        match self.dims.width() {
            IdWidth::U8 => self.check_choices(|at| u16::from(self.bytes[at]))?,
            IdWidth::U16 => {
                let (pairs, _) = self.bytes.as_chunks();
                self.check_choices(|at| u16::from_le_bytes(pairs[at]))?;
            }
        }
        Ok(())
    }

    /// The part of [`Self::check`] that looks at every id: in range, and new in its choice.
    fn check_choices(self, id: impl Fn(usize) -> u16) -> Result<(), RouteError> {
        let RouteDims { n_layers, top_k, n_experts } = self.dims;
        // The choice that last named each expert, from 1: one look-up for each id instead of a search.
        let mut named_by = vec![0; n_experts];
        for choice in 0..self.rows() * n_layers {
            let (row, layer) = (choice / n_layers, choice % n_layers);
            for k in 0..top_k {
                let expert = id(choice * top_k + k);
                match named_by.get_mut(usize::from(expert)) {
                    None => return Err(RouteError::OutOfRange { row, layer, expert, n_experts }),
                    Some(last) if *last == choice + 1 => {
                        return Err(RouteError::Duplicate { row, layer, expert });
                    }
                    Some(last) => *last = choice + 1,
                }
            }
        }
        Ok(())
    }
}

/// Rows of routes, owned and append-only: what a request's trace is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteRows {
    dims: RouteDims,
    bytes: Vec<u8>,
}

impl RouteRows {
    /// No rows yet, with room for `capacity_rows` without another allocation.
    #[must_use]
    pub fn with_capacity(dims: RouteDims, capacity_rows: usize) -> Self {
        Self { dims, bytes: Vec::with_capacity(capacity_rows * dims.row_bytes()) }
    }

    /// Makes room for `rows` rows more; several such calls move the rows before them a constant number of times.
    pub fn reserve(&mut self, rows: usize) {
        self.bytes.reserve(rows * self.dims.row_bytes());
    }

    /// Appends rows that are already bytes `[rows, L, K]`.
    ///
    /// # Panics
    /// If `rows` is not a whole number of rows.
    pub fn append(&mut self, rows: &[u8]) {
        assert!(rows.len().is_multiple_of(self.dims.row_bytes()), "route rows are appended whole");
        self.bytes.extend_from_slice(rows);
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.bytes.len() / self.dims.row_bytes()
    }

    /// Forgets all rows after the first `rows`.
    pub fn truncate(&mut self, rows: usize) {
        self.bytes.truncate(rows.saturating_mul(self.dims.row_bytes()));
    }

    /// Borrows all rows.
    #[must_use]
    pub fn view(&self) -> RouteView<'_> {
        RouteView { dims: self.dims, bytes: &self.bytes }
    }
}

/// Writes expert ids `[L * K]` as bytes of `width`, the layout of every row in r3.
///
/// # Panics
/// If `out` is not exactly `ids.len() * width` bytes, or an id does not fit `width`.
pub fn write_ids(ids: &[u16], width: IdWidth, out: &mut [u8]) {
    assert_eq!(out.len(), ids.len() * width.bytes());
    match width {
        IdWidth::U8 => {
            for (byte, &id) in out.iter_mut().zip(ids) {
                *byte = u8::try_from(id).expect("at most 256 experts in a byte");
            }
        }
        IdWidth::U16 => {
            for (pair, &id) in out.chunks_exact_mut(2).zip(ids) {
                pair.copy_from_slice(&id.to_le_bytes());
            }
        }
    }
}

/// How routes break their contract. Whoever ingests them adds sample and turn.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum RouteError {
    RaggedBytes { bytes: usize, row_bytes: usize },
    RowCount { rows: usize, expected_rows: usize },
    OutOfRange { row: usize, layer: usize, expert: u16, n_experts: usize },
    Duplicate { row: usize, layer: usize, expert: u16 },
}

impl fmt::Display for RouteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RaggedBytes { bytes, row_bytes } => {
                let bytes = counted(*bytes, "byte");
                write!(f, "routes are {bytes}, not a multiple of the {row_bytes} bytes of a row")
            }
            Self::RowCount { rows, expected_rows } => {
                write!(f, "routes have {}, but the tokens need {expected_rows}", counted(*rows, "row"))
            }
            Self::OutOfRange { row, layer, expert, n_experts } => write!(
                f,
                "position {row}, MoE layer {layer}: expert {expert} does not exist (the layer has {n_experts})"
            ),
            Self::Duplicate { row, layer, expert } => {
                write!(f, "position {row}, MoE layer {layer}: expert {expert} appears twice")
            }
        }
    }
}

impl std::error::Error for RouteError {}

#[cfg(test)]
mod tests {
    use super::*;

    const DIMS: RouteDims = RouteDims { n_layers: 2, top_k: 2, n_experts: 4 };

    #[test]
    fn a_row_reads_back_what_was_written() {
        let mut bytes = [0; 8];
        write_ids(&[3, 1, 0, 2, 2, 0, 1, 3], IdWidth::U8, &mut bytes);
        let view = RouteView::new(DIMS, &bytes).unwrap();
        assert_eq!((view.rows(), view.expert(0, 0, 0), view.expert(1, 1, 1)), (2, 3, 3));
        assert_eq!(view.check(2), Ok(()));
    }

    #[test]
    fn a_layer_is_its_choices_row_by_row() {
        let view = RouteView::new(DIMS, &[3, 1, 0, 2, 2, 0, 1, 3]).unwrap();
        assert!(view.choice(1, 0).eq([2, 0]));
        assert!(view.layer(0).eq([3, 1, 2, 0]) && view.layer(1).eq([0, 2, 1, 3]));
        let mut copied = [0; 2];
        view.copy_layer(0, 1, &mut copied);
        assert_eq!(copied, [0, 2]);
    }

    #[test]
    fn ids_above_a_byte_are_two_bytes_wide() {
        let dims = RouteDims { n_layers: 1, top_k: 2, n_experts: 300 };
        let mut bytes = [0; 4];
        write_ids(&[299, 256], dims.width(), &mut bytes);
        let view = RouteView::new(dims, &bytes).unwrap();
        assert_eq!((view.expert(0, 0, 0), view.expert(0, 0, 1)), (299, 256));
    }

    #[test]
    fn expert_255_of_256_is_an_id_and_not_a_sentinel() {
        let dims = RouteDims { n_layers: 1, top_k: 1, n_experts: 256 };
        assert_eq!(dims.width(), IdWidth::U8);
        assert_eq!(RouteView::new(dims, &[255]).unwrap().check(1), Ok(()));
    }

    #[test]
    fn the_contract_names_position_and_layer() {
        let duplicate = RouteView::new(DIMS, &[0, 1, 2, 2]).unwrap().check(1);
        assert_eq!(duplicate, Err(RouteError::Duplicate { row: 0, layer: 1, expert: 2 }));
        let beyond = RouteView::new(DIMS, &[0, 4, 1, 2]).unwrap().check(1);
        assert_eq!(beyond, Err(RouteError::OutOfRange { row: 0, layer: 0, expert: 4, n_experts: 4 }));
        let missing = RouteView::new(DIMS, &[0, 1, 2, 3]).unwrap().check(2);
        assert_eq!(missing, Err(RouteError::RowCount { rows: 1, expected_rows: 2 }));
        assert!(RouteView::new(DIMS, &[0, 1, 2]).is_err());
    }

    /// What [`RouteView::check`] says of ids, by searching.
    fn naive_fault(view: RouteView<'_>) -> Option<RouteError> {
        let RouteDims { n_layers, top_k, n_experts } = view.dims();
        for (row, layer) in (0..view.rows()).flat_map(|row| (0..n_layers).map(move |layer| (row, layer))) {
            for k in 0..top_k {
                let expert = view.expert(row, layer, k);
                if usize::from(expert) >= n_experts {
                    return Some(RouteError::OutOfRange { row, layer, expert, n_experts });
                }
                if (0..k).any(|earlier| view.expert(row, layer, earlier) == expert) {
                    return Some(RouteError::Duplicate { row, layer, expert });
                }
            }
        }
        None
    }

    #[test]
    fn the_first_fault_is_found_in_either_width() {
        let mut state = 1u64;
        let mut draw = |end: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % end
        };
        let mut faults = 0;
        for n_experts in [5usize, 300] {
            let dims = RouteDims { n_layers: 2, top_k: 2, n_experts };
            for _ in 0..2000 {
                let ids: Vec<u16> =
                    (0..12).map(|_| u16::try_from(draw(n_experts as u64 + 1)).unwrap()).collect();
                let mut bytes = vec![0; ids.len() * dims.width().bytes()];
                write_ids(&ids, dims.width(), &mut bytes);
                let view = RouteView::new(dims, &bytes).unwrap();
                assert_eq!(view.check(3).err(), naive_fault(view));
                faults += usize::from(naive_fault(view).is_some());
            }
        }
        assert!((500..3500).contains(&faults), "{faults} of 4000 had a fault");
    }

    #[test]
    fn an_engine_that_never_captured_is_refused() {
        let zeros = [0; 16 * 4];
        let checked = RouteView::new(DIMS, &zeros).unwrap().check(16);
        assert_eq!(checked, Err(RouteError::Duplicate { row: 0, layer: 0, expert: 0 }));
    }

    #[test]
    fn one_expert_a_token_may_be_expert_0_for_every_token() {
        let dims = RouteDims { n_layers: 1, top_k: 1, n_experts: 2 };
        assert_eq!(RouteView::new(dims, &[0; 32]).unwrap().check(32), Ok(()));
    }
}
