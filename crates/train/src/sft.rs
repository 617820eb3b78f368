//! The supervised step: makes a starting point for reinforcement learning out of demonstrations.

use std::ops::Range;

use candle_core::{Device, Tensor};
use r3_core::ids::TokenId;
use r3_kernels::route_record::RouteRecord;
use r3_kernels::router::Routing;
use r3_model::autograd::{Packed, Policy, PolicyOutput};
use r3_recipe::learning::Sft;

use crate::cut::Cutter;
use crate::error::TrainError;
use crate::learner::Learner;
use crate::loads::{Loads, load_balance};
use crate::optimiser::{OptimiserConfig, Update};

/// A demonstration: prompt, then answer.
#[derive(Clone, Copy, Debug)]
pub struct Example<'a> {
    /// Prompt and answer, end token included, `[T]`.
    pub tokens: &'a [TokenId],
    /// Index of the first answer token; at least 1.
    pub answer_start: usize,
}

/// What one supervised step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SftStats {
    /// Mean negative log-likelihood of an answer token, nats.
    pub loss: f64,
    /// Load-balancing loss before its weight; 1 is even. 0 when its weight is 0.
    pub load_balance: f64,
    /// Gradient norm before clipping.
    pub grad_norm: f64,
    /// Learning rate used.
    pub lr: f64,
    /// Tokens fed to the model.
    pub n_inputs: usize,
    /// Answer tokens.
    pub n_trained: usize,
}

/// Trains a policy on demonstrations.
pub struct SftTrainer {
    learner: Learner,
    load_balance: f64,
    micro_batch_tokens: usize,
    record: RouteRecord,
}

impl SftTrainer {
    /// A trainer that has made no step; a forward takes at most `micro_batch_tokens` inputs.
    #[must_use]
    pub fn new(policy: Policy, sft: &Sft, micro_batch_tokens: usize) -> Self {
        let record = RouteRecord::new(policy.config().route_dims().n_layers, policy.config().router());
        Self {
            learner: Learner::new(policy, OptimiserConfig::of_sft(sft)),
            load_balance: sft.load_balance,
            micro_batch_tokens,
            record,
        }
    }

    /// The policy being trained.
    #[must_use]
    pub fn policy(&self) -> &Policy {
        &self.learner.policy
    }

