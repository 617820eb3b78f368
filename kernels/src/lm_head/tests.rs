use proptest::prelude::{ProptestConfig, Strategy, prop_assert, prop_assert_eq, prop_oneof, proptest};

use super::gradient::HeadGradient;
use super::*;
use crate::gemm::{Dtype, matmul};
use crate::logprob::chosen_logprobs;
use crate::testing::{bits, in_pool, noise};

/// Hidden states, a head and targets, drawn at random.
#[derive(Debug)]
struct Inputs {
    width: usize,
    hidden: Vec<f32>,
    weight: Vec<f32>,
    ids: Vec<u32>,
    temperature: f32,
}

impl Inputs {
    fn new((n_rows, width, vocab): (usize, usize, usize)) -> Self {
        let ids = (0..n_rows).map(|t| ((t * 7919 + 3) % vocab) as u32).collect();
        let (hidden, weight) = (noise(n_rows * width, 1), noise(vocab * width, 2));
        Self { width, hidden, weight, ids, temperature: 0.7 }
    }

    fn vocab(&self) -> usize {
        self.weight.len() / self.width
    }

    fn packed(&self, dtype: Dtype) -> PackedMatrix {
        PackedMatrix::pack(&self.weight, self.vocab(), self.width, dtype)
    }

    /// Logprobs, entropies and target logits.
    fn scores(&self, dtype: Dtype) -> [Vec<f32>; 3] {
        let mut out = [(); 3].map(|()| vec![f32::NAN; self.ids.len()]);
        let [logprobs, entropies, target_logits] = &mut out;
        let targets = Targets { ids: &self.ids, temperature: self.temperature };
        let scores = Scores { logprobs, entropies, target_logits };
        head_logprobs(&self.hidden, &self.packed(dtype), targets, scores);
        out
    }

    /// Logprobs and entropies, and the gradients of hidden states and head for `pulls` `[2, T]`.
    fn op(&self, pulls: &[f32]) -> [Vec<f32>; 4] {
        let [logprobs, entropies, target_logits] = self.scores(Dtype::F32);
        let gradient = HeadGradient {
            hidden: &self.hidden,
            weight: &self.weight,
            packed: &self.packed(Dtype::F32),
            targets: Targets { ids: &self.ids, temperature: self.temperature },
            logprobs: &logprobs,
            entropies: &entropies,
            target_logits: &target_logits,
            lengths: &[self.ids.len()],
        };
        let (mut hidden, mut weight) = (vec![0.0; self.hidden.len()], vec![0.0; self.weight.len()]);
        gradient.add(pulls.split_at(self.ids.len()), (&mut hidden, &mut weight));
        [logprobs, entropies, hidden, weight]
    }
}

/// The plain formulas, in f64 and with all logits.
struct Plain {
    vocab: usize,
    /// `[T, V]`.
    logprobs: Vec<f64>,
    entropies: Vec<f64>,
}

impl Plain {
    fn new(hidden: &[f64], weight: &[f64], width: usize, temperature: f32) -> Self {
        let vocab = weight.len() / width;
        let mut logprobs = Vec::new();
        for h in hidden.chunks(width) {
            let dot = |w: &[f64]| w.iter().zip(h).map(|(w, h)| w * h).sum::<f64>() / f64::from(temperature);
            let row: Vec<f64> = weight.chunks(width).map(dot).collect();
            let total = row.iter().map(|z| z.exp()).sum::<f64>().ln();
            logprobs.extend(row.iter().map(|z| z - total));
        }
        let entropy = |row: &[f64]| -row.iter().map(|l| l.exp() * l).sum::<f64>();
        let entropies = logprobs.chunks(vocab).map(entropy).collect();
        Self { vocab, logprobs, entropies }
    }

    fn of(inputs: &Inputs) -> Self {
        Self::new(&wide(&inputs.hidden), &wide(&inputs.weight), inputs.width, inputs.temperature)
    }

    /// The sum of logprobs and entropies, weighed by `pulls` `[2, T]`.
    fn loss(&self, ids: &[u32], pulls: &[f32]) -> f64 {
        let (logprob_pulls, entropy_pulls) = pulls.split_at(ids.len());
        let chosen = self.logprobs.chunks(self.vocab).zip(ids).map(|(row, &id)| row[id as usize]);
        let weighed = |(value, &pull): (f64, &f32)| value * f64::from(pull);
        chosen.zip(logprob_pulls).map(weighed).sum::<f64>()
            + self.entropies.iter().copied().zip(entropy_pulls).map(weighed).sum::<f64>()
    }

    /// Gradients of the loss in hidden states and head.
    fn gradients(&self, inputs: &Inputs, pulls: &[f32]) -> [Vec<f64>; 2] {
        let Inputs { width, hidden, weight, ids, temperature } = inputs;
        let (mut hidden_grad, mut weight_grad) = (vec![0.0; hidden.len()], vec![0.0; weight.len()]);
        for (t, row) in self.logprobs.chunks(self.vocab).enumerate() {
            let (pull, spread) = (f64::from(pulls[t]), f64::from(pulls[ids.len() + t]));
            for (v, logprob) in row.iter().enumerate() {
                let hit = if v == ids[t] as usize { pull } else { 0.0 };
                let slope = pull + spread * (logprob + self.entropies[t]);
                let grad = (hit - logprob.exp() * slope) / f64::from(*temperature);
                for d in 0..*width {
                    hidden_grad[t * width + d] += grad * f64::from(weight[v * width + d]);
                    weight_grad[v * width + d] += grad * f64::from(hidden[t * width + d]);
                }
            }
        }
        [hidden_grad, weight_grad]
    }
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

fn assert_close(got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(got) - want).abs() <= tolerance * (1.0 + want.abs()), "{i}: {got} is not {want}");
    }
}

