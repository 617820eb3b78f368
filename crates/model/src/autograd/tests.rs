//! Tests of the policy: what it computes, and how gradients run back.

use r3_kernels::numerics::Numerics;
use r3_kernels::route_record::RouteRecord;

use super::*;
use crate::buffers::Buffers;
use crate::fixtures::{config_with, grouped_config, mixed_config};
use crate::init::FreshWeights;
use crate::source::{SELECTION_BIAS, canonical_tensors, hash_tensors};

pub(super) fn policy(config: &ModelConfig) -> Policy {
    Policy::load(&FreshWeights::new(config, 3), config).unwrap()
}

pub(super) fn tokens<const N: usize>(ids: [u32; N]) -> [TokenId; N] {
    ids.map(TokenId)
}

#[test]
fn positions_start_anew_with_every_sequence() {
    let packed = |shared| {
        PackedSequences::new(&Packed { tokens: &[], targets: &[], lengths: &[3, 1, 2], shared }).positions
    };
    assert_eq!(packed(&[]), [0, 1, 2, 0, 0, 1]);
    assert_eq!(packed(&[0, 2, 1]), [0, 1, 2, 2, 1, 2], "or after what they share");
}

#[test]
fn every_canonical_tensor_is_trained_in_canonical_order() {
    let config = mixed_config();
    let policy = policy(&config);
    let vars: Vec<_> = policy.vars().iter().map(|(name, var)| (name.clone(), var.dims().to_vec())).collect();
    assert_eq!(vars, canonical_tensors(&config));
}

#[test]
fn packed_sequences_do_not_see_each_other() {
    let config = mixed_config();
    let mut policy = policy(&config);
    let mut logprobs = |inputs: &[TokenId], targets: &[TokenId], lengths: &[usize]| {
        let batch = Packed { tokens: inputs, targets, lengths, shared: &[] };
        let output = policy.logprobs(&batch, &mut Routing::Free, 0.7).unwrap();
        assert_eq!(output.router_scores.len(), 1, "one MoE layer");
        (output.logprobs.to_vec1::<f32>().unwrap(), output.entropy.to_vec1::<f32>().unwrap())
    };
    let together = logprobs(&tokens([1, 2, 3, 4, 5]), &tokens([2, 3, 9, 5, 6]), &[3, 2]);
    let first = logprobs(&tokens([1, 2, 3]), &tokens([2, 3, 9]), &[3]);
    let second = logprobs(&tokens([4, 5]), &tokens([5, 6]), &[2]);
    assert_eq!(together, ([first.0, second.0].concat(), [first.1, second.1].concat()));
}

#[test]
fn a_handle_to_the_weights_sees_later_updates() {
    let config = mixed_config();
    let mut policy = policy(&config);
    let shared = policy.shared_weights();
    let (_, norm) = policy.vars().iter().find(|(name, _)| name == "model.norm.weight").unwrap();
    norm.set(&Tensor::full(2.0f32, 8, &Device::Cpu).unwrap()).unwrap();
    let mut values = Vec::new();
    for source in [&policy as &dyn TensorSource, &shared] {
        source.read("model.norm.weight", &mut values).unwrap();
        assert_eq!(values, [2.0; 8]);
        assert!(matches!(source.read("norm", &mut values), Err(ModelError::NoSuchTensor { .. })));
    }
}

#[test]
fn tokens_and_lengths_beyond_the_model_are_refused() {
    let mut policy = policy(&config_with(serde_json::json!({ "max_position_embeddings": 3 })));
    let mut refusal = |tokens: &[TokenId], lengths: &[usize]| {
        let batch = Packed { tokens, targets: tokens, lengths, shared: &[] };
        policy.logits(&batch, &mut Routing::Free).unwrap_err().to_string()
    };
    let vocabulary = "token 10 at position 1 is outside the vocabulary of 10";
    assert_eq!(refusal(&tokens([9, 10]), &[2]), vocabulary);
    let long = "a sequence of 4 tokens exceeds the model's 3 positions";
    assert_eq!(refusal(&tokens([1; 5]), &[1, 4]), long);
}

