//! The engine's executor: packed weights, reused buffers, a paged KV cache, no candle.

use std::sync::Arc;

use r3_core::ids::TokenId;
use r3_kernels::attention::split::split_attention;
use r3_kernels::attention::{Heads, KvCache, PagedSequence, paged_attention};
use r3_kernels::experts::{ExpertDims, ExpertScratch, Experts, Routed, forward as run_experts};
use r3_kernels::gemm::{Dtype, PackedMatrix, matmul, matmul_all};
use r3_kernels::lm_head::{Head, Scores, Targets, head_logprobs};
use r3_kernels::numerics::Numerics;
use r3_kernels::residual;
use r3_kernels::rms_norm::{add_rms_norm, rms_norm};
use r3_kernels::rope::{RopeTable, norm_rope};
use r3_kernels::router::{Choice, Router, Routing, choose, gates};
use r3_kernels::swiglu::silu_mul;

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::executor::{BuildWeights, Constants, Executor, Layer, Mlp, Named, Weights, check_vocabulary};
use crate::rows::{Pool, Rows};
use crate::source::{TensorSource, stays_f32};

/// A packed projection, which a trainer may compute with, too, and its bias.
#[derive(Debug)]
pub struct Projection {
    matrix: Arc<PackedMatrix>,
    bias: Option<Vec<f32>>,
}

/// One layer's choice and gates, made by the router.
#[derive(Debug)]
pub struct RoutedRows {
    choice: Choice,
    gates: Vec<f32>,
}

/// Where the tokens of one forward stand and where their keys and values are kept.
pub struct Paged<'a> {
    /// Keys and values of every layer.
    pub cache: &'a mut KvCache,
    /// Slots of a block.
    pub block_tokens: usize,
    /// `[T]` position of each token in its sequence.
    pub positions: &'a [u32],
    /// `[T]` slot each token's key and value go to.
    pub slots: &'a [u32],
    /// The sequences, whose queries follow each other in the batch.
    pub sequences: &'a [PagedSequence<'a>],
}

/// Runs the model on plain buffers, which grow with the largest batch and are used again.
#[derive(Debug)]
pub struct Buffers {
    pool: Pool,
    choice: Choice,
    gates: Vec<f32>,
    scratch: ExpertScratch,
    rope: RopeTable,
    heads: Heads,
    constants: Constants,
    dtype: Dtype,
    numerics: Numerics,
}

impl Buffers {
    /// An executor for `config` whose projections are kept in `dtype`, and whose sums are in the order of `numerics`.
    #[must_use]
    pub fn new(config: &ModelConfig, dtype: Dtype, numerics: Numerics) -> Self {
        Self {
            pool: Pool::default(),
            choice: Choice::empty(),
            gates: Vec::new(),
            scratch: ExpertScratch::default(),
            rope: RopeTable::new(config.rope_theta, config.head_dim, config.max_positions),
            heads: config.heads(),
            constants: Constants { eps: config.rms_norm_eps, router: config.router() },
            dtype,
            numerics,
        }
    }

    /// Copies the rows `at` of `x` into an activation of their own.
    pub fn select_rows(&mut self, x: &Rows, at: impl ExactSizeIterator<Item = usize>) -> Rows {
        let width = x.width();
        let mut out = self.take(at.len(), width);
        for (row, index) in out.values_mut().chunks_exact_mut(width).zip(at) {
            row.copy_from_slice(&x.values()[index * width..(index + 1) * width]);
        }
        out
    }

    /// Nats of `targets`, one for each row of `hidden` from `first` on: what [`chosen_logprobs`] gives, or [`draw_kept`]
    /// where a target has a kept set, without logits.
    ///
    /// [`chosen_logprobs`]: r3_kernels::logprob::chosen_logprobs
    /// [`draw_kept`]: r3_kernels::truncate::draw_kept
    ///
    /// # Panics
    /// If a kept set does not ascend, lacks its target or leaves the vocabulary.
    #[must_use]
    pub fn head_logprobs(
        weights: &Weights<Self>,
        hidden: &Rows,
        first: usize,
        targets: Targets<'_>,
    ) -> Vec<f32> {
        let (head, n_rows) = (&weights.head.as_ref().unwrap_or(&weights.embed).matrix, targets.ids.len());
        let [mut logprobs, mut entropies, mut target_logits] = [(); 3].map(|()| vec![0.0; n_rows]);
        head_logprobs(
            &hidden.values()[first * hidden.width()..][..n_rows * hidden.width()],
            Head::Packed(head),
            targets,
            Scores { logprobs: &mut logprobs, entropies: &mut entropies, target_logits: &mut target_logits },
        );
        logprobs
    }

