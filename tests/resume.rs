//! Runs that are killed, interrupted, continued and judged by broken rewards end the way they should.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use r3_model::checkpoint::Checkpoint;
use r3_model::source::{TensorSource, canonical_tensors};
use r3_orchestrator::error::{ExitClass, RunError};
use r3_orchestrator::run::{RunOptions, RunOutcome, run};
use r3_recipe::recipe::Recipe;
use r3_tasks::dataset::Problem;
use r3_tasks::error::TaskError;
use r3_tasks::reward::{FailureReason, Reward};
use r3_telemetry::metrics;
use r3_train::checkpoint::Checkpoints;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

/// So many that a killed run is far from its end even on a machine that is slow to kill it.
const STEPS: u64 = 8;

fn model() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "../../assets/tiny-moe"].iter().collect()
}

/// A run of a second or two that learns in every step and writes into `dir/out`.
fn recipe_text(dir: &Path) -> String {
    format!(
        "model: {{ path: {} }}
task: {{ arithmetic: {{ digits: 2, held_out: 8 }} }}
rollout: {{ groups: 6, group_size: 4, max_new_tokens: 4 }}
algorithm: {{ dapo: {{ clip_low: 0.2, clip_high: 0.28 }} }}
train: {{ lr: 1.0e-4, mini_steps: 2 }}
eval: {{ problems: 8 }}
metrics: {{ listen: null }}
run: {{ steps: {STEPS}, seed: 5, save_every: 2, out: {} }}
",
        model().display(),
        dir.join("out").display()
    )
}

/// The recipe with `changes` put over it, as `--set` does.
fn recipe(dir: &Path, changes: &[&str]) -> Recipe {
    let path = dir.join("recipe.yaml");
    fs::write(&path, recipe_text(dir)).unwrap();
    let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
    Recipe::load(&path, &changes).unwrap().recipe
}

/// A running `r3 run`, told what it does line by line.
struct Process {
    child: Child,
    stderr: BufReader<std::process::ChildStderr>,
    said: String,
}

impl Process {
    fn start(dir: &Path, arguments: &[&str]) -> Self {
        let recipe = dir.join("recipe.yaml");
        fs::write(&recipe, recipe_text(dir)).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_r3"));
        command.arg("run").arg(recipe).args(arguments).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        Self { child, stderr, said: String::new() }
    }

