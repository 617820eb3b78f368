//! Scores given tokens: their logprobs, their routes, and where replayed routes differ from the live router's.

use std::ops::Range;

use r3_core::ids::{GroupId, TokenId};
use r3_core::routes::{RouteRows, RouteView, write_ids};
use r3_core::support::{SupportError, SupportView};
use r3_kernels::lm_head::Targets;
use r3_kernels::lm_head::kept::Kept;
use r3_kernels::route_record::RouteRecord;
use r3_kernels::router::{RouterConfig, Routing};
use r3_scheduler::plan::TickPlan;
use r3_scheduler::request::{Finished, Request};

use crate::engine::Engine;
use crate::error::EngineError;

/// A sequence to score.
#[derive(Clone, Copy, Debug)]
pub struct ToScore<'a> {
    /// `[T]`, at least one.
    pub tokens: &'a [TokenId],
    /// `[T - 1, L, K]`: experts to take instead of the router's.
    pub routes: Option<RouteView<'a>>,
    /// Divides the logits: above 0, as is its inverse, and both finite.
    pub temperature: f32,
    /// What each of the last tokens is scored over, at most `T - 1` rows; an empty one is all of the vocabulary, as it is
    /// for tokens without a row.
    pub support: Option<SupportView<'a>>,
}

impl<'a> ToScore<'a> {
    /// `tokens` on experts of the router's choice, at temperature 1 over all of the vocabulary.
    #[must_use]
    pub fn new(tokens: &'a [TokenId]) -> Self {
        Self { tokens, routes: None, temperature: 1.0, support: None }
    }

    /// What the head scores tokens from 1 on over: sizes `[T - 1]`, and the ids. `None` for all of the vocabulary.
    ///
    /// # Panics
    /// If the support has more rows.
    #[must_use]
    pub fn kept(&self) -> Option<(Vec<u32>, Vec<u32>)> {
        let support = self.support?;
        let mut sizes = vec![0; self.tokens.len() - 1 - support.rows()];
        sizes.extend_from_slice(support.sizes());
        Some((sizes, support.ids().iter().map(|token| token.0).collect()))
    }

    /// Checks what either side is about to score: routes are of every token but the last, and each of experts that exist;
    /// supports are of the last tokens, ascend, hold their tokens, and are of a model of `vocab_size` tokens.
    ///
    /// # Errors
    /// The first violation.
    pub fn check(&self, vocab_size: usize) -> Result<(), EngineError> {
        if let Some(routes) = self.routes {
            let (rows, tokens) = (routes.rows(), self.tokens.len());
            if rows + 1 != tokens {
                return Err(EngineError::ReplayRows { rows, tokens });
            }
            routes.check(rows).map_err(EngineError::ReplayRoutes)?;
        }
        self.support.map_or(Ok(()), |support| check_support(support, self.tokens, vocab_size))
    }
}

/// That there is no row for the first token, as well.
fn check_support(support: SupportView<'_>, tokens: &[TokenId], vocab_size: usize) -> Result<(), EngineError> {
    let (rows, expected_rows) = (support.rows(), tokens.len().saturating_sub(1));
    if rows > expected_rows {
        return Err(EngineError::Support(SupportError::Rows { rows, expected_rows }));
    }
    let first = tokens.len() - rows;
    support.check(&tokens[first..], None).map_err(EngineError::Support)?;
    match support.beyond(vocab_size) {
        Some((row, TokenId(token))) => {
            Err(EngineError::SupportToken { token, position: first + row, vocab_size })
        }
        None => Ok(()),
    }
}

/// What scoring `T` tokens gives.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// `[T - 1]` nats, of tokens 1 on, under the distribution that was asked for.
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

/// The distribution that the tokens of the one sequence being scored are scored under.
pub(crate) struct ScoredUnder {
    temperature: f32,
    /// As [`ToScore::kept`].
    kept: Option<(Vec<u32>, Vec<u32>)>,
}

