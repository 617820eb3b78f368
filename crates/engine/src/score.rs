//! Scores given tokens: their logprobs, their routes, and where replayed routes differ from the live router's.

use std::ops::Range;

use r3_core::ids::{GroupId, TokenId};
use r3_core::routes::{RouteDims, RouteRows, RouteView, write_ids};
use r3_kernels::route_record::RouteRecord;
use r3_kernels::router::{RouterConfig, Routing};
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
    /// Of all `T` tokens, by position.
    routes: RouteRows,
    /// Positions of the current batch, which holds nothing but one chunk of the one sequence.
    batch: Range<usize>,
    /// `[L, T, K]` of the current batch.
    ids: Vec<u16>,
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
            self.replay = Some(Replay::new(routes, tokens.len(), self.model().router())?);
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
            max_support: None,
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
    fn new(routes: RouteView<'_>, n_tokens: usize, router: RouterConfig) -> Result<Self, EngineError> {
        let dims = routes.dims();
        if routes.rows() + 1 != n_tokens {
            return Err(EngineError::ReplayRows { rows: routes.rows(), tokens: n_tokens });
        }
        routes.check(n_tokens - 1).map_err(EngineError::ReplayRoutes)?;
        let mut padded = RouteRows::with_capacity(dims, n_tokens);
        padded.append(routes.bytes());
        // The last token is never an input in a rollout, so it has no row; as its logits are not used, any will do.
        let ids: Vec<u16> = (0..dims.n_layers).flat_map(|_| (0..).take(dims.top_k)).collect();
        let mut last = vec![0; dims.row_bytes()];
        write_ids(&ids, dims.width(), &mut last);
        padded.append(&last);
        Ok(Self {
            routes: padded,
            batch: 0..0,
            ids: Vec::new(),
            native: RouteRecord::new(dims.n_layers, router),
            live: RouteRows::with_capacity(dims, n_tokens),
        })
    }

    /// The replayed routes of a planned batch, layer by layer.
    pub(crate) fn routing(&mut self, plan: &TickPlan) -> Routing<'_> {
        let [chunk] = &plan.chunks[..] else { panic!("one sequence is scored at a time") };
        self.batch = chunk.start..chunk.start + chunk.n_tokens;
        let routes = self.routes.view();
        let RouteDims { n_layers, top_k, .. } = routes.dims();
        self.ids.clear();
        for layer in 0..n_layers {
            for position in self.batch.clone() {
                self.ids.extend((0..top_k).map(|k| routes.expert(position, layer, k)));
            }
        }
        self.native.start(plan.n_tokens());
        Routing::Replay { ids: &self.ids, native: Some(&mut self.native) }
    }

    /// Appends what the live router would have chosen for the batch.
    pub(crate) fn keep_live_routes(&mut self) {
        self.live.append(self.native.rows());
    }

    /// The replayed routes of the batch, bytes `[T, L, K]`.
    pub(crate) fn rows(&self) -> &[u8] {
        let row_bytes = self.routes.view().dims().row_bytes();
        &self.routes.view().bytes()[self.batch.start * row_bytes..self.batch.end * row_bytes]
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
