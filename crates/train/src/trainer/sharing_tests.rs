//! A step that shares prompts against the same step that does not.

use proptest::prelude::{ProptestConfig, Strategy, any, prop, prop_assert, prop_assert_eq, proptest};
use r3_core::ids::TokenId;
use r3_core::routes::RouteRows;
use r3_kernels::gemm::Dtype;
use r3_model::autograd::Precision;
use r3_recipe::learning::Train;

use super::{StepStats, Trainer};
use crate::batch::{Batch, Limits, RoutesUse};
use crate::batch_stats::BatchStats;
use crate::fixtures::{OwnedRollout, dapo, scored_by, tiny_policy, with_groups};
use crate::objective::Objective;
use crate::optimiser::OptimiserConfig;

const ROUTES: [RoutesUse; 3] = [RoutesUse::Replay, RoutesUse::Diagnose, RoutesUse::None];
const PRECISIONS: [Precision; 3] = [
    Precision { dtype: Dtype::F32, recompute: false },
    Precision { dtype: Dtype::F32, recompute: true },
    Precision { dtype: Dtype::Bf16, recompute: false },
];

/// How one rollout of a group differs from the others.
#[derive(Clone, Debug)]
struct Member {
    n_sampled: usize,
    /// Whether a turn was given between two that were sampled.
    turns: bool,
    /// A prompt token that is another, and an input that takes other experts, where there are any.
    other: Option<(bool, usize)>,
}

fn member() -> impl Strategy<Value = Member> {
    (1_usize..7, any::<bool>(), prop::option::weighted(0.25, (any::<bool>(), 0_usize..9)))
        .prop_map(|(n_sampled, turns, other)| Member { n_sampled, turns, other })
}

/// Ragged groups, among them some whose prompt is one token and some of one rollout.
fn groups() -> impl Strategy<Value = Vec<(usize, Vec<Member>)>> {
    prop::collection::vec((1_usize..20, prop::collection::vec(member(), 1..5)), 1..4)
}

fn rollouts(precision: Precision, groups: &[(usize, Vec<Member>)]) -> Vec<OwnedRollout> {
    let mut policy = tiny_policy(1).with_precision(precision);
    let mut rollouts = Vec::new();
    for (group, (n_prompt, members)) in (0..).zip(groups) {
        for (index, member) in (0..).zip(members) {
            let lengths = (*n_prompt, member.n_sampled);
            let mut rollout = OwnedRollout::new(group, index, lengths, (index % 2) as f32);
            for (at, token) in (0..).zip(&mut rollout.tokens) {
                let sampled = if (at as usize) < *n_prompt { 0 } else { index + 1 };
                *token = TokenId((at * 7 + group as u32 * 5 + sampled * (at + 3)) % 13);
            }
            if let Some((true, at)) = member.other {
                rollout.tokens[at % n_prompt].0 = 12 - rollout.tokens[at % n_prompt].0;
            }
            if member.turns && member.n_sampled > 2 {
                rollout.mask = Some((0..member.n_sampled).map(|n| u8::from(n % 3 != 1)).collect());
            }
            rollout = scored_by(&mut policy, rollout);
            if let Some((false, at)) = member.other {
                rollout = rerouted(rollout, at);
            }
            rollouts.push(rollout);
        }
    }
    rollouts
}

/// Another first expert for input `row`, at the first layer.
fn rerouted(rollout: OwnedRollout, row: usize) -> OwnedRollout {
    let view = rollout.routes.as_ref().unwrap().view();
    let (mut bytes, at) = (view.bytes().to_vec(), row % view.rows() * view.dims().row_bytes());
    bytes[at] = (0..4).find(|id| !bytes[at..at + 2].contains(id)).unwrap();
    let mut rows = RouteRows::with_capacity(view.dims(), 0);
    rows.append(&bytes);
    OwnedRollout { routes: Some(rows), ..rollout }
}

