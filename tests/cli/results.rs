//! What commands print and write when all is well.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use serde_json::Value;

use crate::directory::Directory;

/// The keys that `docs/json.md` promises for a run.
pub(crate) const RUN_KEYS: [&str; 11] = [
    "steps",
    "seconds",
    "eval_before",
    "eval_after",
    "rollout_train_k3_kl",
    "rollout_train_logprobs_abs_diff_mean",
    "rollout_train_extreme_frac_tau2",
    "router_discrepancy_token_layer_frac",
    "router_discrepancy_token_any_frac",
    "rollout_tokens_per_second",
    "train_tokens_per_second",
];

pub(crate) fn keys(value: &Value) -> Vec<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

/// A model that is right now and then, so that there is something to learn from.
fn warm() -> Directory {
    let directory = Directory::with_model();
    directory.done(&["sft", "sft.yaml"]);
    directory
}

#[test]
fn a_run_ends_stdout_with_its_numbers() {
    let directory = warm();
    let run = ["run", "recipe.yaml", "--set", "model.path=warm"];
    let summary = directory.done_json(&[&run[..], &["--json"]].concat());
    assert_eq!(keys(&summary), RUN_KEYS);
    assert_eq!(summary["steps"], 2);
    assert!(summary.as_object().unwrap().values().all(Value::is_number), "{summary}");
    assert!(summary["rollout_train_k3_kl"].as_f64().unwrap() > 0.0, "bf16 rounds");
    for name in
        ["metrics.jsonl", "recipe.yaml", "step-000001/model.safetensors", "step-000002/tokenizer.json"]
    {
        assert!(directory.path(&format!("run/{name}")).exists(), "{name}");
    }
    let table = directory.done(&[&run[..], &["--overwrite"]].concat());
    assert!(table.starts_with("  steps                   2 in "), "{table}");
}

#[test]
fn a_run_says_where_it_writes_and_can_be_watched() {
    let directory = Directory::with_model();
    let first_lines = |listen: &str, out: &str| {
        let ended = directory.r3(&["run", "recipe.yaml", "--set", listen, "--set", out]);
        let mut lines = ended.stderr.lines().map(str::to_owned);
        (lines.next().unwrap_or_default(), lines.next().unwrap_or_default())
    };
    let first_line = |listen: &str, out: &str| first_lines(listen, out).0;
    let (first, second) = first_lines("metrics.listen=null", "run.out=quiet");
    assert_eq!(first, "writing to quiet");
    let memory = "KV memory 64KiB: 928 tokens of 69.5 bytes, of which routes 5.5 (7.9%); beside it, up to 192B of \
                  traces, of 8 sequences at once";
    assert_eq!(second, memory);
    let line = first_line("metrics.listen=127.0.0.1:0", "run.out=served");
    let address = line.strip_prefix("writing to served; metrics at http://127.0.0.1:").expect(&line);
    let port: u16 = address.strip_suffix("/metrics").and_then(|port| port.parse().ok()).expect(&line);
    assert_ne!(port, 0, "the port that was found");
}

#[test]
fn a_run_in_one_dtype_has_no_mismatch_in_any_bit() {
    let directory = warm();
    for dtype in ["f32", "bf16"] {
        let [rollout, train] = ["rollout", "train"].map(|side| format!("{side}.dtype={dtype}"));
        // Ticks of five tokens cut prompts and mix them with what is decoded.
        let cramped = ["--set", "engine.max_batch_tokens=5", "--set", "train.mini_steps=2"];
        let run = ["run", "recipe.yaml", "--json", "--overwrite", "--set", "model.path=warm"];
        let one_dtype = ["--set", "numerics=exact", "--set", &rollout, "--set", &train];
        let summary = directory.done_json(&[&run[..], &one_dtype, &cramped].concat());
        assert_eq!(summary["rollout_train_k3_kl"], 0.0, "{dtype}");
        let metrics = fs::read_to_string(directory.path("run/metrics.jsonl")).unwrap();
        let steps: Vec<Value> =
            metrics.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(steps.len(), 2);
        for key in ["rollout_train_logprobs_abs_diff_max", "router_discrepancy_token_any_frac"] {
            // A step in which all rewards are equal trains nothing and measures nothing.
            let measured: Vec<f64> = steps.iter().filter_map(|step| step.get(key)?.as_f64()).collect();
            assert!(!measured.is_empty() && measured.iter().all(|&value| value == 0.0), "{dtype}: {key}");
        }
    }
}

