//! How sequences are cut into micro-batches, and which inputs they share in them.
//!
//! All rollouts of a group begin with one prompt. What a forward makes of an input depends on the inputs before it and on
//! the experts that are replayed, so as long as both are equal one row serves them all
//! ([why](../../../docs/decisions/0025-prompts-are-shared.md)). A leader has every row of its own; those that follow it
//! have the rows that it has not.

use std::ops::Range;

use crate::batch::{Limits, RoutesUse, Sequence};

/// Cuts the `sequences` of a mini-step, the first of which is number `start` of its batch, into ranges of consecutive ones
/// whose rows fit `limits.micro_batch_tokens`; a longer one is alone. A unit, a leader with its followers, stays whole if
/// any micro-batch could hold it.
pub(crate) fn micro_batches(
    sequences: &mut [Sequence<'_>],
    start: usize,
    limits: Limits,
) -> Vec<Range<usize>> {
    if limits.share_prompts {
        share(sequences, limits.routes);
    }
    let mut cutter = Cutter::new(limits.micro_batch_tokens);
    let mut at = 0;
    while at < sequences.len() {
        let end = at + 1 + sequences[at + 1..].iter().take_while(|one| one.n_shared > 0).count();
        if !cutter.has_room(sequences[at..end].iter().map(Sequence::n_rows).sum()) {
            cutter.close();
        }
        for member in at..end {
            if !cutter.has_room(sequences[member].n_rows()) {
                cutter.close();
                share(&mut sequences[member..end], limits.routes);
            }
            cutter.add(start + member, sequences[member].n_rows());
        }
        at = end;
    }
    cutter.finish()
}

/// Says what each of `sequences` shares, the first of which leads.
fn share(sequences: &mut [Sequence<'_>], routes: RoutesUse) {
    let mut leader = 0;
    for at in 0..sequences.len() {
        let (before, [own, ..]) = sequences.split_at_mut(at) else { unreachable!("it is one of them") };
        let n_shared = before.get(leader).map_or(0, |leader| common_inputs(leader, own, routes));
        // One that differs early, in the routes of newer weights, say, makes a better leader for those like it.
        own.n_shared = if 2 * n_shared < n_shareable(own) { 0 } else { n_shared };
        if own.n_shared == 0 {
            leader = at;
        }
    }
}

/// Inputs whose prediction nobody is trained on: the prompt but for its last token.
fn n_shareable(sequence: &Sequence<'_>) -> usize {
    sequence.sample.rollout.prompt_tokens - 1
}

/// Leading inputs of `own`, of those that may be shared, that are those of `leader`: the same tokens, on the same experts
/// if they are replayed.
fn common_inputs(leader: &Sequence<'_>, own: &Sequence<'_>, routes: RoutesUse) -> usize {
    let [a, b] = [leader.sample.rollout, own.sample.rollout];
    if a.group != b.group {
        return 0;
    }
    let n_most = n_shareable(own).min(leader.n_inputs());
    let n_tokens = n_equal(&a.tokens[..n_most], &b.tokens[..n_most]);
    match (routes, a.routes, b.routes) {
        (RoutesUse::Replay, Some(a), Some(b)) if n_tokens > 0 => {
            n_equal(a.first(n_tokens).bytes(), b.first(n_tokens).bytes()) / a.dims().row_bytes()
        }
        _ => n_tokens,
    }
}

/// Elements before the first that differs.
fn n_equal<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    // Nearly always all of them, which is compared fastest as a whole.
    if a == b { a.len() } else { a.iter().zip(b).take_while(|(a, b)| a == b).count() }
}

/// Micro-batches as they fill up.
pub(crate) struct Cutter {
    budget: usize,
    ranges: Vec<Range<usize>>,
    /// Rows of the last range; `None` once it takes no more.
    filled: Option<usize>,
}

impl Cutter {
    /// None yet, of `budget` rows each.
    pub(crate) fn new(budget: usize) -> Self {
        Self { budget, ranges: Vec::new(), filled: None }
    }

    /// Adds a sequence of `n_rows`, the next in order, to the micro-batch that is being filled or to a new one.
    pub(crate) fn add(&mut self, at: usize, n_rows: usize) {
        match (self.ranges.last_mut(), self.filled) {
            (Some(last), Some(filled)) if filled + n_rows <= self.budget => {
                last.end = at + 1;
                self.filled = Some(filled + n_rows);
            }
            _ => {
                self.ranges.push(at..at + 1);
                self.filled = Some(n_rows);
            }
        }
    }

    /// Whether so many rows would go into the micro-batch that is being filled.
    fn has_room(&self, n_rows: usize) -> bool {
        self.filled.is_some_and(|filled| filled + n_rows <= self.budget)
    }

    fn close(&mut self) {
        self.filled = None;
    }

    /// The ranges, in order.
    pub(crate) fn finish(self) -> Vec<Range<usize>> {
        self.ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::Batch;
    use crate::fixtures::{OwnedRollout, dapo, with_groups};
    use crate::micro_batch::MicroBatch;
    use r3_core::ids::TokenId;
    use r3_core::routes::{RouteDims, RouteRows};

    const DIMS: RouteDims = RouteDims { n_layers: 2, top_k: 1, n_experts: 9 };

    /// A rollout of a group whose prompts are the same, and whose routes are, as long as positions are.
    fn rollout(group: u64, index: u32, lengths: (usize, usize)) -> OwnedRollout {
        let mut rollout = OwnedRollout::new(group, index, lengths, (index % 2) as f32);
        for (token, id) in rollout.tokens[..lengths.0].iter_mut().zip(group as u32 * 1000..) {
            *token = TokenId(id);
        }
        rollout.with_routes(DIMS)
    }

    /// Another expert for input `row` at the last layer.
    fn rerouted(rollout: OwnedRollout, row: usize) -> OwnedRollout {
        let mut bytes = rollout.routes.as_ref().unwrap().view().bytes().to_vec();
        bytes[2 * row + 1] = 8;
        let mut rows = RouteRows::with_capacity(DIMS, 0);
        rows.append(&bytes);
        OwnedRollout { routes: Some(rows), ..rollout }
    }

    /// Micro-batches, and what each sequence shares.
    fn cut(rollouts: &[OwnedRollout], budget: usize, routes: RoutesUse) -> (Vec<Range<usize>>, Vec<usize>) {
        let limits = Limits { mini_steps: 1, micro_batch_tokens: budget, share_prompts: true, routes };
        with_groups(rollouts, |groups| {
            let batch = Batch::pack(groups, &dapo(), limits).unwrap();
            let n_shared: Vec<_> = batch.sequences().iter().map(|sequence| sequence.n_shared).collect();
            assert_eq!(batch.stats().n_shared, n_shared.iter().sum::<usize>());
            (batch.mini_steps()[0].micro_batches.clone(), n_shared)
        })
    }

    #[test]
    fn a_prompt_is_shared_but_for_its_last_token() {
        let rollouts = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)].map(|(group, index)| {
            rollout(group, index, (4, 2 + index as usize)) // Inputs: 5, 6, 7, 5, 6.
        });
        let (ranges, n_shared) = cut(&rollouts, 100, RoutesUse::Replay);
        assert_eq!((ranges.len(), &ranges[0], &n_shared[..]), (1, &(0..5), &[0, 3, 3, 0, 3][..]));
        let alone = [0, 1].map(|index| rollout(0, index, (1, 2)));
        assert_eq!(cut(&alone, 100, RoutesUse::Replay).1, [0, 0], "of one token nothing is left");
    }

    #[test]
    fn what_differs_ends_what_is_shared() {
        let mut rollouts = [0, 1, 2].map(|index| rollout(0, index, (5, 2)));
        rollouts[1].tokens[3] = TokenId(77);
        rollouts[2] = rerouted(rollouts[2].clone(), 2);
        assert_eq!(cut(&rollouts, 100, RoutesUse::Replay).1, [0, 3, 2]);
        // Who runs its own choice of experts cares for tokens alone.
        for routes in [RoutesUse::Diagnose, RoutesUse::None] {
            assert_eq!(cut(&rollouts, 100, routes).1, [0, 3, 4]);
        }
    }

    #[test]
    fn one_that_differs_early_leads_those_like_it() {
        let old = [0, 1].map(|index| rollout(0, index, (5, 2)));
        let new = [2, 3].map(|index| rerouted(rollout(0, index, (5, 2)), 1));
        assert_eq!(cut(&[old, new].concat(), 100, RoutesUse::Replay).1, [0, 4, 0, 4]);
    }

    #[test]
    fn a_prompt_and_its_rollouts_stay_together_where_they_fit() {
        // Rows of each group: 3 + 1 + 2 and then 2 each.
        let rollouts: Vec<_> = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
            .map(|(group, index)| rollout(group, index, (4, 2)))
            .into();
        let (ranges, n_shared) = cut(&rollouts, 12, RoutesUse::Replay);
        assert_eq!((ranges, n_shared), (vec![0..3, 3..6], vec![0, 3, 3, 0, 3, 3]));
        // None fits 7: who comes first in a micro-batch has the prompt again.
        let (ranges, n_shared) = cut(&rollouts, 7, RoutesUse::Replay);
        assert_eq!((ranges, n_shared), (vec![0..2, 2..3, 3..5, 5..6], vec![0, 3, 0, 0, 3, 0]));
        assert_eq!(cut(&rollouts, 1, RoutesUse::Replay).1, [0; 6]);
    }

    #[test]
    fn rows_are_those_that_are_not_shared_and_stand_for_all_that_are() {
        let rollouts = [0, 1].map(|index| rollout(0, index, (3, 2)));
        let limits =
            Limits { mini_steps: 1, micro_batch_tokens: 100, share_prompts: true, routes: RoutesUse::Replay };
        with_groups(&rollouts, |groups| {
            let batch = Batch::pack(groups, &dapo(), limits).unwrap();
            let mut micro = MicroBatch::default();
            micro.gather(&batch, 0..2);
            assert_eq!(micro.tokens, [0, 1, 2, 3, 2, 103].map(TokenId));
            assert_eq!(micro.targets, [1, 2, 3, 4, 103, 104].map(TokenId));
            assert_eq!((&micro.lengths[..], &micro.shared[..]), (&[4, 2][..], &[0, 2][..]));
            assert_eq!(micro.mask, [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
            assert_eq!(micro.rollout_logprobs, [0.0, 0.0, 0.0, -1.0, -1.0, -2.0]);
            assert_eq!(micro.routes, [0, 1, 2, 3, 2, 3, 1, 2, 3, 4, 3, 4]);
            assert_eq!(micro.uses(), [2, 2, 1, 1, 1, 1]);
            assert_eq!((micro.n_rows(), micro.n_inputs()), (6, 8));
        });
    }
}
