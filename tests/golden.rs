//! Both sides of r3 against PyTorch: `tests/golden/make.py` made the references (torch 2.15.0, transformers 5.24.0,
//! float32). Tolerances: logits 2e-5, gradient norms 1e-4 relative, choices and greedy tokens identical.

#[path = "golden/reference.rs"]
mod reference;

use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_core::routes::RouteView;
use r3_engine::config::EngineConfig;
use r3_engine::engine::{Engine, GroupRequest};
use r3_engine::sampler::Sampling;
use r3_engine::score::ToScore;
use r3_kernels::adamw::{AdamwStep, adamw};
use r3_kernels::gemm::Dtype;
use r3_kernels::numerics::Numerics;
use r3_kernels::route_record::RouteRecord;
use r3_kernels::router::Routing;
use r3_model::autograd::{Packed, Policy};
use r3_model::checkpoint::{Checkpoint, pieces};
use r3_model::source::{TensorSource, canonical_tensors};

use crate::reference::{BATCH, LOGIT_TOLERANCE, Reference, TOKENS, dir, max_diff, route_rows};

/// Every model there is a reference of.
const MODELS: [&str; 3] = ["nano", "mixed", "grouped"];

fn policy(model: &str) -> Policy {
    let checkpoint = Checkpoint::open(&dir(model)).unwrap();
    Policy::load(&checkpoint, checkpoint.config()).unwrap()
}

fn engine(model: &str, block_tokens: usize, max_batch_tokens: usize) -> Engine {
    let checkpoint = Checkpoint::open(&dir(model)).unwrap();
    let config = EngineConfig {
        dtype: Dtype::F32,
        numerics: Numerics::Exact,
        kv_bytes: 8 << 20,
        block_tokens,
        max_batch_tokens,
        max_running: 8,
        prefix_cache: true,
        capture_routes: true,
        replay: None,
    };
    Engine::new(config, checkpoint.config(), &checkpoint, PolicyVersion(0)).unwrap()
}

/// The reference's batch as the trainer packs it: every token an input, the target of the last one unused.
struct PackedReference {
    tokens: Vec<TokenId>,
    targets: Vec<TokenId>,
    lengths: Vec<usize>,
}

impl PackedReference {
    fn new(reference: &Reference) -> Self {
        let tokens = reference.tokens("input_ids");
        let targets = tokens[1..].iter().copied().chain([TokenId(0)]).collect();
        Self { tokens, targets, lengths: vec![TOKENS; BATCH] }
    }

    fn packed(&self) -> Packed<'_> {
        Packed { tokens: &self.tokens, targets: &self.targets, lengths: &self.lengths, shared: &[] }
    }
}

/// Logprobs of tokens 1 on, `[B, T - 1]`, out of one per input.
fn without_last(logprobs: &[f32]) -> Vec<f32> {
    logprobs.chunks(TOKENS).flat_map(|sequence| &sequence[..TOKENS - 1]).copied().collect()
}

#[test]
fn trainer_logits_choices_and_logprobs_match() {
    for model in MODELS {
        let reference = Reference::load(model);
        let mut policy = policy(model);
        let batch = PackedReference::new(&reference);
        let dims = policy.config().route_dims();
        let mut record = RouteRecord::new(dims.n_layers, policy.config().router());
        record.start(BATCH * TOKENS);
        let logits = policy.logits(&batch.packed(), &mut Routing::Record(&mut record)).unwrap();
        let diff = max_diff(&logits.flatten_all().unwrap().to_vec1().unwrap(), reference.get("logits"));
        assert!(diff <= LOGIT_TOLERANCE, "{model}: logits differ by {diff:e}");
        let chosen: Vec<u16> = (0..dims.n_layers).flat_map(|layer| record.layer(layer)).collect();
        assert_eq!(chosen, reference.ids("topk_ids"), "{model}");
        let output = policy.logprobs(&batch.packed(), &mut Routing::Free, 1.0).unwrap();
        let logprobs = without_last(&output.logprobs.to_vec1().unwrap());
        let diff = max_diff(&logprobs, reference.get("logprobs"));
        assert!(diff <= LOGIT_TOLERANCE, "{model}: logprobs differ by {diff:e}");
    }
}

#[test]
fn replayed_logits_match_and_the_native_choice_is_reported() {
    for model in MODELS {
        let reference = Reference::load(model);
        let mut policy = policy(model);
        let batch = PackedReference::new(&reference);
        let dims = policy.config().route_dims();
        let ids = reference.ids("replay_topk_ids");
        let mut native = RouteRecord::new(dims.n_layers, policy.config().router());
        native.start(BATCH * TOKENS);
        let mut routing = Routing::Replay { ids: &ids, native: Some(&mut native) };
        let logits = policy.logits(&batch.packed(), &mut routing).unwrap();
        let diff =
            max_diff(&logits.flatten_all().unwrap().to_vec1().unwrap(), reference.get("replay_logits"));
        assert!(diff <= LOGIT_TOLERANCE, "{model}: replayed logits differ by {diff:e}");
        // Up to the first router nothing has been replayed yet, so its own choice is the free one.
        assert_eq!(native.layer(0), &reference.ids("topk_ids")[..BATCH * TOKENS * dims.top_k], "{model}");
    }
}

