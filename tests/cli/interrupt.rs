//! Ctrl-C, SIGTERM and SIGHUP: what there is is saved, and a run goes on later.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::thread;

use rustix::process::{Pid, Signal, kill_process};

use crate::directory::Directory;

/// Steps of a run that is far from done when it is interrupted.
const STEPS: &str = "run.steps=20000";

/// Starts `r3` and interrupts it once it has printed a line with `until` in it; returns exit code and stderr.
fn interrupted(directory: &Directory, arguments: &[&str], until: &str) -> (i32, String) {
    signalled(directory, arguments, (until, &|| true), Signal::INT)
}

/// The same with any signal, which waits until `is_time`, too.
fn signalled(
    directory: &Directory,
    arguments: &[&str],
    (until, is_time): (&str, &dyn Fn() -> bool),
    signal: Signal,
) -> (i32, String) {
    let mut command = directory.command(env!("CARGO_BIN_EXE_r3"));
    let (mut child, mut stderr, mut said) = begun(command.args(arguments), until);
    while !is_time() {
        assert_eq!(child.try_wait().unwrap(), None, "it ended early: {said}");
        thread::yield_now();
    }
    kill_process(Pid::from_child(&child), signal).unwrap();
    stderr.read_to_string(&mut said).unwrap();
    (child.wait().unwrap().code().expect("it ends by itself"), said)
}

/// Starts `command`, and reads its stderr up to a line with `until` in it.
fn begun(command: &mut Command, until: &str) -> (Child, BufReader<ChildStderr>, String) {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    while !said.lines().next_back().is_some_and(|line| line.contains(until)) {
        assert_ne!(stderr.read_line(&mut said).unwrap(), 0, "it ended early: {said}");
    }
    (child, stderr, said)
}

#[test]
fn a_run_that_loses_its_terminal_is_saved_however_often_it_is_told() {
    let directory = Directory::with_model();
    let mut command = directory.command(env!("CARGO_BIN_EXE_r3"));
    let run = ["run", "recipe.yaml", "--set", STEPS, "--set", "run.save_every=0"];
    let (mut child, mut stderr, mut said) = begun(command.args(run), " 2/20000 ");
    let status = loop {
        kill_process(Pid::from_child(&child), Signal::HUP).unwrap();
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None => thread::yield_now(),
        }
    };
    stderr.read_to_string(&mut said).unwrap();
    assert_eq!(status.code(), Some(130), "{said}");
    assert!(said.contains(" is finished and saved\n"), "{said}");
}

#[test]
fn a_run_that_was_told_to_outlive_its_terminal_does() {
    let directory = Directory::with_model();
    let mut command = directory.command("sh");
    command.args(["-c", "trap '' HUP; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_r3")]);
    let run = ["run", "recipe.yaml", "--set", "run.steps=40"];
    let (mut child, mut stderr, mut said) = begun(command.args(run), " 2/40 ");
    kill_process(Pid::from_child(&child), Signal::HUP).unwrap();
    stderr.read_to_string(&mut said).unwrap();
    assert!(child.wait().unwrap().success(), "{said}");
    assert!(directory.path("run/step-000040").exists());
}

#[test]
fn an_interrupted_run_is_saved_and_can_be_resumed() {
    let directory = Directory::with_model();
    let (code, said) = interrupted(
        &directory,
        &["run", "recipe.yaml", "--set", STEPS, "--set", "run.save_every=0"],
        " 2/20000 ",
    );
    assert_eq!(code, 130, "{said}");
    let error = said.lines().find(|line| line.starts_with("error: ")).expect("it says why it ends");
    let step: u64 = error
        .strip_prefix("error: interrupted; step ")
        .and_then(|rest| rest.strip_suffix(" is finished and saved"))
        .and_then(|step| step.parse().ok())
        .expect(error);
    assert!(step >= 2);
    assert!(said.ends_with("\nhint: continue with --resume\n"), "{said}");
    assert!(directory.path(&format!("run/step-{step:06}/trainer_state.json")).exists());

    let steps = format!("run.steps={}", step + 1);
    let summary = directory.done_json(&["run", "recipe.yaml", "--resume", "--json", "--set", &steps]);
    assert_eq!(summary["steps"], step + 1);
}

#[test]
fn an_interrupted_comparison_says_how_to_start_again() {
    let directory = Directory::with_model();
    directory.done(&["compare", "recipe.yaml"]);
    let compare = ["compare", "recipe.yaml", "--overwrite", "--set"];
    assert!(directory.refused(&[&compare[..], &["ring.bytes=1KiB"]].concat()).contains("the ring holds"));
    assert_eq!(directory.names("run"), ["off", "on", "report.html"], "it is that of the comparison there");
    let (code, said) = interrupted(&directory, &[&compare[..], &[STEPS]].concat(), " 1/20000 ");
    assert_eq!(code, 130, "{said}");
    assert_eq!(directory.names("run"), ["off", "on"], "the report was of runs that are gone");
    assert!(said.ends_with("\nhint: start it again with --overwrite\n"), "{said}");
}

