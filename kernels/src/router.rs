//! Which experts a token goes to, and with which weight.
//!
//! [`choose`] is the only way to make a [`Choice`], and experts run on nothing else, so a pass whose routing is
//! [`Routing::Record`] cannot run an expert it did not record. Replay swaps the choice alone: [`gates`] weighs
//! whatever was chosen by the scores of this pass, which is how the router keeps learning
//! (R3, arXiv 2510.11370, section 3.2).

use crate::exp::exp;
use crate::isa::{Isa, multiversion};
use crate::parallel;
use crate::rank::{self, rank};
use crate::route_record::RouteRecord;
use crate::scratch::Scratch;
use crate::softmax::{exp_in_place, exp_sum, max};

mod above;
mod sigmoid;

use above::{replay_above, replay_some};
use sigmoid::{add_sigmoid_gradient, choose_rows, sigmoid_gate_rows};

/// How a model's router turns scores into a choice and gates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterConfig {
    /// Experts per layer, `E`; at most 65 536.
    pub n_experts: usize,
    /// Experts per token, `K`.
    pub top_k: usize,
    /// What is made of a score.
    pub scoring: Scoring,
    /// Whether the gates of a token's `K` experts are divided by their sum.
    pub norm_topk_prob: bool,
    /// What gates are multiplied by, last of all (`routed_scaling_factor`); above 0.
    pub scaling: f32,
}

impl RouterConfig {
    /// The router of Qwen3, OLMoE and Mixtral: a softmax and no scaling.
    #[must_use]
    pub const fn softmax(n_experts: usize, top_k: usize, norm_topk_prob: bool) -> Self {
        Self { n_experts, top_k, scoring: Scoring::Softmax, norm_topk_prob, scaling: 1.0 }
    }
}

/// What a router makes of its logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// The softmax over all `E` before the choice; with `norm_topk_prob` the same as a softmax over the chosen `K` after
    /// it, as Mixtral has it. The highest logits are chosen, from all of the experts.
    Softmax,
    /// Each score for itself, `1 / (1 + exp(-s))` (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). The choice is by these
    /// and the [`Router::bias`], from the best groups only. At most 1 024 experts.
    Sigmoid {
        /// Groups of consecutive experts, each of `E / n_groups`. With one, there is nothing to limit.
        n_groups: usize,
        /// Groups a token's experts may be of: those with the highest sum of their two best, biased. Equal sums go to
        /// the first.
        top_groups: usize,
    },
}

/// The router of one layer, given its scores.
#[derive(Clone, Copy, Debug)]
pub struct Router<'a> {
    /// How scores become a choice and gates.
    pub config: RouterConfig,
    /// `[E]`, added to what the sigmoid gives, for the choice alone: it balances the load and is no part of any gate, so
    /// it has no gradient (`e_score_correction_bias`; arXiv 2408.15664).
    pub bias: Option<&'a [f32]>,
}

impl From<RouterConfig> for Router<'_> {
    fn from(config: RouterConfig) -> Self {
        Self { config, bias: None }
    }
}

/// The experts of each token at one layer, `[T, K]` ids in router order: distinct and within range.
///
/// Nobody but [`choose`] can say which, so there is no second path to the experts that forgets to record:
///
/// ```compile_fail,E0451
/// let choice = r3_kernels::router::Choice { top_k: 2, n_experts: 4, ids: vec![0, 1] };
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    top_k: usize,
    n_experts: usize,
    ids: Vec<u16>,
}

impl Choice {
    /// A choice for no token: a buffer for [`choose`] to fill, again and again.
    #[must_use]
    pub fn empty() -> Self {
        Self { top_k: 1, n_experts: 0, ids: Vec::new() }
    }

    /// Expert ids, `[T, K]`.
    #[must_use]
    pub fn ids(&self) -> &[u16] {
        &self.ids
    }

    /// Experts per token, `K`.
    #[must_use]
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// Experts to choose among, `E`.
    #[must_use]
    pub fn n_experts(&self) -> usize {
        self.n_experts
    }

    /// Tokens, `T`.
    #[must_use]
    pub fn n_tokens(&self) -> usize {
        self.ids.len() / self.top_k
    }