pub(super) const TOKENS: [u32; 7] = [1, 2, 3, 4, 5, 6, 0];
pub(super) const LENGTHS: [usize; 2] = [4, 2];

fn in_precision(config: &ModelConfig, dtype: Dtype, recompute: bool) -> Policy {
    policy(config).with_precision(Precision { dtype, recompute })
}

/// Logprobs and the gradients of their sum, plus that of entropies and squared router scores.
pub(super) fn pass(policy: &mut Policy, routing: &mut Routing<'_>) -> (Vec<f32>, Vec<Vec<f32>>) {
    let tokens = tokens(TOKENS);
    let batch = Packed { tokens: &tokens[..6], targets: &tokens[1..], lengths: &LENGTHS, shared: &[] };
    let output = policy.logprobs(&batch, routing, 0.7).unwrap();
    let scores = output.router_scores[0].sqr().unwrap().sum_all().unwrap();
    let loss = (output.logprobs.sum_all().unwrap() + output.entropy.sum_all().unwrap()).unwrap();
    let loss = (loss + scores).unwrap();
    let mut gradients = policy.zero_gradients();
    policy.backward(&output, &loss.backward().unwrap(), &mut gradients).unwrap();
    (output.logprobs.to_vec1().unwrap(), gradients.into_tensors())
}

/// One that scores with a softmax, and one of sigmoids, groups, a bias and shared experts.
fn each(body: impl Fn(ModelConfig, Dtype)) {
    for config in [mixed_config(), grouped_config()] {
        [Dtype::F32, Dtype::Bf16].into_iter().for_each(|dtype| body(config.clone(), dtype));
    }
}

#[test]
fn every_weight_gets_a_gradient() {
    each(|config, dtype| {
        let mut policy = in_precision(&config, dtype, false);
        let (_, gradients) = pass(&mut policy, &mut Routing::Free);
        for ((name, _), gradient) in policy.vars().iter().zip(gradients) {
            assert!(gradient.iter().any(|&value| value != 0.0), "{dtype}: {name}");
        }
    });
}

/// Weights of which the bias of a router is set, too.
struct Biased(FreshWeights, f32);

impl TensorSource for Biased {
    fn read(&self, name: &str, out: &mut Vec<f32>) -> Result<(), ModelError> {
        self.0.read(name, out)?;
        if name.ends_with(SELECTION_BIAS) {
            out.iter_mut().zip([0.0, 1.0, 0.5, -1.0, 0.25, 0.75]).for_each(|(b, value)| *b = self.1 * value);
        }
        Ok(())
    }
}

#[test]
fn a_selection_bias_is_read_back_and_not_trained_and_moves_the_choice_alone() {
    let config = grouped_config();
    let mut of = [0.0, 8.0].map(|bias| {
        let mut policy = Policy::load(&Biased(FreshWeights::new(&config, 3), bias), &config).unwrap();
        let (logprobs, ran, _) = logprob_pass(&mut policy, &mut Routing::Free);
        (policy, logprobs, ran)
    });
    let name = format!("model.layers.1.mlp.{SELECTION_BIAS}");
    let [(_, without, _), (biased, with, ran)] = &mut of;
    assert!(!biased.vars().iter().any(|(known, _)| *known == name));
    let shared = biased.shared_weights();
    for source in [&*biased as &dyn TensorSource, &shared] {
        let mut values = Vec::new();
        source.read(&name, &mut values).unwrap();
        assert_eq!(values, [0.0, 8.0, 4.0, -8.0, 2.0, 6.0]);
    }
    assert_ne!(without, with);
    // Groups (0, 1) and (4, 5) have the largest sums.
    assert!(ran[0].ids.chunks(3).all(|ids| ids == [1, 5, 4]), "{ran:?}");
    let (mut without, ids) = (policy(&config), ran[0].ids.clone());
    let replayed = logprob_pass(&mut without, &mut Routing::Replay { ids: &ids, native: None });
    assert_eq!((&replayed.0, &replayed.1), (&*with, &*ran), "the same experts have the same gates");
}

