//! Text to tokens and back, by a Hugging Face tokenizer.json that has to fit its model.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use tokenizers::models::ModelWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{Encoding, Model};

use r3_core::ids::TokenId;
use r3_core::rollout::FinishReason;

use crate::chat::ChatTemplate;
use crate::error::TaskError;
use crate::special::{ConfigFile, ModelFiles, SpecialTokens};

/// A model's tokenizer, its special tokens and its chat template.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    path: PathBuf,
    special: SpecialTokens,
    chat_template: Option<ChatTemplate>,
    unknown: Option<Unknown>,
    spells_everything: bool,
}

/// What the tokenizer writes for text that its vocabulary lacks.
struct Unknown {
    id: u32,
    token: String,
}

impl Tokenizer {
    /// Loads the tokenizer.json in (or at) `path` for a model whose token ids are `0..vocab_size`, with
    /// tokenizer_config.json, generation_config.json, config.json and chat_template.jinja beside it.
    ///
    /// # Errors
    /// If a file cannot be read, the tokenizer has tokens that the model has not, or nothing ends a
    /// completion.
    pub fn load(path: &Path, vocab_size: usize) -> Result<Self, TaskError> {
        Self::load_at(path, vocab_size, SystemTime::now())
    }

    /// The same, with a chat template that believes the time to be `now`: some templates print the day.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_at(path: &Path, vocab_size: usize, now: SystemTime) -> Result<Self, TaskError> {
        let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(source) => return Err(TaskError::Unreadable { path, source }),
        };
        let mut inner = match tokenizers::Tokenizer::from_bytes(bytes) {
            Ok(inner) => inner,
            Err(error) => return Err(TaskError::BadTokenizer { path, reason: error.to_string() }),
        };
        // A prompt cut short or padded behind our back would be another prompt.
        inner.with_padding(None);
        inner.with_truncation(None).expect("taking truncation away cannot fail");
        check_vocabulary(&inner, &path, vocab_size)?;

        let directory = path.parent().unwrap_or(Path::new(""));
        let tokenizer_config = ConfigFile::read(directory.join("tokenizer_config.json"))?;
        let (tokenizer_path, tokenizer) = (path.as_path(), &inner);
        let files = ModelFiles { tokenizer, tokenizer_path, tokenizer_config: &tokenizer_config, vocab_size };
        let special = files.special_tokens()?;
        let chat_template = ChatTemplate::find(directory, &tokenizer_config, &special.texts, now)?;
        let (unknown, spells_everything) = (unknown(&inner), spells_everything(&inner));
        Ok(Self { inner, path, special, chat_template, unknown, spells_everything })
    }

    /// The tokens of `text`, without any that the tokenizer would add around it. Special tokens written out
    /// in `text`, as chat templates do, become themselves.
    ///
    /// # Errors
    /// If `text` holds something that the vocabulary lacks: it would silently become an unknown token, or
    /// nothing.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, TaskError> {
        let encoded = if self.spells_everything {
            self.inner.encode_fast(text, false) // Without offsets, which only a vocabulary with gaps needs.
        } else {
            self.inner.encode(text, false)
        };
        let encoding = encoded.map_err(|error| {
            let failed = || TaskError::TokenizerFailed { reason: error.to_string() };
            self.not_in_vocabulary(text).unwrap_or_else(failed)
        })?;
        if !self.spells_everything {
            self.check_spelling(text, &encoding)?;
        }
        Ok(encoding.get_ids().iter().copied().map(TokenId).collect())
    }

    /// Checks that [`Self::encode`] would succeed; free for a tokenizer with bytes to fall back on.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn check_text(&self, text: &str) -> Result<(), TaskError> {
        if self.spells_everything { Ok(()) } else { self.encode(text).map(drop) }
    }

    /// The text of `tokens`, special tokens spelled out. An id without a token, which a model with more rows
    /// than its tokenizer can sample, becomes U+FFFD: left out, it would make a wrong completion look right.
    ///
    /// # Errors
    /// If the tokenizer's own decoder fails.
    pub fn decode(&self, tokens: &[TokenId]) -> Result<String, TaskError> {
        let is_known = |token: &TokenId| self.inner.id_to_token(token.0).is_some();
        let mut text = String::new();
        for (i, known) in tokens.split(|token| !is_known(token)).enumerate() {
            if i > 0 {
                text.push(char::REPLACEMENT_CHARACTER);
            }
            let ids: Vec<u32> = known.iter().map(|token| token.0).collect();
            let decoded = self.inner.decode(&ids, false);
            text += &decoded.map_err(|error| TaskError::TokenizerFailed { reason: error.to_string() })?;
        }
        Ok(text)
    }

    /// The text of a completion that ended by `finish`: what rewards judge. The stop token that ended it is
    /// left out.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn completion_text(&self, tokens: &[TokenId], finish: FinishReason) -> Result<String, TaskError> {
        match (finish, tokens) {
            (FinishReason::Stop, [answer @ .., _stop]) => self.decode(answer),
            _ => self.decode(tokens),
        }
    }

    /// The token that ends an answer: what demonstrations end with. One of [`Self::stop_tokens`].
    #[must_use]
    pub fn eos(&self) -> TokenId {
        self.special.stop[0]
    }

    /// Every token that ends a completion, [`Self::eos`] first.
    #[must_use]
    pub fn stop_tokens(&self) -> &[TokenId] {
        &self.special.stop
    }

    /// The token that begins a text, for models that have one. [`Self::encode`] does not add it.
    #[must_use]
    pub fn bos(&self) -> Option<TokenId> {
        self.special.bos
    }

    /// The padding token, which r3 never feeds.
    #[must_use]
    pub fn pad(&self) -> Option<TokenId> {
        self.special.pad
    }

    /// The chat template.
    ///
    /// # Errors
    /// If the model has none.
    pub fn chat_template(&self) -> Result<&ChatTemplate, TaskError> {
        let directory = || self.path.parent().unwrap_or(Path::new("")).to_path_buf();
        self.chat_template.as_ref().ok_or_else(|| TaskError::NoChatTemplate { directory: directory() })
    }

    /// Whether the chat template asks for the time, so that prompts differ from day to day.
    #[must_use]
    pub fn asks_for_the_time(&self) -> bool {
        self.chat_template.as_ref().is_some_and(ChatTemplate::asks_for_the_time)
    }

    /// Refuses text that became an unknown token, or that no token covers (BPE without an unknown token drops
    /// what it lacks). Spaces may be dropped: some pre-tokenizers split on them.
    fn check_spelling(&self, text: &str, encoding: &Encoding) -> Result<(), TaskError> {
        let mut covered = vec![false; text.len()];
        let mut unknown_at = None;
        for (&id, &(start, end)) in encoding.get_ids().iter().zip(encoding.get_offsets()) {
            covered[start..end].fill(true);
            let spelled_out = |unknown: &Unknown| text.get(start..end) == Some(&unknown.token);
            if self.unknown.as_ref().is_some_and(|unknown| unknown.id == id && !spelled_out(unknown)) {
                unknown_at = unknown_at.or(Some(start));
            }
        }
        let uncovered = || text.char_indices().find(|&(at, c)| !covered[at] && !c.is_whitespace());
        match unknown_at.or_else(|| uncovered().map(|(at, _)| at)) {
            Some(at) => Err(self.not_in_vocabulary(text).unwrap_or_else(|| piece_error(text, at))),
            None => Ok(()),
        }
    }

    /// Names the first character that has no token by itself. Offsets would not do: they shift when BPE drops
    /// text, and an unknown word is longer than the character that made it so.
    fn not_in_vocabulary(&self, text: &str) -> Option<TaskError> {
        let lacks = |c: char| match self.inner.encode_fast(c.encode_utf8(&mut [0; 4]) as &str, false) {
            Ok(encoding) if encoding.is_empty() => !c.is_whitespace(),
            Ok(encoding) => {
                self.unknown.as_ref().is_some_and(|unknown| encoding.get_ids().contains(&unknown.id))
            }
            Err(_) => true,
        };
        text.char_indices().find(|&(_, c)| lacks(c)).map(|(at, _)| piece_error(text, at))
    }
}