    fn assert_made_for(&self, scores: &[f32], config: RouterConfig) {
        let made = (self.n_tokens() * self.n_experts, self.n_experts, self.top_k);
        let asked = (scores.len(), config.n_experts, config.top_k);
        assert_eq!(made, asked, "(T * E, E, K) of the choice and of the scores");
    }
}

/// Who chooses the experts of a pass.
#[derive(Debug)]
pub enum Routing<'a> {
    /// The router, and nobody needs to know.
    Free,
    /// The router, and its choice is kept.
    Record(&'a mut RouteRecord),
    /// An earlier pass did.
    Replay {
        /// The choice to replay, `[L, T, K]`, layer-major, in the order the earlier router had.
        ids: &'a [u16],
        /// Keeps what this pass's router would have chosen; costs a top-k per token and layer.
        native: Option<&'a mut RouteRecord>,
    },
    /// An earlier pass did, but for experts that this pass scores too low: each is replaced by the best of the router's own
    /// choice that is not taken yet.
    ReplayAbove {
        /// As above.
        ids: &'a [u16],
        /// An expert is replayed where what is made of its score, without a bias, is at least this share of the least of
        /// the router's own choice: 0 keeps all, 1 none but the router's own and its equals.
        ratio: f32,
        /// As above.
        native: Option<&'a mut RouteRecord>,
    },
    /// The router, but for some of the tokens: of these, an earlier pass did. What runs is kept.
    ReplaySome {
        /// Indices of those tokens among the `T`, `[R]`, ascending.
        tokens: &'a [usize],
        /// Their choice to replay, `[L, R, K]`, as above.
        ids: &'a [u16],
        /// As in `ReplayAbove`; 0 replays all as `Replay` does.
        ratio: f32,
        /// Keeps the choice of all `T` tokens, as `Record` does.
        record: &'a mut RouteRecord,
    },
    /// An earlier pass did, and weighed them, too.
    ReplayGates {
        /// As above.
        ids: &'a [u16],
        /// The gates to replay, `[L, T, K]`, as the ids.
        gates: &'a [f32],
    },
}

impl Routing<'_> {
    /// The gates `[T, K]` of `layer` that are replayed for `choice`, if any are: else [`gates`] weighs.
    ///
    /// # Panics
    /// If there are others than `[L, T, K]`.
    #[must_use]
    pub fn replayed_gates(&self, layer: usize, choice: &Choice) -> Option<&[f32]> {
        let Self::ReplayGates { ids, gates } = self else { return None };
        assert_eq!(gates.len(), ids.len(), "a gate for each replayed id");
        Some(&gates[layer * choice.ids.len()..][..choice.ids.len()])
    }
}

/// Chooses the experts of every token at MoE layer `layer` (0-based among MoE layers), into `choice`.
///
/// `scores` are the router's logits, `[T, E]`. The router takes the `K` highest, highest first; equal scores go
/// to the lowest id, and NaN comes after every number, `-inf` included. Softmax keeps the order of its logits, so
/// these are the `K` largest probabilities too, save that distinct logits may round to equal probabilities. Of a sigmoid,
/// compared are the rounded sums with the bias.
///
/// # Panics
/// If a shape does not fit, replayed ids repeat or exceed `E`, or the tokens they are of do not ascend: routes are checked
/// when they enter the program, so this is a bug.
pub fn choose<'a>(
    scores: &[f32],
    router: impl Into<Router<'a>>,
    layer: usize,
    routing: &mut Routing<'_>,
    choice: &mut Choice,
) {
    let router @ Router { config, .. } = router.into();
    let RouterConfig { n_experts, top_k, .. } = config;
    router.assert_sound();
    let n_tokens = scores.len() / n_experts;
    assert_eq!(scores.len(), n_tokens * n_experts, "scores of layer {layer} are not [T, {n_experts}]");
    choice.top_k = top_k;
    choice.n_experts = n_experts;
    choice.ids.resize(n_tokens * top_k, 0);
    match routing {
        Routing::Free => top_k_rows(scores, router, &mut choice.ids),
        Routing::Record(record) => {
            top_k_rows(scores, router, &mut choice.ids);
            record.keep(layer, choice);
        }
        Routing::Replay { ids, native } => {
            if let Some(record) = native {
                top_k_rows(scores, router, &mut choice.ids);
                record.keep(layer, choice);
            }
            choice.ids.copy_from_slice(replayed(ids, config, layer, n_tokens));
        }
        Routing::ReplayAbove { ids, ratio, native } => {
            top_k_rows(scores, router, &mut choice.ids);
            if let Some(record) = native {
                record.keep(layer, choice);
            }
            let replayed = replayed(ids, config, layer, n_tokens);
            replay_above(scores, (config, *ratio), replayed, &mut choice.ids);
        }
        Routing::ReplaySome { tokens, ids, ratio, record } => {
            top_k_rows(scores, router, &mut choice.ids);
            let replayed = replayed(ids, config, layer, tokens.len());
            replay_some(scores, (config, *ratio), (tokens, replayed), &mut choice.ids);
            record.keep(layer, choice);
        }
        Routing::ReplayGates { ids, .. } => {
            choice.ids.copy_from_slice(replayed(ids, config, layer, n_tokens));
        }
    }
}

