//! Prompts to sample from, with what is said after each sampled turn, from files of JSON lines.

use std::path::Path;

use serde_json::{Map, Value};

use crate::chat::Message;
use crate::conversation::Opening;
use crate::error::TaskError;
use crate::jsonl::{Rows, message, parse_row, value, wrong_type};
use crate::tokenizer::Tokenizer;

/// One conversation to sample: how it begins, and what its user says then.
///
/// In a file, `{"prompt": "1+1="}`, or `{"prompt": [{"role": "user", "content": "1+1?"}]}` with `messages` as another
/// name of the key; and `"turns": ["and 2+2?"]` for what follows each sampled turn but the last. In a chat a turn may
/// also be a message, `{"role": "tool", "content": "4"}`. Other keys are passed over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Script {
    /// The beginning.
    pub opening: Opening,
    /// What answers each sampled turn but the last.
    pub turns: Vec<Message>,
}

impl Script {
    /// A prompt that is completed once.
    #[must_use]
    pub fn prompt(text: String) -> Self {
        Self { opening: Opening::Text(text), turns: Vec::new() }
    }
}

/// Reads the conversations of `path`, one JSON object a line; blank lines are skipped.
///
/// # Errors
/// The first line that is none, and why: also if the chat template refuses its messages and turns, whatever is sampled
/// between them. Or if there is no line at all.
pub fn read(path: &Path, tokenizer: &Tokenizer) -> Result<Vec<Script>, TaskError> {
    Ok(Rows::read(path, |line| script(line, tokenizer))?.into_values())
}

fn script(line: &[u8], tokenizer: &Tokenizer) -> Result<Script, TaskError> {
    let row = parse_row(line)?;
    let opening = opening(&row)?;
    let is_chat = matches!(opening, Opening::Messages(_));
    let turns = match row.get("turns") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(turns)) => turns.iter().map(|one| turn(one, is_chat)).collect::<Result<_, _>>()?,
        Some(other) => return Err(wrong_type("turns", other, "a list of what is said after each turn")),
    };
    let said = match &opening {
        Opening::Text(text) => vec![text],
        Opening::Messages(messages) => messages.iter().map(|message| &message.content).collect(),
    };
    for text in said.into_iter().chain(turns.iter().map(|message| &message.content)) {
        tokenizer.check_text(text)?;
    }
    let script = Script { opening, turns };
    rehearse(&script, tokenizer)?;
    Ok(script)
}

/// Renders a chat as if nothing was said between its turns, so that what a template refuses is known before anything is
/// sampled.
fn rehearse(script: &Script, tokenizer: &Tokenizer) -> Result<(), TaskError> {
    let Opening::Messages(messages) = &script.opening else { return Ok(()) };
    let template = tokenizer.chat_template()?;
    let mut messages = messages.clone();
    let prompt = template.render(&messages, &Map::new())?;
    if tokenizer.encode(&prompt)?.is_empty() {
        return Err(TaskError::Empty { what: "prompt" });
    }
    for turn in &script.turns {
        messages.push(Message { role: "assistant".into(), content: String::new() });
        messages.push(turn.clone());
        tokenizer.check_text(&template.render(&messages, &Map::new())?)?;
    }
    Ok(())
}

fn opening(row: &Map<String, Value>) -> Result<Opening, TaskError> {
    let key = if row.contains_key("prompt") || !row.contains_key("messages") { "prompt" } else { "messages" };
    match value(row, key)? {
        Value::String(text) if text.is_empty() => Err(TaskError::Empty { what: "prompt" }),
        Value::String(text) if key == "prompt" => Ok(Opening::Text(text.clone())),
        Value::Array(messages) => {
            Ok(Opening::Messages(messages.iter().map(message).collect::<Result<_, _>>()?))
        }
        other => Err(wrong_type(key, other, "a string or a list of messages")),
    }
}