#[test]
fn layers_that_run_again_have_the_same_gradients_to_the_bit() {
    each(|config, dtype| {
        let expected = pass(&mut in_precision(&config, dtype, false), &mut Routing::Free);
        assert!(
            pass(&mut in_precision(&config, dtype, true), &mut Routing::Free) == expected,
            "{dtype}, free"
        );
        let mut record = RouteRecord::new(1, config.router());
        record.start(6);
        let mut again = in_precision(&config, dtype, true);
        assert!(pass(&mut again, &mut Routing::Record(&mut record)) == expected, "{dtype}, recorded");
        // Other experts than the router's: if running again chose anew, the gradient would be that of a mixture.
        let ids: Vec<u16> = record.layer(0).iter().map(|id| (id + 1) % config.n_experts as u16).collect();
        let replay = || Routing::Replay { ids: &ids, native: None };
        let expected = pass(&mut in_precision(&config, dtype, false), &mut replay());
        assert!(pass(&mut again, &mut replay()) == expected, "{dtype}, replayed");
    });
}

/// Logprobs, what was run, and the gradients of the logprobs' sum.
fn logprob_pass(
    policy: &mut Policy,
    routing: &mut Routing<'_>,
) -> (Vec<f32>, Vec<RanExperts>, Vec<Vec<f32>>) {
    let tokens = tokens(TOKENS);
    let batch = Packed { tokens: &tokens[..6], targets: &tokens[1..], lengths: &LENGTHS, shared: &[] };
    let output = policy.logprobs(&batch, routing, 1.0).unwrap();
    let mut gradients = policy.zero_gradients();
    policy
        .backward(&output, &output.logprobs.sum_all().unwrap().backward().unwrap(), &mut gradients)
        .unwrap();
    (output.logprobs.to_vec1().unwrap(), output.ran, gradients.into_tensors())
}

#[test]
fn replayed_gates_are_run_and_give_their_router_no_gradient() {
    let config = mixed_config();
    let mut live = in_precision(&config, Dtype::F32, false);
    let (logprobs, ran, gradients) = logprob_pass(&mut live, &mut Routing::Free);
    let router = live.vars().iter().position(|(name, _)| name.ends_with("mlp.gate.weight")).unwrap();
    assert!(gradients[router].iter().any(|&g| g != 0.0));
    let [RanExperts { ids, gates }] = &ran[..] else { panic!("one MoE layer") };
    let others: Vec<f32> = gates.iter().map(|gate| 1.0 - gate).collect();
    let mut expected = None;
    for recompute in [false, true] {
        let mut policy = in_precision(&config, Dtype::F32, recompute);
        let (again, ran_again, replayed) =
            logprob_pass(&mut policy, &mut Routing::ReplayGates { ids, gates });
        assert_eq!((again, &ran_again), (logprobs.clone(), &ran), "the gates it would have had itself");
        assert!(replayed[router].iter().all(|&g| g == 0.0));
        assert!(replayed.last() == gradients.last(), "beyond the last router nothing is different");
        let (changed, ran, gradients) =
            logprob_pass(&mut policy, &mut Routing::ReplayGates { ids, gates: &others });
        assert!(changed != logprobs && *ran[0].gates == others);
        // If running again weighed anew, the gradient would be that of a mixture.
        assert!(*expected.get_or_insert_with(|| gradients.clone()) == gradients, "recompute: {recompute}");
    }
}

#[test]
fn a_pass_after_another_finds_nothing_of_it() {
    let config = mixed_config();
    for recompute in [false, true] {
        let mut policy = in_precision(&config, Dtype::Bf16, recompute);
        let first = pass(&mut policy, &mut Routing::Free);
        let long = tokens([3; 9]);
        policy
            .logits(&Packed { tokens: &long, targets: &long, lengths: &[9], shared: &[] }, &mut Routing::Free)
            .unwrap();
        assert!(pass(&mut policy, &mut Routing::Free) == first);
    }
}

