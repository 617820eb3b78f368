//! The trainer's side of the model: the policy, its logprobs and their gradients.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use r3_core::ids::TokenId;
use r3_kernels::attention::packed::PackedSequence;
use r3_kernels::experts::Experts;
use r3_kernels::gemm::{Dtype, PackedMatrix};
use r3_kernels::lm_head::gradient::HeadGradient;
use r3_kernels::lm_head::kept::Kept;
use r3_kernels::lm_head::{Head, PlainHead, Scores, Targets, head_logprobs};
use r3_kernels::parallel;
use r3_kernels::router::Routing;
use r3_kernels::team::in_team;

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::executor::Weights;
use crate::forward::{forward, logits};
use crate::rows::Rows;
use crate::source::{Lent, TensorSource};

mod backward;
pub mod gradients;
mod params;
pub mod tape;
pub mod training;
mod values;

use backward::Backward;
use gradients::Gradients;
use params::{Copies, ParamId};
use tape::{FixedTensor, NodeId, Tape};
use training::Training;
use values::values;

/// Sequences packed one after the other, each starting after the positions it shares.
#[derive(Debug)]
pub struct PackedSequences {
    sequences: Vec<PackedSequence>,
    /// Packed tokens of each.
    lengths: Vec<usize>,
    /// Of every packed token.
    positions: Vec<u32>,
}

impl PackedSequences {
    /// The sequences of a batch.
    #[must_use]
    pub fn new(batch: &Packed<'_>) -> Self {
        let shared = batch.shared.iter().copied().chain(std::iter::repeat(0));
        let sequences: Vec<_> = batch
            .lengths
            .iter()
            .zip(shared)
            .map(|(&n_own, n_shared)| PackedSequence { n_shared, n_own })
            .collect();
        let positions = sequences.iter().flat_map(|one| (one.n_shared as u32..).take(one.n_own)).collect();
        Self { sequences, lengths: batch.lengths.to_vec(), positions }
    }
}

/// The policy being trained: f32 weights, and a forward whose gradients run back to what of them is trained.
///
/// Weights, logprobs and what losses make of them are candle tensors; between weights and logprobs lies a tape of our own
/// ([why](../../../docs/decisions/0020-a-tape-of-our-own.md)).
pub struct Policy {
    tape: Tape,
    weights: Weights<Tape>,
    last: Option<LastPass>,
    n_passes: u64,
}

/// What a gradient of the newest forward starts from.
struct LastPass {
    number: u64,
    /// Version of the weights it ran with.
    version: u64,
    attend: PackedSequences,
    targets: Vec<u32>,
    temperature: f32,
    /// Sizes and tokens of the sets that targets were scored over.
    kept: Option<(Vec<u32>, Vec<u32>)>,
    scores: HeadScores,
}

/// What the head found, `[T]` each.
struct HeadScores {
    logprobs: Vec<f32>,
    entropies: Vec<f32>,
    target_logits: Vec<f32>,
}

/// How a policy computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// What products round their operands to, as an engine of this dtype does. Weights, their gradients and all sums are
    /// f32.
    pub dtype: Dtype,
    /// Whether layers keep their input alone, and run again, on the same experts, when gradients need the rest: less
    /// memory for a third more work, and the same bits.
    pub recompute: bool,
}

impl Default for Precision {
    fn default() -> Self {
        Self { dtype: Dtype::F32, recompute: false }
    }
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
    /// Inputs before those of each sequence that are the first of its leader, the last sequence before it that shares
    /// none: the same tokens, on the same experts where they are replayed. Empty where no sequence shares any.
    pub shared: &'a [usize],
}

/// The distribution that targets are scored under.
#[derive(Clone, Copy, Debug)]
pub struct Scored<'a> {
    /// Divides the logits.
    pub temperature: f32,
    /// The tokens that each target is scored over; `None` for all of the vocabulary.
    pub kept: Option<Kept<'a>>,
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
    /// Per MoE layer, what was run.
    pub ran: Vec<RanExperts>,
    /// Which forward it is of.
    number: u64,
}

/// The experts of one MoE layer in one pass, whoever chose them.
#[derive(Clone, Debug, PartialEq)]
pub struct RanExperts {
    /// `[T, K]`.
    pub ids: Box<[u16]>,
    /// `[T, K]`.
    pub gates: Box<[f32]>,
}

impl Policy {
    /// Reads every tensor of `source` as f32, to compute with the default precision.
    ///
    /// # Errors
    /// If a tensor cannot be read.
    pub fn load(source: &dyn TensorSource, config: &ModelConfig) -> Result<Self, ModelError> {
        let mut tape = Tape::new(config);
        let weights = in_team(|| Weights::load(&mut tape, config, source))?;
        Ok(Self { tape, weights, last: None, n_passes: 0 })
    }

