//! Everything a run needs, built in the order in which it can be refused: nothing large is loaded before all that
//! is cheap to check has been checked.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use r3_core::ids::{PolicyVersion, TokenId};
use r3_core::routes::RouteDims;
use r3_engine::config::EngineConfig;
use r3_engine::engine::Engine;
use r3_engine::memory::MemoryBudget;
use r3_engine::sampler::Sampling;
use r3_kernels::gemm::Dtype;
use r3_model::autograd::{Policy, Precision};
use r3_model::checkpoint::Checkpoint;
use r3_model::config::ModelConfig;
use r3_model::error::ModelError;
use r3_model::source::TensorSource;
use r3_recipe::learning::Train;
use r3_recipe::recipe::Recipe;
use r3_recipe::rollout::{Dtype as RecipeDtype, ReplayMode, RouterReplay};
use r3_recipe::task::{Reward as RewardName, Task};
use r3_ring::frame::max_frame_bytes;
use r3_ring::room::available_bytes;
use r3_tasks::arithmetic::{self, ArithmeticTask};
use r3_tasks::dataset::{Dataset, Problem};
use r3_tasks::jsonl::{self, HeldOut, Keys};
use r3_tasks::retries::Retries;
use r3_tasks::reward::{ExactMatch, NumericMatch, Reward};
use r3_tasks::tokenizer::Tokenizer;
use r3_telemetry::progress::{Bar, BarKind, Progress};
use r3_train::batch::{Limits, RoutesUse};
use r3_train::objective::Objective;
use r3_train::replay::{Own, ReplayRule};

use crate::error::RunError;
use crate::inputs::Inputs;
use crate::model_dir;
use crate::pending_file::Expected;
use crate::worker::SampleSpec;

/// The text side of a run.
pub struct TaskParts {
    /// Text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// The problems.
    pub dataset: Arc<Dataset>,
    /// Judges completions.
    pub reward: Arc<dyn Reward>,
    /// What metrics call the dataset.
    pub dataset_name: String,
}

impl TaskParts {
    /// Loads tokenizer and problems, and checks every one of them. `reward` replaces the recipe's, and `now` is the time
    /// that chat templates are told.
    ///
    /// # Errors
    /// If the tokenizer does not fit the model, or a problem cannot be encoded or judged.
    pub fn load(
        task: &Task,
        tokenizer_path: &Path,
        vocab_size: usize,
        reward: Option<Arc<dyn Reward>>,
        now: SystemTime,
    ) -> Result<Self, RunError> {
        let tokenizer = Tokenizer::load_at(tokenizer_path, vocab_size, now)?;
        let (dataset, dataset_name) = match task {
            Task::Arithmetic(task) => {
                let (digits, held_out, seed) = (task.digits, task.held_out, task.seed);
                (arithmetic::generate(ArithmeticTask { digits, held_out, seed })?, "arithmetic".to_owned())
            }
            Task::Jsonl(task) => {
                let keys = Keys {
                    prompt: task.prompt_key.clone(),
                    answer: task.answer_key.clone(),
                    ..Keys::default()
                };
                let held_out = task.eval.clone().map_or(HeldOut::Last(task.held_out), HeldOut::File);
                let name = task.train.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                (jsonl::dataset(&task.train, &held_out, &keys, &tokenizer)?, name)
            }
        };
        let reward = reward.unwrap_or_else(|| match task.reward() {
            RewardName::ExactMatch => Arc::new(ExactMatch),
            RewardName::NumericMatch => Arc::new(NumericMatch),
        });
        dataset.check(&tokenizer, &*reward)?;
        retries(task).check(&dataset, &tokenizer)?;
        Ok(Self { tokenizer: Arc::new(tokenizer), dataset: Arc::new(dataset), reward, dataset_name })
    }
}

/// How often a rollout may answer.
#[must_use]
pub fn retries(task: &Task) -> Retries {
    Retries { attempts: task.attempts() }
}

