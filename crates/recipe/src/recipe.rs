//! Whole recipes, and how they are read.
//!
//! Paths inside a recipe, like the recipe's own, are relative to the current directory.

use std::fs;
use std::io::Read as _;
use std::path::Path;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::algorithm::Algorithm;
use crate::check::Rule;
use crate::error::{Problem, RecipeError};
use crate::learning::{Sft, Train};
use crate::numerics::Numerics;
use crate::objective::ObjectiveTerms;
use crate::place::{Place, Source, Spot};
use crate::reader;
use crate::reference;
use crate::rollout::{Engine, Refit, Rollout, RouterReplay};
use crate::run::{Eval, Metrics, Ring, Run, SftRun};
use crate::task::{Model, NewOrExistingModel, Task};
use crate::tree::{Fault, Node, Value};

/// The largest file that is read as a recipe.
const MAX_BYTES: u64 = 1 << 18;

/// More parts than any dotted key has.
const MAX_STEPS: usize = 8;

/// What `r3 run` needs to know, all of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// The policy to start from.
    pub model: Model,
    /// Where prompts come from and how completions are judged.
    pub task: Task,
    /// What is sampled for every batch.
    pub rollout: Rollout,
    /// Memory and batching of the rollout engine.
    #[serde(default)]
    pub engine: Engine,
    /// Whether the trainer takes the experts the rollout took.
    #[serde(default)]
    pub router_replay: RouterReplay,
    /// Orders of sums; by default `exact` if `rollout.dtype` is `train.dtype`, else `fast`.
    #[serde(default)]
    pub numerics: Option<Numerics>,
    /// Advantage, ratio, surrogate and mean.
    pub algorithm: Algorithm,
    /// What is added to them, or taken in their place.
    #[serde(default)]
    pub objective: ObjectiveTerms,
    /// The optimiser and its batches.
    #[serde(default)]
    pub train: Train,
    /// How trained weights get into the engine.
    #[serde(default)]
    pub refit: Refit,
    /// Shared memory between engine and trainer.
    #[serde(default)]
    pub ring: Ring,
    /// Accuracy on held-out problems.
    #[serde(default)]
    pub eval: Eval,
    /// Where measurements go.
    #[serde(default)]
    pub metrics: Metrics,
    /// Length, seed and directory of the run.
    pub run: Run,
}

/// What `r3 sft` needs to know, all of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SftRecipe {
    /// Random weights, or a directory's.
    pub model: NewOrExistingModel,
    /// Where demonstrations come from.
    pub task: Task,
    /// The optimiser and its batches.
    pub sft: Sft,
    /// Seed and directory of the warm start.
    pub run: SftRun,
}

/// A checked recipe, with the text it was read from.
#[derive(Clone, Debug, PartialEq)]
pub struct Loaded<R> {
    /// What the text and the overrides say.
    pub recipe: R,
    /// The file's text, as it was.
    pub text: String,
}

impl Recipe {
    /// Reads the file `path`, puts `overrides` over it, each `key=value` with a dotted key and a YAML value as `--set`
    /// takes them, and checks the result.
    ///
    /// # Errors
    /// If the file cannot be read, is not YAML, or says something that cannot be run; with line, column and hint.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Loaded<Self>, RecipeError> {
        load(path, overrides)
    }

    /// Reads and checks `text`; `name` is shown in errors.
    ///
    /// # Errors
    /// As [`Recipe::load`].
    pub fn parse(text: &str, name: &str) -> Result<Self, RecipeError> {
        parse(text, name, &[])
    }

    /// The whole recipe as YAML, defaults included.
    ///
    /// # Panics
    /// If a path is not UTF-8, which no path from a recipe is.
    #[must_use]
    pub fn to_yaml(&self) -> String {
        serde_saphyr::to_string(self).expect("a recipe is plain data")
    }

    /// [`Self::numerics`] with its default: sums can only agree where both sides compute in one dtype.
    #[must_use]
    pub fn resolved_numerics(&self) -> Numerics {
        let same_dtype = self.rollout.dtype == self.train.dtype;
        self.numerics.unwrap_or(if same_dtype { Numerics::Exact } else { Numerics::Fast })
    }
}

impl SftRecipe {
    /// Reads a file as [`Recipe::load`] does.
    ///
    /// # Errors
    /// As [`Recipe::load`].
    pub fn load(path: &Path, overrides: &[String]) -> Result<Loaded<Self>, RecipeError> {
        load(path, overrides)
    }

