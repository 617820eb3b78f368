//! Tests of what is trained: frozen weights, and updates of low rank.

use candle_core::Tensor;
use r3_core::ids::TokenId;
use r3_kernels::gemm::Dtype;
use r3_kernels::route_record::RouteRecord;
use r3_kernels::router::Routing;

use super::*;
use crate::adapter::Adapter;
use crate::autograd::gradients::Gradients;
use crate::autograd::{Packed, Policy, Precision};
use crate::config::ModelConfig;
use crate::fixtures::mixed_config;
use crate::init::FreshWeights;
use crate::source::{TensorSource, canonical_tensors};

const TOKENS: [TokenId; 7] =
    [TokenId(1), TokenId(2), TokenId(3), TokenId(4), TokenId(5), TokenId(6), TokenId(0)];

const LOW_RANK: Training = Training::LowRank { rank: 2, scale: 1.5 };

fn low_rank(name: &str) -> Training {
    if takes_low_rank(name) { LOW_RANK } else { Training::Frozen }
}

fn policy(config: &ModelConfig, recompute: bool, how: impl Fn(&str) -> Training) -> Policy {
    let policy = Policy::load(&FreshWeights::new(config, 3), config).unwrap();
    policy.with_precision(Precision { dtype: Dtype::F32, recompute }).with_training(how, 7).unwrap()
}

/// Moves every `B` off zero: until then, `A` has no gradient.
fn with_updates(mut policy: Policy) -> Policy {
    policy.change(|vars| {
        for (at, (_, var)) in vars.iter().enumerate().filter(|(_, (name, _))| name.contains("lora_B")) {
            let wave: Vec<f32> = (0..var.elem_count()).map(|i| ((i + at) as f32 * 1.7).sin() * 0.2).collect();
            var.set(&Tensor::from_vec(wave, var.dims(), &Device::Cpu).unwrap()).unwrap();
        }
    });
    policy
}

/// The loss, in f64, of the sequences of `lengths` in the first six tokens from `first` on, and its gradients added to
/// `gradients`.
fn pass(
    policy: &mut Policy,
    (first, lengths): (usize, &[usize]),
    ids: &[u16],
    gradients: &mut Gradients,
) -> f64 {
    let n_tokens: usize = lengths.iter().sum();
    let tokens = &TOKENS[first..first + n_tokens];
    let batch = Packed { tokens, targets: &TOKENS[first + 1..][..n_tokens], lengths, shared: &[] };
    let top_k = ids.len() / 6;
    let ids = &ids[first * top_k..(first + n_tokens) * top_k];
    let output = policy.logprobs(&batch, &mut Routing::Replay { ids, native: None }, 0.7).unwrap();
    let loss = (output.logprobs.sum_all().unwrap() + output.entropy.sum_all().unwrap()).unwrap();
    policy.backward(&output, &loss.backward().unwrap(), gradients).unwrap();
    let sum = |tensor: &Tensor| tensor.to_vec1::<f32>().unwrap().into_iter().map(f64::from).sum::<f64>();
    sum(&output.logprobs) + sum(&output.entropy)
}

fn gradients(policy: &mut Policy, ids: &[u16]) -> Vec<Vec<f32>> {
    let mut gradients = policy.zero_gradients();
    pass(policy, (0, &[4, 2]), ids, &mut gradients);
    gradients.into_tensors()
}

/// Experts other than the router's own.
fn replayed(config: &ModelConfig) -> Vec<u16> {
    let mut record = RouteRecord::new(1, config.router());
    record.start(6);
    let batch = Packed { tokens: &TOKENS[..6], targets: &TOKENS[1..], lengths: &[4, 2], shared: &[] };
    let mut policy = policy(config, false, |_| Training::Frozen);
    policy.logits(&batch, &mut Routing::Record(&mut record)).unwrap();
    record.layer(0).iter().map(|id| (id + 1) % config.n_experts as u16).collect()
}

fn read(policy: &Policy, name: &str) -> Vec<f32> {
    let mut values = Vec::new();
    policy.read(name, &mut values).unwrap();
    values
}

#[test]
fn freezing_leaves_other_gradients_as_they_were_to_the_bit() {
    let config = mixed_config();
    let ids = replayed(&config);
    let all = |_: &str| Training::Whole;
    let mut whole = policy(&config, false, all);
    let expected = gradients(&mut whole, &ids);
    let names = canonical_tensors(&config).into_iter().map(|(name, _)| name);
    let one_kind =
        ["mlp.gate.", "experts.gate_up", "experts.down", "_proj", "norm", "bias", "embed", "lm_head"];
    for kind in one_kind.map(str::to_owned).into_iter().chain(names) {
        let mut frozen = policy(&config, kind.len() % 2 == 0, |name| {
            if name.contains(&kind) { Training::Frozen } else { Training::Whole }
        });
        let found = gradients(&mut frozen, &ids);
        let left = whole.vars().iter().zip(&expected).filter(|((name, _), _)| !name.contains(&kind));
        for (((name, _), expected), ((found_name, _), found)) in left.zip(frozen.vars().iter().zip(&found)) {
            assert!(name == found_name && expected == found, "{name} while {kind} is frozen");
        }
        assert!(frozen.vars().iter().all(|(name, _)| !name.contains(&kind)), "{kind} is trained");
        assert_eq!(frozen.weights().len(), whole.weights().len());
    }
}