    /// The same policy, computing with `precision` from now on.
    #[must_use]
    pub fn with_precision(mut self, precision: Precision) -> Self {
        self.tape.set_precision(&self.weights.config, precision);
        self
    }

    /// The same policy, of which every weight is trained as `how` says of its name: all are, whole, if nobody says
    /// otherwise. Updates of low rank start at nothing, with an `A` of `seed`.
    ///
    /// # Errors
    /// If candle fails.
    ///
    /// # Panics
    /// If a weight that [`takes_low_rank`](training::takes_low_rank) refuses is to have one.
    pub fn with_training(mut self, how: impl Fn(&str) -> Training, seed: u64) -> Result<Self, ModelError> {
        self.tape.clear();
        self.tape.params.set_training(how, seed)?;
        Ok(self)
    }

    /// The model's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.weights.config
    }

    /// Every trained tensor by name, in the canonical order of the weights: a weight of that name, or a factor of its
    /// update. Biases of routers are none. Whoever changes them goes through [`Self::change`].
    #[must_use]
    pub fn vars(&self) -> &[(String, Var)] {
        self.tape.params.trained()
    }

    /// Every weight by canonical name, in canonical order, as the forward takes them: updates are merged.
    #[must_use]
    pub fn weights(&self) -> &[(String, Var)] {
        self.tape.params.weights()
    }

    /// Changes what is trained, and then the weights that follow from it.
    pub fn change<R: Send>(&mut self, body: impl FnOnce(&[(String, Var)]) -> R + Send) -> R {
        let result = in_team(|| body(self.tape.params.trained()));
        self.tape.params.changed();
        result
    }

    /// Replaces everything that is trained by what `source` has under its names.
    ///
    /// # Errors
    /// If a tensor cannot be read, or is of another length.
    pub fn read_trained(&mut self, source: &dyn TensorSource) -> Result<(), ModelError> {
        let mut values = Vec::new();
        let read = self.tape.params.trained().iter().try_for_each(|(name, var)| {
            source.read(name, &mut values)?;
            Ok(var.set(&Tensor::from_slice(&values, var.shape(), &Device::Cpu)?)?)
        });
        self.tape.params.changed();
        read
    }

    /// Zero gradients, one for each of [`Self::vars`], in memory that is written here: a block that is asked for as zeros begins
    /// as unmapped pages, and mapping those of every step costs more than writing does.
    #[must_use]
    pub fn zero_gradients(&self) -> Gradients {
        let sizes: Vec<usize> = self.vars().iter().map(|(_, var)| var.elem_count()).collect();
        let mut zeros = vec![Vec::new(); sizes.len()];
        let mean = sizes.iter().sum::<usize>() / sizes.len().max(1);
        in_team(|| {
            parallel::for_rows(&mut zeros, 1, mean, |first, zeros| {
                for (zeros, &size) in zeros.iter_mut().zip(&sizes[first..]) {
                    zeros.reserve_exact(size);
                    zeros.resize(size, 0.0);
                }
            });
        });
        Gradients::new(zeros)
    }

    /// Logits `[T, V]` of packed sequences. What is trained on are [`Self::logprobs`], which never hold so many.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, a sequence is too long, or candle fails.
    pub fn logits(&mut self, batch: &Packed<'_>, routing: &mut Routing<'_>) -> Result<Tensor, ModelError> {
        let hidden = self.hidden(batch, routing, &mut PackedSequences::new(batch))?;
        let logits = logits(&mut self.tape, &self.weights, &hidden)?;
        let values = self.tape.values(logits).to_vec();
        Ok(Tensor::from_vec(values, (batch.tokens.len(), self.weights.config.vocab_size), &Device::Cpu)?)
    }

    fn hidden(
        &mut self,
        batch: &Packed<'_>,
        routing: &mut Routing<'_>,
        attend: &mut PackedSequences,
    ) -> Result<NodeId, ModelError> {
        let max_positions = self.weights.config.max_positions;
        let lengths = attend.sequences.iter().map(|sequence| sequence.len());
        if let Some(tokens) = lengths.into_iter().find(|length| *length > max_positions) {
            return Err(ModelError::TooLong { tokens, max_positions });
        }
        (self.last, self.n_passes) = (None, self.n_passes + 1);
        self.tape.clear();
        forward(&mut self.tape, &self.weights, batch.tokens, attend, routing)
    }

    /// The head's weight: the embedding table if it is tied.
    fn head(&self) -> ParamId {
        self.weights.head.unwrap_or(self.weights.embed).weight
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
        self.logprobs_of(batch, routing, Scored { temperature, kept: None })
    }

    /// [`Self::logprobs`] of a distribution that may be truncated.
    ///
    /// # Errors
    /// As [`Self::logits`].
    ///
    /// # Panics
    /// If a kept set does not ascend, lacks its target or leaves the vocabulary.
    pub fn logprobs_of(
        &mut self,
        batch: &Packed<'_>,
        routing: &mut Routing<'_>,
        Scored { temperature, kept }: Scored<'_>,
    ) -> Result<PolicyOutput, ModelError> {
        let mut attend = PackedSequences::new(batch);
        let targets: Vec<u32> = batch.targets.iter().map(|token| token.0).collect();
        let [mut logprobs, mut entropies, mut target_logits] = [(); 3].map(|()| vec![0.0; targets.len()]);
        // A pass is hundreds of parallel sections, for each of which threads would otherwise be woken.
        in_team(|| {
            let (hidden, head) = (self.hidden(batch, routing, &mut attend)?, self.head());
            let Tape { params, nodes, .. } = &self.tape;
            let (weight, dtype) = (params.values(head)?, params.dtype(head));
            let (_, width) = params.shape(head)?;
            let (copy, plain) = (params.packed_matrix(head), PlainHead { weight: &weight, width, dtype });
            head_logprobs(
                nodes[hidden.0].rows.values(),
                copy.as_deref().map_or(Head::Plain(plain), Head::Packed),
                Targets { ids: &targets, temperature, kept },
                Scores {
                    logprobs: &mut logprobs,
                    entropies: &mut entropies,
                    target_logits: &mut target_logits,
                },
            );
            Ok::<_, ModelError>(())
        })?;
        let leaf =
            |values: &[f32], shape: &[usize]| Ok(Var::from_slice(values, shape, &Device::Cpu)?.into_inner());
        let shape = [targets.len(), self.weights.config.n_experts];
        let output = PolicyOutput {
            logprobs: leaf(&logprobs, &shape[..1])?,
            entropy: leaf(&entropies, &shape[..1])?,
            router_scores: self
                .tape
                .router_scores
                .iter()
                .map(|scores| leaf(scores, &shape))
                .collect::<Result<_, ModelError>>()?,
            ran: std::mem::take(&mut self.tape.ran),
            number: self.n_passes,
        };
        self.last = Some(LastPass {
            number: self.n_passes,
            version: self.tape.params.version(),
            attend,
            targets,
            temperature,
            kept: kept.map(|Kept { sizes, ids }| (sizes.to_vec(), ids.to_vec())),
            scores: HeadScores { logprobs, entropies, target_logits },
        });
        Ok(output)
    }

    /// [`Self::logprobs_of`] for its values alone: no gradient can run back, so the activations of one layer are kept.
    ///
    /// # Errors
    /// As [`Self::logits`].
    ///
    /// # Panics
    /// As [`Self::logprobs_of`].
    pub fn measure(
        &mut self,
        batch: &Packed<'_>,
        routing: &mut Routing<'_>,
        scored: Scored<'_>,
    ) -> Result<PolicyOutput, ModelError> {
        self.tape.is_learning = false;
        let output = self.logprobs_of(batch, routing, scored);
        (self.tape.is_learning, self.last) = (true, None);
        output
    }

    /// Adds the gradients of a loss to `gradients`, one for each of [`Self::vars`]: `of_output` holds those with respect
    /// to what `output` holds, which is used up.
    ///
    /// # Errors
    /// If candle fails.
    ///
    /// # Panics
    /// If `output` is not that of the newest forward, that was [`Self::measure`], or the weights have changed since.
    pub fn backward(
        &mut self,
        output: &PolicyOutput,
        of_output: &GradStore,
        gradients: &mut Gradients,
    ) -> Result<(), ModelError> {
        let mut last =
            self.last.take().filter(|last| last.number == output.number).expect("the newest forward");
        assert_eq!(last.version, self.tape.params.version(), "weights have changed since the forward");
        let values = |tensor: &Tensor| -> Result<Option<Vec<f32>>, ModelError> {
            let grad = of_output.get(tensor).map(|grad| grad.flatten_all()?.to_vec1());
            Ok(grad.transpose()?)
        };
        let of_logprobs = values(&output.logprobs)?.unwrap_or_else(|| vec![0.0; last.targets.len()]);
        let of_entropies = values(&output.entropy)?.unwrap_or_else(|| vec![0.0; last.targets.len()]);
        let score_grads = output.router_scores.iter().map(values);
        let score_grads: Vec<Option<Vec<f32>>> = score_grads.collect::<Result<_, ModelError>>()?;
        in_team(|| {
            self.head_backward(&last, (&of_logprobs, &of_entropies), gradients.tensors_mut())?;
            let (weights, attend) = (&self.weights, &mut last.attend);
            Backward { weights, attend, score_grads: &score_grads, gradients }.run(&mut self.tape, 0)
        })
    }

    /// The gradients of the head, and of the hidden states on top of the tape.
    fn head_backward(
        &mut self,
        last: &LastPass,
        of_scores: (&[f32], &[f32]),
        gradients: &mut [Vec<f32>],
    ) -> Result<(), ModelError> {
        let id = self.head();
        let Tape { params, nodes, pool, .. } = &mut self.tape;
        let top = nodes.last_mut().expect("a forward leaves its hidden states");
        let mut hidden_grad = top.learns.then(|| {
            let mut grad = pool.take(top.rows.rows(), top.rows.width());
            grad.values_mut().fill(0.0);
            grad
        });
        let weight_grad = params.learning(id).whole(gradients);
        let (weight, dtype) = (params.values(id)?, params.dtype(id));
        let (_, width) = params.shape(id)?;
        let gradient = HeadGradient {
            hidden: top.rows.values(),
            head: PlainHead { weight: &weight, width, dtype },
            targets: Targets {
                ids: &last.targets,
                temperature: last.temperature,
                kept: last.kept.as_ref().map(|(sizes, ids)| Kept { sizes, ids }),
            },
            logprobs: &last.scores.logprobs,
            entropies: &last.scores.entropies,
            target_logits: &last.scores.target_logits,
            lengths: &last.attend.lengths,
        };
        gradient.add(of_scores, (hidden_grad.as_mut().map(Rows::values_mut), weight_grad));
        top.grad = hidden_grad.map(Arc::new);
        Ok(())
    }
}

