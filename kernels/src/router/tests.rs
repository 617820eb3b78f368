//! The router against plain formulas, candle's gradient, and itself.

use candle_core::{Device, Tensor, Var};
use proptest::prelude::{Just, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest};

use super::*;

const QWEN: RouterConfig = RouterConfig::softmax(4, 2, true);

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

fn replay_above_of(scores: &[f32], config: RouterConfig, ids: &[u16], ratio: f32) -> Choice {
    let mut choice = Choice::empty();
    choose(scores, config, 0, &mut Routing::ReplayAbove { ids, ratio, native: None }, &mut choice);
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

fn layer_of(score: impl Strategy<Value = f32> + 'static) -> impl Strategy<Value = (Vec<f32>, RouterConfig)> {
    let dims = (1_usize..40).prop_flat_map(|e| (Just(e), 1..=e, 0_usize..6, any::<bool>()));
    let score = score.boxed();
    dims.prop_flat_map(move |(n_experts, top_k, n_tokens, norm_topk_prob)| {
        let scores = proptest::collection::vec(score.clone(), n_tokens * n_experts);
        scores.prop_map(move |s| (s, RouterConfig::softmax(n_experts, top_k, norm_topk_prob)))
    })
}

/// The same layer scored and scaled in every way there is.
fn scored((scores, config): (Vec<f32>, RouterConfig)) -> [(Vec<f32>, RouterConfig); 2] {
    let scoring = Scoring::Sigmoid { n_groups: 1, top_groups: 1 };
    [(scores.clone(), config), (scores, RouterConfig { scoring, scaling: 1.5, ..config })]
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
    fn an_expert_is_replayed_where_it_scores_a_share_of_the_least_chosen(
        layer in layer_of(-5.0_f32..5.0), shift in 0_usize..40, ratio in 0.0_f32..1.0
    ) {
        for (scores, config) in scored(layer) {
            let (e, k) = (config.n_experts, config.top_k);
            let ids: Vec<u16> = (0..scores.len() / e * k).map(|i| ((i / k + i % k + shift) % e) as u16).collect();
            let (above, native) = (replay_above_of(&scores, config, &ids, ratio), chosen(&scores, config));
            for (at, row) in scores.chunks(e).enumerate() {
                let of = |id: u16| {
                    let score = f64::from(row[usize::from(id)]);
                    if config.scoring == Scoring::Softmax { score.exp() } else { 1.0 / (1.0 + (-score).exp()) }
                };
                let [replayed, native, got] = [&ids[..], native.ids(), above.ids()].map(|ids| &ids[at * k..][..k]);
                let least = f64::from(ratio) * native.iter().map(|&id| of(id)).fold(f64::INFINITY, f64::min);
                if replayed.iter().any(|&id| (of(id) / least - 1.0).abs() < 1e-5) {
                    continue; // Closer than f32 can tell.
                }
                let kept = |id: &u16| of(*id) >= least;
                let mut others = native.iter().filter(|id| !replayed.iter().any(|one| one == *id && kept(one)));
                for (got, id) in got.iter().zip(replayed) {
                    let want = if kept(id) { id } else { others.next().unwrap() };
                    prop_assert_eq!(got, want);
                }
            }
        }
    }

    #[test]
    fn tokens_that_are_replayed_are_as_where_all_are_and_the_others_as_where_none_is(
        layer in layer_of(-5.0_f32..5.0), shift in 0_usize..40, picked in any::<u8>(),
        ratio in prop_oneof![Just(0.0_f32), 0.0_f32..1.0]
    ) {
        for (scores, config) in scored(layer) {
            let (e, k) = (config.n_experts, config.top_k);
            let n_tokens = scores.len() / e;
            let ids: Vec<u16> = (0..n_tokens * k).map(|i| ((i / k + i % k + shift) % e) as u16).collect();
            let tokens: Vec<usize> = (0..n_tokens).filter(|token| picked >> token & 1 == 1).collect();
            let some: Vec<u16> = tokens.iter().flat_map(|token| ids[token * k..][..k].to_vec()).collect();
            let mut record = RouteRecord::new(2, config);
            record.start(n_tokens);
            let both = some.repeat(2);
            let mut choice = Choice::empty();
            let mut routing = Routing::ReplaySome { tokens: &tokens, ids: &both, ratio, record: &mut record };
            choose(&scores, config, 1, &mut routing, &mut choice);
            prop_assert_eq!(&record.layer(1), choice.ids(), "what is kept is what runs");
            let (all, none) = (replay_above_of(&scores, config, &ids, ratio), chosen(&scores, config));
            for (token, ran) in choice.ids().chunks(k).enumerate() {
                let expected = if tokens.contains(&token) { &all } else { &none };
                prop_assert_eq!(ran, &expected.ids()[token * k..][..k], "token {} of {}", token, n_tokens);
            }
        }
    }

    #[test]
    fn a_token_is_routed_the_same_alone_and_among_others(layer in layer_of(-5.0_f32..5.0)) {
        for (scores, config) in scored(layer) {
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
        let config = RouterConfig::softmax(3, 2, norm_topk_prob);
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
        let config = RouterConfig::softmax(7, 3, norm_topk_prob);
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

#[test]
fn tokens_are_replayed_in_their_order_with_ids_of_their_own() {
    let refuse = |tokens: &'static [usize], ids: &'static [u16]| {
        panic_of(move || {
            let mut record = RouteRecord::new(1, QWEN);
            record.start(2);
            let mut routing = Routing::ReplaySome { tokens, ids, ratio: 0.0, record: &mut record };
            choose(&[0.0; 8], QWEN, 0, &mut routing, &mut Choice::empty());
        })
    };
    assert_eq!(refuse(&[1], &[0, 1, 2]), "3 replayed ids are not [L, 1, 2] with a layer 0");
    assert_eq!(refuse(&[0, 1], &[0, 1, 3, 3]), "layer 0, token 1: expert 3 is replayed twice");
    let in_no_order = std::panic::catch_unwind(|| {
        let mut record = RouteRecord::new(1, QWEN);
        record.start(2);
        let ids = [0, 1, 2, 3];
        let mut routing = Routing::ReplaySome { tokens: &[1, 0], ids: &ids, ratio: 0.0, record: &mut record };
        choose(&[0.0; 8], QWEN, 0, &mut routing, &mut Choice::empty());
    });
    assert!(in_no_order.is_err());
}

/// Eight experts in four groups of two, of which two groups are kept.
const GROUPED: RouterConfig = RouterConfig {
    n_experts: 8,
    top_k: 3,
    scoring: Scoring::Sigmoid { n_groups: 4, top_groups: 2 },
    norm_topk_prob: true,
    scaling: 2.5,
};

fn grouped(scores: &[f32], bias: &[f32]) -> Vec<u16> {
    let mut choice = Choice::empty();
    choose(scores, Router { config: GROUPED, bias: Some(bias) }, 0, &mut Routing::Free, &mut choice);
    choice.ids().to_vec()
}

#[test]
fn a_group_is_ranked_by_its_two_best_and_an_expert_outside_is_never_taken() {
    // The best expert, 0, is alone in its group: groups 1 and 2 have more in their two.
    let scores = [4.0, -9.0, 1.0, 1.5, 2.0, 0.5, -1.0, -1.0];
    assert_eq!(grouped(&scores, &[0.0; 8]), [4, 3, 2]);
    // A bias moves the choice: group 3 takes the place of group 2.
    let bias = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.9, 0.9];
    assert_eq!(grouped(&scores, &bias), [6, 7, 3]);
}

#[test]
fn equal_groups_and_equal_experts_go_to_the_first_and_nan_comes_last() {
    assert_eq!(grouped(&[0.0; 8], &[0.0; 8]), [0, 1, 2]);
    let nan = f32::NAN;
    // A group with one NaN has no sum, so it comes after those that have.
    assert_eq!(grouped(&[9.0, nan, nan, nan, -5.0, -5.0, -6.0, f32::NEG_INFINITY], &[0.0; 8]), [4, 5, 6]);
    assert_eq!(grouped(&[nan; 8], &[0.0; 8]), [0, 1, 2]);
    // Not outside the kept groups, even when what is left in them is NaN.
    assert_eq!(grouped(&[nan, nan, nan, 1.0, 2.0, 3.0, nan, nan], &[0.0; 8]), [5, 4, 0]);
}

#[test]
fn a_bias_changes_the_choice_and_no_gate() {
    let scores: Vec<f32> = (0..8).map(|i| (i as f32 * 1.7).sin() * 2.0).collect();
    let ids = grouped(&scores, &[0.3, 0.0, -0.2, 0.1, 0.0, 0.9, 0.0, 0.8]);
    assert_ne!(ids, grouped(&scores, &[0.0; 8]));
    let sigmoid = |id: &u16| 1.0 / (1.0 + f64::from(-scores[usize::from(*id)]).exp());
    let total: f64 = ids.iter().map(sigmoid).sum();
    let got = gates_of(&scores, GROUPED, &replay(&scores, GROUPED, &ids));
    for (id, got) in ids.iter().zip(got) {
        assert!((f64::from(got) - 2.5 * sigmoid(id) / total).abs() < 1e-6);
    }
}

/// Scores `0, ln 3`: sigmoids 1/2 and 3/4, gates 2.5 * 2/5 and 2.5 * 3/5; slopes 1/4 and 3/16, a sum of 5/4.
#[test]
fn the_sigmoid_jacobian_of_two_experts_is_that_by_hand() {
    let scores = [0.0, 3_f32.ln(), -1.0];
    let scoring = Scoring::Sigmoid { n_groups: 1, top_groups: 1 };
    for (norm_topk_prob, want) in [(true, [0.3, -0.15, 0.0]), (false, [2.5 / 4.0, 0.0, 0.0])] {
        let config = RouterConfig { n_experts: 3, top_k: 2, scoring, norm_topk_prob, scaling: 2.5 };
        let choice = replay(&scores, config, &[0, 1]);
        let grad = gradient(&scores, config, &choice, &[1.0, 0.0]);
        assert!(grad.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-6), "{grad:?}");
    }
}

#[test]
fn sigmoids_that_round_to_nothing_give_gates_of_nothing_and_no_nan() {
    let scores = [-200.0, -300.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0];
    let choice = replay(&scores, GROUPED, &[0, 1, 7]);
    assert!(gates_of(&scores, GROUPED, &choice).iter().all(|gate| gate.is_finite()));
    let scores = [-200.0; 8];
    let choice = replay(&scores, GROUPED, &[0, 1, 7]);
    assert_eq!(gates_of(&scores, GROUPED, &choice), [0.0; 3]);
    assert!(gradient(&scores, GROUPED, &choice, &[1.0, 2.0, 3.0]).iter().all(|grad| grad.is_finite()));
}

#[test]
fn routers_that_cannot_choose_are_named() {
    let refuse = |n_experts, top_k, (n_groups, top_groups)| {
        let scoring = Scoring::Sigmoid { n_groups, top_groups };
        let config = RouterConfig { n_experts, top_k, scoring, ..GROUPED };
        panic_of(move || drop(chosen(&[], config)))
    };
    assert_eq!(refuse(8, 5, (4, 2)), "top 5 of 2 groups of 2 experts");
    assert_eq!(refuse(8, 2, (3, 2)), "2 of 3 groups of 8 experts");
    assert_eq!(refuse(8, 2, (8, 2)), "a group is ranked by its two best experts, not by 1");
    assert_eq!(refuse(1025, 2, (1, 1)), "1025 experts, at most 1024 for a sigmoid");
}

#[test]
fn an_expert_that_scores_too_low_makes_room_for_the_best_that_is_left() {
    // Probabilities in the proportion 8, 4, 2, 1; the router itself takes experts 3 and 2.
    let scores = [1.0, 2.0, 4.0, 8.0].map(f32::ln);
    let above = |ids: [u16; 2], ratio: f32| replay_above_of(&scores, QWEN, &ids, ratio).ids().to_vec();
    assert_eq!(above([0, 1], 0.0), [0, 1]);
    assert_eq!(above([0, 1], 0.3), [3, 1], "1 is less than 0.3 * 4, 2 is not");
    assert_eq!(above([1, 0], 0.6), [3, 2]);
    assert_eq!(above([0, 3], 1.0), [2, 3], "what is kept is not taken twice");
    assert_eq!(above([2, 3], 1.0), [2, 3], "the router's own, in the order replayed");
}

#[test]
fn replayed_gates_are_those_of_the_layer() {
    let (ids, recorded) = ([3, 0, 2, 3, 0, 1, 1, 2], [0.1, 0.9, 0.2, 0.8, 0.3, 0.7, 0.4, 0.6]);
    let routing = &mut Routing::ReplayGates { ids: &ids, gates: &recorded };
    let mut choice = Choice::empty();
    choose(&[0.0; 8], QWEN, 1, routing, &mut choice);
    assert_eq!(choice.ids(), [0, 1, 1, 2]);
    assert_eq!(routing.replayed_gates(1, &choice), Some(&recorded[4..]));
    assert_eq!(Routing::Free.replayed_gates(1, &choice), None);
}