/// Rows, width and vocabulary: of one block and of several, of one run of rows and of several.
fn shape() -> impl Strategy<Value = (usize, usize, usize)> {
    prop_oneof![
        4 => (0_usize..40, 1_usize..40, 1_usize..200),
        2 => (1_usize..20, 1_usize..20, 1000_usize..3100),
        1 => (1000_usize..1100, 1_usize..6, 60_usize..80),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_fused_head_has_the_bits_of_logits_and_chosen_logprobs(shape in shape()) {
        let inputs = Inputs::new(shape);
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let mut logits = vec![f32::NAN; inputs.ids.len() * inputs.vocab()];
            matmul(&inputs.hidden, &inputs.packed(dtype), None, &mut logits);
            let mut expected = vec![f32::NAN; inputs.ids.len()];
            chosen_logprobs(&logits, &inputs.ids, inputs.temperature, &mut expected);
            let chosen: Vec<f32> =
                logits.chunks(inputs.vocab()).zip(&inputs.ids).map(|(row, &id)| row[id as usize]).collect();
            let alone = in_pool(1, || inputs.scores(dtype));
            prop_assert_eq!(bits(&alone[0]), bits(&expected));
            prop_assert_eq!(bits(&alone[2]), bits(&chosen));
            let shared = in_pool(2, || inputs.scores(dtype));
            prop_assert!(alone.iter().zip(&shared).all(|(a, b)| bits(a) == bits(b)));
        }
    }

    #[test]
    fn scores_and_gradients_are_those_of_the_plain_formulas(shape in shape()) {
        let inputs = Inputs::new(shape);
        let pulls = noise(2 * inputs.ids.len(), 5);
        let plain = Plain::of(&inputs);
        let [logprobs, entropies, hidden_grad, weight_grad] = inputs.op(&pulls);
        let chosen = plain.logprobs.chunks(plain.vocab).zip(&inputs.ids).map(|(row, &id)| row[id as usize]);
        assert_close(&logprobs, &chosen.collect::<Vec<_>>(), 2e-6);
        assert_close(&entropies, &plain.entropies, 1e-5);
        let [hidden_want, weight_want] = plain.gradients(&inputs, &pulls);
        assert_close(&hidden_grad, &hidden_want, 2e-5);
        assert_close(&weight_grad, &weight_want, 2e-5);
    }
}

#[test]
fn gradients_are_those_of_finite_differences() {
    let inputs = Inputs::new((3, 4, 9));
    let pulls = noise(6, 5);
    let [_, _, hidden_grad, weight_grad] = inputs.op(&pulls);
    let loss = |hidden: &[f64], weight: &[f64]| {
        Plain::new(hidden, weight, inputs.width, inputs.temperature).loss(&inputs.ids, &pulls)
    };
    let (hidden, weight) = (wide(&inputs.hidden), wide(&inputs.weight));
    let slope = |of: &[f64], at: usize, loss: &dyn Fn(&[f64]) -> f64| {
        let moved = |by: f64| {
            let mut values = of.to_vec();
            values[at] += by;
            loss(&values)
        };
        (moved(1e-5) - moved(-1e-5)) / 2e-5
    };
    let slopes: Vec<f64> = (0..12).map(|at| slope(&hidden, at, &|hidden| loss(hidden, &weight))).collect();
    assert_close(&hidden_grad, &slopes, 1e-5);
    let slopes: Vec<f64> = (0..36).map(|at| slope(&weight, at, &|weight| loss(&hidden, weight))).collect();
    assert_close(&weight_grad, &slopes, 1e-5);
}

#[test]
fn gradients_have_the_same_bits_on_one_thread_and_on_two() {
    let inputs = Inputs::new((1100, 24, 1500));
    let pulls = noise(2 * 1100, 5);
    let on = |threads| in_pool(threads, || inputs.op(&pulls).map(|values| bits(&values)));
    assert!(on(1) == on(2));
}

/// What is masked out of a loss has no gradient, however unlikely its target.
#[test]
fn rows_without_a_pull_have_no_gradient() {
    let mut inputs = Inputs::new((2, 3, 5));
    inputs.hidden[3..].fill(300.0);
    let [_, _, hidden_grad, _] = inputs.op(&[1.0, 0.0, 0.5, 0.0]);
    assert!(hidden_grad[..3].iter().all(|&x| x != 0.0) && hidden_grad[3..] == [0.0; 3]);
}

#[test]
fn what_does_not_fit_is_refused() {
    let inputs = Inputs::new((2, 3, 5));
    let panic = |ids: Vec<u32>| {
        let wrong = Inputs { ids, hidden: inputs.hidden.clone(), weight: inputs.weight.clone(), ..inputs };
        let panic = std::panic::catch_unwind(|| wrong.scores(Dtype::F32)).unwrap_err();
        *panic.downcast::<String>().unwrap()
    };
    assert_eq!(panic(vec![0, 5]), "target 5 of token 1 is not below 5");
    assert!(panic(vec![0]).contains("hidden states are [1, 3]"));
}