    fn take(&mut self, rows: usize, width: usize) -> Rows {
        self.pool.take(rows, width)
    }
}

impl Executor for Buffers {
    type Act = Rows;
    type Matrix = Projection;
    type Vector = Vec<f32>;
    type Bias = Vec<f32>;
    type Experts = Arc<Experts>;
    type Routed = RoutedRows;
    type Attend<'a> = Paged<'a>;

    fn embed(&mut self, table: &Projection, tokens: &[TokenId]) -> Result<Rows, ModelError> {
        check_vocabulary(tokens, table.matrix.n())?;
        let mut out = self.take(tokens.len(), table.matrix.k());
        table.matrix.unpack_rows(|t| tokens[t].index(), out.values_mut());
        Ok(out)
    }

    fn rms_norm(&mut self, x: &Rows, weight: &Vec<f32>) -> Result<Rows, ModelError> {
        let mut out = self.take(x.rows(), x.width());
        rms_norm(x.values(), weight, self.constants.eps, out.values_mut());
        Ok(out)
    }

    fn linear(&mut self, x: &Rows, projection: &Projection) -> Result<Rows, ModelError> {
        let mut out = self.take(x.rows(), projection.matrix.n());
        matmul(x.values(), &projection.matrix, projection.bias.as_deref(), out.values_mut());
        Ok(out)
    }

    fn qkv(&mut self, x: &Rows, projections: [&Projection; 3]) -> Result<[Rows; 3], ModelError> {
        let mut out = projections.map(|projection| self.take(x.rows(), projection.matrix.n()));
        let weights = projections.map(|projection| (&*projection.matrix, projection.bias.as_deref()));
        matmul_all(x.values(), weights, out.each_mut().map(Rows::values_mut));
        Ok(out)
    }

    fn norm_rope(&mut self, mut x: Rows, weight: &Vec<f32>, attend: &Paged<'_>) -> Result<Rows, ModelError> {
        norm_rope(x.values_mut(), (weight, self.constants.eps), attend.positions, &self.rope);
        Ok(x)
    }

    fn attend(&mut self, layer: usize, qkv: [Rows; 3], attend: &mut Paged<'_>) -> Result<Rows, ModelError> {
        let [q, k, v] = qkv;
        attend.cache.write(layer, attend.slots, k.values(), v.values());
        self.release(k);
        self.release(v);
        let mut out = self.take(q.rows(), self.heads.n_heads * self.heads.head_dim);
        let attention = match self.numerics {
            Numerics::Exact => paged_attention,
            Numerics::Fast => split_attention,
        };
        attention(q.values(), attend.cache, (layer, attend.block_tokens), attend.sequences, out.values_mut());
        self.release(q);
        Ok(out)
    }

    fn route(
        &mut self,
        scores: Rows,
        bias: Option<&Vec<f32>>,
        layer: usize,
        routing: &mut Routing<'_>,
    ) -> Result<RoutedRows, ModelError> {
        let mut routed = RoutedRows {
            choice: std::mem::replace(&mut self.choice, Choice::empty()),
            gates: std::mem::take(&mut self.gates),
        };
        let router = Router { config: self.constants.router, bias: bias.map(Vec::as_slice) };
        choose(scores.values(), router, layer, routing, &mut routed.choice);
        routed.gates.resize(routed.choice.ids().len(), 0.0);
        match routing.replayed_gates(layer, &routed.choice) {
            Some(replayed) => routed.gates.copy_from_slice(replayed),
            None => gates(scores.values(), self.constants.router, &routed.choice, &mut routed.gates),
        }
        self.release(scores);
        Ok(routed)
    }

    fn experts(&mut self, x: &Rows, routed: RoutedRows, experts: &Arc<Experts>) -> Result<Rows, ModelError> {
        let mut out = self.take(x.rows(), x.width());
        let view = Routed { choice: &routed.choice, gates: &routed.gates };
        run_experts(x.values(), view, experts, &mut self.scratch, out.values_mut());
        (self.choice, self.gates) = (routed.choice, routed.gates);
        Ok(out)
    }

    fn silu_mul(&mut self, gate_up: Rows) -> Result<Rows, ModelError> {
        let inter = gate_up.width() / 2;
        let mut out = self.take(gate_up.rows(), inter);
        silu_mul(gate_up.values(), inter, out.values_mut());
        self.release(gate_up);
        Ok(out)
    }