/// Through over-sampling, refits in mid-completion, several answers, several updates and a reference policy.
#[test]
fn a_truncated_run_in_one_dtype_has_no_mismatch_in_any_bit() {
    let directory = warm();
    let settings = [
        "model.path=warm",
        "numerics=exact",
        "rollout.temperature=0.9",
        "rollout.sample_top_k=6",
        "rollout.top_p=0.95",
        "rollout.min_p=0.01",
        "task.arithmetic.attempts=2",
        "rollout.over_sampling_groups=2",
        "train.max_staleness=4",
        "train.mini_steps=2",
        "objective.kl={coef: 0.1}",
        "engine.max_batch_tokens=5",
        "ring.bytes=1MiB",
    ];
    for dtype in ["f32", "bf16"] {
        let [rollout, train] = ["rollout", "train"].map(|side| format!("{side}.dtype={dtype}"));
        let mut run = vec!["run", "recipe.yaml", "--json", "--overwrite", "--set", &rollout, "--set", &train];
        run.extend(settings.iter().flat_map(|setting| ["--set", setting]));
        let summary = directory.done_json(&run);
        assert_eq!(summary["rollout_train_k3_kl"], 0.0, "{dtype}");
        let metrics = fs::read_to_string(directory.path("run/metrics.jsonl")).unwrap();
        let steps: Vec<Value> =
            metrics.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(steps.len(), 2);
        let values =
            |key: &str| -> Vec<f64> { steps.iter().filter_map(|step| step.get(key)?.as_f64()).collect() };
        let differences = values("rollout_train_logprobs_abs_diff_max");
        assert!(!differences.is_empty() && differences.iter().all(|&value| value == 0.0), "{differences:?}");
        let (mean, max) = (values("support_size/mean"), values("support_size/max"));
        assert_eq!((mean.len(), max.len()), (2, 2));
        assert!(
            mean.iter().zip(&max).all(|(mean, max)| 1.0 <= *mean && mean <= max && *max <= 6.0),
            "{mean:?}"
        );
    }
}

#[test]
fn a_run_trains_on_several_answers_and_what_was_said_between_them_changes_no_bit() {
    let directory = warm();
    let run = ["run", "recipe.yaml", "--json", "--set", "model.path=warm", "--set", "rollout.dtype=f32"];
    let twice = ["--set", "task.arithmetic.attempts=2", "--set", "ring.bytes=256KiB"];
    let summary = directory.done_json(&[&run[..], &twice].concat());
    assert_eq!(summary["rollout_train_k3_kl"], 0.0);
    assert_eq!(summary["router_discrepancy_token_layer_frac"], 0.0);
    let metrics = fs::read_to_string(directory.path("run/metrics.jsonl")).unwrap();
    let steps: Vec<Value> = metrics.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(steps.len(), 2);
    for step in steps {
        let turns = step["num_turns/mean"].as_f64().unwrap();
        let length = step["response_length/mean"].as_f64().unwrap();
        assert!(1.0 < turns && turns <= 2.0, "{turns} turns: most first answers are wrong");
        assert!(turns <= length && length <= 3.0 * turns, "{length} tokens in {turns} turns");
    }
}

