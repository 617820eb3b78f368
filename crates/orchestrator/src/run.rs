//! The loop. Read this first.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use r3_core::count::counted;
use r3_core::ids::PolicyVersion;
use r3_engine::error::EngineError;
use r3_engine::memory::MemoryBudget;
use r3_kernels::gemm::Dtype;
use r3_model::error::ModelError;
use r3_model::export::{Companions, write_weights};
use r3_recipe::bytes::Bytes;
use r3_recipe::recipe::Recipe;
use r3_recipe::rollout::InFlight;
use r3_ring::ring::Ring;
use r3_tasks::error::TaskError;
use r3_tasks::reward::{Reward, check_step};
use r3_telemetry::progress::BarKind;
use r3_telemetry::step_line::step_line;
use r3_telemetry::step_record::StepRecord;
use r3_telemetry::summary::RunSummary;
use r3_telemetry::telemetry::{Telemetry, TelemetryConfig};
use r3_train::batch::Batch;
use r3_train::checkpoint::{Checkpoints, Position, verify};
use r3_train::error::TrainError;
use r3_train::optimiser::OptimiserConfig;
use r3_train::trainer::{Stage, StepStats, Trainer};

use crate::error::{RunError, io_at};
use crate::group_buffer::{GroupBuffer, check_layers, groups};
use crate::handle::{Refitted, WorkerHandle};
use crate::inputs::Inputs;
use crate::memory::{memory_line, support_line};
use crate::pending_file::{self, Snapshot};
use crate::prompts::Prompts;
use crate::record::{StepReport, Timings, set_evaluation, set_model};
use crate::run_dir::{METRICS, RECIPE, RunDir};
use crate::run_state::{Change, RunState};
use crate::sample_stats::SampleStats;
use crate::setup::{self, Sizes, TaskParts};
use crate::shutdown::Shutdown;
use crate::training::{self, TrainingPlan};
use crate::worker::WorkerParts;

/// How to run, beside the recipe.
#[derive(Clone, Default)]
pub struct RunOptions {
    /// Continue from the newest checkpoint of `run.out`.
    pub resume: bool,
    /// Discard an earlier run of `run.out`.
    pub overwrite: bool,
    /// Ends the run after its step.
    pub shutdown: Shutdown,
    /// Judges completions instead of the recipe's reward: for programs that embed r3.
    pub reward: Option<Arc<dyn Reward>>,
}

/// What a run leaves behind, beside its files.
#[derive(Clone, Debug)]
pub struct RunOutcome {
    /// Every step's record, from step 0, which only has the evaluation before training.
    pub records: Vec<StepRecord>,
    /// The run in a dozen numbers.
    pub summary: RunSummary,
}

/// Stack of the thread that trains: candle's `backward` recurses over the graph, which grows with depth.
const STACK_BYTES: usize = 256 << 20;

/// Runs `recipe` to its end.
///
/// # Errors
/// Whatever keeps it from starting or stops it. Checkpoints on disk are whole in any case.
pub fn run(recipe: &Recipe, options: &RunOptions) -> Result<RunOutcome, RunError> {
    let out = &recipe.run.out;
    run_in(if options.resume { RunDir::lock_again(out)? } else { RunDir::lock_new(out)? }, recipe, options)
}

/// Runs `recipe` to its end in `dir`, which is its own.
pub(crate) fn run_in(dir: RunDir, recipe: &Recipe, options: &RunOptions) -> Result<RunOutcome, RunError> {
    with_deep_stack(|| {
        let mut run = Run::start(dir, recipe, options)?;
        run.evaluate_at_start()?;
        run.say_if_done();
        while run.step < recipe.run.steps {
            let sampled = run.sample()?; // prompts -> rollouts -> rewards -> ring
            let learned = run.learn()?; // ring -> groups -> batch -> replayed forward, loss, optimiser
            let refitted = run.refit()?; // trained weights -> engine, audited; then the flush
            run.finish_step(&sampled, &learned, &refitted)?; // metrics, evaluation, checkpoint
            if options.shutdown.is_requested() && run.step < recipe.run.steps {
                run.save()?;
                return Err(RunError::Interrupted { step: run.step });
            }
        }
        run.finish()
    })
}