    fn add(&mut self, mut x: Rows, y: Rows) -> Result<Rows, ModelError> {
        residual::add(y.values(), x.values_mut());
        self.release(y);
        Ok(x)
    }

    fn add_rms_norm(&mut self, mut x: Rows, y: Rows, weight: &Vec<f32>) -> Result<[Rows; 2], ModelError> {
        let mut out = self.take(x.rows(), x.width());
        add_rms_norm(x.values_mut(), y.values(), weight, self.constants.eps, out.values_mut());
        self.release(y);
        Ok([x, out])
    }

    fn release(&mut self, act: Rows) {
        self.pool.release(act);
    }
}

impl BuildWeights for Buffers {
    fn matrix(&mut self, weight: Named<'_>, bias: Option<Named<'_>>) -> Result<Projection, ModelError> {
        let dtype = if stays_f32(weight.name) { Dtype::F32 } else { self.dtype };
        let matrix = PackedMatrix::pack(&weight.values()?, weight.shape[0], weight.shape[1], dtype).into();
        weight.source.packed_matrix(weight.name, &matrix);
        Ok(Projection { matrix, bias: bias.map(Named::read).transpose()? })
    }

    fn vector(&mut self, weight: Named<'_>) -> Result<Vec<f32>, ModelError> {
        weight.read()
    }

    fn bias(&mut self, bias: Named<'_>) -> Result<Vec<f32>, ModelError> {
        bias.read()
    }

    fn expert_weights(&mut self, gate_up: Named<'_>, down: Named<'_>) -> Result<Arc<Experts>, ModelError> {
        let [n_experts, width, inter] = [down.shape[0], down.shape[1], down.shape[2]];
        let dims = ExpertDims { n_experts, width, inter };
        let experts = Experts::pack(&gate_up.values()?, &down.values()?, dims, self.dtype).into();
        down.source.packed_experts(down.name, &experts);
        Ok(experts)
    }
}

/// Reads the resident weights back: what a refit audit hashes on the engine's side.
impl TensorSource for Weights<Buffers> {
    fn read(&self, name: &str, out: &mut Vec<f32>) -> Result<(), ModelError> {
        out.clear();
        self.visit(name, &mut |run| out.extend_from_slice(run))
    }

    fn visit(&self, name: &str, each: &mut dyn FnMut(&[f32])) -> Result<(), ModelError> {
        match self.part(name).ok_or_else(|| ModelError::NoSuchTensor { name: name.to_owned() })? {
            Part::Vector(values) => each(values),
            Part::Matrix(matrix) => unpack(matrix, each),
            Part::GateUp(experts) => {
                (0..experts.dims().n_experts).for_each(|e| unpack(experts.gate_up(e), each))
            }
            Part::Down(experts) => (0..experts.dims().n_experts).for_each(|e| unpack(experts.down(e), each)),
        }
        Ok(())
    }
}

/// Calls `each` with the stored values of `matrix`, some rows at a time.
fn unpack(matrix: &PackedMatrix, each: &mut dyn FnMut(&[f32])) {
    let mut rows = vec![0.0; RUN_ROWS * matrix.k()];
    for first in (0..matrix.n()).step_by(RUN_ROWS) {
        let run = &mut rows[..RUN_ROWS.min(matrix.n() - first) * matrix.k()];
        for (row, values) in (first..).zip(run.chunks_exact_mut(matrix.k())) {
            matrix.unpack_row(row, values);
        }
        each(run);
    }
}

/// Rows that are read back at once: the elements of so many lie on the same cache lines.
const RUN_ROWS: usize = 16;

