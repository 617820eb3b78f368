//! Tests of the experts, against the formula in plain loops and candle's autograd.

use std::cmp::Reverse;

use candle_core::{Device, Tensor, Var};
use half::bf16;
use proptest::prelude::{Just, Strategy, prop_assert, prop_assert_eq, prop_oneof, proptest};

use super::trained::{ExpertGrads, ExpertOperands, ExpertTrace};
use super::*;
use crate::router::{RouterConfig, Routing, choose};
use crate::testing::{bits, in_pool, noise};
use crate::weight_gradient::WeightGradient;

/// A layer with its batch, as plain numbers.
#[derive(Clone)]
struct Layer {
    dims: ExpertDims,
    top_k: usize,
    x: Vec<f32>,
    scores: Vec<f32>,
    gates: Vec<f32>,
    gate_up: Vec<f32>,
    down: Vec<f32>,
}

impl Layer {
    fn new(n_tokens: usize, top_k: usize, dims: ExpertDims) -> Self {
        let ExpertDims { n_experts, width, inter } = dims;
        Self {
            dims,
            top_k,
            x: noise(n_tokens * width, 1),
            scores: noise(n_tokens * n_experts, 2),
            gates: noise(n_tokens * top_k, 3),
            gate_up: noise(n_experts * 2 * inter * width, 4),
            down: noise(n_experts * width * inter, 5),
        }
    }

    /// The same experts with only the tokens `tokens`.
    fn only(&self, tokens: std::ops::Range<usize>) -> Self {
        let cut = |values: &[f32], width: usize| values[tokens.start * width..tokens.end * width].to_vec();
        Self {
            x: cut(&self.x, self.dims.width),
            scores: cut(&self.scores, self.dims.n_experts),
            gates: cut(&self.gates, self.top_k),
            ..self.clone()
        }
    }

    fn choice(&self) -> Choice {
        let config = RouterConfig::softmax(self.dims.n_experts, self.top_k, true);
        let mut choice = Choice::empty();
        choose(&self.scores, config, 0, &mut Routing::Free, &mut choice);
        choice
    }

    fn packed(&self, dtype: Dtype) -> Experts {
        Experts::pack(&self.gate_up, &self.down, self.dims, dtype)
    }

    fn forward(&self, experts: &Experts, scratch: &mut ExpertScratch) -> Vec<f32> {
        let mut y = vec![f32::NAN; self.x.len()];
        let routed = Routed { choice: &self.choice(), gates: &self.gates };
        forward(&self.x, routed, experts, scratch, &mut y);
        y
    }

    /// The formula in f64, with `round` applied to the operands of products.
    fn naive(&self, round: fn(f32) -> f32) -> Vec<f64> {
        let ExpertDims { width, inter, .. } = self.dims;
        let choice = self.choice();
        let product = |w: &[f32], x: &[f32]| -> Vec<f32> {
            let dot = |w: &[f32]| -> f64 {
                w.iter().zip(x).map(|(&w, &x)| f64::from(round(w)) * f64::from(round(x))).sum()
            };
            w.chunks_exact(x.len()).map(|w| dot(w) as f32).collect()
        };
        let mut y = vec![0.0; self.x.len()];
        for (t, y) in y.chunks_exact_mut(width).enumerate() {
            for pair in t * self.top_k..(t + 1) * self.top_k {
                let expert = usize::from(choice.ids()[pair]);
                let gate_up = &self.gate_up[expert * 2 * inter * width..][..2 * inter * width];
                let hidden = product(gate_up, &self.x[t * width..][..width]);
                let silu = |gate: f32| gate / (1.0 + (-gate).exp());
                let act: Vec<f32> = (0..inter).map(|i| silu(hidden[i]) * hidden[inter + i]).collect();
                let answer = product(&self.down[expert * width * inter..][..width * inter], &act);
                for (y, answer) in y.iter_mut().zip(answer) {
                    *y += f64::from(self.gates[pair]) * f64::from(answer);
                }
            }
        }
        y
    }

    fn vars(&self) -> [Var; 4] {
        let ExpertDims { n_experts, width, inter } = self.dims;
        let n_tokens = self.x.len() / width;
        let var =
            |values: &[f32], shape: &[usize]| Var::from_vec(values.to_vec(), shape, &Device::Cpu).unwrap();
        [
            var(&self.x, &[n_tokens, width]),
            var(&self.gates, &[n_tokens, self.top_k]),
            var(&self.gate_up, &[n_experts, 2 * inter, width]),
            var(&self.down, &[n_experts, width, inter]),
        ]
    }

