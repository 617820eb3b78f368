//! A model without tensors: routes, tokens and logprobs are pure functions of weights and prefix.
//!
//! A *state* stands for what a transformer keeps of a prefix: it depends on the weights and on every token up to
//! and including its own, in order. All that a row of a forward gives is drawn from it.

use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_core::routes::RouteDims;

use crate::rng::mix;

/// Tokens of the vocabulary. Few, so that prompts share prefixes by chance and stop tokens come up.
pub const VOCAB: usize = 8;

/// What a slot holds: everything up to and including one token, as seen by one set of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State(u64);

impl State {
    /// Of a slot that nobody wrote.
    pub const UNWRITTEN: Self = Self(0);

    /// The state before the first token.
    #[must_use]
    pub fn start(version: PolicyVersion) -> Self {
        Self(mix(version.0 ^ 0x5851_F42D_4C95_7F2D))
    }

    /// The state after one more token.
    #[must_use]
    pub fn after(self, token: TokenId) -> Self {
        Self(mix(self.0.wrapping_mul(3) ^ (u64::from(token.0) + 1)))
    }

    /// Fills `out` `[L, K]` with distinct experts of every layer, in no particular order. The number of experts is prime.
    pub fn route(self, dims: RouteDims, out: &mut [u16]) {
        for (layer, choice) in out.chunks_exact_mut(dims.top_k).enumerate() {
            let drawn = mix(self.0 ^ (layer as u64 + 1));
            let n_experts = dims.n_experts as u64;
            // Steps of one length around a circle of prime length meet no expert twice.
            let (first, step) = (drawn % n_experts, 1 + (drawn >> 32) % (n_experts - 1));
            for (k, expert) in (0..).zip(choice) {
                *expert = u16::try_from((first + k * step) % n_experts).expect("expert ids are u16");
            }
        }
    }

    /// The state of this token if it took the experts `ran` `[L, K]` instead of those of its route; the same if these are
    /// the same.
    #[must_use]
    pub fn on(self, ran: &[u16], dims: RouteDims) -> Self {
        let mut own = vec![0; dims.row_ids()];
        self.route(dims, &mut own);
        let taken = |state: u64, &expert: &u16| mix(state.wrapping_mul(3) ^ (u64::from(expert) + 1));
        if own == ran { self } else { Self(ran.iter().fold(mix(!self.0), taken)) }
    }

    /// The token that rollout `index` of `group` samples next, at `position`.
    #[must_use]
    pub fn token(self, group: GroupId, index: u32, position: usize) -> TokenId {
        let key = mix(group.0 ^ (u64::from(index) << 32)) ^ position as u64;
        let drawn = mix(self.0 ^ mix(key)) % VOCAB as u64;
        TokenId(u32::try_from(drawn).expect("below the vocabulary"))
    }

    /// Nats of `token` as the next one.
    #[must_use]
    pub fn logprob(self, token: TokenId) -> f32 {
        let drawn = u16::try_from(mix(self.0 ^ (u64::from(token.0) << 40)) >> 48).expect("16 bits");
        -f32::from(drawn) / 4096.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{NARROW, WIDE};

    fn state(version: u64, tokens: &[u32]) -> State {
        let start = State::start(PolicyVersion(version));
        tokens.iter().fold(start, |state, &token| state.after(TokenId(token)))
    }

    #[test]
    fn a_state_knows_weights_and_every_token_in_order() {
        let states = [
            state(0, &[1, 2, 3]),
            state(1, &[1, 2, 3]),
            state(0, &[2, 1, 3]),
            state(0, &[0, 1, 2, 3]),
            state(0, &[1, 2]),
        ];
        for (at, one) in states.iter().enumerate() {
            assert!(states[at + 1..].iter().all(|other| other != one), "{at}");
        }
        assert_eq!(state(0, &[1, 2, 3]), states[0]);
    }

    #[test]
    fn a_route_names_distinct_experts_and_every_expert_is_named() {
        for dims in [NARROW, WIDE] {
            let RouteDims { top_k, n_experts, .. } = dims;
            let mut seen = vec![false; n_experts];
            for token in 0..20_000 {
                let mut route = vec![0; dims.row_ids()];
                state(0, &[token]).route(dims, &mut route);
                for choice in route.chunks_exact(top_k) {
                    let mut sorted = choice.to_vec();
                    sorted.sort_unstable();
                    sorted.dedup();
                    assert_eq!(sorted.len(), top_k, "{choice:?} of {n_experts}");
                    choice.iter().for_each(|&expert| seen[usize::from(expert)] = true);
                }
            }
            assert!(seen.iter().all(|&seen| seen));
        }
    }

    #[test]
    fn experts_of_another_router_are_seen_in_the_state_and_its_own_are_not() {
        let reached = state(0, &[1, 2]);
        let mut own = vec![0; NARROW.row_ids()];
        reached.route(NARROW, &mut own);
        assert_eq!(reached.on(&own, NARROW), reached);
        own.swap(0, 1);
        assert_ne!(reached.on(&own, NARROW), reached, "their order counts");
        let mut other = own.clone();
        other.swap(2, 3);
        assert_ne!(reached.on(&own, NARROW), reached.on(&other, NARROW));
    }

    #[test]
    fn a_sample_depends_on_state_group_index_and_position() {
        let draws = |draw: &dyn Fn(usize) -> TokenId| (0..64).map(draw).collect::<Vec<_>>();
        let one = draws(&|at| state(0, &[1]).token(GroupId(1), 1, at));
        assert_eq!(one, draws(&|at| state(0, &[1]).token(GroupId(1), 1, at)));
        assert_ne!(one, draws(&|at| state(0, &[2]).token(GroupId(1), 1, at)));
        assert_ne!(one, draws(&|at| state(0, &[1]).token(GroupId(2), 1, at)));
        assert_ne!(one, draws(&|at| state(0, &[1]).token(GroupId(1), 2, at)));
        assert_ne!(one, draws(&|at| state(0, &[1]).token(GroupId(1), 1, at + 1)));
    }
}
