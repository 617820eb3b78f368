//! `r3 routes`, and what `r3 score` makes of r3's own file.

use std::fs;

use insta::assert_snapshot;
use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_core::rollout::{FinishReason, Reward, RolloutView};
use r3_core::routes::{RouteDims, RouteRows};
use r3_wire::r3_file;
use r3_wire::record::{RecordView, RoutesHeader};
use serde_json::Value;

use crate::directory::{Directory, Ended, ended};

const DIMS: RouteDims = RouteDims { n_layers: 2, top_k: 2, n_experts: 4 };

/// Ten bytes a layer: rows 0 to 4 of the six tokens below.
pub(crate) const ROWS: [u8; 20] = [3, 1, 0, 2, 2, 0, 1, 3, 1, 2, 3, 0, 0, 3, 2, 1, 1, 0, 0, 3];

/// A rollout in r3's own file: a prompt of two tokens, three sampled, one given by the user, and one sampled. `rows` are
/// of layers 1 and 2.
pub(crate) fn rollout(index: u32, rows: &[u8], epoch: u64) -> Vec<u8> {
    let mut packed = RouteRows::with_capacity(DIMS, 6);
    packed.append(rows);
    let rollout = RolloutView {
        group: GroupId(7),
        index,
        tokens: &[8, 11, 14, 7, 12, 18].map(TokenId),
        prompt_tokens: 2,
        rollout_logprobs: &[-0.5, -1.25, 0.0, -0.125],
        versions: &[3, 3, 3, 4].map(PolicyVersion),
        routes: Some(packed.view()),
        finish: FinishReason::Stop,
        cached_tokens: 1,
        support: None,
    };
    let header =
        RoutesHeader { start: 0, layer_ids: &[1, 2], weight_epoch: Some(epoch), model_hash: Some(255) };
    let turns = [2..4, 5..6];
    let record = RecordView {
        reward: Some(Reward::Score(1.0)),
        text: Some("= 3"),
        ..RecordView::new(&rollout, &turns, header)
    };
    let mut line = Vec::new();
    r3_file::write(&record, &mut line).unwrap();
    line
}

/// `a.jsonl` with two rollouts, and `b.jsonl` with the same but for one reordered and one other choice in the second.
fn directory() -> Directory {
    let directory = Directory::empty();
    let mut other = ROWS;
    other.swap(8, 9);
    other[14] = 0;
    directory.write("a.jsonl", [rollout(0, &ROWS, 4), rollout(1, &ROWS, 4)].concat());
    directory.write("b.jsonl", [rollout(0, &ROWS, 4), rollout(1, &other, 5)].concat());
    directory
}

const MODEL: [&str; 8] = ["--layers", "3", "--moe-layers", "1-2", "--experts", "4", "--top-k", "2"];