#[test]
fn products_see_weights_that_have_changed() {
    let config = mixed_config();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let mut changed = in_precision(&config, dtype, false);
        let before = pass(&mut changed, &mut Routing::Free);
        changed.change(|vars| {
            for (_, var) in vars {
                var.set(&(var.as_tensor() * 1.25).unwrap()).unwrap();
            }
        });
        let mut fresh = Policy::load(&changed.shared_weights(), &config)
            .unwrap()
            .with_precision(Precision { dtype, recompute: false });
        let after = pass(&mut changed, &mut Routing::Free);
        assert!(after == pass(&mut fresh, &mut Routing::Free) && after != before, "{dtype}");
    }
}

#[test]
fn gradients_in_bf16_are_near_those_in_f32() {
    let config = mixed_config();
    let mut record = RouteRecord::new(1, config.router());
    record.start(6);
    let (_, exact) = pass(&mut in_precision(&config, Dtype::F32, false), &mut Routing::Record(&mut record));
    let ids = record.layer(0);
    let mut routing = Routing::Replay { ids: &ids, native: None };
    let mut policy = in_precision(&config, Dtype::Bf16, false);
    let (_, rounded) = pass(&mut policy, &mut routing);
    for (((name, _), exact), rounded) in policy.vars().iter().zip(exact).zip(rounded) {
        let norm =
            |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let size = norm(&mut exact.iter().copied());
        let distance = norm(&mut exact.iter().zip(&rounded).map(|(a, b)| a - b));
        assert!(distance <= 0.03 * size, "{name}: {distance} of {size}");
        assert!(distance > 0.0, "{name}: nothing was rounded");
    }
}

#[test]
fn a_gradient_is_of_the_newest_forward_and_of_its_weights() {
    let config = mixed_config();
    let tokens = tokens(TOKENS);
    let batch = Packed { tokens: &tokens[..6], targets: &tokens[1..], lengths: &LENGTHS, shared: &[] };
    for spoil in [
        |policy: &mut Policy, batch: &Packed<'_>| drop(policy.logits(batch, &mut Routing::Free).unwrap()),
        |policy: &mut Policy, _: &Packed<'_>| policy.change(|_| ()),
    ] {
        let mut policy = policy(&config);
        let output = policy.logprobs(&batch, &mut Routing::Free, 1.0).unwrap();
        let store = output.logprobs.sum_all().unwrap().backward().unwrap();
        spoil(&mut policy, &batch);
        let mut gradients = policy.zero_gradients();
        let late = std::panic::AssertUnwindSafe(|| policy.backward(&output, &store, &mut gradients));
        assert!(std::panic::catch_unwind(late).is_err());
    }
}

/// Gradients of a weighted sum of logprobs, of sequences of `lengths` in passes of `passes` sequences each.
fn gradients_in_passes(policy: &mut Policy, lengths: &[usize], passes: &[usize]) -> Vec<Vec<f32>> {
    let vocab = policy.config().vocab_size as u32;
    let token = |t: usize| TokenId((t as u32).wrapping_mul(2_654_435_761) / 7 % vocab);
    let mut gradients = policy.zero_gradients();
    let (mut sequences, mut end) = (lengths, 0);
    for &pass in passes {
        let (lengths, rest) = sequences.split_at(pass);
        let t = end..end + lengths.iter().sum::<usize>();
        (sequences, end) = (rest, t.end);
        let tokens: Vec<TokenId> = t.clone().map(token).collect();
        let targets: Vec<TokenId> = t.clone().map(|t| token(t + 1)).collect();
        let batch = Packed { tokens: &tokens, targets: &targets, lengths, shared: &[] };
        let output = policy.logprobs(&batch, &mut Routing::Free, 0.7).unwrap();
        let pulls: Vec<f32> = t.map(|t| (t as f32 * 1.7).sin()).collect();
        let loss = (&output.logprobs * Tensor::new(pulls, &Device::Cpu).unwrap()).unwrap().sum_all().unwrap();
        policy.backward(&output, &loss.backward().unwrap(), &mut gradients).unwrap();
    }
    assert!(sequences.is_empty());
    gradients.into_tensors()
}

