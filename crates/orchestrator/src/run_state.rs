//! What a checkpoint keeps beside weights and optimiser: where the prompts stood, and under which recipe.

use std::fs;
use std::path::Path;

use r3_recipe::recipe::Recipe;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{RunError, io_at};

const FILE: &str = "run_state.json";

/// Keys of a recipe that a resumed run may change: they decide how fast, how long and how observed a run is, not
/// what it learns.
const FREE_KEYS: [&str; 6] = ["engine", "ring", "eval", "metrics", "run", "model"];

/// `run_state.json` of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunState {
    /// Prompts given out.
    pub cursor: u64,
    /// The recipe as it was run.
    pub recipe: Value,
}

impl RunState {
    /// The state of a run of `recipe` that has given out `cursor` prompts.
    #[must_use]
    pub fn new(recipe: &Recipe, cursor: u64) -> Self {
        Self { cursor, recipe: to_json(recipe) }
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
        keys.push("run.seed".into());
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
