//! What of a model is trained: the recipe's patterns, resolved to its weights.

use std::collections::BTreeMap;
use std::path::Path;

use r3_core::count::counted;
use r3_model::adapter::Adapter;
use r3_model::autograd::Policy;
use r3_model::autograd::training::{Training, takes_low_rank};
use r3_model::checkpoint::Checkpoint;
use r3_model::config::ModelConfig;
use r3_model::source::{SELECTION_BIAS, TensorSource, canonical_tensors};
use r3_recipe::learning::Train;
use r3_recipe::pattern::Pattern;
use r3_recipe::recipe::Recipe;
use r3_telemetry::progress::Progress;

use crate::error::RunError;
use crate::model_dir;
use crate::setup::{self, narrow};

/// How every weight of a model is trained.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingPlan {
    by_name: BTreeMap<String, Training>,
    rank: Option<usize>,
    /// Numbers the optimiser changes.
    pub n_trained: u64,
    /// Numbers the model has, without updates of low rank.
    pub n_total: u64,
}

impl TrainingPlan {
    /// Resolves the patterns of `train` to the weights of `model`. With `train.lora` its targets are trained, and nothing
    /// else; without, everything is. Either way, what `train.freeze` matches is not.
    ///
    /// # Errors
    /// If a pattern matches nothing it could be about, or nothing is left to train.
    pub fn new(train: &Train, model: &ModelConfig) -> Result<Self, RunError> {
        let mut tensors = canonical_tensors(model);
        // No optimiser changes those.
        tensors.retain(|(name, _)| !name.ends_with(SELECTION_BIAS));
        let names = || tensors.iter().map(|(name, _)| &**name);
        check("train.freeze", &train.freeze, names().collect())?;
        if let Some(lora) = &train.lora {
            check(
                "train.lora.targets",
                &lora.targets,
                names().filter(|name| takes_low_rank(name)).collect(),
            )?;
        }
        let is_in = |patterns: &[Pattern], name: &str| patterns.iter().any(|pattern| pattern.matches(name));
        let how = |name: &str| match &train.lora {
            _ if is_in(&train.freeze, name) => Training::Frozen,
            None => Training::Whole,
            Some(lora) if takes_low_rank(name) && is_in(&lora.targets, name) => {
                Training::LowRank { rank: lora.rank, scale: narrow(lora.alpha / lora.rank as f64) }
            }
            Some(_) => Training::Frozen,
        };
        let mut plan = Self {
            by_name: names().map(|name| (name.to_owned(), how(name))).collect(),
            rank: train.lora.as_ref().map(|lora| lora.rank),
            n_trained: 0,
            n_total: 0,
        };
        for (name, shape) in &tensors {
            let n_values = shape.iter().product::<usize>() as u64;
            plan.n_total += n_values;
            plan.n_trained += match plan.of(name) {
                Training::Frozen => 0,
                Training::Whole => n_values,
                Training::LowRank { rank, .. } => {
                    let [stack @ .., n, k] = &shape[..] else { unreachable!("a matrix or a stack of them") };
                    (stack.iter().product::<usize>() * rank * (n + k)) as u64
                }
            };
        }
        if plan.n_trained == 0 { Err(RunError::NothingTrained) } else { Ok(plan) }
    }

    /// How weight `name` is trained.
    ///
    /// # Panics
    /// If the model has no such weight.
    #[must_use]
    pub fn of(&self, name: &str) -> Training {
        self.by_name[name]
    }

    /// Whether all of the model is trained, whole.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.by_name.values().all(|how| *how == Training::Whole)
    }

    /// What is trained, for a person.
    #[must_use]
    pub fn line(&self) -> String {
        let Self { n_trained, n_total, .. } = self;
        let share = 100.0 * *n_trained as f64 / *n_total as f64;
        let how = self.rank.map(|rank| {
            let n_adapted = self.by_name.values().filter(|how| **how != Training::Frozen).count();
            format!(", as factors of rank {rank} of {}", counted(n_adapted, "weight"))
        });
        format!("training {n_trained} of {n_total} parameters ({share:.1} %){}", how.unwrap_or_default())
    }
}

/// Reads the policy to be trained as `plan` says: the recipe's model, or that of checkpoint `resumed`, which was verified.
/// With updates of low rank, it is the recipe's model with those of the checkpoint.
///
/// # Errors
/// If a file cannot be read, the weights of the recipe's model are not those that a run saved there, or that model with the
/// checkpoint's updates is not the checkpoint's, to the bit.
pub fn load_policy(
    recipe: &Recipe,
    plan: &TrainingPlan,
    resumed: Option<&Path>,
) -> Result<(ModelConfig, Policy), RunError> {
    let (adapted_dir, whole_dir) = if plan.rank.is_some() { (resumed, None) } else { (None, resumed) };
    let base = &recipe.model.path;
    let source = whole_dir.map_or_else(|| model_dir::open(base), |dir| Ok(Checkpoint::open(dir)?))?;
    let (config, policy) = setup::load_policy(&source, &Progress::stderr())?;
    let mut policy = policy.with_training(|name| plan.of(name), recipe.run.seed)?;
    if let Some(dir) = adapted_dir {
        let adapter = Adapter::load(dir)?.ok_or_else(|| RunError::NoAdapter { path: dir.to_path_buf() })?;
        policy.read_trained(&adapter)?;
        let (checkpoint, mut there, mut here) = (Checkpoint::open(dir)?, Vec::new(), Vec::new());
        for (name, _) in canonical_tensors(checkpoint.config()) {
            checkpoint.read(&name, &mut there)?;
            policy.read(&name, &mut here)?;
            if !there.iter().map(|value| value.to_bits()).eq(here.iter().map(|value| value.to_bits())) {
                return Err(RunError::OtherBase { path: base.clone(), tensor: name });
            }
        }
    }
    Ok((config, policy))
}