#[test]
fn nothing_that_is_frozen_has_a_gradient_buffer() {
    let config = mixed_config();
    let mut policy = policy(&config, false, |_| Training::Frozen);
    assert!(policy.vars().is_empty() && policy.zero_gradients().into_tensors().is_empty());
    gradients(&mut policy, &replayed(&config));
}

#[test]
fn factors_start_where_the_base_is_to_the_bit() {
    let config = mixed_config();
    let [base, adapted] = [|_: &str| Training::Whole, low_rank].map(|how| policy(&config, false, how));
    for (name, _) in canonical_tensors(&config) {
        let bits = |policy| read(policy, &name).into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(&base), bits(&adapted), "{name}");
    }
    let (mut sum, mut n_values) = (0.0, 0);
    for (name, var) in adapted.vars() {
        let values = var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        if name.ends_with("lora_B.weight") {
            assert!(values.iter().all(|&value| value == 0.0), "{name}");
            continue;
        }
        let bound = 1.0 / (*var.dims().last().unwrap() as f32).sqrt();
        assert!(values.iter().all(|value| value.abs() <= bound), "{name}");
        sum += values.iter().map(|value| (value / bound).powi(2)).sum::<f32>();
        n_values += values.len();
    }
    let mean_square = sum / n_values as f32;
    assert!((0.3..0.37).contains(&mean_square), "{mean_square} is not that of uniform numbers");
}

