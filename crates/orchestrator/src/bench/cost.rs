//! What a model's forward costs at least: multiplications and bytes, counted from its configuration.

use r3_kernels::gemm::Dtype;
use r3_model::config::ModelConfig;
use r3_scheduler::request::Finished;

/// Costs of one model in one format. Attention to earlier tokens is not counted, nor is anything but products with
/// weights: all else comes on top.
#[derive(Clone, Debug)]
pub(crate) struct ModelCost {
    /// Multiply-adds of a token in all layers.
    token_macs: usize,
    /// Multiply-adds of a token's logits.
    logit_macs: usize,
    /// Bytes of weights that every tick reads, the head aside.
    shared_bytes: usize,
    /// Bytes of the head.
    head_bytes: usize,
    /// Bytes of one expert.
    expert_bytes: usize,
    /// Share of the tokens that take each expert, of every MoE layer: `[L, E]`.
    taken: Vec<f64>,
}

impl ModelCost {
    /// The costs of `config`. How experts are shared out is counted in `rollouts`; without routes, evenly.
    pub(crate) fn new(config: &ModelConfig, dtype: Dtype, rollouts: &[Finished]) -> Self {
        let element = match dtype {
            Dtype::F32 => size_of::<f32>(),
            Dtype::Bf16 => size_of::<u16>(),
        };
        let d = config.hidden_size;
        let n_moe = config.route_dims().n_layers;
        let attention = 2 * d * (config.n_heads + config.n_kv_heads) * config.head_dim;
        let expert = 3 * d * config.moe_inter;
        let dense = 3 * d * (config.dense_inter * (config.n_layers - n_moe) + config.shared_inter * n_moe);
        let router = n_moe * config.n_experts * d;
        let head = config.vocab_size * d;
        let shared = config.n_layers * attention + dense;
        Self {
            token_macs: shared + router + n_moe * config.top_k * expert,
            logit_macs: head,
            shared_bytes: shared * element + router * size_of::<f32>(),
            head_bytes: head * element,
            expert_bytes: expert * element,
            taken: taken(config, rollouts),
        }
    }

    /// Floating-point operations of a tick that computes and samples as many tokens.
    pub(crate) fn flops(&self, computed: usize, sampled: usize) -> f64 {
        2.0 * (self.token_macs * computed + self.logit_macs * sampled) as f64
    }

    /// Bytes of weights that a tick touches, each counted once: of experts, those that the tokens are expected to take.
    pub(crate) fn bytes(&self, computed: usize, sampled: usize) -> f64 {
        let touched = |share: &f64| 1.0 - (1.0 - share).powf(computed as f64);
        let experts: f64 = self.taken.iter().map(touched).sum();
        let head = if sampled > 0 { self.head_bytes } else { 0 };
        (self.shared_bytes + head) as f64 + experts * self.expert_bytes as f64
    }
}

fn taken(config: &ModelConfig, rollouts: &[Finished]) -> Vec<f64> {
    let dims = config.route_dims();
    let mut counts = vec![0_u64; dims.n_layers * dims.n_experts];
    let mut n_rows = 0;
    for routes in rollouts.iter().filter_map(|rollout| rollout.routes.as_ref()) {
        let view = routes.view();
        n_rows += view.rows();
        for (row, layer, k) in every(view.rows(), dims.n_layers, dims.top_k) {
            counts[layer * dims.n_experts + usize::from(view.expert(row, layer, k))] += 1;
        }
    }
    let even = dims.top_k as f64 / dims.n_experts as f64;
    counts.iter().map(|&count| if n_rows == 0 { even } else { count as f64 / n_rows as f64 }).collect()
}

fn every(rows: usize, layers: usize, top_k: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..rows * layers * top_k).map(move |at| (at / (layers * top_k), at / top_k % layers, at % top_k))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    #[test]
    fn what_is_counted_is_every_matrix_once() {
        let config = fixtures::model();
        let cost = ModelCost::new(&config, Dtype::F32, &[]);
        let vectors = config.n_layers * (2 * config.hidden_size + 2 * config.head_dim) + config.hidden_size;
        let embedding = if config.tied_head { 0 } else { config.vocab_size * config.hidden_size };
        let matrices = config.n_parameters() - vectors - embedding;
        let touched = cost.bytes(1_000_000, 1);
        assert_eq!(touched.round(), 4.0 * matrices as f64, "so many tokens touch every expert");
        assert_eq!(
            cost.bytes(1_000_000, 0).round(),
            touched.round() - 4.0 * (config.vocab_size * config.hidden_size) as f64
        );
        let dims = config.route_dims();
        let idle = dims.n_layers * (dims.n_experts - dims.top_k) * 3 * config.hidden_size * config.moe_inter;
        assert_eq!(cost.flops(1, 1), 2.0 * (matrices - idle) as f64);
        assert_eq!(cost.bytes(1, 1).round(), 4.0 * (matrices - idle) as f64, "one token touches its own");
    }
}
