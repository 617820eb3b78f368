//! Benches: each ends stdout with the keys that its page lists, and with a table for people.

use serde_json::Value;

use crate::directory::{Directory, config};
use crate::docs::{page, table_keys};
use crate::results::keys;

/// What `r3 bench` says with `arguments`, as JSON; the same without `--json` has to contain `row`.
fn bench(arguments: &[&str], row: &str) -> Value {
    let directory = Directory::with_model();
    let command = [&["bench"], arguments].concat();
    let table = directory.done(&command);
    assert!(table.contains(row), "{table}");
    directory.done_json(&[&command[..], &["--json"]].concat())
}

/// What is printed must be what the section `title` lists: of a spread its first key, with the other two behind it.
fn assert_documented(measured: &Value, title: &str) {
    let page = page("json.md");
    let section = page.split("\n## ").find(|section| section.starts_with(title)).expect(title);
    let is_spread = |key: &str| {
        section.lines().any(|line| line.starts_with(&format!("| `{key}` ")) && line.contains(", spread |"))
    };
    let documented: Vec<String> = table_keys(&page, title)
        .into_iter()
        .flat_map(|key| match is_spread(key) {
            true => vec![key.to_owned(), format!("{key}_min"), format!("{key}_max")],
            false => vec![key.to_owned()],
        })
        .collect();
    assert_eq!(keys(measured), documented, "{title}");
}

#[test]
fn engine() {
    let small =
        ["engine", "--model", "model", "--batch", "3", "--prompt", "4", "--new", "3", "--rounds", "2"];
    let measured = bench(&small, "whichever binds");
    assert_documented(&measured, "`r3 bench engine --json`");
    assert_eq!(
        (&measured["batch"], &measured["dtype"], &measured["routes"]),
        (&3.into(), &"bf16".into(), &true.into())
    );
}

#[test]
fn a_configuration_is_measured_without_a_model() {
    let small = [
        "engine",
        "--config",
        "config.json",
        "--batch",
        "2",
        "--new",
        "2",
        "--rounds",
        "1",
        "--routes",
        "off",
    ];
    assert_eq!(bench(&small, "without routes")["routes"], false);
    let directory = Directory::empty();
    let ended = directory.r3(&["bench", "engine", "--config", "none.json"]);
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    let ended = directory.r3(&["bench", "engine", "--config", ".", "--model", "model"]);
    assert_eq!(ended.code, 2, "{}", ended.stderr);
}

#[test]
fn train() {
    let small = ["train", "--model", "model", "--sequences", "3", "--length", "5", "--rounds", "2"];
    let measured = bench(&small, "AdamW, ms");
    assert_documented(&measured, "`r3 bench train --json`");
    assert_eq!((&measured["sequences"], &measured["dtype"]), (&3.into(), &"f32".into()));
}

#[test]
fn step() {
    let small = [
        "step",
        "--model",
        "model",
        "--completions",
        "4",
        "--group-size",
        "2",
        "--new",
        "3",
        "--rounds",
        "1",
    ];
    let measured = bench(&small, "refit");
    assert_documented(&measured, "`r3 bench step --json`");
    assert!(measured["first_step_seconds"].is_number() && measured["step_seconds"].as_f64().unwrap() > 0.0);
    let ended = Directory::with_model().r3(&["bench", "step", "--model", "model", "--completions", "9"]);
    assert_eq!(ended.code, 2);
    assert_eq!(
        ended.stderr,
        "error: 9 completions do not make whole groups of 8\n\nhint: make --completions a multiple of --group-size\n"
    );
}