    /// Reads until step `step` reports. The next step is then under way.
    fn wait_for_step(&mut self, step: u64) {
        let line_start = format!("step {step}/{STEPS} ");
        let mut line = String::new();
        while !line.starts_with(&line_start) {
            line.clear();
            assert!(
                self.stderr.read_line(&mut line).unwrap() > 0,
                "ended before step {step}:\n{}",
                self.said
            );
            self.said += &line;
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// How it ended, and all it said.
    fn end(mut self) -> (ExitStatus, String) {
        let mut line = String::new();
        while self.stderr.read_line(&mut line).unwrap() > 0 {
            self.said += &line;
            line.clear();
        }
        (self.child.wait().unwrap(), self.said)
    }
}

/// Runs `r3 run` to its end, which has to be a good one.
fn complete(dir: &Path, arguments: &[&str]) {
    let (status, said) = Process::start(dir, arguments).end();
    assert_eq!(status.code(), Some(0), "{said}");
}

/// The lines of `metrics.jsonl` without times and rates, which no two runs share.
fn measured(dir: &Path) -> Vec<Vec<(String, Value)>> {
    let is_timeless = |key: &str| !key.starts_with("timing_s/") && !key.ends_with("_per_second");
    let text = fs::read_to_string(dir.join("out/metrics.jsonl")).unwrap();
    let record = |line: &str| {
        let Value::Object(record) = serde_json::from_str(line).unwrap() else { panic!("{line}") };
        record.into_iter().filter(|(key, _)| is_timeless(key)).collect()
    };
    text.lines().map(record).collect()
}

/// Checks that the runs of two directories measured and became the same.
fn assert_same_run(found: &Path, expected: &Path) {
    let (found_records, expected_records) = (measured(found), measured(expected));
    assert_eq!(expected_records.len() as u64, STEPS + 1);
    assert!(expected_records[1].iter().any(|(key, _)| key == "actor/pg_loss"));
    for (found, expected) in found_records.iter().zip(&expected_records) {
        assert_eq!(found, expected);
    }
    assert_eq!(found_records.len(), expected_records.len());
    let checkpoint = |dir: &Path| dir.join(format!("out/step-{STEPS:06}"));
    let files = names(&checkpoint(expected));
    assert_eq!(names(&checkpoint(found)), files);
    // The recipe says where it lies, and the trainer's state has the hash of the file with the recipe.
    for file in files.iter().filter(|file| !["run_state.json", "trainer_state.json"].contains(&file.as_str()))
    {
        let read = |dir: &Path| fs::read(checkpoint(dir).join(file)).unwrap();
        assert!(read(found) == read(expected), "{file} differs");
    }
}

#[test]
fn a_killed_run_and_an_interrupted_run_resume_as_if_nothing_had_happened() {
    let whole = tempfile::tempdir().unwrap();
    complete(whole.path(), &[]);

    // After its third step a run is in the middle of the fourth; after the fourth, it is writing a checkpoint.
    for step in [3, 4] {
        let killed = tempfile::tempdir().unwrap();
        let mut process = Process::start(killed.path(), &[]);
        process.wait_for_step(step);
        process.signal(Signal::KILL);
        let (status, said) = process.end();
        assert_eq!(status.signal(), Some(Signal::KILL.as_raw()), "{said}");
        assert!(killed.path().join("out/step-000002").is_dir());
        assert!(!killed.path().join(format!("out/step-{STEPS:06}")).exists());
        complete(killed.path(), &["--resume"]);
        assert_same_run(killed.path(), whole.path());
    }

    let interrupted = tempfile::tempdir().unwrap();
    // The only checkpoint is the one that the signal asks for.
    let mut process = Process::start(interrupted.path(), &["--set", "run.save_every=0"]);
    process.wait_for_step(3);
    process.signal(Signal::TERM);
    let (status, said) = process.end();
    assert_eq!(status.code(), Some(130), "{said}");
    // The signal may come before the run has looked whether one came in its third step, or after.
    let named = [3, 4].into_iter().find(|step| said.contains(&format!("step {step} is finished and saved")));
    let step = named.unwrap_or_else(|| panic!("{said}"));
    assert!(interrupted.path().join(format!("out/step-{step:06}/model.safetensors")).is_file());
    assert!(said.contains("hint: continue with --resume"), "{said}");
    complete(interrupted.path(), &["--resume"]);
    assert_same_run(interrupted.path(), whole.path());
}

/// What a job script does when its run may have died before: `--resume` if it left anything.
fn start_or_resume(dir: &Path) -> Process {
    let is_begun = dir.join("out/.lock").exists();
    Process::start(dir, if is_begun { &["--resume"] } else { &[] })
}

/// What lies in a directory.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Kills `process` after `delay`, if it has not ended by then; says whether it was killed.
fn kill_after(process: Process, delay: Duration) -> bool {
    let pid = Pid::from_child(&process.child);
    let (ended, end) = mpsc::channel();
    let waits = thread::spawn(move || {
        let (status, said) = process.end();
        // The receiver is gone only if the test has failed.
        let _ = ended.send(());
        assert!(status.success() || status.signal() == Some(Signal::KILL.as_raw()), "{status}: {said}");
        !status.success()
    });
    if end.recv_timeout(delay).is_err() {
        // Not waited for yet, or it would have sent; at worst it is a zombie, which a signal does not harm.
        let _ = kill_process(pid, Signal::KILL);
    }
    waits.join().unwrap()
}

#[test]
fn a_run_killed_at_twenty_random_moments_ends_with_the_bits_of_one_that_was_not() {
    let whole = tempfile::tempdir().unwrap();
    let start = Instant::now();
    complete(whole.path(), &[]);
    let duration = start.elapsed();

    let mut random = StdRng::seed_from_u64(20);
    let mut dir = tempfile::tempdir().unwrap();
    let mut n_kills = 0;
    while n_kills < 20 {
        if kill_after(start_or_resume(dir.path()), duration.mul_f64(random.random())) {
            n_kills += 1;
        } else {
            assert_same_run(dir.path(), whole.path());
            assert_eq!(names(&dir.path().join("out")), names(&whole.path().join("out")));
            dir = tempfile::tempdir().unwrap();
        }
    }
    let (status, said) = start_or_resume(dir.path()).end();
    assert_eq!(status.code(), Some(0), "{said}");
    assert_same_run(dir.path(), whole.path());
    assert_eq!(names(&dir.path().join("out")), names(&whole.path().join("out")));
}

#[test]
fn a_run_that_is_resumed_keeps_no_more_checkpoints_than_it_may() {
    let dir = tempfile::tempdir().unwrap();
    complete(dir.path(), &["--set", "run.keep_last=3"]);
    let kept = ["step-000004", "step-000006", "step-000008"];
    let files = [".lock", "metrics.jsonl", "recipe.yaml"];
    assert_eq!(names(&dir.path().join("out")), [&files[..], &kept].concat());
    complete(dir.path(), &["--resume", "--set", "run.keep_last=1"]);
    assert_eq!(names(&dir.path().join("out")), [&files[..], &kept[2..]].concat());
}

/// Rollouts in flight at every refit: of twelve groups five sequences run at a time, and six groups are trained on.
const IN_FLIGHT: [&str; 4] =
    ["rollout.over_sampling_groups=6", "train.max_staleness=4", "engine.max_running=5", "eval.every=3"];

/// A gauge of every step of the run in `dir`.
fn gauge(dir: &Path, name: &str) -> Vec<f64> {
    let of = |record: Vec<(String, Value)>| record.into_iter().find(|(key, _)| key == name);
    measured(dir).into_iter().filter_map(of).map(|(_, value)| value.as_f64().unwrap()).collect()
}

#[test]
fn a_run_killed_with_rollouts_in_flight_resumes_as_if_nothing_had_happened() {
    let arguments = |mode: &str| -> Vec<String> {
        let mode = format!("refit.in_flight={mode}");
        // What draws keep waits with them.
        let sets = IN_FLIGHT.iter().copied().chain([&*mode, "rollout.sample_top_k=8", "rollout.top_p=0.95"]);
        sets.flat_map(|set| ["--set".into(), set.into()]).collect()
    };
    let mut whole = Vec::new();
    for mode in ["drain", "abort", "continue"] {
        let arguments = arguments(mode);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let dir = tempfile::tempdir().unwrap();
        complete(dir.path(), &arguments);

        let killed = tempfile::tempdir().unwrap();
        let mut process = Process::start(killed.path(), &arguments);
        process.wait_for_step(3);
        process.signal(Signal::KILL);
        process.end();
        assert!(killed.path().join("out/step-000002/pending.frames").is_file());
        complete(killed.path(), &[&arguments[..], &["--resume"]].concat());
        assert_same_run(killed.path(), dir.path());
        whole.push(dir);
    }
    let [drain, abort, in_place] = &whole[..] else { unreachable!("three modes") };
    // Who holds the unfinished rollouts makes no difference; finishing them first does.
    assert_same_run(abort.path(), in_place.path());
    let mixed = |dir: &Path| gauge(dir, "rollout_partial_ratio").into_iter().fold(0.0, f64::max);
    assert!(mixed(in_place.path()) > 0.0 && mixed(drain.path()) == 0.0, "{}", mixed(in_place.path()));
    for dir in &whole {
        let staleness = gauge(dir.path(), "trajectory_staleness_max");
        assert!(staleness.iter().all(|steps| (0.0..=4.0).contains(steps)), "{staleness:?}");
        assert!(staleness.contains(&2.0), "{staleness:?}");
    }
}

#[test]
fn dynamic_sampling_fills_its_batches_from_groups_in_flight_and_resumes_too() {
    let changes = |steps: &'static str| {
        let dynamic = "algorithm={ dapo: { dynamic_sampling: { max_batches: 3 } } }";
        [&IN_FLIGHT[..], &[dynamic, "eval.problems=0", steps]].concat()
    };
    let (whole, halves) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    in_process(&recipe(whole.path(), &changes("run.steps=4")), None, false).unwrap();
    in_process(&recipe(halves.path(), &changes("run.steps=2")), None, false).unwrap();
    in_process(&recipe(halves.path(), &changes("run.steps=4")), None, true).unwrap();
    assert_eq!(measured(halves.path()), measured(whole.path()));
    let filtered = gauge(whole.path(), "groups_filtered_total");
    assert!(filtered.last().is_some_and(|&n| n > 0.0), "{filtered:?}");
    let weights = |dir: &Path| weights(&dir.join("out/step-000004"));
    assert!(weights(halves.path()) == weights(whole.path()));
}

#[test]
fn a_checkpoint_whose_pending_rollouts_are_damaged_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let changes = [&IN_FLIGHT[..], &["run.steps=1", "eval.problems=0"]].concat();
    in_process(&recipe(dir.path(), &changes), None, false).unwrap();
    let path = dir.path().join("out/step-000001/pending.frames");
    let mut bytes = fs::read(&path).unwrap();
    bytes[300] ^= 1;
    fs::write(&path, bytes).unwrap();
    let longer = [&changes[..], &["run.steps=2"]].concat();
    let error = in_process(&recipe(dir.path(), &longer), None, true).expect_err("it is damaged");
    assert!(error.to_string().contains("pending.frames"), "{error}");
    assert_eq!(error.exit_class(), ExitClass::Usage);
}

