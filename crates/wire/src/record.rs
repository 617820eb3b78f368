//! One rollout outside r3: what every layout is read into, and written from.

use std::ops::Range;

use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_core::rollout::{FinishReason, Reward, RolloutView};
use r3_core::routes::{RouteRows, RouteView};
use r3_core::support::{SupportRows, SupportView};
use serde::{Deserialize, Serialize};

use crate::array::check_dims;
use crate::check::Sample;
use crate::error::{Fault, WireError};
use crate::layout::Layout;
use crate::model::ModelShape;

/// A rollout with its routes, borrowed. What is not known is `None`: other engines say less than r3 does.
#[derive(Clone, Copy, Debug)]
pub struct RecordView<'a> {
    /// The prompt this completes; in other engines' files the number of the answer.
    pub group: GroupId,
    /// Which of the group's rollouts this is.
    pub index: u32,
    /// Why it ended.
    pub finish: Option<FinishReason>,
    /// Prompt, then completion, `[T]`.
    pub tokens: Option<&'a [TokenId]>,
    /// Tokens of the (first) prompt.
    pub prompt_tokens: Option<usize>,
    /// Prompt tokens that came from the prefix cache.
    pub cached_tokens: usize,
    /// Positions sampled, one range a turn, ascending. Tokens between them were given, by a user or a tool.
    pub turns: &'a [Range<usize>],
    /// `[N]` nats, `N = T - prompt_tokens`; 0.0 where a token was given.
    pub rollout_logprobs: Option<&'a [f32]>,
    /// `[N]`: the policy version that sampled each token.
    pub versions: Option<&'a [PolicyVersion]>,
    /// How tokens were drawn.
    pub sampling: Option<SamplingParams>,
    /// `[N]` rows: the tokens that each token was drawn from, if draws were truncated.
    pub support: Option<SupportView<'a>>,
    /// What the completion earned, if it was scored.
    pub reward: Option<Reward>,
    /// The completion as text.
    pub text: Option<&'a str>,
    /// The routes; `None` if replay is off.
    pub routes: Option<RoutesView<'a>>,
}

/// How the tokens of a rollout were drawn: what the logprobs are of. Cuts are made in the order of the fields.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Divides the logits; at 0 the most likely token was taken, whose logprob is that at 1.
    pub temperature: f32,
    /// Most likely tokens that were kept; 0 for all.
    #[serde(default)]
    pub sample_top_k: usize,
    /// Share of the probability that the most likely of those held; 1 for all.
    #[serde(default = "whole")]
    pub top_p: f32,
    /// Tokens were kept that were at least this many times as likely as the most likely one; 0 for all.
    #[serde(default)]
    pub min_p: f32,
}

fn whole() -> f32 {
    1.0
}

impl SamplingParams {
    /// Whether tokens were drawn from a part of the vocabulary: then each comes with what it was drawn from.
    #[must_use]
    pub fn truncates(&self) -> bool {
        self.temperature > 0.0 && (self.sample_top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0)
    }

    /// What the logits were divided by for the logprobs.
    #[must_use]
    pub fn divisor(&self) -> f32 {
        if self.temperature == 0.0 { 1.0 } else { self.temperature }
    }

    /// Whether each number is one that tokens can be drawn by.
    pub(crate) fn is_valid(&self) -> bool {
        let divides =
            self.divisor() > 0.0 && self.divisor().is_finite() && self.divisor().recip().is_finite();
        divides && [self.top_p, self.min_p].iter().all(|share| (0.0..=1.0).contains(share))
    }
}

/// The routes of a rollout and the header they travel under, borrowed.
#[derive(Clone, Copy, Debug)]
pub struct RoutesView<'a> {
    /// `[rows, L, K]`.
    pub rows: RouteView<'a>,
    /// What it says of them.
    pub header: RoutesHeader<'a>,
}

/// What travels with route rows, borrowed.
#[derive(Clone, Copy, Debug)]
pub struct RoutesHeader<'a> {
    /// Position of the first row.
    pub start: usize,
    /// `[L]`: the model's layers that the rows are of, ascending.
    pub layer_ids: &'a [u32],
    /// Weights the engine held when the rollout finished, counted by refits.
    pub weight_epoch: Option<u64>,
    /// Which weights: one hash over all tensors as the engine holds them.
    pub model_hash: Option<u64>,
}