/// The ids of `layer` out of `[L, T, K]`, checked.
fn replayed(ids: &[u16], config: RouterConfig, layer: usize, n_tokens: usize) -> &[u16] {
    let RouterConfig { n_experts, top_k, .. } = config;
    let len = n_tokens * top_k;
    assert!(
        ids.len() >= (layer + 1) * len && ids.len().is_multiple_of(len.max(1)),
        "{} replayed ids are not [L, {n_tokens}, {top_k}] with a layer {layer}",
        ids.len()
    );
    let ids = &ids[layer * len..][..len];
    for (t, row) in ids.chunks_exact(top_k).enumerate() {
        for (k, &id) in row.iter().enumerate() {
            assert!(usize::from(id) < n_experts, "layer {layer}, token {t}: expert {id} of {n_experts}");
            assert!(!row[..k].contains(&id), "layer {layer}, token {t}: expert {id} is replayed twice");
        }
    }
    ids
}

impl Router<'_> {
    fn assert_sound(self) {
        let RouterConfig { n_experts, top_k, scoring, .. } = self.config;
        assert!(
            0 < top_k && top_k <= n_experts && n_experts <= 1 << 16,
            "top {top_k} of {n_experts} experts"
        );
        match scoring {
            Scoring::Softmax => assert!(self.bias.is_none(), "a softmax router has no bias"),
            Scoring::Sigmoid { n_groups, top_groups } => {
                sigmoid::assert_sound((n_experts, top_k), (n_groups, top_groups));
                let len = self.bias.map_or(n_experts, <[f32]>::len);
                assert_eq!(len, n_experts, "a bias is [E]");
            }
        }
    }
}

fn top_k_rows(scores: &[f32], router: Router<'_>, ids: &mut [u16]) {
    let RouterConfig { n_experts, top_k, scoring, .. } = router.config;
    if let Scoring::Sigmoid { .. } = scoring {
        parallel::for_rows(ids, top_k, (COMPARE_WORK * top_k + EXP_WORK) * n_experts, |first, ids| {
            let n = ids.len() / top_k;
            choose_rows(&scores[first * n_experts..][..n * n_experts], router, ids);
        });
        return;
    }
    parallel::for_rows(ids, top_k, COMPARE_WORK * top_k * n_experts, |first, ids| {
        let n = ids.len() / top_k;
        choose_highest_rows(&scores[first * n_experts..][..n * n_experts], n_experts, top_k, ids);
    });
}

multiversion! {
    /// The `ids` `[T, K]` of the highest scores `[T, E]`.
    fn choose_highest_rows(scores: &[f32], n_experts: usize, top_k: usize, ids: &mut [u16]) = choose_highest_rows_body;
}

#[inline(always)]
fn choose_highest_rows_body<I: Isa>(scores: &[f32], n_experts: usize, top_k: usize, ids: &mut [u16]) {
    let mut ranks = Scratch::take(room_for(n_experts));
    for (scores, ids) in scores.chunks_exact(n_experts).zip(ids.chunks_exact_mut(top_k)) {
        take_highest(scores, &mut ranks, ids);
    }
}

