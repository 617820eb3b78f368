//! How evenly tokens spread over experts, and the loss that keeps them so.

use candle_core::{Result, Tensor};
use r3_core::routes::RouteDims;
use r3_kernels::router::Scoring;

/// Tokens per expert and MoE layer, `[L, E]`; real tokens only, since there is no padding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loads {
    n_experts: usize,
    counts: Vec<u64>,
}

/// How far the busiest expert is above its fair share: `max_vio = max(load) / mean(load) - 1` of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadStats {
    /// Largest over layers.
    pub max_vio_max: f64,
    /// Mean over layers.
    pub max_vio_mean: f64,
}

impl Loads {
    /// No tokens yet.
    #[must_use]
    pub fn new(dims: RouteDims) -> Self {
        Self { n_experts: dims.n_experts, counts: vec![0; dims.n_layers * dims.n_experts] }
    }

    /// MoE layers, `L`.
    #[must_use]
    pub fn n_layers(&self) -> usize {
        self.counts.len() / self.n_experts.max(1)
    }

    /// Adds what `layer` chose for rows, `[T, K]`, each of which stands for as many tokens as `uses` `[T]` says.
    ///
    /// # Panics
    /// If the layer or an id is out of range, or rows have not one `K`.
    pub fn add(&mut self, layer: usize, chosen: &[u16], uses: &[u64]) {
        let counts = &mut self.counts[layer * self.n_experts..][..self.n_experts];
        assert!(chosen.len().is_multiple_of(uses.len().max(1)), "as many experts for every row");
        let top_k = (chosen.len() / uses.len().max(1)).max(1);
        for (chosen, uses) in chosen.chunks_exact(top_k).zip(uses) {
            for &expert in chosen {
                counts[usize::from(expert)] += uses;
            }
        }
    }

    /// Share of each expert in the choices of `layer`, `[E]`, summing to 1.
    #[must_use]
    pub fn shares(&self, layer: usize) -> Vec<f64> {
        let counts = &self.counts[layer * self.n_experts..][..self.n_experts];
        let total = counts.iter().sum::<u64>().max(1) as f64;
        counts.iter().map(|&count| count as f64 / total).collect()
    }

    /// Spread over all layers; 0 without tokens.
    #[must_use]
    pub fn finish(&self) -> LoadStats {
        let n_layers = self.n_layers();
        let mut stats = LoadStats::default();
        for layer in 0..n_layers {
            let busiest = self.shares(layer).into_iter().fold(0.0, f64::max);
            let max_vio = (busiest * self.n_experts as f64 - 1.0).max(0.0);
            stats.max_vio_max = stats.max_vio_max.max(max_vio);
            stats.max_vio_mean += max_vio / n_layers as f64;
        }
        stats
    }
}