/// What the routes of a run's rollouts are for: one switch drives both sides.
#[must_use]
pub fn routes_use(recipe: &Recipe) -> RoutesUse {
    match (recipe.router_replay.mode, recipe.router_replay.diagnose) {
        (ReplayMode::R3, _) => RoutesUse::Replay,
        (ReplayMode::R2 | ReplayMode::Off, true) => RoutesUse::Diagnose,
        (ReplayMode::R2 | ReplayMode::Off, false) => RoutesUse::None,
    }
}

/// What the recipe's trainer replays beside the rollouts' routes.
#[must_use]
pub fn replay_rule(recipe: &Recipe) -> ReplayRule {
    let RouterReplay { mode, gates, threshold, .. } = recipe.router_replay;
    let own = match (mode, gates) {
        (ReplayMode::R2, true) => Own::ExpertsAndGates,
        (ReplayMode::R2, false) => Own::Experts,
        (ReplayMode::R3 | ReplayMode::Off, _) => Own::Nothing,
    };
    ReplayRule { own, threshold: narrow(threshold) }
}

/// How the trainer cuts a batch.
#[must_use]
pub fn limits(recipe: &Recipe) -> Limits {
    Limits {
        mini_steps: recipe.train.mini_steps,
        micro_batch_tokens: recipe.train.micro_batch_tokens,
        share_prompts: recipe.train.share_prompts,
        routes: routes_use(recipe),
    }
}

/// Batches of prompts that may be sampled for one step.
#[must_use]
pub fn max_batches(recipe: &Recipe) -> usize {
    recipe.objective.dynamic_sampling(&recipe.algorithm).map_or(1, |sampling| sampling.max_batches)
}

/// What the recipe's trainer optimises.
#[must_use]
pub fn objective(recipe: &Recipe) -> Objective {
    Objective::new(&recipe.algorithm, &recipe.objective, recipe.rollout.max_new_tokens)
}

/// The distribution that the recipe's tokens are drawn from.
fn sampling(recipe: &Recipe) -> Sampling {
    let rollout = &recipe.rollout;
    Sampling {
        temperature: narrow(rollout.temperature),
        sample_top_k: rollout.sample_top_k,
        top_p: narrow(rollout.top_p),
        min_p: narrow(rollout.min_p),
    }
}

/// Whether the recipe's draws are truncated, so that every token has to come with what it was drawn from.
#[must_use]
pub fn truncates(recipe: &Recipe) -> bool {
    sampling(recipe).max_support(usize::MAX).is_some()
}

/// How the recipe's rollouts are sampled.
#[must_use]
pub fn sample_spec(recipe: &Recipe, tokenizer: &Tokenizer) -> SampleSpec {
    let rollout = &recipe.rollout;
    let stop_tokens = match &rollout.stop_token_ids {
        Some(ids) => ids.iter().copied().map(TokenId).collect(),
        None => tokenizer.stop_tokens().into(),
    };
    SampleSpec {
        group_size: u32::try_from(rollout.group_size).expect("the recipe was checked"),
        max_new_tokens: rollout.max_new_tokens,
        stop_tokens,
        sampling: sampling(recipe),
        seed: recipe.run.seed,
        retries: retries(&recipe.task),
        in_flight: recipe.refit.in_flight,
        max_lag: recipe.train.max_staleness.saturating_sub(recipe.train.mini_steps as u64),
    }
}

/// The recipe's engine over `source`.
///
/// # Errors
/// If the KV memory holds no block, or a tensor cannot be read.
pub fn engine(
    recipe: &Recipe,
    model: &ModelConfig,
    source: &dyn TensorSource,
    version: PolicyVersion,
) -> Result<Engine, RunError> {
    Ok(Engine::new(engine_config(recipe), model, source, version)?)
}

/// What the unfinished groups of a checkpoint have to be like.
#[must_use]
pub fn expected(recipe: &Recipe, model: &ModelConfig) -> Expected {
    let routes = (routes_use(recipe) != RoutesUse::None).then(|| model.route_dims());
    Expected { group_size: recipe.rollout.group_size, routes }
}

