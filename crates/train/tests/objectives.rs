//! Every objective against an independent reference in f64: `tests/golden/objectives.py` wrote it from the papers, and made
//! the values (numpy 2.3, float64). Tolerance: 1e-9 relative, for losses and for every token's gradient.
//!
//! `tests/golden/objectives_trl.py` keeps what TRL 1.16 itself makes of such batches, where it has the same objective.
//!
//! A case is a recipe, and goes the whole way: recipe, packing, advantages, micro-batch, loss; only the policy's logprobs are
//! the reference's, in f64.

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{DType, Device, Tensor, Var};
use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_core::rollout::{FinishReason, Reward, RolloutView};
use r3_recipe::algorithm::Algorithm;
use r3_recipe::objective::{KlPlace, ObjectiveTerms, OldLogprobs};
use r3_train::batch::{Batch, Group, Limits, RoutesUse, Sample};
use r3_train::loss::loss;
use r3_train::loss::surrogate::Surrogate;
use r3_train::micro_batch::{LossInputs, MicroBatch};
use r3_train::objective::{KlTerm, Objective};
use r3_train::reward_kl;
use safetensors::SafeTensors;
use serde::Deserialize;

const TOLERANCE: f64 = 1e-9;

const PAPERS: &str = "objectives.safetensors";

/// A recipe's sections under the name of what they show.
#[derive(Deserialize)]
struct Case {
    name: String,
    algorithm: Algorithm,
    objective: ObjectiveTerms,
}

/// All tensors of the reference as f64: f32 and counts fit in it exactly.
struct Reference {
    tensors: HashMap<String, Vec<f64>>,
    recipes: Recipes,
}

#[derive(Deserialize)]
struct Recipes {
    max_new_tokens: usize,
    cases: Vec<Case>,
}

impl Reference {
    fn load(file: &str) -> Self {
        let path: PathBuf = [env!("CARGO_MANIFEST_DIR"), "../../tests/golden", file].iter().collect();
        let bytes = std::fs::read(path).unwrap();
        let metadata = SafeTensors::read_metadata(&bytes).unwrap().1.metadata().clone().unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors().into_iter().map(|(name, view)| {
            let width = view.data().len() / view.shape().iter().product::<usize>();
            let value = |bytes: &[u8]| match view.dtype() {
                safetensors::Dtype::F64 => f64::from_le_bytes(bytes.try_into().unwrap()),
                safetensors::Dtype::F32 => f32::from_le_bytes(bytes.try_into().unwrap()).into(),
                safetensors::Dtype::I32 => i32::from_le_bytes(bytes.try_into().unwrap()).into(),
                safetensors::Dtype::U8 => bytes[0].into(),
                other => panic!("{other:?}"),
            };
            (name, view.data().chunks_exact(width).map(value).collect())
        });
        Self { tensors: tensors.collect(), recipes: serde_json::from_str(&metadata["recipes"]).unwrap() }
    }

    fn get(&self, name: &str) -> &[f64] {
        &self.tensors[name]
    }

    fn rollouts(&self, batch: usize) -> Vec<Rollout> {
        let column = |name: &str| self.get(&format!("{batch}.{name}"));
        let mut start = 0;
        let rollout = |(i, n_sampled): (usize, &f64)| {
            let sampled = start..start + *n_sampled as usize;
            start = sampled.end;
            let of = |name: &str| column(name)[sampled.clone()].to_vec();
            let prompt_tokens = column("prompt_tokens")[i] as usize;
            Rollout {
                group: column("group")[i] as u64,
                index: column("index")[i] as u32,
                tokens: vec![TokenId(0); prompt_tokens + sampled.len()],
                prompt_tokens,
                reward: column("reward")[i] as f32,
                cut_off: column("cut_off")[i] == 1.0,
                mask: of("mask").into_iter().map(|kept| kept as u8).collect(),
                rollout: single(&of("rollout")),
                old: single(&of("old")),
                reference: single(&of("reference")),
                policy: of("policy"),
                entropy: of("entropy"),
                versions: vec![PolicyVersion(0); sampled.len()],
                sampled: sampled.clone(),
            }
        };
        column("n_sampled").iter().enumerate().map(rollout).collect()
    }
}

fn single(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&value| value as f32).collect()
}

/// What a [`RolloutView`] borrows, and what the trainer would think of it.
struct Rollout {
    group: u64,
    index: u32,
    tokens: Vec<TokenId>,
    prompt_tokens: usize,
    reward: f32,
    cut_off: bool,
    mask: Vec<u8>,
    rollout: Vec<f32>,
    old: Vec<f32>,
    reference: Vec<f32>,
    policy: Vec<f64>,
    entropy: Vec<f64>,
    versions: Vec<PolicyVersion>,
    /// Where its tokens are among those of its batch.
    sampled: std::ops::Range<usize>,
}

