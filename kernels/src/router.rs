//! Which experts a token goes to, and with which weight.
//!
//! [`choose`] is the only way to make a [`Choice`], and experts run on nothing else, so a pass whose routing is
//! [`Routing::Record`] cannot run an expert it did not record. Replay swaps the choice alone: [`gates`] weighs
//! whatever was chosen by the scores of this pass, which is how the router keeps learning
//! (R3, arXiv 2510.11370, section 3.2).

use crate::exp::exp;
use crate::isa::{Isa, multiversion};
use crate::parallel;
use crate::route_record::RouteRecord;
use crate::softmax::{exp_in_place, exp_sum, max};

/// How a model's router turns scores into a choice and gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterConfig {
    /// Experts per layer, `E`; at most 65 536.
    pub n_experts: usize,
    /// Experts per token, `K`.
    pub top_k: usize,
    /// Whether the gates of a token's `K` experts are divided by their sum.
    pub norm_topk_prob: bool,
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
}

/// Chooses the experts of every token at MoE layer `layer` (0-based among MoE layers), into `choice`.
///
/// `scores` are the router's logits, `[T, E]`. The router takes the `K` highest, highest first; equal scores go
/// to the lowest id, and NaN comes after every number, `-inf` included. Softmax keeps the order of its logits, so
/// these are the `K` largest probabilities too, save that distinct logits may round to equal probabilities.
///
/// # Panics
/// If a shape does not fit, or replayed ids repeat or exceed `E`: routes are checked when they enter the program,
/// so this is a bug.
pub fn choose(
    scores: &[f32],
    config: RouterConfig,
    layer: usize,
    routing: &mut Routing<'_>,
    choice: &mut Choice,
) {
    let RouterConfig { n_experts, top_k, .. } = config;
    assert!(0 < top_k && top_k <= n_experts && n_experts <= 1 << 16, "top {top_k} of {n_experts} experts");
    let n_tokens = scores.len() / n_experts;
    assert_eq!(scores.len(), n_tokens * n_experts, "scores of layer {layer} are not [T, {n_experts}]");
    choice.top_k = top_k;
    choice.n_experts = n_experts;
    choice.ids.resize(n_tokens * top_k, 0);
    match routing {
        Routing::Free => top_k_rows(scores, config, &mut choice.ids),
        Routing::Record(record) => {
            top_k_rows(scores, config, &mut choice.ids);
            record.keep(layer, choice);
        }
        Routing::Replay { ids, native } => {
            if let Some(record) = native {
                top_k_rows(scores, config, &mut choice.ids);
                record.keep(layer, choice);
            }
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

fn top_k_rows(scores: &[f32], config: RouterConfig, ids: &mut [u16]) {
    let RouterConfig { n_experts, top_k, .. } = config;
    parallel::for_rows(ids, top_k, COMPARE_WORK * n_experts, |first, ids| {
        for (row, ids) in scores[first * n_experts..].chunks_exact(n_experts).zip(ids.chunks_exact_mut(top_k))
        {
            take_highest(row, ids);
        }
    });
}

/// Insertion into a sorted list: `K` is small, and most scores fall at the first comparison.
fn take_highest(scores: &[f32], ids: &mut [u16]) {
    let beats = |a: f32, b: f32| a > b || (b.is_nan() && !a.is_nan());
    let score_of = |id: u16| scores[usize::from(id)];
    let last = ids.len() - 1;
    for (expert, &score) in scores.iter().enumerate() {
        if expert > last && !beats(score, score_of(ids[last])) {
            continue;
        }
        let mut place = expert.min(last);
        while place > 0 && beats(score, score_of(ids[place - 1])) {
            ids[place] = ids[place - 1];
            place -= 1;
        }
        ids[place] = u16::try_from(expert).expect("`choose` bounds the number of experts");
    }
}

/// Weights of the chosen experts, `out` `[T, K]`, from this pass's `scores` `[T, E]`.
///
/// The softmax over all `E`, read at the chosen ids; with `norm_topk_prob` divided by its sum over them, which is
/// the softmax over the chosen scores alone. That is how it is computed, so that replayed experts far below this
/// pass's best still get their share instead of `0 / 0`.
///
/// # Panics
/// If the shapes do not fit each other.
pub fn gates(scores: &[f32], config: RouterConfig, choice: &Choice, out: &mut [f32]) {
    let RouterConfig { n_experts, top_k, norm_topk_prob } = config;
    choice.assert_made_for(scores, config);
    assert_eq!(out.len(), choice.ids.len(), "gates are [T, K]");
    let work = EXP_WORK * if norm_topk_prob { top_k } else { n_experts };
    parallel::for_rows(out, top_k, work, |first, out| {
        let n = out.len() / top_k;
        let (scores, ids) = (&scores[first * n_experts..], &choice.ids[first * top_k..]);
        gate_rows(&scores[..n * n_experts], &ids[..n * top_k], config, out);
    });
}

/// Multiply-adds that an `exp` costs in rows as short as these, about.
const EXP_WORK: usize = 128;
/// Multiply-adds that finding the place of a score costs, about.
const COMPARE_WORK: usize = 256;

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
            *gate /= sum;
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
            let rows = Span { first, n: out.len() / n_experts };
            backward_rows(self, rows, &grad[first * top_k..], out);
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

/// Softmax Jacobian: `d/ds_j` is `p_j (grad_j - sum_i grad_i p_i)`, the sum over the chosen `i`.
///
/// Over all `E`, every score gets a gradient; over the chosen alone (`norm_topk_prob`), only the chosen do.
#[inline(always)]
fn backward_rows_body<I: Isa>(gated: &Gated<'_>, rows: Span, grad: &[f32], out: &mut [f32]) {
    let RouterConfig { n_experts, top_k, norm_topk_prob } = gated.config;
    let scores = gated.scores[rows.first * n_experts..].chunks_exact(n_experts);
    let gates = gated.gates[rows.first * top_k..].chunks_exact(top_k);
    let ids = gated.choice.ids[rows.first * top_k..].chunks_exact(top_k);
    let chosen = gates.zip(ids).zip(grad.chunks_exact(top_k));
    for ((scores, out), ((gates, ids), grad)) in
        scores.zip(out.chunks_exact_mut(n_experts)).zip(chosen).take(rows.n)
    {
        let mean: f32 = gates.iter().zip(grad).map(|(gate, grad)| gate * grad).sum();
        if norm_topk_prob {
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
mod tests {
    use candle_core::{Device, Tensor, Var};
    use proptest::prelude::{Just, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest};

    use super::*;

    const QWEN: RouterConfig = RouterConfig { n_experts: 4, top_k: 2, norm_topk_prob: true };

    fn chosen(scores: &[f32], config: RouterConfig) -> Choice {
        let mut choice = Choice::empty();
        choose(scores, config, 0, &mut Routing::Free, &mut choice);
        choice
    }

    fn replay(scores: &[f32], config: RouterConfig, ids: &[u16]) -> Choice {
        let mut choice = Choice::empty();
        choose(scores, config, 0, &mut Routing::Replay { ids, native: None }, &mut choice);
        choice
    }

    fn gates_of(scores: &[f32], config: RouterConfig, choice: &Choice) -> Vec<f32> {
        let mut out = vec![f32::NAN; choice.ids().len()];
        gates(scores, config, choice, &mut out);
        out
    }

    fn panic_of(body: impl FnOnce() + std::panic::UnwindSafe) -> String {
        *std::panic::catch_unwind(body).unwrap_err().downcast::<String>().unwrap()
    }

    fn score() -> impl Strategy<Value = f32> {
        prop_oneof![
            4 => -5.0_f32..5.0,
            2 => (-2_i8..2).prop_map(f32::from),
            1 => prop_oneof![Just(f32::NAN), Just(f32::NEG_INFINITY), Just(f32::INFINITY), Just(-0.0)],
        ]
    }

    fn layer_of(
        score: impl Strategy<Value = f32> + 'static,
    ) -> impl Strategy<Value = (Vec<f32>, RouterConfig)> {
        let dims = (1_usize..40).prop_flat_map(|e| (Just(e), 1..=e, 0_usize..6, any::<bool>()));
        let score = score.boxed();
        dims.prop_flat_map(move |(n_experts, top_k, n_tokens, norm_topk_prob)| {
            let scores = proptest::collection::vec(score.clone(), n_tokens * n_experts);
            scores.prop_map(move |s| (s, RouterConfig { n_experts, top_k, norm_topk_prob }))
        })
    }

    proptest! {
        #[test]
        fn the_choice_is_the_head_of_a_stable_sort((scores, config) in layer_of(score())) {
            let choice = chosen(&scores, config);
            for (row, ids) in scores.chunks(config.n_experts).zip(choice.ids().chunks(config.top_k)) {
                let mut order: Vec<u16> = (0..config.n_experts as u16).collect();
                order.sort_by(|&a, &b| {
                    let (a, b) = (row[usize::from(a)], row[usize::from(b)]);
                    b.partial_cmp(&a).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
                });
                prop_assert_eq!(ids, &order[..config.top_k]);
            }
        }

        #[test]
        fn gates_are_the_softmax_at_the_chosen_ids(
            (scores, config) in layer_of(-5.0_f32..5.0), shift in 0_usize..40
        ) {
            let (e, k) = (config.n_experts, config.top_k);
            let ids: Vec<u16> = (0..scores.len() / e * k).map(|i| ((i / k + i % k + shift) % e) as u16).collect();
            let got = gates_of(&scores, config, &replay(&scores, config, &ids));
            for ((row, ids), got) in scores.chunks(e).zip(ids.chunks(k)).zip(got.chunks(k)) {
                let exps: Vec<f64> = row.iter().map(|&s| f64::from(s).exp()).collect();
                let of = |&id: &u16| exps[usize::from(id)];
                let total: f64 = if config.norm_topk_prob { ids.iter().map(of).sum() } else { exps.iter().sum() };
                for (id, &got) in ids.iter().zip(got) {
                    prop_assert!((f64::from(got) / (of(id) / total) - 1.0).abs() < 2e-6);
                }
            }
        }

        #[test]
        fn a_token_is_routed_the_same_alone_and_among_others((scores, config) in layer_of(-5.0_f32..5.0)) {
            let choice = chosen(&scores, config);
            let all = gates_of(&scores, config, &choice);
            let rows = choice.ids().chunks(config.top_k).zip(all.chunks(config.top_k));
            for (row, (ids, gates)) in scores.chunks(config.n_experts).zip(rows) {
                let alone = chosen(row, config);
                prop_assert_eq!(alone.ids(), ids);
                let alone = gates_of(row, config, &alone);
                prop_assert!(alone.iter().zip(gates).all(|(a, b)| a.to_bits() == b.to_bits()));
            }
        }
    }

    #[test]
    fn equal_scores_go_to_the_lowest_id_and_nan_comes_last() {
        assert_eq!(chosen(&[1.0, 2.0, 2.0, 2.0], QWEN).ids(), [1, 2]);
        assert_eq!(chosen(&[-0.0, 0.0, -1.0, 0.0], QWEN).ids(), [0, 1]);
        assert_eq!(chosen(&[f32::NAN, f32::NEG_INFINITY, f32::NAN, 1.0], QWEN).ids(), [3, 1]);
        assert_eq!(chosen(&[f32::NAN; 4], QWEN).ids(), [0, 1]);
    }

    #[test]
    fn replaying_the_native_choice_gives_the_same_bits() {
        let scores: Vec<f32> = (0..40).map(|i| (i as f32 * 1.3).sin() * 4.0).collect();
        for norm_topk_prob in [false, true] {
            let config = RouterConfig { norm_topk_prob, ..QWEN };
            let mut record = RouteRecord::new(1, config);
            record.start(10);
            let mut free = Choice::empty();
            choose(&scores, config, 0, &mut Routing::Record(&mut record), &mut free);
            let again = replay(&scores, config, &record.layer(0));
            assert_eq!(free, again);
            assert_eq!(gates_of(&scores, config, &free), gates_of(&scores, config, &again));
        }
    }

    #[test]
    fn replay_keeps_the_recorded_order_and_tells_what_the_router_would_have_done() {
        let scores = [0.0, 3.0, 1.0, 2.0, 9.0, 8.0, 7.0, 6.0];
        let mut native = RouteRecord::new(2, QWEN);
        native.start(2);
        let mut choice = Choice::empty();
        let ids = [0, 1, 0, 1, 3, 0, 2, 3];
        choose(&scores, QWEN, 1, &mut Routing::Replay { ids: &ids, native: Some(&mut native) }, &mut choice);
        assert_eq!(choice.ids(), [3, 0, 2, 3]);
        assert_eq!(native.layer(1), [1, 3, 0, 1]);
    }

    /// The gradient of the scores for `grad` of the gates.
    fn gradient(scores: &[f32], config: RouterConfig, choice: &Choice, grad: &[f32]) -> Vec<f32> {
        let gates = gates_of(scores, config, choice);
        let mut out = vec![0.0; scores.len()];
        Gated { scores, config, choice, gates: &gates }.add_scores_gradient(grad, &mut out);
        out
    }

    #[test]
    fn replayed_experts_outside_the_top_k_have_weight_and_gradient() {
        let scores = [0.0, 1.0, 2.0, 3.0];
        for norm_topk_prob in [false, true] {
            let config = RouterConfig { norm_topk_prob, ..QWEN };
            let choice = replay(&scores, config, &[0, 1]);
            assert!(gates_of(&scores, config, &choice).iter().all(|&gate| gate > 0.0));
            let grad = gradient(&scores, config, &choice, &[1.0, 0.0]);
            assert!(grad[0] > 0.0 && grad[1] < 0.0);
            assert_eq!(grad[2..].iter().all(|&g| g != 0.0), !norm_topk_prob);
        }
    }

    #[test]
    fn experts_far_below_the_best_share_the_gates_without_nan() {
        let scores = [200.0, 0.0, 0.0, 100.0];
        assert_eq!(gates_of(&scores, QWEN, &replay(&scores, QWEN, &[1, 2])), [0.5, 0.5]);
    }

    /// Scores `ln 1, ln 2, ln 5`: probabilities 1/8, 2/8, 5/8; experts 2 and 0 chosen, gradient 1 on expert 2.
    #[test]
    fn the_jacobian_of_three_experts_is_that_by_hand() {
        let scores = [0.0, 2_f32.ln(), 5_f32.ln()];
        let by_hand = [
            (false, [-5.0 / 64.0, -10.0 / 64.0, 15.0 / 64.0], [5.0 / 8.0, 1.0 / 8.0]),
            (true, [-5.0 / 36.0, 0.0, 5.0 / 36.0], [5.0 / 6.0, 1.0 / 6.0]),
        ];
        for (norm_topk_prob, want_grad, want_gates) in by_hand {
            let config = RouterConfig { n_experts: 3, top_k: 2, norm_topk_prob };
            let choice = chosen(&scores, config);
            assert_eq!(choice.ids(), [2, 1]);
            let choice = replay(&scores, config, &[2, 0]);
            let gates = gates_of(&scores, config, &choice);
            let grad = gradient(&scores, config, &choice, &[1.0, 0.0]);
            let near = |got: &[f32], want: &[f32]| got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-7);
            assert!(near(&gates, &want_gates), "{gates:?}");
            assert!(near(&grad, &want_grad), "{grad:?}");
        }
    }

    /// The same formula in candle's own operations, whose gradient is candle's.
    #[test]
    fn the_gradient_is_that_of_candle() {
        for norm_topk_prob in [false, true] {
            let config = RouterConfig { n_experts: 7, top_k: 3, norm_topk_prob };
            let values: Vec<f32> = (0..35).map(|i| (i as f32 * 2.1).sin() * 2.0).collect();
            let ids: Vec<u16> = (0..15).map(|i| (i * 5 % 7) as u16).collect();
            let scores = Var::from_slice(&values, (5, 7), &Device::Cpu).unwrap();
            let exps = scores.exp().unwrap();
            let index: Vec<u32> = ids.iter().map(|&id| id.into()).collect();
            let index = Tensor::from_vec(index, (5, 3), &Device::Cpu).unwrap();
            let picked = exps.gather(&index, 1).unwrap();
            let total = if norm_topk_prob { &picked } else { &exps }.sum_keepdim(1).unwrap();
            let naive = picked.broadcast_div(&total).unwrap();

            let weights: Vec<f32> = (0..15).map(|i| i as f32 - 6.0).collect();
            let ours = gradient(&values, config, &replay(&values, config, &ids), &weights);
            let weights = Tensor::from_vec(weights, (5, 3), &Device::Cpu).unwrap();
            let grads = (naive * &weights).unwrap().sum_all().unwrap().backward().unwrap();
            let naive: Vec<f32> = grads.get(&scores).unwrap().flatten_all().unwrap().to_vec1().unwrap();
            for (ours, naive) in ours.into_iter().zip(naive) {
                assert!((ours - naive).abs() < 2e-6, "{ours} {naive}");
            }
        }
    }

    #[test]
    fn replayed_ids_that_are_not_a_choice_are_named() {
        let scores = [0.0_f32; 8];
        for (ids, want) in [
            (&[0, 1, 2, 2][..], "layer 0, token 1: expert 2 is replayed twice"),
            (&[0, 4, 2, 3], "layer 0, token 0: expert 4 of 4"),
            (&[0, 1, 2], "3 replayed ids are not [L, 2, 2] with a layer 0"),
        ] {
            assert_eq!(panic_of(move || drop(replay(&scores, QWEN, ids))), want);
        }
        let message = panic_of(move || {
            let routing = &mut Routing::Replay { ids: &[0, 1, 2, 3], native: None };
            choose(&scores, QWEN, 1, routing, &mut Choice::empty());
        });
        assert_eq!(message, "4 replayed ids are not [L, 2, 2] with a layer 1");
    }
}