#[test]
fn a_run_in_two_parts_ends_with_the_bytes_of_one_whatever_it_trains_by() {
    let directory = warm();
    for (name, settings) in [
        ("adamw", &["train.weight_decay=0.1"][..]),
        ("8bit", &["train.moments=8bit"]),
        ("muon", &["train.muon={}", "train.non_finite=skip"]),
        ("r2", &["router_replay.mode=r2", "train.mini_steps=2"]),
        ("r2-gates", &["router_replay={mode: r2, gates: true}", "train.mini_steps=2"]),
        ("r3-threshold", &["router_replay.threshold=0.5"]),
    ] {
        let run = |steps: u32, out: &str, more: &[&str]| {
            let (steps, out) = (format!("run.steps={steps}"), format!("run.out={out}"));
            let fixed =
                ["run", "recipe.yaml", "--json", "--set", "model.path=warm", "--set", &steps, "--set", &out];
            let settings = settings.iter().flat_map(|setting| ["--set", setting]);
            directory.done_json(&[&fixed[..], &settings.collect::<Vec<_>>(), more].concat())
        };
        let [whole, parts] = ["whole", "parts"].map(|part| format!("{name}-{part}"));
        run(2, &whole, &[]);
        run(1, &parts, &[]);
        run(2, &parts, &["--resume"]);
        let weights = |run: &str, step: u32| {
            fs::read(directory.path(&format!("{run}/step-00000{step}/model.safetensors"))).unwrap()
        };
        assert!(weights(&whole, 2) == weights(&parts, 2), "{name}");
        assert!(weights(&whole, 1) != weights(&whole, 2), "{name}: nothing was trained");
    }
}

#[test]
fn equal_dtypes_agree_to_the_bit() {
    let directory = warm();
    let summary = directory.done_json(&[
        "run",
        "recipe.yaml",
        "--json",
        "--set",
        "model.path=warm",
        "--set",
        "rollout.dtype=f32",
    ]);
    assert_eq!(summary["rollout_train_k3_kl"], 0.0);
    assert_eq!(summary["rollout_train_logprobs_abs_diff_mean"], 0.0);
}

#[test]
fn a_comparison_has_the_numbers_of_both_runs_and_a_report() {
    let directory = warm();
    let compare = ["compare", "recipe.yaml", "--set", "model.path=warm"];
    let comparison = directory.done_json(&[&compare[..], &["--json"]].concat());
    assert_eq!(keys(&comparison), ["on", "off"]);
    for side in ["on", "off"] {
        assert_eq!(keys(&comparison[side]), RUN_KEYS);
        assert!(directory.path(&format!("run/{side}/metrics.jsonl")).exists());
    }
    assert!(fs::read_to_string(directory.path("run/report.html")).unwrap().contains("<svg"));
    let ended = directory.r3(&[&compare[..], &["--overwrite"]].concat());
    assert!(ended.stdout.contains("replay on  replay off"), "{}", ended.stdout);
    assert!(ended.stderr.ends_with("report: run/report.html\n"), "{}", ended.stderr);
}

#[test]
fn an_evaluation_measures_what_a_run_does() {
    let directory = warm();
    let run = directory.done_json(&["run", "recipe.yaml", "--json", "--set", "model.path=warm"]);
    let eval =
        |arguments: &[&str]| directory.done_json(&[&["eval", "recipe.yaml", "--json"], arguments].concat());
    let before = eval(&["--model", "warm"]);
    assert_eq!(keys(&before), ["accuracy", "problems", "seconds"]);
    assert_eq!((&before["accuracy"], &before["problems"]), (&run["eval_before"], &Value::from(8)));
    assert_eq!(eval(&["--model", "run"])["accuracy"], run["eval_after"], "the newest checkpoint");
    assert_eq!(eval(&["--model", "run/step-000001", "--problems", "3"])["problems"], 3);
    let text = directory.done(&["eval", "recipe.yaml", "--model", "warm"]);
    assert!(text.contains(" % of 8 held-out problems in "), "{text}");
}

#[test]
fn a_warm_start_writes_a_model() {
    let directory = Directory::with_model();
    let outcome = directory.done_json(&["sft", "sft.yaml", "--json"]);
    assert_eq!(keys(&outcome), ["steps", "seconds", "loss", "eval_after"]);
    assert_eq!(outcome["steps"], 20);
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        assert!(directory.path(&format!("warm/{name}")).exists(), "{name}");
    }
    assert!(!directory.path("warm/.unfinished").exists());
    directory.done(&["sft", "sft.yaml", "--overwrite"]);
}