impl TensorSource for Policy {
    fn read(&self, name: &str, out: &mut Vec<f32>) -> Result<(), ModelError> {
        read_weight((self.weights(), &self.tape.fixed), name, out)
    }

    fn lend(&self, name: &str) -> Option<Lent<'_>> {
        find_weight((self.weights(), &self.tape.fixed), name).ok()
    }
}

/// The policy's weights, to be loaded on another thread while the trainer waits. What is read shares the trainer's memory, so
/// a later optimiser step shows through.
#[derive(Clone, Debug, Default)]
pub struct SharedWeights {
    weights: Vec<(String, Var)>,
    fixed: Vec<FixedTensor>,
    copies: Copies,
}

impl Policy {
    /// A handle to the weights. An engine packs what it loads beside what it has, so as much memory of activations is given
    /// back, and a refit needs no more than a step did. If it computes in the policy's format, the policy computes with what it
    /// packed, until weights change.
    pub fn shared_weights(&mut self) -> SharedWeights {
        self.last = None;
        self.tape.give_back(self.tape.params.bytes());
        let copies = self.tape.params.copies();
        SharedWeights { weights: self.weights().to_vec(), fixed: self.tape.fixed.clone(), copies }
    }
}

impl TensorSource for SharedWeights {
    fn read(&self, name: &str, out: &mut Vec<f32>) -> Result<(), ModelError> {
        read_weight((&self.weights, &self.fixed), name, out)
    }

