//! Replay of those experts alone that this pass scores high enough, and of some tokens alone.

use crate::exp::exp;
use crate::isa::Baseline;

use super::{RouterConfig, Scoring};

/// Puts `replayed` `[T, K]` into `ids`, which hold the router's own choice, but for experts that score below `ratio` of the
/// least of that choice: these make room, where they stand, for the best of it that are left.
pub(super) fn replay_above(
    scores: &[f32],
    (config, ratio): (RouterConfig, f32),
    replayed: &[u16],
    ids: &mut [u16],
) {
    let RouterConfig { n_experts, top_k, scoring, .. } = config;
    let mut native = vec![0; top_k];
    let rows = replayed.chunks_exact(top_k).zip(ids.chunks_exact_mut(top_k));
    for (scores, (replayed, ids)) in scores.chunks_exact(n_experts).zip(rows) {
        native.copy_from_slice(ids);
        let score_of = |id: &u16| scores[usize::from(*id)];
        let least = native.iter().map(score_of).fold(f32::INFINITY, f32::min);
        let is_kept = |id: &u16| reaches(scoring, score_of(id), (ratio, least));
        let mut others = native.iter().filter(|id| !(replayed.contains(id) && is_kept(id)));
        for (to, id) in ids.iter_mut().zip(replayed) {
            *to = match is_kept(id) {
                true => *id,
                false => *others.next().expect("K of the router's own, less those that are kept"),
            };
        }
    }
}

/// Puts `replayed` `[R, K]` into the rows `tokens` of `ids`, which hold the router's own choice: all of it if `ratio` is 0,
/// else as [`replay_above`] does.
pub(super) fn replay_some(
    scores: &[f32],
    (config, ratio): (RouterConfig, f32),
    (tokens, replayed): (&[usize], &[u16]),
    ids: &mut [u16],
) {
    let RouterConfig { n_experts, top_k, .. } = config;
    assert!(tokens.is_sorted_by(|one, next| one < next), "the tokens that are replayed do not ascend");
    for (&token, replayed) in tokens.iter().zip(replayed.chunks_exact(top_k)) {
        let ids = &mut ids[token * top_k..][..top_k];
        if ratio > 0.0 {
            replay_above(&scores[token * n_experts..][..n_experts], (config, ratio), replayed, ids);
        } else {
            ids.copy_from_slice(replayed);
        }
    }
}

/// Whether what `scoring` makes of `score` is at least `ratio` of what it makes of `least`; of NaN, nothing is.
fn reaches(scoring: Scoring, score: f32, (ratio, least): (f32, f32)) -> bool {
    match scoring {
        // exp(score) >= ratio exp(least); both are divided by the same sum.
        Scoring::Softmax => score >= least + ratio.ln(),
        Scoring::Sigmoid { .. } => 1.0 + exp::<Baseline>(-least) >= ratio * (1.0 + exp::<Baseline>(-score)),
    }
}
