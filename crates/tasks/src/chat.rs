//! Chat messages to prompts, by the model's own Jinja template, as transformers renders it.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use serde_json::{Map, json};

use crate::error::TaskError;
use crate::special::ConfigFile;
use crate::strftime;

const TEMPLATE: &str = "chat_template";

/// The function that tells templates the time.
const STRFTIME_NOW: &str = "strftime_now";

/// Instructions one rendering may take: far more than a conversation needs, so that a template which never
/// ends is an error and not a hang.
const FUEL: u64 = 50_000_000;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, or what the template knows besides.
    pub role: String,
    /// What is said.
    pub content: String,
}

/// A model's chat template, compiled.
pub struct ChatTemplate {
    environment: Environment<'static>,
    path: PathBuf,
    special_tokens: BTreeMap<String, String>,
}

impl ChatTemplate {
    /// Compiles `source`, which came from `path`. `special_tokens` (`eos_token` and the like) can be printed
    /// by it, and `now` is what it believes the time to be.
    ///
    /// # Errors
    /// If it is not a Jinja template.
    pub fn new(
        path: &Path,
        source: String,
        special_tokens: BTreeMap<String, String>,
        now: SystemTime,
    ) -> Result<Self, TaskError> {
        let mut environment = environment(now);
        match environment.add_template_owned(TEMPLATE, source) {
            Ok(()) => Ok(Self { environment, path: path.into(), special_tokens }),
            Err(error) => Err(failed(path, &error)),
        }
    }

    /// The template of a model directory: chat_template.jinja, else `chat_template` in tokenizer_config.json
    /// (where it is named, the one named `default`). `None` if there is neither.
    pub(crate) fn find(
        directory: &Path,
        tokenizer_config: &ConfigFile,
        special_tokens: &BTreeMap<String, String>,
        now: SystemTime,
    ) -> Result<Option<Self>, TaskError> {
        let path = directory.join("chat_template.jinja");
        match fs::read_to_string(&path) {
            Ok(source) => return Self::new(&path, source, special_tokens.clone(), now).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(TaskError::Unreadable { path, source }),
        }
        let Some(value) = tokenizer_config.get(TEMPLATE) else { return Ok(None) };
        let named = || {
            let default = value.as_array()?.iter().find(|entry| entry["name"] == "default")?;
            default["template"].as_str()
        };
        match value.as_str().or_else(named) {
            Some(source) => {
                Self::new(tokenizer_config.path(), source.into(), special_tokens.clone(), now).map(Some)
            }
            None => Err(tokenizer_config.wrong_type(
                TEMPLATE,
                value,
                "a template, or a list with one named `default`",
            )),
        }
    }

    /// Whether it asks for the time.
    pub(crate) fn asks_for_the_time(&self) -> bool {
        let template = self.environment.get_template(TEMPLATE).expect("`new` added it");
        template.source().contains(STRFTIME_NOW)
    }

    /// The prompt that asks for the assistant's next turn after `messages`, in their order. `variables` are
    /// handed to the template besides (`enable_thinking: false`).
    ///
    /// # Errors
    /// If there is no message, the last one is the assistant's, or the template fails or refuses.
    pub fn render(
        &self,
        messages: &[Message],
        variables: &Map<String, serde_json::Value>,
    ) -> Result<String, TaskError> {
        match messages.last() {
            None => return Err(TaskError::Empty { what: "list of messages" }),
            Some(last) if last.role == "assistant" => return Err(TaskError::AssistantLast),
            Some(_) => {}
        }
        let mut context = Map::new();
        context.extend(self.special_tokens.iter().map(|(key, text)| (key.clone(), json!(text))));
        context.insert("tools".into(), json!(null));
        context.insert("documents".into(), json!(null));
        context.extend(variables.clone());
        context.insert("messages".into(), json!(messages));
        context.insert("add_generation_prompt".into(), json!(true));
        let template = self.environment.get_template(TEMPLATE).expect("`new` added it");
        template.render(Value::from(Serde(&context))).map_err(|error| failed(&self.path, &error))
    }
}

