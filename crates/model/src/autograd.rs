//! The trainer's executor: candle tensors, whose autograd calls our kernels' backward passes.

use std::sync::Arc;

use candle_core::{Device, Tensor, Var};
use r3_core::ids::TokenId;
use r3_kernels::attention::attention_op;
use r3_kernels::experts::experts_op;
use r3_kernels::gemm::{Dtype, PackedMatrix, linear};
use r3_kernels::lm_head::head_op;
use r3_kernels::rms_norm::rms_norm_op;
use r3_kernels::rope::{RopeTable, rope_op};
use r3_kernels::router::{Choice, Routing, choose, gates_op};
use r3_kernels::swiglu::silu_mul_op;

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::executor::{BuildWeights, Constants, Executor, Named, Weights, check_vocabulary};
use crate::forward::{forward, logits};
use crate::source::TensorSource;

/// A projection as f32 variables.
#[derive(Debug)]
pub struct Projection {
    weight: Tensor,
    bias: Option<Tensor>,
}

/// One layer's experts as f32 variables.
#[derive(Debug)]
pub struct ExpertTensors {
    gate_up: Tensor,
    down: Tensor,
}

/// One layer's choice with its differentiable gates `[T, K]`, made by the router.
#[derive(Debug)]
pub struct RoutedTensors {
    choice: Arc<Choice>,
    gates: Tensor,
}

/// Sequences packed one after the other, each starting at position 0.
#[derive(Debug)]
pub struct PackedSequences {
    lengths: Arc<[usize]>,
    positions: Arc<[u32]>,
}

impl PackedSequences {
    /// Sequences of `lengths` tokens.
    #[must_use]
    pub fn new(lengths: &[usize]) -> Self {
        let positions = lengths.iter().flat_map(|&length| (0u32..).take(length)).collect();
        Self { lengths: lengths.into(), positions }
    }
}

/// Runs the model on candle tensors. Everything is f32.
#[derive(Debug)]
pub struct Autograd {
    rope: Arc<RopeTable>,
    head_dim: usize,
    constants: Constants,
    vars: Vec<(String, Var)>,
    router_scores: Vec<Tensor>,
}

impl Autograd {
    fn new(config: &ModelConfig) -> Self {
        Self {
            rope: Arc::new(RopeTable::new(config.rope_theta, config.head_dim, config.max_positions)),
            head_dim: config.head_dim,
            constants: Constants { eps: config.rms_norm_eps, router: config.router() },
            vars: Vec::new(),
            router_scores: Vec::new(),
        }
    }

    fn var(&mut self, tensor: Named<'_>) -> Result<Tensor, ModelError> {
        let var = Var::from_slice(tensor.values, tensor.shape, &Device::Cpu)?;
        let handle = var.as_tensor().clone();
        self.vars.push((tensor.name.to_owned(), var));
        Ok(handle)
    }
}

impl Executor for Autograd {
    type Act = Tensor;
    type Matrix = Projection;
    type Vector = Tensor;
    type Experts = ExpertTensors;
    type Routed = RoutedTensors;
    type Attend<'a> = PackedSequences;

    fn embed(&mut self, table: &Projection, tokens: &[TokenId]) -> Result<Tensor, ModelError> {
        check_vocabulary(tokens, table.weight.dim(0)?)?;
        let ids: Vec<u32> = tokens.iter().map(|token| token.0).collect();
        Ok(table.weight.index_select(&Tensor::from_vec(ids, tokens.len(), &Device::Cpu)?, 0)?)
    }

    fn rms_norm(&mut self, x: &Tensor, weight: &Tensor) -> Result<Tensor, ModelError> {
        Ok(rms_norm_op(x, weight, self.constants.eps)?)
    }

    fn linear(&mut self, x: &Tensor, projection: &Projection) -> Result<Tensor, ModelError> {
        let y = linear(x, &projection.weight)?;
        Ok(match &projection.bias {
            Some(bias) => y.broadcast_add(bias)?,
            None => y,
        })
    }

    fn norm_rope(
        &mut self,
        x: Tensor,
        weight: &Tensor,
        attend: &PackedSequences,
    ) -> Result<Tensor, ModelError> {
        let (tokens, width) = x.dims2()?;
        let heads = x.reshape((tokens, width / self.head_dim, self.head_dim))?;
        let normed = rms_norm_op(&heads, weight, self.constants.eps)?;
        Ok(rope_op(&normed, attend.positions.clone(), self.rope.clone())?)
    }

    fn attend(
        &mut self,
        _layer: usize,
        qkv: [Tensor; 3],
        attend: &mut PackedSequences,
    ) -> Result<Tensor, ModelError> {
        let [q, k, v] = qkv;
        let (tokens, width) = v.dims2()?;
        let v = v.reshape((tokens, width / self.head_dim, self.head_dim))?;
        Ok(attention_op(&q, &k, &v, attend.lengths.clone())?.flatten_from(1)?)
    }