/// Ranks that are compared at once.
const LANES: usize = 8;

/// How many ranks [`take_highest`] needs room for.
fn room_for(n_scores: usize) -> usize {
    n_scores.next_multiple_of(LANES)
}

/// The `ids` of the highest scores, best first; of equals the lowest comes first, and NaN comes last.
///
/// Looks through all ranks for every id, since that takes no branch: `K` is small.
#[inline(always)]
fn take_highest(scores: &[f32], ranks: &mut [u64], ids: &mut [u16]) {
    let ranks = &mut ranks[..room_for(scores.len())];
    ranks[scores.len()..].fill(u64::MAX);
    for (rank_of, (&score, id)) in ranks.iter_mut().zip(scores.iter().zip(0..)) {
        *rank_of = rank(score, id);
    }
    let mut taken = 0;
    for id in ids {
        let mut best = [u64::MAX; LANES];
        for ranks in ranks.as_chunks::<LANES>().0 {
            for lane in 0..LANES {
                best[lane] = best[lane].min(if ranks[lane] > taken { ranks[lane] } else { u64::MAX });
            }
        }
        taken = best.into_iter().fold(u64::MAX, u64::min);
        *id = u16::try_from(rank::id(taken)).expect("`choose` bounds the number of experts");
    }
}

/// Weights of the chosen experts, `out` `[T, K]`, from this pass's `scores` `[T, E]`.
///
/// The softmax over all `E`, read at the chosen ids; with `norm_topk_prob` divided by its sum over them, which is
/// the softmax over the chosen scores alone. That is how it is computed, so that replayed experts far below this
/// pass's best still get their share instead of `0 / 0`. Or the sigmoid of the chosen scores, with `norm_topk_prob` divided
/// by their sum and 1e-20. Either is then multiplied by `scaling`; no bias is in it.
///
/// # Panics
/// If the shapes do not fit each other.
pub fn gates(scores: &[f32], config: RouterConfig, choice: &Choice, out: &mut [f32]) {
    let RouterConfig { n_experts, top_k, scoring, norm_topk_prob, .. } = config;
    choice.assert_made_for(scores, config);
    assert_eq!(out.len(), choice.ids.len(), "gates are [T, K]");
    let over_all = scoring == Scoring::Softmax && !norm_topk_prob;
    let work = EXP_WORK * if over_all { n_experts } else { top_k };
    parallel::for_rows(out, top_k, work, |first, out| {
        let n = out.len() / top_k;
        let scores = &scores[first * n_experts..][..n * n_experts];
        let ids = &choice.ids[first * top_k..][..n * top_k];
        match scoring {
            Scoring::Softmax => gate_rows(scores, ids, config, out),
            Scoring::Sigmoid { .. } => sigmoid_gate_rows(scores, ids, config, out),
        }
    });
}

/// Multiply-adds that an `exp` costs in rows as short as these, about.
const EXP_WORK: usize = 128;
/// Multiply-adds that looking at a score costs, about, for each that is taken.
const COMPARE_WORK: usize = 8;

multiversion! {
    fn gate_rows(scores: &[f32], ids: &[u16], config: RouterConfig, out: &mut [f32]) = gate_rows_body;
}

#[inline(always)]
fn gate_rows_body<I: Isa>(scores: &[f32], ids: &[u16], config: RouterConfig, out: &mut [f32]) {
    let rows = scores.chunks_exact(config.n_experts).zip(ids.chunks_exact(config.top_k));
    for ((scores, ids), out) in rows.zip(out.chunks_exact_mut(config.top_k)) {
        for (gate, &id) in out.iter_mut().zip(ids) {
            *gate = scores[usize::from(id)];
        }
        let highest = if config.norm_topk_prob { max(out) } else { max(scores) };
        let over_chosen = exp_in_place::<I>(out, highest);
        let sum = if config.norm_topk_prob { over_chosen } else { exp_sum::<I>(scores, highest, 1.0) };
        for gate in out {
            *gate = *gate / sum * config.scaling;
        }
    }
}