/// Says what failed in which line; `raise_exception` comes through here with the template's own words.
fn failed(path: &Path, error: &Error) -> TaskError {
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    let line = error.line().map_or(String::new(), |line| format!(" (line {line})"));
    TaskError::ChatTemplate { path: path.into(), reason: format!("{what}{line}") }
}

/// Jinja as transformers sets it up (`utils/chat_template_utils.py`, `_compile_jinja_template`).
fn environment(now: SystemTime) -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = minijinja::syntax::SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the default delimiters are sound"));
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function(STRFTIME_NOW, move |format: &str| {
        strftime::format(now, format).map_err(|reason| Error::new(ErrorKind::InvalidOperation, reason))
    });
    environment
}

/// Python's `json.dumps(value, ensure_ascii=False, indent=indent)`: unlike Jinja's own filter, nothing is
/// escaped for HTML, and separators have a space.
fn to_json(value: Serde<serde_json::Value>, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    options.assert_all_used()?;
    let mut bytes = Vec::new();
    let written = match indent {
        Some(width) => {
            let spaces = vec![b' '; width.min(16)];
            value
                .serialize(&mut Serializer::with_formatter(&mut bytes, PrettyFormatter::with_indent(&spaces)))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut bytes, Spaced)),
    };
    written.map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(String::from_utf8(bytes).expect("JSON is UTF-8"))
}