fn engine_config(recipe: &Recipe) -> EngineConfig {
    let capture_routes = routes_use(recipe) != RoutesUse::None;
    let numbers = (recipe.rollout.dtype, recipe.resolved_numerics());
    // What the trainer replays, the engine has to, where it computes again what other weights have sampled.
    let replay = (routes_use(recipe) == RoutesUse::Replay).then(|| replay_rule(recipe).threshold);
    EngineConfig { replay, ..EngineConfig::from_recipe(&recipe.engine, numbers, capture_routes) }
}

/// What a run's engine may have to hold.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Its memory.
    pub memory: MemoryBudget,
    /// Tokens of the longest sequence there may be.
    pub max_tokens: usize,
    /// Weights of the reference policy, if the recipe has one.
    pub reference_bytes: Option<u64>,
    /// Room for the supports of all sequences that run at once, if draws are truncated.
    pub support_bytes: Option<u64>,
}

/// Refuses sizes that cannot hold what the recipe asks for: the longest prompt with its completion in the KV cache,
/// what truncated draws keep beside it, and all rollouts of a step in the ring.
///
/// # Errors
/// The first that is too small, with both numbers.
pub fn check_sizes(recipe: &Recipe, model: &ModelConfig, task: &TaskParts) -> Result<Sizes, RunError> {
    check_stop_tokens(recipe, model)?;
    let config = engine_config(recipe);
    let rollout = longest_rollout(recipe, task)?;
    check_kv(&config, model, rollout)?;
    let eval = longest_prompt(&task.dataset.held_out, &task.tokenizer)?;
    let eval = (eval, recipe.eval.max_new_tokens.unwrap_or(recipe.rollout.max_new_tokens));
    check_kv(&config, model, eval)?;
    let max_tokens = (rollout.0 + rollout.1).max(eval.0 + eval.1);

    let dims: Option<RouteDims> = config.capture_routes.then(|| model.route_dims());
    let max_support = sampling(recipe).max_support(model.vocab_size);
    let memory = config.budget(model)?;
    let support_bytes = check_supports(&memory, rollout.1, max_support)?;
    let frame_bytes = max_frame_bytes(rollout.0 + rollout.1, dims, max_support);
    let n_frames = recipe.rollout.groups * recipe.rollout.group_size * max_batches(recipe);
    let needed_bytes = ring_bytes(frame_bytes, n_frames);
    if recipe.ring.bytes.0 < needed_bytes {
        return Err(RunError::RingTooSmall { ring_bytes: recipe.ring.bytes.0, needed_bytes, max_support });
    }
    let reference_bytes = recipe.objective.kl.as_ref().map(|_| 4 * model.n_parameters() as u64);
    Ok(Sizes { memory, max_tokens, reference_bytes, support_bytes })
}

/// Refuses stop tokens that the model cannot sample: no completion would ever end with one.
///
/// # Errors
/// The first such token.
pub fn check_stop_tokens(recipe: &Recipe, model: &ModelConfig) -> Result<(), RunError> {
    let vocab_size = model.vocab_size;
    let mut ids = recipe.rollout.stop_token_ids.iter().flatten();
    match ids.find(|&&id| id as usize >= vocab_size) {
        Some(&id) => Err(RunError::NoSuchStopToken { id, vocab_size }),
        None => Ok(()),
    }
}

/// Tokens of prompt and completion, all its answers included, where they are most.
fn longest_rollout(recipe: &Recipe, task: &TaskParts) -> Result<(usize, usize), RunError> {
    let retries = retries(&recipe.task);
    let mut longest = (0, 0);
    for problem in &task.dataset.train {
        let prompt_tokens = task.tokenizer.encode(&problem.prompt)?.len();
        let after = retries.max_tokens(problem, recipe.rollout.max_new_tokens, &task.tokenizer)?;
        if prompt_tokens + after > longest.0 + longest.1 {
            longest = (prompt_tokens, after);
        }
    }
    Ok(longest)
}

/// Refuses a KV cache that cannot hold one prompt with its completion, and one that the machine cannot hold.
///
/// # Errors
/// With the numbers that do not fit.
pub fn check_kv(
    config: &EngineConfig,
    model: &ModelConfig,
    (prompt_tokens, max_new_tokens): (usize, usize),
) -> Result<(), RunError> {
    config.check_room(model, prompt_tokens, max_new_tokens)?;
    let (kv_bytes, available_bytes) = (config.kv_bytes, available_bytes());
    if kv_bytes > available_bytes {
        return Err(RunError::KvTooLarge { kv_bytes, available_bytes });
    }
    Ok(())
}