#[test]
fn a_start_follows_from_its_seed() {
    let config = mixed_config();
    let start = |seed| {
        let policy = Policy::load(&FreshWeights::new(&config, 3), &config).unwrap();
        let policy = policy.with_training(low_rank, seed).unwrap();
        let (name, var) = &policy.vars()[0];
        assert_eq!(name, "model.layers.0.self_attn.q_proj.lora_A.weight");
        var.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    assert_eq!(start(7), start(7));
    assert_ne!(start(7), start(8));
}

#[test]
fn weights_are_the_base_with_its_update() {
    let config = mixed_config();
    let base = policy(&config, false, |_| Training::Whole);
    let adapted = with_updates(policy(&config, false, low_rank));
    let factor = |name: &str| {
        let (_, var) = adapted.vars().iter().find(|(known, _)| known == name).expect(name);
        var.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    for (name, shape) in canonical_tensors(&config).into_iter().filter(|(name, _)| takes_low_rank(name)) {
        let ([n, k], count) = match shape[..] {
            [n, k] => ([n, k], 1),
            [count, n, k] => ([n, k], count),
            _ => unreachable!("{name}"),
        };
        let [a, b] = factor_names(&name).map(|name| factor(&name));
        assert_eq!((a.len(), b.len()), (count * 2 * k, count * n * 2));
        let (base, merged) = (read(&base, &name), read(&adapted, &name));
        for (at, (&base, &merged)) in base.iter().zip(&merged).enumerate() {
            let (matrix, row, column) = (at / (n * k), at / k % n, at % k);
            let update = (0..2).map(|r| b[matrix * n * 2 + row * 2 + r] * a[matrix * 2 * k + r * k + column]);
            let expected = base + 1.5 * update.sum::<f32>();
            assert!((merged - expected).abs() < 1e-6, "{name} at {at}: {merged}, not {expected}");
        }
        assert_ne!(base, merged, "{name}");
    }
}

#[test]
fn the_forward_takes_the_merged_weights_to_the_bit() {
    let config = mixed_config();
    let ids = replayed(&config);
    let mut adapted = policy(&config, false, low_rank);
    gradients(&mut adapted, &ids); // Packs copies of the base.
    let mut adapted = with_updates(adapted);
    let mut merged = Policy::load(&adapted.shared_weights(), &config).unwrap();
    let batch = Packed { tokens: &TOKENS[..6], targets: &TOKENS[1..], lengths: &[4, 2], shared: &[] };
    let logits = |policy: &mut Policy| {
        let mut routing = Routing::Replay { ids: &ids, native: None };
        policy.logits(&batch, &mut routing).unwrap().to_vec2::<f32>().unwrap()
    };
    assert_eq!(logits(&mut adapted), logits(&mut merged));
}

#[test]
fn what_is_trained_reads_back_into_the_same_weights() {
    let config = mixed_config();
    let trained = with_updates(policy(&config, false, low_rank));
    let dir = tempfile::tempdir().unwrap();
    Adapter::new((2, 3.0), dir.path(), trained.vars()).unwrap().write(dir.path()).unwrap();
    let mut again = policy(&config, false, low_rank);
    again.read_trained(&Adapter::load(dir.path()).unwrap().unwrap()).unwrap();
    for (name, _) in canonical_tensors(&config) {
        assert_eq!(read(&again, &name), read(&trained, &name), "{name}");
    }
    let mut wider = policy(&config, false, |name| match low_rank(name) {
        Training::LowRank { scale, .. } => Training::LowRank { rank: 3, scale },
        other => other,
    });
    assert!(wider.read_trained(&Adapter::load(dir.path()).unwrap().unwrap()).is_err());
}

/// `dA = scale Bᵀ dW` and `dB = scale dW Aᵀ`, with the `dW` of the same weights trained whole.
#[test]
fn gradients_of_factors_are_those_of_the_whole_weight_projected() {
    let config = mixed_config();
    let ids = replayed(&config);
    let mut adapted = with_updates(policy(&config, false, low_rank));
    let mut whole = Policy::load(&adapted.shared_weights(), &config).unwrap();
    let (of_factors, of_weights) = (gradients(&mut adapted, &ids), gradients(&mut whole, &ids));
    let named =
        |policy: &Policy, name: &str| policy.vars().iter().position(|(known, _)| known == name).unwrap();
    for (name, shape) in canonical_tensors(&config).into_iter().filter(|(name, _)| takes_low_rank(name)) {
        let [n, k] = shape[shape.len() - 2..] else { unreachable!("{name}") };
        let of_weight = &of_weights[named(&whole, &name)];
        let [a_at, b_at] = factor_names(&name).map(|name| named(&adapted, &name));
        let values = |at: usize| adapted.vars()[at].1.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let (a, b) = (values(a_at), values(b_at));
        for matrix in 0..of_weight.len() / (n * k) {
            let dw = |row: usize, column: usize| f64::from(of_weight[(matrix * n + row) * k + column]);
            for r in 0..2 {
                let check = |found: f32, expected: f64| {
                    let error = (f64::from(found) - 1.5 * expected).abs();
                    assert!(error < 2e-6 * (1.0 + expected.abs()), "{name}: {found}, not {expected}");
                };
                for column in 0..k {
                    let b = |row: usize| f64::from(b[(matrix * n + row) * 2 + r]);
                    let expected = (0..n).map(|row| b(row) * dw(row, column)).sum();
                    check(of_factors[a_at][(matrix * 2 + r) * k + column], expected);
                }
                for row in 0..n {
                    let a = |column: usize| f64::from(a[(matrix * 2 + r) * k + column]);
                    let expected = (0..k).map(|column| dw(row, column) * a(column)).sum();
                    check(of_factors[b_at][(matrix * n + row) * 2 + r], expected);
                }
            }
        }
    }
}

fn add_to_element(policy: &mut Policy, at: usize, element: usize, by: f32) {
    policy.change(|vars| {
        let var = &vars[at].1;
        let mut values = var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        values[element] += by;
        var.set(&Tensor::from_vec(values, var.dims(), &Device::Cpu).unwrap()).unwrap();
    });
}

#[test]
fn gradients_of_factors_are_differences_of_the_loss() {
    let config = mixed_config();
    let ids = replayed(&config);
    let mut policy = with_updates(policy(&config, false, low_rank));
    let gradients = gradients(&mut policy, &ids);
    let mut nowhere = policy.zero_gradients();
    for (at, gradient) in gradients.iter().enumerate() {
        let (name, len) = (policy.vars()[at].0.clone(), gradient.len());
        for element in (0..len).step_by(len.div_ceil(4)) {
            let mut loss_at = |by: f32| {
                add_to_element(&mut policy, at, element, by);
                let loss = pass(&mut policy, (0, &[4, 2]), &ids, &mut nowhere);
                add_to_element(&mut policy, at, element, -by);
                loss
            };
            let step = 1.0 / 256.0;
            let (found, expected) = (f64::from(gradient[element]), (loss_at(step) - loss_at(-step)) * 128.0);
            assert!(
                (found - expected).abs() < 2e-3 * (1.0 + expected.abs()),
                "{name}: {found}, not {expected}"
            );
        }
    }
}

#[test]
fn gradients_of_factors_do_not_depend_on_recompute_and_add_up_over_micro_batches() {
    let config = mixed_config();
    let ids = replayed(&config);
    let [mut kept, mut again] = [false, true].map(|again| with_updates(policy(&config, again, low_rank)));
    let expected = gradients(&mut kept, &ids);
    assert!(gradients(&mut again, &ids) == expected, "recompute shows");
    let mut sum = kept.zero_gradients();
    pass(&mut kept, (0, &[4]), &ids, &mut sum);
    pass(&mut kept, (4, &[2]), &ids, &mut sum);
    for ((name, _), (sum, expected)) in kept.vars().iter().zip(sum.into_tensors().iter().zip(&expected)) {
        assert!(sum == expected, "{name}");
    }
}

#[test]
fn norms_embeddings_and_heads_take_no_update_of_low_rank() {
    let takes: Vec<String> = canonical_tensors(&mixed_config()).into_iter().map(|(name, _)| name).collect();
    let (takes, rest): (Vec<_>, Vec<_>) = takes.into_iter().partition(|name| takes_low_rank(name));
    assert!(takes.iter().all(|name| name.contains("proj") || name.contains("mlp.gate")), "{takes:?}");
    let known = ["norm", "embed", "lm_head", ".bias"];
    assert!(rest.iter().all(|name| known.iter().any(|kind| name.contains(kind))), "{rest:?}");
}
