//! What reinforcement and supervised steps share: backward, gradients, update, version.

use candle_core::Tensor;
use r3_core::ids::PolicyVersion;
use r3_model::autograd::{Policy, PolicyOutput};

use crate::error::TrainError;
use crate::gradients::Gradients;
use crate::optimiser::{AdamW, AdamWConfig, Update};

/// The policy, its optimiser and the gradient between them.
pub(crate) struct Learner {
    pub(crate) policy: Policy,
    pub(crate) optimiser: AdamW,
    pub(crate) version: PolicyVersion,
    gradients: Gradients,
}

impl Learner {
    pub(crate) fn new(policy: Policy, config: AdamWConfig) -> Self {
        let optimiser = AdamW::new(policy.vars(), config);
        let gradients = Gradients::new(policy.zero_gradients());
        Self { policy, optimiser, version: PolicyVersion(0), gradients }
    }

    /// Adds the gradient of a micro-batch's loss of `output`, and returns the loss.
    pub(crate) fn add_gradient(&mut self, loss: &Tensor, output: &PolicyOutput) -> Result<f64, TrainError> {
        let value = loss.to_scalar::<f32>()?;
        if !value.is_finite() {
            return Err(TrainError::NonFinite { tensor: "the loss".into(), version: self.version });
        }
        self.policy.backward(output, &loss.backward()?, self.gradients.tensors_mut())?;
        Ok(value.into())
    }

    /// Starts an optimiser step: forgets the gradients of the last one, even if it failed half-way.
    pub(crate) fn start_step(&mut self) {
        self.gradients.zero();
    }

    /// Ends an optimiser step: updates the weights with the gradients added since it started.
    pub(crate) fn update(&mut self) -> Result<Update, TrainError> {
        let Self { policy, optimiser, version, gradients } = self;
        let update = policy.change(|vars| optimiser.update(vars, gradients, *version))?;
        self.version = self.version.next();
        Ok(update)
    }
}
