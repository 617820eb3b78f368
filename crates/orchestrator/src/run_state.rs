//! What a checkpoint keeps beside weights and optimiser: where the prompts stood, and under which recipe.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use r3_core::ids::{GroupId, PolicyVersion};
use r3_recipe::recipe::Recipe;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{RunError, io_at};

const FILE: &str = "run_state.json";

/// Sections of a recipe that a resumed run may change: they decide how fast, how long and how observed a run is, not
/// what it learns. The checkpoint stands in for the model. Of `run`, [`RunState::check`] holds on to what matters.
const FREE_KEYS: [&str; 6] = ["engine", "ring", "eval", "metrics", "run", "model"];

/// `run_state.json` of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunState {
    /// Prompts given out.
    pub cursor: u64,
    /// Groups begun and not trained on, whose rollouts are kept beside this file, with the version that began each.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub begun: BTreeMap<u64, u64>,
    /// The recipe as it was run.
    pub recipe: Value,
}

impl RunState {
    /// The state of a run of `recipe` that has given out `cursor` prompts, and `begun` of their groups under these
    /// versions without training on them.
    #[must_use]
    pub fn new(recipe: &Recipe, cursor: u64, begun: &BTreeMap<GroupId, PolicyVersion>) -> Self {
        let begun = begun.iter().map(|(group, version)| (group.0, version.0)).collect();
        Self { cursor, begun, recipe: to_json(recipe) }
    }

    /// Writes the state into checkpoint `dir`.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, dir: &Path) -> Result<(), std::io::Error> {
        let text = serde_json::to_string_pretty(self).expect("plain data always serialises");
        fs::write(dir.join(FILE), text + "\n")
    }

    /// Reads the state of checkpoint `dir`.
    ///
    /// # Errors
    /// If it is missing or not what [`Self::write`] wrote.
    pub fn read(dir: &Path) -> Result<Self, RunError> {
        let path = dir.join(FILE);
        let text = fs::read_to_string(&path).map_err(io_at(&path))?;
        serde_json::from_str(&text).map_err(|source| RunError::RunState { path, source })
    }

    /// Refuses a recipe under which the run would not be the one it was.
    ///
    /// # Errors
    /// The first key that changed, with both values.
    pub fn check(&self, recipe: &Recipe) -> Result<(), RunError> {
        let now = to_json(recipe);
        let mut keys: Vec<String> = Vec::new();
        if let Value::Object(sections) = &now {
            keys.extend(sections.keys().filter(|key| !FREE_KEYS.contains(&key.as_str())).cloned());
        }
        keys.extend(["run.seed".into(), "model.tokenizer".into()]);
        if self.recipe.pointer("/train/schedule") != Some(&Value::from("constant")) {
            keys.push("run.steps".into());
        }
        for key in keys {
            let pointer = format!("/{}", key.replace('.', "/"));
            let (then, now) = (self.recipe.pointer(&pointer), now.pointer(&pointer));
            if let Some((key, then, now)) = first_difference(&key, then, now) {
                return Err(RunError::RecipeChanged { key, then, now });
            }
        }
        Ok(())
    }
}

fn to_json(recipe: &Recipe) -> Value {
    serde_json::to_value(recipe).expect("a recipe is plain data")
}

