//! Scores that each go through a sigmoid: a choice by biased scores from the best groups, and gates without the bias.
//!
//! Biased scores of one token lie on the stack, which is why there is a most experts: a choice allocates nothing.

use crate::exp::exp;
use crate::isa::{Isa, multiversion};
use crate::scratch::Scratch;

use super::{Gated, GatedRow, Router, RouterConfig, Scoring, Span, room_for, take_highest};

/// Experts of a layer at most.
const MAX_EXPERTS: usize = 1024;

/// Keeps gates finite when all chosen scores round to 0; far below the rounding of any other sum.
const TINY: f32 = 1e-20;

/// Refuses what [`choose_rows`] cannot choose by.
pub(super) fn assert_sound((n_experts, top_k): (usize, usize), (n_groups, top_groups): (usize, usize)) {
    assert!(n_experts <= MAX_EXPERTS, "{n_experts} experts, at most {MAX_EXPERTS} for a sigmoid");
    assert!(
        0 < top_groups && top_groups <= n_groups && n_experts.is_multiple_of(n_groups),
        "{top_groups} of {n_groups} groups of {n_experts} experts"
    );
    let group = n_experts / n_groups;
    assert!(n_groups == 1 || group >= 2, "a group is ranked by its two best experts, not by {group}");
    assert!(top_k <= top_groups * group, "top {top_k} of {top_groups} groups of {group} experts");
}

#[inline(always)]
fn sigmoid<I: Isa>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<I>(-x))
}

multiversion! {
    /// The `ids` `[T, K]` that scores `[T, E]` choose.
    pub(super) fn choose_rows(scores: &[f32], router: Router<'_>, ids: &mut [u16]) = choose_rows_body;
}

#[inline(always)]
fn choose_rows_body<I: Isa>(scores: &[f32], router: Router<'_>, ids: &mut [u16]) {
    let RouterConfig { n_experts, top_k, scoring, .. } = router.config;
    let mut biased = [0.0; MAX_EXPERTS];
    let biased = &mut biased[..n_experts];
    let mut ranks = Scratch::take(room_for(n_experts));
    for (scores, ids) in scores.chunks_exact(n_experts).zip(ids.chunks_exact_mut(top_k)) {
        for (biased, &score) in biased.iter_mut().zip(scores) {
            *biased = sigmoid::<I>(score);
        }
        for (biased, bias) in biased.iter_mut().zip(router.bias.unwrap_or_default()) {
            *biased += bias;
        }
        match scoring {
            Scoring::Sigmoid { n_groups, top_groups } if top_groups < n_groups => {
                take_from_groups(biased, (n_groups, top_groups), &mut ranks, ids);
            }
            _ => take_highest(biased, &mut ranks, ids),
        }
    }
}

/// The highest of `top_groups` groups. Moves these groups to the front of `biased`, in order.
#[inline(always)]
fn take_from_groups(
    biased: &mut [f32],
    (n_groups, top_groups): (usize, usize),
    ranks: &mut [u64],
    ids: &mut [u16],
) {
    let group = biased.len() / n_groups;
    let mut sums = [0.0; MAX_EXPERTS / 2];
    let sums = &mut sums[..n_groups];
    for (sum, group) in sums.iter_mut().zip(biased.chunks_exact(group)) {
        let mut best = [0; 2];
        take_highest(group, ranks, &mut best);
        *sum = best.iter().map(|&at| group[usize::from(at)]).sum();
    }
    let mut kept = [0; MAX_EXPERTS / 2];
    let kept = &mut kept[..top_groups];
    take_highest(sums, ranks, kept);
    kept.sort_unstable();
    for (to, &from) in kept.iter().enumerate() {
        let from = usize::from(from) * group;
        biased.copy_within(from..from + group, to * group);
    }
    take_highest(&biased[..top_groups * group], ranks, ids);
    for id in ids {
        let at = usize::from(*id);
        let expert = usize::from(kept[at / group]) * group + at % group;
        *id = u16::try_from(expert).expect("at most `MAX_EXPERTS`");
    }
}

multiversion! {
    /// [`gates`](super::gates) on the calling thread.
    pub(super) fn sigmoid_gate_rows(scores: &[f32], ids: &[u16], config: RouterConfig, out: &mut [f32]) = gate_rows_body;
}

#[inline(always)]
fn gate_rows_body<I: Isa>(scores: &[f32], ids: &[u16], config: RouterConfig, out: &mut [f32]) {
    let rows = scores.chunks_exact(config.n_experts).zip(ids.chunks_exact(config.top_k));
    for ((scores, ids), out) in rows.zip(out.chunks_exact_mut(config.top_k)) {
        for (gate, &id) in out.iter_mut().zip(ids) {
            *gate = sigmoid::<I>(scores[usize::from(id)]);
        }
        let sum = if config.norm_topk_prob { out.iter().sum::<f32>() + TINY } else { 1.0 };
        for gate in out {
            *gate = *gate / sum * config.scaling;
        }
    }
}

multiversion! {
    /// [`Gated::add_scores_gradient`] for the tokens of `rows`; `grad` starts with the first of them.
    pub(super) fn add_sigmoid_gradient(gated: &Gated<'_>, rows: Span, grad: &[f32], out: &mut [f32]) = backward_rows_body;
}

/// With `w` the sigmoid of a chosen score, `c` the scaling and `S` the sum that gates are divided by, `d/dw_j` is
/// `(c grad_j - sum_i grad_i gate_i) / S`, or `c grad_j` without a sum; and `dw/ds` is `w (1 - w)`.
#[inline(always)]
fn backward_rows_body<I: Isa>(gated: &Gated<'_>, rows: Span, grad: &[f32], out: &mut [f32]) {
    let RouterConfig { norm_topk_prob, scaling, .. } = gated.config;
    for GatedRow { scores, gates, ids, grad, out } in gated.rows(rows, grad, out) {
        let (mut mean, mut sum) = (0.0, 1.0);
        if norm_topk_prob {
            mean = gates.iter().zip(grad).map(|(gate, grad)| gate * grad).sum();
            sum = ids.iter().map(|&id| sigmoid::<I>(scores[usize::from(id)])).sum::<f32>() + TINY;
        }
        for (grad, &id) in grad.iter().zip(ids) {
            let score = scores[usize::from(id)];
            // 1 - w is w of the other sign, without the rounding near 1.
            let slope = sigmoid::<I>(score) * sigmoid::<I>(-score);
            out[usize::from(id)] += (scaling * grad - mean) / sum * slope;
        }
    }
}
