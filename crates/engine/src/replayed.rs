//! Routes of older weights, for sequences that these weights compute again.

use r3_kernels::route_record::RouteRecord;
use r3_kernels::router::Routing;
use r3_scheduler::scheduler::Scheduler;

/// What a batch takes from traces: empty in nearly all, and kept for its memory.
#[derive(Debug, Default)]
pub(crate) struct Replayed {
    /// Rows of the batch, ascending, `[R]`.
    rows: Vec<usize>,
    /// `[L, R, K]`.
    ids: Vec<u16>,
}

impl Replayed {
    /// Who chooses the experts of the planned batch: the router, and where a sequence goes on that other weights began, the
    /// trace of it, down to `ratio` of what the router itself would take. `record` keeps what runs.
    pub(crate) fn routing<'a>(
        &'a mut self,
        scheduler: &Scheduler,
        ratio: Option<f32>,
        record: &'a mut RouteRecord,
    ) -> Routing<'a> {
        self.collect(scheduler);
        match ratio {
            Some(ratio) if !self.rows.is_empty() => {
                Routing::ReplaySome { tokens: &self.rows, ids: &self.ids, ratio, record }
            }
            _ => Routing::Record(record),
        }
    }

    fn collect(&mut self, scheduler: &Scheduler) {
        self.rows.clear();
        self.ids.clear();
        let chunks = &scheduler.tick_plan().chunks;
        let replayed = || chunks.iter().filter_map(|chunk| scheduler.replayed_routes(chunk));
        for chunk in chunks {
            self.rows.extend(chunk.first_row..chunk.first_row + chunk.n_replayed);
        }
        for layer in 0..replayed().next().map_or(0, |routes| routes.dims().n_layers) {
            self.ids.extend(replayed().flat_map(|routes| routes.layer(layer)));
        }
    }
}
