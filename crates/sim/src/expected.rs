//! What a request must end with, told from outside.

use std::fmt;
use std::ops::Range;

use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_core::rollout::FinishReason;
use r3_core::routes::RouteView;
use r3_scheduler::request::Finished;

use crate::hash_engine::support_of;
use crate::program::Reach;
use crate::subject::Prefill;

/// A request as its client sees it: what it asked for, and what was sampled for it so far.
#[derive(Clone, Debug)]
pub struct Expected {
    /// Its group.
    pub group: GroupId,
    /// Which of the group.
    pub index: u32,
    /// Tokens of the first prompt.
    pub prompt_tokens: usize,
    /// Everything so far.
    pub tokens: Vec<TokenId>,
    /// One for each token behind the prompt; 0 for those that were given.
    pub rollout_logprobs: Vec<f32>,
    /// One for each token behind the prompt; of given ones, that of the sampled one before.
    pub versions: Vec<PolicyVersion>,
    /// Positions sampled, a range for each turn.
    pub turns: Vec<Range<usize>>,
    /// Where this turn's first sample goes.
    pub turn_start: usize,
    /// How far this turn goes.
    pub reach: Reach,
    /// Whether the prompt's logprobs are wanted.
    pub prompt_logprobs: bool,
    /// The first route row wanted.
    pub return_routes: Option<usize>,
    /// Whether other weights take the rows that it has when they go on with it.
    pub replays: bool,
    /// See [`crate::program::Ask::stops_late`].
    pub stops_late: bool,
    /// End of the rows that came along from earlier turns and attempts.
    pub inherited_end: usize,
}

impl Expected {
    /// Notes a sampled token. Says why this must be the last, if it must.
    pub fn push(&mut self, token: TokenId, logprob: f32, version: PolicyVersion) -> Option<FinishReason> {
        let position = self.tokens.len();
        if position == self.turn_start {
            self.turns.push(position..position);
        }
        self.turns.last_mut().expect("the turn has begun").end = position + 1;
        self.tokens.push(token);
        self.rollout_logprobs.push(logprob);
        self.versions.push(version);
        if token.index() < self.reach.n_stops {
            return Some(FinishReason::Stop);
        }
        (self.n_sampled() == self.reach.max_new_tokens).then_some(FinishReason::Length)
    }

    /// Begins another turn.
    ///
    /// # Panics
    /// If no token was sampled before.
    pub fn give(&mut self, given: &[TokenId], reach: Reach) {
        let version = *self.versions.last().expect("a turn follows a sampled token");
        self.rollout_logprobs.extend(given.iter().map(|_| 0.0));
        self.versions.extend(given.iter().map(|_| version));
        self.tokens.extend(given);
        self.turn_start = self.tokens.len();
        self.go_on(reach);
    }

    /// Is taken up again, to go as far as `reach`.
    pub fn go_on(&mut self, reach: Reach) {
        self.reach = reach;
        self.inherited_end = self.emitted_end();
    }

    /// Tokens sampled in this turn.
    #[must_use]
    pub fn n_sampled(&self) -> usize {
        self.tokens.len() - self.turn_start
    }

    /// Whether a late reader has had a tick to notice the token that ends this for it.
    #[must_use]
    pub fn is_past_its_stop(&self) -> bool {
        let sampled = &self.tokens[self.turn_start..];
        self.stops_late && sampled.split_last().is_some_and(|(_, before)| before.contains(&TokenId(0)))
    }

    /// End of the rows under which a logprob was emitted.
    fn emitted_end(&self) -> usize {
        self.turns.last().map_or(0, |turn| turn.end - 1)
    }

    /// The version that row `position` is of: that of the next token sampled behind it, or `current` if that is still
    /// to come.
    fn version_of_row(&self, position: usize, current: PolicyVersion) -> PolicyVersion {
        let next = self.turns.iter().find(|turn| turn.end > position + 1);
        next.map_or(current, |turn| self.versions[turn.start.max(position + 1) - self.prompt_tokens])
    }