/// Runs `work` on a thread whose stack is deep enough for candle's recursion.
pub(crate) fn with_deep_stack<T: Send>(
    work: impl FnOnce() -> Result<T, RunError> + Send,
) -> Result<T, RunError> {
    thread::scope(|scope| {
        let thread = thread::Builder::new()
            .name("train".into())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, work)
            .map_err(|source| RunError::Io { path: "the training thread".into(), source })?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Rollouts of one step, which lie in the ring.
struct Sampled {
    stats: SampleStats,
    filtered: usize,
    /// Groups that the step lacks, since dynamic sampling used up its batches.
    missing: usize,
    seconds: f64,
    began: Instant,
}

/// What training on them did.
struct Learned {
    stats: StepStats,
    ring_used_bytes: u64,
    measure_s: f64,
    train_s: f64,
}

/// What loading the trained weights took.
struct Served {
    refit: Refitted,
    seconds: f64,
}

/// Where sampling stands between two steps.
struct Stand {
    /// Prompts given out.
    cursor: u64,
    /// What was begun and not trained on.
    pending: Snapshot,
}

/// A run between two steps.
struct Run<'a> {
    recipe: &'a Recipe,
    began: Instant,
    /// Steps done: batches trained on.
    step: u64,
    saved_step: Option<u64>,
    /// Held-out accuracy of the current weights, if they were evaluated.
    accuracy: Option<f64>,
    /// Seconds the newest checkpoint took to write.
    save_s: f64,
    /// Groups begun and not trained on.
    n_pending: usize,
    /// What the engine's memory holds.
    memory: MemoryBudget,
    plan: TrainingPlan,
    inputs: Inputs,
    prompts: Prompts,
    worker: WorkerHandle,
    buffer: GroupBuffer,
    trainer: Trainer,
    telemetry: Telemetry,
    checkpoints: Checkpoints,
    companions: Companions,
    records: Vec<StepRecord>,
    dataset_name: String,
    _dir: RunDir,
}

impl<'a> Run<'a> {
    /// Checks, loads and connects everything.
    fn start(dir: RunDir, recipe: &'a Recipe, options: &RunOptions) -> Result<Self, RunError> {
        let began = Instant::now();
        let (run, out) = (&recipe.run, &recipe.run.out);
        let checkpoints = Checkpoints::new(out.clone(), run.keep_last).keeping_best(run.keep_best);
        let (resumed, state) = find_resumed(recipe, &checkpoints, &dir, options)?.unzip();
        let mut inputs = Inputs::of_run(state.as_ref().map(|state| &state.inputs));
        let model_dir = resumed.as_deref().unwrap_or(&recipe.model.path);
        let config = r3_model::config::ModelConfig::load(model_dir)?;
        let tokenizer_path = resumed.as_deref().unwrap_or_else(|| recipe.model.tokenizer_path());
        let mut companions = Companions::default();
        [model_dir, tokenizer_path].into_iter().try_for_each(|from| companions.add(from))?;
        let (n_tokens, reward, started) = (config.vocab_size, options.reward.clone(), inputs.started());
        let task = TaskParts::load(&recipe.task, tokenizer_path, n_tokens, reward, started)?;
        inputs.note_problems(&task.dataset, &task.tokenizer)?;
        let sizes = setup::check_sizes(recipe, &config, &task)?;
        let plan = TrainingPlan::new(&recipe.train, &config)?;
        let (writer, reader) = Ring::create(recipe.ring.bytes.to_usize())?;

        let (mut trainer, step) = load_trainer(recipe, resumed.as_deref(), &plan, &mut inputs)?;
        let engine = setup::engine(recipe, &config, &trainer.weights(), trainer.version())?;
        let (cursor, begun) = state.map_or_else(Default::default, |state| (state.cursor, state.begun));
        let mut prompts =
            Prompts::new(Arc::clone(&task.dataset), Arc::clone(&task.tokenizer), recipe.run.seed, cursor)?;
        pending_file::check_ages(&begun, trainer.version(), recipe.train.max_staleness)?;
        let pending = pending_file::read(model_dir, &begun, setup::expected(recipe, &config), &mut prompts)?;
        let n_pending = pending.n_groups();
        let worker = WorkerHandle::spawn(WorkerParts {
            engine,
            writer,
            deadline: setup::deadline(recipe),
            spec: setup::sample_spec(recipe, &task.tokenizer),
            reward: task.reward,
            dataset: task.dataset,
            tokenizer: task.tokenizer,
            pending,
            // Every step ends with one.
            n_refits: step,
        })?;
        // Nothing of an earlier run is touched before all that can be refused has been.
        let metrics = dir.join(METRICS);
        let telemetry = Telemetry::start(&TelemetryConfig {
            listen: recipe.metrics.listen,
            jsonl: recipe.metrics.jsonl.then(|| metrics.clone()),
            resume_step: step,
        })?;
        remove_old(&dir, &checkpoints, options)?;
        fs::write(dir.join(RECIPE), recipe.to_yaml()).map_err(io_at(out))?;
        let records = match recipe.metrics.jsonl && resumed.is_some() {
            true => r3_telemetry::jsonl::read(&metrics)?,
            false => Vec::new(),
        };
        announce(&telemetry, out, &sizes, &plan);
        Ok(Self {
            recipe,
            began,
            step,
            saved_step: resumed.is_some().then_some(step),
            accuracy: None,
            save_s: 0.0,
            n_pending,
            memory: sizes.memory,
            plan,
            inputs,
            prompts,
            worker,
            buffer: GroupBuffer::new(reader),
            trainer,
            telemetry,
            checkpoints,
            companions,
            records,
            dataset_name: task.dataset_name,
            _dir: dir,
        })
    }

    /// Samples the groups of a step. If there are none to train on, the run ends, and the steps before are saved first.
    fn sample(&mut self) -> Result<Sampled, RunError> {
        // At every step: what was in flight goes on, and once it has nobody can tell where it stood.
        let before = self.stand()?;
        self.sample_groups().inspect_err(|error| {
            let goes_on_later = matches!(
                error,
                RunError::NoSignal { .. }
                    | RunError::Task(TaskError::EveryRewardFailed { .. })
                    | RunError::Stalled { .. }
            );
            if goes_on_later && let Some(before) = before {
                self.save_before_end(&before);
            }
        })
    }

    /// Samples a batch of groups into the ring; with dynamic sampling, until enough groups can teach something. With
    /// over-sampling, as many groups as the recipe says are left for the next step.
    fn sample_groups(&mut self) -> Result<Sampled, RunError> {
        let began = Instant::now();
        let rollout = &self.recipe.rollout;
        let max_batches = setup::max_batches(self.recipe);
        let bar = |run: &Self, n_groups: usize| {
            run.telemetry.progress().bar(BarKind::Rollout, (n_groups * rollout.group_size) as u64)
        };
        let mut stats = SampleStats::default();
        let mut filtered = 0;
        for batch in 0.. {
            let missing = rollout.groups - self.buffer.n_groups(rollout.group_size);
            if missing == 0 || batch == max_batches {
                break;
            }
            let prompts = self.prompts.take(missing + rollout.over_sampling_groups - self.n_pending)?;
            self.worker.sample(prompts, missing, bar(self, missing))?;
            self.n_pending = rollout.over_sampling_groups;
            stats.add(self.buffer.receive(missing * rollout.group_size, &mut self.worker)?);
            check_step(stats.n_scored, &stats.failures)?;
            if max_batches > 1 {
                filtered += self.buffer.drop_equal()?;
            }
        }
        let missing = rollout.groups - self.buffer.n_groups(rollout.group_size);
        if missing == rollout.groups {
            return Err(RunError::NoSignal { n_groups: max_batches * rollout.groups, batches: max_batches });
        }
        if self.recipe.refit.in_flight == InFlight::Drain && self.n_pending > 0 {
            stats.add(self.worker.drain(bar(self, self.n_pending))?);
        }
        self.worker.free_cache()?;
        Ok(Sampled { stats, filtered, missing, seconds: began.elapsed().as_secs_f64(), began })
    }

    /// Trains on the rollouts in the ring where they lie, and gives them back.
    fn learn(&mut self) -> Result<Learned, RunError> {
        let start = Instant::now();
        let ring_used_bytes = self.buffer.used_bytes();
        let frames = self.buffer.frames()?;
        check_layers(&frames, &self.trainer.policy().config().moe_layers())?;
        let groups = groups(&frames, self.trainer.version(), self.recipe.train.max_staleness)?;
        let batch = Batch::pack(&groups, self.trainer.objective(), setup::limits(self.recipe))?;
        let bar = self.telemetry.progress().bar(BarKind::Train, self.trainer.n_passes(&batch) as u64);
        let mut measured = start;
        let stats = self.trainer.step(&batch, &mut |pass| match pass.stage {
            Stage::Measured => {
                bar.add(pass.n_inputs as u64, 1);
                measured = Instant::now();
            }
            Stage::Forward => {}
            Stage::Learned => bar.add(pass.n_inputs as u64, 1),
        })?;
        drop((batch, groups, frames));
        self.buffer.release();
        let measure_s = measured.duration_since(start).as_secs_f64();
        Ok(Learned { stats, ring_used_bytes, measure_s, train_s: start.elapsed().as_secs_f64() })
    }

    /// Loads the trained weights into the engine, which then forgets KV, routes and prefixes of the old ones. Also when
    /// the step trained nothing: a step begins with an empty engine, as it does in a process that resumes the run.
    fn refit(&mut self) -> Result<Served, RunError> {
        let start = Instant::now();
        let weights = self.trainer.weights();
        let version = self.trainer.version();
        let refit = self.worker.refit(weights, version).map_err(|error| diverged(error, version))?;
        let (version, epoch, changed) = (refit.report.version.0, refit.report.epoch, refit.report.changed);
        tracing::debug!(version, epoch, changed, in_flight = refit.n_rollouts, "refit");
        Ok(Served { refit, seconds: start.elapsed().as_secs_f64() })
    }

    /// Evaluates if it is time, shows and keeps the step's record, and saves if it is time.
    fn finish_step(&mut self, sampled: &Sampled, learned: &Learned, served: &Served) -> Result<(), RunError> {
        self.step += 1;
        self.accuracy = None;
        let report = StepReport {
            step: self.step,
            stats: &learned.stats,
            sampled: &sampled.stats,
            timings: Timings {
                sample_s: sampled.seconds,
                measure_s: learned.measure_s,
                train_s: learned.train_s,
                refit_s: served.seconds,
                save_s: self.save_s,
                step_s: sampled.began.elapsed().as_secs_f64(),
            },
            routes: setup::routes_use(self.recipe),
            filtered: sampled.filtered,
            missing: sampled.missing,
            in_flight: (served.refit.n_groups, served.refit.n_rollouts),
            ring_used_bytes: learned.ring_used_bytes,
        };
        report.count(self.telemetry.exporter());
        let mut record = report.record();
        set_model(&mut record, &self.memory, self.plan.n_trained);
        let every = self.recipe.eval.every;
        if self.step == self.recipe.run.steps || (every > 0 && self.step.is_multiple_of(every)) {
            self.evaluate(&mut record)?;
        }
        self.telemetry.record(&record)?;
        self.telemetry.progress().line(&step_line(&record, self.recipe.run.steps));
        self.records.push(record);
        let save_every = self.recipe.run.save_every;
        if self.step == self.recipe.run.steps || (save_every > 0 && self.step.is_multiple_of(save_every)) {
            self.save()?;
        }
        Ok(())
    }

    /// Says why a run that is resumed after its last step does nothing.
    fn say_if_done(&self) {
        let (step, steps) = (self.step, self.recipe.run.steps);
        if step >= steps {
            let line = format!("step {step} is done, and `run.steps` is {steps}: nothing is left to do");
            self.telemetry.progress().line(&line);
        }
    }

    /// Measures the policy a new run starts from, as the record of step 0.
    fn evaluate_at_start(&mut self) -> Result<(), RunError> {
        if self.step > 0 {
            return Ok(());
        }
        let mut record = StepRecord::new(0, self.trainer.version());
        set_model(&mut record, &self.memory, self.plan.n_trained);
        self.evaluate(&mut record)?;
        self.telemetry.record(&record)?;
        self.records.push(record);
        Ok(())
    }

    fn evaluate(&mut self, record: &mut StepRecord) -> Result<(), RunError> {
        let eval = &self.recipe.eval;
        if eval.problems == 0 {
            return Ok(());
        }
        let max_new_tokens = eval.max_new_tokens.unwrap_or(self.recipe.rollout.max_new_tokens);
        let bar = self.telemetry.progress().bar(BarKind::Eval, eval.problems as u64);
        let evaluation = self.worker.evaluate(eval.problems, max_new_tokens, bar)?;
        set_evaluation(record, &self.dataset_name, evaluation);
        self.accuracy = Some(evaluation.accuracy);
        let (correct, step) = (100.0 * evaluation.accuracy, self.step);
        self.telemetry.progress().line(&format!(
            "eval after step {step}: {correct:.1} % of {}",
            counted(evaluation.problems, "held-out problem")
        ));
        Ok(())
    }

    /// Writes a checkpoint, unless this step has one.
    fn save(&mut self) -> Result<(), RunError> {
        let stand = self.stand()?;
        stand.map_or(Ok(()), |stand| self.write(&stand))
    }

    /// Where sampling stands, unless the step that was just done has a checkpoint or none was done.
    fn stand(&mut self) -> Result<Option<Stand>, RunError> {
        if self.saved_step == Some(self.step) || self.step == 0 {
            return Ok(None);
        }
        let pending = if self.n_pending > 0 { self.worker.snapshot()? } else { Snapshot::default() };
        Ok(Some(Stand { cursor: self.prompts.cursor(), pending }))
    }

    /// Saves the steps that were done, for whoever goes on later. What ends the run matters more than whether that fails.
    fn save_before_end(&mut self, before: &Stand) {
        let step = self.step;
        match self.write(before) {
            Ok(()) => self
                .telemetry
                .progress()
                .line(&format!("step {step} is saved; `r3 run --resume` goes on from it")),
            Err(error) => tracing::warn!("step {step} is not saved: {error}"),
        }
    }

    /// Writes a checkpoint of the steps done, after which sampling stood at `stand`.
    fn write(&mut self, stand: &Stand) -> Result<(), RunError> {
        let start = Instant::now();
        let Stand { cursor, pending } = stand;
        let state = RunState::new(self.recipe, *cursor, &pending.begun, &self.inputs);
        let (trainer, companions) = (&self.trainer, &self.companions);
        let policy = trainer.policy();
        let adapter = training::adapter(self.recipe, policy)?;
        let adapter_bytes = adapter.as_ref().map_or(0, |adapter| 4 * adapter.n_parameters() as u64);
        let needed_bytes = trainer.checkpoint_bytes() + adapter_bytes + pending.frames.len() as u64;
        let position = Position { score: self.accuracy, ..trainer.position(self.step) };
        self.checkpoints.save(position, needed_bytes, |dir| {
            write_weights(dir, policy.config(), policy, Dtype::F32)?;
            companions.write(dir)?;
            trainer.write_optimiser(dir)?;
            adapter.iter().try_for_each(|adapter| adapter.write(dir))?;
            pending.write(dir).and_then(|()| state.write(dir)).map_err(|source| TrainError::Write {
                path: dir.to_path_buf(),
                needed_bytes: 0,
                source,
            })
        })?;
        self.saved_step = Some(self.step);
        self.save_s = start.elapsed().as_secs_f64();
        Ok(())
    }

    fn finish(self) -> Result<RunOutcome, RunError> {
        let summary = RunSummary::new(&self.records, self.began.elapsed().as_secs_f64());
        Ok(RunOutcome { records: self.records, summary })
    }
}

/// Weights that are not finite are the update's that led to `version`: nobody else has had them.
fn diverged(error: RunError, version: PolicyVersion) -> RunError {
    match error {
        RunError::Engine(EngineError::Model(ModelError::NotFinite { name, .. })) => {
            let tensor = format!("the weight `{name}`");
            TrainError::NonFinite { tensor, version: PolicyVersion(version.0.saturating_sub(1)) }.into()
        }
        other => other,
    }
}

/// Says where the run writes, where it can be watched, and what its engine's memory holds.
fn announce(telemetry: &Telemetry, out: &Path, sizes: &Sizes, plan: &TrainingPlan) {
    telemetry.progress().line(&watch_line(out, telemetry.addr()));
    telemetry.progress().line(&memory_line(&sizes.memory, sizes.max_tokens));
    if let Some(bytes) = sizes.reference_bytes {
        telemetry
            .progress()
            .line(&format!("reference policy: {} of weights beside the trainer's", Bytes(bytes)));
    }
    if let Some(bytes) = sizes.support_bytes {
        telemetry.progress().line(&support_line(bytes));
    }
    if !plan.is_whole() {
        telemetry.progress().line(&plan.line());
    }
}

/// Removes the checkpoints of an earlier run that a new one replaces, or those that one resumed was to remove.
fn remove_old(dir: &RunDir, checkpoints: &Checkpoints, options: &RunOptions) -> Result<(), RunError> {
    if options.resume {
        checkpoints.remove_old();
    } else if options.overwrite {
        dir.discard_checkpoints()?;
    }
    Ok(())
}

/// Where a run writes, and where it can be watched.
fn watch_line(out: &Path, metrics: Option<SocketAddr>) -> String {
    let out = out.display();
    match metrics {
        Some(addr) => format!("writing to {out}; metrics at http://{addr}/metrics"),
        None => format!("writing to {out}"),
    }
}

/// The policy with its optimiser, and the steps it has made: a new one, or as checkpoint `resumed` has it, which is verified.
fn load_trainer(
    recipe: &Recipe,
    resumed: Option<&Path>,
    plan: &TrainingPlan,
    inputs: &mut Inputs,
) -> Result<(Trainer, u64), RunError> {
    let state = resumed.map(|dir| Ok::<_, RunError>((dir, verify(dir)?))).transpose()?;
    let (config, policy) = training::load_policy(recipe, plan, resumed)?;
    let total_steps = recipe.run.steps * recipe.train.mini_steps as u64;
    let optimiser = OptimiserConfig::of_train(&recipe.train, total_steps);
    let temperature = setup::narrow(recipe.rollout.temperature);
    let precision = setup::precision(&recipe.train);
    let reference = setup::load_reference(recipe, &config, inputs)?;
    let reference = reference.map(|policy| policy.with_precision(precision));
    let policy = policy.with_precision(precision);
    let mut trainer = Trainer::new(policy, setup::objective(recipe), optimiser, temperature)
        .with_replay(setup::replay_rule(recipe));
    if setup::truncates(recipe) {
        trainer = trainer.with_truncated_rollouts();
    }
    if let Some(reference) = reference {
        trainer = trainer.with_reference(reference);
    }
    let Some((dir, state)) = state else { return Ok((trainer, 0)) };
    trainer.resume(dir, &state)?;
    Ok((trainer, state.step))
}

/// Refuses what keeps a run of `recipe` from beginning in `dir`.
///
/// # Errors
/// If an earlier run is in its way.
pub(crate) fn check_free(dir: &RunDir, recipe: &Recipe, options: &RunOptions) -> Result<(), RunError> {
    dir.check_free(options.overwrite, &[&recipe.model.path, recipe.model.tokenizer_path()])
}

/// The checkpoint to continue from, and what it says of its run; refuses to mix two runs in one directory. A run that died before its first
/// checkpoint is continued from its start.
fn find_resumed(
    recipe: &Recipe,
    checkpoints: &Checkpoints,
    dir: &RunDir,
    options: &RunOptions,
) -> Result<Option<(PathBuf, RunState)>, RunError> {
    if !options.resume {
        check_free(dir, recipe, options)?;
        return Ok(None);
    }
    let latest = checkpoints.latest()?;
    let state = latest.as_deref().map(RunState::read).transpose()?;
    match &state {
        Some(state) => {
            for Change { key, then, now } in state.changes(recipe)? {
                tracing::warn!("resuming with `{key}: {now}` instead of {then}");
            }
        }
        None => tracing::warn!("the run had no checkpoint yet and starts over"),
    }
    dir.discard_unfinished()?;
    Ok(latest.zip(state))
}
