//! A recipe as a tree in which every key and value knows where it was written.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{Error, Location, Options, Spanned};

use crate::error::{Problem, printable};
use crate::place::{Spot, lines};

/// A value and where it stands.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) value: Value,
    pub(crate) spot: Spot,
}

/// What YAML can say.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

/// A key, where it stands, and its value.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) spot: Spot,
    pub(crate) node: Node,
}

/// A problem with a text, and where it lies.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) problem: Box<Problem>,
    pub(crate) spot: Option<Spot>,
}

impl Fault {
    pub(crate) fn new(problem: Problem, spot: Option<Spot>) -> Self {
        Self { problem: Box::new(problem), spot }
    }
}

impl Node {
    /// Reads the YAML `text`, which is the source of index `source`.
    ///
    /// # Errors
    /// If it is not YAML, repeats a key or is larger than a recipe can be.
    pub(crate) fn parse(text: &str, source: usize) -> Result<Self, Fault> {
        serde_saphyr::from_str_with_options::<Spanned<Raw>>(text, options())
            .map(|raw| raw_node(raw, source))
            .map_err(|error| fault(&error, text, source))
    }

    /// Puts `node` at the dotted `path`, making mappings on the way; `spot` is where the path was written.
    ///
    /// # Errors
    /// If there is something else than a mapping on the way.
    pub(crate) fn set(&mut self, path: &str, node: Self, spot: Spot) -> Result<(), Fault> {
        let mut target = self;
        let mut passed = 0;
        for step in path.split('.') {
            if let Value::Null = target.value {
                target.value = Value::Map(Vec::new());
            }
            let Value::Map(entries) = &mut target.value else {
                let path = path[..passed].trim_end_matches('.').escape_debug().to_string();
                return Err(Fault::new(Problem::NotABlock { path }, Some(spot)));
            };
            let at = entries.iter().position(|entry| entry.key == step).unwrap_or_else(|| {
                entries.push(Entry { key: step.into(), spot, node: Self { value: Value::Null, spot } });
                entries.len() - 1
            });
            passed += step.len() + 1;
            if passed > path.len() {
                entries[at].spot = spot;
            }
            target = &mut entries[at].node;
        }
        *target = node;
        Ok(())
    }

    /// Where the value at a dotted path was written, if it was; for a mapping, where its key was.
    pub(crate) fn find(&self, path: &str) -> Option<Spot> {
        let mut found = self;
        let mut spot = None;
        for step in path.split('.') {
            let Value::Map(entries) = &found.value else { return None };
            let entry = entries.iter().find(|entry| entry.key == step)?;
            found = &entry.node;
            spot = Some(if let Value::Map(_) = found.value { entry.spot } else { found.spot });
        }
        spot
    }
}

/// YAML 1.2 booleans (`mode: off` is a text), and room for far more than any recipe needs, but not for a bomb.
fn options() -> Options {
    serde_saphyr::options! {
        strict_booleans: true,
        with_snippet: false,
        budget: serde_saphyr::budget! { max_nodes: 10_000, max_depth: 32 },
    }
}

fn fault(error: &Error, text: &str, source: usize) -> Fault {
    let spot = error.location().map(|location| spot(location, source));
    let message = error.to_string();
    let message = printable(message.split(" at line ").next().unwrap_or_default());
    let mut cause = error;
    while let Error::AliasError { error, .. } = cause {
        cause = error;
    }
    let problem = match cause {
        Error::DuplicateMappingKey { key, .. } => {
            let key = key.as_deref().unwrap_or_default();
            Problem::DuplicateKey { key: key.escape_debug().to_string() }
        }
        Error::MultipleDocuments { .. } => Problem::SeveralDocuments,
        Error::NonFiniteFloat { value, .. } => Problem::NotFinite { text: value.clone() },
        Error::Budget { .. } | Error::AliasReplayLimitExceeded { .. } => Problem::TooComplex,
        // The scanner's own limit on nesting comes without a variant.
        _ if message == "recursion limit exceeded" => Problem::TooComplex,
        _ => match tab_indent(text) {
            // The parser points at the value before the tab.
            Some((line, column)) => {
                return Fault::new(Problem::Tab, Some(Spot { source, line, column, width: 1 }));
            }
            None => Problem::Syntax { message },
        },
    };
    Fault::new(problem, spot)
}

fn tab_indent(text: &str) -> Option<(usize, usize)> {
    let tab = |line: &str| line.chars().take_while(|c| c.is_whitespace()).position(|c| c == '\t');
    lines(text).enumerate().find_map(|(i, line)| tab(line).map(|column| (i + 1, column + 1)))
}

fn spot(location: Location, source: usize) -> Spot {
    let count = |n: u64| usize::try_from(n).unwrap_or(1).max(1);
    Spot {
        source,
        line: count(location.line()),
        column: count(location.column()),
        width: count(location.span().len()),
    }
}

/// [`Value`] as it comes from the parser. Children carry the parser's locations.
enum Raw {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(String),
    List(Vec<Spanned<Self>>),
    Map(Vec<(Spanned<String>, Spanned<Self>)>),
}

fn raw_node(raw: Spanned<Raw>, source: usize) -> Node {
    let mut spot = spot(raw.referenced, source);
    let value = match raw.value {
        Raw::Null => Value::Null,
        Raw::Bool(value) => Value::Bool(value),
        Raw::Int(value) => Value::Int(value),
        Raw::Float(value) => Value::Float(value),
        Raw::Text(value) => Value::Text(value),
        Raw::List(nodes) => Value::List(nodes.into_iter().map(|node| raw_node(node, source)).collect()),
        Raw::Map(entries) => Value::Map(entries.into_iter().map(|entry| raw_entry(entry, source)).collect()),
    };
    if matches!(value, Value::List(_) | Value::Map(_)) {
        spot.width = 1;
    }
    Node { value, spot }
}

fn raw_entry((key, node): (Spanned<String>, Spanned<Raw>), source: usize) -> Entry {
    Entry { spot: spot(key.referenced, source), key: key.value, node: raw_node(node, source) }
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawVisitor)
    }
}

struct RawVisitor;

impl<'de> Visitor<'de> for RawVisitor {
    type Value = Raw;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Raw, E> {
        Ok(Raw::Null)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Raw, E> {
        Ok(Raw::Bool(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Raw, E> {
        Ok(Raw::Int(value.into()))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Raw, E> {
        Ok(Raw::Int(value.into()))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Raw, E> {
        Ok(Raw::Float(value))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Raw, E> {
        Ok(Raw::Text(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Raw, A::Error> {
        let mut nodes = Vec::new();
        while let Some(node) = access.next_element()? {
            nodes.push(node);
        }
        Ok(Raw::List(nodes))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Raw, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = access.next_entry()? {
            entries.push(entry);
        }
        Ok(Raw::Map(entries))
    }
}