fn in_process(
    recipe: &Recipe,
    reward: Option<Arc<dyn Reward>>,
    resume: bool,
) -> Result<RunOutcome, RunError> {
    run(recipe, &RunOptions { resume, reward, ..RunOptions::default() })
}

#[test]
fn a_run_is_resumed_with_a_changed_recipe_unless_its_checkpoint_would_lose_its_meaning() {
    let dir = tempfile::tempdir().unwrap();
    let short = ["run.steps=1", "eval.problems=0"];
    in_process(&recipe(dir.path(), &short), None, false).unwrap();
    for (change, key) in [("task.arithmetic.digits=1", "task.arithmetic.digits"), ("run.seed=6", "run.seed")]
    {
        let changed = recipe(dir.path(), &[&short[..], &[change]].concat());
        let error = in_process(&changed, None, true).expect_err(change);
        assert!(matches!(&error, RunError::RecipeChanged { change } if change.key == key), "{error}");
        assert_eq!(error.exit_class(), ExitClass::Usage);
    }
    let longer = ["run.steps=2", "eval.problems=0", "train.lr=2e-4", "rollout.group_size=2"];
    let outcome = in_process(&recipe(dir.path(), &longer), None, true).unwrap();
    assert_eq!(outcome.records.last().unwrap().step(), 2);
    assert!(dir.path().join("out/step-000002").is_dir());
}