/// What a step leaves behind.
struct Outcome {
    stats: StepStats,
    /// Logprob of every input that has a row in both.
    logprobs: Vec<u32>,
    /// Of each tensor.
    gradients: Vec<Vec<f32>>,
}

/// A step at a learning rate of 0, in which only rows count whose logprob is wanted of both ways to pack.
fn step(precision: Precision, rollouts: &[OwnedRollout], limits: Limits) -> Outcome {
    let train = Train { lr: 0.0, ..Train::default() };
    let policy = tiny_policy(1).with_precision(precision);
    let mut trainer = Trainer::new(policy, dapo(), OptimiserConfig::of_train(&train, 100), 1.0);
    let objective: Objective = trainer.objective().clone();
    with_groups(rollouts, |groups| {
        let shared = Batch::pack(groups, &objective, Limits { share_prompts: true, ..limits }).unwrap();
        let batch = Batch::pack(groups, &objective, limits).unwrap();
        let stats = trainer.step(&batch, &mut |_| {}).unwrap();
        let mut logprobs = Vec::new();
        for (at, (own, shared)) in batch.sequences().iter().zip(shared.sequences()).enumerate() {
            let rows = trainer.old.of(&(at..at + 1));
            logprobs.extend(rows[shared.n_shared - own.n_shared..].iter().map(|logprob| logprob.to_bits()));
        }
        let moments = trainer.learner.optimiser.moments();
        let gradients = moments.iter().map(|one| one.mean().to_vec()).collect();
        Outcome { stats, logprobs, gradients }
    })
}

fn norm(values: impl Iterator<Item = f32>) -> f64 {
    values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn sharing_keeps_every_logprob_and_every_count_and_the_gradient(
        groups in groups(),
        (routes, precision) in (prop::sample::select(&ROUTES[..]), prop::sample::select(&PRECISIONS[..])),
        mini_steps in 1_usize..3,
        micro_batch_tokens in prop::sample::select(vec![1_usize, 9, 16, 30, 1000]),
    ) {
        let rollouts = rollouts(precision, &groups);
        let limits = Limits { mini_steps, micro_batch_tokens, share_prompts: false, routes };
        let alone = step(precision, &rollouts, limits);
        let shared = step(precision, &rollouts, Limits { share_prompts: true, ..limits });
        prop_assert_eq!(&shared.logprobs, &alone.logprobs);
        prop_assert_eq!(&shared.stats.mismatch, &alone.stats.mismatch);
        prop_assert_eq!(&shared.stats.load, &alone.stats.load);
        let batch = BatchStats { n_shared: 0, ..shared.stats.batch };
        prop_assert_eq!(batch, alone.stats.batch);
        // f32: a sum over the rows of the largest group, 4 x 25, in another order, with half an epsilon an addition. bf16:
        // products of the backward round what is added up before them.
        let tolerance = if precision.dtype == Dtype::F32 { 100.0 * 0.5 * f64::from(f32::EPSILON) } else { 3e-2 };
        let differences = shared.gradients.iter().flatten().zip(alone.gradients.iter().flatten());
        let distance = norm(differences.map(|(a, b)| a - b));
        // Where advantages of like rollouts cancel, rounding is all that is left. Whatever cancels not has a norm of 0.1 or
        // more.
        let size = norm(alone.gradients.iter().flatten().copied()).max(0.1);
        prop_assert!(distance <= tolerance * size, "{} of {}", distance, size);
    }
}

#[test]
fn sharing_saves_the_prompt_of_all_but_one() {
    let member = Member { n_sampled: 4, turns: false, other: None };
    let rollouts = rollouts(PRECISIONS[0], &[(18, vec![member; 4])]);
    let limits =
        Limits { mini_steps: 1, micro_batch_tokens: 1000, share_prompts: true, routes: RoutesUse::Replay };
    let batch = step(PRECISIONS[0], &rollouts, limits).stats.batch;
    assert_eq!((batch.n_inputs, batch.n_shared), (4 * (17 + 4), 3 * 17));
}