    /// The trainer's forward, and its gradients of `sum(y * upstream)` with respect to all four; what was traced before
    /// does not show.
    fn trained(&self, dtype: Dtype) -> (Vec<f32>, [Vec<f32>; 4]) {
        self.trained_above(dtype, true)
    }

    /// The same, where what is below the experts may not learn: the gradient of `x` is not touched then.
    fn trained_above(&self, dtype: Dtype, x_learns: bool) -> (Vec<f32>, [Vec<f32>; 4]) {
        let choice = self.choice();
        let mut trace = ExpertTrace::default();
        let mut y = vec![f32::NAN; self.x.len()];
        let operands = ExpertOperands {
            x: &self.x,
            gates: &self.gates,
            gate_up: &self.gate_up,
            down: &self.down,
            width: self.dims.width,
            inter: self.dims.inter,
            dtype,
            lengths: &[choice.n_tokens()],
        };
        for scale in [-3.0, 1.0] {
            let gates: Vec<f32> = self.gates.iter().map(|gate| scale * gate).collect();
            trace.forward(&ExpertOperands { gates: &gates, ..operands }, None, &choice, &mut y);
        }
        let mut grads =
            [(&self.x, f32::NAN), (&self.gates, f32::NAN), (&self.gate_up, 0.0), (&self.down, 0.0)]
                .map(|(values, before)| vec![before; values.len()]);
        let [x, gates, gate_up, down] = &mut grads;
        let [gate_up, down] = [gate_up, down].map(|grad| WeightGradient::Whole(grad));
        let x = x_learns.then_some(&mut x[..]);
        trace.backward(&operands, &noise(self.x.len(), 6), ExpertGrads { x, gates, gate_up, down });
        (y, grads)
    }

    fn gradients(&self) -> [Vec<f32>; 4] {
        self.trained(Dtype::F32).1
    }

    /// The formula in candle's own ops, pair by pair.
    fn candles(&self, [x, gates, gate_up, down]: &[Var; 4]) -> Tensor {
        let (inter, choice) = (self.dims.inter, self.choice());
        let row = |t: usize| {
            let pairs =
                choice.ids()[t * self.top_k..][..self.top_k].iter().enumerate().map(|(k, &expert)| {
                    let w = gate_up.get(usize::from(expert)).unwrap().t().unwrap();
                    let hidden = x.narrow(0, t, 1).unwrap().matmul(&w).unwrap();
                    let gate = hidden.narrow(1, 0, inter).unwrap().silu().unwrap();
                    let act = (gate * hidden.narrow(1, inter, inter).unwrap()).unwrap();
                    let answer = act.matmul(&down.get(usize::from(expert)).unwrap().t().unwrap()).unwrap();
                    answer.broadcast_mul(&gates.narrow(0, t, 1).unwrap().narrow(1, k, 1).unwrap()).unwrap()
                });
            pairs.reduce(|sum, answer| (sum + answer).unwrap()).unwrap()
        };
        let rows: Vec<Tensor> = (0..self.x.len() / self.dims.width).map(row).collect();
        Tensor::cat(&rows, 0).unwrap()
    }

    /// candle's gradients of the same.
    fn candles_gradients(&self) -> [Vec<f32>; 4] {
        let vars = self.vars();
        let y = self.candles(&vars);
        let upstream = Tensor::from_vec(noise(self.x.len(), 6), y.shape(), &Device::Cpu).unwrap();
        let store = (y * upstream).unwrap().sum_all().unwrap().backward().unwrap();
        vars.each_ref().map(|var| store.get(var).unwrap().flatten_all().unwrap().to_vec1().unwrap())
    }
}

fn layer() -> impl Strategy<Value = (usize, usize, ExpertDims)> {
    (0_usize..40, 1_usize..4, 0_usize..6, 1_usize..40, 1_usize..30).prop_map(
        |(n_tokens, top_k, more, width, inter)| {
            (n_tokens, top_k, ExpertDims { n_experts: top_k + more, width, inter })
        },
    )
}

fn dtype() -> impl Strategy<Value = Dtype> {
    prop_oneof![Just(Dtype::F32), Just(Dtype::Bf16)]
}

/// A layer whose work is split over threads, with more tokens per expert than a segment holds.
fn busy_layer() -> Layer {
    Layer::new(150, 2, ExpertDims { n_experts: 3, width: 72, inter: 51 })
}