#[test]
fn a_warm_start_that_has_nowhere_to_go_is_refused_before_its_first_step() {
    let directory = Directory::with_model();
    directory.write("file", "");
    for out in ["file", "file/inside"] {
        let said = directory.refused(&["sft", "sft.yaml", "--set", &format!("run.out={out}")]);
        assert!(said.contains(&format!("error: cannot use {out}")) && !said.contains("step"), "{said}");
    }
}

#[test]
fn both_sides_score_alike_and_replay_what_was_chosen() {
    let directory = Directory::with_model();
    directory.write("tokens.jsonl", "{\"tokens\": [8, 11, 14, 7, 12, 18]}\n{\"tokens\": [8, 9]}\n");
    let score = |input: &str, side: &str| {
        directory.done(&["score", "model", "--input", input, "--side", side, "--dtype", "f32"])
    };
    let engine = score("tokens.jsonl", "engine");
    assert_eq!(engine, score("tokens.jsonl", "trainer"), "f32 is bit-identical on both sides");
    let lines: Vec<Value> = engine.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2);
    assert_eq!(keys(&lines[0]), ["logprobs", "routed_experts", "layer_ids"]);
    assert_eq!(lines[0]["logprobs"].as_array().unwrap().len(), 5);
    assert_eq!(lines[0]["routed_experts"].as_array().unwrap().len(), 5);
    assert_eq!(lines[0]["layer_ids"], serde_json::json!([0, 1]));

    let mut replayed = serde_json::json!({ "tokens": [8, 9], "routed_experts": lines[1]["routed_experts"] });
    directory.write("replay.jsonl", replayed.to_string());
    for side in ["engine", "trainer"] {
        let line: Value = serde_json::from_str(&score("replay.jsonl", side)).unwrap();
        assert_eq!(line["logprobs"], lines[1]["logprobs"]);
        assert_eq!(line["live_differs"], serde_json::json!([]));
    }
    let live = replayed["routed_experts"][0][1].clone();
    let other: Vec<u64> = (0..4).filter(|id| !live.as_array().unwrap().contains(&Value::from(*id))).collect();
    replayed["routed_experts"][0][1] = other.clone().into();
    directory.write("replay.jsonl", replayed.to_string());
    for side in ["engine", "trainer"] {
        let line: Value = serde_json::from_str(&score("replay.jsonl", side)).unwrap();
        let difference = serde_json::json!({ "position": 0, "layer_id": 1, "replayed": other, "live": live });
        assert_eq!(line["live_differs"], Value::Array(vec![difference]), "{side}");
        assert_ne!(line["logprobs"], lines[1]["logprobs"]);
    }
}

