//! Reads a struct from a [`Node`], so that whatever serde finds wrong is known with its path and place.

use std::fmt::{self, Display};

use serde::de::value::StrDeserializer;
use serde::de::{self, DeserializeSeed, Deserializer, Expected, IntoDeserializer, Unexpected, Visitor};
use serde::forward_to_deserialize_any;

use crate::error::{Problem, printable};
use crate::place::Spot;
use crate::tree::{Entry, Fault, Node, Value};

/// Reads `T` from the root of a recipe.
///
/// # Errors
/// If a key is unknown or missing, or a value is not what its key needs.
pub(crate) fn read<T: de::DeserializeOwned>(root: &Node) -> Result<T, Fault> {
    T::deserialize(Reader { node: root, spot: root.spot, path: Path::Root })
}

/// How a value was reached, as a list on the stack.
#[derive(Clone, Copy)]
enum Path<'a> {
    Root,
    Key(&'a Path<'a>, &'a str),
    Index(&'a Path<'a>, usize),
}

impl Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => Ok(()),
            Self::Key(Path::Root, key) => key.escape_debug().fmt(f),
            Self::Key(parent, key) => write!(f, "{parent}.{}", key.escape_debug()),
            Self::Index(parent, index) => write!(f, "{parent}[{index}]"),
        }
    }
}

impl Fault {
    fn unplaced(problem: Problem) -> Self {
        Self::new(problem, None)
    }

    /// Gives a fault its path and place, unless a reader further in has done so.
    fn at(mut self, spot: Spot, path: &Path<'_>) -> Self {
        if self.spot.is_none() {
            self.spot = Some(spot);
            self.problem.set_path(&path.to_string());
        }
        self
    }
}

impl Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.problem.fmt(f)
    }
}

impl std::error::Error for Fault {}

impl de::Error for Fault {
    fn custom<T: Display>(message: T) -> Self {
        Self::unplaced(Problem::Refused { path: String::new(), message: message.to_string() })
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::unplaced(Problem::WrongType {
            path: String::new(),
            expected: in_words(&expected.to_string()),
            found: found_in_words(found),
        })
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::invalid_type(found, expected)
    }

    fn invalid_length(found: usize, expected: &dyn Expected) -> Self {
        Self::unplaced(Problem::WrongType {
            path: String::new(),
            expected: in_words(&expected.to_string()),
            found: format!("a list of {found}"),
        })
    }

    fn unknown_variant(found: &str, known: &'static [&'static str]) -> Self {
        Self::unplaced(Problem::UnknownWord { path: String::new(), found: found.into(), known })
    }

    fn unknown_field(_: &str, known: &'static [&'static str]) -> Self {
        Self::unplaced(Problem::UnknownKey { path: String::new(), known, elsewhere: Vec::new() })
    }

    fn missing_field(key: &'static str) -> Self {
        Self::unplaced(Problem::MissingKey { path: key.into() })
    }
}

/// Rust's names for types, as users know them.
fn in_words(expected: &str) -> String {
    match expected {
        "f32" | "f64" => "a number".into(),
        "usize" | "u64" => "a whole number, at least 0".into(),
        "u32" => "a whole number from 0 to 4294967295".into(),
        "a boolean" => "true or false".into(),
        "a string" => "a text".into(),
        "path string" => "a path".into(),
        "an array of length 2" => "a list of 2 numbers".into(),
        "a sequence" => "a list".into(),
        "socket address" => "an address such as 127.0.0.1:9464".into(),
        _ if expected.starts_with("struct ") => "a mapping of keys to values".into(),
        _ => expected.into(),
    }
}

fn found_in_words(found: Unexpected<'_>) -> String {
    match found {
        Unexpected::Bool(value) => format!("`{value}`"),
        Unexpected::Unsigned(value) => format!("`{value}`"),
        Unexpected::Signed(value) => format!("`{value}`"),
        Unexpected::Float(value) => format!("`{value}`"),
        Unexpected::Str(text) => format!("the text `{}`", text.escape_debug()),
        Unexpected::Unit | Unexpected::Option => "nothing".into(),
        Unexpected::Seq => "a list".into(),
        Unexpected::Map => "a mapping".into(),
        other => other.to_string(),
    }
}

/// A node, where to point if it lacks something, and how it was reached.
#[derive(Clone, Copy)]
struct Reader<'a> {
    node: &'a Node,
    spot: Spot,
    path: Path<'a>,
}

impl<'a> Reader<'a> {
    fn entry(entry: &'a Entry, parent: &'a Path<'a>) -> Self {
        let spot = if let Value::Map(_) = entry.node.value { entry.spot } else { entry.node.spot };
        Self { node: &entry.node, spot, path: Path::Key(parent, &entry.key) }
    }