    /// One optimiser step on `examples`, in the order given: the mean over all answer tokens, plus the
    /// weighted load-balancing loss over all tokens.
    ///
    /// How examples are split into micro-batches changes no bit of the gradient: expert shares are those of the
    /// whole step, which takes a forward more when there are several.
    ///
    /// # Errors
    /// If an example has no prompt or no answer, or something is not finite; the weights are then untouched.
    pub fn step(&mut self, examples: &[Example<'_>]) -> Result<SftStats, TrainError> {
        for (example, Example { tokens, answer_start }) in examples.iter().enumerate() {
            if !(1..tokens.len()).contains(answer_start) {
                let (tokens, answer_start) = (tokens.len(), *answer_start);
                return Err(TrainError::EmptyAnswer { example, tokens, answer_start });
            }
        }
        self.learner.start_step();
        let n_inputs = examples.iter().map(|example| example.tokens.len() - 1).sum();
        let n_trained = examples.iter().map(|example| example.tokens.len() - example.answer_start).sum();
        let totals = Totals { n_inputs, n_trained };
        let mut cutter = Cutter::new(self.micro_batch_tokens);
        for (at, example) in examples.iter().enumerate() {
            cutter.add(at, example.tokens.len() - 1);
        }
        let micro_batches = cutter.finish();
        let mut loads = Loads::new(self.policy().config().route_dims());
        let several = micro_batches.len() > 1 && self.load_balance != 0.0;
        if several {
            for range in &micro_batches {
                self.forward(&examples[range.clone()], &mut loads)?;
            }
        }
        let (mut loss, mut balance) = (0.0, 0.0);
        for range in micro_batches {
            let known = several.then_some(&loads);
            let (nll, imbalance) = self.micro_step(examples, range, totals, known)?;
            loss += nll;
            balance += imbalance;
        }
        let Update { grad_norm, lr } = self.learner.update()?.expect("a warm start stops and never skips");
        Ok(SftStats { loss, load_balance: balance, grad_norm, lr, n_inputs, n_trained })
    }

    /// Adds the gradient of one micro-batch; returns its shares of both losses.
    fn micro_step(
        &mut self,
        examples: &[Example<'_>],
        range: Range<usize>,
        totals: Totals,
        known: Option<&Loads>,
    ) -> Result<(f64, f64), TrainError> {
        let examples = &examples[range];
        let mut own = Loads::new(self.policy().config().route_dims());
        let output = self.forward(examples, &mut own)?;
        let mask: Vec<f32> = examples
            .iter()
            .flat_map(|example| (1..example.tokens.len()).map(|target| target >= example.answer_start))
            .map(|trained| f32::from(u8::from(trained)))
            .collect();
        let mask = Tensor::new(mask, &Device::Cpu)?;
        let nll = ((&output.logprobs * mask)?.sum_all()? / -(totals.n_trained as f64))?;
        if self.load_balance == 0.0 {
            self.learner.add_gradient(&nll, &output)?;
            return Ok((nll.to_scalar::<f32>()?.into(), 0.0));
        }
        let scoring = self.learner.policy.config().scoring;
        let loads = known.unwrap_or(&own);
        let balance = load_balance(&output.router_scores, scoring, loads, totals.n_inputs as f64)?;
        self.learner.add_gradient(&(&nll + (&balance * self.load_balance)?)?, &output)?;
        Ok((nll.to_scalar::<f32>()?.into(), balance.to_scalar::<f32>()?.into()))
    }

    /// Logprobs of all targets and router scores of every layer; adds the experts taken to `loads` if they are
    /// needed.
    fn forward(&mut self, examples: &[Example<'_>], loads: &mut Loads) -> Result<PolicyOutput, TrainError> {
        let flat = |part: fn(&[TokenId]) -> &[TokenId]| -> Vec<TokenId> {
            examples.iter().flat_map(|example| part(example.tokens)).copied().collect()
        };
        let tokens = flat(|tokens| &tokens[..tokens.len() - 1]);
        let targets = flat(|tokens| &tokens[1..]);
        let lengths: Vec<usize> = examples.iter().map(|example| example.tokens.len() - 1).collect();
        let packed = Packed { tokens: &tokens, targets: &targets, lengths: &lengths, shared: &[] };
        if self.load_balance == 0.0 {
            return Ok(self.learner.policy.logprobs(&packed, &mut Routing::Free, 1.0)?);
        }
        self.record.start(tokens.len());
        let output = self.learner.policy.logprobs(&packed, &mut Routing::Record(&mut self.record), 1.0)?;
        let uses = vec![1; tokens.len()];
        for layer in 0..loads.n_layers() {
            loads.add(layer, &self.record.layer(layer), &uses);
        }
        Ok(output)
    }
}

/// Denominators of a step.
#[derive(Clone, Copy)]
struct Totals {
    n_inputs: usize,
    n_trained: usize,
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixtures::tiny_policy;
    use crate::optimiser::Moments;

    fn trainer(load_balance: f64, micro_batch_tokens: usize) -> SftTrainer {
        trainer_of(json!({ "load_balance": load_balance }), micro_batch_tokens)
    }

    /// With `changes` to what a recipe has to say.
    fn trainer_of(changes: Value, micro_batch_tokens: usize) -> SftTrainer {
        let mut sft = json!({ "steps": 50, "lr": 0.01 });
        sft.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        SftTrainer::new(tiny_policy(2), &serde_json::from_value(sft).unwrap(), micro_batch_tokens)
    }

    fn demonstrations() -> Vec<Vec<TokenId>> {
        [vec![1, 2, 3, 4], vec![5, 6, 7, 8, 9], vec![2, 4, 6], vec![12, 0, 1, 3, 3, 7]]
            .map(|tokens| tokens.into_iter().map(TokenId).collect())
            .into()
    }

    fn examples(demonstrations: &[Vec<TokenId>]) -> Vec<Example<'_>> {
        demonstrations.iter().map(|tokens| Example { tokens, answer_start: 2 }).collect()
    }

    fn moments(trainer: &SftTrainer) -> Vec<f32> {
        trainer.learner.optimiser.moments().iter().flat_map(|one| one.mean().to_vec()).collect()
    }

    #[test]
    fn the_loss_is_the_mean_over_answer_tokens() {
        let demonstrations = demonstrations();
        let mut trainer = trainer(0.01, 1000);
        let mut expected = 0.0;
        for tokens in &demonstrations {
            let n_inputs = tokens.len() - 1;
            let packed = Packed {
                tokens: &tokens[..n_inputs],
                targets: &tokens[1..],
                lengths: &[n_inputs],
                shared: &[],
            };
            let output = trainer.learner.policy.logprobs(&packed, &mut Routing::Free, 1.0).unwrap();
            let logprobs = output.logprobs.to_vec1::<f32>().unwrap();
            expected -= logprobs[1..].iter().map(|&logprob| f64::from(logprob)).sum::<f64>() / 10.0;
        }
        let stats = trainer.step(&examples(&demonstrations)).unwrap();
        assert!((stats.loss - expected).abs() < 1e-5, "{} is not {expected}", stats.loss);
        assert_eq!((stats.n_inputs, stats.n_trained), (14, 10));
        assert!(stats.load_balance > 0.0);
    }

    #[test]
    fn micro_batches_have_the_bits_of_the_whole_with_and_without_balance() {
        let demonstrations = demonstrations();
        for load_balance in [0.0, 0.5] {
            let mut whole = trainer(load_balance, 1000);
            let expected = whole.step(&examples(&demonstrations)).unwrap();
            for micro_batch_tokens in [1, 8] {
                let mut split = trainer(load_balance, micro_batch_tokens);
                let stats = split.step(&examples(&demonstrations)).unwrap();
                assert!((stats.loss - expected.loss).abs() < 1e-5);
                assert!((stats.load_balance - expected.load_balance).abs() < 1e-5);
                assert!(moments(&split) == moments(&whole), "{micro_batch_tokens} tokens, {load_balance}");
            }
        }
    }

    #[test]
    fn no_gradient_leaks_into_the_next_step() {
        let demonstrations = demonstrations();
        let mut trainer = trainer_of(json!({ "lr": 0.0 }), 8);
        let first = trainer.step(&examples(&demonstrations)).unwrap();
        assert_eq!(trainer.step(&examples(&demonstrations)).unwrap(), first);
    }

    #[test]
    fn demonstrations_are_learnt_whatever_the_moments_take() {
        let demonstrations = demonstrations();
        for moments in ["f32", "8bit"] {
            let mut trainer = trainer_of(json!({ "moments": moments }), 1000);
            let first = trainer.step(&examples(&demonstrations)).unwrap();
            for _ in 0..40 {
                trainer.step(&examples(&demonstrations)).unwrap();
            }
            let last = trainer.step(&examples(&demonstrations)).unwrap();
            assert!(last.loss < 0.3 * first.loss, "{moments}: {first:?} then {last:?}");
            let are_bytes = |one: &Moments| matches!(one, Moments::Bytes(_));
            assert!(
                trainer.learner.optimiser.moments().iter().all(|one| are_bytes(one) == (moments == "8bit"))
            );
        }
    }

    #[test]
    fn an_example_without_prompt_or_answer_is_refused() {
        let tokens = [TokenId(1), TokenId(2)];
        for answer_start in [0, 2] {
            let examples = [Example { tokens: &tokens, answer_start }];
            let error = trainer(0.0, 1000).step(&examples).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("example 0 has 2 tokens, of which the answer starts at {answer_start}")
            );
        }
    }
}