/// What `r3` says of sizes that are too large: the error without its numbers, and the hint.
fn too_large(directory: &Directory, arguments: &[&str]) -> String {
    let said = directory.refused(&[&["bench"], arguments].concat());
    let is_of_error = |line: &&str| line.starts_with("error") || line.starts_with("hint");
    let lines = said.lines().filter(is_of_error).map(|line| line.replace(|c: char| c.is_ascii_digit(), ""));
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn sizes_that_do_not_fit_are_refused_by_the_arguments_that_say_them() {
    let directory = Directory::with_model();
    let too_large = |arguments: &[&str]| too_large(&directory, arguments);
    let model = ["--model", "model"];
    let engine = too_large(&[&["engine"], &model[..], &["--new", "100"]].concat());
    insta::assert_snapshot!(engine, @"
    error: prompt and completion may take  tokens, but the model has  positions
    hint: lower --prompt or --new
    ");
    assert_eq!(too_large(&[&["step"], &model[..], &["--new", "100"]].concat()), engine);
    assert_eq!(too_large(&[&["routes"], &model[..], &["--new", "100"]].concat()), engine);
    insta::assert_snapshot!(too_large(&[&["train"], &model[..], &["--length", "100"]].concat()), @"
    error: a sequence of  tokens exceeds the model's  positions
    hint: lower --length
    ");

    let mut deep = config();
    (deep["num_hidden_layers"], deep["max_position_embeddings"]) = (200.into(), 40_000.into());
    directory.write("deep.json", deep.to_string());
    let deep = ["--config", "deep.json", "--new", "30000"];
    insta::assert_snapshot!(too_large(&[&["engine", "--batch", "65536"], &deep[..]].concat()), @"
    error: the KV cache needs  bytes of memory, but  are available
    hint: lower --batch, --prompt or --new, or free memory
    ");
    insta::assert_snapshot!(too_large(&[&["step", "--completions", "65536"], &deep[..]].concat()), @"
    error: the KV cache needs  bytes of memory, but  are available
    hint: lower --completions, --prompt or --new, or free memory
    ");
    insta::assert_snapshot!(too_large(&["routes", "--sequences", "65536", "--tokens", "65536"]), @"
    error:  blocks of  tokens are more slots than the  a slot id can name
    hint: lower --sequences or --tokens
    ");
}

#[test]
fn an_op_that_does_not_exist_is_refused_with_those_that_do() {
    insta::assert_snapshot!(Directory::empty().refused(&["bench", "kernels", "softmax"]), @"
    exit 2
    error: no op of `r3 bench kernels` has `softmax` in its name

    hint: there are gemm, gemm_from_memory, rms_norm, rope, paged_attention, long_attention, packed_attention, router_choose, router_gates, experts, silu_mul, logprobs, lm_head, draw, truncated_draw, adamw, muon, low_rank_gradient, low_rank_merge, cast, cast_and_pack
    ");
}

#[test]
fn kernels() {
    let measured = bench(&["kernels", "rope", "--rounds", "1"], "GFLOP/s");
    assert_documented(&measured, "`r3 bench kernels --json`");
    assert_eq!(keys(&measured["gemm_peak_gflops"]), ["f32", "bf16"]);
    let page = page("json.md");
    for key in keys(&measured["cases"][0]).into_iter().filter(|key| !["us_min", "us_max"].contains(key)) {
        assert!(page.contains(&format!("`{key}`")), "{key}");
    }
}

#[test]
fn ring() {
    let measured = bench(&["ring", "--frames", "5", "--tokens", "8", "--rounds", "1"], "memcpy, GB/s");
    assert_documented(&measured, "`r3 bench ring --json`");
}

#[test]
fn routes() {
    let small = [
        "--sequences",
        "3",
        "--layers",
        "2",
        "--top-k",
        "2",
        "--experts",
        "300",
        "--tokens",
        "4",
        "--rounds",
        "2",
    ];
    let measured = bench(&[&["routes"], &small[..]].concat(), "memcpy of the same bytes");
    assert_documented(&measured, "`r3 bench routes --json`");
    assert_eq!((&measured["rounds"], &measured["bytes_per_tick"]), (&2.into(), &24.into()));
}

#[test]
fn engines_with_and_without_routes() {
    let small =
        ["routes", "--model", "model", "--sequences", "3", "--prompt", "4", "--new", "3", "--rounds", "2"];
    let measured = bench(&small, "tokens/s, routes on");
    assert_documented(&measured, "`r3 bench routes --model DIR --json`");
    assert_eq!((&measured["rounds"], &measured["route_bytes_per_sequence"]), (&2.into(), &24.into()));
}
