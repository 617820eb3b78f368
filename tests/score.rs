//! `r3 score` against PyTorch, on both sides, free and replayed (see tests/golden.rs for versions and tolerances).

#[path = "golden/reference.rs"]
mod reference;

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use r3_core::routes::RouteView;
use serde_json::{Value, json};

use crate::reference::{LOGIT_TOLERANCE, Reference, TOKENS, dir, max_diff, route_rows};

/// Runs `r3 score MODEL --input -` and parses what it prints.
fn score(model: &Path, arguments: &[&str], lines: &[Value]) -> Vec<Value> {
    let mut child = Command::new(env!("CARGO_BIN_EXE_r3"))
        .arg("score")
        .arg(model)
        .args(["--input", "-"])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let stdout = String::from_utf8(output.stdout).unwrap();
    stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn nested(rows: RouteView<'_>) -> Value {
    let dims = rows.dims();
    let layer = |row, layer| rows.choice(row, layer).collect::<Vec<u16>>();
    let row = |row| (0..dims.n_layers).map(|at| layer(row, at)).collect::<Vec<_>>();
    json!((0..rows.rows()).map(row).collect::<Vec<_>>())
}

fn logprobs(line: &Value) -> Vec<f32> {
    serde_json::from_value(line["logprobs"].clone()).unwrap()
}

#[test]
fn both_sides_match_free_and_replayed() {
    for model in ["nano", "mixed", "grouped"] {
        let reference = Reference::load(model);
        let dims = r3_model::config::ModelConfig::load(&dir(model)).unwrap().route_dims();
        let layer_ids: Vec<u32> = if model == "nano" { vec![0, 1, 2, 3] } else { vec![1, 2, 3] };
        for prefix in ["", "replay_"] {
            let rows: Vec<_> = (0..4).map(|index| route_rows(&reference, prefix, index, dims)).collect();
            let lines: Vec<Value> = reference
                .sequences()
                .iter()
                .zip(&rows)
                .map(|(tokens, rows)| {
                    let tokens: Vec<u32> = tokens.iter().map(|token| token.0).collect();
                    match prefix {
                        "" => json!({ "tokens": tokens }),
                        _ => json!({ "tokens": tokens, "routed_experts": nested(rows.view()) }),
                    }
                })
                .collect();
            for side in ["engine", "trainer"] {
                let scored = score(&dir(model), &["--side", side], &lines);
                assert_eq!(scored.len(), 4);
                for (index, (line, rows)) in scored.iter().zip(&rows).enumerate() {
                    let expected =
                        &reference.get(&format!("{prefix}logprobs"))[index * (TOKENS - 1)..][..TOKENS - 1];
                    let diff = max_diff(&logprobs(line), expected);
                    assert!(diff <= LOGIT_TOLERANCE, "{model} {side} {prefix}: differs by {diff:e}");
                    assert_eq!(line["routed_experts"], nested(rows.view()), "{model} {side} {prefix}");
                    assert_eq!(line["layer_ids"], json!(layer_ids));
                    let differs = line.get("live_differs").and_then(Value::as_array);
                    assert_eq!(differs.is_some_and(|differs| !differs.is_empty()), prefix == "replay_");
                }
            }
        }
    }
}

#[test]
fn the_two_sides_agree_to_the_bit_in_f32() {
    let reference = Reference::load("nano");
    let lines: Vec<Value> = reference
        .sequences()
        .iter()
        .map(|tokens| json!({ "tokens": tokens.iter().map(|token| token.0).collect::<Vec<_>>() }))
        .collect();
    let engine = score(&dir("nano"), &["--side", "engine"], &lines);
    assert_eq!(engine, score(&dir("nano"), &["--side", "trainer"], &lines));
}

#[test]
fn bf16_is_close_and_not_the_same() {
    let reference = Reference::load("nano");
    let tokens: Vec<u32> = reference.sequences()[0].iter().map(|token| token.0).collect();
    let scored = score(&dir("nano"), &["--dtype", "bf16"], &[json!({ "tokens": tokens })]);
    let diff = max_diff(&logprobs(&scored[0]), &reference.get("logprobs")[..TOKENS - 1]);
    assert!((1e-5..0.05).contains(&diff), "bf16 differs by {diff:e}");
}
