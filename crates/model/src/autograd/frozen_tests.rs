//! Tests of what is not computed where nothing is trained.

use std::path::Path;

use r3_kernels::gemm::Dtype;
use r3_kernels::router::Routing;

use super::backward::Backward;
use super::tape::Op;
use super::tests::{LENGTHS, TOKENS, pass, policy, tokens};
use super::training::Training;
use super::{Packed, Policy, PolicyOutput, Precision, Scored};
use crate::config::ModelConfig;
use crate::fixtures::{config_with, grouped_json};

/// A dense layer, then three MoE layers, of either kind of router.
fn each(body: impl Fn(&ModelConfig, Precision)) {
    let softmax = serde_json::json!({
        "num_hidden_layers": 4, "mlp_only_layers": [0], "attention_bias": true, "tie_word_embeddings": false
    });
    let mut grouped = grouped_json();
    grouped.insert("num_hidden_layers".into(), 4.into());
    let grouped = ModelConfig::parse(grouped, Path::new("config.json")).unwrap();
    for config in [config_with(softmax), grouped] {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            for recompute in [false, true] {
                body(&config, Precision { dtype, recompute });
            }
        }
    }
}

/// The layer that a weight is of; the embedding lies below all, the last norm and the head above.
fn layer_of(name: &str, n_layers: usize) -> Option<usize> {
    let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse().ok());
    if name.starts_with("model.embed") { None } else { Some(layer.unwrap_or(n_layers)) }
}

/// The lowest layer of which anything is trained, and which weights are.
type Trained = (usize, Box<dyn Fn(&str) -> bool>);

/// Whole layers from each on, then parts of the upper two.
fn trained_sets(n_layers: usize) -> Vec<Trained> {
    let mut sets: Vec<Trained> = Vec::new();
    for lowest in 0..=n_layers {
        let above = move |name: &str| layer_of(name, n_layers).is_some_and(|layer| layer >= lowest);
        sets.push((lowest, Box::new(above)));
    }
    for parts in [
        &["mlp.experts.down_proj"][..],
        &["mlp.gate."],
        &["self_attn.v_proj"],
        &["self_attn.q_norm", "mlp.shared"],
        &["post_attention_layernorm"],
        &["input_layernorm"],
        &["lm_head"],
    ] {
        let is_part = move |name: &str| parts.iter().any(|part| name.contains(part));
        let part =
            move |name: &str| layer_of(name, n_layers).is_some_and(|layer| layer >= 2) && is_part(name);
        sets.push((2, Box::new(part)));
    }
    sets
}

#[test]
fn what_is_frozen_below_leaves_the_gradients_above_as_they_were_to_the_bit() {
    each(|config, precision| {
        let mut whole = policy(config).with_precision(precision);
        let (logprobs, all) = pass(&mut whole, &mut Routing::Free);
        for (lowest, is_trained) in trained_sets(config.n_layers) {
            let how = |name: &str| if is_trained(name) { Training::Whole } else { Training::Frozen };
            let mut frozen = policy(config).with_precision(precision).with_training(how, 0).unwrap();
            assert!(!frozen.vars().is_empty(), "{lowest}");
            let (same_logprobs, gradients) = pass(&mut frozen, &mut Routing::Free);
            assert!(same_logprobs == logprobs);
            let expected = whole.vars().iter().zip(&all).filter(|((name, _), _)| is_trained(name));
            for (((name, _), expected), gradient) in expected.zip(&gradients) {
                assert!(gradient == expected, "{precision:?}, {lowest}: {name}");
            }
        }
    });
}

#[test]
fn updates_of_low_rank_above_frozen_layers_have_their_gradients_to_the_bit() {
    each(|config, precision| {
        let low_rank = |name: &str, lower| match layer_of(name, config.n_layers) {
            Some(2 | 3) if name.contains("_proj") && !name.contains("bias") => {
                Training::LowRank { rank: 2, scale: 0.5 }
            }
            _ => lower,
        };
        let run = |lower| {
            let policy = policy(config).with_precision(precision);
            let mut policy = policy.with_training(|name| low_rank(name, lower), 5).unwrap();
            let (_, gradients) = pass(&mut policy, &mut Routing::Free);
            let names = policy.vars().iter().map(|(name, _)| name.clone());
            names.zip(gradients).filter(|(name, _)| name.contains(".lora_")).collect::<Vec<_>>()
        };
        let expected = run(Training::Whole);
        assert!(expected.len() > 8 && run(Training::Frozen) == expected, "{precision:?}");
    });
}

/// A forward of the tokens of these tests.
fn forward_only(policy: &mut Policy) -> PolicyOutput {
    let tokens = tokens(TOKENS);
    let batch = Packed { tokens: &tokens[..6], targets: &tokens[1..], lengths: &LENGTHS, shared: &[] };
    policy.logprobs(&batch, &mut Routing::Free, 0.7).unwrap()
}