impl<'a> RecordView<'a> {
    /// The record of a rollout that sampled the positions of `turns`. `header` is of the rollout's routes, if it has
    /// any, which then are rows from `header.start` on. Sampling, reward and text are left out: fill them in.
    #[must_use]
    pub fn new(rollout: &RolloutView<'a>, turns: &'a [Range<usize>], header: RoutesHeader<'a>) -> Self {
        Self {
            group: rollout.group,
            index: rollout.index,
            finish: Some(rollout.finish),
            tokens: Some(rollout.tokens),
            prompt_tokens: Some(rollout.prompt_tokens),
            cached_tokens: rollout.cached_tokens,
            turns,
            rollout_logprobs: Some(rollout.rollout_logprobs),
            versions: Some(rollout.versions),
            sampling: None,
            support: rollout.support,
            reward: None,
            text: None,
            routes: rollout.routes.map(|rows| RoutesView { rows, header }),
        }
    }
}

/// A rollout with its routes, owned: [`RecordView`] explains the fields.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "RecordView explains them")]
pub struct Record {
    pub group: GroupId,
    pub index: u32,
    pub finish: Option<FinishReason>,
    pub tokens: Option<Vec<TokenId>>,
    pub prompt_tokens: Option<usize>,
    pub cached_tokens: usize,
    pub turns: Vec<Range<usize>>,
    pub rollout_logprobs: Option<Vec<f32>>,
    pub versions: Option<Vec<PolicyVersion>>,
    pub sampling: Option<SamplingParams>,
    pub support: Option<SupportRows>,
    pub reward: Option<Reward>,
    pub text: Option<String>,
    pub routes: Option<Routes>,
}

/// Routes that kept the contract when they were read, owned: [`RoutesHeader`] explains the fields.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "RoutesHeader explains them")]
pub struct Routes {
    pub rows: RouteRows,
    pub start: usize,
    pub layer_ids: Vec<u32>,
    pub weight_epoch: Option<u64>,
    pub model_hash: Option<u64>,
}

impl Routes {
    /// Routes of which neither epoch nor weights are known.
    #[must_use]
    pub fn new(rows: RouteRows, start: usize, layer_ids: Vec<u32>) -> Self {
        Self { rows, start, layer_ids, weight_epoch: None, model_hash: None }
    }

    /// Checks that these are routes of `model`, layer by layer.
    ///
    /// # Errors
    /// If layers, `K` or `E` differ.
    pub fn check_model(&self, model: &ModelShape, sample: &Sample) -> Result<(), WireError> {
        if self.layer_ids != model.layer_ids() {
            let (found, expected) = (self.layer_ids.clone(), model.layer_ids().to_vec());
            return Err(sample.refuse(Fault::LayerIds { found, expected }));
        }
        check_dims(self.rows.view(), model, sample)
    }

    /// Borrows rows and header.
    #[must_use]
    pub fn view(&self) -> RoutesView<'_> {
        let header = RoutesHeader {
            start: self.start,
            layer_ids: &self.layer_ids,
            weight_epoch: self.weight_epoch,
            model_hash: self.model_hash,
        };
        RoutesView { rows: self.rows.view(), header }
    }
}

impl Record {
    /// A record of which nothing is known but its place in the file.
    #[must_use]
    pub fn unknown(group: GroupId, index: u32) -> Self {
        Self {
            group,
            index,
            finish: None,
            tokens: None,
            prompt_tokens: None,
            cached_tokens: 0,
            turns: Vec::new(),
            rollout_logprobs: None,
            versions: None,
            sampling: None,
            support: None,
            reward: None,
            text: None,
            routes: None,
        }
    }

