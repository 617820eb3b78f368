//! What reinforcement and supervised steps share: backward, gradients, update, version.

use candle_core::Tensor;
use r3_core::ids::PolicyVersion;
use r3_model::autograd::Policy;

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
        let gradients = Gradients::new(policy.vars());
        Self { policy, optimiser, version: PolicyVersion(0), gradients }
    }

    /// Adds the gradient of a micro-batch's loss, and returns the loss.
    pub(crate) fn add_gradient(&mut self, loss: &Tensor) -> Result<f64, TrainError> {
        let value = loss.to_scalar::<f32>()?;
        if !value.is_finite() {
            return Err(TrainError::NonFinite { tensor: "the loss".into(), version: self.version });
        }
        self.gradients.add(self.policy.vars(), &loss.backward()?)?;
        Ok(value.into())
    }

    /// One optimiser step with the gradients added since the last one.
    pub(crate) fn update(&mut self) -> Result<Update, TrainError> {
        let updated = self.optimiser.update(self.policy.vars(), &self.gradients, self.version);
        self.gradients.zero();
        let update = updated?;
        self.version = self.version.next();
        Ok(update)
    }

    /// Forgets gradients of an optimiser step that failed half-way.
    pub(crate) fn restart(&mut self) {
        self.gradients.zero();
    }
}
