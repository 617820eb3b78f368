//! Names of weights, by pattern.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The most texts that braces may stand for.
const MAX_TEXTS: usize = 1024;

/// Names a refusal proposes.
const N_PROPOSED: usize = 3;

/// A pattern over whole names: `*` is any characters, `?` is one, `{q,k}` is one of several texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    text: String,
    /// The same without braces.
    globs: Vec<String>,
}

/// Why a text is not a pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// No character at all.
    #[error("no pattern but an empty text")]
    Empty,
    /// A brace without its other half, or one inside another.
    #[error("braces that are not closed, or lie in each other")]
    Braces,
    /// Several braces whose texts multiply.
    #[error("more texts than {MAX_TEXTS}")]
    TooMany,
}

impl Pattern {
    /// Whether it stands for `name`.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        self.globs.iter().any(|glob| is_match(glob.as_bytes(), name.as_bytes()))
    }

    /// The `names` most like the pattern, the most first. What differs in a number alone is proposed once, with `*` in
    /// its place.
    #[must_use]
    pub fn nearest<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> Vec<String> {
        let starred = names.into_iter().map(|name| {
            let part = |part: &'a str| if part.parse::<u64>().is_ok() { "*" } else { part };
            name.split('.').map(part).collect::<Vec<_>>().join(".")
        });
        let mut names: Vec<String> = starred.collect::<BTreeSet<_>>().into_iter().collect();
        let distance = |name: &String| {
            let of_glob = |glob: &String| distance(glob.as_bytes(), name.as_bytes());
            self.globs.iter().map(of_glob).min().unwrap_or(usize::MAX)
        };
        names.sort_by_cached_key(distance);
        names.truncate(N_PROPOSED);
        names
    }
}

/// Whether all of `name` is what `glob` stands for. On a mismatch the last `*` takes one byte more.
fn is_match(glob: &[u8], name: &[u8]) -> bool {
    let (mut at, mut in_name) = (0, 0);
    let mut star = None;
    while in_name < name.len() {
        match glob.get(at) {
            Some(b'*') => {
                star = Some((at, in_name));
                at += 1;
            }
            Some(&byte) if byte == b'?' || byte == name[in_name] => {
                at += 1;
                in_name += 1;
            }
            _ => {
                let Some((of_star, taken)) = star else { return false };
                star = Some((of_star, taken + 1));
                (at, in_name) = (of_star + 1, taken + 1);
            }
        }
    }
    glob[at..].iter().all(|&byte| byte == b'*')
}

/// Bytes to put in, take out or replace in `name` until it is what `glob` stands for: Levenshtein's distance, but what a
/// `*` takes is free.
fn distance(glob: &[u8], name: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=name.len()).collect();
    for &byte in glob {
        let mut diagonal = row[0];
        row[0] += usize::from(byte != b'*');
        for at in 1..row.len() {
            let above = row[at];
            row[at] = if byte == b'*' {
                above.min(row[at - 1])
            } else {
                let same = byte == b'?' || byte == name[at - 1];
                (diagonal + usize::from(!same)).min(above + 1).min(row[at - 1] + 1)
            };
            diagonal = above;
        }
    }
    row[name.len()]
}

/// `text` once for every choice of a text in its braces.
fn expand(text: &str) -> Result<Vec<String>, PatternError> {
    let mut expanded = vec![String::new()];
    let mut rest = text;
    loop {
        let brace = rest.find(['{', '}']);
        let plain = &rest[..brace.unwrap_or(rest.len())];
        expanded.iter_mut().for_each(|text| text.push_str(plain));
        let Some(open) = brace else { return Ok(expanded) };
        let inner = rest[open..].strip_prefix('{').ok_or(PatternError::Braces)?;
        let (inner, after) = inner.split_once('}').ok_or(PatternError::Braces)?;
        if inner.contains('{') {
            return Err(PatternError::Braces);
        }
        let choices: Vec<&str> = inner.split(',').map(str::trim).collect();
        if expanded.len() * choices.len() > MAX_TEXTS {
            return Err(PatternError::TooMany);
        }
        let longer =
            |text: &String| choices.iter().map(|choice| format!("{text}{choice}")).collect::<Vec<_>>();
        expanded = expanded.iter().flat_map(longer).collect();
        rest = after;
    }
}

impl FromStr for Pattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        if text.is_empty() {
            return Err(PatternError::Empty);
        }
        Ok(Self { text: text.to_owned(), globs: expand(text)? })
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Serialize for Pattern {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for Pattern {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(PatternVisitor)
    }
}

struct PatternVisitor;

impl Visitor<'_> for PatternVisitor {
    type Value = Pattern;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a pattern over names of weights such as \"*.self_attn.{q,v}_proj.weight\"")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Pattern, E> {
        text.parse().map_err(|_| E::invalid_value(de::Unexpected::Str(text), &self))
    }
}

impl JsonSchema for Pattern {
    fn schema_name() -> Cow<'static, str> {
        "Pattern".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "A pattern over names of weights: `*` is any characters, `?` is one, `{q,k}` one of several texts.",
            "type": "string",
            "minLength": 1,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{Pattern, PatternError};

    fn matches(pattern: &str, name: &str) -> bool {
        pattern.parse::<Pattern>().unwrap().matches(name)
    }

    #[test]
    fn a_pattern_stands_for_whole_names() {
        for (pattern, name) in [
            ("lm_head.weight", "lm_head.weight"),
            ("*", "anything"),
            ("*.mlp.gate.weight", "model.layers.3.mlp.gate.weight"),
            ("model.layers.?.mlp.*", "model.layers.3.mlp.experts.down_proj"),
            ("*.self_attn.{q,k}_proj.weight", "model.layers.3.self_attn.k_proj.weight"),
            ("model.layers.{0,11}.{mlp,self_attn}.*", "model.layers.11.mlp.gate.weight"),
            ("*ab*ab", "abxabab"),
            ("{a, b}c", "bc"),
            ("a{,b}", "a"),
        ] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [
            ("gate", "mlp.gate"),
            ("*.gate", "mlp.gate.weight"),
            ("model.layers.?.mlp.*", "model.layers.13.mlp.gate.weight"),
            ("*.{q,k}_proj.weight", "self_attn.v_proj.weight"),
            ("*ab*ab", "abab_"),
            ("?", ""),
        ] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn braces_that_do_not_pair_are_refused() {
        for text in ["{", "a}b", "{a", "{a{b}}", "{a}}"] {
            assert_eq!(text.parse::<Pattern>(), Err(PatternError::Braces), "{text}");
        }
        assert_eq!("".parse::<Pattern>(), Err(PatternError::Empty));
        assert_eq!("{a,b,c,d}".repeat(6).parse::<Pattern>(), Err(PatternError::TooMany));
    }

    #[test]
    fn the_nearest_names_are_patterns_that_match() {
        let names = ["model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight", "lm_head.weight"];
        let nearest = "*.mlp.gat.weight".parse::<Pattern>().unwrap().nearest(names);
        assert_eq!(nearest, ["model.layers.*.mlp.gate.weight", "lm_head.weight"]);
        assert!(matches(&nearest[0], names[1]));
        let distance = |glob: &str, name: &str| super::distance(glob.as_bytes(), name.as_bytes());
        for (glob, name, expected) in [
            ("*", "abc", 0),
            ("a*c", "abbc", 0),
            ("?bc", "abc", 0),
            ("kitten", "sitting", 3),
            ("*x", "abc", 1),
        ] {
            assert_eq!(distance(glob, name), expected, "{glob} {name}");
        }
    }
}
