use candle_core::{Device, Var};

use super::*;
use crate::fixtures::{dapo, grpo};
use crate::loss::aggregation::Aggregation;
use crate::loss::surrogate::{Clip, Clipped, Surrogate};

/// Two rollouts: tokens 0 to 2 (the first is a prompt token) and tokens 3 to 6.
#[derive(Clone)]
struct Case {
    policy: Vec<f32>,
    old: Vec<f32>,
    advantages: Vec<f32>,
    mask: Vec<f32>,
    weights: Vec<f32>,
    lengths: Vec<usize>,
}

impl Case {
    fn new(objective: &Objective) -> Self {
        let weight = |n: usize| vec![objective.aggregation.weight(n, 6) as f32; n];
        Self {
            policy: vec![-9.0, -0.9, -1.2, -0.5, -2.0, -1.4, -0.1],
            old: vec![0.0, -1.0, -1.25, -1.0, -1.0, -1.5, -0.2],
            advantages: vec![1.5, 1.5, 1.5, -0.5, -0.5, -0.5, -0.5],
            mask: vec![0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
            weights: [vec![7.0], weight(2), weight(4)].concat(),
            lengths: vec![3, 4],
        }
    }

    fn slice(&self, from: usize, to: usize) -> Self {
        let cut = |values: &[f32]| values[from..to].to_vec();
        Self {
            policy: cut(&self.policy),
            old: cut(&self.old),
            advantages: cut(&self.advantages),
            mask: cut(&self.mask),
            weights: cut(&self.weights),
            lengths: vec![to - from],
        }
    }

    /// Loss and gradient by the policy's logprobs.
    fn run(&self, objective: &Objective, denominator: f64) -> (f32, Vec<f32>) {
        let tensor = |values: &[f32]| Tensor::new(values, &Device::Cpu).unwrap();
        let policy = Var::from_tensor(&tensor(&self.policy)).unwrap();
        let [old, advantages, mask, weights] =
            [&self.old, &self.advantages, &self.mask, &self.weights].map(|values| tensor(values));
        let batch = TokenBatch {
            policy_logprobs: &policy,
            old_logprobs: &old,
            ref_logprobs: None,
            entropy: &mask,
            advantages: &advantages,
            mask: &mask,
            weights: &weights,
            correction: None,
            lengths: &self.lengths,
        };
        let loss = loss(objective, &batch, denominator).unwrap().total;
        let gradients = loss.backward().unwrap();
        (loss.to_scalar().unwrap(), gradients.get(&policy).unwrap().to_vec1().unwrap())
    }
}

fn assert_close(actual: f64, expected: f64, tolerance: f64) {
    assert!((actual - expected).abs() <= tolerance, "{actual} is not {expected} within {tolerance}");
}

#[test]
fn two_clipped_tokens_by_hand() {
    // One token, r = 2, A = 1: clipped to 1.28; one token, r = 0.5, A = -1: clipped to 0.8.
    let case = Case {
        policy: vec![2.0_f32.ln(), 0.5_f32.ln()],
        old: vec![0.0; 2],
        advantages: vec![1.0, -1.0],
        mask: vec![1.0; 2],
        weights: vec![1.0; 2],
        lengths: vec![2],
    };
    assert_close(case.run(&dapo(), 2.0).0.into(), (-1.28 + 0.8) / 2.0, 1e-6);
}

#[test]
fn gradients_match_finite_differences() {
    for objective in [dapo(), grpo()] {
        let case = Case::new(&objective);
        let gradient = case.run(&objective, 6.0).1;
        for (t, gradient) in gradient.into_iter().enumerate() {
            let shifted = |by: f32| {
                let mut case = case.clone();
                case.policy[t] += by;
                f64::from(case.run(&objective, 6.0).0)
            };
            let step = 1e-2;
            let difference = (shifted(step) - shifted(-step)) / (2.0 * f64::from(step));
            assert_close(gradient.into(), difference, 2e-4);
        }
    }
}

#[test]
fn a_clipped_token_has_no_gradient() {
    let mut case = Case::new(&dapo());
    case.policy[1] = case.old[1] + 0.5; // A > 0 and r = 1.65 > 1.28
    case.policy[4] = case.old[4] - 0.5; // A < 0 and r = 0.61 < 0.8
    case.policy[5] = case.old[5] + 0.5; // A < 0 and r above the clip: still pulled back
    for objective in [dapo(), grpo()] {
        let gradient = case.run(&objective, 6.0).1;
        assert_eq!([gradient[1], gradient[4]], [0.0, 0.0]);
        assert!(gradient[2] < 0.0 && gradient[5] > 0.0);
        let judged = [1, 4, 5, 2].map(|t: usize| {
            let log_ratio = f64::from(case.policy[t]) - f64::from(case.old[t]);
            objective.surrogate.judge(log_ratio, case.advantages[t].into())
        });
        assert_eq!(judged, [Some(Clipped::High), Some(Clipped::Low), None, None]);
    }
}

#[test]
fn a_dual_clip_bounds_what_a_bad_token_can_cost_and_stops_its_gradient() {
    let mut objective = dapo();
    let mut case = Case::new(&objective);
    case.policy[5] = case.old[5] + 2.0; // A < 0 and r = 7.4 > 3
    case.policy[6] = case.old[6] + 0.5; // A < 0 and r = 1.65 < 3
    let unbounded = case.run(&objective, 6.0);
    objective.surrogate = Surrogate::Clipped { clip: Clip { low: 0.2, high: 0.28 }, dual: Some(3.0) };
    let (loss, gradient) = case.run(&objective, 6.0);
    assert_close((unbounded.0 - loss).into(), 0.5 * (2.0_f64.exp() - 3.0) / 6.0, 1e-6);
    assert!(unbounded.1[5] > 0.0 && gradient[5] == 0.0);
    assert_eq!(gradient[6], unbounded.1[6]);
    assert_eq!(objective.surrogate.judge(2.0, -0.5), Some(Clipped::Dual));
    assert_eq!(objective.surrogate.judge(2.0, 0.5), Some(Clipped::High));
}

#[test]
fn a_token_that_cispo_clips_keeps_a_gradient() {
    let objective =
        Objective { surrogate: Surrogate::Detached { clip: Clip { low: 1.0, high: 0.28 } }, ..dapo() };
    let mut case = Case::new(&objective);
    case.policy[1] = case.old[1] + 0.5; // r = 1.65, weighed as 1.28
    let gradient = case.run(&objective, 6.0).1;
    assert_close(gradient[1].into(), -1.28 * 1.5 / 6.0, 1e-6);
    assert_close(gradient[4].into(), (-1.0_f64).exp() * 0.5 / 6.0, 1e-6);
}

#[test]
fn a_masked_token_has_no_gradient() {
    for objective in [dapo(), grpo()] {
        assert_eq!(Case::new(&objective).run(&objective, 6.0).1[0], 0.0);
    }
}

#[test]
fn micro_batches_add_up() {
    for objective in [dapo(), grpo()] {
        let case = Case::new(&objective);
        let (whole, gradient) = case.run(&objective, 6.0);
        let (first, first_gradient) = case.slice(0, 3).run(&objective, 6.0);
        let (second, second_gradient) = case.slice(3, 7).run(&objective, 6.0);
        assert_close((first + second).into(), whole.into(), 1e-6);
        assert_eq!([first_gradient, second_gradient].concat(), gradient);
    }
}

#[test]
fn a_broken_ratio_stays_finite() {
    for objective in [dapo(), grpo()] {
        let mut case = Case::new(&objective);
        case.old[3] = -1e30; // A < 0: unclamped, the surrogate would be -inf
        let (loss, gradient) = case.run(&objective, 6.0);
        assert!(loss.is_finite() && gradient.iter().all(|g| g.is_finite()));
    }
}

/// GRPO and DAPO as one would write them down, in f32; the stages must not round otherwise.
#[test]
fn the_stages_have_the_bits_of_the_formulas_written_out() {
    for objective in [dapo(), grpo()] {
        let Surrogate::Clipped { clip, dual: None } = objective.surrogate else { panic!("clipped") };
        let mut case = Case::new(&objective);
        for t in 0..case.policy.len() {
            case.policy[t] += 0.1 * (t as f32 * 1.7).sin();
            case.advantages[t] *= 0.37;
        }
        let tensor = |values: &[f32]| Tensor::new(values, &Device::Cpu).unwrap();
        let policy = Var::from_tensor(&tensor(&case.policy)).unwrap();
        let [old, advantages, mask, weights] =
            [&case.old, &case.advantages, &case.mask, &case.weights].map(|values| tensor(values));
        let written = || -> Result<Tensor> {
            let ratio = (policy.as_tensor() - &old)?.clamp(-20.0, 20.0)?.exp()?;
            let clipped = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)?;
            let per_token = ((&ratio * &advantages)?.minimum(&(clipped * &advantages)?)? * &mask)?;
            let sum = match objective.aggregation {
                Aggregation::TokenMean => per_token.sum_all()?,
                _ => (per_token * &weights)?.sum_all()?,
            };
            sum / -5.0
        };
        let written = written().unwrap();
        let gradient = written.backward().unwrap().get(&policy).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(case.run(&objective, 5.0), (written.to_scalar().unwrap(), gradient));
    }
}