/// Bytes of what truncated draws keep while all sequences that run at once sample `max_new_tokens` tokens, each from up to
/// `max_support`; `None` if draws are whole.
///
/// # Errors
/// If the machine cannot hold them beside the KV memory.
pub(crate) fn check_supports(
    memory: &MemoryBudget,
    max_new_tokens: usize,
    max_support: Option<usize>,
) -> Result<Option<u64>, RunError> {
    let Some(max_support) = max_support else { return Ok(None) };
    let support_bytes = memory.support_bytes(max_new_tokens, max_support);
    let available_bytes = available_bytes().saturating_sub(memory.kv_bytes);
    if support_bytes > available_bytes {
        return Err(RunError::SupportsTooLarge { max_support, support_bytes, available_bytes });
    }
    Ok(Some(support_bytes))
}

/// Tokens of the longest prompt; 0 without any.
pub(crate) fn longest_prompt<'a>(
    problems: impl IntoIterator<Item = &'a Problem>,
    tokenizer: &Tokenizer,
) -> Result<usize, RunError> {
    let mut longest = 0;
    for problem in problems {
        longest = longest.max(tokenizer.encode(&problem.prompt)?.len());
    }
    Ok(longest)
}

/// Bytes a frame takes in the ring beside its own: a header of one cache line and padding to another.
const RECORD_OVERHEAD: usize = 128;

/// Bytes of a ring that holds `n_frames` frames of at most `frame_bytes` bytes, wherever in it the first one starts: one
/// that would wrap leaves the end of the ring unused.
pub(crate) fn ring_bytes(frame_bytes: usize, n_frames: usize) -> u64 {
    frame_bytes.saturating_add(RECORD_OVERHEAD).saturating_mul(n_frames.saturating_add(1)) as u64
}

/// How the trainer computes.
#[must_use]
pub fn precision(train: &Train) -> Precision {
    let dtype = match train.dtype {
        RecipeDtype::F32 => Dtype::F32,
        RecipeDtype::Bf16 => Dtype::Bf16,
    };
    Precision { dtype, recompute: train.recompute }
}

/// Longest wait for the other end of the ring.
#[must_use]
pub fn deadline(recipe: &Recipe) -> Duration {
    Duration::from_secs(recipe.ring.deadline_s)
}

/// Reads the policy of `checkpoint`, showing how far it is.
///
/// # Errors
/// If a tensor cannot be read.
pub fn load_policy(checkpoint: &Checkpoint, progress: &Progress) -> Result<(ModelConfig, Policy), RunError> {
    let config = checkpoint.config().clone();
    let bar = progress.bar(BarKind::Load, checkpoint.bytes());
    let policy = Policy::load(
        &Watched {
            source: checkpoint,
            bar: &bar,
            bytes: checkpoint.bytes(),
            parameters: config.n_parameters() as u64,
        },
        &config,
    )?;
    bar.finish();
    Ok((config, policy))
}

/// The policy that the recipe's KL is measured to, if it has one: a second set of weights in the trainer.
///
/// # Errors
/// If it cannot be read, is not of the shape of `model`, or not the one that `inputs` knows.
pub fn load_reference(
    recipe: &Recipe,
    model: &ModelConfig,
    inputs: &mut Inputs,
) -> Result<Option<Policy>, RunError> {
    let Some(kl) = &recipe.objective.kl else { return Ok(None) };
    let dir = kl.reference.as_ref().unwrap_or(&recipe.model.path);
    let (config, policy) = load_policy(&model_dir::open(dir)?, &Progress::stderr())?;
    let shape = |config: &ModelConfig| (config.vocab_size, config.route_dims(), config.moe_layers());
    if shape(&config) != shape(model) {
        return Err(RunError::ForeignReference { path: dir.clone() });
    }
    inputs.note_reference(dir, &config, &policy)?;
    Ok(Some(policy))
}

