//! Problems from files of JSON lines.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::chat::Message;
use crate::dataset::{Dataset, Problem};
use crate::error::TaskError;
use crate::special::kind;
use crate::tokenizer::Tokenizer;

/// How a line spells a problem.
#[derive(Clone, Debug, PartialEq)]
pub struct Keys {
    /// Key of the prompt: a string, taken as it is, or chat messages, rendered with the model's template.
    pub prompt: String,
    /// Key of the answer: a string or a whole number.
    pub answer: String,
    /// Handed to the chat template besides the messages, such as `enable_thinking: false`.
    pub template_variables: Map<String, Value>,
}

impl Default for Keys {
    /// `prompt` and `answer`.
    fn default() -> Self {
        Self { prompt: "prompt".into(), answer: "answer".into(), template_variables: Map::new() }
    }
}

/// Which problems are held out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeldOut {
    /// Those of a file of their own.
    File(PathBuf),
    /// The last so many of the training file.
    Last(usize),
}

/// Reads training and held-out problems.
///
/// Training prompts may repeat; a held-out one is there once, and in neither form among the training prompts.
///
/// # Errors
/// As [`read`], or if a held-out prompt is not the only one of its kind, or nothing is left to train on.
pub fn dataset(
    train: &Path,
    held_out: &HeldOut,
    keys: &Keys,
    tokenizer: &Tokenizer,
) -> Result<Dataset, TaskError> {
    let read = |path: &Path| Rows::read(path, |line| problem(line, keys, tokenizer));
    let mut train_rows = read(train)?;
    let held_out_rows = match held_out {
        HeldOut::File(path) => read(path)?,
        HeldOut::Last(n) => train_rows.split_last(*n)?,
    };
    let mut seen: HashMap<&str, (&Path, usize)> =
        train_rows.rows.iter().map(|(line, problem)| (problem.prompt.as_str(), (train, *line))).collect();
    for (line, problem) in &held_out_rows.rows {
        if let Some((other, other_line)) = seen.insert(&problem.prompt, (&held_out_rows.path, *line)) {
            let fault = TaskError::HeldOutTwice { other: other.into(), other_line };
            return Err(fault.at_line(&held_out_rows.path, *line));
        }
    }
    Ok(Dataset { train: train_rows.into_values(), held_out: held_out_rows.into_values() })
}

/// Reads the problems of `path`, one JSON object a line; blank lines are skipped.
///
/// # Errors
/// The first line that is no problem, and why: it is not JSON, lacks a key, has one of the wrong type, holds
/// messages that the template refuses, or text that the vocabulary lacks. Also if the file holds no problem
/// at all.
pub fn read(path: &Path, keys: &Keys, tokenizer: &Tokenizer) -> Result<Vec<Problem>, TaskError> {
    Ok(Rows::read(path, |line| problem(line, keys, tokenizer))?.into_values())
}

const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// What the lines of a file hold, with their numbers, from 1.
pub(crate) struct Rows<T> {
    path: PathBuf,
    rows: Vec<(usize, T)>,
}

impl<T> Rows<T> {
    /// Reads every line with `parse`; blank ones are skipped.
    pub(crate) fn read(
        path: &Path,
        parse: impl Fn(&[u8]) -> Result<T, TaskError>,
    ) -> Result<Self, TaskError> {
        let unreadable = |source| TaskError::Unreadable { path: path.into(), source };
        let mut reader = BufReader::new(File::open(path).map_err(unreadable)?);
        let mut rows = Vec::new();
        let mut bytes = Vec::new();
        for line in 1.. {
            bytes.clear();
            if reader.read_until(b'\n', &mut bytes).map_err(unreadable)? == 0 {
                break;
            }
            // A byte order mark is how some editors begin a file in UTF-8.
            let own = bytes.strip_prefix(BYTE_ORDER_MARK).filter(|_| line == 1).unwrap_or(&bytes);
            if !own.trim_ascii().is_empty() {
                rows.push((line, parse(own).map_err(|fault| fault.at_line(path, line))?));
            }
        }
        if rows.is_empty() {
            return Err(TaskError::EmptyFile { path: path.into() });
        }
        Ok(Self { path: path.into(), rows })
    }

