//! The layouts routes come in, and which of them some bytes are.

use std::fmt;

use serde_json::Value;

/// Who lays routes out how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// JSON lines of r3 ([`crate::r3_file`]).
    R3,
    /// NumPy array over all layers, dense ones 0 ([`crate::vllm`]).
    Vllm,
    /// As vLLM, dense layers -1.
    Atom,
    /// Flat int32 over all layers ([`crate::sglang`]).
    Sglang,
    /// Envelope `nrlre1:` ([`crate::nemo_rl`]).
    NemoRl,
    /// Object `{data, shape, start, dtype}` ([`crate::prime_rl`]).
    PrimeRl,
    /// JSON lists `[rows][layers][K]`, as `r3 score` prints them ([`crate::lists`]). Read, never written.
    Lists,
}

impl Layout {
    /// The layout that `bytes`, or the first JSON value in them, can only be; `None` if more than one fits.
    ///
    /// ATOM's differs from vLLM's in the filling of dense layers alone, which is read either way, so it is never
    /// guessed.
    #[must_use]
    pub fn guess(bytes: &[u8]) -> Option<Self> {
        if bytes.starts_with(crate::npy::MAGIC) {
            return Some(Self::Vllm);
        }
        if let Ok(text) = str::from_utf8(bytes)
            && let Some(layout) = Self::guess_text(text.trim_start())
        {
            return Some(layout);
        }
        let document = serde_json::Deserializer::from_slice(bytes).into_iter::<Value>().next()?.ok()?;
        if document.get("r3").is_some() {
            return Some(Self::R3);
        }
        let found = crate::document::find(&document).into_iter().next()?;
        match found.payload? {
            Value::String(text) => Self::guess_text(text).or(found.in_meta_info.then_some(Self::Sglang)),
            Value::Array(rows) if rows.first().is_some_and(Value::is_array) => Some(Self::Lists),
            Value::Object(payload) if payload.contains_key("layer_ids") => Some(Self::R3),
            Value::Object(payload) if payload.contains_key("shape") => Some(Self::PrimeRl),
            _ => None,
        }
    }

    fn guess_text(text: &str) -> Option<Self> {
        // `k05VTVBZ` is NumPy's magic in base64: six bytes, so no character of what follows mixes in.
        [("nrlre1:", Self::NemoRl), ("k05VTVBZ", Self::Vllm)]
            .into_iter()
            .find_map(|(start, layout)| text.starts_with(start).then_some(layout))
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::R3 => "r3",
            Self::Vllm => "vLLM",
            Self::Atom => "ATOM",
            Self::Sglang => "SGLang",
            Self::NemoRl => "NeMo-RL",
            Self::PrimeRl => "prime-rl",
            Self::Lists => "lists",
        })
    }
}