/// Where the values of a canonical tensor are held.
enum Part<'a> {
    Vector(&'a [f32]),
    Matrix(&'a PackedMatrix),
    GateUp(&'a Experts),
    Down(&'a Experts),
}

impl Weights<Buffers> {
    fn part(&self, name: &str) -> Option<Part<'_>> {
        Some(match name {
            "model.embed_tokens.weight" => Part::Matrix(&self.embed.matrix),
            "model.norm.weight" => Part::Vector(&self.norm),
            "lm_head.weight" => Part::Matrix(&self.head.as_ref()?.matrix),
            _ => {
                let (layer, suffix) = name.strip_prefix("model.layers.")?.split_once('.')?;
                return self.layers.get(layer.parse::<usize>().ok()?)?.part(suffix);
            }
        })
    }
}

impl Layer<Buffers> {
    fn part(&self, suffix: &str) -> Option<Part<'_>> {
        Some(match (suffix, &self.mlp) {
            ("input_layernorm.weight", _) => Part::Vector(&self.input_norm),
            ("post_attention_layernorm.weight", _) => Part::Vector(&self.post_norm),
            ("self_attn.q_norm.weight", _) => Part::Vector(&self.q_norm),
            ("self_attn.k_norm.weight", _) => Part::Vector(&self.k_norm),
            ("mlp.gate.e_score_correction_bias", Mlp::Moe { bias: Some(bias), .. }) => Part::Vector(bias),
            ("mlp.experts.gate_up_proj", Mlp::Moe { experts, .. }) => Part::GateUp(experts),
            ("mlp.experts.down_proj", Mlp::Moe { experts, .. }) => Part::Down(experts),
            _ => {
                let (prefix, kind) = suffix.rsplit_once('.')?;
                let projection = self.projection(prefix)?;
                match kind {
                    "weight" => Part::Matrix(&projection.matrix),
                    "bias" => Part::Vector(projection.bias.as_deref()?),
                    _ => return None,
                }
            }
        })
    }

    fn projection(&self, prefix: &str) -> Option<&Projection> {
        Some(match (prefix, &self.mlp) {
            ("self_attn.q_proj", _) => &self.q,
            ("self_attn.k_proj", _) => &self.k,
            ("self_attn.v_proj", _) => &self.v,
            ("self_attn.o_proj", _) => &self.o,
            ("mlp.gate", Mlp::Moe { router, .. }) => router,
            ("mlp.gate_up_proj", Mlp::Dense(dense)) => &dense.gate_up,
            ("mlp.down_proj", Mlp::Dense(dense)) => &dense.down,
            ("mlp.shared_experts.gate_up_proj", Mlp::Moe { shared: Some(shared), .. }) => &shared.gate_up,
            ("mlp.shared_experts.down_proj", Mlp::Moe { shared: Some(shared), .. }) => &shared.down,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::fixtures::{grouped_config, mixed_config};
    use crate::init::FreshWeights;
    use crate::source::canonical_tensors;

    fn resident(dtype: Dtype) -> (ModelConfig, FreshWeights, Weights<Buffers>) {
        resident_of(mixed_config(), dtype)
    }

    fn resident_of(config: ModelConfig, dtype: Dtype) -> (ModelConfig, FreshWeights, Weights<Buffers>) {
        let fresh = FreshWeights::new(&config, 3);
        let weights =
            Weights::load(&mut Buffers::new(&config, dtype, Numerics::Exact), &config, &fresh).unwrap();
        (config, fresh, weights)
    }

    #[test]
    fn resident_weights_read_back_as_they_are_kept() {
        let configs = [mixed_config(), grouped_config()];
        for (config, dtype) in
            configs.into_iter().flat_map(|one| [(one.clone(), Dtype::F32), (one, Dtype::Bf16)])
        {
            let (config, fresh, weights) = resident_of(config, dtype);
            let (mut expected, mut found) = (Vec::new(), Vec::new());
            for (name, _) in canonical_tensors(&config) {
                fresh.read(&name, &mut expected).unwrap();
                if dtype == Dtype::Bf16 && !stays_f32(&name) {
                    expected.iter_mut().for_each(|value| *value = bf16::from_f32(*value).to_f32());
                }
                weights.read(&name, &mut found).unwrap();
                assert_eq!(found, expected, "{name} as {dtype}");
            }
        }
    }

    #[test]
    fn a_tensor_that_is_not_the_models_is_refused_by_name() {
        let (_, _, weights) = resident(Dtype::F32);
        for name in [
            "lm_head.bias",
            "model.layers.2.input_layernorm.weight",
            "model.layers.1.input_layernorm.bias",
            "model.layers.1.mlp.gate.bias",
            "model.layers.1.mlp.gate_up_proj.weight",
            "model.layers.0.mlp.experts.down_proj",
            "model.layers.1.mlp.experts.down_proj.weight",
            "model.layers.x.mlp.gate.weight",
            "",
        ] {
            match weights.read(name, &mut Vec::new()) {
                Err(ModelError::NoSuchTensor { name: named }) => assert_eq!(named, name),
                other => panic!("{name}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_token_outside_the_vocabulary_is_refused_by_position() {
        let (config, _, weights) = resident(Dtype::F32);
        let tokens = [TokenId(9), TokenId(10)];
        let error =
            Buffers::new(&config, Dtype::F32, Numerics::Exact).embed(&weights.embed, &tokens).unwrap_err();
        assert_eq!(error.to_string(), "token 10 at position 1 is outside the vocabulary of 10");
    }
}