    /// Takes the last `n` lines away.
    fn split_last(&mut self, n: usize) -> Result<Self, TaskError> {
        if n >= self.rows.len() {
            return Err(TaskError::NothingToTrainOn { held_out: n, n_problems: self.rows.len() });
        }
        let rows = self.rows.split_off(self.rows.len() - n);
        Ok(Self { path: self.path.clone(), rows })
    }

    pub(crate) fn into_values(self) -> Vec<T> {
        self.rows.into_iter().map(|(_, value)| value).collect()
    }
}

/// One line, as an object.
pub(crate) fn parse_row(line: &[u8]) -> Result<Map<String, Value>, TaskError> {
    serde_json::from_slice(line.trim_ascii_end())
        .map_err(|error| TaskError::NotJson { reason: without_line(&error) })
}

fn problem(line: &[u8], keys: &Keys, tokenizer: &Tokenizer) -> Result<Problem, TaskError> {
    let row = parse_row(line)?;
    let prompt = match value(&row, &keys.prompt)? {
        Value::String(text) => text.clone(),
        Value::Array(turns) => {
            let messages = turns.iter().map(message).collect::<Result<Vec<_>, _>>()?;
            tokenizer.chat_template()?.render(&messages, &keys.template_variables)?
        }
        other => return Err(wrong_type(&keys.prompt, other, "a string or a list of messages")),
    };
    let answer = match value(&row, &keys.answer)? {
        Value::String(text) => text.clone(),
        Value::Number(number) if !number.is_f64() => number.to_string(),
        other => return Err(wrong_type(&keys.answer, other, "a string or a whole number")),
    };
    for (what, text) in [("prompt", &prompt), ("answer", &answer)] {
        if text.is_empty() {
            return Err(TaskError::Empty { what });
        }
        tokenizer.check_text(text)?;
    }
    Ok(Problem { prompt, answer, wrong: None })
}

/// The message of `error` with its column only: its line is always 1, and ours is already said.
fn without_line(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rsplit_once(" at line ") {
        Some((what, _)) => format!("{what} at column {}", error.column()),
        None => text,
    }
}

pub(crate) fn message(turn: &Value) -> Result<Message, TaskError> {
    let Value::Object(turn) = turn else { return Err(wrong_type("messages", turn, "a list of objects")) };
    if let Some(key) = turn.keys().find(|key| !matches!(key.as_str(), "role" | "content")) {
        return Err(TaskError::UnknownMessageKey { key: key.clone() });
    }
    let text = |key| match value(turn, key)? {
        Value::String(text) => Ok(text.clone()),
        other => Err(wrong_type(key, other, "a string")),
    };
    Ok(Message { role: text("role")?, content: text("content")? })
}

pub(crate) fn value<'a>(row: &'a Map<String, Value>, key: &str) -> Result<&'a Value, TaskError> {
    row.get(key)
        .ok_or_else(|| TaskError::MissingKey { key: key.into(), found: row.keys().cloned().collect() })
}