/// Load-balancing loss, a scalar: `E * sum_e f_e P_e`, averaged over MoE layers; 1 when perfectly even.
///
/// `f_e` is the share of expert `e` in the choices of the *whole* optimiser step (`loads`, a constant), `P_e`
/// the mean router probability over its `n_tokens` tokens: by a softmax, or of sigmoids each one's share of their sum.
/// `scores` are this micro-batch's router logits, per layer `[T, E]`, so micro-batches add up.
///
/// Source: Switch Transformer, arXiv 2101.03961, equations 4 to 6, with `f` over the `K` choices of a token; shares of
/// sigmoids as in DeepSeek-V3, arXiv 2412.19437, equations 18 to 20, but over all tokens, not by sequence.
///
/// # Errors
/// If `scores` are not one `[T, E]` tensor for each layer of `loads`.
pub fn load_balance(scores: &[Tensor], scoring: Scoring, loads: &Loads, n_tokens: f64) -> Result<Tensor> {
    let scale = loads.n_experts as f64 / scores.len() as f64 / n_tokens;
    let mut per_layer = Vec::with_capacity(scores.len());
    for (layer, scores) in scores.iter().enumerate() {
        let weights = match scoring {
            // The row maximum is a constant: softmax does not change with it.
            Scoring::Softmax => scores.broadcast_sub(&scores.detach().max_keepdim(1)?)?.exp()?,
            // A sigmoid whose gradient does not overflow; and a sum above 0, should all of a row vanish.
            Scoring::Sigmoid { .. } => ((((scores * 0.5)?.tanh()? * 0.5)? + 0.5)? + 1e-20)?,
        };
        let probabilities = weights.broadcast_div(&weights.sum_keepdim(1)?)?;
        let shares: Vec<f32> = loads.shares(layer).into_iter().map(|share| (share * scale) as f32).collect();
        let shares = Tensor::new(shares, scores.device())?;
        per_layer.push((probabilities.sum(0)? * shares)?.sum_all()?);
    }
    Tensor::stack(&per_layer, 0)?.sum_all()
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    const DIMS: RouteDims = RouteDims { n_layers: 2, top_k: 1, n_experts: 2 };

    fn loads(layers: [&[u16]; 2]) -> Loads {
        let mut loads = Loads::new(DIMS);
        for (layer, chosen) in layers.into_iter().enumerate() {
            loads.add(layer, chosen, &vec![1; chosen.len()]);
        }
        loads
    }

    fn scores(values: &[[f32; 2]]) -> Var {
        let flat: Vec<f32> = values.concat();
        Var::from_vec(flat, (values.len(), 2), &Device::Cpu).unwrap()
    }

    const SIGMOID: Scoring = Scoring::Sigmoid { n_groups: 1, top_groups: 1 };

    fn loss(scores: [&Var; 2], loads: &Loads, n_tokens: f64) -> f32 {
        loss_of(Scoring::Softmax, scores, loads, n_tokens)
    }

    fn loss_of(scoring: Scoring, scores: [&Var; 2], loads: &Loads, n_tokens: f64) -> f32 {
        let scores = scores.map(|var| var.as_tensor().clone());
        load_balance(&scores, scoring, loads, n_tokens).unwrap().to_scalar().unwrap()
    }

    #[test]
    fn max_vio_is_the_excess_of_the_busiest_expert() {
        let stats = loads([&[0, 0, 0, 1], &[0, 1, 0, 1]]).finish();
        assert_eq!(stats, LoadStats { max_vio_max: 0.5, max_vio_mean: 0.25 });
        assert_eq!(Loads::new(DIMS).finish(), LoadStats::default());
    }

    #[test]
    fn a_row_counts_for_every_token_it_stands_for() {
        let dims = RouteDims { n_layers: 1, top_k: 2, n_experts: 3 };
        let [mut shared, mut alone] = [(); 2].map(|()| Loads::new(dims));
        shared.add(0, &[0, 1, 2, 1], &[3, 1]);
        alone.add(0, &[0, 1, 0, 1, 0, 1, 2, 1], &[1; 4]);
        assert_eq!(shared, alone);
        assert_eq!(shared.shares(0), [0.375, 0.5, 0.125]);
    }

    #[test]
    fn the_loss_by_hand() {
        let even = scores(&[[0.0, 0.0], [0.0, 0.0]]);
        assert_eq!(loss([&even, &even], &loads([&[0, 1], &[1, 0]]), 2.0), 1.0);
        // Layer 0 sends everything to expert 0 with P = (3/4, 1/4): 2 * 3/4 = 3/2; layer 1 is even: 1.
        let skewed = scores(&[[3.0_f32.ln(), 0.0], [3.0_f32.ln(), 0.0]]);
        let actual = loss([&skewed, &even], &loads([&[0, 0], &[0, 1]]), 2.0);
        assert!((actual - 1.25).abs() < 1e-6);
        // Sigmoids 3/4 and 1/2, so P = (3/5, 2/5): 2 * 3/5 = 6/5, and 1.
        let actual = loss_of(SIGMOID, [&skewed, &even], &loads([&[0, 0], &[0, 1]]), 2.0);
        assert!((actual - 1.1).abs() < 1e-6);
        let vanished = scores(&[[-300.0, -300.0], [0.0, 0.0]]);
        assert!(loss_of(SIGMOID, [&vanished, &even], &loads([&[0, 0], &[0, 1]]), 2.0).is_finite());
    }

    #[test]
    fn the_gradient_matches_finite_differences() {
        let loads = loads([&[0, 0, 1], &[1, 1, 1]]);
        let other = scores(&[[0.2, 0.1], [0.3, -0.4], [0.0, 1.0]]);
        let base = [[0.5, -0.3], [0.1, 0.9], [-1.0, 0.4]];
        let var = scores(&base);
        let tensors = [var.as_tensor().clone(), other.as_tensor().clone()];
        for scoring in [Scoring::Softmax, SIGMOID] {
            let gradients = load_balance(&tensors, scoring, &loads, 3.0).unwrap().backward().unwrap();
            let gradient = gradients.get(&var).unwrap().to_vec2::<f32>().unwrap();
            for (t, e) in (0..3).flat_map(|t| [(t, 0), (t, 1)]) {
                let shifted = |by: f32| {
                    let mut values = base;
                    values[t][e] += by;
                    loss_of(scoring, [&scores(&values), &other], &loads, 3.0)
                };
                let difference = (shifted(1e-2) - shifted(-1e-2)) / 2e-2;
                assert!((gradient[t][e] - difference).abs() < 1e-4, "{} is not {difference}", gradient[t][e]);
            }
        }
    }

    #[test]
    fn micro_batches_add_up() {
        let loads = loads([&[0, 0, 1], &[1, 0, 1]]);
        let rows = [[0.5, -0.3], [0.1, 0.9], [-1.0, 0.4]];
        let whole = loss([&scores(&rows), &scores(&rows)], &loads, 3.0);
        let parts = [&rows[..1], &rows[1..]].map(|rows| loss([&scores(rows), &scores(rows)], &loads, 3.0));
        assert!((whole - parts[0] - parts[1]).abs() < 1e-6);
    }
}
