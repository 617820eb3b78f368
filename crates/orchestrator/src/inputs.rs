//! What a run was started with and its recipe only names: files can change while a run rests.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use r3_kernels::gemm::Dtype;
use r3_model::autograd::Policy;
use r3_model::config::ModelConfig;
use r3_model::source::{hash_tensors, model_hash};
use r3_tasks::dataset::Dataset;
use r3_tasks::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};

use crate::error::RunError;

/// Problems and reference policy as hashes, and the clock of the first start. What a checkpoint does not say, it does not hold
/// a resumed run to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Inputs {
    /// When the run was started, in seconds since 1970, if its chat template asks for the time: it is told this one on any day
    /// that the run is resumed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_unix_s: Option<u64>,
    /// XXH3-64 of all problems in their order, as 16 hexadecimal digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problems: Option<String>,
    /// The reference policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference: Option<Reference>,
}

/// A reference policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reference {
    /// Where it lies. A recipe that names another directory names another policy, and is told so.
    pub path: PathBuf,
    /// One hash over its weights, as 16 hexadecimal digits.
    pub model_hash: String,
}

impl Inputs {
    /// Of a run that starts now, or goes on from a checkpoint that says `then`.
    #[must_use]
    pub fn of_run(then: Option<&Self>) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let then = then.cloned().unwrap_or_default();
        Self { started_unix_s: then.started_unix_s.or(Some(now)), ..then }
    }

    /// What a chat template is told the time is.
    #[must_use]
    pub fn started(&self) -> SystemTime {
        self.started_unix_s.map_or_else(SystemTime::now, |seconds| UNIX_EPOCH + Duration::from_secs(seconds))
    }

    /// Notes the problems of the run, and whether the clock had to do with them.
    ///
    /// # Errors
    /// If it was started with others: a prompt's number would stand for another one, and held-out ones might be trained on.
    pub fn note_problems(&mut self, dataset: &Dataset, tokenizer: &Tokenizer) -> Result<(), RunError> {
        self.started_unix_s = self.started_unix_s.filter(|_| tokenizer.asks_for_the_time());
        let now = digits(dataset.digest());
        match self.problems.replace(now.clone()) {
            Some(then) if then != now => Err(RunError::OtherProblems),
            _ => Ok(()),
        }
    }

    /// Notes the reference policy of the run, which lies in `path`.
    ///
    /// # Errors
    /// If it was started with one of other weights that lay there, or a weight cannot be read.
    pub fn note_reference(
        &mut self,
        path: &Path,
        config: &ModelConfig,
        policy: &Policy,
    ) -> Result<(), RunError> {
        let model_hash = digits(model_hash(&hash_tensors(config, policy, Dtype::F32)?));
        let now = Reference { path: path.into(), model_hash };
        match self.reference.replace(now.clone()) {
            Some(then) if then.path == now.path && then != now => {
                Err(RunError::OtherReference { path: now.path })
            }
            _ => Ok(()),
        }
    }
}

fn digits(hash: u64) -> String {
    format!("{hash:016x}")
}

#[cfg(test)]
mod tests {
    use r3_model::init::FreshWeights;

    use super::*;
    use crate::fixtures::{dataset, model, tokenizer};

    #[test]
    fn other_problems_are_refused_and_the_same_are_not() {
        let mut inputs = Inputs::of_run(None);
        inputs.note_problems(&dataset(), &tokenizer()).unwrap();
        inputs.note_problems(&dataset(), &tokenizer()).unwrap();
        let mut held_out = dataset();
        held_out.held_out.extend(held_out.train.pop());
        let mut turned = dataset();
        turned.train.reverse();
        let mut corrected = dataset();
        corrected.train[4].answer = "0".into();
        for other in [held_out, turned, corrected] {
            let error = inputs.clone().note_problems(&other, &tokenizer()).unwrap_err();
            assert!(matches!(error, RunError::OtherProblems), "{error}");
        }
    }

    #[test]
    fn other_weights_in_the_same_place_are_refused() {
        let config = model();
        let policy = |seed| Policy::load(&FreshWeights::new(&config, seed), &config).unwrap();
        let mut inputs = Inputs::of_run(None);
        let here = Path::new("here");
        inputs.note_reference(here, &config, &policy(1)).unwrap();
        inputs.note_reference(here, &config, &policy(1)).unwrap();
        let error = inputs.clone().note_reference(here, &config, &policy(2)).unwrap_err();
        assert_eq!(error.to_string(), "here is not the reference policy that the run was started with");
        inputs.note_reference(Path::new("there"), &config, &policy(2)).unwrap();
    }

    #[test]
    fn what_a_checkpoint_does_not_say_is_not_held_against_a_run() {
        let then: Inputs = serde_json::from_str("{}").unwrap();
        let mut inputs = Inputs::of_run(Some(&then));
        assert!(inputs.started().elapsed().unwrap() < Duration::from_secs(3600));
        inputs.note_problems(&dataset(), &tokenizer()).unwrap();
    }

    #[test]
    fn a_run_that_goes_on_keeps_the_clock_of_its_start_if_anybody_asks_for_the_time() {
        let then = Inputs { started_unix_s: Some(951_782_400), ..Inputs::default() };
        let mut again = Inputs::of_run(Some(&then));
        assert_eq!(again.started(), UNIX_EPOCH + Duration::from_secs(951_782_400));
        again.note_problems(&dataset(), &tokenizer()).unwrap();
        assert_eq!(again.started_unix_s, None);
    }
}
