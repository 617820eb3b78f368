//! What reinforcement and supervised steps share: backward, gradients, update, version.

use candle_core::Tensor;
use r3_core::ids::PolicyVersion;
use r3_model::autograd::gradients::Gradients;
use r3_model::autograd::{Policy, PolicyOutput};
use r3_recipe::learning::NonFinite;

use crate::error::TrainError;
use crate::optimiser::{Optimiser, OptimiserConfig, Update};

/// The policy, its optimiser and the gradient between them.
pub(crate) struct Learner {
    pub(crate) policy: Policy,
    pub(crate) optimiser: Optimiser,
    pub(crate) version: PolicyVersion,
    /// None where a step is neither made nor looked at: until then their memory is others'.
    pub(crate) gradients: Option<Gradients>,
    /// Whether a loss of this optimiser step was not finite.
    is_spoilt: bool,
}

/// What [`Learner::start_step`] sees to.
const STARTED: &str = "a step that was started has gradients";

impl Learner {
    pub(crate) fn new(policy: Policy, config: OptimiserConfig) -> Self {
        let optimiser = Optimiser::new(policy.vars(), config);
        Self { policy, optimiser, version: PolicyVersion(0), gradients: None, is_spoilt: false }
    }

    /// Adds the gradient of a micro-batch's loss of `output`. Whether it could: a step whose loss is not finite is going to be
    /// skipped.
    ///
    /// # Errors
    /// If the loss is not finite and the run shall stop.
    pub(crate) fn add_gradient(&mut self, loss: &Tensor, output: &PolicyOutput) -> Result<bool, TrainError> {
        if !loss.to_scalar::<f32>()?.is_finite() {
            self.is_spoilt = true;
            self.skip_or_stop(TrainError::NonFinite { tensor: "the loss".into(), version: self.version })?;
            return Ok(false);
        }
        let gradients = self.gradients.as_mut().expect(STARTED);
        self.policy.backward(output, &loss.backward()?, gradients)?;
        Ok(true)
    }

    /// Starts an optimiser step: forgets the gradients of the last one, even if it failed half-way.
    pub(crate) fn start_step(&mut self) {
        match &mut self.gradients {
            Some(gradients) => gradients.zero(),
            none => *none = Some(self.policy.zero_gradients()),
        }
        self.is_spoilt = false;
    }

    /// Ends an optimiser step: updates the weights with the gradients added since it started. `None` if something was not
    /// finite and the step is skipped: then nothing has changed.
    ///
    /// # Errors
    /// If a gradient is not finite and the run shall stop.
    pub(crate) fn update(&mut self) -> Result<Option<Update>, TrainError> {
        let Self { policy, optimiser, version, gradients, is_spoilt } = self;
        if *is_spoilt {
            return Ok(None);
        }
        let gradients = gradients.as_mut().expect(STARTED);
        gradients.finish();
        match policy.change(|vars| optimiser.update(vars, gradients, *version)) {
            Ok(update) => {
                self.version = self.version.next();
                Ok(Some(update))
            }
            Err(error @ TrainError::NonFinite { .. }) => self.skip_or_stop(error).map(|()| None),
            Err(error) => Err(error),
        }
    }

    /// What the recipe says to something that is not finite.
    fn skip_or_stop(&self, error: TrainError) -> Result<(), TrainError> {
        match self.optimiser.non_finite() {
            NonFinite::Stop => Err(error),
            NonFinite::Skip => {
                tracing::warn!("{error}: no update is made of it");
                Ok(())
            }
        }
    }
}
