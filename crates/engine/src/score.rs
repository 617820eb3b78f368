//! Scores given tokens: their logprobs, their routes, and where replayed routes differ from the live router's.

use r3_core::ids::{GroupId, TokenId};
use r3_core::routes::{RouteRows, RouteView, write_ids};
use r3_kernels::router::{RouteRecord, Routing};
use r3_scheduler::plan::TickPlan;
use r3_scheduler::request::{Finished, Request};

use crate::engine::Engine;
use crate::error::EngineError;

/// What scoring `T` tokens gives.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// `[T - 1]` nats, of tokens 1 on, at temperature 1.
    pub logprobs: Vec<f32>,
    /// `[T - 1, L, K]`: the experts used, or what the live router would have used where routes were replayed.
    pub live_routes: RouteRows,
}

/// Routes that the next forwards take instead of the router's, for the one sequence being scored.
pub(crate) struct Replay {
    /// `[T, L, K]`, by position.
    ids: Vec<u16>,
    row_ids: usize,
    top_k: usize,
    /// `[L, T, K]` of the current batch.
    batch: Vec<u16>,
    /// `[T]` of the current batch.
    positions: Vec<u32>,
    native: RouteRecord,
    live: RouteRows,
}

impl Engine {
    /// Scores `tokens` `[T]`, at least one, through the scheduler and the paged cache as any request.
    ///
    /// With `routes` `[T - 1, L, K]` the experts are those, and `live_routes` says what the router would have chosen.
    ///
    /// # Errors
    /// If other requests are unfinished or not taken, a token is outside the vocabulary, the tokens do not fit, or the routes
    /// break their contract.
    ///
    /// # Panics
    /// If the engine does not capture routes, or the routes are of another model's shape.
    pub fn score(
        &mut self,
        tokens: &[TokenId],
        routes: Option<RouteView<'_>>,
    ) -> Result<Scored, EngineError> {
        assert!(self.config.capture_routes, "an engine that scores captures routes");
        let sequences = self.n_open_requests();
        if sequences > 0 {
            return Err(EngineError::Busy { sequences });
        }
        let dims = self.model().route_dims();
        if let Some(routes) = routes {
            assert_eq!(routes.dims(), dims, "replayed routes have the model's shape");
            self.replay = Some(Replay::new(routes, tokens.len())?);
        }
        let outcome = self.score_one(tokens);
        let replay = self.replay.take();
        if replay.is_some() {
            // Keys and values computed under replayed routes are not the model's own: nobody may find them.
            self.scheduler.flush(self.scheduler.epoch() + 1)?;
        }
        let finished = outcome?;
        let live = match &replay {
            Some(replay) => &replay.live,
            None => finished.routes.as_ref().expect("routes are captured"),
        };
        let mut live_routes = RouteRows::with_capacity(dims, tokens.len() - 1);
        live_routes.append(&live.view().bytes()[..(tokens.len() - 1) * dims.row_bytes()]);
        Ok(Scored { logprobs: finished.prompt_logprobs.unwrap_or_default(), live_routes })
    }

    fn score_one(&mut self, tokens: &[TokenId]) -> Result<Finished, EngineError> {
        self.check_request(tokens, 0)?;
        self.scheduler.submit(&Request {
            group: GroupId(0),
            prompt: tokens.into(),
            max_new_tokens: 0,
            stop_tokens: [].into(),
            prompt_logprobs: true,
            return_routes: Some(0),
        })?;
        loop {
            if let Err(error) = self.tick() {
                self.abort_all();
                while self.take_finished().is_some() {}
                return Err(error);
            }
            if let Some(finished) = self.take_finished() {
                return Ok(finished);
            }
        }
    }
}

impl Replay {
    fn new(routes: RouteView<'_>, n_tokens: usize) -> Result<Self, EngineError> {
        let dims = routes.dims();
        if routes.rows() + 1 != n_tokens {
            return Err(EngineError::ReplayRows { rows: routes.rows(), tokens: n_tokens });
        }
        routes.check(n_tokens - 1).map_err(EngineError::ReplayRoutes)?;
        let mut ids = vec![0; n_tokens * dims.row_ids()];
        // The last token is never an input in a rollout, so it has no row; as its logits are not used, any will do.
        for (token, row) in ids.chunks_exact_mut(dims.row_ids()).enumerate() {
            for (layer, ids) in row.chunks_exact_mut(dims.top_k).enumerate() {
                if routes.rows() > 0 {
                    routes.copy_layer(token.min(routes.rows() - 1), layer, ids);
                } else {
                    ids.iter_mut().zip(0..).for_each(|(id, k)| *id = k);
                }
            }
        }
        Ok(Self {
            ids,
            row_ids: dims.row_ids(),
            top_k: dims.top_k,
            batch: Vec::new(),
            positions: Vec::new(),
            native: RouteRecord::new(dims.n_layers, dims.top_k),
            live: RouteRows::with_capacity(dims, n_tokens),
        })
    }

    /// The replayed routes of a planned batch, layer by layer.
    pub(crate) fn routing(&mut self, plan: &TickPlan) -> Routing<'_> {
        self.batch.clear();
        self.positions.clone_from(&plan.positions);
        for layer in 0..self.row_ids / self.top_k {
            for &position in &plan.positions {
                let at = position as usize * self.row_ids + layer * self.top_k;
                self.batch.extend_from_slice(&self.ids[at..at + self.top_k]);
            }
        }
        self.native.start(plan.n_tokens());
        Routing::Replay { ids: &self.batch, native: Some(&mut self.native) }
    }

    /// Appends what the live router would have chosen for the batch.
    pub(crate) fn keep_live_routes(&mut self) {
        let dims = self.live.view().dims();
        let (mut ids, mut bytes) = (vec![0; dims.row_ids()], vec![0; dims.row_bytes()]);
        for row in 0..self.positions.len() {
            self.native.write_row(row, &mut ids);
            write_ids(&ids, dims.width(), &mut bytes);
            self.live.append(&bytes);
        }
    }

    /// The replayed route `[L, K]` of row `row` of the batch.
    pub(crate) fn write_row(&self, row: usize, out: &mut [u16]) {
        let at = self.positions[row] as usize * self.row_ids;
        out.copy_from_slice(&self.ids[at..at + self.row_ids]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{config, engine, request};

    #[test]
    fn a_rollout_that_nobody_took_is_never_returned_as_the_score() {
        let mut engine = engine(config(1 << 20));
        engine.submit(&request(5, 2)).unwrap();
        while engine.has_work() {
            engine.tick().unwrap();
        }
        let tokens = [TokenId(3), TokenId(4), TokenId(5)];
        let error = engine.score(&tokens, None).unwrap_err();
        assert!(matches!(error, EngineError::Busy { sequences: 1 }), "{error}");
        engine.take_finished().unwrap();
        assert_eq!(engine.score(&tokens, None).unwrap().logprobs.len(), 2);
    }

    #[test]
    fn a_refused_score_leaves_an_engine_that_scores() {
        let mut engine = engine(config(1 << 20));
        let tokens = [TokenId(3), TokenId(4), TokenId(5)];
        let scored = engine.score(&tokens, None).unwrap();
        assert!(engine.score(&[TokenId(3), TokenId(u32::MAX)], None).is_err());
        assert!(engine.score(&tokens[..2], Some(scored.live_routes.view())).is_err());
        assert_eq!(engine.score(&tokens, None).unwrap(), scored);
        assert_eq!(engine.score(&tokens, Some(scored.live_routes.view())).unwrap(), scored);
    }
}