fn turn(value: &Value, is_chat: bool) -> Result<Message, TaskError> {
    let said = match value {
        Value::String(content) => Message { role: "user".into(), content: content.clone() },
        Value::Object(_) if is_chat => message(value)?,
        other if is_chat => return Err(wrong_type("turns", other, "a list of strings or messages")),
        other => return Err(wrong_type("turns", other, "a list of strings, as the prompt is one")),
    };
    if said.role == "assistant" {
        return Err(TaskError::AssistantLast);
    }
    if said.content.is_empty() && !is_chat {
        return Err(TaskError::Empty { what: "turn" });
    }
    Ok(said)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::tests::directory;

    /// Reads `text` for the shipped tokenizer, with a chat template that knows no `narrator`.
    fn read_text(text: &str) -> Result<Vec<Script>, TaskError> {
        let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-moe");
        let file = |name| std::fs::read_to_string(assets.join(name)).unwrap();
        let template = "{% for m in messages %}{% if m.role == 'narrator' %}{{ raise_exception('who?') }}{% endif %}\
                        {{ m.content }}{% endfor %}";
        let (tokenizer, config) = (file("tokenizer.json"), file("tokenizer_config.json"));
        let directory = directory(&[
            ("tokenizer.json", &*tokenizer),
            ("tokenizer_config.json", &config),
            ("chat_template.jinja", template),
            ("talk.jsonl", text),
        ]);
        read(&directory.path().join("talk.jsonl"), &Tokenizer::load(directory.path(), 64)?)
    }

    fn said(role: &str, content: &str) -> Message {
        Message { role: role.into(), content: content.into() }
    }

    #[test]
    fn lines_become_scripts() {
        let text = r#"{"prompt": "1+1=", "answer": 2}
{"prompt": "1+1=", "turns": ["2+2=", "3+3="]}

{"prompt": [{"role": "user", "content": "hi"}], "turns": null}
{"messages": [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}],
 "turns": ["2+2", {"role": "tool", "content": "4"}]}"#
            .replace("}],\n", "}],");
        let user = |content| said("user", content);
        let chat = |messages: &[Message], turns: &[Message]| Script {
            opening: Opening::Messages(messages.to_vec()),
            turns: turns.to_vec(),
        };
        let expected = [
            Script::prompt("1+1=".into()),
            Script { turns: vec![user("2+2="), user("3+3=")], ..Script::prompt("1+1=".into()) },
            chat(&[user("hi")], &[]),
            chat(&[said("system", "add"), user("1+1")], &[user("2+2"), said("tool", "4")]),
        ];
        assert_eq!(read_text(&text).unwrap(), expected);
    }

    #[test]
    fn a_bad_line_names_file_line_and_fault() {
        let chat = r#"{"prompt": [{"role": "user", "content": "hi"}], "turns": "#;
        let cases = [
            (r#"{"text": "1"}"#.to_owned(), "`prompt` is missing; the keys are text"),
            (r#"{"prompt": ""}"#.into(), "the prompt is empty"),
            (
                r#"{"messages": "1"}"#.into(),
                "`messages` is a string, but has to be a string or a list of messages",
            ),
            (
                r#"{"prompt": "1", "turns": "2"}"#.into(),
                "`turns` is a string, but has to be a list of what is said after each turn",
            ),
            (
                r#"{"prompt": "1", "turns": [{"role": "user", "content": "2"}]}"#.into(),
                "`turns` is an object, but has to be a list of strings, as the prompt is one",
            ),
            (r#"{"prompt": "1", "turns": [""]}"#.into(), "the turn is empty"),
            (r#"{"prompt": "1", "turns": ["W"]}"#.into(), "the vocabulary has no `W` (character 0 of `W`)"),
            (format!("{chat}[1]}}"), "`turns` is a number, but has to be a list of strings or messages"),
            (
                format!(r#"{chat}[{{"role": "assistant", "content": "2"}}]}}"#),
                "the last message is the assistant's, which leaves nothing to complete",
            ),
            (r#"{"prompt": [{"role": "user", "content": ""}]}"#.into(), "the prompt is empty"),
        ];
        for (line, fault) in cases {
            let error = read_text(&format!("{{\"prompt\": \"1\"}}\n{line}\n")).unwrap_err();
            let text = error.to_string();
            assert!(text.ends_with(&format!("talk.jsonl:2: {fault}")), "{text}");
            assert!(!error.hint().is_empty());
        }
    }

    #[test]
    fn what_a_template_refuses_in_a_late_turn_is_known_before_sampling() {
        let turns = r#"["2", {"role": "narrator", "content": "3"}]"#;
        let line = format!(r#"{{"prompt": [{{"role": "user", "content": "1"}}], "turns": {turns}}}"#);
        let error = read_text(&line).unwrap_err().to_string();
        assert!(error.contains("talk.jsonl:1: ") && error.ends_with("failed: who? (line 1)"), "{error}");
    }
}
