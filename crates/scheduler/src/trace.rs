//! The second lifetime of a route: one row per position of one request, written once.

use r3_core::routes::{RouteDims, RouteRows, RouteView};

/// The routes of a request so far: row `p` is how position `p` was routed when it was first computed.
///
/// Rows are appended in order of position and never change: a preempted sequence computes its positions again,
/// perhaps under other weights, but the logprobs it already emitted belong to the first routes.
#[derive(Clone, Debug)]
pub(crate) struct Trace {
    /// Position of the first row: what comes before it, the request does not want back.
    start: usize,
    rows: RouteRows,
}

impl Trace {
    /// No rows yet, of positions from `start` on.
    pub(crate) fn new(dims: RouteDims, start: usize) -> Self {
        Self::of(start, RouteRows::with_capacity(dims, 0))
    }

    /// Takes over rows that an earlier turn or attempt left, of positions from `start` on.
    pub(crate) fn of(start: usize, rows: RouteRows) -> Self {
        Self { start, rows }
    }

    /// Position of the first row.
    pub(crate) fn start(&self) -> usize {
        self.start
    }

    /// Position after the last row.
    pub(crate) fn end(&self) -> usize {
        self.start + self.rows.rows()
    }

    pub(crate) fn view(&self) -> RouteView<'_> {
        self.rows.view()
    }

    /// Appends those of `rows`, bytes `[n, L, K]` for positions `position..position + n`, that the trace does not
    /// have.
    ///
    /// # Panics
    /// If `position` is past the end: a trace has no holes.
    pub(crate) fn extend(&mut self, position: usize, rows: &[u8]) {
        let held = self.end().checked_sub(position);
        let held =
            held.unwrap_or_else(|| panic!("row {position} would leave a hole after row {}", self.end()));
        let held_bytes = held * self.view().dims().row_bytes();
        if let Some(new) = rows.get(held_bytes..) {
            self.rows.append(new);
        }
    }

    /// Forgets the rows of positions from `end` on: only of those under which no logprob was emitted.
    pub(crate) fn truncate(&mut self, end: usize) {
        self.rows.truncate(end.saturating_sub(self.start));
    }

    pub(crate) fn into_rows(self) -> RouteRows {
        self.rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIMS: RouteDims = RouteDims { n_layers: 1, top_k: 2, n_experts: 4 };

    #[test]
    fn a_row_is_written_once() {
        let mut trace = Trace::new(DIMS, 0);
        trace.extend(0, &[0, 1, 2, 3]);
        trace.extend(0, &[3, 3]);
        trace.extend(1, &[3, 3, 1, 0]);
        assert_eq!(trace.view().bytes(), [0, 1, 2, 3, 1, 0]);
    }

    #[test]
    fn rows_that_end_before_the_trace_does_change_nothing() {
        let mut trace = Trace::new(DIMS, 0);
        trace.extend(0, &[0, 1, 2, 3, 1, 2]);
        trace.extend(0, &[3, 0]);
        trace.extend(1, &[]);
        assert_eq!(trace.view().bytes(), [0, 1, 2, 3, 1, 2]);
    }

    #[test]
    fn a_trace_that_starts_late_takes_no_row_before() {
        let mut trace = Trace::new(DIMS, 2);
        trace.extend(0, &[0, 1]);
        assert_eq!((trace.start(), trace.end()), (2, 2));
        trace.extend(1, &[0, 1, 2, 3, 1, 0]);
        assert_eq!((trace.view().bytes(), trace.end()), (&[2, 3, 1, 0][..], 4));
        trace.extend(4, &[3, 1]);
        assert_eq!(trace.end(), 5);
    }

    #[test]
    fn truncation_counts_positions() {
        let mut trace = Trace::new(DIMS, 1);
        trace.extend(1, &[0, 1, 2, 3, 1, 0]);
        trace.truncate(9);
        assert_eq!(trace.end(), 4);
        trace.truncate(3);
        assert_eq!(trace.view().bytes(), [0, 1, 2, 3]);
        trace.truncate(0);
        assert_eq!((trace.start(), trace.end()), (1, 1));
    }

    #[test]
    fn a_hole_is_a_bug_and_not_a_row_of_zeros() {
        let hole = std::panic::catch_unwind(|| Trace::new(DIMS, 0).extend(1, &[0, 1]));
        assert!(hole.is_err());
    }
}
