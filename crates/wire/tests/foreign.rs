//! Payloads made by NumPy 2.4.6 and Python's `base64`, read and written byte for byte, and every refusal by its words.
//!
//! All are of one sample of four tokens, `[5, 6, 7, 8]`, the first two of them its prompt, in a model of three layers:
//! layer 0 is dense, layers 1 and 2 send a token to 2 of 4 experts. `full` is `int64 [3, 3, 2]` with
//! `full[:, 1:] = [[[3, 1], [0, 2]], [[2, 0], [1, 3]], [[1, 2], [3, 0]]]`, else 0, and `b64` Python's `b64encode`.

use base64::Engine;
use r3_core::ids::{GroupId, TokenId};
use r3_core::rollout::Reward;
use r3_core::routes::{IdWidth, RouteDims, RouteRows};
use r3_wire::array::Element;
use r3_wire::check::Sample;
use r3_wire::document::{self, Reading};
use r3_wire::error::WireError;
use r3_wire::layout::Layout;
use r3_wire::model::ModelShape;
use r3_wire::r3_file;
use r3_wire::record::{Record, Routes};
use r3_wire::{nemo_rl, prime_rl};
use serde_json::{Value, json};

/// `np.save(buffer, full.astype(np.int16)); b64(buffer)`
const VLLM: &str = "k05VTVBZAQB2AHsnZGVzY3InOiAnPGkyJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDMsIDMsIDIpLCB9ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoAAAAAAwABAAAAAgAAAAAAAgAAAAEAAwAAAAAAAQACAAMAAAA=";
/// The same with `full[:, 0] = -1`.
const ATOM: &str = "k05VTVBZAQB2AHsnZGVzY3InOiAnPGkyJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDMsIDMsIDIpLCB9ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAr/////AwABAAAAAgD/////AgAAAAEAAwD/////AQACAAMAAAA=";
/// `np.zeros((3, 3, 2), dtype=np.uint8)`, which vLLM 0.24 sends from a CPU, as a file in base64.
const VLLM_NEVER_CAPTURED: &str = "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDMsIDMsIDIpLCB9ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoAAAAAAAAAAAAAAAAAAAAAAAA=";
/// `b64(full.astype(np.int32).tobytes())`
const SGLANG: &str =
    "AAAAAAAAAAADAAAAAQAAAAAAAAACAAAAAAAAAAAAAAACAAAAAAAAAAEAAAADAAAAAAAAAAAAAAABAAAAAgAAAAMAAAAAAAAA";
/// `padded` is `full` with a fourth row of `np.arange(2)` in every layer; `b64(padded.astype(np.int8).tobytes())`.
const NEMO_RL: &str = "nrlre1:int8:4x3x2:AAADAQACAAACAAEDAAABAgMAAAEAAQAB";
/// `padded[:, 1:].astype(np.int16)`: the MoE layers only.
const NEMO_RL_MOE_LAYERS: &str = "nrlre1:int16:4x2x2:AwABAAAAAgACAAAAAQADAAEAAgADAAAAAAABAAAAAQA=";
/// `padded[1] = -1`: a row that vLLM lost.
const NEMO_RL_LOST: &str = "nrlre1:int8:4x3x2:AAADAQAC////////AAABAgMAAAEAAQAB";
/// `b64(full.astype(np.uint8).tobytes())`
const PRIME_RL: &str = "AAADAQACAAACAAEDAAABAgMA";
/// `b64(full[:, 1:].astype(np.uint8).tobytes())`
const R3: &str = "AwEAAgIAAQMBAgMA";

/// Rows 0 to 2, layers 1 and 2.
const EXPERTS: [[[u16; 2]; 2]; 3] = [[[3, 1], [0, 2]], [[2, 0], [1, 3]], [[1, 2], [3, 0]]];

fn model() -> ModelShape {
    ModelShape::new(3, vec![1, 2], 2, 4).unwrap()
}

/// What an engine of `layout` answers when it sends `payload`.
fn answer(layout: Layout, payload: impl Into<Value>) -> Value {
    let payload = payload.into();
    match layout {
        Layout::Vllm | Layout::Atom | Layout::PrimeRl | Layout::Lists => json!({
            "prompt_token_ids": [5, 6],
            "choices": [{ "index": 0, "finish_reason": "stop", "token_ids": [7, 8], "routed_experts": payload }],
        }),
        Layout::Sglang => json!({
            "output_ids": [7, 8],
            "meta_info": { "prompt_tokens": 2, "completion_tokens": 2, "routed_experts": payload },
        }),
        Layout::NemoRl => json!({
            "choices": [{ "message": {
                "prompt_token_ids": [5, 6], "generation_token_ids": [7, 8], "routed_experts": payload,
            }}],
        }),
        Layout::R3 => json!({
            "r3": 1, "group": 0, "index": 0, "prompt_tokens": 2, "tokens": [5, 6, 7, 8], "turns": [[2, 4]],
            "routed_experts": payload,
        }),
    }
}