/// The updates of low rank of `policy`, if `recipe` trains any.
///
/// # Errors
/// If they cannot be copied.
pub fn adapter(recipe: &Recipe, policy: &Policy) -> Result<Option<Adapter>, RunError> {
    let Some(lora) = &recipe.train.lora else { return Ok(None) };
    let base = recipe.model.path.canonicalize().unwrap_or_else(|_| recipe.model.path.clone());
    Ok(Some(Adapter::new((lora.rank, lora.alpha), &base, policy.vars())?))
}

/// Refuses the first of `patterns` that matches none of `names`.
fn check(key: &'static str, patterns: &[Pattern], names: Vec<&str>) -> Result<(), RunError> {
    let lost = patterns.iter().find(|pattern| !names.iter().any(|name| pattern.matches(name)));
    let Some(pattern) = lost else { return Ok(()) };
    Err(RunError::NoSuchWeight { key, pattern: pattern.to_string(), nearest: pattern.nearest(names) })
}

#[cfg(test)]
mod tests {
    use r3_recipe::learning::Lora;

    use super::*;
    use crate::fixtures::{model, recipe};

    fn patterns(texts: &[&str]) -> Vec<Pattern> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn plan(freeze: &[&str], targets: Option<&[&str]>) -> Result<TrainingPlan, RunError> {
        let mut train = recipe().train;
        train.freeze = patterns(freeze);
        train.lora = targets.map(|targets| Lora { rank: 8, alpha: 16.0, targets: patterns(targets) });
        TrainingPlan::new(&train, &model())
    }

    #[test]
    fn everything_is_trained_unless_a_recipe_says_otherwise() {
        let all = plan(&[], None).unwrap();
        assert_eq!((all.n_trained, all.is_whole()), (all.n_total, true));
        assert_eq!(all.n_total, model().n_parameters() as u64);
    }

    #[test]
    fn a_frozen_router_is_8_layers_of_32_experts_less() {
        let plan = plan(&["*.mlp.gate.weight"], None).unwrap();
        let frozen = plan.by_name.iter().filter(|(_, how)| **how == Training::Frozen);
        let frozen: Vec<&str> = frozen.map(|(name, _)| &**name).collect();
        assert_eq!((frozen.len(), frozen[0]), (8, "model.layers.0.mlp.gate.weight"));
        let n_frozen = (8 * 32 * model().hidden_size) as u64;
        assert_eq!((plan.n_trained, plan.is_whole()), (plan.n_total - n_frozen, false));
    }

    #[test]
    fn an_adapter_trains_its_targets_and_nothing_else() {
        let plan = plan(&["model.layers.7.*"], Some(&["*.self_attn.{q,v}_proj.weight"])).unwrap();
        let trained: Vec<_> = plan.by_name.iter().filter(|(_, how)| **how != Training::Frozen).collect();
        assert_eq!(trained.len(), 14);
        assert!(trained.iter().all(|(_, how)| **how == Training::LowRank { rank: 8, scale: 2.0 }));
        let ModelConfig { hidden_size: d, n_heads, n_kv_heads, head_dim, .. } = model();
        let of_layer = 8 * (d + n_heads * head_dim) + 8 * (d + n_kv_heads * head_dim);
        assert_eq!(plan.n_trained, 7 * of_layer as u64);
        let share = 100.0 * plan.n_trained as f64 / plan.n_total as f64;
        let expected = format!(
            "training {} of {} parameters ({share:.1} %), as factors of rank 8 of 14 weights",
            plan.n_trained, plan.n_total
        );
        assert_eq!(plan.line(), expected);
    }

    #[test]
    fn factors_of_experts_are_counted_for_each() {
        let plan = plan(&[], Some(&["model.layers.0.mlp.experts.down_proj"])).unwrap();
        assert_eq!(plan.n_trained, (32 * 8 * (model().hidden_size + model().moe_inter)) as u64);
    }

    #[test]
    fn a_pattern_without_a_weight_is_refused_with_the_nearest_names() {
        let error = plan(&["*.mlp.gates.weight"], None).unwrap_err();
        assert_eq!(
            error.to_string(),
            "`train.freeze` holds `*.mlp.gates.weight`, which matches no weight of the model"
        );
        assert!(error.hint().contains("`model.layers.*.mlp.gate.weight`"), "{}", error.hint());
        let error = plan(&[], Some(&["*.self_attn.q_norm.weight"])).unwrap_err();
        assert_eq!(
            error.to_string(),
            "`train.lora.targets` holds `*.self_attn.q_norm.weight`, which matches no weight that takes an update of low \
             rank"
        );
        assert!(error.hint().contains("`model.layers.*.self_attn.q_proj.weight`"), "{}", error.hint());
    }

    #[test]
    fn a_recipe_that_trains_nothing_is_refused() {
        for error in [plan(&["*"], None), plan(&["*_proj.weight"], Some(&["*.q_proj.weight"]))] {
            assert!(matches!(error, Err(RunError::NothingTrained)));
        }
    }
}