    fn visit<'de, V: Visitor<'de>>(&self, visitor: V) -> Result<V::Value, Fault> {
        match &self.node.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Int(value) => match (u64::try_from(*value), i64::try_from(*value)) {
                (Ok(value), _) => visitor.visit_u64(value),
                (_, Ok(value)) => visitor.visit_i64(value),
                _ => Err(de::Error::invalid_value(Unexpected::Other(&value.to_string()), &visitor)),
            },
            Value::Float(value) => visitor.visit_f64(*value),
            Value::Text(value) => visitor.visit_str(value),
            Value::List(nodes) => {
                let mut access = ListAccess { nodes, at: 0, path: &self.path };
                let value = visitor.visit_seq(&mut access)?;
                if access.at == nodes.len() {
                    Ok(value)
                } else {
                    let expected = format!("an array of length {}", access.at);
                    Err(de::Error::invalid_length(nodes.len(), &expected.as_str()))
                }
            }
            Value::Map(entries) => visitor.visit_map(KeyAccess { entries, at: 0, path: &self.path }),
        }
    }
}

impl<'de> Deserializer<'de> for Reader<'_> {
    type Error = Fault;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.visit(visitor).map_err(|fault| fault.at(self.spot, &self.path))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        // Serde would also take a list of values in the order of the fields.
        if let Value::List(_) = self.node.value {
            let fault: Fault = de::Error::invalid_type(Unexpected::Seq, &visitor);
            return Err(fault.at(self.spot, &self.path));
        }
        self.deserialize_any(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match self.node.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Fault> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        known: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        let access = match &self.node.value {
            Value::Text(word) => VariantAccess { word, spot: self.spot, content: None, reader: self },
            Value::Map(entries) if entries.len() == 1 => VariantAccess {
                word: &entries[0].key,
                spot: entries[0].spot,
                content: Some(&entries[0]),
                reader: self,
            },
            Value::Map(entries) => {
                let found = entries.iter().map(|entry| printable(&entry.key)).collect();
                let spot = entries.get(1).map_or(self.spot, |entry| entry.spot);
                let problem = Problem::NotOneVariant { path: String::new(), found, known };
                return Err(Fault::unplaced(problem).at(spot, &self.path));
            }
            _ => {
                let expected = format!("one of {}", crate::error::quoted(known));
                let fault = self
                    .visit(Nothing { expected: &expected })
                    .map_or_else(|fault| fault, |never| match never {});
                return Err(fault.at(self.spot, &self.path));
            }
        };
        visitor.visit_enum(access).map_err(|fault| fault.at(self.spot, &self.path))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        seq tuple tuple_struct map identifier ignored_any
    }
}

enum Never {}

/// Accepts nothing, so that a value tells what it is.
struct Nothing<'a> {
    expected: &'a str,
}

impl Visitor<'_> for Nothing<'_> {
    type Value = Never;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }
}

struct ListAccess<'a> {
    nodes: &'a [Node],
    at: usize,
    path: &'a Path<'a>,
}

impl<'de> de::SeqAccess<'de> for &mut ListAccess<'_> {
    type Error = Fault;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Fault> {
        let Some(node) = self.nodes.get(self.at) else { return Ok(None) };
        let path = Path::Index(self.path, self.at);
        self.at += 1;
        seed.deserialize(Reader { node, spot: node.spot, path }).map(Some)
    }
}

struct KeyAccess<'a> {
    entries: &'a [Entry],
    at: usize,
    path: &'a Path<'a>,
}

impl<'de> de::MapAccess<'de> for KeyAccess<'_> {
    type Error = Fault;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Fault> {
        let Some(entry) = self.entries.get(self.at) else { return Ok(None) };
        let key: StrDeserializer<'_, Fault> = entry.key.as_str().into_deserializer();
        let key =
            seed.deserialize(key).map_err(|fault| fault.at(entry.spot, &Path::Key(self.path, &entry.key)))?;
        Ok(Some(key))
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Fault> {
        let entry = &self.entries[self.at];
        self.at += 1;
        seed.deserialize(Reader::entry(entry, self.path))
    }
}

/// A variant: a word, or the only key of a mapping and what it holds.
struct VariantAccess<'a> {
    word: &'a str,
    spot: Spot,
    content: Option<&'a Entry>,
    reader: Reader<'a>,
}

impl VariantAccess<'_> {
    fn content(&self) -> Result<Reader<'_>, Fault> {
        let Some(entry) = self.content else {
            let problem = Problem::BareVariant { path: String::new(), word: self.word.into() };
            return Err(Fault::unplaced(problem).at(self.spot, &self.reader.path));
        };
        Ok(Reader::entry(entry, &self.reader.path))
    }
}

impl<'de> de::EnumAccess<'de> for VariantAccess<'_> {
    type Error = Fault;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), Fault> {
        let word: StrDeserializer<'_, Fault> = self.word.into_deserializer();
        let variant = seed.deserialize(word).map_err(|fault| fault.at(self.spot, &self.reader.path))?;
        Ok((variant, self))
    }
}

impl<'de> de::VariantAccess<'de> for VariantAccess<'_> {
    type Error = Fault;

    fn unit_variant(self) -> Result<(), Fault> {
        match self.content {
            None => Ok(()),
            Some(entry) => de::Deserialize::deserialize(Reader::entry(entry, &self.reader.path)),
        }
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Fault> {
        seed.deserialize(self.content()?)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Fault> {
        self.content()?.deserialize_any(visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        self.content()?.deserialize_any(visitor)
    }
}
