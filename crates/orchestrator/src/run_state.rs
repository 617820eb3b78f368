//! What a checkpoint keeps beside weights and optimiser: where the prompts stood, and under which recipe.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use r3_core::ids::{GroupId, PolicyVersion};
use r3_recipe::recipe::Recipe;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{RunError, io_at};
use crate::inputs::Inputs;

/// Of a checkpoint.
pub(crate) const FILE: &str = "run_state.json";

/// Keys that no resumed run may change: they decide what a prompt's number, a sample's key and the optimiser's state stand
/// for.
const FIXED: [&str; 7] =
    ["task", "run.seed", "model.tokenizer", "train.moments", "train.muon", "train.freeze", "train.lora"];

/// Keys that must stay while rollouts wait that were sampled under them.
const FIXED_BY_PENDING: [&str; 2] = ["rollout", "router_replay"];

/// A key that a resumed run has otherwise than the checkpoint. Values are JSON, or `nothing`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Dotted path.
    pub key: String,
    /// Value when the checkpoint was written.
    pub then: String,
    /// Value in the recipe it is resumed with.
    pub now: String,
}

impl Change {
    /// Whether it lies in one of `sections`, or is one.
    fn is_in(&self, sections: &[&str]) -> bool {
        let below = |section| self.key.strip_prefix(section);
        sections.iter().filter_map(below).any(|rest| rest.is_empty() || rest.starts_with('.'))
    }
}

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
    /// What the recipe names, as it was.
    #[serde(default)]
    pub inputs: Inputs,
}

