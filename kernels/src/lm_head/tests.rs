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
    /// Sizes and tokens.
    kept: Option<(Vec<u32>, Vec<u32>)>,
}

impl Inputs {
    fn new((n_rows, width, vocab): (usize, usize, usize)) -> Self {
        let ids = (0..n_rows).map(|t| ((t * 7919 + 3) % vocab) as u32).collect();
        let (hidden, weight) = (noise(n_rows * width, 1), noise(vocab * width, 2));
        Self { width, hidden, weight, ids, temperature: 0.7, kept: None }
    }

    /// Rows that keep one token of `every` on average, with their targets; every fifth keeps all.
    fn truncated(shape: (usize, usize, usize), every: u32) -> Self {
        let inputs = Self::new(shape);
        let (mut sizes, mut kept) = (Vec::new(), Vec::new());
        for (&target, t) in inputs.ids.iter().zip(0_u32..) {
            let is_kept = |id: &u32| {
                let hash = (id + 1).wrapping_mul(0x9e37_79b9).wrapping_add(t.wrapping_mul(0x85eb_ca6b));
                !t.is_multiple_of(5) && (*id == target || (hash >> 7).is_multiple_of(every))
            };
            let before = kept.len();
            kept.extend((0..inputs.vocab() as u32).filter(is_kept));
            sizes.push((kept.len() - before) as u32);
        }
        Self { kept: Some((sizes, kept)), ..inputs }
    }