    fn route(
        &mut self,
        scores: Tensor,
        layer: usize,
        routing: &mut Routing<'_>,
    ) -> Result<RoutedTensors, ModelError> {
        let mut choice = Choice::empty();
        let values = scores.flatten_all()?.to_vec1::<f32>()?;
        choose(&values, self.constants.router, layer, routing, &mut choice);
        let choice = Arc::new(choice);
        let gates = gates_op(&scores, self.constants.router, choice.clone())?;
        self.router_scores.push(scores);
        Ok(RoutedTensors { choice, gates })
    }

    fn experts(
        &mut self,
        x: &Tensor,
        routed: RoutedTensors,
        experts: &ExpertTensors,
    ) -> Result<Tensor, ModelError> {
        Ok(experts_op(x, &routed.gates, (&experts.gate_up, &experts.down), routed.choice)?)
    }

    fn silu_mul(&mut self, gate_up: Tensor) -> Result<Tensor, ModelError> {
        Ok(silu_mul_op(&gate_up)?)
    }

    fn add(&mut self, x: Tensor, y: Tensor) -> Result<Tensor, ModelError> {
        Ok((x + y)?)
    }

    fn release(&mut self, _act: Tensor) {}
}

impl BuildWeights for Autograd {
    fn matrix(&mut self, weight: Named<'_>, bias: Option<Named<'_>>) -> Result<Projection, ModelError> {
        let weight = self.var(weight)?;
        let bias = bias.map(|bias| self.var(bias)).transpose()?;
        Ok(Projection { weight, bias })
    }

    fn vector(&mut self, weight: Named<'_>) -> Result<Tensor, ModelError> {
        self.var(weight)
    }

    fn expert_weights(&mut self, gate_up: Named<'_>, down: Named<'_>) -> Result<ExpertTensors, ModelError> {
        Ok(ExpertTensors { gate_up: self.var(gate_up)?, down: self.var(down)? })
    }
}

/// The policy being trained: f32 variables and the forward that differentiates through them.
pub struct Policy {
    exec: Autograd,
    weights: Weights<Autograd>,
}

/// Sequences packed for the trainer, without padding.
#[derive(Clone, Copy, Debug)]
pub struct Packed<'a> {
    /// Inputs of all sequences, `[T]`. A sequence's last token is never an input.
    pub tokens: &'a [TokenId],
    /// The token that follows each input, `[T]`.
    pub targets: &'a [TokenId],
    /// Inputs of each sequence; sums to `T`.
    pub lengths: &'a [usize],
}

/// What one forward of the policy gives.
#[derive(Debug)]
pub struct PolicyOutput {
    /// `[T]` nats, differentiable: log-probability of each target.
    pub logprobs: Tensor,
    /// `[T]` nats, differentiable: entropy of each distribution.
    pub entropy: Tensor,
    /// Per MoE layer `[T, E]` router logits, differentiable.
    pub router_scores: Vec<Tensor>,
}

impl Policy {
    /// Reads every tensor of `source` as f32.
    ///
    /// # Errors
    /// If a tensor cannot be read or is not finite.
    pub fn load(source: &dyn TensorSource, config: &ModelConfig) -> Result<Self, ModelError> {
        let mut exec = Autograd::new(config);
        let weights = Weights::load(&mut exec, config, source)?;
        Ok(Self { exec, weights })
    }

    /// The model's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.weights.config
    }

    /// Every trained tensor by canonical name, in canonical order.
    #[must_use]
    pub fn vars(&self) -> &[(String, Var)] {
        &self.exec.vars
    }

    /// Logits `[T, V]` of packed sequences. What is trained on are [`Self::logprobs`], which never hold so many.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, a sequence is too long, or candle fails.
    pub fn logits(&mut self, batch: &Packed<'_>, routing: &mut Routing<'_>) -> Result<Tensor, ModelError> {
        let hidden = self.hidden(batch, routing)?;
        logits(&mut self.exec, &self.weights, &hidden)
    }

    fn hidden(&mut self, batch: &Packed<'_>, routing: &mut Routing<'_>) -> Result<Tensor, ModelError> {
        let max_positions = self.weights.config.max_positions;
        if let Some(&tokens) = batch.lengths.iter().find(|length| **length > max_positions) {
            return Err(ModelError::TooLong { tokens, max_positions });
        }
        self.exec.router_scores.clear();
        let mut attend = PackedSequences::new(batch.lengths);
        forward(&mut self.exec, &self.weights, batch.tokens, &mut attend, routing)
    }

    /// Log-probabilities of the targets under the policy at `temperature`, and entropies.
    ///
    /// # Errors
    /// As [`Self::logits`].
    pub fn logprobs(
        &mut self,
        batch: &Packed<'_>,
        routing: &mut Routing<'_>,
        temperature: f32,
    ) -> Result<PolicyOutput, ModelError> {
        let hidden = self.hidden(batch, routing)?;
        let targets: Arc<[u32]> = batch.targets.iter().map(|token| token.0).collect();
        let head = &self.weights.head.as_ref().unwrap_or(&self.weights.embed).weight;
        let (vocab, width) = head.dims2()?;
        let values = head.flatten_all()?.to_vec1::<f32>()?;
        let packed = Arc::new(PackedMatrix::pack(&values, vocab, width, Dtype::F32));
        let (logprobs, entropy) = head_op(&hidden, head, packed, targets, temperature)?;
        let router_scores = std::mem::take(&mut self.exec.router_scores);
        Ok(PolicyOutput { logprobs, entropy, router_scores })
    }
}