/// The first dotted key below `key` at which two values differ.
fn first_difference(
    key: &str,
    then: Option<&Value>,
    now: Option<&Value>,
) -> Option<(String, String, String)> {
    if then == now {
        return None;
    }
    if let (Some(Value::Object(then)), Some(Value::Object(now))) = (then, now) {
        let keys = then.keys().chain(now.keys().filter(|key| !then.contains_key(*key)));
        return keys
            .filter_map(|inner| first_difference(&format!("{key}.{inner}"), then.get(inner), now.get(inner)))
            .next();
    }
    let text = |value: Option<&Value>| value.map_or_else(|| "nothing".to_owned(), Value::to_string);
    Some((key.to_owned(), text(then), text(now)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixtures::recipe;

    /// What a run that was started with `changes` says to the recipe as it is.
    fn resumed(changes: &[(&str, Value)]) -> Result<(), RunError> {
        let mut state = RunState::new(&recipe(), 6, &BTreeMap::new());
        for (pointer, value) in changes {
            *state.recipe.pointer_mut(pointer).unwrap_or_else(|| panic!("no {pointer}")) = value.clone();
        }
        state.check(&recipe())
    }

    fn refused(changes: &[(&str, Value)]) -> (String, String, String) {
        match resumed(changes) {
            Err(RunError::RecipeChanged { key, then, now }) => (key, then, now),
            other => panic!("{changes:?}: {other:?}"),
        }
    }

    #[test]
    fn what_decides_what_is_learnt_is_refused_by_its_dotted_key() {
        for (pointer, then) in [
            ("/run/seed", json!(9)),
            ("/task/arithmetic/digits", json!(3)),
            ("/rollout/temperature", json!(0.5)),
            ("/rollout/groups", json!(3)),
            ("/rollout/over_sampling_groups", json!(1)),
            ("/refit/in_flight", json!("drain")),
            ("/rollout/stop_token_ids", json!([1])),
            ("/router_replay/mode", json!("off")),
            ("/algorithm/dapo/clip_high", json!(0.5)),
            ("/train/lr", json!(1.0)),
            ("/train/schedule", json!("linear")),
        ] {
            let now =
                RunState::new(&recipe(), 0, &BTreeMap::new()).recipe.pointer(pointer).unwrap().to_string();
            let key = pointer[1..].replace('/', ".");
            assert_eq!(refused(&[(pointer, then.clone())]), (key, then.to_string(), now));
        }
        let grpo = json!({ "grpo": { "clip": 0.2 } });
        assert_eq!(refused(&[("/algorithm", grpo)]).0, "algorithm.grpo");
    }

    #[test]
    fn a_key_that_came_or_went_is_refused_too() {
        let mut state = RunState::new(&recipe(), 0, &BTreeMap::new());
        state.recipe["rollout"].as_object_mut().unwrap().remove("top_p");
        let Err(RunError::RecipeChanged { key, then, .. }) = state.check(&recipe()) else {
            panic!("it came")
        };
        assert_eq!((&*key, &*then), ("rollout.top_p", "nothing"));
        state = RunState::new(&recipe(), 0, &BTreeMap::new());
        state.recipe["train"]["gone"] = json!(1);
        let Err(RunError::RecipeChanged { key, now, .. }) = state.check(&recipe()) else { panic!("it went") };
        assert_eq!((&*key, &*now), ("train.gone", "nothing"));
    }

    #[test]
    fn what_decides_speed_and_sight_is_free() {
        assert!(resumed(&[]).is_ok());
        for (pointer, then) in [
            ("/model/path", json!("elsewhere")),
            ("/engine/kv_memory", json!("1GiB")),
            ("/engine/prefix_cache", json!(false)),
            ("/ring/deadline_s", json!(1)),
            ("/eval/problems", json!(3)),
            ("/metrics/jsonl", json!(false)),
            ("/run/out", json!("elsewhere")),
            ("/run/save_every", json!(1)),
            ("/run/keep_last", json!(9)),
        ] {
            assert!(resumed(&[(pointer, then)]).is_ok(), "{pointer}");
        }
    }

    #[test]
    fn a_run_may_grow_longer_if_its_rate_does_not_depend_on_its_length() {
        assert!(resumed(&[("/run/steps", json!(2))]).is_ok());
        for schedule in ["linear", "cosine"] {
            let mut now = recipe();
            now.train.schedule = serde_json::from_value(json!(schedule)).unwrap();
            let mut state = RunState::new(&now, 0, &BTreeMap::new());
            assert!(state.check(&now).is_ok());
            state.recipe["run"]["steps"] = json!(2);
            match state.check(&now) {
                Err(RunError::RecipeChanged { key, then, now }) => {
                    assert_eq!((&*key, &*then, &*now), ("run.steps", "2", "4"));
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_state_reads_back_as_it_was_written_and_a_damaged_one_is_refused_by_path() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(RunState::read(dir.path()), Err(RunError::Io { .. })));
        let begun = BTreeMap::from([(GroupId(39), PolicyVersion(8))]);
        let state = RunState::new(&recipe(), 41, &begun);
        state.write(dir.path()).unwrap();
        assert_eq!(RunState::read(dir.path()).unwrap(), state);
        fs::write(dir.path().join(FILE), "{\"cursor\": 41}").unwrap();
        let Err(RunError::RunState { path, .. }) = RunState::read(dir.path()) else { panic!("half a state") };
        assert_eq!(path, dir.path().join(FILE));
    }
}