/// The error for the character at byte `at`.
fn piece_error(text: &str, at: usize) -> TaskError {
    let (before, rest) = text.split_at(at);
    let piece = rest.chars().next().expect("a token without text cannot be unknown");
    TaskError::NotInVocabulary { piece, position: before.chars().count(), text: text.into() }
}

/// Refuses a tokenizer with a token that the model has no embedding for.
fn check_vocabulary(inner: &tokenizers::Tokenizer, path: &Path, vocab_size: usize) -> Result<(), TaskError> {
    match inner.get_vocab(true).into_iter().max_by_key(|(_, id)| *id) {
        Some((token, id)) if id as usize >= vocab_size => {
            Err(TaskError::TokenOutOfRange { path: path.into(), token, id, vocab_size })
        }
        Some(_) => Ok(()),
        None => Err(TaskError::BadTokenizer { path: path.into(), reason: "it has no tokens".into() }),
    }
}

fn unknown(inner: &tokenizers::Tokenizer) -> Option<Unknown> {
    let token = match inner.get_model() {
        ModelWrapper::BPE(model) => model.unk_token.clone()?,
        ModelWrapper::WordLevel(model) => model.unk_token.clone(),
        ModelWrapper::WordPiece(model) => model.unk_token.clone(),
        // Its unknown id is private, but it is the one a character beyond Unicode's assigned planes gets.
        ModelWrapper::Unigram(model) => {
            let id = model.tokenize("\u{10FFFF}").ok()?.first()?.id;
            return Some(Unknown { id, token: model.id_to_token(id)? });
        }
    };
    Some(Unknown { id: inner.token_to_id(&token)?, token })
}

