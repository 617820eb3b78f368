//! What a run was started with may have changed in its files when it is resumed.

use std::fs;

use serde_json::Value;

use crate::directory::Directory;

/// Sixty sums of one digit, of which `answer` says the answers.
fn sums(answer: impl Fn(u32, u32) -> u32) -> String {
    let pairs = (1..7).flat_map(|a| (0..10).map(move |b| (a, b)));
    pairs.map(|(a, b)| format!("{{\"prompt\":\"{a}+{b}=\",\"answer\":{}}}\n", answer(a, b))).collect()
}

/// A run of one step, to be resumed for a second one.
fn one_step_of(task: &str, objective: &str) -> Directory {
    let directory = Directory::with_model();
    directory.write("sums.jsonl", sums(|a, b| a + b));
    directory
        .edit_recipe("task: { arithmetic: { digits: 1, held_out: 8 } }", &format!("{task}\n{objective}"));
    directory.done(&["run", "recipe.yaml", "--set", "run.steps=1"]);
    directory
}

/// Refused with `message` and exit code 2, and nothing is written.
fn assert_refused(directory: &Directory, message: &str) {
    let ended = directory.r3(&["run", "recipe.yaml", "--resume"]);
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    assert!(ended.stderr.contains(&format!("error: {message}\n")), "{}", ended.stderr);
    assert!(ended.stderr.contains("hint: resume with what the run was started with"), "{}", ended.stderr);
    assert!(!directory.names("run").contains(&"step-000002".to_owned()));
}

const JSONL: &str = "task: { jsonl: { train: sums.jsonl, held_out: 8 } }";
const OTHER_PROBLEMS: &str = "the problems of the task are not those that the run was started with";

#[test]
fn a_run_is_not_resumed_with_other_problems() {
    let directory = one_step_of(JSONL, "");
    let longer = sums(|a, b| a + b) + "{\"prompt\":\"9+9=\",\"answer\":18}\n";
    for changed in [longer, sums(|a, b| a * b)] {
        directory.write("sums.jsonl", changed);
        assert_refused(&directory, OTHER_PROBLEMS);
    }
    // Neither line ends nor a blank line are another problem.
    directory.write("sums.jsonl", sums(|a, b| a + b).replace('\n', "\r\n") + "\r\n");
    directory.done(&["run", "recipe.yaml", "--resume"]);
}

#[test]
fn a_run_is_not_resumed_with_other_weights_of_its_reference() {
    let directory = one_step_of(JSONL, "objective: { kl: { coef: 0.1 } }");
    fs::remove_dir_all(directory.path("model")).unwrap();
    directory.done(&["new-model", ".", "model", "--seed", "4"]);
    assert_refused(&directory, "model is not the reference policy that the run was started with");
    fs::remove_dir_all(directory.path("model")).unwrap();
    directory.done(&["new-model", ".", "model", "--seed", "3"]);
    // The same weights elsewhere are the same policy, and others there are other ones by the recipe's word.
    directory.done(&["new-model", ".", "other", "--seed", "4"]);
    let ended = directory.r3(&["run", "recipe.yaml", "--resume", "--set", "objective.kl.reference=other"]);
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert!(ended.stderr.contains("objective.kl.reference"), "{}", ended.stderr);
}

/// When the run says it was started, in its newest checkpoint.
fn started(directory: &Directory, step: &str) -> Option<u64> {
    let text = fs::read_to_string(directory.path(&format!("run/{step}/run_state.json"))).unwrap();
    let state: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(state["inputs"]["problems"].as_str().map(str::len), Some(16));
    state["inputs"]["started_unix_s"].as_u64()
}

#[test]
fn a_resumed_run_tells_its_chat_template_the_time_of_its_start() {
    let directory = Directory::with_model();
    let chat = sums(|a, b| a + b)
        .replace("\"prompt\":\"", "\"prompt\":[{\"role\":\"user\",\"content\":\"")
        .replace("=\",", "=\"}],");
    directory.write("sums.jsonl", chat);
    directory.write("model/chat_template.jinja", "{{ strftime_now('%H:%M:%S') }}:{{ messages[0].content }}");
    directory.edit_recipe("task: { arithmetic: { digits: 1, held_out: 8 } }", JSONL);
    directory.done(&["run", "recipe.yaml", "--set", "run.steps=1"]);
    let first = started(&directory, "step-000001");
    assert!(first.is_some_and(|seconds| seconds > 1_700_000_000));
    directory.done(&["run", "recipe.yaml", "--resume"]);
    assert_eq!(started(&directory, "step-000002"), first);
}

#[test]
fn a_run_without_such_a_template_writes_no_time_into_its_checkpoints() {
    assert_eq!(started(&one_step_of(JSONL, ""), "step-000001"), None);
}
