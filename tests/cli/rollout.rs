//! `r3 rollout`, and `r3 score` of what it wrote.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use serde_json::Value;

use crate::directory::{Directory, Ended};

/// The keys that `docs/json.md` promises for the summary.
pub(crate) const ROLLOUT_KEYS: [&str; 12] = [
    "rollouts",
    "samples",
    "turns",
    "turns_left_out",
    "trajectory_forks",
    "sampled_tokens",
    "computed_tokens",
    "cached_tokens",
    "route_rows",
    "route_bytes",
    "seconds",
    "tokens_per_second",
];

/// Two conversations of three turns and of one, and a prompt of one token.
const PROMPTS: &str = r#"{"prompt": "12+34=", "turns": ["5+6=", "7+8="]}
{"prompt": "3+4=", "turns": ["9+9="]}

{"prompt": "1", "id": "others' keys are passed over"}
"#;

/// Forgets what the assistant said as soon as somebody answers.
const FORGETFUL: &str =
    "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}";

const SAMPLE: [&str; 10] = [
    "rollout",
    "model",
    "--prompts",
    "prompts.jsonl",
    "--max-new-tokens",
    "6",
    "--dtype",
    "f32",
    "--group-size",
    "2",
];

fn directory() -> Directory {
    let directory = Directory::with_model();
    directory.write("prompts.jsonl", PROMPTS);
    directory
}