pub(crate) fn wrong_type(key: &str, value: &Value, expected: &'static str) -> TaskError {
    TaskError::WrongType { key: key.into(), found: kind(value), expected }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::tests::{directory, tiny};

    /// Reads `text` as a file called `rows.jsonl`.
    fn read_text(text: &str) -> Result<Vec<Problem>, TaskError> {
        read(&directory(&[("rows.jsonl", text)]).path().join("rows.jsonl"), &Keys::default(), &tiny())
    }

    /// The message, from the file's name on.
    fn message_of(error: &TaskError) -> String {
        let text = error.to_string();
        text[text.find("rows.jsonl").expect("the file is named")..].into()
    }

    #[test]
    fn rows_become_problems_in_order() {
        let text = "{\"prompt\": \"1+1=\", \"answer\": \"2\", \"source\": {}}\n\r\n\
                    {\"answer\": -7, \"prompt\": \"3-10=\"}\r\n";
        let problems = read_text(text).unwrap();
        let expected = [("1+1=", "2"), ("3-10=", "-7")];
        assert_eq!(problems.len(), 2);
        for (problem, (prompt, answer)) in problems.iter().zip(expected) {
            assert_eq!(
                (problem.prompt.as_str(), problem.answer.as_str(), &problem.wrong),
                (prompt, answer, &None)
            );
        }
    }

    #[test]
    fn a_bad_row_names_file_line_and_fault() {
        let cases = [
            ("{\"prompt\": 1", "not JSON: EOF while parsing an object at column 12"),
            ("[1]", "not JSON: invalid type: sequence, expected a map at column 0"),
            ("\u{feff}{}", "not JSON: expected value at column 1"),
            ("{\"prompt\": \"1\"}", "`answer` is missing; the keys are prompt"),
            ("{}", "`prompt` is missing; the keys are none"),
            (
                "{\"prompt\": 5, \"answer\": \"1\"}",
                "`prompt` is a number, but has to be a string or a list of messages",
            ),
            (
                "{\"prompt\": \"1\", \"answer\": 0.5}",
                "`answer` is a fractional number, but has to be a string or a whole number",
            ),
            (
                "{\"prompt\": \"1\", \"answer\": null}",
                "`answer` is null, but has to be a string or a whole number",
            ),
            ("{\"prompt\": \"\", \"answer\": \"1\"}", "the prompt is empty"),
            ("{\"prompt\": \"1\", \"answer\": \"\"}", "the answer is empty"),
            ("{\"prompt\": \"1é\", \"answer\": \"1\"}", "the vocabulary has no `é` (character 1 of `1é`)"),
            ("{\"prompt\": \"1\", \"answer\": \"W\"}", "the vocabulary has no `W` (character 0 of `W`)"),
        ];
        for (row, fault) in cases {
            let error =
                read_text(&format!("{{\"prompt\": \"1\", \"answer\": \"1\"}}\n\n{row}\n")).unwrap_err();
            assert_eq!(message_of(&error), format!("rows.jsonl:3: {fault}"));
            assert!(!error.hint().is_empty());
        }
    }

    #[test]
    fn bytes_that_are_not_utf8_are_a_fault_of_their_line() {
        let directory = directory(&[]);
        let path = directory.path().join("rows.jsonl");
        std::fs::write(&path, b"{\"prompt\": \"\xff\", \"answer\": \"1\"}\n").unwrap();
        let error = read(&path, &Keys::default(), &tiny()).unwrap_err();
        assert!(message_of(&error).starts_with("rows.jsonl:1: not JSON: invalid unicode"), "{error}");
    }

    #[test]
    fn a_byte_order_mark_begins_a_file_and_nothing_else() {
        let row = r#"{"prompt": "1+1=", "answer": "2"}"#;
        let marked = format!("\u{FEFF}{row}\n{row}\n");
        assert_eq!(read_text(&marked).unwrap(), read_text(&format!("{row}\n{row}\n")).unwrap());
        assert_eq!(message_of(&read_text("\u{FEFF}\n").unwrap_err()), "rows.jsonl holds no problem");
        let later = message_of(&read_text(&format!("{row}\n\u{FEFF}{row}\n")).unwrap_err());
        assert!(later.starts_with("rows.jsonl:2: not JSON"), "{later}");
    }

    #[test]
    fn files_without_problems_are_refused() {
        assert_eq!(message_of(&read_text("\n \n").unwrap_err()), "rows.jsonl holds no problem");
        let missing = read(Path::new("nowhere/rows.jsonl"), &Keys::default(), &tiny()).unwrap_err();
        assert!(missing.to_string().starts_with("cannot read nowhere/rows.jsonl: No such file"), "{missing}");
    }

    fn chat_tokenizer() -> Tokenizer {
        let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-moe");
        let file = |name| std::fs::read_to_string(assets.join(name)).unwrap();
        let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ suffix }}";
        let (tokenizer, config) = (file("tokenizer.json"), file("tokenizer_config.json"));
        let files = [
            ("tokenizer.json", tokenizer.as_str()),
            ("tokenizer_config.json", &config),
            ("chat_template.jinja", template),
        ];
        Tokenizer::load(directory(&files).path(), 64).unwrap()
    }

    fn read_chat(messages: &str) -> Result<Vec<Problem>, TaskError> {
        let row = format!("{{\"q\": {messages}, \"a\": \"2\"}}\n");
        let variables = Map::from_iter([("suffix".to_owned(), Value::from("answer: "))]);
        let keys = Keys { prompt: "q".into(), answer: "a".into(), template_variables: variables };
        read(&directory(&[("rows.jsonl", &row)]).path().join("rows.jsonl"), &keys, &chat_tokenizer())
    }

    #[test]
    fn messages_are_rendered_with_the_models_template() {
        let problems =
            read_chat(r#"[{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}]"#)
                .unwrap();
        assert_eq!(problems[0].prompt, "system: add\nuser: 1+1\nanswer: ");
    }

    #[test]
    fn messages_that_cannot_be_rendered_are_faults_of_their_line() {
        let cases = [
            ("[]", "the list of messages is empty"),
            ("[1]", "`messages` is a number, but has to be a list of objects"),
            (r#"[{"role": "user"}]"#, "`content` is missing; the keys are role"),
            (r#"[{"role": "user", "content": ["hi"]}]"#, "`content` is a list, but has to be a string"),
            (
                r#"[{"role": "user", "content": "hi", "name": "x"}]"#,
                "`name` is a key that a message cannot have",
            ),
            (
                r#"[{"role": "assistant", "content": "2"}]"#,
                "the last message is the assistant's, which leaves nothing to complete",
            ),
        ];
        for (messages, fault) in cases {
            assert_eq!(message_of(&read_chat(messages).unwrap_err()), format!("rows.jsonl:1: {fault}"));
        }
        let row = r#"{"prompt": [{"role": "user", "content": "hi"}], "answer": "2"}"#;
        let error = read_text(row).unwrap_err();
        assert!(error.to_string().ends_with("has no chat template"), "{error}");
    }

    fn dataset_of(train: &str, held_out: &str, last: Option<usize>) -> Result<Dataset, TaskError> {
        let rows = |prompts: &str| -> String {
            prompts
                .split(' ')
                .map(|prompt| format!("{{\"prompt\": \"{prompt}\", \"answer\": \"1\"}}\n"))
                .collect()
        };
        let directory = directory(&[("rows.jsonl", &rows(train)), ("held_out_rows.jsonl", &rows(held_out))]);
        let held_out =
            last.map_or(HeldOut::File(directory.path().join("held_out_rows.jsonl")), HeldOut::Last);
        dataset(&directory.path().join("rows.jsonl"), &held_out, &Keys::default(), &tiny())
    }

    fn prompts(problems: &[Problem]) -> Vec<&str> {
        problems.iter().map(|problem| problem.prompt.as_str()).collect()
    }

    #[test]
    fn held_out_problems_come_from_their_file_or_from_the_end() {
        let own_file = dataset_of("1 2 2 3", "4 5", None).unwrap();
        assert_eq!(
            (prompts(&own_file.train), prompts(&own_file.held_out)),
            (vec!["1", "2", "2", "3"], vec!["4", "5"])
        );
        let last = dataset_of("1 2 2 3 4", "9", Some(2)).unwrap();
        assert_eq!((prompts(&last.train), prompts(&last.held_out)), (vec!["1", "2", "2"], vec!["3", "4"]));
        assert!(dataset_of("1 2", "9", Some(0)).unwrap().held_out.is_empty());
    }

    #[test]
    fn a_held_out_prompt_that_is_there_twice_is_refused_with_both_lines() {
        let error = dataset_of("1 2 3", "4 3", None).unwrap_err().to_string();
        assert!(
            error.contains("held_out_rows.jsonl:2: the held-out prompt is also on line 3 of "),
            "{error}"
        );
        let error = dataset_of("1 2 3", "4 5 4", None).unwrap_err().to_string();
        assert!(
            error.contains("held_out_rows.jsonl:3: the held-out prompt is also on line 1 of "),
            "{error}"
        );
        let error = dataset_of("1 2 3 1", "9", Some(1)).unwrap_err().to_string();
        assert!(error.contains("rows.jsonl:4: the held-out prompt is also on line 1 of "), "{error}");
        let error = dataset_of("1 2", "9", Some(2)).unwrap_err();
        assert!(matches!(error, TaskError::NothingToTrainOn { held_out: 2, n_problems: 2 }));
    }
}