#[test]
fn a_directory_with_checkpoints_is_neither_overwritten_nor_resumed_unasked() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), &["run.steps=1", "eval.problems=0"]);
    for _ in 0..2 {
        let error = in_process(&recipe, None, true).expect_err("nothing is there");
        assert!(matches!(error, RunError::NothingToResume { .. }), "{error}");
        assert!(!dir.path().join("out").exists(), "a refusal leaves nothing to resume");
    }
    in_process(&recipe, None, false).unwrap();
    let error = in_process(&recipe, None, false).expect_err("a run is there");
    assert!(matches!(error, RunError::OutTaken { .. }), "{error}");
    assert_eq!(error.exit_class(), ExitClass::Usage);
}

#[test]
fn a_run_that_died_before_its_first_checkpoint_is_resumed_from_its_start() {
    let whole = tempfile::tempdir().unwrap();
    let changes = ["run.steps=1", "eval.problems=0"];
    in_process(&recipe(whole.path(), &changes), None, false).unwrap();
    for left in [&[".lock"][..], &["metrics.jsonl", "step-000002.tmp/"], &["step-000002.tmp/"]] {
        let dead = tempfile::tempdir().unwrap();
        let out = dead.path().join("out");
        fs::create_dir(&out).unwrap();
        for name in left {
            match name.strip_suffix('/') {
                Some(name) => fs::create_dir(out.join(name)).unwrap(),
                None => {
                    fs::write(out.join(name), if *name == ".lock" { "" } else { "{\"half a li" }).unwrap()
                }
            }
        }
        in_process(&recipe(dead.path(), &changes), None, true).unwrap();
        assert_eq!(measured(dead.path()), measured(whole.path()), "{left:?}");
        assert!(!out.join("step-000002.tmp").exists());
    }
}