#[test]
fn a_summary_has_every_sample_and_the_load_of_every_layer() {
    assert_snapshot!(directory().done(&["routes", "show", "a.jsonl"]), @r"
    sample 0: group 7, rollout 0, stop, 6 tokens, prompt of 2, sampled 2..4 5..6
      rows 0..5, coverage 100.0 %, 2 MoE layers, 2 of 4 experts, weight epoch 4, weights 00000000000000ff
    sample 1: group 7, rollout 1, stop, 6 tokens, prompt of 2, sampled 2..4 5..6
      rows 0..5, coverage 100.0 %, 2 MoE layers, 2 of 4 experts, weight epoch 4, weights 00000000000000ff

    2 samples, 12 tokens, 10 rows
      layer 1     4 of 4 experts, busiest 0 with 30.0 % of choices, max_vio 0.20 |██▅▅|
      layer 2     4 of 4 experts, busiest 0 with 30.0 % of choices, max_vio 0.20 |█▅▅█|
    ");
}

#[test]
fn a_selection_shows_rows_with_tokens_versions_and_experts() {
    let directory = directory();
    assert_snapshot!(directory.done(&["routes", "show", "a.jsonl", "--sample", "1"]), @"
    sample 1: group 7, rollout 1, stop, 6 tokens, prompt of 2, sampled 2..4 5..6
      rows 0..5, coverage 100.0 %, 2 MoE layers, 2 of 4 experts, weight epoch 4, weights 00000000000000ff
      position    token  version  turn  layer 1   layer 2
             0        8        -     0  3 1       0 2
             1       11        -     0  2 0       1 3
             2       14        3     0  1 2       3 0
             3        7        3     1  0 3       2 1
             4       12        -     1  1 0       0 3

    1 sample, 6 tokens, 5 rows
      layer 1     4 of 4 experts, busiest 0 with 30.0 % of choices, max_vio 0.20 |██▅▅|
      layer 2     4 of 4 experts, busiest 0 with 30.0 % of choices, max_vio 0.20 |█▅▅█|
    ");
    let selected =
        ["routes", "show", "a.jsonl", "--sample", "0", "--layer", "2", "--rows", "1..9", "--turn", "1"];
    assert_snapshot!(directory.done(&selected), @"
    sample 0: group 7, rollout 0, stop, 6 tokens, prompt of 2, sampled 2..4 5..6
      rows 0..5, coverage 100.0 %, 2 MoE layers, 2 of 4 experts, weight epoch 4, weights 00000000000000ff
      position    token  version  turn  layer 2
             3        7        3     1  2 1
             4       12        -     1  0 3

    1 sample, 6 tokens, 5 rows
      layer 2     4 of 4 experts, busiest 0 with 30.0 % of choices, max_vio 0.20 |█▅▅█|
    ");
    let json = directory.done_json(&[&selected[..], &["--json"]].concat());
    assert_snapshot!(json.to_string(), @r#"{"samples":[{"sample":0,"group":7,"index":0,"finish":"stop","n_tokens":6,"prompt_tokens":2,"turns":[[2,4],[5,6]],"routes":{"start":0,"n_rows":5,"coverage":1.0,"layer_ids":[1,2],"top_k":2,"n_experts":4,"weight_epoch":4,"model_hash":"00000000000000ff","shown_layer_ids":[2],"rows":[{"position":3,"token":7,"version":3,"turn":1,"experts":[[2,1]]},{"position":4,"token":12,"version":null,"turn":1,"experts":[[0,3]]}]}}],"summary":{"samples":1,"tokens":6,"rows":5,"without_routes":0,"layers":[{"layer":1,"experts_used":4,"busiest":0,"max_vio":0.19999999999999996,"counts":[3,3,2,2]},{"layer":2,"experts_used":4,"busiest":0,"max_vio":0.19999999999999996,"counts":[3,2,2,3]}]}}"#);
}

#[test]
fn files_are_compared_as_sets_and_in_order() {
    let directory = directory();
    assert_snapshot!(directory.done(&["routes", "diff", "a.jsonl", "a.jsonl"]), @r"
    sample   tokens  token_layer_frac  token_any_frac  layers_per_token  reordered_frac
         0        5            0.0000          0.0000            0.0000          0.0000
         1        5            0.0000          0.0000            0.0000          0.0000
       all       10            0.0000          0.0000            0.0000          0.0000

    no difference
    ");
    assert_snapshot!(directory.done(&["routes", "diff", "a.jsonl", "b.jsonl"]), @r"
    sample   tokens  token_layer_frac  token_any_frac  layers_per_token  reordered_frac
         0        5            0.0000          0.0000            0.0000          0.0000
         1        5            0.1000          0.2000            0.2000          0.1000
       all       10            0.0500          0.1000            0.1000          0.0500

    first difference: sample 1, turn 1, layer 2, position 3: [2, 1] and [0, 1]
    ");
    let json = directory.done_json(&["routes", "diff", "a.jsonl", "b.jsonl", "--json"]);
    assert_snapshot!(json.to_string(), @r#"{"tokens":10,"router_discrepancy_token_layer_frac":0.05,"router_discrepancy_token_any_frac":0.1,"router_discrepancy_layers_per_token":0.1,"reordered_frac":0.05,"samples":2,"first":{"sample":1,"turn":1,"layer":2,"position":3,"a":[2,1],"b":[0,1]},"per_sample":[{"tokens":5,"router_discrepancy_token_layer_frac":0.0,"router_discrepancy_token_any_frac":0.0,"router_discrepancy_layers_per_token":0.0,"reordered_frac":0.0},{"tokens":5,"router_discrepancy_token_layer_frac":0.1,"router_discrepancy_token_any_frac":0.2,"router_discrepancy_layers_per_token":0.2,"reordered_frac":0.1}]}"#);
}

#[test]
fn every_layout_is_converted_and_back_and_differs_in_nothing() {
    let directory = directory();
    for to in ["vllm", "atom", "sglang", "nemo-rl", "prime-rl"] {
        let (there, back) = (format!("{to}.json"), format!("{to}.jsonl"));
        directory.done(&["routes", "convert", "a.jsonl", &there, "--to", to, "--layers", "3"]);
        let model = if to == "vllm" { vec!["--from", "vllm"] } else { vec![] };
        directory.done(&[&["routes", "convert", &there, &back][..], &MODEL, &model].concat());
        let diff = directory.done_json(&["routes", "diff", "a.jsonl", &back, "--json"]);
        assert_eq!(diff["tokens"], 10, "{to}");
        assert_eq!(diff["first"], Value::Null, "{to}");
        let again = directory.done(&["routes", "convert", &back, "-", "--to", to, "--layers", "3"]);
        assert_eq!(again, fs::read_to_string(directory.path(&there)).unwrap(), "{to}");
    }
}

#[test]
fn a_file_may_come_from_stdin() {
    let directory = directory();
    let mut command = directory.command(env!("CARGO_BIN_EXE_r3"));
    command.stdin(fs::File::open(directory.path("a.jsonl")).unwrap());
    let piped = ended(command.args(["routes", "show", "-"]));
    assert_eq!((piped.code, piped.stdout), (0, directory.done(&["routes", "show", "a.jsonl"])));
}

#[test]
fn what_the_score_prints_is_compared_with_a_rollout() {
    let directory = Directory::with_model();
    directory.write("prompts.jsonl", "{\"prompt\": \"8+1=\"}\n{\"prompt\": \"3+4=\"}\n");
    let rollout = ["rollout", "model", "--prompts", "prompts.jsonl", "--out", "rollout.jsonl"];
    directory.done(&[&rollout[..], &["--dtype", "f32", "--max-new-tokens", "9"]].concat());
    let lines = fs::read_to_string(directory.path("rollout.jsonl")).unwrap();
    let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let tokens = lines.map(|line| serde_json::json!({ "tokens": line["tokens"] }).to_string() + "\n");
    directory.write("tokens.jsonl", tokens.collect::<String>());
    let scored = directory.done(&["score", "model", "--input", "tokens.jsonl", "--side", "trainer"]);
    directory.write("scored.jsonl", scored);
    let diff = directory.done_json(&[
        "routes",
        "diff",
        "rollout.jsonl",
        "scored.jsonl",
        "--model",
        "model",
        "--json",
    ]);
    assert_eq!(
        (&diff["samples"], &diff["first"]),
        (&2.into(), &Value::Null),
        "in f32 both sides route alike"
    );
}

#[test]
fn one_sample_is_a_numpy_file_and_gets_its_tokens_back() {
    let directory = directory();
    let there = ["routes", "convert", "a.jsonl", "a.npy", "--sample", "1", "--layers", "3"];
    directory.done(&there);
    let file = fs::read(directory.path("a.npy")).unwrap();
    assert_eq!((&file[..6], file.len()), (&b"\x93NUMPY"[..], 128 + 5 * 3 * 2 * 2));
    directory.done(&[&there[..], &["--dtype", "uint8", "--overwrite"]].concat());
    assert_eq!(fs::read(directory.path("a.npy")).unwrap().len(), 128 + 5 * 3 * 2);
    directory.write("tokens.jsonl", "{\"tokens\": [8, 11, 14, 7, 12, 18], \"prompt_tokens\": 2}\n");
    let back = ["routes", "convert", "a.npy", "-", "--tokens", "tokens.jsonl"];
    let line = directory.done(&[&back[..], &MODEL].concat());
    assert_snapshot!(line, @r#"{"r3":1,"group":0,"index":0,"prompt_tokens":2,"cached_tokens":0,"turns":[[2,6]],"tokens":[8,11,14,7,12,18],"routed_experts":{"rows":5,"start":0,"layer_ids":[1,2],"top_k":2,"n_experts":4,"dtype":"u8","token_digest":"83f1c4bc24da98b0","data":"AwEAAgIAAQMBAgMAAAMCAQEAAAM="}}"#);
}

#[test]
fn a_rollout_of_r3s_own_file_is_scored_with_its_routes() {
    let directory = Directory::with_model();
    let mut file = String::from_utf8(rollout(0, &ROWS, 4)).unwrap();
    // The model of these tests has two layers, both of them MoE layers.
    file = file.replace("\"layer_ids\":[1,2]", "\"layer_ids\":[0,1]");
    directory.write("rollout.jsonl", &file);
    let scored = directory.done_json(&["score", "model", "--input", "rollout.jsonl"]);
    let rows = ROWS.map(u16::from);
    let nested: Vec<_> = rows.chunks(4).map(|row| [&row[..2], &row[2..]]).collect();
    assert_eq!(scored["routed_experts"], serde_json::json!(nested));
    assert!(scored["live_differs"].is_array());
    let plain = serde_json::json!({ "tokens": [8, 11, 14, 7, 12, 18], "routed_experts": nested });
    directory.write("plain.jsonl", plain.to_string());
    assert_eq!(directory.done_json(&["score", "model", "--input", "plain.jsonl"]), scored);
}

#[test]
fn a_rollout_that_cannot_be_replayed_is_refused_by_the_score() {
    let directory = Directory::with_model();
    let refused = |from: &str, to: &str| {
        let file = String::from_utf8(rollout(0, &ROWS, 4)).unwrap();
        assert!(file.contains(from), "{file}");
        directory.write("rollout.jsonl", file.replacen(from, to, 1));
        directory.refused(&["score", "model", "--input", "rollout.jsonl"])
    };
    assert_snapshot!(refused("", ""), @r"
    exit 2
    error: cannot score rollout.jsonl:1
      caused by: routes to replay are of layers [1, 2], but the model's MoE layers are [0, 1]

    hint: check which model the routes are of
    ");
    assert_snapshot!(refused("\"tokens\":[8,11", "\"tokens\":[8,9"), @r"
    exit 2
    error: rollout.jsonl:1: r3, sample 1: tokens hash to 3118b8d1d7ed05c3, but the routes are of tokens that hash to 83f1c4bc24da98b0

    hint: tokens and routes belong together, and to the weights that sampled them: take both from one rollout
    ");
    assert_snapshot!(refused("\"tokens\"", "\"words\""), @r"
    exit 2
    error: rollout.jsonl:1: the rollout has no tokens

    hint: put them in with `r3 routes convert IN OUT --tokens FILE`
    ");
}

/// What a command says that reads `a.jsonl`, or what else there is.
fn refused(directory: &Directory, arguments: &[&str]) -> String {
    directory.refused(&[&["routes"], arguments].concat())
}

#[test]
fn what_cannot_be_read_is_refused() {
    let directory = directory();
    let npy = [&b"\x93NUMPY\x01\x00"[..], &[200; 9]].concat();
    directory.write("cut.npy", npy);
    directory.write("flat", "AAAAAAAAAAADAAAAAQAAAAAAAAACAAAA");
    assert_snapshot!(refused(&directory, &["show", "none.jsonl"]), @r"
    exit 2
    error: cannot read none.jsonl
      caused by: No such file or directory (os error 2)

    hint: name a readable file, or - for stdin
    ");
    assert_snapshot!(refused(&directory, &["show", "flat"]), @r"
    exit 2
    error: cannot tell the layout of flat by its content

    hint: name it with --from: r3, vllm, atom, sglang, nemo-rl, prime-rl or lists; docs/routes.md shows each
    ");
    assert_snapshot!(refused(&directory, &["show", "cut.npy"]), @r"
    exit 2
    error: cannot read the routes of cut.npy
      caused by: which model sampled is not said, and these routes do not say it

    hint: describe the model that sampled: with --model DIR, or with --layers, --moe-layers, --experts and --top-k
    ");
    assert_snapshot!(refused(&directory, &[&["show", "cut.npy"], &MODEL[..]].concat()), @r"
    exit 2
    error: cannot read the routes of cut.npy
      caused by: vLLM, sample 0: not a NumPy array file: it ends inside its header

    hint: the file was cut short or changed, or is not vLLM's: name its layout with --from
    ");
    assert_snapshot!(refused(&directory, &["show", "flat", "--from", "sglang", "--layers", "3"]), @r"
    exit 2
    error: cannot read the routes of flat
      caused by: which model sampled is not said, and these routes do not say it

    hint: describe the model that sampled: with --model DIR, or with --layers, --moe-layers, --experts and --top-k
    ");
    assert_snapshot!(refused(&directory, &["show", "flat", "--from", "sglang", "--experts", "4"]), @r"
    exit 2
    error: what model the routes are of is not clear
      caused by: which model sampled is not said, and these routes do not say it

    hint: describe the model that sampled: with --model DIR, or with --layers, --moe-layers, --experts and --top-k
    ");
    assert_snapshot!(refused(&directory, &[&["show", "flat", "--from", "sglang"], &MODEL[2..], &["--layers", "2"]].concat()), @r"
    exit 2
    error: what model the routes are of is not clear
      caused by: MoE layer 2 does not exist in a model of 2 layers

    hint: describe the model that sampled: with --model DIR, or with --layers, --moe-layers, --experts and --top-k
    ");
    assert_snapshot!(refused(&directory, &["show", "a.jsonl", "--sample", "2"]), @r"
    exit 2
    error: a.jsonl has no sample 2: it has 2

    hint: samples are counted from 0, in the order of the file
    ");
    assert_snapshot!(refused(&directory, &["show", "a.jsonl", "--layer", "0"]), @r"
    exit 2
    error: a.jsonl has no routes of layer 0

    hint: name a MoE layer by the model's own number, dense layers counted
    ");
    assert_snapshot!(refused(&directory, &["show", "b.jsonl", "--weight-epoch", "4"]), @r"
    exit 2
    error: cannot read the routes of b.jsonl
      caused by: r3, sample 1: the routes are of weight epoch 5, not 4

    hint: tokens and routes belong together, and to the weights that sampled them: take both from one rollout
    ");
    assert_snapshot!(refused(&directory, &["show", "a.jsonl", "--model", "."]), @r"
    exit 2
    error: cannot read the routes of a.jsonl
      caused by: r3, sample 0: the routes are of layers [1, 2], but the model's MoE layers are [0, 1]

    hint: another model sampled this: name the one that did
    ");
}

#[test]
fn rows_that_begin_late_are_shown_under_their_positions() {
    let directory = directory();
    directory.write("flat", "AAAAAAAAAAADAAAAAQAAAAAAAAACAAAA");
    let late = ["routes", "show", "flat", "--from", "sglang", "--start", "2", "--sample", "0"];
    assert_snapshot!(directory.done(&[&late[..], &MODEL].concat()), @"
    sample 0: group 0, rollout 0
      rows 2..3, coverage 33.3 %, 2 MoE layers, 2 of 4 experts
      position    token  version  turn  layer 1   layer 2
             2        -        -     0  3 1       0 2

    1 sample, 4 tokens, 1 row
      layer 1     2 of 4 experts, busiest 1 with 50.0 % of choices, max_vio 1.00 | █ █|
      layer 2     2 of 4 experts, busiest 0 with 50.0 % of choices, max_vio 1.00 |█ █ |
    ");
}

#[test]
fn another_order_is_not_called_the_first_difference_while_there_are_other_experts() {
    let directory = directory();
    let (mut reordered, mut other) = (ROWS, ROWS);
    reordered.swap(0, 1);
    other[18] = 1;
    directory.write("c.jsonl", [rollout(0, &reordered, 4), rollout(1, &other, 4)].concat());
    let diff = directory.done_json(&["routes", "diff", "a.jsonl", "c.jsonl", "--json"]);
    assert_eq!((&diff["first"]["sample"], &diff["first"]["position"]), (&1.into(), &4.into()));
    directory.write("c.jsonl", [rollout(0, &other, 4), rollout(1, &other, 4)].concat());
    let diff = directory.done_json(&["routes", "diff", "a.jsonl", "c.jsonl", "--json"]);
    assert_eq!((&diff["first"]["sample"], &diff["first"]["position"]), (&0.into(), &4.into()));
    directory.write("c.jsonl", [rollout(0, &ROWS, 4), rollout(1, &reordered, 4)].concat());
    let diff = directory.done_json(&["routes", "diff", "a.jsonl", "c.jsonl", "--json"]);
    assert_eq!((&diff["first"]["sample"], &diff["first"]["a"]), (&1.into(), &serde_json::json!([3, 1])));
    assert_eq!(
        (&diff["router_discrepancy_token_layer_frac"], &diff["reordered_frac"]),
        (&0.0.into(), &0.05.into())
    );
}

#[test]
fn an_engine_that_never_captured_is_named_with_one_expert_a_token_too() {
    let directory = Directory::empty();
    // 9 rows, 1 layer, K = 1 of 16 experts, uint8 zeros.
    directory.write(
        "zeros",
        "{\"data\": \"AAAAAAAAAAAA\", \"shape\": [9, 1, 1], \"start\": 0, \"dtype\": \"uint8\"}",
    );
    let of = |model: &[&str]| refused(&directory, &[&["show", "zeros"], model].concat());
    assert_snapshot!(of(&["--layers", "1", "--moe-layers", "0", "--experts", "16", "--top-k", "1"]), @"
    exit 2
    error: cannot read the routes of zeros
      caused by: prime-rl, sample 0: turn 0, layer 0: nothing but expert 0 was sent for 9 positions from 0 on; the engine never captured this layer

    hint: the MoE kernel in use captures nothing, as vLLM's on CPUs: choose another, or turn router replay off
    ");
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let directory = directory();
    directory.write("one.jsonl", rollout(0, &ROWS, 4));
    let other = String::from_utf8(rollout(0, &ROWS, 4)).unwrap();
    directory.write("layers.jsonl", other.replace("[1,2]", "[0,2]"));
    assert_snapshot!(refused(&directory, &["diff", "a.jsonl", "one.jsonl"]), @r"
    exit 2
    error: a.jsonl and one.jsonl cannot be compared
      caused by: the first file has 2 samples, the second 1

    hint: write both files from the same samples, in the same order
    ");
    assert_snapshot!(refused(&directory, &["diff", "one.jsonl", "layers.jsonl"]), @r"
    exit 2
    error: one.jsonl and layers.jsonl cannot be compared
      caused by: sample 0: routes of layers [1, 2] and [0, 2]

    hint: compare routes of one model
    ");
}

#[test]
fn what_cannot_be_converted_is_refused_and_nothing_is_written() {
    let directory = directory();
    let convert = |arguments: &[&str]| refused(&directory, &[&["convert"], arguments].concat());
    assert_snapshot!(convert(&["a.jsonl", "out.json"]), @r"
    exit 2
    error: what out.json is to be written as is not said

    hint: name it with --to: r3, vllm, atom, sglang, nemo-rl or prime-rl
    ");
    assert_snapshot!(convert(&["a.jsonl", "out.json", "--to", "sglang"]), @r"
    exit 2
    error: what model the routes are of is not clear
      caused by: which model sampled is not said, and these routes do not say it

    hint: describe the model that sampled: with --model DIR, or with --layers, --moe-layers, --experts and --top-k
    ");
    assert_snapshot!(convert(&["a.jsonl", "out.json", "--to", "sglang", "--layers", "2"]), @r"
    exit 2
    error: what model the routes are of is not clear
      caused by: MoE layer 2 does not exist in a model of 2 layers

    hint: describe the model that sampled: with --model DIR, or with --layers, --moe-layers, --experts and --top-k
    ");
    assert_snapshot!(convert(&["a.jsonl", "out.npy", "--layers", "3"]), @"
    exit 2
    error: one array cannot hold 2 samples

    hint: choose one with --sample N, or write JSON lines: name OUT other than .npy
    ");
    assert_snapshot!(convert(&["a.jsonl", "out.json", "--to", "atom", "--layers", "3", "--dtype", "uint8"]), @r"
    exit 2
    error: cannot write the routes as asked
      caused by: ATOM, sample 0: uint8 cannot say -1, which marks dense layers

    hint: write a signed dtype: int16 or int32
    ");
    assert_snapshot!(convert(&["a.jsonl", "b.jsonl", "--to", "vllm", "--layers", "3"]), @r"
    exit 2
    error: b.jsonl is there already

    hint: replace it with --overwrite, or write to another file
    ");
    directory.write("tokens.jsonl", "{\"tokens\": [8], \"prompt_tokens\": 1}\n");
    assert_snapshot!(convert(&["a.jsonl", "out.json", "--to", "r3", "--tokens", "tokens.jsonl"]), @"
    exit 2
    error: the tokens of tokens.jsonl are of 1 sample, but the routes of 2

    hint: give one line of tokens for each sample, in the same order
    ");
    directory.write("tokens.jsonl", "{\"tokens\": [8]}\n{\"tokens\": [8]}\n");
    assert_snapshot!(convert(&["a.jsonl", "out.json", "--to", "r3", "--tokens", "tokens.jsonl"]), @r#"
    exit 2
    error: tokens.jsonl:1:15: not the tokens of a sample: missing field `prompt_tokens`

    hint: write one object a line, such as {"tokens": [5, 17, 9], "prompt_tokens": 2}
    "#);
    assert!(!directory.path("out.json").exists() && !directory.path("out.npy").exists());
}

#[test]
fn a_layer_list_and_a_range_of_rows_are_arguments() {
    let directory = Directory::empty();
    let usage = |arguments: &[&str]| {
        let Ended { code, stderr, .. } = directory.r3(&[&["routes", "show", "a.jsonl"], arguments].concat());
        format!("exit {code}\n{}", stderr.lines().next().unwrap())
    };
    assert_snapshot!(usage(&["--moe-layers", "1-two"]), @r"
    exit 2
    error: invalid value '1-two' for '--moe-layers <LIST>': `1-two` is not a layer or a range of layers, such as 3 or 3-26
    ");
    assert_snapshot!(usage(&["--rows", "5..2"]), @r"
    exit 2
    error: invalid value '5..2' for '--rows <A..B>': `5..2` is not a range of positions, such as 0..8
    ");
    assert_snapshot!(usage(&["--model", ".", "--layers", "2"]), @r"
    exit 2
    error: the argument '--model <DIR>' cannot be used with '--layers <N>'
    ");
}