/// What [`gates`] was computed of, and what it gave.
#[derive(Clone, Copy, Debug)]
pub struct Gated<'a> {
    /// `[T, E]`.
    pub scores: &'a [f32],
    /// As in the forward.
    pub config: RouterConfig,
    /// The experts.
    pub choice: &'a Choice,
    /// `[T, K]`.
    pub gates: &'a [f32],
}

impl Gated<'_> {
    /// Gradient with respect to `scores`: `grad` `[T, K]` in, `[T, E]` added to `out`.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn add_scores_gradient(&self, grad: &[f32], out: &mut [f32]) {
        let RouterConfig { n_experts, top_k, .. } = self.config;
        self.choice.assert_made_for(self.scores, self.config);
        assert_eq!((grad.len(), out.len()), (self.gates.len(), self.scores.len()), "gradients fit");
        parallel::for_rows(out, n_experts, EXP_WORK * n_experts, |first, out| {
            let (rows, grad) = (Span { first, n: out.len() / n_experts }, &grad[first * top_k..]);
            match self.config.scoring {
                Scoring::Softmax => backward_rows(self, rows, grad, out),
                Scoring::Sigmoid { .. } => add_sigmoid_gradient(self, rows, grad, out),
            }
        });
    }
}

/// Consecutive tokens.
#[derive(Clone, Copy)]
struct Span {
    first: usize,
    n: usize,
}

multiversion! {
    fn backward_rows(gated: &Gated<'_>, rows: Span, grad: &[f32], out: &mut [f32]) = backward_rows_body;
}

/// What the gradient of one token's scores is made of.
struct GatedRow<'a> {
    /// `[E]`.
    scores: &'a [f32],
    /// `[K]`.
    gates: &'a [f32],
    /// `[K]`.
    ids: &'a [u16],
    /// `[K]`.
    grad: &'a [f32],
    /// `[E]`.
    out: &'a mut [f32],
}

impl Gated<'_> {
    /// The tokens of `rows`; `grad` and `out` start with the first of them.
    #[inline(always)]
    fn rows<'a>(
        &'a self,
        rows: Span,
        grad: &'a [f32],
        out: &'a mut [f32],
    ) -> impl Iterator<Item = GatedRow<'a>> {
        let RouterConfig { n_experts, top_k, .. } = self.config;
        let scores = self.scores[rows.first * n_experts..].chunks_exact(n_experts);
        let gates = self.gates[rows.first * top_k..].chunks_exact(top_k);
        let ids = self.choice.ids[rows.first * top_k..].chunks_exact(top_k);
        let (grad, out) = (grad.chunks_exact(top_k), out.chunks_exact_mut(n_experts));
        let rows = scores.zip(gates).zip(ids).zip(grad).zip(out).take(rows.n);
        rows.map(|((((scores, gates), ids), grad), out)| GatedRow { scores, gates, ids, grad, out })
    }
}

/// Softmax Jacobian: `d/ds_j` is `p_j (grad_j - sum_i grad_i p_i)`, the sum over the chosen `i`, times the scaling.
///
/// Over all `E`, every score gets a gradient; over the chosen alone (`norm_topk_prob`), only the chosen do.
#[inline(always)]
fn backward_rows_body<I: Isa>(gated: &Gated<'_>, rows: Span, grad: &[f32], out: &mut [f32]) {
    let RouterConfig { norm_topk_prob, scaling, .. } = gated.config;
    for GatedRow { scores, gates, ids, grad, out } in gated.rows(rows, grad, out) {
        let mean: f32 = gates.iter().zip(grad).map(|(gate, grad)| gate * grad).sum();
        if norm_topk_prob {
            let mean = mean / scaling;
            for ((gate, grad), &id) in gates.iter().zip(grad).zip(ids) {
                out[usize::from(id)] += gate * (grad - mean);
            }
            continue;
        }
        let highest = max(scores);
        let scale = -mean / exp_sum::<I>(scores, highest, 1.0);
        for (out, &score) in out.iter_mut().zip(scores) {
            *out += scale * exp::<I>(score - highest);
        }
        for ((gate, grad), &id) in gates.iter().zip(grad).zip(ids) {
            out[usize::from(id)] += gate * grad;
        }
    }
}

#[cfg(test)]
mod tests;