#[test]
fn gradients_match_free_and_replayed() {
    for model in MODELS {
        let reference = Reference::load(model);
        let ids = reference.ids("replay_topk_ids");
        for prefix in ["", "replay_"] {
            let mut policy = policy(model);
            let gradients = gradients(&mut policy, &reference, (prefix == "replay_").then_some(&ids));
            let mut n_compared = 0;
            for (name, gradient) in &gradients {
                let expected = reference.get(&format!("{prefix}grad_norm.{name}"))[0];
                let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt() as f32;
                let relative = (norm - expected).abs() / expected.max(1e-6);
                assert!(
                    relative <= 1e-4,
                    "{model} {prefix}: gradient norm of {name} is {norm}, not {expected}"
                );
                if let Some(expected) = reference.0.get(&format!("{prefix}grad.{name}")) {
                    let scale = expected.iter().fold(0.0f32, |max, g| max.max(g.abs()));
                    let diff = max_diff(gradient, expected);
                    assert!(diff <= 1e-4 * scale, "{model} {prefix}: gradient of {name} differs by {diff:e}");
                    n_compared += 1;
                }
            }
            assert_eq!(n_compared, 10, "{model} {prefix}");
        }
    }
}

#[test]
fn one_adamw_step_matches() {
    let step = AdamwStep {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.01,
        step: 1,
        grad_scale: 1.0,
    };
    for model in MODELS {
        let reference = Reference::load(model);
        let mut policy = policy(model);
        let config = policy.config().clone();
        let fused = fused_gradients(&mut policy, &reference, None);
        policy.change(|vars| {
            for ((name, var), gradient) in vars.iter().zip(&fused) {
                let mut values = var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                let (mut m, mut v) = (vec![0.0; values.len()], vec![0.0; values.len()]);
                adamw(&mut values, gradient, &mut m, &mut v, &step);
                for (piece, range) in split(name, var.dims(), &config) {
                    if let Some(expected) = reference.0.get(&format!("adamw1.{piece}")) {
                        let diff = max_diff(&values[range], expected);
                        // The first step moves by lr times the gradient's sign, which rounding decides near zero.
                        assert!(diff <= 2e-5, "{model}: {piece} differs by {diff:e} after a step");
                    }
                }
                let values =
                    candle_core::Tensor::from_vec(values, var.dims(), &candle_core::Device::Cpu).unwrap();
                var.set(&values).unwrap();
            }
        });
        let batch = PackedReference::new(&reference);
        let output = policy.logprobs(&batch.packed(), &mut Routing::Free, 1.0).unwrap();
        let logprobs = without_last(&output.logprobs.to_vec1().unwrap());
        let loss = -logprobs.iter().map(|logprob| f64::from(*logprob)).sum::<f64>() / logprobs.len() as f64;
        let expected = f64::from(reference.get("adamw1_loss")[0]);
        assert!((loss - expected).abs() <= 1e-5, "{model}: loss after a step is {loss}, not {expected}");
    }
}

#[test]
fn engine_scores_match_free_and_replayed_in_any_chunks() {
    for model in MODELS {
        let reference = Reference::load(model);
        for (block_tokens, max_batch_tokens) in [(16, 256), (4, 5)] {
            let mut engine = engine(model, block_tokens, max_batch_tokens);
            let dims = engine.model().route_dims();
            for (index, tokens) in reference.sequences().iter().enumerate() {
                for prefix in ["", "replay_"] {
                    let rows = route_rows(&reference, prefix, index, dims);
                    let replayed = (prefix == "replay_").then(|| rows.view());
                    let scored = engine.score(&ToScore { routes: replayed, ..ToScore::new(tokens) }).unwrap();
                    let expected =
                        &reference.get(&format!("{prefix}logprobs"))[index * (TOKENS - 1)..][..TOKENS - 1];
                    let diff = max_diff(&scored.logprobs, expected);
                    assert!(diff <= LOGIT_TOLERANCE, "{model} {prefix}: logprobs differ by {diff:e}");
                    if prefix.is_empty() {
                        assert_eq!(scored.live_routes, rows, "{model}");
                    } else {
                        assert_ne!(scored.live_routes, rows, "{model}: random routes are not the router's");
                    }
                }
            }
        }
    }
}

