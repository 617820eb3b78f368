//! The special tokens of a model directory: which end a completion, and what templates call them.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use r3_core::ids::TokenId;

use crate::error::TaskError;

/// A JSON file beside the tokenizer; absent files have no keys.
pub(crate) struct ConfigFile {
    path: PathBuf,
    keys: Map<String, Value>,
}

impl ConfigFile {
    /// Reads `path`, which may be absent but not broken.
    pub(crate) fn read(path: PathBuf) -> Result<Self, TaskError> {
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Self { path, keys: Map::new() });
            }
            Err(source) => return Err(TaskError::Unreadable { path, source }),
        };
        match serde_json::from_slice(&bytes) {
            Ok(keys) => Ok(Self { path, keys }),
            Err(error) => Err(TaskError::NotJson { reason: error.to_string() }.in_config(&path)),
        }
    }

    /// Where the file is, or would be.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The value of `key`; null counts as absent.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.keys.get(key).filter(|value| !value.is_null())
    }

    /// A `*_token`: a string, or an object with its `content`.
    fn token(&self, key: &str) -> Result<Option<&str>, TaskError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let text = value.as_str().or_else(|| value.get("content")?.as_str());
        text.map(Some).ok_or_else(|| self.wrong_type(key, value, "a token as text"))
    }

    /// A `*_token_id`: a number, or a list of numbers.
    fn ids(&self, key: &str) -> Result<Vec<u64>, TaskError> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let ids = match value {
            Value::Array(ids) => ids.iter().map(Value::as_u64).collect(),
            id => id.as_u64().map(|id| vec![id]),
        };
        ids.ok_or_else(|| self.wrong_type(key, value, "a token id or a list of them"))
    }

    /// The error for a value of `key` that is not what it has to be.
    pub(crate) fn wrong_type(&self, key: &str, value: &Value, expected: &'static str) -> TaskError {
        TaskError::WrongType { key: key.into(), found: kind(value), expected }.in_config(&self.path)
    }
}

/// What a JSON value is, for error messages.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(number) if number.is_f64() => "a fractional number",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The special tokens, each checked to exist in tokenizer and model.
pub(crate) struct SpecialTokens {
    /// Tokens that end a completion, `eos` first.
    pub(crate) stop: Vec<TokenId>,
    pub(crate) bos: Option<TokenId>,
    pub(crate) pad: Option<TokenId>,
    /// `bos_token` and the like, as templates may print them.
    pub(crate) texts: BTreeMap<String, String>,
}

/// The files of one model directory, with the tokenizer and the vocabulary that bound their ids.
pub(crate) struct ModelFiles<'a> {
    pub(crate) tokenizer: &'a tokenizers::Tokenizer,
    pub(crate) tokenizer_path: &'a Path,
    pub(crate) tokenizer_config: &'a ConfigFile,
    pub(crate) vocab_size: usize,
}

impl ModelFiles<'_> {
    /// Finds the special tokens.
    ///
    /// A completion ends at `eos_token` of tokenizer_config.json and at every `eos_token_id` of
    /// generation_config.json (of config.json where that sets none, as transformers does): chat models end a
    /// turn with one and a text with the other, and only both together cover either use.
    pub(crate) fn special_tokens(&self) -> Result<SpecialTokens, TaskError> {
        let directory = self.tokenizer_path.parent().unwrap_or(Path::new(""));
        let generation = ConfigFile::read(directory.join("generation_config.json"))?;
        let model = ConfigFile::read(directory.join("config.json"))?;

        let mut stop: Vec<TokenId> = self.named("eos_token")?.into_iter().collect();
        let mut ids = self.numbered(&generation, "eos_token_id")?;
        if ids.is_empty() {
            ids = self.numbered(&model, "eos_token_id")?;
        }
        for id in ids {
            if !stop.contains(&id) {
                stop.push(id);
            }
        }
        if stop.is_empty() {
            let looked_in =
                [self.tokenizer_config, &generation, &model].map(|file| file.path().to_path_buf());
            return Err(TaskError::NoEndToken { looked_in: looked_in.into() });
        }
        let bos = self.named("bos_token")?.or(self.numbered(&generation, "bos_token_id")?.first().copied());
        let pad = self.named("pad_token")?.or(self.numbered(&generation, "pad_token_id")?.first().copied());
        Ok(SpecialTokens { stop, bos, pad, texts: self.texts()? })
    }

    /// The id of a `*_token` in tokenizer_config.json.
    fn named(&self, key: &'static str) -> Result<Option<TokenId>, TaskError> {
        let Some(text) = self.tokenizer_config.token(key)? else { return Ok(None) };
        match self.tokenizer.token_to_id(text) {
            Some(id) => Ok(Some(TokenId(id))),
            None => Err(self.no_such_token(self.tokenizer_config, key, format!("`{text}`"))),
        }
    }

    /// The ids of a `*_token_id` key.
    fn numbered(&self, file: &ConfigFile, key: &'static str) -> Result<Vec<TokenId>, TaskError> {
        let check = |id: u64| {
            let within = u32::try_from(id).ok().filter(|&id| (id as usize) < self.vocab_size);
            let Some(within) = within else {
                let path = file.path().into();
                return Err(TaskError::IdOutOfRange { path, key, id, vocab_size: self.vocab_size });
            };
            if self.tokenizer.id_to_token(within).is_none() {
                return Err(self.no_such_token(file, key, id.to_string()));
            }
            Ok(TokenId(within))
        };
        file.ids(key)?.into_iter().map(check).collect()
    }

    fn no_such_token(&self, file: &ConfigFile, key: &'static str, token: String) -> TaskError {
        TaskError::NoSuchToken { path: file.path().into(), key, token, tokenizer: self.tokenizer_path.into() }
    }

    fn texts(&self) -> Result<BTreeMap<String, String>, TaskError> {
        let mut texts = BTreeMap::new();
        for key in
            ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"]
        {
            if let Some(text) = self.tokenizer_config.token(key)? {
                texts.insert(key.to_owned(), text.to_owned());
            }
        }
        Ok(texts)
    }
}