    /// Reads and checks `text`; `name` is shown in errors.
    ///
    /// # Errors
    /// As [`Recipe::load`].
    pub fn parse(text: &str, name: &str) -> Result<Self, RecipeError> {
        parse(text, name, &[])
    }

    /// The whole recipe as YAML, defaults included.
    ///
    /// # Panics
    /// If a path is not UTF-8, which no path from a recipe is.
    #[must_use]
    pub fn to_yaml(&self) -> String {
        serde_saphyr::to_string(self).expect("a recipe is plain data")
    }
}

/// A kind of recipe.
trait Checked: DeserializeOwned + JsonSchema {
    /// A section that only the other kind has, and the command that reads it.
    const OTHER: (&'static str, &'static str);

    fn rules(&self) -> Result<(), Rule>;
}

impl Checked for Recipe {
    const OTHER: (&'static str, &'static str) = ("sft", "r3 sft");

    fn rules(&self) -> Result<(), Rule> {
        self.check()
    }
}

impl Checked for SftRecipe {
    const OTHER: (&'static str, &'static str) = ("rollout", "r3 run");

    fn rules(&self) -> Result<(), Rule> {
        self.check()
    }
}

fn load<R: Checked>(path: &Path, overrides: &[String]) -> Result<Loaded<R>, RecipeError> {
    let name = path.display().to_string();
    let unreadable = |source| RecipeError::Read { path: path.into(), source };
    let mut bytes = Vec::new();
    let file = fs::File::open(path).map_err(unreadable)?;
    // A pipe or a device has no length to ask for.
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(RecipeError::TooLarge { name, max_bytes: MAX_BYTES });
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let bytes = error.as_bytes();
        let line = 1 + bytes[..at].iter().filter(|&&byte| byte == b'\n').count();
        RecipeError::NotUtf8 { path: path.into(), line, byte: bytes[at] }
    })?;
    Ok(Loaded { recipe: parse(&text, &name, overrides)?, text })
}

fn parse<R: Checked>(text: &str, name: &str, overrides: &[String]) -> Result<R, RecipeError> {
    if text.len() as u64 > MAX_BYTES {
        return Err(RecipeError::TooLarge { name: name.into(), max_bytes: MAX_BYTES });
    }
    let mut sources = vec![Source { name, text: text.strip_prefix('\u{feff}').unwrap_or(text) }];
    sources.extend(overrides.iter().map(|argument| Source { name: "--set", text: argument }));
    let invalid = |Fault { problem, spot }| RecipeError::Invalid {
        problem,
        place: spot.map(|spot| Box::new(Place::new(&sources, spot))),
    };
    let mut root = Node::parse(sources[0].text, 0).map_err(invalid)?;
    if matches!(root.value, Value::Null) && overrides.is_empty() {
        return Err(RecipeError::Empty { name: name.into() });
    }
    for (i, argument) in overrides.iter().enumerate() {
        let (path, value) = split_override(argument)?;
        let width = path.chars().count();
        // Spaces in place of `key=`, so that columns are those of the argument.
        let node = Node::parse(&format!("{}{value}", " ".repeat(width + 1)), i + 1).map_err(invalid)?;
        root.set(path, node, Spot { source: i + 1, line: 1, column: 1, width }).map_err(invalid)?;
    }
    if let Some(spot) = root.find(R::OTHER.0) {
        return Err(invalid(Fault::new(Problem::OtherCommand { command: R::OTHER.1 }, Some(spot))));
    }
    let recipe: R = reader::read(&root).map_err(|mut fault| {
        if let Problem::UnknownKey { path, elsewhere, .. } = &mut *fault.problem {
            *elsewhere = reference::paths_of_key::<R>(path);
        }
        invalid(fault)
    })?;
    recipe.rules().map_err(|rule| {
        let spot = rule.paths().into_iter().find_map(|path| root.find(path));
        invalid(Fault::new(rule.into(), spot))
    })?;
    Ok(recipe)
}

fn split_override(argument: &str) -> Result<(&str, &str), RecipeError> {
    let bad = |reason| RecipeError::BadOverride { argument: argument.into(), reason };
    let (path, value) = argument.split_once('=').ok_or_else(|| bad("has no `=`"))?;
    if path.split('.').any(|step| step.is_empty() || step.contains(char::is_whitespace)) {
        return Err(bad("does not begin with a dotted key"));
    }
    if path.split('.').count() > MAX_STEPS {
        return Err(bad("has a longer key than there is"));
    }
    Ok((path, value))
}