/// Judges by a function, and counts.
struct Judge<F> {
    n_asked: AtomicUsize,
    judge: F,
}

impl<F: Fn(&Problem, &str) -> f32 + Send + Sync + std::panic::RefUnwindSafe> Reward for Judge<F> {
    fn name(&self) -> &str {
        "judge"
    }

    fn score(&self, problem: &Problem, completion: &str, _finished: bool) -> f32 {
        self.n_asked.fetch_add(1, Ordering::Relaxed); // A count; it orders nothing.
        (self.judge)(problem, completion)
    }
}

fn judge<F>(judge: F) -> Arc<Judge<F>> {
    Arc::new(Judge { n_asked: AtomicUsize::new(0), judge })
}

/// Whether the sum's last digit is a multiple of three: a third of all completions, right or wrong.
fn is_third(completion: &str) -> bool {
    completion.ends_with(['0', '3', '6', '9'])
}

fn right(problem: &Problem, completion: &str) -> f32 {
    f32::from(u8::from(problem.answer == completion))
}

#[test]
fn rollouts_whose_reward_fails_leave_their_group_and_the_run_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let panics = judge(|problem: &Problem, completion: &str| match is_third(completion) {
        true => panic!("cannot judge {completion}"),
        false => right(problem, completion),
    });
    let returns_nan = judge(|problem: &Problem, completion: &str| match is_third(completion) {
        true => f32::NAN,
        false => right(problem, completion),
    });
    let recipe = recipe(dir.path(), &["run.steps=2", "eval.problems=0"]);
    let failed = |outcome: &RunOutcome| -> Vec<f64> {
        outcome.records.iter().filter_map(|record| record.get(metrics::REWARD_FAILED)).collect()
    };
    let options = |reward| RunOptions { overwrite: true, reward: Some(reward), ..RunOptions::default() };
    let panicked = run(&recipe, &options(panics.clone())).unwrap();
    let not_finite = run(&recipe, &options(returns_nan)).unwrap();
    assert_eq!(panics.n_asked.load(Ordering::Relaxed), 2 * 6 * 4);
    let counts = failed(&panicked);
    assert_eq!(counts.len(), 2);
    assert!(counts.iter().all(|&count| count > 0.0 && count < 24.0), "{counts:?}");
    // How a reward fails makes no difference to what is learnt.
    assert_eq!(failed(&not_finite), counts);
    for gauge in [metrics::PG_LOSS, metrics::GRAD_NORM, metrics::REWARD_MEAN] {
        let of = |outcome: &RunOutcome| outcome.records[2].get(gauge).unwrap();
        assert_eq!(of(&panicked), of(&not_finite));
    }
    assert!(panicked.records[2].get(metrics::GRAD_NORM).unwrap() > 0.0);
}