impl Rollout {
    fn sample(&self) -> Sample<'_> {
        Sample {
            rollout: RolloutView {
                group: GroupId(self.group),
                index: self.index,
                tokens: &self.tokens,
                prompt_tokens: self.prompt_tokens,
                rollout_logprobs: &self.rollout,
                versions: &self.versions,
                routes: None,
                finish: if self.cut_off { FinishReason::Length } else { FinishReason::Stop },
                cached_tokens: 0,
                support: None,
            },
            reward: if self.reward.is_nan() { Reward::Failed } else { Reward::Score(self.reward) },
            mask: Some(&self.mask),
        }
    }

    /// `values` of the sampled tokens, after `fill` for those of the prompt that are predicted.
    fn inputs<T: Copy>(&self, values: &[T], fill: T) -> Vec<T> {
        [vec![fill; self.prompt_tokens - 1], values.to_vec()].concat()
    }
}

fn groups(rollouts: &[Rollout]) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for rollout in rollouts {
        match groups.iter_mut().find(|group| group.id.0 == rollout.group) {
            Some(group) => group.samples.push(rollout.sample()),
            None => groups.push(Group { id: GroupId(rollout.group), samples: vec![rollout.sample()] }),
        }
    }
    groups
}

/// Loss, and its gradient by the logprob of every sampled token of the batch.
#[derive(Debug, PartialEq)]
struct Differentiated {
    loss: f64,
    gradient: Vec<f64>,
}

/// One optimiser step on `rollouts` in micro-batches of `budget` inputs; `nudge` moves the policy's logprobs.
fn differentiate(
    objective: &Objective,
    rollouts: &[Rollout],
    budget: usize,
    nudge: &dyn Fn(usize) -> f64,
) -> Differentiated {
    let limits =
        Limits { mini_steps: 1, micro_batch_tokens: budget, share_prompts: false, routes: RoutesUse::None };
    let groups = groups(rollouts);
    let batch = Batch::pack(&groups, objective, limits).unwrap();
    let n_sampled = rollouts.iter().map(|rollout| rollout.mask.len()).sum();
    let mut total = Differentiated { loss: 0.0, gradient: vec![0.0; n_sampled] };
    let [mini] = batch.mini_steps() else { panic!("{} mini-steps", batch.mini_steps().len()) };
    let denominator = objective.aggregation.denominator(&mini.counts);
    let of_sequence = |sequence: &r3_train::batch::Sequence<'_>| {
        let RolloutView { group, index, .. } = sequence.sample.rollout;
        rollouts.iter().find(|rollout| (rollout.group, rollout.index) == (group.0, index)).unwrap()
    };
    let mut advantages = with_kl(objective, &batch, of_sequence).into_iter();
    let mut micro = MicroBatch::default();
    for sequences in &mini.micro_batches {
        micro.gather(&batch, sequences.clone());
        micro.advantages.iter_mut().zip(advantages.by_ref()).for_each(|(one, other)| *one = other);
        let members: Vec<_> = batch.sequences()[sequences.clone()].iter().map(of_sequence).collect();
        let policy = members.iter().flat_map(|rollout| {
            let moved = rollout.policy.iter().zip(rollout.sampled.clone());
            rollout.inputs(&moved.map(|(value, at)| value + nudge(at)).collect::<Vec<_>>(), -7.0)
        });
        let policy = Tensor::new(policy.collect::<Vec<_>>(), &Device::Cpu).unwrap();
        let policy = Var::from_tensor(&policy).unwrap();
        let old: Vec<f32> = match objective.old_logprobs {
            OldLogprobs::Rollout => micro.rollout_logprobs.clone(),
            OldLogprobs::Trainer => {
                members.iter().flat_map(|rollout| rollout.inputs(&rollout.old, -5.0)).collect()
            }
        };
        let mut inputs = LossInputs::new(&micro, &old, DType::F64).unwrap();
        if let Some(weights) = micro.correction(objective, &policy.to_vec1().unwrap(), &old) {
            inputs.correct(&weights).unwrap();
        }
        let reference: Vec<f32> =
            members.iter().flat_map(|rollout| rollout.inputs(&rollout.reference, -3.0)).collect();
        inputs.refer_to(&reference).unwrap();
        let entropy: Vec<f64> =
            members.iter().flat_map(|rollout| rollout.inputs(&rollout.entropy, 1.0)).collect();
        let entropy = Tensor::new(entropy, &Device::Cpu).unwrap();
        let loss = loss(objective, &inputs.batch((&policy, &entropy), &micro), denominator).unwrap().total;
        total.loss += loss.to_scalar::<f64>().unwrap();
        let gradient = loss.backward().unwrap().get(&policy).unwrap().to_vec1::<f64>().unwrap();
        let mut gradient = gradient.into_iter();
        for rollout in members {
            assert!(gradient.by_ref().take(rollout.prompt_tokens - 1).all(|prompt| prompt == 0.0));
            let sampled = &mut total.gradient[rollout.sampled.clone()];
            sampled.iter_mut().zip(gradient.by_ref()).for_each(|(sum, value)| *sum = value);
        }
    }
    total
}