/// A source that moves a bar as it is read.
struct Watched<'a> {
    source: &'a dyn TensorSource,
    bar: &'a Bar,
    bytes: u64,
    parameters: u64,
}

impl TensorSource for Watched<'_> {
    fn read(&self, name: &str, out: &mut Vec<f32>) -> Result<(), ModelError> {
        self.source.read(name, out)?;
        self.bar.inc(out.len() as u64 * self.bytes / self.parameters.max(1));
        Ok(())
    }
}

#[expect(clippy::cast_possible_truncation, reason = "sampling works in f32")]
pub(crate) fn narrow(value: f64) -> f32 {
    value as f32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{ProptestConfig, prop, proptest};
    use r3_recipe::bytes::Bytes;
    use r3_ring::ring::Ring;

    use super::*;
    use crate::fixtures::{model, model_dir, recipe};

    fn sums(recipe: &Recipe) -> TaskParts {
        TaskParts::load(&recipe.task, &model_dir(), model().vocab_size, None, SystemTime::now()).unwrap()
    }

    #[test]
    fn a_ring_of_the_bytes_that_a_refusal_asks_for_is_accepted() {
        let mut recipe = recipe();
        let task = sums(&recipe);
        for mode in [ReplayMode::R3, ReplayMode::Off] {
            recipe.router_replay.mode = mode;
            recipe.ring.bytes = Bytes(1);
            let error = check_sizes(&recipe, &model(), &task).unwrap_err();
            let RunError::RingTooSmall { ring_bytes: 1, needed_bytes, .. } = error else { panic!("{error}") };
            recipe.ring.bytes = Bytes(needed_bytes - 1);
            assert!(check_sizes(&recipe, &model(), &task).is_err());
            recipe.ring.bytes = Bytes(needed_bytes);
            check_sizes(&recipe, &model(), &task).unwrap();
        }
    }

    #[test]
    fn a_stop_token_that_the_model_has_not_is_refused() {
        let mut recipe = recipe();
        let vocab_size = model().vocab_size;
        let last = u32::try_from(vocab_size).unwrap() - 1;
        recipe.rollout.stop_token_ids = Some(vec![1, last]);
        check_sizes(&recipe, &model(), &sums(&recipe)).unwrap();
        recipe.rollout.stop_token_ids = Some(vec![1, last + 1]);
        let error = check_sizes(&recipe, &model(), &sums(&recipe)).unwrap_err();
        assert!(matches!(error, RunError::NoSuchStopToken { id: 64, vocab_size: 64 }), "{error}");
    }

    #[test]
    fn dynamic_sampling_needs_room_for_every_batch() {
        let mut recipe = recipe();
        let task = sums(&recipe);
        let mut needed = |max_batches: usize| {
            let text =
                format!("{{ \"dapo\": {{ \"dynamic_sampling\": {{ \"max_batches\": {max_batches} }} }} }}");
            recipe.algorithm = serde_json::from_str(&text).unwrap();
            recipe.ring.bytes = Bytes(1);
            match check_sizes(&recipe, &model(), &task) {
                Err(RunError::RingTooSmall { needed_bytes, .. }) => needed_bytes,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(needed(3) * (2 * 4 + 1), needed(2) * (3 * 4 + 1));
    }

    #[test]
    fn a_cache_larger_than_the_machine_is_refused_before_it_is_touched() {
        let mut recipe = recipe();
        let task = sums(&recipe);
        recipe.engine.kv_memory = Bytes(1 << 60);
        let error = check_sizes(&recipe, &model(), &task).unwrap_err();
        assert!(matches!(error, RunError::KvTooLarge { kv_bytes, .. } if kv_bytes == 1 << 60), "{error}");
    }

    #[test]
    fn a_cut_that_bounds_nothing_is_sized_for_the_whole_vocabulary() {
        let mut recipe = recipe();
        let (task, vocab_size) = (sums(&recipe), model().vocab_size);
        recipe.rollout.top_p = 0.9;
        recipe.ring.bytes = Bytes(1 << 30);
        let sizes = check_sizes(&recipe, &model(), &task).unwrap();
        let row_bytes = 4 * (vocab_size as u64 + 1);
        let n_rows = (recipe.engine.max_running * recipe.rollout.max_new_tokens) as u64;
        assert_eq!(sizes.support_bytes, Some(n_rows * row_bytes));
        recipe.ring.bytes = Bytes(1);
        let error = check_sizes(&recipe, &model(), &task).unwrap_err();
        assert!(
            matches!(error, RunError::RingTooSmall { max_support, .. } if max_support == Some(vocab_size)),
            "{error}"
        );
        assert!(error.hint().contains("`rollout.sample_top_k`"), "{}", error.hint());
    }

    #[test]
    fn supports_that_the_machine_cannot_hold_are_refused() {
        let mut recipe = recipe();
        let task = sums(&recipe);
        (recipe.rollout.sample_top_k, recipe.engine.max_running) = (8, 1 << 45);
        match check_sizes(&recipe, &model(), &task) {
            Err(RunError::SupportsTooLarge { max_support: 8, support_bytes, .. }) => {
                assert_eq!(support_bytes, (recipe.rollout.max_new_tokens as u64 * 4 * 9) << 45);
            }
            other => panic!("{other:?}"),
        }
        recipe.rollout.sample_top_k = 0;
        assert!(check_sizes(&recipe, &model(), &task).is_ok(), "whole draws keep nothing");
    }

    #[test]
    fn one_switch_says_what_routes_are_for_on_both_sides() {
        let mut recipe = recipe();
        for (mode, diagnose, expected) in [
            (ReplayMode::R3, false, RoutesUse::Replay),
            (ReplayMode::R3, true, RoutesUse::Replay),
            (ReplayMode::R2, false, RoutesUse::None),
            (ReplayMode::R2, true, RoutesUse::Diagnose),
            (ReplayMode::Off, true, RoutesUse::Diagnose),
            (ReplayMode::Off, false, RoutesUse::None),
        ] {
            (recipe.router_replay.mode, recipe.router_replay.diagnose) = (mode, diagnose);
            assert_eq!((routes_use(&recipe), limits(&recipe).routes), (expected, expected));
            let own = if mode == ReplayMode::R2 { Own::Experts } else { Own::Nothing };
            assert_eq!(replay_rule(&recipe), ReplayRule { own, threshold: 0.0 });
            assert_eq!(engine_config(&recipe).replay, (expected == RoutesUse::Replay).then_some(0.0));
        }
        recipe.router_replay = RouterReplay { threshold: 0.25, ..RouterReplay::default() };
        assert_eq!((engine_config(&recipe).replay, replay_rule(&recipe).threshold), (Some(0.25), 0.25));
        recipe.router_replay = RouterReplay { mode: ReplayMode::R2, gates: true, ..RouterReplay::default() };
        assert_eq!(replay_rule(&recipe).own, Own::ExpertsAndGates);
    }

    #[test]
    fn sizes_beyond_the_address_space_are_refused_rather_than_wrapped() {
        assert_eq!(ring_bytes(usize::MAX, 3), u64::MAX);
        assert_eq!(ring_bytes(1 << 40, 1 << 40), u64::MAX);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_ring_takes_the_frames_of_every_step_without_waiting(
            frame_bytes in 3000_usize..9000,
            n_frames in 1_usize..6,
            sizes in prop::collection::vec(0.0_f64..=1.0, 60)
        ) {
            let bytes = usize::try_from(ring_bytes(frame_bytes, n_frames)).unwrap();
            let (mut writer, mut reader) = Ring::create(bytes).unwrap();
            for step in sizes.chunks(n_frames) {
                let mut held = Vec::new();
                for share in step {
                    // Every other frame is as long as can be.
                    let size = if *share < 0.5 { frame_bytes } else { (frame_bytes as f64 * share) as usize };
                    writer.reserve(size, Duration::ZERO).unwrap().commit();
                    held.push(reader.next(Duration::ZERO).unwrap());
                }
                held.into_iter().for_each(|id| reader.release(id));
            }
        }
    }
}