/// Message and hint of the error that stops a run with `reward`.
fn stopped_by(reward: Arc<dyn Reward>) -> (String, FailureReason) {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), &["eval.problems=0"]);
    let error = in_process(&recipe, Some(reward), false).expect_err("the reward is broken");
    assert_eq!(error.exit_class(), ExitClass::Usage);
    let RunError::Task(TaskError::EveryRewardFailed { n_failed, first }) = &error else { panic!("{error}") };
    assert_eq!(*n_failed, 6 * 4);
    (format!("{error}\nhint: {}", error.hint()), first.reason.clone())
}

#[test]
fn a_reward_that_always_panics_stops_the_run() {
    let (text, reason) = stopped_by(judge(|_: &Problem, _: &str| panic!("no judge in the house")));
    assert_eq!(reason, FailureReason::Panicked { message: "no judge in the house".into() });
    insta::assert_snapshot!(text, @r"
    the reward failed on all 24 rollouts of a step; first: reward `judge` failed on rollout 0 of group 0: it panicked: no judge in the house
    hint: score a completion with this reward outside a run, to see what breaks
    ");
}

#[test]
fn a_reward_that_is_always_nan_stops_the_run() {
    let (text, reason) = stopped_by(judge(|_: &Problem, _: &str| f32::NAN));
    assert!(matches!(reason, FailureReason::NotFinite { score } if score.is_nan()));
    insta::assert_snapshot!(text, @r"
    the reward failed on all 24 rollouts of a step; first: reward `judge` failed on rollout 0 of group 0: its score is NaN
    hint: score a completion with this reward outside a run, to see what breaks
    ");
}

/// Every weight of a model directory.
fn weights(dir: &Path) -> Vec<(String, Vec<f32>)> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let read = |(name, _): (String, Vec<usize>)| {
        let mut values = Vec::new();
        checkpoint.read(&name, &mut values).unwrap();
        (name, values)
    };
    canonical_tensors(checkpoint.config()).into_iter().map(read).collect()
}

#[test]
fn an_update_that_overflows_a_weight_is_the_run_that_diverged() {
    let dir = tempfile::tempdir().unwrap();
    let changes =
        ["train.lr=3e38", "train.mini_steps=1", "eval.problems=0", "run.save_every=1", "run.steps=1"];
    let error = in_process(&recipe(dir.path(), &changes), None, false).expect_err("no weight is finite");
    assert_eq!(error.exit_class(), ExitClass::Diverged, "{error}");
    let said = error.to_string();
    assert!(
        said.starts_with("the weight `model.") && said.ends_with("in the step after version 0"),
        "{said}"
    );
    assert!(error.hint().contains("`train.lr`"), "{}", error.hint());
    assert_eq!(names(&dir.path().join("out")), [".lock", "metrics.jsonl", "recipe.yaml"]);
}

#[test]
fn equal_rewards_teach_nothing_and_change_no_weight() {
    for algorithm in ["algorithm={ dapo: {} }", "algorithm={ grpo: {} }"] {
        let dir = tempfile::tempdir().unwrap();
        let recipe = recipe(dir.path(), &["run.steps=2", "eval.problems=0", algorithm]);
        let outcome = in_process(&recipe, Some(judge(|_: &Problem, _: &str| 0.5)), false).unwrap();
        assert_eq!(outcome.records.len(), 3);
        for record in &outcome.records[1..] {
            let read = [metrics::FRAC_REWARD_ZERO_STD, metrics::POLICY_VERSION, metrics::REWARD_MEAN];
            assert_eq!(read.map(|gauge| record.get(gauge)), [Some(1.0), Some(0.0), Some(0.5)]);
        }
        assert!(weights(&dir.path().join("out/step-000002")) == weights(&model()), "weights changed");
    }
}

#[test]
fn dynamic_sampling_gives_up_when_no_batch_has_a_signal() {
    let dir = tempfile::tempdir().unwrap();
    let dynamic = "algorithm={ dapo: { dynamic_sampling: { max_batches: 2 } } }";
    let recipe = recipe(dir.path(), &["eval.problems=0", dynamic]);
    let reward = judge(|_: &Problem, _: &str| 1.0);
    let error = in_process(&recipe, Some(reward.clone()), false).expect_err("nothing to learn");
    assert!(matches!(error, RunError::NoSignal { n_groups: 12, batches: 2 }), "{error}");
    assert_eq!(error.exit_class(), ExitClass::Diverged);
    assert_eq!(reward.n_asked.load(Ordering::Relaxed), 2 * 6 * 4);
    assert!(!names(&dir.path().join("out")).iter().any(|name| name.starts_with("step-")), "no step was done");
}

/// Runs until `then` judges, after four steps' worth of rollouts of which every third is right; returns the newest checkpoint.
fn newest_before(then: f32, changes: &[&str]) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let n_asked = AtomicUsize::new(0);
    let reward = judge(move |_: &Problem, _: &str| {
        let n = n_asked.fetch_add(1, Ordering::Relaxed); // A count; it orders nothing.
        if n < 4 * 6 * 4 { f32::from(u8::from(n.is_multiple_of(3))) } else { then }
    });
    let error = in_process(&recipe(dir.path(), changes), Some(reward), false).expect_err("nothing to learn");
    let is_expected = |error: &RunError| match then.is_nan() {
        true => matches!(error, RunError::Task(TaskError::EveryRewardFailed { .. })),
        false => matches!(error, RunError::NoSignal { .. }),
    };
    assert!(is_expected(&error), "{error}");
    let newest = Checkpoints::new(dir.path().join("out"), 1).latest().unwrap().expect("steps were done");
    (dir, newest)
}