impl TensorSource for Policy {
    fn read(&self, name: &str, out: &mut Vec<f32>) -> Result<(), ModelError> {
        read_var(&self.exec.vars, name, out)
    }
}

/// The policy's weights, to be read on another thread while the trainer waits. It shares their memory, so a later
/// optimiser step shows through.
#[derive(Clone, Debug)]
pub struct SharedWeights {
    vars: Vec<(String, Var)>,
}

impl Policy {
    /// A handle to the weights.
    #[must_use]
    pub fn shared_weights(&self) -> SharedWeights {
        SharedWeights { vars: self.exec.vars.clone() }
    }
}

impl TensorSource for SharedWeights {
    fn read(&self, name: &str, out: &mut Vec<f32>) -> Result<(), ModelError> {
        read_var(&self.vars, name, out)
    }
}

fn read_var(vars: &[(String, Var)], name: &str, out: &mut Vec<f32>) -> Result<(), ModelError> {
    let found = vars.iter().find(|(known, _)| known == name);
    let (_, var) = found.ok_or_else(|| ModelError::NoSuchTensor { name: name.to_owned() })?;
    *out = var.flatten_all()?.to_vec1::<f32>()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{config_with, mixed_config};
    use crate::init::FreshWeights;
    use crate::source::canonical_tensors;

    fn policy(config: &ModelConfig) -> Policy {
        Policy::load(&FreshWeights::new(config, 3), config).unwrap()
    }

    fn tokens<const N: usize>(ids: [u32; N]) -> [TokenId; N] {
        ids.map(TokenId)
    }

    #[test]
    fn positions_start_anew_with_every_sequence() {
        let packed = PackedSequences::new(&[3, 1, 2]);
        assert_eq!(&*packed.positions, [0, 1, 2, 0, 0, 1]);
        assert_eq!(&*packed.lengths, [3, 1, 2]);
    }

    #[test]
    fn every_canonical_tensor_is_trained_in_canonical_order() {
        let config = mixed_config();
        let policy = policy(&config);
        let vars: Vec<_> =
            policy.vars().iter().map(|(name, var)| (name.clone(), var.dims().to_vec())).collect();
        assert_eq!(vars, canonical_tensors(&config));
    }

    #[test]
    fn packed_sequences_do_not_see_each_other() {
        let config = mixed_config();
        let mut policy = policy(&config);
        let mut logprobs = |inputs: &[TokenId], targets: &[TokenId], lengths: &[usize]| {
            let batch = Packed { tokens: inputs, targets, lengths };
            let output = policy.logprobs(&batch, &mut Routing::Free, 0.7).unwrap();
            assert_eq!(output.router_scores.len(), 1, "one MoE layer");
            (output.logprobs.to_vec1::<f32>().unwrap(), output.entropy.to_vec1::<f32>().unwrap())
        };
        let together = logprobs(&tokens([1, 2, 3, 4, 5]), &tokens([2, 3, 9, 5, 6]), &[3, 2]);
        let first = logprobs(&tokens([1, 2, 3]), &tokens([2, 3, 9]), &[3]);
        let second = logprobs(&tokens([4, 5]), &tokens([5, 6]), &[2]);
        assert_eq!(together, ([first.0, second.0].concat(), [first.1, second.1].concat()));
    }

    #[test]
    fn a_handle_to_the_weights_sees_later_updates() {
        let config = mixed_config();
        let policy = policy(&config);
        let shared = policy.shared_weights();
        let (_, norm) = policy.vars().iter().find(|(name, _)| name == "model.norm.weight").unwrap();
        norm.set(&Tensor::full(2.0f32, 8, &Device::Cpu).unwrap()).unwrap();
        let mut values = Vec::new();
        for source in [&policy as &dyn TensorSource, &shared] {
            source.read("model.norm.weight", &mut values).unwrap();
            assert_eq!(values, [2.0; 8]);
            assert!(matches!(source.read("norm", &mut values), Err(ModelError::NoSuchTensor { .. })));
        }
    }

    #[test]
    fn tokens_and_lengths_beyond_the_model_are_refused() {
        let mut policy = policy(&config_with(serde_json::json!({ "max_position_embeddings": 3 })));
        let mut refusal = |tokens: &[TokenId], lengths: &[usize]| {
            let batch = Packed { tokens, targets: tokens, lengths };
            policy.logits(&batch, &mut Routing::Free).unwrap_err().to_string()
        };
        let vocabulary = "token 10 at position 1 is outside the vocabulary of 10";
        assert_eq!(refusal(&tokens([9, 10]), &[2]), vocabulary);
        let long = "a sequence of 4 tokens exceeds the model's 3 positions";
        assert_eq!(refusal(&tokens([1; 5]), &[1, 4]), long);
    }
}
