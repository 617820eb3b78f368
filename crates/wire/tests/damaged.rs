//! Files that contradict themselves where a schema would not notice.

use r3_core::ids::TokenId;
use r3_core::support::SupportError;
use r3_wire::check::Sample;
use r3_wire::diff::compare;
use r3_wire::document::{Reading, read};
use r3_wire::error::{Fault, WireError};
use r3_wire::layout::Layout;
use r3_wire::model::ModelShape;
use r3_wire::record::Record;
use r3_wire::{nemo_rl, r3_file};
use serde_json::{Value, json};

/// Reads a line of r3's own file that says `keys` and nothing of tokens.
fn line(keys: &Value) -> Result<Record, WireError> {
    let mut line = json!({ "r3": 1, "group": 0, "index": 0 });
    line.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    r3_file::read(line.to_string().as_bytes(), 0)
}

fn fault(keys: &Value) -> Fault {
    match line(keys) {
        Err(WireError::Sample { fault, .. }) => fault,
        other => panic!("{other:?}"),
    }
}

#[test]
fn turns_are_checked_without_tokens_too() {
    assert_eq!(line(&json!({ "turns": [[2, 4], [5, 6]] })).unwrap().turns, [2..4, 5..6]);
    for (turns, turn, start, end) in
        [(json!([[3, 3]]), 0, 3, 3), (json!([[4, 2]]), 0, 4, 2), (json!([[2, 4], [3, 6]]), 1, 3, 6)]
    {
        assert_eq!(fault(&json!({ "turns": turns })), Fault::Turn { turn, start, end });
    }
}

#[test]
fn numbers_that_f32_makes_infinite_are_refused_without_tokens_too() {
    assert!(matches!(fault(&json!({ "logprobs": [-1.0, -1e300] })), Fault::Logprob { position: 1, .. }));
    let tokens = json!({ "tokens": [1, 2, 3], "prompt_tokens": 1, "logprobs": [-1.0, -1e300] });
    assert!(matches!(fault(&tokens), Fault::Logprob { position: 2, .. }));
    assert!(matches!(fault(&json!({ "reward": 1e300 })), Fault::Key { key: "reward", .. }));
}

#[test]
fn supports_that_contradict_their_tokens_are_refused() {
    let with = |supports: Value| json!({ "tokens": [1, 2, 3], "prompt_tokens": 1, "supports": supports });
    assert!(line(&with(json!([[2, 9], [0, 3]]))).unwrap().support.is_some());
    assert_eq!(line(&with(json!([[], []]))).unwrap().support, None, "it says nothing");
    let per_token = Fault::PerToken { key: "supports", found: 1, expected: 2 };
    assert_eq!(fault(&with(json!([[2]]))), per_token);
    let missing = Fault::Support(SupportError::Missing { row: 1, token: TokenId(3) });
    assert_eq!(fault(&with(json!([[2], [2, 4]]))), missing);
    let order = SupportError::Order { row: 0, token: TokenId(2), before: TokenId(9) };
    assert_eq!(fault(&with(json!([[9, 2], [3]]))), Fault::Support(order));
}

#[test]
fn numbers_that_no_token_can_be_drawn_by_are_refused() {
    let with = |sampling: Value| json!({ "sampling": sampling });
    let least =
        line(&with(json!({ "temperature": 0.5, "by_a_later_version": 1 }))).unwrap().sampling.unwrap();
    assert_eq!((least.temperature, least.sample_top_k, least.top_p, least.min_p), (0.5, 0, 1.0, 0.0));
    let greedy = line(&with(json!({ "temperature": 0, "top_p": 0.5 }))).unwrap().sampling.unwrap();
    assert_eq!((greedy.divisor(), greedy.truncates()), (1.0, false));
    for broken in [
        json!({ "temperature": -1 }),
        json!({ "temperature": 1e-40 }),
        json!({ "temperature": 1e300 }),
        json!({ "temperature": 1, "top_p": -0.1 }),
        json!({ "temperature": 1, "top_p": 1.5 }),
        json!({ "temperature": 1, "min_p": 1.5 }),
        json!({ "temperature": 1, "min_p": -0.5 }),
    ] {
        assert!(matches!(fault(&with(broken.clone())), Fault::Key { key: "sampling", .. }), "{broken}");
    }
}

#[test]
fn a_start_that_no_position_can_be_is_refused() {
    let at = |start: usize| {
        let routes = json!({ "rows": 1, "start": start, "layer_ids": [0], "top_k": 1, "n_experts": 4,
            "dtype": "u8", "data": "Aw==" });
        json!({ "routed_experts": routes })
    };
    let last = u32::MAX as usize;
    let record = line(&at(last)).unwrap();
    assert_eq!(record.n_tokens(), Some(last + 2));
    assert_eq!(compare(&record, &record, 0).unwrap().0.tokens, 1);
    for start in [last + 1, usize::MAX] {
        assert_eq!(fault(&at(start)), Fault::StartBeyond { start });
    }
}

#[test]
fn an_answer_without_a_prompt_is_refused() {
    let model = ModelShape::new(1, vec![0], 1, 4).unwrap();
    let reading = Reading { layout: Layout::Sglang, model: Some(&model), start: 0 };
    let answer = json!({ "prompt_token_ids": [], "token_ids": [7], "routed_experts": "" });
    match read(answer.to_string().as_bytes(), &reading) {
        Err(WireError::Sample { fault: Fault::Prompt { prompt_tokens: 0, n_tokens: 1, .. }, .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_a_refusal_quotes_moves_no_cursor() {
    let wild = "\u{7f}\u{9b}2J\n";
    let model = ModelShape::new(1, vec![0], 1, 4).unwrap();
    let errors = [
        line(&json!({ "finish": wild })).unwrap_err(),
        line(
            &json!({ "routed_experts": { "rows": 1, "start": 0, "layer_ids": [0], "top_k": 1, "n_experts": 4,
            "dtype": wild, "data": "" } }),
        )
        .unwrap_err(),
        line(&json!({ "tokens": wild })).unwrap_err(),
        nemo_rl::read(&format!("nrlre1:{wild}:1x1x1:"), &model, &Sample::new(Layout::NemoRl, 0)).unwrap_err(),
        read(
            json!({ "data": "", "shape": wild, "start": 0, "dtype": "int8" }).to_string().as_bytes(),
            &Reading { layout: Layout::PrimeRl, model: Some(&model), start: 0 },
        )
        .unwrap_err(),
    ];
    for error in errors {
        let message = error.to_string();
        assert!(!message.contains(char::is_control), "{message:?}");
    }
}