proptest! {
    #[test]
    fn tokens_get_the_weighted_sum_of_their_experts((n_tokens, top_k, dims) in layer()) {
        let layer = Layer::new(n_tokens, top_k, dims);
        let y = layer.forward(&layer.packed(Dtype::F32), &mut ExpertScratch::default());
        for (y, expected) in y.iter().zip(layer.naive(|x| x)) {
            prop_assert!((f64::from(*y) - expected).abs() <= 2e-5, "{y}, not {expected}");
        }
        let y = layer.forward(&layer.packed(Dtype::Bf16), &mut ExpertScratch::default());
        for (y, expected) in y.iter().zip(layer.naive(|x| bf16::from_f32(x).to_f32())) {
            // The activation between the products may round to the other neighbour after a sum of other order.
            prop_assert!((f64::from(*y) - expected).abs() <= 0.05, "{y}, not {expected}");
        }
    }

    #[test]
    fn a_token_has_the_same_bits_alone_and_in_any_batch((n_tokens, top_k, dims) in layer(), dtype in dtype()) {
        let layer = Layer::new(n_tokens, top_k, dims);
        let (experts, width) = (layer.packed(dtype), layer.dims.width);
        let mut scratch = ExpertScratch::default();
        let y = layer.forward(&experts, &mut scratch);
        for t in 0..n_tokens {
            let alone = layer.only(t..t + 1).forward(&experts, &mut scratch);
            prop_assert_eq!(bits(&alone), bits(&y[t * width..][..width]));
        }
        let tail = layer.only(n_tokens / 3..n_tokens).forward(&experts, &mut scratch);
        prop_assert_eq!(bits(&tail), bits(&y[n_tokens / 3 * width..]));
    }

    #[test]
    fn the_trainers_forward_has_the_bits_of_the_engines((n_tokens, top_k, dims) in layer(), dtype in dtype()) {
        let layer = Layer::new(n_tokens, top_k, dims);
        let expected = layer.forward(&layer.packed(dtype), &mut ExpertScratch::default());
        prop_assert_eq!(bits(&layer.trained(dtype).0), bits(&expected));
    }

    #[test]
    fn gradients_are_the_same_to_the_bit_where_nothing_below_learns(
        (n_tokens, top_k, dims) in layer(), dtype in dtype()
    ) {
        let layer = Layer::new(n_tokens, top_k, dims);
        let [expected, got] = [true, false].map(|x_learns| layer.trained_above(dtype, x_learns).1);
        for (got, expected) in got[1..].iter().zip(&expected[1..]) {
            prop_assert_eq!(bits(got), bits(expected));
        }
    }

    #[test]
    fn every_pair_has_one_row_of_its_expert((n_tokens, top_k, dims) in layer()) {
        let layer = Layer::new(n_tokens, top_k, dims);
        let choice = layer.choice();
        let mut dispatch = Dispatch::default();
        dispatch.fill(&busy_layer().choice());
        dispatch.fill(&choice);
        let pairs: Vec<f32> = (0..choice.ids().len()).map(|pair| pair as f32).collect();
        let rows = dispatch.to_rows(&pairs);
        prop_assert_eq!(&dispatch.to_pairs(&rows), &pairs);
        let mut expected: Vec<usize> = (0..pairs.len()).collect();
        expected.sort_by_key(|&pair| choice.ids()[pair]);
        prop_assert_eq!(rows, expected.iter().map(|&pair| pair as f32).collect::<Vec<_>>());
        let mut covered: Vec<_> = dispatch.segments().iter().flat_map(|segment| segment.rows.clone()).collect();
        covered.sort_unstable();
        prop_assert!(dispatch.segments().is_sorted_by_key(|segment| Reverse(segment.rows.len())));
        prop_assert_eq!(covered, (0..pairs.len()).collect::<Vec<_>>());
        let busy = dispatch.busy_experts();
        prop_assert!(busy.is_sorted_by_key(|busy| Reverse(busy.rows.len())));
        prop_assert!(busy.iter().all(|busy| !busy.rows.is_empty() && busy.rows == dispatch.expert_rows(busy.expert)));
        prop_assert_eq!(busy.iter().map(|busy| busy.rows.len()).sum::<usize>(), pairs.len());
        for segment in dispatch.segments() {
            for row in segment.rows.clone() {
                prop_assert_eq!(segment.expert, usize::from(choice.ids()[expected[row]]));
                prop_assert_eq!(dispatch.tokens(row..row + 1)[0] as usize, expected[row] / layer.top_k);
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    let layer = busy_layer();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let experts = layer.packed(dtype);
        let run = || bits(&layer.forward(&experts, &mut ExpertScratch::default()));
        assert_eq!(in_pool(1, run), in_pool(2, run));
        // More threads than segments: products are spread, not experts.
        assert_eq!(in_pool(1, run), in_pool(9, run));
    }
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let gradients = || layer.trained(dtype).1.map(|gradient| bits(&gradient));
        assert_eq!(in_pool(1, gradients), in_pool(2, gradients));
    }
}

#[test]
fn gradients_are_those_of_candle() {
    for layer in [Layer::new(9, 2, ExpertDims { n_experts: 5, width: 13, inter: 7 }), busy_layer()] {
        // In bf16 every operand is off by up to 2^-9 of itself, and sums of a few tens of products by a little more.
        for (dtype, tolerance) in [(Dtype::F32, 1e-5), (Dtype::Bf16, 0.02)] {
            for (ours, candles) in layer.trained(dtype).1.iter().zip(&layer.candles_gradients()) {
                let largest = candles.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
                assert!(largest > 0.1);
                for (ours, candles) in ours.iter().zip(candles) {
                    assert!((ours - candles).abs() <= tolerance * largest, "{dtype}: {ours}, not {candles}");
                }
            }
        }
    }
}

#[test]
fn gradients_are_those_of_finite_differences() {
    let layer = Layer::new(7, 2, ExpertDims { n_experts: 4, width: 6, inter: 5 });
    let loss = |layer: &Layer| -> f64 {
        let upstream = noise(layer.x.len(), 6);
        layer.naive(|x| x).iter().zip(upstream).map(|(y, up)| y * f64::from(up)).sum()
    };
    let fields: [fn(&mut Layer) -> &mut Vec<f32>; 4] =
        [|l| &mut l.x, |l| &mut l.gates, |l| &mut l.gate_up, |l| &mut l.down];
    for (gradient, field) in layer.gradients().iter().zip(fields) {
        for at in (0..gradient.len()).step_by(5) {
            let moved = |step: f32| {
                let mut layer = layer.clone();
                field(&mut layer)[at] += step;
                loss(&layer)
            };
            let expected = (moved(1.0 / 64.0) - moved(-1.0 / 64.0)) * 32.0;
            assert!((f64::from(gradient[at]) - expected).abs() <= 1e-3, "{}, not {expected}", gradient[at]);
        }
    }
}

#[test]
fn an_expert_nobody_chose_has_no_gradient() {
    let layer = Layer::new(2, 1, ExpertDims { n_experts: 9, width: 4, inter: 3 });
    let [_, _, gate_up, down] = layer.gradients();
    for expert in (0..9).filter(|expert| !layer.choice().ids().contains(expert)).map(usize::from) {
        assert_eq!(gate_up[expert * 24..][..24], [0.0; 24]);
        assert_eq!(down[expert * 12..][..12], [0.0; 12]);
    }
}

#[test]
fn answers_are_added_in_router_order_and_not_in_expert_order() {
    let alike = ExpertDims { n_experts: 3, width: 1, inter: 1 };
    let layer = Layer {
        x: vec![1.0],
        scores: vec![1.0, 0.0, 2.0],
        gate_up: vec![2.0; 6],
        down: vec![3.0; 3],
        ..Layer::new(1, 3, alike)
    };
    assert_eq!(layer.choice().ids(), [2, 0, 1]);
    let sum_of = |gates: [f32; 3]| {
        let layer = Layer { gates: gates.to_vec(), ..layer.clone() };
        layer.forward(&layer.packed(Dtype::F32), &mut ExpertScratch::default())[0]
    };
    // A power of two scales exactly and next to 2^30 a 1 is lost, so the sum tells which two gates met first.
    let big = (1_u32 << 30) as f32;
    let answer = sum_of([1.0, 0.0, 0.0]);
    assert!(answer > 10.0);
    assert_eq!(sum_of([big, -big, 1.0]), answer);
    assert_eq!([sum_of([1.0, big, -big]), sum_of([big, 1.0, -big])], [0.0, 0.0]);
}

#[test]
fn experts_are_packed_alike_side_by_side_and_one_after_the_other() {
    let dims = ExpertDims { n_experts: 5, width: 150, inter: 70 };
    let layer = Layer::new(1, 1, dims);
    for dtype in [Dtype::F32, Dtype::Bf16] {
        // Five threads take an expert each, eight share every expert.
        for threads in [1, 5, 8] {
            let packed = in_pool(threads, || layer.packed(dtype));
            for (weights, len, packed) in [
                (&layer.gate_up, 2 * dims.inter * dims.width, &packed.gate_up),
                (&layer.down, dims.inter * dims.width, &packed.down),
            ] {
                for (w, found) in weights.chunks_exact(len).zip(packed) {
                    let expected = PackedMatrix::pack(w, found.n(), found.k(), dtype);
                    let [mut row, mut expected_row] = [(); 2].map(|()| vec![0.0; found.k()]);
                    for at in 0..found.n() {
                        found.unpack_row(at, &mut row);
                        expected.unpack_row(at, &mut expected_row);
                        assert_eq!(bits(&row), bits(&expected_row), "row {at}, {threads} threads, {dtype}");
                    }
                }
            }
        }
    }
}