impl RunState {
    /// The state of a run of `recipe` that has given out `cursor` prompts, and `begun` of their groups under these
    /// versions without training on them. `inputs` is what it was started with.
    #[must_use]
    pub fn new(
        recipe: &Recipe,
        cursor: u64,
        begun: &BTreeMap<GroupId, PolicyVersion>,
        inputs: &Inputs,
    ) -> Self {
        let begun = begun.iter().map(|(group, version)| (group.0, version.0)).collect();
        Self { cursor, begun, recipe: to_json(recipe), inputs: inputs.clone() }
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

    /// What `recipe` has changed, key by key. All of the recipe may change but what gives the checkpoint its meaning.
    ///
    /// # Errors
    /// The first key that may not change, with both values.
    pub fn changes(&self, recipe: &Recipe) -> Result<Vec<Change>, RunError> {
        let mut changes = Vec::new();
        // Keys that the checkpoint's version of r3 did not have are as they are by default.
        let then = serde_json::from_value::<Recipe>(self.recipe.clone()).map(|recipe| to_json(&recipe));
        let then = then.unwrap_or_else(|_| self.recipe.clone());
        add_differences(String::new(), Some(&then), Some(&to_json(recipe)), &mut changes);
        let is_fixed = |change: &&Change| {
            change.is_in(&FIXED) || (!self.begun.is_empty() && change.is_in(&FIXED_BY_PENDING))
        };
        match changes.iter().find(is_fixed) {
            Some(change) => Err(RunError::RecipeChanged { change: change.clone() }),
            None => Ok(changes),
        }
    }
}

fn to_json(recipe: &Recipe) -> Value {
    serde_json::to_value(recipe).expect("a recipe is plain data")
}

/// Adds the dotted keys at and below `key` at which two values differ.
fn add_differences(key: String, then: Option<&Value>, now: Option<&Value>, changes: &mut Vec<Change>) {
    if then == now {
        return;
    }
    if let (Some(Value::Object(then)), Some(Value::Object(now))) = (then, now) {
        for inner in then.keys().chain(now.keys().filter(|key| !then.contains_key(*key))) {
            let key = if key.is_empty() { inner.clone() } else { format!("{key}.{inner}") };
            add_differences(key, then.get(inner), now.get(inner), changes);
        }
        return;
    }
    let text = |value: Option<&Value>| value.map_or_else(|| "nothing".to_owned(), Value::to_string);
    changes.push(Change { key, then: text(then), now: text(now) });
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixtures::recipe;

    /// What a run that was started with `started` and has `begun` these groups says to the recipe as it is.
    fn resumed(started: &[(&str, Value)], begun: &[(u64, u64)]) -> Result<Vec<Change>, RunError> {
        let begun = begun.iter().map(|&(group, version)| (GroupId(group), PolicyVersion(version))).collect();
        let mut state = RunState::new(&recipe(), 6, &begun, &Inputs::default());
        for (pointer, value) in started {
            *state.recipe.pointer_mut(pointer).unwrap_or_else(|| panic!("no {pointer}")) = value.clone();
        }
        state.changes(&recipe())
    }

    /// The change of `pointer` from `then` to what the recipe says.
    fn change(pointer: &str, then: &Value) -> Change {
        let now = to_json(&recipe()).pointer(pointer).unwrap().to_string();
        Change { key: pointer[1..].replace('/', "."), then: then.to_string(), now }
    }

    fn refused(started: &[(&str, Value)], begun: &[(u64, u64)]) -> Change {
        match resumed(started, begun) {
            Err(RunError::RecipeChanged { change }) => change,
            other => panic!("{started:?}: {other:?}"),
        }
    }

    #[test]
    fn what_gives_the_checkpoint_its_meaning_is_refused_by_its_dotted_key() {
        for (pointer, then) in [
            ("/run/seed", json!(9)),
            ("/task/arithmetic/digits", json!(3)),
            ("/train/muon", json!({ "momentum": 0.95, "nesterov": true, "iterations": 5 })),
            ("/train/moments", json!("8bit")),
            ("/train/freeze", json!(["*.mlp.gate.weight"])),
            ("/train/lora", json!({ "rank": 4, "alpha": 8.0, "targets": ["*_proj.weight"] })),
        ] {
            assert_eq!(refused(&[(pointer, then.clone())], &[]), change(pointer, &then));
        }
        assert_eq!(refused(&[("/train/lr", json!(1.0)), ("/run/seed", json!(9))], &[]).key, "run.seed");
    }

    #[test]
    fn what_pending_rollouts_were_sampled_under_stays_until_they_are_trained_on() {
        for (pointer, then) in [
            ("/rollout/temperature", json!(0.5)),
            ("/rollout/group_size", json!(9)),
            ("/router_replay/mode", json!("off")),
        ] {
            let started = [(pointer, then.clone())];
            assert_eq!(refused(&started, &[(39, 8)]), change(pointer, &then));
            assert_eq!(resumed(&started, &[]).unwrap(), [change(pointer, &then)]);
        }
        assert!(resumed(&[("/train/lr", json!(1.0))], &[(39, 8)]).is_ok());
    }

    #[test]
    fn every_other_change_is_named() {
        assert_eq!(resumed(&[], &[]).unwrap(), []);
        let started =
            [("/engine/kv_memory", json!("1GiB")), ("/run/steps", json!(2)), ("/train/lr", json!(1.0))];
        let mut named = resumed(&started, &[]).unwrap();
        named.sort_by(|a, b| a.key.cmp(&b.key));
        assert_eq!(named, started.map(|(pointer, then)| change(pointer, &then)));
        let grpo = resumed(&[("/algorithm", json!({ "grpo": { "clip": 0.2 } }))], &[]).unwrap();
        assert_eq!((&*grpo[0].key, &*grpo[0].now), ("algorithm.grpo", "nothing"));
        assert_eq!((&*grpo[1].key, &*grpo[1].then), ("algorithm.dapo", "nothing"));
    }

    #[test]
    fn a_key_that_the_checkpoint_does_not_know_is_its_default() {
        let mut state = RunState::new(&recipe(), 6, &BTreeMap::new(), &Inputs::default());
        let train = state.recipe["train"].as_object_mut().unwrap();
        train.remove("freeze").unwrap();
        train.remove("lr").unwrap();
        assert_eq!(state.changes(&recipe()).unwrap(), []);
    }

    #[test]
    fn a_key_is_not_in_a_section_whose_name_it_begins_with() {
        let task = Change { key: "tasks.x".into(), then: String::new(), now: String::new() };
        assert!(!task.is_in(&FIXED));
    }

    #[test]
    fn a_state_reads_back_as_it_was_written_and_a_damaged_one_is_refused_by_path() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(RunState::read(dir.path()), Err(RunError::Io { .. })));
        let begun = BTreeMap::from([(GroupId(39), PolicyVersion(8))]);
        let state = RunState::new(&recipe(), 41, &begun, &Inputs::of_run(None));
        state.write(dir.path()).unwrap();
        assert_eq!(RunState::read(dir.path()).unwrap(), state);
        fs::write(dir.path().join(FILE), "{\"cursor\": 41}").unwrap();
        let Err(RunError::RunState { path, .. }) = RunState::read(dir.path()) else { panic!("half a state") };
        assert_eq!(path, dir.path().join(FILE));
    }
}
