//! The second lifetime of a route: one row per position of one request, written once.

use r3_core::routes::{RouteDims, RouteRows, RouteView};

/// The routes of a request so far: row `p` is how position `p` was routed when it was first computed.
///
/// Rows are appended in order of position and never change: a preempted sequence computes its positions again,
/// perhaps under other weights, but the logprobs it already emitted belong to the first routes.
#[derive(Debug)]
pub(crate) struct Trace {
    rows: RouteRows,
}

impl Trace {
    pub(crate) fn new(dims: RouteDims) -> Self {
        Self { rows: RouteRows::with_capacity(dims, 0) }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows.rows()
    }

    pub(crate) fn view(&self) -> RouteView<'_> {
        self.rows.view()
    }

    /// Appends those of `rows`, bytes `[n, L, K]` for positions `start..start + n`, that the trace does not have.
    ///
    /// # Panics
    /// If `start` is past the end: a trace has no holes.
    pub(crate) fn extend(&mut self, start: usize, rows: &[u8]) {
        let held = self.rows().checked_sub(start);
        let held =
            held.unwrap_or_else(|| panic!("row {start} would leave a hole after {} rows", self.rows()));
        let held_bytes = held * self.view().dims().row_bytes();
        if let Some(new) = rows.get(held_bytes..) {
            self.rows.append(new);
        }
    }

    /// Forgets all rows: only for a request that emitted nothing under them.
    pub(crate) fn clear(&mut self) {
        *self = Self::new(self.view().dims());
    }

    /// The first `max_rows` rows; more there are only if a tick was given up after its routes were recorded.
    pub(crate) fn into_rows(self, max_rows: usize) -> RouteRows {
        if self.rows() <= max_rows {
            return self.rows;
        }
        let dims = self.view().dims();
        let mut rows = RouteRows::with_capacity(dims, max_rows);
        rows.append(&self.view().bytes()[..max_rows * dims.row_bytes()]);
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIMS: RouteDims = RouteDims { n_layers: 1, top_k: 2, n_experts: 4 };

    #[test]
    fn a_row_is_written_once() {
        let mut trace = Trace::new(DIMS);
        trace.extend(0, &[0, 1, 2, 3]);
        trace.extend(0, &[3, 3]);
        trace.extend(1, &[3, 3, 1, 0]);
        assert_eq!(trace.view().bytes(), [0, 1, 2, 3, 1, 0]);
    }

    #[test]
    fn rows_that_end_before_the_trace_does_change_nothing() {
        let mut trace = Trace::new(DIMS);
        trace.extend(0, &[0, 1, 2, 3, 1, 2]);
        trace.extend(0, &[3, 0]);
        trace.extend(1, &[]);
        assert_eq!(trace.view().bytes(), [0, 1, 2, 3, 1, 2]);
    }

    #[test]
    fn a_finished_trace_has_no_row_too_many() {
        let trace = || {
            let mut trace = Trace::new(DIMS);
            trace.extend(0, &[0, 1, 2, 3]);
            trace
        };
        assert_eq!(trace().into_rows(1).view().bytes(), [0, 1]);
        assert_eq!(trace().into_rows(5).view().bytes(), [0, 1, 2, 3]);
    }

    #[test]
    fn a_hole_is_a_bug_and_not_a_row_of_zeros() {
        let hole = std::panic::catch_unwind(|| Trace::new(DIMS).extend(1, &[0, 1]));
        assert!(hole.is_err());
    }
}