#[test]
fn a_warm_start_holds_its_directory_and_replaces_no_model_that_appears_there() {
    let directory = Directory::with_model();
    let steps = ["sft", "sft.yaml", "--set", "sft.steps=1000"];
    let begin = || {
        let mut command = directory.command(env!("CARGO_BIN_EXE_r3"));
        let mut child = command.args(steps).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        while !said.contains("sft step 50/") {
            assert_ne!(stderr.read_line(&mut said).unwrap(), 0, "it ended early: {said}");
        }
        (child, stderr)
    };
    let end = |(mut child, mut stderr): (Child, BufReader<ChildStderr>)| {
        let mut said = String::new();
        stderr.read_to_string(&mut said).unwrap();
        (child.wait().unwrap().code(), said)
    };
    let trained = begin();
    for writer in [&["new-model", ".", "warm"][..], &["export", "model", "warm"], &steps] {
        let refused = directory.refused(writer);
        assert!(refused.contains("error: another process runs in warm\n"), "{refused}");
    }
    directory.write("warm/model.safetensors", "copied by hand");
    let (code, said) = end(trained);
    assert_eq!(code, Some(2), "{said}");
    assert!(
        said.ends_with(
            "error: warm has got a model meanwhile\n\nhint: the one that was trained lies in warm/.unfinished: move it \
             elsewhere, since the next one written here replaces it\n"
        ),
        "{said}"
    );
    assert_eq!(fs::read_to_string(directory.path("warm/model.safetensors")).unwrap(), "copied by hand");
    assert_eq!(directory.names("warm"), [".unfinished", "model.safetensors"]);
    fs::rename(directory.path("warm/.unfinished"), directory.path("trained")).unwrap();
    directory.done(&["eval", "recipe.yaml", "--model", "trained"]);
    fs::remove_dir_all(directory.path("warm")).unwrap();

    let (mut child, _) = begin();
    kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    child.wait().unwrap();
    assert!(
        directory
            .refused(&["run", "recipe.yaml", "--resume", "--set", "run.out=warm"])
            .contains(" holds no checkpoint ")
    );
    directory.done(&["export", "model", "warm"]);
    assert_eq!(directory.names("warm"), directory.names("model"));
}

#[test]
fn an_interrupted_rollout_leaves_whole_lines_under_a_name_that_says_that_they_are_not_all() {
    let directory = Directory::with_model();
    directory.write("prompts.jsonl", "{\"prompt\": \"1+1=\"}\n".repeat(200_000));
    let rollout =
        ["rollout", "model", "--prompts", "prompts.jsonl", "--out", "out.jsonl", "--max-new-tokens", "8"];
    for signal in [Signal::INT, Signal::TERM] {
        let partial = directory.path("out.jsonl.partial");
        let has_lines = || fs::metadata(&partial).is_ok_and(|found| found.len() > 0);
        let (code, said) = signalled(&directory, &rollout, ("KV memory ", &has_lines), signal);
        assert_eq!(code, 130, "{said}");
        let error = said.lines().find(|line| line.starts_with("error: ")).expect("it says why it ends");
        let n: usize = error
            .strip_prefix("error: interrupted; ")
            .and_then(|rest| rest.split_once(" of 200000 lie in out.jsonl.partial"))
            .and_then(|(count, _)| count.split_once(" rollout")?.0.parse().ok())
            .expect(error);
        let partial = fs::read_to_string(&partial).unwrap();
        assert!(n > 0 && partial.ends_with('\n'));
        assert_eq!(partial.lines().count(), n);
        assert!(!directory.path("out.jsonl").exists());
        fs::remove_file(directory.path("out.jsonl.partial")).unwrap();
        assert!(said.ends_with(
            "\nhint: start it again, which samples all of them, or keep those under another name\n"
        ));
    }
}

#[test]
fn an_interrupted_rollout_to_stdout_claims_no_file() {
    let directory = Directory::with_model();
    directory.write("prompts.jsonl", "{\"prompt\": \"1+1=\"}\n".repeat(200_000));
    let rollout = ["rollout", "model", "--prompts", "prompts.jsonl", "--out", "-", "--max-new-tokens", "8"];
    let (code, said) = interrupted(&directory, &rollout, "KV memory ");
    assert_eq!(code, 130, "{said}");
    let error = said.lines().find(|line| line.starts_with("error: ")).expect("it says why it ends");
    assert!(error.ends_with(" of 200000 went to stdout"), "{error}");
    assert!(said.ends_with("\nhint: start it again, which samples all of them\n"), "{said}");
}