#[test]
fn sequences_in_any_number_of_passes_have_the_same_gradients_to_the_bit() {
    let lengths = [5, 40, 1, 7, 33, 12];
    for (tied, dtype) in [false, true].into_iter().flat_map(|tied| [(tied, Dtype::F32), (tied, Dtype::Bf16)])
    {
        // Wide enough for threads to share the work.
        let config = config_with(serde_json::json!({
            "tie_word_embeddings": tied, "mlp_only_layers": [0], "attention_bias": true, "hidden_size": 72,
            "vocab_size": 1200, "intermediate_size": 90, "moe_intermediate_size": 40,
        }));
        let run = |passes: &[usize], threads, recompute| {
            let mut policy = in_precision(&config, dtype, recompute);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| gradients_in_passes(&mut policy, &lengths, passes))
        };
        let whole = run(&[6], 1, false);
        for (passes, threads, recompute) in
            [(&[1; 6][..], 2, false), (&[2, 3, 1], 1, true), (&[3, 3], 2, true), (&[1, 5], 1, false)]
        {
            assert!(run(passes, threads, recompute) == whole, "{passes:?} of {dtype}, tied: {tied}");
        }
    }
}

#[test]
fn a_policy_lends_what_it_reads() {
    let config = config_with(serde_json::json!({ "mlp_only_layers": [0], "attention_bias": true }));
    let mut policy = in_precision(&config, Dtype::Bf16, false);
    let shared = policy.shared_weights();
    let mut values = Vec::new();
    for (name, _) in canonical_tensors(&config) {
        for source in [&policy as &dyn TensorSource, &shared] {
            source.read(&name, &mut values).unwrap();
            assert_eq!(**source.lend(&name).unwrap(), values[..], "{name}");
        }
    }
    assert!(policy.lend("model.norm.bias").is_none() && shared.lend("").is_none());
}

#[test]
fn what_an_engine_of_the_same_dtype_packed_serves_the_policy_until_weights_change() {
    let config = mixed_config();
    for (dtype, other) in [(Dtype::F32, Dtype::Bf16), (Dtype::Bf16, Dtype::F32)] {
        let mut policy = in_precision(&config, dtype, false);
        let load = |policy: &mut Policy, dtype| {
            let mut exec = Buffers::new(&config, dtype, Numerics::Exact);
            Weights::load(&mut exec, &config, &policy.shared_weights()).unwrap()
        };
        let n_copies = |policy: &Policy| {
            let params = &policy.tape.params;
            let is_packed = |id: usize| params.packed_matrix(ParamId(id)).is_some();
            (0..params.weights().len()).filter(|&id| is_packed(id)).count()
                + params.expert_layers().filter(|&id| params.packed_experts(id).is_some()).count()
        };
        let alone = pass(&mut policy, &mut Routing::Free);
        assert_eq!(n_copies(&policy), 0);

        let n_matrices = policy.weights().iter().filter(|(_, var)| var.rank() == 2).count();
        let weights = load(&mut policy, dtype);
        assert_eq!(n_copies(&policy), n_matrices + 1, "{dtype}: one MoE layer");
        assert_eq!(pass(&mut policy, &mut Routing::Free), alone);

        let resident = || hash_tensors(&config, &weights, dtype).unwrap();
        let before = resident();
        policy.change(|vars| {
            for (_, var) in vars {
                var.set(&(var.as_tensor() * 1.25).unwrap()).unwrap();
            }
        });
        assert_eq!(n_copies(&policy), 0, "{dtype}: they are of other weights");
        assert!(resident() == before, "what an engine computes with never changes");
        let newer = load(&mut policy, dtype);
        assert_eq!(n_copies(&policy), n_matrices + 1);
        drop(newer);
        assert_eq!(n_copies(&policy), 0, "nobody holds them");
        let weights = load(&mut policy, other);
        let n_routers = usize::from(dtype == Dtype::F32 || other == Dtype::F32);
        assert_eq!(n_copies(&policy), n_routers, "routers are f32 in both");
        drop(weights);
    }
}
