//! The second lifetime of a route: one row per position of one request, written once.

use r3_core::routes::{RouteDims, RouteRows, RouteView};

/// The routes of a request that outlive its blocks: row `p` is how position `p` was routed when it was first computed.
///
/// Rows are appended in order of position and never change: a preempted sequence computes its positions again,
/// perhaps under other weights, but the logprobs it already emitted belong to the first routes. So there is no way to
/// name a position when appending: what comes next is the position after the last. Other weights may have to take these
/// rows again, and then run what a trainer runs that replays them.
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

    /// Makes room for `n` rows more, so that appending them moves the others once at most.
    pub(crate) fn reserve(&mut self, n: usize) {
        self.rows.reserve(n);
    }

    /// Appends `rows`, bytes `[n, L, K]`, of the positions from [`Self::end`] on.
    pub(crate) fn append(&mut self, rows: &[u8]) {
        self.rows.append(rows);
    }

    /// Forgets the rows of positions from `end` on: only of those under which no logprob was emitted.
    pub(crate) fn truncate(&mut self, end: usize) {
        self.rows.truncate(end.saturating_sub(self.start));
    }

    /// All rows, borrowed.
    pub(crate) fn view(&self) -> RouteView<'_> {
        self.rows.view()
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
    fn rows_follow_each_other_from_the_start_on() {
        for start in [0, 2] {
            let mut trace = Trace::new(DIMS, start);
            assert_eq!((trace.start(), trace.end()), (start, start));
            trace.reserve(3);
            trace.append(&[0, 1, 2, 3]);
            trace.append(&[1, 0]);
            assert_eq!((trace.start(), trace.end()), (start, start + 3));
            assert_eq!(trace.rows.view().bytes(), [0, 1, 2, 3, 1, 0]);
        }
    }

    #[test]
    fn truncation_counts_positions() {
        let mut trace = Trace::new(DIMS, 1);
        trace.append(&[0, 1, 2, 3, 1, 0]);
        trace.truncate(9);
        assert_eq!(trace.end(), 4);
        trace.truncate(3);
        assert_eq!(trace.rows.view().bytes(), [0, 1, 2, 3]);
        trace.truncate(0);
        assert_eq!((trace.start(), trace.end()), (1, 1));
    }
}