    /// Borrows everything.
    #[must_use]
    pub fn view(&self) -> RecordView<'_> {
        RecordView {
            group: self.group,
            index: self.index,
            finish: self.finish,
            tokens: self.tokens.as_deref(),
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            turns: &self.turns,
            rollout_logprobs: self.rollout_logprobs.as_deref(),
            versions: self.versions.as_deref(),
            sampling: self.sampling,
            support: self.support.as_ref().map(SupportRows::view),
            reward: self.reward,
            text: self.text.as_deref(),
            routes: self.routes.as_ref().map(Routes::view),
        }
    }

    /// `T`: counted, or else what rows from `start` on are of. `None` without tokens and routes.
    #[must_use]
    pub fn n_tokens(&self) -> Option<usize> {
        let counted = self.tokens.as_ref().map(Vec::len);
        // Who sends rows alone sampled at least one token.
        let routed =
            || self.routes.as_ref().map(|routes| routes.start.saturating_add(routes.rows.rows() + 1));
        counted.or_else(routed)
    }

    /// Share of the rows that the tokens need which are there; 1 if they need none. `None` without tokens and routes.
    #[must_use]
    pub fn coverage(&self) -> Option<f64> {
        let sampled = self.tokens.is_none() || self.n_tokens() != self.prompt_tokens;
        let needed = self.n_tokens()?.saturating_sub(usize::from(sampled));
        let rows = self.routes.as_ref().map_or(0, |routes| routes.rows.rows());
        Some(if needed == 0 { 1.0 } else { rows as f64 / needed as f64 })
    }

    /// This record as a refusal names it: sample `number` of a file in `layout`.
    #[must_use]
    pub fn sample(&self, layout: Layout, number: usize) -> Sample {
        let n_tokens = self.tokens.as_ref().map(Vec::len);
        Sample {
            layout,
            number,
            n_tokens,
            sampled: n_tokens.is_none() || n_tokens != self.prompt_tokens,
            start: self.routes.as_ref().map_or(0, |routes| routes.start),
            turns: self.turns.clone(),
        }
    }

    /// Puts in the tokens that the sender left out, of which `prompt_tokens` are the prompt.
    ///
    /// # Errors
    /// If the sender said otherwise, or the routes do not have the rows of these tokens.
    pub fn set_tokens(
        &mut self,
        tokens: Vec<u32>,
        prompt_tokens: usize,
        sample: &Sample,
    ) -> Result<(), WireError> {
        let tokens: Vec<TokenId> = tokens.into_iter().map(TokenId).collect();
        let n_tokens = tokens.len();
        let said = self.prompt_tokens.unwrap_or(prompt_tokens);
        if prompt_tokens == 0 || prompt_tokens > n_tokens || said != prompt_tokens {
            return Err(sample.refuse(Fault::Prompt { prompt_tokens, cached_tokens: 0, n_tokens }));
        }
        if let Some(known) = &self.tokens
            && *known != tokens
        {
            let position = known.iter().zip(&tokens).take_while(|(known, given)| known == given).count();
            return Err(sample.refuse(Fault::OtherTokens { position }));
        }
        self.tokens = Some(tokens);
        self.prompt_tokens = Some(prompt_tokens);
        if self.turns.is_empty() && prompt_tokens < n_tokens {
            self.turns.push(prompt_tokens..n_tokens);
        }
        let sample = self.sample(sample.layout, sample.number);
        self.routes.as_ref().map_or(Ok(()), |routes| sample.check_rows(routes.rows.rows()))
    }

    /// [`Routes::check_model`] of the routes, if there are any.
    ///
    /// # Errors
    /// As there.
    pub fn check_model(&self, model: &ModelShape, sample: &Sample) -> Result<(), WireError> {
        self.routes.as_ref().map_or(Ok(()), |routes| routes.check_model(model, sample))
    }

    /// Checks that the routes were sampled under these weights, where they say under which they were.
    ///
    /// # Errors
    /// If epoch or hash differ from the expected one.
    pub fn check_weights(
        &self,
        weight_epoch: Option<u64>,
        model_hash: Option<u64>,
        sample: &Sample,
    ) -> Result<(), WireError> {
        let Some(routes) = &self.routes else { return Ok(()) };
        match (routes.weight_epoch, weight_epoch) {
            (Some(found), Some(expected)) if found != expected => {
                return Err(sample.refuse(Fault::WeightEpoch { found, expected }));
            }
            _ => {}
        }
        match (routes.model_hash, model_hash) {
            (Some(found), Some(expected)) if found != expected => {
                Err(sample.refuse(Fault::ModelHash { found, expected }))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use r3_core::routes::RouteDims;

    use super::*;

    fn record() -> Record {
        let mut rows = RouteRows::with_capacity(RouteDims { n_layers: 2, top_k: 1, n_experts: 4 }, 2);
        rows.append(&[0, 1, 2, 3]);
        let mut routes = Routes::new(rows, 5, vec![1, 2]);
        (routes.weight_epoch, routes.model_hash) = (Some(3), Some(0xabc));
        Record { routes: Some(routes), ..Record::unknown(GroupId(0), 0) }
    }

    fn fault(result: Result<(), WireError>) -> Fault {
        match result {
            Err(WireError::Sample { layout: Layout::R3, sample: 4, fault }) => fault,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn rows_of_another_model_are_refused() {
        let record = record();
        let sample = record.sample(Layout::R3, 4);
        let check = |n_layers, layer_ids: &[u32], top_k, n_experts| {
            let model = ModelShape::new(n_layers, layer_ids.to_vec(), top_k, n_experts).unwrap();
            record.check_model(&model, &sample)
        };
        check(3, &[1, 2], 1, 4).unwrap();
        let other_layers = Fault::LayerIds { found: vec![1, 2], expected: vec![0, 1] };
        assert_eq!(fault(check(3, &[0, 1], 1, 4)), other_layers);
        assert_eq!(fault(check(3, &[1, 2], 2, 4)), Fault::TopK { found: 1, expected: 2 });
        assert_eq!(fault(check(3, &[1, 2], 1, 8)), Fault::Experts { found: 4, expected: 8 });
    }

    #[test]
    fn rows_of_other_weights_are_refused() {
        let record = record();
        let sample = record.sample(Layout::R3, 4);
        record.check_weights(None, None, &sample).unwrap();
        record.check_weights(Some(3), Some(0xabc), &sample).unwrap();
        let stale = fault(record.check_weights(Some(4), None, &sample));
        assert_eq!(stale, Fault::WeightEpoch { found: 3, expected: 4 });
        let other = fault(record.check_weights(Some(3), Some(0xabd), &sample));
        assert_eq!(other, Fault::ModelHash { found: 0xabc, expected: 0xabd });
    }

    #[test]
    fn tokens_are_put_in_if_the_rows_are_theirs() {
        let sample = record().sample(Layout::R3, 4);
        let tokens = |n_tokens| (0..n_tokens).collect::<Vec<u32>>();
        let mut full = record();
        full.set_tokens(tokens(8), 6, &sample).unwrap();
        assert_eq!((full.n_tokens(), full.prompt_tokens), (Some(8), Some(6)));
        assert_eq!(full.turns.first(), Some(&(6..8)));
        full.set_tokens(tokens(8), 6, &sample).unwrap();
        let mut other = tokens(8);
        other[3] = 9;
        assert_eq!(fault(full.set_tokens(other, 6, &sample)), Fault::OtherTokens { position: 3 });
        let other_prompt = Fault::Prompt { prompt_tokens: 5, cached_tokens: 0, n_tokens: 8 };
        assert_eq!(fault(full.set_tokens(tokens(8), 5, &sample)), other_prompt);
        let more = Fault::Rows { turn: 0, start: 5, rows: 2, expected_rows: 3, n_tokens: 9 };
        assert_eq!(fault(record().set_tokens(tokens(9), 6, &sample)), more);
    }

    #[test]
    fn tokens_are_counted_or_follow_from_the_rows() {
        let mut record = record();
        assert_eq!((record.n_tokens(), record.coverage()), (Some(8), Some(2.0 / 7.0)));
        record.tokens = Some(vec![TokenId(0); 9]);
        assert_eq!(record.n_tokens(), Some(9));
        assert_eq!(Record::unknown(GroupId(0), 0).n_tokens(), None);
    }
}