#[test]
fn a_run_that_finds_nothing_to_learn_leaves_the_checkpoint_that_its_last_step_would_have_left() {
    let dynamic = "algorithm={ dapo: { dynamic_sampling: { max_batches: 2 } } }";
    for (n_in_flight, then) in [(0, 1.0), (3, 1.0), (0, f32::NAN)] {
        let changes =
            |save: &'static str| [&IN_FLIGHT[..n_in_flight], &["eval.problems=0", dynamic, save]].concat();
        let (_asked_dir, asked) = newest_before(then, &changes("run.save_every=1"));
        let (_dir, found) = newest_before(then, &changes("run.save_every=0"));
        assert_eq!(found.file_name(), asked.file_name());
        assert_eq!(names(&found), names(&asked));
        assert_eq!(names(&found).contains(&"pending.frames".to_owned()), n_in_flight > 0);
        // The recipes differ, in where they lie and how often they save.
        let is_state = |name: &String| ["run_state.json", "trainer_state.json"].contains(&name.as_str());
        for name in names(&found).iter().filter(|name| !is_state(name)) {
            assert!(fs::read(found.join(name)).unwrap() == fs::read(asked.join(name)).unwrap(), "{name}");
        }
        let stood = |dir: &Path| {
            let text = fs::read_to_string(dir.join("run_state.json")).unwrap();
            let state: Value = serde_json::from_str(&text).unwrap();
            ["cursor", "begun"].map(|key| state[key].clone())
        };
        assert_eq!(stood(&found), stood(&asked));
    }
}

#[test]
fn a_run_whose_reward_never_returns_leaves_the_steps_before() {
    let dir = tempfile::tempdir().unwrap();
    let (release, blocked) = mpsc::channel::<()>();
    let (blocked, n_asked) = (Mutex::new(blocked), AtomicUsize::new(0));
    let reward = judge(move |_: &Problem, _: &str| {
        if n_asked.fetch_add(1, Ordering::Relaxed) >= 6 * 4 {
            let _ = blocked.lock().unwrap().recv(); // An error, once the test has ended.
        }
        1.0
    });
    let recipe = recipe(dir.path(), &["eval.problems=0", "run.save_every=0", "ring.deadline_s=1"]);
    let error = in_process(&recipe, Some(reward), false).expect_err("it is never answered");
    assert!(matches!(error, RunError::Stalled { .. }), "{error}");
    assert!(dir.path().join("out/step-000001/trainer_state.json").exists());
    drop(release);
}