    /// Asserts that `finished` is what this request ends with, where `current` is the version now served and
    /// `prefill` computes tokens from scratch. Returns the number of route rows compared.
    ///
    /// If its rows are replayed, every version must have sampled what it does on all of them, as a trainer computes it, and
    /// chosen those that are its own behind those that are not.
    ///
    /// # Panics
    /// If anything differs.
    pub fn assert_is(
        &self,
        finished: &Finished,
        current: PolicyVersion,
        mut prefill: impl FnMut(PolicyVersion, &[TokenId], Option<RouteView<'_>>) -> Prefill,
    ) -> usize {
        let who = Who(self.group, self.index);
        assert_eq!((finished.group, finished.index), (self.group, self.index), "who ended");
        assert_eq!(finished.prompt_tokens, self.prompt_tokens, "{who}: prompt tokens");
        assert!(
            finished.cached_tokens < self.prompt_tokens,
            "{who}: {} cached tokens",
            finished.cached_tokens
        );
        assert_eq!(finished.tokens, self.tokens, "{who}: tokens");
        assert_eq!(finished.versions, self.versions, "{who}: versions");
        assert_eq!(finished.turns, self.turns, "{who}: turns");
        assert_eq!(bits(&finished.rollout_logprobs), bits(&self.rollout_logprobs), "{who}: logprobs");
        assert_eq!(finished.mask(), self.mask(), "{who}: mask");
        self.assert_supports(finished);
        let mut versions = self.versions.clone();
        let end = finished.view().routes.map_or(0, |routes| finished.routes_start + routes.rows());
        if self.turns.is_empty() || end > self.emitted_end() {
            versions.push(current);
        }
        versions.sort_unstable();
        versions.dedup();
        let replayed = finished.view().routes.filter(|_| self.replays && !self.turns.is_empty());
        let prefills: Vec<_> =
            versions.iter().map(|&version| (version, prefill(version, &self.tokens, replayed))).collect();
        let under = |version: PolicyVersion| {
            let (_, prefill) = prefills.iter().find(|(known, _)| *known == version).expect("one of them");
            prefill
        };
        for position in self.turns.iter().cloned().flatten() {
            let at = position - self.prompt_tokens;
            let alone = under(self.versions[at]).logprobs[position - 1];
            let said = finished.rollout_logprobs[at];
            assert_eq!(
                said.to_bits(),
                alone.to_bits(),
                "{who}: the logprob of {position} is {said}, not {alone}"
            );
        }
        let first = under(self.versions.first().copied().unwrap_or(current));
        self.assert_prompt_logprobs(finished, &first.logprobs);
        self.assert_rows(finished, |position| under(self.version_of_row(position, current)))
    }

    /// `[N]`, 1 for what was sampled; `None` if all was.
    fn mask(&self) -> Option<Vec<u8>> {
        let is_sampled = |position: usize| self.turns.iter().any(|turn| turn.contains(&position));
        let mask: Vec<u8> =
            (self.prompt_tokens..self.tokens.len()).map(|position| u8::from(is_sampled(position))).collect();
        mask.contains(&0).then_some(mask)
    }

    /// Compares every support with that of its position; an engine that cuts nothing has none.
    fn assert_supports(&self, finished: &Finished) {
        let who = Who(self.group, self.index);
        let Some(supports) = &finished.support else { return };
        assert_eq!(supports.rows(), self.versions.len(), "{who}: supports");
        for (position, support) in (self.prompt_tokens..).zip(supports.view().iter()) {
            let is_sampled = self.turns.iter().any(|turn| turn.contains(&position));
            let own = support_of(position, self.tokens[position]).map(TokenId);
            let expected = if is_sampled { &own[..] } else { &[] };
            assert_eq!(support, expected, "{who}: the support of position {position}");
        }
    }

    fn assert_prompt_logprobs(&self, finished: &Finished, alone: &[f32]) {
        let who = Who(self.group, self.index);
        assert_eq!(finished.prompt_logprobs.is_some(), self.prompt_logprobs, "{who}: prompt logprobs");
        let Some(logprobs) = &finished.prompt_logprobs else { return };
        let all = self.prompt_tokens - 1;
        let is_whole =
            logprobs.len() == all || (self.turns.is_empty() && finished.finish == FinishReason::Abort);
        assert!(is_whole && logprobs.len() <= all, "{who}: {} of {all} prompt logprobs", logprobs.len());
        assert_eq!(bits(logprobs), bits(&alone[..logprobs.len()]), "{who}: prompt logprobs");
    }

    /// Compares every row with `under` of its position.
    fn assert_rows<'a>(&self, finished: &Finished, under: impl Fn(usize) -> &'a Prefill) -> usize {
        let who = Who(self.group, self.index);
        assert_eq!(finished.routes.is_some(), self.return_routes.is_some(), "{who}: routes");
        let (Some(start), Some(routes)) = (self.return_routes, finished.view().routes) else { return 0 };
        assert_eq!(finished.routes_start, start, "{who}: the first row");
        let (end, n_tokens) = (start + routes.rows(), self.tokens.len());
        let (least, most) = match (self.n_sampled(), finished.finish) {
            (0, FinishReason::Abort) => (start.max(self.emitted_end()), start.max(n_tokens - 1)),
            (0, _) => (n_tokens, n_tokens),
            _ => (n_tokens - 1, n_tokens - 1),
        };
        assert!((least..=most).contains(&end), "{who}: rows end at {end}, not in {least}..={most}");
        let inherited_end = start.max(self.inherited_end);
        assert_eq!(finished.new_rows, end - inherited_end, "{who}: new rows of {start}..{end}");
        for position in start..end {
            let alone = under(position).rows.as_ref().expect("routes are on").view();
            let (row, own) = (row_of(routes, position - start), row_of(alone, position));
            assert_eq!(row, own, "{who}: the route of position {position}");
        }
        end - start
    }
}

/// A rollout, for messages.
#[derive(Clone, Copy)]
struct Who(GroupId, u32);

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rollout {}/{}", self.0, self.1)
    }
}

fn row_of(rows: RouteView<'_>, row: usize) -> &[u8] {
    let row_bytes = rows.dims().row_bytes();
    &rows.bytes()[row * row_bytes..][..row_bytes]
}

/// Equal logprobs are equal in every bit.
fn bits(logprobs: &[f32]) -> Vec<u32> {
    logprobs.iter().map(|logprob| logprob.to_bits()).collect()
}