/// Whether every byte has a token, so that no text is unknown: byte-level vocabularies and byte fallback.
fn spells_everything(inner: &tokenizers::Tokenizer) -> bool {
    let has = |token: &str| inner.token_to_id(token).is_some();
    let byte_fallback = match inner.get_model() {
        ModelWrapper::BPE(model) => model.byte_fallback,
        ModelWrapper::Unigram(model) => model.byte_fallback(),
        ModelWrapper::WordLevel(_) | ModelWrapper::WordPiece(_) => false,
    };
    let is_bpe = matches!(inner.get_model(), ModelWrapper::BPE(_));
    (byte_fallback && (0..=255_u8).all(|byte| has(&format!("<0x{byte:02X}>"))))
        || (is_bpe && ByteLevel::alphabet().iter().all(|c| has(c.encode_utf8(&mut [0; 4]))))
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::{Value, json};
    use tempfile::TempDir;

    use super::*;

    fn assets() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-moe")
    }

    /// The tokenizer of the shipped model.
    pub(crate) fn tiny() -> Tokenizer {
        Tokenizer::load(&assets(), 64).unwrap()
    }

    /// A directory with these files in it.
    pub(crate) fn directory(files: &[(&str, &str)]) -> TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(directory.path().join(name), text).unwrap();
        }
        directory
    }

    fn load(files: &[(&str, &str)], vocab_size: usize) -> Result<Tokenizer, TaskError> {
        Tokenizer::load(directory(files).path(), vocab_size)
    }

    /// The message of the error, without the temporary directory in its paths.
    fn load_error(files: &[(&str, &str)], vocab_size: usize) -> String {
        let directory = directory(files);
        let error = Tokenizer::load(directory.path(), vocab_size).err().expect("these files are refused");
        assert!(!error.hint().is_empty());
        error.to_string().replace(&format!("{}/", directory.path().display()), "")
    }

    /// A tokenizer.json around `model`.
    fn json_of(model: &Value) -> String {
        json!({ "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
                "pre_tokenizer": null, "post_processor": null, "decoder": { "type": "Fuse" },
                "model": model })
        .to_string()
    }

    fn bpe(unk_token: Option<&str>, byte_fallback: bool, vocab: &[&str]) -> String {
        let vocab: serde_json::Map<String, Value> =
            vocab.iter().enumerate().map(|(id, token)| ((*token).to_owned(), json!(id))).collect();
        json_of(&json!({ "type": "BPE", "dropout": null, "unk_token": unk_token,
                         "continuing_subword_prefix": null,
                         "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": byte_fallback,
                         "ignore_merges": false, "vocab": vocab, "merges": [] }))
    }

    const EOS_IS_0: (&str, &str) = ("generation_config.json", r#"{"eos_token_id": 0}"#);

    /// Expected ids are those of Python's `tokenizers` 0.23.3 and of `transformers` 5.24.0's `AutoTokenizer`,
    /// both with `add_special_tokens=False`.
    #[test]
    fn the_shipped_tokenizer_encodes_as_python_does() {
        let cases: [(&str, &[u32]); 7] = [
            ("47+38=", &[8, 11, 14, 7, 12, 18]),
            ("85", &[12, 9]),
            ("(1-2)*3/4 = 5%6^7", &[19, 5, 15, 6, 20, 16, 7, 17, 8, 23, 18, 23, 9, 21, 10, 22, 11]),
            (
                "the sum of 12 and 9 is 21.\n",
                &[
                    44, 32, 29, 23, 43, 45, 37, 23, 39, 30, 23, 5, 6, 23, 25, 38, 28, 23, 13, 23, 33, 43, 23,
                    6, 5, 51, 24,
                ],
            ),
            (
                "a,b:c;d?e!f'g\"h<i>j[k]l_m",
                &[
                    25, 52, 26, 53, 27, 54, 28, 55, 29, 56, 30, 57, 31, 58, 32, 59, 33, 60, 34, 61, 35, 62,
                    36, 63, 37,
                ],
            ),
            ("1<eos>2<bos><pad>", &[5, 1, 6, 2, 0]),
            ("  two  spaces\n\n", &[23, 23, 44, 47, 39, 23, 23, 43, 40, 25, 27, 29, 43, 24, 24]),
        ];
        let tokenizer = tiny();
        for (text, expected) in cases {
            let tokens = tokenizer.encode(text).unwrap();
            assert_eq!(tokens.iter().map(|token| token.0).collect::<Vec<_>>(), expected, "{text:?}");
            assert_eq!(tokenizer.decode(&tokens).unwrap(), text);
        }
    }

    #[test]
    fn the_shipped_tokenizer_has_one_token_for_each_of_the_models_64_ids() {
        let tokenizer = tiny();
        assert_eq!(tokenizer.inner.get_vocab_size(true), 64);
        assert_eq!(tokenizer.stop_tokens(), [TokenId(1)]);
        assert_eq!(
            (tokenizer.eos(), tokenizer.bos(), tokenizer.pad()),
            (TokenId(1), Some(TokenId(2)), Some(TokenId(0)))
        );
        let every: Vec<TokenId> = (4..64).map(TokenId).collect();
        let text = tokenizer.decode(&every).unwrap();
        assert_eq!(text.chars().count(), 60);
        assert_eq!(tokenizer.encode(&text).unwrap(), every);
    }

    #[test]
    fn a_completion_is_judged_without_its_stop_token() {
        let tokenizer = tiny();
        let mut tokens = tokenizer.encode("85").unwrap();
        assert_eq!(tokenizer.completion_text(&tokens, FinishReason::Length).unwrap(), "85");
        tokens.push(tokenizer.eos());
        assert_eq!(tokenizer.completion_text(&tokens, FinishReason::Stop).unwrap(), "85");
        assert_eq!(tokenizer.completion_text(&[], FinishReason::Abort).unwrap(), "");
    }

    #[test]
    fn tokens_that_are_not_text_stay_visible() {
        let tokenizer = tiny();
        let eight = tokenizer.encode("8").unwrap()[0];
        assert_eq!(tokenizer.decode(&[eight, TokenId(0), eight]).unwrap(), "8<pad>8");
        assert_eq!(
            tokenizer.decode(&[eight, TokenId(64), eight, TokenId(99)]).unwrap(),
            "8\u{FFFD}8\u{FFFD}"
        );
    }

    #[test]
    fn a_character_without_a_token_is_named() {
        let error = tiny().encode("1 + é = X").unwrap_err();
        assert_eq!(error.to_string(), "the vocabulary has no `é` (character 4 of `1 + é = X`)");
        assert!(error.hint().contains("byte fallback"));
        assert!(tiny().encode("\t1").is_err_and(|error| error.to_string().contains(r"`\t`")));
        assert_eq!(tiny().encode("a<unk>").unwrap().last(), Some(&TokenId(3)));
    }

    #[test]
    fn bpe_without_an_unknown_token_may_not_drop_text() {
        let tokenizer =
            load(&[("tokenizer.json", &bpe(None, false, &["$", "a", "b"])), EOS_IS_0], 3).unwrap();
        assert_eq!(tokenizer.encode("ab").unwrap(), [TokenId(1), TokenId(2)]);
        let error = tokenizer.encode("acb").unwrap_err();
        assert_eq!(error.to_string(), "the vocabulary has no `c` (character 1 of `acb`)");
        assert!(tokenizer.check_text("acb").is_err());
        let unknown =
            load(&[("tokenizer.json", &bpe(Some("$"), false, &["$", "a", "b"])), EOS_IS_0], 3).unwrap();
        let error = unknown.encode("abça").unwrap_err();
        assert_eq!(error.to_string(), "the vocabulary has no `ç` (character 2 of `abça`)");
    }

    #[test]
    fn a_unigram_model_names_what_it_lacks_too() {
        let model =
            json!({ "type": "Unigram", "unk_id": 1, "vocab": [["a", -1.0], ["<unk>", 0.0], ["b", -2.0]] });
        let tokenizer = load(&[("tokenizer.json", &json_of(&model)), EOS_IS_0], 3).unwrap();
        assert_eq!(tokenizer.encode("ab").unwrap(), [TokenId(0), TokenId(2)]);
        let error = tokenizer.encode("ba漢b").unwrap_err();
        assert_eq!(error.to_string(), "the vocabulary has no `漢` (character 2 of `ba漢b`)");
    }

    #[test]
    fn a_long_text_is_shown_around_the_fault_only() {
        let error =
            tiny().encode(&format!("{}É{}", "a".repeat(500), "b".repeat(500))).unwrap_err().to_string();
        let around = format!("…{}É{}…", "a".repeat(20), "b".repeat(19));
        assert_eq!(error, format!("the vocabulary has no `É` (character 500 of `{around}`)"));
    }

    #[test]
    fn byte_fallback_spells_everything_but_only_with_every_byte() {
        let mut vocab: Vec<String> = (0..=255).map(|byte| format!("<0x{byte:02X}>")).collect();
        vocab.push("a".into());
        let tokens: Vec<&str> = vocab.iter().map(String::as_str).collect();
        let whole = load(&[("tokenizer.json", &bpe(None, true, &tokens)), EOS_IS_0], 257).unwrap();
        assert_eq!(whole.encode("aé").unwrap(), [TokenId(256), TokenId(0xC3), TokenId(0xA9)]);
        let partial = load(&[("tokenizer.json", &bpe(None, true, &tokens[..255])), EOS_IS_0], 257).unwrap();
        assert!(!partial.spells_everything && whole.spells_everything);
    }

    #[test]
    fn truncation_and_padding_of_the_file_are_off() {
        let json = fs::read_to_string(assets().join("tokenizer.json")).unwrap();
        let mut json: Value = serde_json::from_str(&json).unwrap();
        json["truncation"] =
            json!({ "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0 });
        json["padding"] = json!({ "strategy": { "Fixed": 8 }, "direction": "Left", "pad_to_multiple_of": null,
                                  "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>" });
        let tokenizer = load(&[("tokenizer.json", &json.to_string()), EOS_IS_0], 64).unwrap();
        assert_eq!(tokenizer.encode("1+2=").unwrap(), tiny().encode("1+2=").unwrap());
    }

    #[test]
    fn stop_tokens_are_those_of_every_file() {
        let json = bpe(None, false, &["$", "a", "b", "c"]);
        let stop = |config: &str, generation: &str, model: &str| {
            let files = [
                ("tokenizer.json", json.as_str()),
                ("tokenizer_config.json", config),
                ("generation_config.json", generation),
                ("config.json", model),
            ];
            load(&files, 4).unwrap().stop_tokens().iter().map(|token| token.0).collect::<Vec<_>>()
        };
        assert_eq!(stop(r#"{"eos_token": "b"}"#, r#"{"eos_token_id": [3, 2, 1]}"#, "{}"), [2, 3, 1]);
        assert_eq!(stop(r#"{"eos_token": {"content": "b"}}"#, "{}", "{}"), [2]);
        assert_eq!(stop(r#"{"eos_token": null}"#, r#"{"eos_token_id": 3}"#, r#"{"eos_token_id": 1}"#), [3]);
        assert_eq!(stop("{}", "{}", r#"{"eos_token_id": 1}"#), [1]);
    }

    #[test]
    fn a_tokenizer_that_does_not_fit_the_model_is_refused() {
        let json = bpe(None, false, &["$", "a", "b"]);
        let error = |vocab_size, generation: &str, config: &str| {
            let files = [
                ("tokenizer.json", json.as_str()),
                ("generation_config.json", generation),
                ("tokenizer_config.json", config),
            ];
            load_error(&files, vocab_size)
        };
        assert_eq!(
            error(2, r#"{"eos_token_id": 0}"#, "{}"),
            "tokenizer.json has token 2 (`b`), but the model's vocabulary ends at 2"
        );
        assert_eq!(
            error(3, r#"{"eos_token_id": [0, 3]}"#, "{}"),
            "generation_config.json sets `eos_token_id` to 3, but the model's vocabulary ends at 3"
        );
        assert_eq!(
            error(9, r#"{"eos_token_id": 7}"#, "{}"),
            "generation_config.json sets `eos_token_id` to 7, but tokenizer.json has no such token"
        );
        assert_eq!(
            error(3, "{}", r#"{"eos_token": "</s>"}"#),
            "tokenizer_config.json sets `eos_token` to `</s>`, but tokenizer.json has no such token"
        );
        assert_eq!(
            error(3, "{}", "{}"),
            "no end token is set in tokenizer_config.json, generation_config.json, config.json \
             (`eos_token`, `eos_token_id`)"
        );
    }

    #[test]
    fn broken_files_are_named() {
        let json = bpe(None, false, &["$"]);
        assert!(load_error(&[], 1).starts_with("cannot read tokenizer.json: No such file"));
        assert!(load_error(&[("tokenizer.json", "{")], 1).starts_with("tokenizer.json is not a tokenizer: "));
        assert_eq!(
            load_error(&[("tokenizer.json", &bpe(None, false, &[]))], 1),
            "tokenizer.json is not a tokenizer: it has no tokens"
        );
        let error = load_error(&[("tokenizer.json", &json), ("generation_config.json", "[]")], 1);
        assert!(error.starts_with("generation_config.json: not JSON: invalid type: sequence"), "{error}");
        assert_eq!(
            load_error(
                &[("tokenizer.json", &json), ("generation_config.json", r#"{"eos_token_id": "0"}"#)],
                1
            ),
            "generation_config.json: `eos_token_id` is a string, but has to be a token id or a list of them"
        );
        assert_eq!(
            load_error(&[("tokenizer.json", &json), ("tokenizer_config.json", r#"{"eos_token": 0}"#)], 1),
            "tokenizer_config.json: `eos_token` is a number, but has to be a token as text"
        );
    }
}