    fn targets(&self) -> Targets<'_> {
        let kept = self.kept.as_ref().map(|(sizes, ids)| Kept { sizes, ids });
        Targets { ids: &self.ids, temperature: self.temperature, kept }
    }

    /// The tokens that each row is scored over.
    fn kept_rows(&self) -> Vec<Vec<u32>> {
        let all = || (0..self.vocab() as u32).collect();
        let Some((sizes, ids)) = &self.kept else { return self.ids.iter().map(|_| all()).collect() };
        let mut rest = &ids[..];
        let take = |&size: &u32| {
            let (row, after) = rest.split_at(size as usize);
            rest = after;
            if row.is_empty() { all() } else { row.to_vec() }
        };
        sizes.iter().map(take).collect()
    }

    fn vocab(&self) -> usize {
        self.weight.len() / self.width
    }

    fn packed(&self, dtype: Dtype) -> PackedMatrix {
        PackedMatrix::pack(&self.weight, self.vocab(), self.width, dtype)
    }

    fn plain(&self, dtype: Dtype) -> PlainHead<'_> {
        PlainHead { weight: &self.weight, width: self.width, dtype }
    }

    /// Logprobs, entropies and target logits.
    fn scores(&self, head: Head<'_>) -> [Vec<f32>; 3] {
        let mut out = [(); 3].map(|()| vec![f32::NAN; self.ids.len()]);
        let [logprobs, entropies, target_logits] = &mut out;
        let scores = Scores { logprobs, entropies, target_logits };
        head_logprobs(&self.hidden, head, self.targets(), scores);
        out
    }

    /// Logprobs and entropies, and the gradients of hidden states and head for `pulls` `[2, T]`.
    fn op(&self, pulls: &[f32]) -> [Vec<f32>; 4] {
        let [logprobs, entropies, target_logits] = self.scores(Head::Plain(self.plain(Dtype::F32)));
        let gradient = HeadGradient {
            hidden: &self.hidden,
            head: self.plain(Dtype::F32),
            targets: self.targets(),
            logprobs: &logprobs,
            entropies: &entropies,
            target_logits: &target_logits,
            lengths: &[self.ids.len()],
        };
        let (mut hidden, mut weight) = (vec![0.0; self.hidden.len()], vec![0.0; self.weight.len()]);
        gradient.add(pulls.split_at(self.ids.len()), (Some(&mut hidden), Some(&mut weight)));
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
    /// `kept` has what each row is scored over; the other tokens have logprob `-inf`.
    fn new(hidden: &[f64], weight: &[f64], inputs: &Inputs) -> Self {
        let vocab = inputs.vocab();
        let mut logprobs = Vec::new();
        for (h, kept) in hidden.chunks(inputs.width).zip(inputs.kept_rows()) {
            let dot =
                |w: &[f64]| w.iter().zip(h).map(|(w, h)| w * h).sum::<f64>() / f64::from(inputs.temperature);
            let mut row = vec![f64::NEG_INFINITY; vocab];
            for id in kept {
                row[id as usize] = dot(&weight[id as usize * inputs.width..][..inputs.width]);
            }
            let total = row.iter().map(|z| z.exp()).sum::<f64>().ln();
            logprobs.extend(row.iter().map(|z| z - total));
        }
        let entropy = |row: &[f64]| -row.iter().filter(|l| l.is_finite()).map(|l| l.exp() * l).sum::<f64>();
        let entropies = logprobs.chunks(vocab).map(entropy).collect();
        Self { vocab, logprobs, entropies }
    }

    fn of(inputs: &Inputs) -> Self {
        Self::new(&wide(&inputs.hidden), &wide(&inputs.weight), inputs)
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
        let Inputs { width, hidden, weight, ids, temperature, .. } = inputs;
        let (mut hidden_grad, mut weight_grad) = (vec![0.0; hidden.len()], vec![0.0; weight.len()]);
        for (t, row) in self.logprobs.chunks(self.vocab).enumerate() {
            let (pull, spread) = (f64::from(pulls[t]), f64::from(pulls[ids.len() + t]));
            for (v, logprob) in row.iter().enumerate().filter(|(_, logprob)| logprob.is_finite()) {
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
            let packed = inputs.packed(dtype);
            let alone = in_pool(1, || inputs.scores(Head::Packed(&packed)));
            prop_assert_eq!(bits(&alone[0]), bits(&expected));
            prop_assert_eq!(bits(&alone[2]), bits(&chosen));
            for (threads, head) in [(1, Head::Plain(inputs.plain(dtype))), (2, Head::Packed(&packed)), (2, Head::Plain(inputs.plain(dtype)))] {
                let again = in_pool(threads, || inputs.scores(head));
                prop_assert!(alone.iter().zip(&again).all(|(a, b)| bits(a) == bits(b)));
            }
        }
    }

    #[test]
    fn kept_sets_have_the_bits_of_rows_of_their_logits(shape in shape(), every in 1_u32..40) {
        let inputs = Inputs::truncated(shape, every);
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let mut logits = vec![f32::NAN; inputs.ids.len() * inputs.vocab()];
            matmul(&inputs.hidden, &inputs.packed(dtype), None, &mut logits);
            let packed = inputs.packed(dtype);
            let alone = in_pool(1, || inputs.scores(Head::Packed(&packed)));
            let rows = logits.chunks(inputs.vocab()).zip(inputs.kept_rows()).zip(&inputs.ids);
            for (((row, kept), target), got) in rows.zip(&alone[0]) {
                let kept_logits: Vec<f32> = kept.iter().map(|&id| row[id as usize]).collect();
                let mut expected = [f32::NAN];
                let at = kept.binary_search(target).unwrap() as u32;
                chosen_logprobs(&kept_logits, &[at], inputs.temperature, &mut expected);
                prop_assert_eq!(bits(&[*got]), bits(&expected));
            }
            for (threads, head) in [(1, Head::Plain(inputs.plain(dtype))), (2, Head::Packed(&packed)), (2, Head::Plain(inputs.plain(dtype)))] {
                let again = in_pool(threads, || inputs.scores(head));
                prop_assert!(alone.iter().zip(&again).all(|(a, b)| bits(a) == bits(b)));
            }
        }
    }

    /// Every token of every row kept by name: the bits of no sets at all, forward and backward.
    #[test]
    fn keeping_all_changes_no_bit(shape in shape()) {
        let whole = Inputs::new(shape);
        let (n_rows, vocab) = (whole.ids.len(), whole.vocab() as u32);
        let kept = Some((vec![vocab; n_rows], (0..n_rows).flat_map(|_| 0..vocab).collect()));
        let named = Inputs { kept, ..Inputs::new(shape) };
        let pulls = noise(2 * n_rows, 5);
        let [whole, named] = [whole, named].map(|inputs| inputs.op(&pulls));
        prop_assert!(whole.iter().zip(&named).all(|(a, b)| bits(a) == bits(b)));
    }

    #[test]
    fn scores_and_gradients_are_those_of_the_plain_formulas(shape in shape(), every in 0_u32..20) {
        let inputs = if every == 0 { Inputs::new(shape) } else { Inputs::truncated(shape, every) };
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
    assert_differences(&Inputs::new((3, 4, 9)));
}

#[test]
fn gradients_of_kept_sets_are_those_of_finite_differences() {
    let inputs = Inputs::truncated((3, 4, 9), 3);
    let sizes: Vec<usize> = inputs.kept_rows().iter().map(Vec::len).collect();
    assert!(sizes[0] == 9 && sizes[1..].iter().all(|size| (2..9).contains(size)), "{sizes:?}");
    assert_differences(&inputs);
}

fn assert_differences(inputs: &Inputs) {
    let pulls = noise(6, 5);
    let [_, _, hidden_grad, weight_grad] = inputs.op(&pulls);
    let loss = |hidden: &[f64], weight: &[f64]| Plain::new(hidden, weight, inputs).loss(&inputs.ids, &pulls);
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

/// What had no choice has logprob and entropy 0.0 and pulls at nothing.
#[test]
fn a_row_that_keeps_its_target_alone_has_logprob_0_and_no_gradient() {
    let kept = Some((vec![1, 1], vec![3, 2]));
    let inputs = Inputs { kept, ..Inputs::new((2, 3, 5)) };
    let [logprobs, entropies, hidden_grad, weight_grad] = inputs.op(&[1.0, -2.0, 0.5, 3.0]);
    assert_eq!([logprobs, entropies].map(|values| bits(&values)), [vec![0; 2], vec![0; 2]]);
    assert!(hidden_grad.iter().chain(&weight_grad).all(|&grad| grad == 0.0));
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
        let wrong = Inputs {
            ids,
            hidden: inputs.hidden.clone(),
            weight: inputs.weight.clone(),
            kept: None,
            ..inputs
        };
        let panic =
            std::panic::catch_unwind(|| wrong.scores(Head::Plain(wrong.plain(Dtype::F32)))).unwrap_err();
        *panic.downcast::<String>().unwrap()
    };
    assert_eq!(panic(vec![0, 5]), "target 5 of token 1 is not below 5");
    assert!(panic(vec![0]).contains("hidden states are [1, 3]"));
    let refuse = |sizes: &[u32], ids: &[u32]| {
        let kept = Some((sizes.to_vec(), ids.to_vec()));
        let wrong = Inputs { kept, ..Inputs::new((2, 3, 5)) };
        let panic =
            std::panic::catch_unwind(|| wrong.scores(Head::Plain(wrong.plain(Dtype::F32)))).unwrap_err();
        *panic.downcast::<String>().unwrap()
    };
    assert_eq!(inputs.ids, [3, 2]);
    assert!(refuse(&[1], &[3]).contains("a kept set for each row"));
    assert!(refuse(&[2, 0], &[3]).contains("kept sets of these sizes"));
    assert_eq!(refuse(&[2, 0], &[3, 3]), "the kept tokens of token 0 ascend");
    assert_eq!(refuse(&[0, 2], &[2, 5]), "token 1 keeps what is below 5");
    assert_eq!(refuse(&[1, 2], &[3, 1, 4]), "token 1 keeps its target 2");
}