    fn lend(&self, name: &str) -> Option<Lent<'_>> {
        find_weight((&self.weights, &self.fixed), name).ok()
    }

    fn packed_matrix(&self, name: &str, matrix: &Arc<PackedMatrix>) {
        self.copies.held().matrices.insert(name.to_owned(), Arc::downgrade(matrix));
    }

    fn packed_experts(&self, down: &str, experts: &Arc<Experts>) {
        self.copies.held().experts.insert(down.to_owned(), Arc::downgrade(experts));
    }
}

fn read_weight(
    tensors: (&[(String, Var)], &[FixedTensor]),
    name: &str,
    out: &mut Vec<f32>,
) -> Result<(), ModelError> {
    out.clear();
    out.extend_from_slice(&find_weight(tensors, name)?);
    Ok(())
}

fn find_weight<'a>(
    (weights, fixed): (&'a [(String, Var)], &'a [FixedTensor]),
    name: &str,
) -> Result<Lent<'a>, ModelError> {
    if let Some(found) = fixed.iter().find(|tensor| tensor.name == name) {
        return Ok(Box::new(&*found.values));
    }
    let found = weights.iter().find(|(known, _)| known == name);
    let (_, var) = found.ok_or_else(|| ModelError::NoSuchTensor { name: name.to_owned() })?;
    Ok(Box::new(values(var)?))
}

#[cfg(test)]
mod frozen_tests;
#[cfg(test)]
mod tests;