#[test]
fn each_line_is_scored_as_it_arrives_and_a_reader_may_leave() {
    let directory = Directory::with_model();
    let mut command = directory.command(env!("CARGO_BIN_EXE_r3"));
    command.args(["score", "model", "--input", "-"]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    for _ in 0..2 {
        stdin.write_all(b"{\"tokens\": [8, 9]}\n").unwrap();
        line.clear();
        stdout.read_line(&mut line).unwrap();
        assert!(line.starts_with("{\"logprobs\""), "{line}");
    }
    drop(stdout);
    // The pipe may live on for a moment, in a process that another test is about to start; but not for all these lines.
    let has_left = (0..100_000).any(|_| stdin.write_all(b"{\"tokens\": [8, 9]}\n").is_err());
    assert!(has_left, "it scores for nobody");
    let ended = child.wait_with_output().unwrap();
    assert_eq!((ended.status.code(), ended.stderr.as_slice()), (Some(0), &b""[..]));
}

#[test]
fn a_new_model_says_its_size_and_an_exported_one_scores_the_same() {
    let directory = Directory::empty();
    assert_eq!(
        directory.done(&["new-model", "config.json", "model", "--dtype", "f32"]),
        "wrote model: 5,872 parameters, f32\n"
    );
    assert_eq!(
        directory.done(&["export", "model", "copy", "--dtype", "f32"]),
        "wrote copy: 5,872 parameters, f32\n"
    );
    directory.write("tokens.jsonl", "{\"tokens\": [8, 11, 14, 7, 12, 18]}\n");
    let score = |model: &str| directory.done(&["score", model, "--input", "tokens.jsonl"]);
    assert_eq!(score("model"), score("copy"));
    directory.done(&["run", "recipe.yaml"]);
    directory.done(&["export", "run", "trained"]);
    assert!(directory.path("trained/tokenizer.json").exists());
    assert!(!directory.path("trained/optimiser.safetensors").exists());
    let weights = directory.path("run/step-000002/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
}

#[test]
fn a_checkpoint_whose_weights_changed_is_refused_by_all_who_read_them() {
    let directory = Directory::with_model();
    directory.done(&["run", "recipe.yaml"]);
    let weights = directory.path("run/step-000002/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    directory.write("tokens.jsonl", "{\"tokens\": [8, 11, 14]}\n");
    directory.write("prompts.jsonl", "{\"prompt\": \"1+1=\"}\n");
    let exported = directory.refused(&["export", "run", "out"]);
    insta::assert_snapshot!(exported, @"
    exit 2
    error: run/step-000002/model.safetensors is damaged
      caused by: its bytes are not the ones that were written

    hint: remove this checkpoint and resume from an older one
    ");
    let step = "run/step-000002";
    let (start, teach) = (format!("model.path={step}"), format!("model.existing.path={step}"));
    let readers: [&[&str]; 9] = [
        &["eval", "recipe.yaml", "--model", "run"],
        &["eval", "recipe.yaml", "--model", step],
        &["rollout", "run", "--prompts", "prompts.jsonl", "--out", "out"],
        &["score", "run", "--input", "tokens.jsonl"],
        &["score", step, "--input", "tokens.jsonl", "--side", "trainer"],
        &["bench", "engine", "--model", "run"],
        &["run", "recipe.yaml", "--set", &start, "--set", "run.out=out"],
        &["run", "recipe.yaml", "--resume"],
        &["sft", "sft.yaml", "--set", &teach, "--set", "run.out=out"],
    ];
    for arguments in readers {
        assert_eq!(directory.refused(arguments), exported, "{arguments:?}");
    }
    fs::remove_file(directory.path("run/step-000002/trainer_state.json")).unwrap();
    directory.done(&["score", step, "--input", "tokens.jsonl"]);
}

#[test]
fn a_checked_recipe_is_whole_and_passes_its_own_check() {
    let directory = Directory::empty();
    assert_eq!(directory.done(&["check", "recipe.yaml"]), "recipe.yaml: ok, a recipe for r3 run\n");
    assert_eq!(directory.done(&["check", "sft.yaml"]), "sft.yaml: ok, a recipe for r3 sft\n");
    for name in ["recipe.yaml", "sft.yaml"] {
        let whole = directory.done(&["check", name, "--print", "--set", "run.seed=11"]);
        assert!(whole.contains("\n  seed: 11\n"), "{whole}");
        directory.write("whole.yaml", &whole);
        let again = directory.done(&["check", "whole.yaml", "--print"]);
        let body = |text: &str| text.split_once('\n').map(|(_, body)| body.to_owned());
        assert_eq!(body(&whole), body(&again));
    }
}

#[test]
fn schemas_are_json_and_differ() {
    let directory = Directory::empty();
    let schema = |arguments: &[&str]| serde_json::from_str::<Value>(&directory.done(arguments)).unwrap();
    assert!(schema(&["schema"])["properties"]["rollout"].is_object());
    assert!(schema(&["schema", "--sft"])["properties"]["sft"].is_object());
    assert!(directory.done(&["schema", "--markdown"]).starts_with("# Recipe reference\n"));
}

#[test]
fn quiet_and_verbose_change_what_is_logged_only() {
    let directory = Directory::with_model();
    let run = ["run", "recipe.yaml", "--json", "--overwrite", "--set", "model.path=model"];
    let verbose = directory.r3(&[&["-vv"][..], &run].concat());
    assert_eq!(verbose.code, 0, "{}", verbose.stderr);
    assert_eq!(keys(&serde_json::from_str(verbose.stdout.trim()).unwrap()), RUN_KEYS);
    assert_eq!(directory.r3(&["-q", "-v", "check", "recipe.yaml"]).code, 2);
}