#[test]
fn greedy_continuations_match_in_any_chunks_and_through_prefix_hits() {
    for model in MODELS {
        let reference = Reference::load(model);
        let expected: Vec<Vec<TokenId>> =
            reference.tokens("greedy_from16").chunks(TOKENS).map(<[TokenId]>::to_vec).collect();
        for (block_tokens, max_batch_tokens) in [(16, 256), (4, 5)] {
            let mut engine = engine(model, block_tokens, max_batch_tokens);
            assert_eq!(continuations(&mut engine, &reference), expected, "{model}, blocks of {block_tokens}");
            let hits_before = engine.stats().hit_tokens;
            assert_eq!(continuations(&mut engine, &reference), expected, "{model}, from the prefix cache");
            let hit_tokens = engine.stats().hit_tokens - hits_before;
            // All full blocks of the prompt but the one that holds its last token, for each of the sequences.
            let per_prompt = (15 / block_tokens) * block_tokens;
            assert_eq!(hit_tokens, (per_prompt * BATCH) as u64, "{model}, blocks of {block_tokens}");
        }
    }
}

fn continuations(engine: &mut Engine, reference: &Reference) -> Vec<Vec<TokenId>> {
    for (tokens, group) in reference.sequences().iter().zip(0..) {
        engine
            .submit(&GroupRequest {
                group: GroupId(group),
                prompt: tokens[..16].into(),
                size: 1,
                max_new_tokens: TOKENS - 16,
                stop_tokens: [].into(),
                sampling: Sampling::GREEDY,
                seed: 0,
                return_routes: Some(0),
            })
            .unwrap();
    }
    let mut done = vec![Vec::new(); BATCH];
    while engine.has_work() {
        engine.tick().unwrap();
        while let Some(finished) = engine.take_finished() {
            assert_eq!(finished.view().routes.map(RouteView::rows), Some(TOKENS - 1));
            done[finished.group.index()] = finished.tokens;
        }
    }
    done
}

/// Gradients of the mean negative logprob, by canonical tensor.
fn fused_gradients(policy: &mut Policy, reference: &Reference, replay: Option<&Vec<u16>>) -> Vec<Vec<f32>> {
    let batch = PackedReference::new(reference);
    let mut routing = match replay {
        Some(ids) => Routing::Replay { ids, native: None },
        None => Routing::Free,
    };
    let output = policy.logprobs(&batch.packed(), &mut routing, 1.0).unwrap();
    let mask: Vec<f32> =
        (0..BATCH * TOKENS).map(|at| f32::from(u8::from(at % TOKENS != TOKENS - 1))).collect();
    let mask = candle_core::Tensor::new(mask, &candle_core::Device::Cpu).unwrap();
    let n_targets = (BATCH * (TOKENS - 1)) as f64;
    let loss = ((&output.logprobs * mask).unwrap().sum_all().unwrap() / -n_targets).unwrap();
    let expected = reference.get(if replay.is_some() { "replay_loss" } else { "loss" })[0];
    assert!((loss.to_scalar::<f32>().unwrap() - expected).abs() < 1e-5);
    let mut gradients = policy.zero_gradients();
    policy.backward(&output, &loss.backward().unwrap(), &mut gradients).unwrap();
    gradients.into_tensors()
}

/// The same by checkpoint name, per expert.
fn gradients(
    policy: &mut Policy,
    reference: &Reference,
    replay: Option<&Vec<u16>>,
) -> Vec<(String, Vec<f32>)> {
    let fused = fused_gradients(policy, reference, replay);
    let mut out = Vec::new();
    for ((name, var), gradient) in policy.vars().iter().zip(fused) {
        for (piece, range) in split(name, var.dims(), policy.config()) {
            out.push((piece, gradient[range].to_vec()));
        }
    }
    out
}

/// Checkpoint names of a canonical tensor, each with its share of the values.
fn split(
    name: &str,
    shape: &[usize],
    config: &r3_model::config::ModelConfig,
) -> Vec<(String, std::ops::Range<usize>)> {
    let mut first = 0;
    let place = |(piece, shape): (String, Vec<usize>)| {
        let range = first..first + shape.iter().product::<usize>();
        first = range.end;
        (piece, range)
    };
    pieces(name, shape, config).into_iter().map(place).collect()
}

#[test]
fn resident_weights_are_the_checkpoints_bit_for_bit() {
    for model in MODELS {
        let checkpoint = Checkpoint::open(&dir(model)).unwrap();
        let engine = engine(model, 16, 256);
        let expected = r3_model::source::hash_tensors(checkpoint.config(), &checkpoint, Dtype::F32).unwrap();
        assert_eq!(engine.hashes(), expected);
        let policy = policy(model);
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for (name, _) in canonical_tensors(checkpoint.config()) {
            policy.read(&name, &mut ours).unwrap();
            checkpoint.read(&name, &mut theirs).unwrap();
            assert_eq!(ours, theirs, "{model}: {name}");
        }
    }
}