/// Samples with further arguments into `out`, and returns summary and samples.
fn sample(directory: &Directory, out: &str, arguments: &[&str]) -> (Value, Vec<Value>) {
    let all = [&SAMPLE[..], &["--json", "--out", out], arguments].concat();
    (directory.done_json(&all), lines(&fs::read_to_string(directory.path(out)).unwrap()))
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn floats(value: &Value) -> Vec<f32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn turns(sample: &Value) -> Vec<[usize; 2]> {
    serde_json::from_value(sample["turns"].clone()).unwrap()
}

fn n_tokens(sample: &Value) -> usize {
    sample["tokens"].as_array().unwrap().len()
}

/// Where the logprob of `position`, as sampled and as scored, is not the same number.
fn first_difference(sample: &Value, scored: &Value) -> Option<(usize, f32, f32)> {
    let prompt_tokens = usize::try_from(sample["prompt_tokens"].as_u64().unwrap()).unwrap();
    let (sampled, scored) = (floats(&sample["logprobs"]), floats(&scored["logprobs"]));
    let positions = turns(sample).into_iter().flat_map(|[start, end]| start..end);
    let both = positions.map(|at| (at, sampled[at - prompt_tokens], scored[at - 1]));
    both.into_iter().find(|(_, sampled, scored)| sampled.to_bits() != scored.to_bits())
}

#[test]
fn what_was_sampled_over_several_turns_scores_to_the_same_bits_on_both_sides() {
    let directory = directory();
    let (summary, samples) = sample(&directory, "out.jsonl", &[]);
    let groups: Vec<_> =
        samples.iter().map(|line| (line["group"].as_u64(), line["index"].as_u64())).collect();
    let order = (0..3).flat_map(|group| (0..2).map(move |index| (Some(group), Some(index))));
    assert_eq!(groups, order.collect::<Vec<_>>(), "in the order of the prompts");
    assert_eq!(samples.iter().map(|line| turns(line).len()).collect::<Vec<_>>(), [3, 3, 2, 2, 1, 1]);
    for side in ["engine", "trainer"] {
        let scored = lines(&directory.done(&["score", "model", "--input", "out.jsonl", "--side", side]));
        assert_eq!(scored.len(), samples.len());
        for (sample, scored) in samples.iter().zip(&scored) {
            assert_eq!(first_difference(sample, scored), None, "{side}");
            assert_eq!(scored["live_differs"], Value::Array(Vec::new()), "{side}: its own router agrees");
            assert_eq!(scored["layer_ids"], sample["routed_experts"]["layer_ids"]);
        }
    }
    let rows = |sample: &Value| sample["routed_experts"]["rows"].as_u64().unwrap();
    assert!(samples.iter().all(|sample| rows(sample) == n_tokens(sample) as u64 - 1));
    assert_eq!(summary["route_rows"], samples.iter().map(rows).sum::<u64>(), "no turn copies a row again");
    let sampled = |sample: &Value| turns(sample).iter().map(|[start, end]| end - start).sum::<usize>();
    assert_eq!(summary["sampled_tokens"], samples.iter().map(sampled).sum::<usize>());
    assert_eq!(
        (&summary["rollouts"], &summary["samples"], &summary["turns"]),
        (&6.into(), &6.into(), &12.into())
    );
    assert_eq!((&summary["trajectory_forks"], &summary["turns_left_out"]), (&0.into(), &0.into()));
}

/// Each cut, and none, at other temperatures than 1.
const DRAWS: [&[&str]; 6] = [
    &["--temperature", "0.6"],
    &["--temperature", "0"],
    &["--top-k", "5", "--temperature", "1.4"],
    &["--top-k", "40", "--top-p", "0.6"],
    &["--min-p", "0.9", "--temperature", "0.8"],
    &["--top-p", "0.9"],
];

#[test]
fn draws_of_any_kind_score_to_the_same_bits_on_both_sides_in_both_formats() {
    let directory = directory();
    for (at, (draws, dtype)) in DRAWS.iter().flat_map(|draws| [(draws, "f32"), (draws, "bf16")]).enumerate() {
        let out = format!("out{at}.jsonl");
        let how = SAMPLE.map(|argument| if argument == "f32" { dtype } else { argument });
        let arguments = [&how[..], draws, &["--kv-memory", "16KiB", "--out", &out]].concat();
        directory.done(&arguments);
        let samples = lines(&fs::read_to_string(directory.path(&out)).unwrap());
        let supports: Vec<&Value> = samples.iter().filter_map(|line| line.get("supports")).collect();
        let is_cut = draws.iter().any(|draw| ["--top-k", "--top-p", "--min-p"].contains(draw));
        let expected = if is_cut { samples.len() } else { 0 };
        assert_eq!(supports.len(), expected, "{arguments:?}");
        let sizes = supports
            .iter()
            .flat_map(|rows| rows.as_array().unwrap())
            .map(|row| row.as_array().unwrap().len());
        assert!(expected == 0 || sizes.clone().max() > Some(1) && sizes.max() < Some(64), "{arguments:?}");
        for side in ["engine", "trainer"] {
            let score = ["score", "model", "--input", &out, "--side", side, "--dtype", dtype];
            for (sample, scored) in samples.iter().zip(&lines(&directory.done(&score))) {
                assert_eq!(first_difference(sample, scored), None, "{arguments:?} {side}");
                assert_eq!(scored["live_differs"], Value::Array(Vec::new()), "{arguments:?} {side}");
            }
        }
    }
}

#[test]
fn a_file_that_lost_what_its_tokens_were_drawn_from_is_refused() {
    let directory = directory();
    let (_, samples) = sample(&directory, "out.jsonl", &["--top-k", "8", "--top-p", "0.9"]);
    let written = &samples[0]["sampling"];
    let expected = serde_json::json!({ "temperature": 1.0, "sample_top_k": 8, "top_p": 0.9, "min_p": 0.0 });
    assert_eq!(*written, expected);
    let mut lost = samples[0].clone();
    lost.as_object_mut().unwrap().remove("supports");
    directory.write("lost.jsonl", format!("{}\n{lost}\n", samples[1]));
    let Ended { code, stderr, .. } = directory.r3(&["score", "model", "--input", "lost.jsonl"]);
    assert_eq!(code, 2);
    insta::assert_snapshot!(stderr, @"
    error: lost.jsonl:2: the rollout was drawn from a part of the vocabulary, but does not say which for the token at position 6

    hint: score the file as `r3 rollout` wrote it, with `supports`, or sample without --top-p, --top-k and --min-p
    ");
    let mut foreign = samples[0].clone();
    foreign["supports"][0].as_array_mut().unwrap().push(64.into());
    directory.write("foreign.jsonl", format!("{foreign}\n"));
    insta::assert_snapshot!(directory.refused(&["score", "model", "--input", "foreign.jsonl"]), @"
    exit 2
    error: cannot score foreign.jsonl:1
      caused by: the token at position 6 was drawn from a set with token 64, outside the vocabulary of 64

    hint: check which model the tokens are of
    ");
}

#[test]
fn what_no_token_can_be_drawn_by_is_refused() {
    let directory = directory();
    let refused = |arguments: &[&str]| {
        let refused = directory.refused(&[&SAMPLE[..], &["--out", "o"], arguments].concat());
        assert!(!directory.path("o").exists() && !directory.path("o.partial").exists());
        refused
    };
    insta::assert_snapshot!(refused(&["--top-p", "0"]), @"
    exit 2
    error: invalid value '0' for '--top-p <P>': must be above 0 and at most 1

    For more information, try '--help'.
    ");
    insta::assert_snapshot!(refused(&["--top-k", "-1"]), @"
    exit 2
    error: invalid value '-1' for '--top-k <N>': must be at least 0

    For more information, try '--help'.
    ");
    insta::assert_snapshot!(refused(&["--min-p", "1"]), @"
    exit 2
    error: invalid value '1' for '--min-p <P>': must be at least 0 and below 1

    For more information, try '--help'.
    ");
    for broken in [
        ["--top-p", "1.1"],
        ["--top-p", "NaN"],
        ["--top-k", "16777217"],
        ["--top-k", "0.5"],
        ["--min-p", "-0.1"],
        ["--temperature", "-1"],
        ["--temperature", "1e-40"],
        ["--temperature", "1e39"],
        ["--temperature", "inf"],
    ] {
        assert!(refused(&broken).starts_with("exit 2\nerror: invalid value"), "{broken:?}");
    }
}

#[test]
fn prompts_come_from_one_place() {
    let directory = directory();
    let refused =
        |sources: &[&str]| directory.refused(&[&["rollout", "model", "--out", "o"], sources].concat());
    insta::assert_snapshot!(refused(&[]), @"
    exit 2
    error: the following required arguments were not provided:
      <--prompts <FILE>|--recipe <RECIPE>>

    Usage: r3 rollout --out <FILE> <--prompts <FILE>|--recipe <RECIPE>> <MODEL>

    For more information, try '--help'.
    ");
    insta::assert_snapshot!(refused(&["--prompts", "prompts.jsonl", "--recipe", "recipe.yaml"]), @"
    exit 2
    error: the argument '--prompts <FILE>' cannot be used with '--recipe <RECIPE>'

    Usage: r3 rollout --out <FILE> <--prompts <FILE>|--recipe <RECIPE>> <MODEL>

    For more information, try '--help'.
    ");
}

#[test]
fn a_sequence_is_scored_at_the_temperature_and_over_the_tokens_that_are_given() {
    let directory = directory();
    let score = |line: &str| {
        directory.write("in.jsonl", line);
        floats(&lines(&directory.done(&["score", "model", "--input", "in.jsonl"]))[0]["logprobs"])
    };
    let plain = score(r#"{"tokens": [5, 6, 7]}"#);
    assert_eq!(plain, score(r#"{"tokens": [5, 6, 7], "temperature": 1, "supports": [[], []]}"#));
    let warm = score(r#"{"tokens": [5, 6, 7], "temperature": 2.5}"#);
    assert!(plain.iter().zip(&warm).all(|(plain, warm)| plain != warm));
    let alone = score(r#"{"tokens": [5, 6, 7], "supports": [[7]]}"#);
    assert_eq!(alone, [plain[0], 0.0], "lists are of the last tokens");
    let refused = |line: &str| {
        directory.write("in.jsonl", line);
        let [engine, trainer] = ["engine", "trainer"]
            .map(|side| directory.refused(&["score", "model", "--input", "in.jsonl", "--side", side]));
        assert_eq!(engine, trainer);
        engine
    };
    insta::assert_snapshot!(refused(r#"{"tokens": [5, 6, 7], "temperature": 0}"#), @"
    exit 2
    error: cannot score in.jsonl:1
      caused by: logits cannot be divided by a temperature of 0

    hint: give a temperature above 0, such as 1; 0.01 is next to greedy
    ");
    insta::assert_snapshot!(refused(r#"{"tokens": [5, 6, 7], "supports": [[8]]}"#), @"
    exit 2
    error: cannot score in.jsonl:1
      caused by: the tokens were drawn from sets that break their contract
      caused by: token 0 after the prompt is 7, which its support lacks

    hint: `supports` has a list for each of the last tokens, ascending, with that token in it
    ");
    insta::assert_snapshot!(refused(r#"{"tokens": [5, 6, 7], "supports": [[5], [6], [7]]}"#), @"
    exit 2
    error: cannot score in.jsonl:1
      caused by: the tokens were drawn from sets that break their contract
      caused by: supports have 3 rows for 2 tokens after the prompt

    hint: `supports` has a list for each of the last tokens, ascending, with that token in it
    ");
}

#[test]
fn given_tokens_follow_the_sampled_ones_and_have_no_logprob() {
    let directory = directory();
    let (_, samples) = sample(&directory, "out.jsonl", &[]);
    for sample in &samples {
        let prompt_tokens = usize::try_from(sample["prompt_tokens"].as_u64().unwrap()).unwrap();
        let mut is_sampled = vec![false; n_tokens(sample)];
        turns(sample).iter().for_each(|&[start, end]| is_sampled[start..end].fill(true));
        for (logprob, is_sampled) in floats(&sample["logprobs"]).into_iter().zip(&is_sampled[prompt_tokens..])
        {
            assert_eq!(logprob < 0.0, *is_sampled);
        }
        assert_eq!(turns(sample).last().map(|turn| turn[1]), Some(n_tokens(sample)));
    }
    let text = samples[0]["text"].as_str().unwrap();
    assert!(text.contains("5+6=") && text.contains("7+8="), "{text}");
}

#[test]
fn neither_routes_nor_memory_nor_company_change_a_sample() {
    let directory = directory();
    let (_, whole) = sample(&directory, "whole.jsonl", &[]);
    let tight: [&[&str]; 3] = [
        &["--return-routed-experts", "false"],
        &["--routed-experts-start-len", "1"],
        &["--max-running", "1", "--kv-memory", "16KiB"],
    ];
    for (at, arguments) in tight.into_iter().enumerate() {
        let (summary, other) = sample(&directory, &format!("other{at}.jsonl"), arguments);
        for (sample, whole) in other.iter().zip(&whole) {
            for key in ["tokens", "logprobs", "versions", "turns", "text", "finish"] {
                assert_eq!(sample[key], whole[key], "{arguments:?}: {key}");
            }
        }
        assert_eq!(summary["route_rows"] == 0, at == 0);
    }
    let (_, alone) = sample(&directory, "alone.jsonl", &["--limit", "1"]);
    assert_eq!(
        alone.iter().map(|line| &line["tokens"]).collect::<Vec<_>>(),
        [&whole[0]["tokens"], &whole[1]["tokens"]]
    );
}

#[test]
fn without_routes_a_rollout_is_scored_freely_and_with_a_part_of_them_it_is_refused() {
    let directory = directory();
    let (_, free) = sample(&directory, "free.jsonl", &["--return-routed-experts", "false"]);
    assert!(free.iter().all(|line| line.get("routed_experts").is_none()));
    let scored = lines(&directory.done(&["score", "model", "--input", "free.jsonl"]));
    for (sample, scored) in free.iter().zip(&scored) {
        assert_eq!(first_difference(sample, scored), None);
        assert!(scored.get("live_differs").is_none());
    }
    let (_, part) = sample(&directory, "part.jsonl", &["--routed-experts-start-len", "1"]);
    for sample in &part {
        let routes = &sample["routed_experts"];
        assert_eq!(
            (routes["start"].as_u64(), routes["rows"].as_u64()),
            (Some(1), Some(n_tokens(sample) as u64 - 2))
        );
    }
    insta::assert_snapshot!(directory.refused(&["score", "model", "--input", "part.jsonl"]), @r"
    exit 2
    error: part.jsonl:1: the routes of the rollout begin at position 1, and those before cannot be replayed

    hint: sample with --routed-experts-start-len 0 to replay, or --return-routed-experts false to score freely
    ");
    let late = [&SAMPLE[..], &["--out", "late.jsonl", "--routed-experts-start-len", "2"]].concat();
    insta::assert_snapshot!(directory.refused(&late), @"
    exit 2
    error: group 2 wants its routes from row 2 on, but its prompt has 1 token

    hint: ask for rows from 1 or less on
    ");
    assert!(!directory.path("late.jsonl").exists() && !directory.path("late.jsonl.partial").exists());
}

#[test]
fn a_template_that_rewrites_history_forks_the_sample() {
    let directory = directory();
    directory.write("model/chat_template.jinja", FORGETFUL);
    let chat = r#"{"messages": [{"role": "user", "content": "1+2="}], "turns": ["3+4=", "5+6="]}"#;
    directory.write("prompts.jsonl", chat);
    let (summary, samples) = sample(&directory, "out.jsonl", &[]);
    assert_eq!(
        (&summary["trajectory_forks"], &summary["samples"], &summary["rollouts"]),
        (&4.into(), &6.into(), &2.into())
    );
    let expected: Vec<u64> = [4, 8, 12, 4, 8, 12].into();
    let prompts = samples.iter().map(|sample| sample["prompt_tokens"].as_u64().unwrap());
    assert_eq!(prompts.collect::<Vec<_>>(), expected, "each sample is a whole prompt and one turn");
    assert!(samples.iter().all(|sample| turns(sample).len() == 1));
    assert_eq!(
        samples.iter().map(|sample| sample["index"].as_u64().unwrap()).collect::<Vec<_>>(),
        [0, 0, 0, 1, 1, 1]
    );
    let scored = lines(&directory.done(&["score", "model", "--input", "out.jsonl"]));
    for (sample, scored) in samples.iter().zip(&scored) {
        assert_eq!(first_difference(sample, scored), None);
    }
}

#[test]
fn a_fork_into_less_than_the_rows_that_are_left_out_has_those_it_has() {
    let directory = directory();
    directory.write("model/chat_template.jinja", "{{ messages[-1].content }}");
    let chat = r#"{"prompt": [{"role": "user", "content": "1+2="}], "turns": ["3="]}"#;
    directory.write("prompts.jsonl", chat);
    let (_, samples) = sample(&directory, "out.jsonl", &["--routed-experts-start-len", "4"]);
    let starts = samples.iter().map(|sample| sample["routed_experts"]["start"].as_u64().unwrap());
    assert_eq!(starts.collect::<Vec<_>>(), [4, 2, 4, 2]);
    directory.done(&["routes", "show", "out.jsonl"]);
}

#[test]
fn a_conversation_without_room_ends_and_is_counted() {
    let directory = directory();
    let long = "1+".repeat(20);
    directory.write("prompts.jsonl", format!(r#"{{"prompt": "1+1=", "turns": ["{long}", "{long}", "2"]}}"#));
    let (summary, samples) = sample(&directory, "out.jsonl", &[]);
    assert_eq!(samples.iter().map(|sample| turns(sample).len()).collect::<Vec<_>>(), [2, 2]);
    assert_eq!((&summary["turns"], &summary["turns_left_out"]), (&4.into(), &4.into()), "{summary}");
}

#[test]
fn completions_of_a_task_are_scored() {
    let directory = directory();
    let arguments = [
        "rollout",
        "model",
        "--recipe",
        "recipe.yaml",
        "--limit",
        "3",
        "--max-new-tokens",
        "3",
        "--out",
        "-",
    ];
    let samples = lines(&directory.done(&arguments));
    assert_eq!(samples.len(), 3);
    assert!(samples.iter().all(|sample| sample["reward"].is_number() && turns(sample).len() == 1));
    assert!(samples.iter().all(|sample| sample["prompt_tokens"] == "1+1=".len()));
    let of_two_digits = [&arguments[..], &["--set", "task.arithmetic.digits=2"]].concat();
    let samples = lines(&directory.done(&of_two_digits));
    assert!(samples.iter().all(|sample| sample["prompt_tokens"] == "11+11=".len()));
    let without = directory.r3(&[&SAMPLE[..], &["--out", "-", "--set", "task.arithmetic.digits=2"]].concat());
    assert!(
        without.code == 2 && without.stderr.contains("cannot be used with '--set <KEY=VALUE>'"),
        "{}",
        without.stderr
    );
}

#[test]
fn a_file_is_replaced_only_when_asked_and_appears_only_when_whole() {
    let directory = directory();
    sample(&directory, "out.jsonl", &["--seed", "1"]);
    let first = fs::read_to_string(directory.path("out.jsonl")).unwrap();
    insta::assert_snapshot!(directory.refused(&[&SAMPLE[..], &["--out", "out.jsonl"]].concat()), @r"
    exit 2
    error: out.jsonl is there already

    hint: replace it with --overwrite, or write to another file
    ");
    let prompts = fs::read_to_string(directory.path("prompts.jsonl")).unwrap();
    let onto_itself = [&SAMPLE[..], &["--out", "./prompts.jsonl", "--overwrite"]].concat();
    insta::assert_snapshot!(directory.refused(&onto_itself), @r"
    exit 2
    error: ./prompts.jsonl is what is read here, and would be replaced

    hint: write to another file
    ");
    assert_eq!(fs::read_to_string(directory.path("prompts.jsonl")).unwrap(), prompts);
    sample(&directory, "out.jsonl", &["--seed", "2", "--overwrite"]);
    assert_ne!(first, fs::read_to_string(directory.path("out.jsonl")).unwrap());

    // Long enough that it is killed while it samples, which it says that it begins.
    directory.write("prompts.jsonl", "{\"prompt\": \"1+1=\"}\n".repeat(20_000));
    let mut command = directory.command(env!("CARGO_BIN_EXE_r3"));
    let mut child =
        command.args(SAMPLE).args(["--out", "killed.jsonl"]).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut said).unwrap();
    child.kill().unwrap();
    assert!(!child.wait().unwrap().success() && said.starts_with("KV memory 64MiB: "), "{said}");
    assert!(!directory.path("killed.jsonl").exists());
    assert!(directory.path("killed.jsonl.partial").exists(), "what was sampled can be looked at");
    directory.write("prompts.jsonl", PROMPTS);
    sample(&directory, "killed.jsonl", &[]);
    assert!(!directory.path("killed.jsonl.partial").exists());
}

#[test]
fn what_cannot_be_sampled_is_refused() {
    let directory = directory();
    directory.write("broken.jsonl", "{\"prompt\": \"1+1=\"}\n{\"prompt\": \"1+1=\", \"turns\": [2]}\n");
    insta::assert_snapshot!(directory.refused(&["rollout", "model", "--prompts", "broken.jsonl", "--out", "o"]), @r"
    exit 2
    error: broken.jsonl:2: `turns` is a number, but has to be a list of strings, as the prompt is one

    hint: make it a list of strings, as the prompt is one
    ");
    insta::assert_snapshot!(directory.refused(&[&SAMPLE[..], &["--out", "-", "--json"]].concat()), @r"
    exit 2
    error: the rollouts and the summary cannot both go to stdout

    hint: leave out --json, or name a file with --out
    ");
    insta::assert_snapshot!(directory.refused(&[&SAMPLE[..], &["--out", "nowhere/out.jsonl"]].concat()), @r"
    exit 2
    error: cannot use nowhere/out.jsonl.partial
      caused by: No such file or directory (os error 2)

    hint: check that the path exists, is writable and has room
    ");
    let small = [&SAMPLE[..], &["--out", "o", "--kv-memory", "1KiB"]].concat();
    insta::assert_snapshot!(directory.refused(&small), @r"
    exit 2
    error: the KV cache has 1024 bytes, but one block of 16 tokens needs 2136

    hint: set --kv-memory to at least 2136 bytes, better a hundred times that
    ");
    assert!(!directory.path("o").exists() && !directory.path("o.partial").exists());
}