/// The advantages of all inputs with a KL taken out of the reward; nothing where the objective takes none.
fn with_kl<'a>(
    objective: &Objective,
    batch: &Batch<'_>,
    of_sequence: impl Fn(&r3_train::batch::Sequence<'_>) -> &'a Rollout,
) -> Vec<f64> {
    let Some(KlTerm { coef, estimator, place: KlPlace::Reward }) = objective.kl else { return Vec::new() };
    let reference = batch.sequences().iter().flat_map(|sequence| {
        let rollout = of_sequence(sequence);
        rollout.inputs(&rollout.reference, -3.0)
    });
    reward_kl::take_out(batch, objective, (estimator, coef), &reference.collect::<Vec<_>>()).advantages
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |largest, value| f64::max(largest, value.abs()))
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |largest, (a, b)| f64::max(largest, (a - b).abs()))
}

/// Runs `check` on every case and batch of a file: name, objective, rollouts, expected.
fn for_each_case(file: &str, check: impl Fn(&str, &Objective, &[Rollout], &Differentiated)) {
    let reference = Reference::load(file);
    for batch in (0..).take_while(|batch| reference.tensors.contains_key(&format!("{batch}.policy"))) {
        let rollouts = reference.rollouts(batch);
        for (at, case) in reference.recipes.cases.iter().enumerate() {
            let objective =
                Objective::new(&case.algorithm, &case.objective, reference.recipes.max_new_tokens);
            let expected = Differentiated {
                loss: reference.get(&format!("{at}.{batch}.loss"))[0],
                gradient: reference.get(&format!("{at}.{batch}.grad")).to_vec(),
            };
            check(&case.name, &objective, &rollouts, &expected);
        }
    }
}

/// Ours against the values of a file.
fn compare(name: &str, objective: &Objective, rollouts: &[Rollout], expected: &Differentiated) {
    let actual = differentiate(objective, rollouts, usize::MAX, &|_| 0.0);
    let scale = largest(&expected.gradient);
    assert!(scale > 0.0, "{name}: a gradient of 0 shows nothing");
    let (loss, gradient) = (expected.loss - actual.loss, distance(&expected.gradient, &actual.gradient));
    assert!(loss.abs() <= TOLERANCE * expected.loss.abs(), "{name}: the loss is {loss:e} off");
    assert!(gradient <= TOLERANCE * scale, "{name}: a gradient is {gradient:e} off");
}

#[test]
fn losses_and_gradients_are_those_of_the_papers() {
    assert!(Reference::load(PAPERS).recipes.cases.len() > 90);
    for_each_case(PAPERS, compare);
}

#[test]
fn losses_and_gradients_are_those_of_trl() {
    for_each_case("objectives_trl.safetensors", compare);
}

#[test]
fn no_split_into_micro_batches_changes_a_gradient() {
    for_each_case(PAPERS, |name, objective, rollouts, _| {
        let whole = differentiate(objective, rollouts, usize::MAX, &|_| 0.0);
        for budget in [1, 17, 40] {
            let split = differentiate(objective, rollouts, budget, &|_| 0.0);
            assert_eq!(split.gradient, whole.gradient, "{name}, {budget} inputs at a time");
            assert!((split.loss - whole.loss).abs() <= 1e-12 * whole.loss.abs().max(1.0), "{name}");
        }
    });
}

#[test]
fn no_order_of_arrival_changes_a_bit() {
    for_each_case(PAPERS, |name, objective, rollouts, _| {
        let n_groups = groups(rollouts).len();
        let limits =
            Limits { mini_steps: 1, micro_batch_tokens: 40, share_prompts: false, routes: RoutesUse::None };
        let advantages = |turn: usize| {
            let mut groups = groups(rollouts);
            groups.rotate_left(turn % n_groups);
            groups.iter_mut().for_each(|group| group.samples.reverse());
            let batch = Batch::pack(&groups, objective, limits).unwrap();
            batch.sequences().iter().map(|one| (one.advantage, one.weight)).collect::<Vec<_>>()
        };
        assert_eq!(advantages(0), advantages(2), "{name}");
    });
}

#[test]
fn gradients_are_what_finite_differences_say() {
    for_each_case(PAPERS, |name, objective, rollouts, _| {
        let detached = matches!(objective.surrogate, Surrogate::Detached { .. });
        if detached || objective.correction.is_on() {
            return; // A difference does not know what was detached; the reference does.
        }
        let step = 1e-6;
        let gradient = differentiate(objective, rollouts, usize::MAX, &|_| 0.0).gradient;
        for at in (0..gradient.len()).step_by(5) {
            let moved = |by: f64| {
                let nudge = |token: usize| if token == at { by } else { 0.0 };
                differentiate(objective, rollouts, usize::MAX, &nudge).loss
            };
            let difference = (moved(step) - moved(-step)) / (2.0 * step);
            let error = (difference - gradient[at]).abs();
            assert!(error <= 1e-7 * largest(&gradient), "{name}: token {at} is {error:e} off");
        }
    });
}