/// JSON on one line, with `, ` and `: ` between things.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use crate::tokenizer::Tokenizer;
    use crate::tokenizer::tests::directory;

    const CHATML: &str = "{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('nobody is called ' + message.role) }}
    {%- endif %}
    {{- '<|' + message.role + '|>' + message.content.strip() + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
";

    fn template(source: &str) -> Result<ChatTemplate, TaskError> {
        let special = BTreeMap::from([("eos_token".to_owned(), "</s>".to_owned())]);
        ChatTemplate::new(
            Path::new("chat.jinja"),
            source.into(),
            special,
            UNIX_EPOCH + Duration::from_secs(951_782_400),
        )
    }

    fn messages(turns: &[(&str, &str)]) -> Vec<Message> {
        turns
            .iter()
            .map(|(role, content)| Message { role: (*role).into(), content: (*content).into() })
            .collect()
    }

    /// Renders `source` for one user message, `hi`.
    fn render(source: &str) -> Result<String, TaskError> {
        template(source)?.render(&messages(&[("user", "hi")]), &Map::new())
    }

    #[test]
    fn messages_keep_their_order_and_the_assistant_is_asked() {
        let turns =
            messages(&[("system", "be brief"), ("user", " 1+1?\n"), ("assistant", "2"), ("user", "2+2?")]);
        assert_eq!(
            template(CHATML).unwrap().render(&turns, &Map::new()).unwrap(),
            "<|system|>be brief</s><|user|>1+1?</s><|assistant|>2</s><|user|>2+2?</s><|assistant|>"
        );
    }

    /// Expected texts are those of Python's Jinja2 3.1.6, set up as transformers 5.24.0 does.
    #[test]
    fn templates_render_as_python_does() {
        let cases = [
            ("{% if true %}\n  a\n{% endif %}\nb\n", "  a\nb"),
            ("  {% for m in messages %}\n{{ m.content }}\n  {% endfor %}", "hi\n"),
            ("{{ none }}|{{ true }}|{{ 1 == 2 }}|{{ nothing }}|{{ tools }}", "None|True|False||None"),
            ("{{ [1, {'a': '<é>'}] | tojson }}", "[1, {\"a\": \"<é>\"}]"),
            (
                "{{ {'a': [1, 2], 'b': {}} | tojson(indent=2) }}",
                "{\n  \"a\": [\n    1,\n    2\n  ],\n  \"b\": {}\n}",
            ),
            ("{{ 'a<b>' }} {{ 'x--y'.split('--')[-1] }} {{ 'ab'.startswith('a') }}", "a<b> y True"),
            ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "13"),
            (
                "{% set ns = namespace(n=0) %}\
                 {% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
                "1",
            ),
        ];
        for (source, expected) in cases {
            assert_eq!(render(source).unwrap(), expected, "{source:?}");
        }
        let dated = "{{ strftime_now('%d %b %Y') }}";
        assert_eq!(render(dated).unwrap(), "29 Feb 2000");
        assert!(
            template(dated).unwrap().asks_for_the_time() && !template(CHATML).unwrap().asks_for_the_time()
        );
    }

    #[test]
    fn variables_reach_the_template_but_cannot_replace_the_messages() {
        let source = "{{ messages[0].content }}\
                      {% if enable_thinking is defined and enable_thinking is false %}!{% endif %}";
        let mut variables = Map::new();
        variables.insert("enable_thinking".into(), json!(false));
        variables.insert("messages".into(), json!([]));
        let turns = messages(&[("user", "hi")]);
        assert_eq!(template(source).unwrap().render(&turns, &variables).unwrap(), "hi!");
        assert_eq!(template(source).unwrap().render(&turns, &Map::new()).unwrap(), "hi");
    }

    #[test]
    fn failing_templates_say_what_and_where() {
        let error = |source| render(source).unwrap_err().to_string();
        assert_eq!(
            error("\n{{ raise_exception('roles must alternate') }}"),
            "the chat template of chat.jinja failed: roles must alternate (line 2)"
        );
        assert!(error("{% for %}").starts_with("the chat template of chat.jinja failed: "));
        assert!(error("{{ 'a'.frobnicate() }}").contains("frobnicate"));
        assert!(error("{{ strftime_now('%Q') }}").contains("strftime_now does not know `%Q`"));
        let turns = messages(&[("narrator", "once")]);
        let error = template(CHATML).unwrap().render(&turns, &Map::new()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the chat template of chat.jinja failed: nobody is called narrator (line 3)"
        );
    }

    #[test]
    fn a_template_that_never_ends_is_an_error() {
        let nested = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
        let error = render(nested).unwrap_err().to_string();
        assert!(error.contains("fuel"), "{error}");
    }

    #[test]
    fn there_has_to_be_something_to_complete() {
        let template = template(CHATML).unwrap();
        let error = |turns| template.render(&messages(turns), &Map::new()).unwrap_err().to_string();
        assert_eq!(error(&[]), "the list of messages is empty");
        assert_eq!(
            error(&[("user", "hi"), ("assistant", "well")]),
            "the last message is the assistant's, which leaves nothing to complete"
        );
    }

    fn load(files: &[(&str, &str)]) -> Result<Tokenizer, TaskError> {
        let tokenizer = r#"{"version": "1.0", "added_tokens": [],
                            "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}"#;
        let mut all =
            vec![("tokenizer.json", tokenizer), ("generation_config.json", r#"{"eos_token_id": 0}"#)];
        all.extend_from_slice(files);
        Tokenizer::load(directory(&all).path(), 1)
    }

    #[test]
    fn the_template_is_found_where_models_keep_it() {
        let render = |files: &[(&str, &str)]| {
            load(files)
                .unwrap()
                .chat_template()
                .unwrap()
                .render(&messages(&[("user", "hi")]), &Map::new())
                .unwrap()
        };
        let config = ("tokenizer_config.json", r#"{"chat_template": "config"}"#);
        assert_eq!(render(&[config]), "config");
        assert_eq!(render(&[config, ("chat_template.jinja", "file {{ eos_token }}")]), "file ");
        let named = r#"{"eos_token": "a", "chat_template": [{"name": "tool_use", "template": "t"},
                             {"name": "default", "template": "d{{ eos_token }}"}]}"#;
        assert_eq!(render(&[("tokenizer_config.json", named)]), "da");
    }

    #[test]
    fn a_model_without_a_usable_template_is_refused() {
        let error = load(&[]).unwrap().chat_template().err().unwrap();
        assert!(error.to_string().ends_with("has no chat template"), "{error}");
        assert!(error.hint().contains("chat_template.jinja"));
        let error =
            load(&[("tokenizer_config.json", r#"{"chat_template": [{"name": "x", "template": "t"}]}"#)])
                .err()
                .unwrap();
        assert!(error.to_string().ends_with(
            "`chat_template` is a list, but has to be a template, or a list with one named `default`"
        ));
        assert!(load(&[("chat_template.jinja", "{% if %}")]).is_err());
    }
}