impl Engine {
    /// Scores a sequence of `T` tokens through the scheduler and the paged cache as any request.
    ///
    /// With routes the experts are those, and `live_routes` says what the router would have chosen.
    ///
    /// # Errors
    /// If other requests are unfinished or not taken, a token is outside the vocabulary, the tokens do not fit, or routes or
    /// supports break their contract.
    ///
    /// # Panics
    /// If the engine does not capture routes, the routes are of another model's shape, or the temperature is none.
    pub fn score(&mut self, sequence: &ToScore<'_>) -> Result<Scored, EngineError> {
        let ToScore { tokens, routes, .. } = *sequence;
        assert!(self.config.capture_routes, "an engine that scores captures routes");
        let sequences = self.n_open_requests();
        if sequences > 0 {
            return Err(EngineError::Busy { sequences });
        }
        let dims = self.model().route_dims();
        sequence.check(self.model().vocab_size)?;
        if let Some(routes) = routes {
            assert_eq!(routes.dims(), dims, "replayed routes have the model's shape");
            self.replay = Some(Replay::new(routes, self.model().router()));
        }
        self.scored_under = Some(ScoredUnder { temperature: sequence.temperature, kept: sequence.kept() });
        let outcome = self.score_one(tokens);
        self.scored_under = None;
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

impl ScoredUnder {
    /// `ids`, the tokens from `start + 1` on, with what each is scored over.
    pub(crate) fn targets<'a>(&'a self, start: usize, ids: &'a [u32]) -> Targets<'a> {
        let n_ids = |sizes: &[u32]| sizes.iter().map(|&size| size as usize).sum::<usize>();
        let kept = self.kept.as_ref().map(|(sizes, kept)| {
            let (before, sizes) = sizes[..start + ids.len()].split_at(start);
            Kept { sizes, ids: &kept[n_ids(before)..][..n_ids(sizes)] }
        });
        Targets { ids, temperature: self.temperature, kept }
    }
}

impl Replay {
    fn new(routes: RouteView<'_>, router: RouterConfig) -> Self {
        let (dims, n_tokens) = (routes.dims(), routes.rows() + 1);
        let mut padded = RouteRows::with_capacity(dims, n_tokens);
        padded.append(routes.bytes());
        // The last token is never an input in a rollout, so it has no row; as its logits are not used, any will do.
        let ids: Vec<u16> = (0..dims.n_layers).flat_map(|_| (0..).take(dims.top_k)).collect();
        let mut last = vec![0; dims.row_bytes()];
        write_ids(&ids, dims.width(), &mut last);
        padded.append(&last);
        Self {
            routes: padded,
            batch: 0..0,
            ids: Vec::new(),
            native: RouteRecord::new(dims.n_layers, router),
            live: RouteRows::with_capacity(dims, n_tokens),
        }
    }

    /// The replayed routes of a planned batch, layer by layer.
    pub(crate) fn routing(&mut self, plan: &TickPlan) -> Routing<'_> {
        let [chunk] = &plan.chunks[..] else { panic!("one sequence is scored at a time") };
        self.batch = chunk.start..chunk.start + chunk.n_tokens;
        let routes = self.routes.view().slice(self.batch.clone());
        self.ids.clear();
        self.ids.extend((0..routes.dims().n_layers).flat_map(|layer| routes.layer(layer)));
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
        let error = engine.score(&ToScore::new(&tokens)).unwrap_err();
        assert!(matches!(error, EngineError::Busy { sequences: 1 }), "{error}");
        engine.take_finished().unwrap();
        assert_eq!(engine.score(&ToScore::new(&tokens)).unwrap().logprobs.len(), 2);
    }

    #[test]
    fn a_refused_score_leaves_an_engine_that_scores() {
        let mut engine = engine(config(1 << 20));
        let tokens = [TokenId(3), TokenId(4), TokenId(5)];
        let scored = engine.score(&ToScore::new(&tokens)).unwrap();
        assert!(engine.score(&ToScore::new(&[TokenId(3), TokenId(u32::MAX)])).is_err());
        let routes = Some(scored.live_routes.view());
        assert!(engine.score(&ToScore { routes, ..ToScore::new(&tokens[..2]) }).is_err());
        assert_eq!(engine.score(&ToScore::new(&tokens)).unwrap(), scored);
        assert_eq!(engine.score(&ToScore { routes, ..ToScore::new(&tokens) }).unwrap(), scored);
    }
}