#[test]
fn layers_below_all_that_is_trained_leave_nothing_on_the_tape() {
    each(|config, precision| {
        let mut whole = policy(config).with_precision(precision);
        forward_only(&mut whole);
        let n_nodes = |policy: &Policy| policy.tape.nodes.len();
        let mut lengths = vec![n_nodes(&whole)];
        for (lowest, is_trained) in trained_sets(config.n_layers).into_iter().take(config.n_layers + 1) {
            let how = |name: &str| if is_trained(name) { Training::Whole } else { Training::Frozen };
            let mut frozen = policy(config).with_precision(precision).with_training(how, 0).unwrap();
            let output = forward_only(&mut frozen);
            assert_eq!(output.router_scores.len(), 3, "what was chosen below is still said");
            let given = matches!(frozen.tape.nodes[0].op, Op::Given);
            assert_eq!(given, lowest > 0, "{precision:?}, {lowest}");
            lengths.push(n_nodes(&frozen));
        }
        // The embedding below all, then one layer less each time; at last the stream and the norm above it.
        assert_eq!(lengths[0], lengths[1]);
        assert!(lengths[1..].is_sorted_by(|a, b| a > b), "{lengths:?}");
        assert_eq!(lengths.last(), Some(&2), "{precision:?}");
    });
}

#[test]
fn what_is_only_measured_keeps_nothing_and_has_the_values_of_what_is_learned_from() {
    each(|config, precision| {
        let tokens = tokens(TOKENS);
        let batch = Packed { tokens: &tokens[..6], targets: &tokens[1..], lengths: &LENGTHS, shared: &[] };
        let mut policy = policy(config).with_precision(precision);
        let values = |output: &PolicyOutput| {
            let scores = output.router_scores.iter().map(|scores| scores.flatten_all().unwrap());
            let all = scores.chain([output.logprobs.clone(), output.entropy.clone()]);
            (all.map(|values| values.to_vec1::<f32>().unwrap()).collect::<Vec<_>>(), output.ran.clone())
        };
        let learned_from = forward_only(&mut policy);
        assert!(policy.tape.nodes.len() > 2 && policy.last.is_some());
        let scored = Scored { temperature: 0.7, kept: None };
        let measured = policy.measure(&batch, &mut Routing::Free, scored).unwrap();
        assert_eq!(values(&measured), values(&learned_from), "{precision:?}");
        let nothing_left = policy.tape.nodes.iter().all(|node| !node.learns) && policy.last.is_none();
        assert!(nothing_left && policy.tape.nodes.len() == 2, "the stream and its norm, {precision:?}");
        forward_only(&mut policy);
        assert!(policy.tape.nodes.iter().all(|node| node.learns), "the next is learned from, {precision:?}");
    });
}

#[test]
fn no_gradient_goes_below_the_lowest_weight_that_is_trained() {
    each(|config, precision| {
        for (lowest, is_trained) in trained_sets(config.n_layers) {
            let how = |name: &str| if is_trained(name) { Training::Whole } else { Training::Frozen };
            let mut policy = policy(config).with_precision(precision).with_training(how, 0).unwrap();
            let output = forward_only(&mut policy);
            let mut gradients = policy.zero_gradients();
            let mut last = policy.last.take().unwrap();
            let ones = vec![1.0; last.targets.len()];
            policy.head_backward(&last, (&ones, &ones), gradients.tensors_mut()).unwrap();
            let score_grads: Vec<Option<Vec<f32>>> = output
                .router_scores
                .iter()
                .map(|scores| Some(scores.flatten_all().unwrap().to_vec1().unwrap()))
                .collect();
            let (weights, attend) = (&policy.weights, &mut last.attend);
            let mut backward =
                Backward { weights, attend, score_grads: &score_grads, gradients: &mut gradients };
            // Node by node: what is left never has a gradient that nothing trained is waiting for.
            while policy.tape.nodes.len() > 1 {
                let len = policy.tape.nodes.len() - 1;
                backward.run(&mut policy.tape, len).unwrap();
                let lost = policy.tape.nodes.iter().find(|node| node.grad.is_some() && !node.learns);
                assert!(lost.is_none(), "{precision:?}, {lowest}: {lost:?}");
            }
            assert!(policy.tape.nodes[0].grad.is_none(), "{precision:?}, {lowest}: the embedding is frozen");
        }
    });
}

#[test]
fn a_policy_of_which_nothing_is_trained_holds_the_activations_of_one_layer() {
    each(|config, precision| {
        let held = |how: Training| {
            let mut policy = policy(config).with_precision(precision).with_training(|_| how, 0).unwrap();
            forward_only(&mut policy);
            policy.tape.clear();
            policy.tape.pool.bytes()
        };
        let (whole, frozen) = (held(Training::Whole), held(Training::Frozen));
        let most = if precision.recompute { whole } else { whole / 2 };
        assert!(frozen <= most, "{precision:?}: {frozen} of {whole}");
    });
}