fn base64(bytes: &[u8]) -> String {
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

fn prime_rl_object(data: &str) -> Value {
    json!({ "data": data, "shape": [3, 3, 2], "start": 0, "dtype": "uint8" })
}

fn r3(data: &str) -> Value {
    json!({ "rows": 3, "start": 0, "layer_ids": [1, 2], "top_k": 2, "n_experts": 4, "dtype": "u8", "data": data })
}

fn read_bytes(layout: Layout, bytes: &[u8]) -> Result<Vec<Record>, WireError> {
    document::read(bytes, &Reading { layout, model: Some(&model()), start: 0 })
}

fn read(layout: Layout, answer: &Value) -> Result<Vec<Record>, WireError> {
    read_bytes(layout, answer.to_string().as_bytes())
}

fn refusal(layout: Layout, payload: impl Into<Value>) -> String {
    refusal_of(layout, &answer(layout, payload))
}

fn refusal_of(layout: Layout, answer: &Value) -> String {
    let error = read(layout, answer).expect_err("it is refused");
    format!("{error}\nhint: {}", error.hint())
}

#[track_caller]
fn assert_experts(records: &[Record]) {
    let [record] = records else { panic!("{} records", records.len()) };
    let routes = record.routes.as_ref().unwrap();
    let view = routes.rows.view();
    assert_eq!((view.rows(), routes.start, &routes.layer_ids[..]), (3, 0, &[1, 2][..]));
    assert_eq!(view.dims().width(), IdWidth::U8);
    for (row, layers) in EXPERTS.iter().enumerate() {
        for (layer, experts) in layers.iter().enumerate() {
            assert_eq!([0, 1].map(|k| view.expert(row, layer, k)), *experts, "row {row}, layer {layer}");
        }
    }
}

#[test]
fn what_numpy_made_is_read() {
    let payloads = [
        (Layout::Vllm, Value::from(VLLM)),
        (Layout::Vllm, ATOM.into()),
        (Layout::Atom, ATOM.into()),
        (Layout::Sglang, SGLANG.into()),
        (Layout::NemoRl, NEMO_RL.into()),
        (Layout::NemoRl, NEMO_RL_MOE_LAYERS.into()),
        (Layout::PrimeRl, prime_rl_object(PRIME_RL)),
        (Layout::R3, r3(R3)),
        (Layout::Lists, json!(EXPERTS)),
        (
            Layout::Lists,
            json!([[[0, 0], [3, 1], [0, 2]], [[0, 0], [2, 0], [1, 3]], [[0, 0], [1, 2], [3, 0]]]),
        ),
    ];
    for (layout, payload) in payloads {
        let records = read(layout, &answer(layout, payload.clone())).unwrap();
        assert_experts(&records);
        assert_eq!(records[0].prompt_tokens, Some(2));
        let tokens = [5, 6, 7, 8].map(TokenId);
        // SGLang does not repeat the prompt, only how long it was.
        let expected = (layout != Layout::Sglang).then_some(&tokens[..]);
        assert_eq!(records[0].tokens.as_deref(), expected);
        // The payload alone, as JSON text or object.
        if layout != Layout::R3 {
            assert_experts(&read(layout, &payload).unwrap());
        }
        // Or the text of it.
        if let Value::String(text) = &payload {
            assert_experts(&read_bytes(layout, format!("{text}\n").as_bytes()).unwrap());
        }
    }
}

#[test]
fn what_numpy_made_is_written() {
    let record = &read(Layout::R3, &answer(Layout::R3, r3(R3))).unwrap()[0];
    let payload = |layout: Layout, at: &str| {
        let answer = document::write(record, &model(), Element::Int16, &record.sample(layout, 0)).unwrap();
        answer.pointer(at).cloned().unwrap_or_else(|| panic!("{answer}"))
    };
    assert_eq!(payload(Layout::Vllm, "/choices/0/routed_experts"), VLLM);
    assert_eq!(payload(Layout::Atom, "/choices/0/routed_experts"), ATOM);
    assert_eq!(payload(Layout::Sglang, "/meta_info/routed_experts"), SGLANG);
    assert_eq!(payload(Layout::NemoRl, "/routed_experts"), NEMO_RL);
    assert_eq!(payload(Layout::PrimeRl, "/choices/0/routed_experts"), prime_rl_object(PRIME_RL));
}

#[test]
fn answers_come_in_lines_and_with_several_choices() {
    let two = json!({
        "prompt_token_ids": [5, 6],
        "choices": [
            { "index": 0, "token_ids": [7, 8], "routed_experts": VLLM },
            { "index": 1, "token_ids": [8, 8], "routed_experts": ATOM },
        ],
    });
    let lines = format!("{two}\n{}", serde_json::to_string_pretty(&answer(Layout::Vllm, VLLM)).unwrap());
    let records = read_bytes(Layout::Vllm, lines.as_bytes()).unwrap();
    let ids: Vec<_> = records.iter().map(|record| (record.group.0, record.index)).collect();
    assert_eq!(ids, [(0, 0), (0, 1), (1, 0)]);
    assert_eq!(records[1].tokens.as_ref().unwrap()[2], TokenId(8));
}

#[test]
fn what_an_answer_counts_of_all_its_choices_is_not_taken_for_one() {
    let choices = json!([{ "routed_experts": VLLM }, { "routed_experts": VLLM }]);
    let counted = json!({ "usage": { "prompt_tokens": 2, "completion_tokens": 4 }, "choices": choices });
    let records = read(Layout::Vllm, &counted).unwrap();
    assert_eq!(records.iter().map(Record::n_tokens).collect::<Vec<_>>(), [Some(4), Some(4)]);
    let only = json!({ "usage": { "prompt_tokens": 2, "completion_tokens": 4 }, "choices": [choices[0]] });
    assert!(refusal_of(Layout::Vllm, &only).contains("3 rows from position 0 on, instead of 5 for 6 tokens"));
}

#[test]
fn tokens_in_one_piece_are_checked_and_stay_in_r3s_own_file() {
    let line = json!({ "tokens": [5, 6, 7, 8], "routed_experts": EXPERTS });
    let records = read(Layout::Lists, &line).unwrap();
    assert_eq!(records[0].tokens.as_deref(), Some(&[5, 6, 7, 8].map(TokenId)[..]));
    let short = with(line.clone(), "tokens", json!([5, 6, 7]));
    assert!(
        refusal_of(Layout::Lists, &short).contains("3 rows from position 0 on, instead of 2 for 3 tokens")
    );
    let beyond = with(line, "prompt_tokens", 5);
    assert!(refusal_of(Layout::Lists, &beyond).contains("a prompt of 5 tokens"));
    let sample = records[0].sample(Layout::Vllm, 0);
    let answer = document::write(&records[0], &model(), Element::Int16, &sample).unwrap();
    assert_experts(&read(Layout::Vllm, &answer).unwrap());
}

#[test]
fn an_id_behind_the_last_of_256_is_refused_though_a_byte_cannot_hold_it() {
    let model = ModelShape::new(1, vec![0], 1, 256).unwrap();
    let payload = json!({ "data": base64(&[255, 0, 0, 1]), "shape": [2, 1, 1], "dtype": "uint16" });
    let reading = Reading { layout: Layout::PrimeRl, model: Some(&model), start: 0 };
    let error = document::read(payload.to_string().as_bytes(), &reading).unwrap_err();
    assert!(
        error.to_string().ends_with("position 1: expert 256 does not exist (the layer has 256)"),
        "{error}"
    );
}

#[test]
fn an_envelope_takes_the_narrowest_type_that_says_minus_1_and_the_last_expert() {
    for (n_experts, dtype) in [(128, "int8"), (129, "int16"), (32_768, "int16"), (32_769, "int32")] {
        let model = ModelShape::new(1, vec![0], 1, n_experts).unwrap();
        let mut rows = RouteRows::with_capacity(model.dims(), 1);
        rows.append(&vec![1; model.dims().row_bytes()]);
        let text = nemo_rl::write(rows.view(), &model, &Sample::new(Layout::NemoRl, 0)).unwrap();
        assert!(text.starts_with(&format!("nrlre1:{dtype}:2x1x1:")), "{n_experts}: {text}");
    }
}

#[test]
fn an_object_says_itself_where_its_rows_begin() {
    let payload = prime_rl::Payload {
        data: base64(&[0, 0, 3, 1, 0, 0]),
        shape: vec![1, 3, 2],
        start: 5,
        dtype: "uint8".into(),
    };
    let error = prime_rl::read(&payload, &model(), &Sample::new(Layout::PrimeRl, 0)).unwrap_err();
    assert!(error.to_string().contains("nothing but expert 0 was sent for 1 position from 5 on"), "{error}");
}

#[test]
fn a_layout_is_guessed_where_it_can_be_no_other() {
    let guess = |text: &str| Layout::guess(text.as_bytes());
    for (layout, payload) in [
        (Layout::Vllm, Value::from(VLLM)),
        (Layout::Sglang, SGLANG.into()),
        (Layout::NemoRl, NEMO_RL.into()),
        (Layout::PrimeRl, prime_rl_object(PRIME_RL)),
        (Layout::R3, r3(R3)),
        (Layout::Lists, json!(EXPERTS)),
    ] {
        assert_eq!(guess(&answer(layout, payload).to_string()), Some(layout));
    }
    assert_eq!(guess(VLLM), Some(Layout::Vllm));
    assert_eq!(guess(NEMO_RL), Some(Layout::NemoRl));
    assert_eq!(Layout::guess(b"\x93NUMPY\x01"), Some(Layout::Vllm));
    for ambiguous in ["", SGLANG, "{\"routed_experts\": [1, 2]}", "{", "[]", "{\"tokens\": [1]}"] {
        assert_eq!(guess(ambiguous), None, "{ambiguous}");
    }
}

#[test]
fn an_engine_that_never_captured_is_named() {
    insta::assert_snapshot!(refusal(Layout::Vllm, VLLM_NEVER_CAPTURED), @"
    vLLM, sample 0: turn 0, layer 1: nothing but expert 0 was sent for 3 positions from 0 on; the engine never captured this layer
    hint: the MoE kernel in use captures nothing, as vLLM's on CPUs: choose another, or turn router replay off
    ");
}

#[test]
fn rows_that_were_never_written_are_refused() {
    insta::assert_snapshot!(refusal(Layout::NemoRl, NEMO_RL_LOST), @"
    NeMo-RL, sample 0: turn 0, layer 1, position 1: the routes were never written
    hint: NeMo-RL lost or mixed up rows: sample again, and report it to its authors
    ");
    let mut payload = r3(R3);
    // Bits 0 and 2 of three rows.
    payload["validity"] = "BQ==".into();
    insta::assert_snapshot!(refusal(Layout::R3, payload), @r"
    r3, sample 0: turn 0, layer 1, position 1: the routes were never written
    hint: r3 lost or mixed up rows: sample again, and report it to its authors
    ");
}

/// `payload` with `value` at `key`.
fn with(mut payload: Value, key: &str, value: impl Into<Value>) -> Value {
    payload[key] = value.into();
    payload
}

/// The first lines of refusals.
fn lines(refusals: &[String]) -> String {
    refusals.iter().map(|refusal| format!("{}\n", refusal.lines().next().unwrap())).collect()
}

#[test]
fn payloads_that_are_cut_or_of_another_shape_are_refused() {
    let prime = |key, value: Value| refusal(Layout::PrimeRl, with(prime_rl_object(PRIME_RL), key, value));
    let nemo = |from, to| refusal(Layout::NemoRl, NEMO_RL.replacen(from, to, 1));
    insta::assert_snapshot!(lines(&[
        refusal(Layout::Vllm, &VLLM[..VLLM.len() - 4]),
        refusal(Layout::Vllm, &VLLM[..40]),
        refusal(Layout::Vllm, &VLLM[1..]),
        refusal(Layout::Vllm, SGLANG),
        refusal(Layout::Vllm, prime_rl_object(PRIME_RL)),
        refusal(Layout::Sglang, &SGLANG[..SGLANG.len() - 4]),
        refusal(Layout::Sglang, &SGLANG[..SGLANG.len() - 1]),
        refusal(Layout::Sglang, "AAAA*AAA"),
        refusal(Layout::Sglang, json!([[[1, 2]]])),
        nemo("nrlre1", "nrlre2"),
        nemo(":int8:4x3x2", ""),
        nemo("int8", "int64"),
        nemo("4x3x2", "4x3"),
        nemo("4x3x2", "4x3xtwo"),
        nemo("4x3x2", "0x3x2"),
        nemo("4x3x2", "99999999999x99999999999x99999999999"),
        nemo("AQAB", "AQAA"),
        prime("shape", json!([3, 3])),
        prime("shape", json!([3, 2, 3])),
        prime("shape", json!([2, 3, 3])),
        prime("dtype", "float32".into()),
        prime("dtype", "uint16".into()),
        prime("data", Value::Null),
    ]), @"
    vLLM, sample 0: the routes are 34 bytes, but the shape [3, 3, 2] of int16 needs 36
    vLLM, sample 0: not a NumPy array file: it ends inside its header
    vLLM, sample 0: the routes are not base64: the padding at its end
    vLLM, sample 0: not a NumPy array file: it does not start with NumPy's magic
    vLLM, sample 0: `routed_experts` is an object, not text (prime-rl: an object)
    SGLang, sample 0: the routes are 69 bytes, not a multiple of the 24 bytes of a row
    SGLang, sample 0: the routes are not base64: the padding at its end
    SGLang, sample 0: the routes are not base64: byte 0x2a at 4
    SGLang, sample 0: `routed_experts` is a list, not text (prime-rl: an object)
    NeMo-RL, sample 0: not an envelope `nrlre1:<dtype>:<S>x<L>x<K>:<base64>`: it does not start with `nrlre1:`
    NeMo-RL, sample 0: not an envelope `nrlre1:<dtype>:<S>x<L>x<K>:<base64>`: it ends after the dtype
    NeMo-RL, sample 0: expert ids are `int64`, not one of int8, int16, int32
    NeMo-RL, sample 0: the shape is [4, 3], not [rows, layers, experts of a token]
    NeMo-RL, sample 0: not an envelope `nrlre1:<dtype>:<S>x<L>x<K>:<base64>`: its shape is not numbers
    NeMo-RL, sample 0: the routes are 24 bytes, but the shape [0, 3, 2] of int8 needs 0
    NeMo-RL, sample 0: the routes are 24 bytes, but the shape [99999999999, 99999999999, 99999999999] of int8 needs 999999999970000000000299999999999
    NeMo-RL, sample 0: turn 0, layer 2, position 3: expert 0 in the row of the last token, which is padding: 0 to K - 1
    prime-rl, sample 0: the shape is [3, 3], not [rows, layers, experts of a token]
    prime-rl, sample 0: the routes are of 3 experts a token, but the model takes 2
    prime-rl, sample 0: the routes are of 3 experts a token, but the model takes 2
    prime-rl, sample 0: expert ids are `float32`, not one of int8, uint8, int16, uint16, int32, uint32, int64
    prime-rl, sample 0: the routes are 18 bytes, but the shape [3, 3, 2] of uint16 needs 36
    prime-rl, sample 0: `routed_experts` is invalid type: null, expected a string, not an object of data, shape, start and dtype
    ");
}

#[test]
fn routes_that_break_the_contract_are_refused_by_turn_layer_and_position() {
    // Row, layer and k of `full`, as the characters of four bits in base64 would have it, are easier said in bytes.
    let changed = |at: usize, expert: u8| {
        let mut bytes: Vec<u8> = vec![0, 0, 3, 1, 0, 2, 0, 0, 2, 0, 1, 3, 0, 0, 1, 2, 3, 0];
        bytes[at] = expert;
        refusal(Layout::PrimeRl, prime_rl_object(&base64(&bytes)))
    };
    let negative =
        json!({ "data": base64(&[0, 0, 3, 1, 0, 254]), "shape": [1, 3, 2], "start": 2, "dtype": "int8" });
    let short = |start: usize| with(prime_rl_object(PRIME_RL), "start", start);
    insta::assert_snapshot!(lines(&[
        changed(2, 4),
        changed(9, 2),
        changed(6, 1),
        refusal(Layout::PrimeRl, negative),
        refusal(Layout::PrimeRl, short(1)),
        refusal(Layout::PrimeRl, short(4)),
        refusal_of(Layout::PrimeRl, &with(answer(Layout::PrimeRl, prime_rl_object(PRIME_RL)), "prompt_token_ids", json!([6]))),
        refusal(Layout::PrimeRl, Value::Null),
        refusal_of(Layout::Sglang, &json!({ "output_ids": [7], "meta_info": {} })),
    ]), @"
    prime-rl, sample 0: turn 0, layer 1, position 0: expert 4 does not exist (the layer has 4)
    prime-rl, sample 0: turn 0, layer 1, position 1: expert 2 appears twice
    prime-rl, sample 0: turn 0, layer 0, position 1: expert 1 in a dense layer, which routes nothing
    prime-rl, sample 0: turn 0, layer 2, position 2: expert -2 does not exist (the layer has 4)
    prime-rl, sample 0: turn 0: routes have 3 rows from position 1 on, instead of 2 for 4 tokens
    prime-rl, sample 0: routes start at position 4, but the rows of 4 tokens end at 3
    prime-rl, sample 0: turn 0: routes have 3 rows from position 0 on, instead of 2 for 3 tokens
    prime-rl, sample 0: turn 0: `routed_experts` is missing
    SGLang, sample 0: turn 0: `routed_experts` is missing
    ");
}

#[test]
fn lists_that_are_ragged_or_of_other_layers_are_refused() {
    let rows = |rows: Value| refusal(Layout::Lists, rows);
    let layers = with(answer(Layout::Lists, json!(EXPERTS)), "layer_ids", json!([0, 1]));
    insta::assert_snapshot!(lines(&[
        rows(json!([[[3, 1], [0, 2]], [[2, 0]], [[1, 2], [3, 0]]])),
        rows(json!([[[3, 1], [0, 2]], [[2, 0], [1]], [[1, 2], [3, 0]]])),
        rows(json!([[[3, 1], [0, 2]], [[2, 0], [1, 3]], [[1, 2], [3, 0.5]]])),
        rows(json!([[[3, 1], [0, 2]], [[2, 0], [1, 3, 2], []], [[1, 2], [3, 0]]])),
        rows(json!([[[3, 1], [0, 2]], 7, [[1, 2], [3, 0]]])),
        rows(json!([[], [], []])),
        rows(json!([[[3, 1], [0, 4]], [[2, 0], [1, 3]], [[1, 2], [3, 0]]])),
        rows(json!([[[3, 1], [0, 2]]])),
        rows("AAAA".into()),
        refusal_of(Layout::Lists, &layers),
    ]), @"
    lists, sample 0: turn 0, position 1: not 2 lists of 2 integers, as the first row is
    lists, sample 0: turn 0, position 1: not 2 lists of 2 integers, as the first row is
    lists, sample 0: turn 0, position 2: not 2 lists of 2 integers, as the first row is
    lists, sample 0: turn 0, position 1: not 2 lists of 2 integers, as the first row is
    lists, sample 0: turn 0, position 1: not 2 lists of 2 integers, as the first row is
    lists, sample 0: the routes are of 0 layers, but the model has 3 layers, 2 MoE layers among them
    lists, sample 0: turn 0, layer 2, position 0: expert 4 does not exist (the layer has 4)
    lists, sample 0: turn 0: routes have 1 row from position 0 on, instead of 3 for 4 tokens
    lists, sample 0: `routed_experts` is text, not lists
    lists, sample 0: the routes are of layers [0, 1], but the model's MoE layers are [1, 2]
    ");
}

#[test]
fn another_model_than_the_one_that_sampled_is_refused() {
    let of = |n_layers, layer_ids: &[u32], top_k, n_experts, layout, payload: Value| {
        let model = ModelShape::new(n_layers, layer_ids.to_vec(), top_k, n_experts).unwrap();
        let reading = Reading { layout, model: Some(&model), start: 0 };
        let text = answer(layout, payload).to_string();
        document::read(text.as_bytes(), &reading).expect_err("it is refused").to_string()
    };
    insta::assert_snapshot!(lines(&[
        of(4, &[1, 2], 2, 4, Layout::Vllm, VLLM.into()),
        of(3, &[0, 1, 2], 2, 4, Layout::Vllm, VLLM.into()),
        of(3, &[2], 2, 4, Layout::Vllm, VLLM.into()),
        of(3, &[1, 2], 1, 4, Layout::Vllm, VLLM.into()),
        of(3, &[1, 2], 2, 3, Layout::Vllm, VLLM.into()),
        of(4, &[1, 2], 2, 4, Layout::Sglang, SGLANG.into()),
        of(4, &[1, 2, 3], 2, 4, Layout::NemoRl, NEMO_RL_MOE_LAYERS.into()),
        of(3, &[0, 2], 2, 4, Layout::R3, r3(R3)),
        of(3, &[1, 2], 2, 8, Layout::R3, r3(R3)),
    ]), @"
    vLLM, sample 0: the routes are of 3 layers, but the model has 4 layers, 2 MoE layers among them
    vLLM, sample 0: turn 0, layer 0: nothing but expert 0 was sent for 3 positions from 0 on; the engine never captured this layer
    vLLM, sample 0: turn 0, layer 1, position 0: expert 3 in a dense layer, which routes nothing
    vLLM, sample 0: the routes are of 2 experts a token, but the model takes 1
    vLLM, sample 0: turn 0, layer 1, position 0: expert 3 does not exist (the layer has 3)
    SGLang, sample 0: the routes are 72 bytes, not a multiple of the 32 bytes of a row
    NeMo-RL, sample 0: the routes are of 2 layers, but the model has 4 layers, 3 MoE layers among them
    r3, sample 0: the routes are of layers [1, 2], but the model's MoE layers are [0, 2]
    r3, sample 0: the routes are over 4 experts, but the model has 8
    ");
    let undescribed = Reading { layout: Layout::Sglang, model: None, start: 0 };
    let error = document::read(SGLANG.as_bytes(), &undescribed).unwrap_err();
    insta::assert_snapshot!(format!("{error}\nhint: {}", error.hint()), @r"
    which model sampled is not said, and these routes do not say it
    hint: describe the model that sampled: with --model DIR, or with --layers, --moe-layers, --experts and --top-k
    ");
}

#[test]
fn lines_of_r3_that_contradict_themselves_are_refused() {
    let line =
        |key: &str, value: Value| refusal_of(Layout::R3, &with(answer(Layout::R3, r3(R3)), key, value));
    let routes = |key: &str, value: Value| refusal(Layout::R3, with(r3(R3), key, value));
    insta::assert_snapshot!(lines(&[
        line("r3", 2.into()),
        line("group", "one".into()),
        line("finish", "bored".into()),
        line("prompt_tokens", 5.into()),
        line("prompt_tokens", 0.into()),
        line("cached_tokens", 3.into()),
        line("turns", json!([[1, 3]])),
        line("turns", json!([[2, 3], [2, 4]])),
        line("turns", json!([[2, 5]])),
        line("logprobs", json!([-0.5])),
        line("logprobs", json!([-0.5, 1e39])),
        line("versions", json!([1, 1, 1])),
        line("tokens", json!([5, 6, 7])),
        routes("rows", 2.into()),
        routes("start", 1.into()),
        routes("start", u64::MAX.into()),
        routes("layer_ids", json!([2, 1])),
        routes("layer_ids", json!([])),
        routes("top_k", 5.into()),
        routes("top_k", 0.into()),
        routes("n_experts", 65_537.into()),
        routes("n_experts", 257.into()),
        routes("n_experts", 3.into()),
        routes("dtype", "u16".into()),
        routes("token_digest", "0123456789abcdef".into()),
        routes("token_digest", "123".into()),
        routes("model_hash", "+123456789abcdef".into()),
        routes("validity", "BwA=".into()),
        routes("data", R3[..R3.len() - 4].into()),
        routes("data", (&R3[..R3.len() - 1]).into()),
        routes("data", "AwMAAgIAAQMBAgMA".into()),
    ]), @r#"
    r3, sample 0: format version 2, but this build reads 1
    line 1, column 21: not r3 JSON: invalid type: string "one", expected u64
    r3, sample 0: `finish` is bored, not stop, length or abort
    r3, sample 0: a prompt of 5 tokens, 0 of them cached, in 4 tokens
    r3, sample 0: a prompt of 0 tokens, 0 of them cached, in 4 tokens
    r3, sample 0: a prompt of 2 tokens, 3 of them cached, in 4 tokens
    r3, sample 0: turn 0: sampled positions 1 to 3 are not in order, or outside the completion
    r3, sample 0: turn 1: sampled positions 2 to 4 are not in order, or outside the completion
    r3, sample 0: turn 0: sampled positions 2 to 5 are not in order, or outside the completion
    r3, sample 0: `logprobs` has 1 value for 2 tokens after the prompt
    r3, sample 0: position 3: the logprob is inf
    r3, sample 0: `versions` has 3 values for 2 tokens after the prompt
    r3, sample 0: turn 0: sampled positions 2 to 4 are not in order, or outside the completion
    r3, sample 0: `rows` is 2, not the number of rows in `data`
    r3, sample 0: turn 0: routes have 3 rows from position 1 on, instead of 2 for 4 tokens
    r3, sample 0: routes start at position 18446744073709551615, but the rows of 4 tokens end at 3
    r3, sample 0: MoE layer 1 is listed after layer 2, but their ids ascend
    r3, sample 0: no layer is a MoE layer
    r3, sample 0: 5 of 4 experts a token do not exist: there are 1 to 65536, and a token takes 1 to all
    r3, sample 0: 0 of 4 experts a token do not exist: there are 1 to 65536, and a token takes 1 to all
    r3, sample 0: 2 of 65537 experts a token do not exist: there are 1 to 65536, and a token takes 1 to all
    r3, sample 0: expert ids are `u8`, not one of u16
    r3, sample 0: turn 0, layer 1, position 0: expert 3 does not exist (the layer has 3)
    r3, sample 0: expert ids are `u16`, not one of u8
    r3, sample 0: tokens hash to c03f64119f038920, but the routes are of tokens that hash to 0123456789abcdef
    r3, sample 0: `token_digest` is 123, not 16 hexadecimal digits
    r3, sample 0: `model_hash` is +123456789abcdef, not 16 hexadecimal digits
    r3, sample 0: `validity` is 2 bytes, not a bit for each row
    r3, sample 0: the routes are 9 bytes, not a multiple of the 4 bytes of a row
    r3, sample 0: the routes are not base64: the padding at its end
    r3, sample 0: turn 0, layer 1, position 0: expert 3 appears twice
    "#);
}

#[test]
fn a_file_of_r3_that_was_cut_is_refused_by_line() {
    let error = read_bytes(Layout::R3, b"{\"r3\": 1,").unwrap_err();
    insta::assert_snapshot!(format!("{error}\nhint: {}", error.hint()), @r"
    line 1, column 9: not r3 JSON: EOF while parsing a value
    hint: docs/routes.md shows what r3 sends
    ");
    let cut = format!("{}\n\n{}", answer(Layout::R3, r3(R3)), "{\"r3\": 1, \"group\": 0");
    insta::assert_snapshot!(read_bytes(Layout::R3, cut.as_bytes()).unwrap_err().to_string(), @"line 3, column 20: not r3 JSON: EOF while parsing an object");
}

#[test]
fn what_a_layout_cannot_say_is_not_written() {
    let mut rows = RouteRows::with_capacity(RouteDims { n_layers: 1, top_k: 1, n_experts: 40_000 }, 2);
    rows.append(&[0xff, 0x7f, 0x00, 0x80]);
    let wide = ModelShape::new(2, vec![1], 1, 40_000).unwrap();
    let record = Record { routes: Some(Routes::new(rows, 7, vec![1])), ..Record::unknown(GroupId(0), 0) };
    let refused = |layout, model, element| {
        let error =
            document::write(&record, model, element, &record.sample(layout, 3)).expect_err("it is refused");
        format!("{error}\nhint: {}\n", error.hint())
    };
    insta::assert_snapshot!([
        refused(Layout::Vllm, &wide, Element::Int16),
        refused(Layout::Atom, &wide, Element::Uint16),
        refused(Layout::NemoRl, &wide, Element::Int16),
        refused(Layout::Vllm, &model(), Element::Int16),
    ].concat(), @r"
    vLLM, sample 3: turn 0, layer 1, position 8: expert 32768 does not fit int16
    hint: write a layout with wider ids: sglang, nemo-rl, prime-rl or r3
    ATOM, sample 3: uint16 cannot say -1, which marks dense layers
    hint: write a signed dtype: int16 or int32
    NeMo-RL, sample 3: this layout has no place for routes that start at position 7
    hint: ask for the rows of all tokens, or write another layout
    vLLM, sample 3: the routes are of layers [1], but the model's MoE layers are [1, 2]
    hint: describe the model that sampled: with --model DIR, or with --layers, --moe-layers, --experts and --top-k
    ");
    assert!(document::write(&record, &wide, Element::Uint16, &record.sample(Layout::Vllm, 0)).is_ok());
    let without = Record { routes: None, ..record };
    let error =
        document::write(&without, &wide, Element::Int16, &without.sample(Layout::Sglang, 0)).unwrap_err();
    insta::assert_snapshot!(format!("{error}\nhint: {}", error.hint()), @r"
    SGLang, sample 0: turn 0: `routed_experts` is missing
    hint: start SGLang with --enable-return-routed-experts, and ask for `return_routed_experts`
    ");
}

#[test]
fn a_line_of_r3_is_written_in_one_order() {
    let mut record = read(Layout::R3, &answer(Layout::R3, r3(R3))).unwrap().remove(0);
    record.rollout_logprobs = Some(vec![-0.1, -1.5e-7]);
    record.reward = Some(Reward::Failed);
    record.routes.as_mut().unwrap().model_hash = Some(255);
    let mut line = Vec::new();
    r3_file::write(&record.view(), &mut line).unwrap();
    insta::assert_snapshot!(str::from_utf8(&line).unwrap(), @r#"{"r3":1,"group":0,"index":0,"prompt_tokens":2,"cached_tokens":0,"turns":[[2,4]],"reward":null,"tokens":[5,6,7,8],"logprobs":[-0.1,-1.5e-7],"routed_experts":{"rows":3,"start":0,"layer_ids":[1,2],"top_k":2,"n_experts":4,"dtype":"u8","model_hash":"00000000000000ff","token_digest":"c03f64119f038920","data":"AwEAAgIAAQMBAgMA"}}"#);
}
