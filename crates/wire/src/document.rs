//! Answers of other engines as JSON: where their routes and tokens lie, read into records and written from them.
//!
//! A file is one JSON value after another, a line or many lines each: an answer of a server, one of its choices, or the
//! bare payload. Found are `routed_experts` of a choice, of its message or of `meta_info`; the tokens beside it
//! (`prompt_token_ids` or `input_ids`, then `token_ids`, `output_ids` or `generation_token_ids`; or `tokens`); or else at
//! least their number (`usage` or `meta_info`). A choice without routes is refused: it would be trained on without replay.

use r3_core::ids::{GroupId, TokenId};
use r3_core::rollout::FinishReason;
use serde_json::{Map, Value, json};

use crate::array::Element;
use crate::check::Sample;
use crate::error::{Fault, WireError, quoted};
use crate::layout::Layout;
use crate::model::ModelShape;
use crate::r3_file::{self, json_error};
use crate::record::{Record, Routes};
use crate::{lists, nemo_rl, npy, prime_rl, sglang, vllm};

/// How a file is to be read.
#[derive(Clone, Copy, Debug)]
pub struct Reading<'a> {
    /// Its layout.
    pub layout: Layout,
    /// The model that sampled. r3's own files say it themselves, and are checked against it if it is given.
    pub model: Option<&'a ModelShape>,
    /// Position of the first row, where the answers do not say.
    pub start: usize,
}

/// Reads every record of a file that is in memory. [`r3_file::Records`] reads r3's own one by one.
///
/// # Errors
/// The first refusal; for other layouts than r3's without a model, that there is none.
pub fn read(bytes: &[u8], reading: &Reading<'_>) -> Result<Vec<Record>, WireError> {
    if reading.layout == Layout::R3 {
        let records = r3_file::Records::new(bytes).zip(0..);
        return records
            .map(|(record, number)| {
                let record = record?;
                if let Some(model) = reading.model {
                    record.check_model(model, &record.sample(Layout::R3, number))?;
                }
                Ok(record)
            })
            .collect();
    }
    let model = reading.model.ok_or(crate::error::ModelError::Undescribed)?;
    let sample = Sample { start: reading.start, ..Sample::new(reading.layout, 0) };
    if bytes.starts_with(npy::MAGIC) && matches!(reading.layout, Layout::Vllm | Layout::Atom) {
        return Ok(vec![bare(vllm::read_npy(bytes, model, &sample)?, &sample, model)]);
    }
    if let Some(text) = bare_text(bytes) {
        let rows = read_text(text, model, &sample)?;
        return Ok(vec![bare(rows, &sample, model)]);
    }
    let mut records = Vec::new();
    for (answer, document) in (0..).zip(serde_json::Deserializer::from_slice(bytes).into_iter::<Value>()) {
        let document = document.map_err(|error| json_error(reading.layout, &error))?;
        for found in find(&document) {
            let record = found.read(GroupId(answer), records.len(), (reading, model))?;
            records.push(record);
        }
    }
    Ok(records)
}

/// A file that is one payload and nothing else: no JSON, as it starts with neither quote nor bracket.
fn bare_text(bytes: &[u8]) -> Option<&str> {
    let text = str::from_utf8(bytes).ok()?.trim();
    text.chars().next().is_some_and(|c| c.is_ascii_alphanumeric() || c == '+' || c == '/').then_some(text)
}

fn bare(rows: r3_core::routes::RouteRows, sample: &Sample, model: &ModelShape) -> Record {
    let routes = Routes::new(rows, sample.start, model.layer_ids().to_vec());
    Record { routes: Some(routes), ..Record::unknown(GroupId(0), 0) }
}

fn read_text(
    text: &str,
    model: &ModelShape,
    sample: &Sample,
) -> Result<r3_core::routes::RouteRows, WireError> {
    match sample.layout {
        Layout::Vllm | Layout::Atom => vllm::read_base64(text, model, sample),
        Layout::Sglang => sglang::read(text, model, sample),
        Layout::NemoRl => nemo_rl::read(text, model, sample),
        Layout::PrimeRl | Layout::R3 | Layout::Lists => Err(sample.refuse(Fault::Key {
            key: "routed_experts",
            found: "text".into(),
            needed: if sample.layout == Layout::Lists { "lists" } else { "an object" },
        })),
    }
}

/// One choice of one answer.
pub(crate) struct Found<'a> {
    /// `routed_experts`, if it is there and not `null`.
    pub(crate) payload: Option<&'a Value>,
    /// Whether that lay in `meta_info`, where only SGLang puts it.
    pub(crate) in_meta_info: bool,
    /// Where keys are looked for, nearest first: choice, message, `meta_info`, answer.
    holders: Vec<&'a Map<String, Value>>,
    index: usize,
    /// Whether the answer has no other choice, so that what it counts, it counts of this one.
    is_only: bool,
}

/// The choices of an answer; the answer itself if it has none.
pub(crate) fn find(document: &Value) -> Vec<Found<'_>> {
    let is_payload = |answer: &Map<_, _>| answer.contains_key("data") && answer.contains_key("shape");
    let Some(answer) = document.as_object().filter(|answer| !is_payload(answer)) else {
        let holders = Vec::new();
        let payload = (!document.is_null()).then_some(document);
        return vec![Found { payload, in_meta_info: false, holders, index: 0, is_only: true }];
    };
    let choices: Vec<_> = match answer.get("choices") {
        Some(Value::Array(choices)) => choices.iter().filter_map(Value::as_object).collect(),
        _ => vec![answer],
    };
    let is_only = choices.len() == 1;
    let found = choices.into_iter().enumerate();
    found.map(|(index, choice)| Found { is_only, ..Found::new(choice, answer, index) }).collect()
}

impl<'a> Found<'a> {
    fn new(choice: &'a Map<String, Value>, answer: &'a Map<String, Value>, index: usize) -> Self {
        let inside = |key| choice.get(key).and_then(Value::as_object);
        let (message, meta_info) = (inside("message"), inside("meta_info"));
        let routes_of = |holder: Option<&'a Map<String, Value>>| {
            holder.and_then(|holder| holder.get("routed_experts")).filter(|payload| !payload.is_null())
        };
        let direct = routes_of(Some(choice)).or_else(|| routes_of(message));
        let payload = direct.or_else(|| routes_of(meta_info));
        let holders = [Some(choice), message, meta_info, Some(answer)].into_iter().flatten().collect();
        let in_meta_info = direct.is_none() && payload.is_some();
        Self { payload, in_meta_info, holders, index, is_only: false }
    }

    fn read(
        &self,
        group: GroupId,
        number: usize,
        (reading, model): (&Reading<'_>, &ModelShape),
    ) -> Result<Record, WireError> {
        let mut sample = Sample { start: reading.start, ..Sample::new(reading.layout, number) };
        let index = u32::try_from(self.number("index").unwrap_or(self.index)).unwrap_or(u32::MAX);
        let mut record = Record { finish: self.finish(), ..Record::unknown(group, index) };
        self.read_tokens(&mut record, &mut sample)?;
        for key in ["routed_experts_start_len", "routed_experts_prompt_start"] {
            sample.start = self.number(key).unwrap_or(sample.start);
        }
        let payload = self.payload.ok_or_else(|| sample.refuse(Fault::Missing { turn: 0 }))?;
        let rows = match (payload, reading.layout) {
            (Value::String(text), _) => read_text(text, model, &sample)?,
            (Value::Object(_), Layout::PrimeRl) => {
                let payload: prime_rl::Payload =
                    serde_json::from_value(payload.clone()).map_err(|error| {
                        let needed = "an object of data, shape, start and dtype";
                        sample.refuse(Fault::Key {
                            key: "routed_experts",
                            found: quoted(&error.to_string()),
                            needed,
                        })
                    })?;
                sample.start = payload.start;
                prime_rl::read(&payload, model, &sample)?
            }
            (Value::Array(rows), Layout::Lists) => {
                self.check_layer_ids(model, &sample)?;
                lists::read(rows, model, &sample)?
            }
            (other, _) => {
                let (found, needed) = (kind(other).to_owned(), "text (prime-rl: an object)");
                return Err(sample.refuse(Fault::Key { key: "routed_experts", found, needed }));
            }
        };
        record.routes = Some(Routes::new(rows, sample.start, model.layer_ids().to_vec()));
        Ok(record)
    }

    /// Tokens or their number, as far as they are said.
    fn read_tokens(&self, record: &mut Record, sample: &mut Sample) -> Result<(), WireError> {
        let prompt = self.tokens(&["prompt_token_ids", "input_ids"], sample)?;
        let completion = self.tokens(&["token_ids", "output_ids", "generation_token_ids"], sample)?;
        record.prompt_tokens = prompt.as_ref().map(Vec::len).or_else(|| self.number("prompt_tokens"));
        let counted = || self.is_only.then(|| self.number("completion_tokens")).flatten();
        let completion_tokens = completion.as_ref().map(Vec::len).or_else(counted);
        let both = record.prompt_tokens.zip(completion_tokens);
        sample.n_tokens = both.map(|(prompt, completion)| prompt.saturating_add(completion));
        record.tokens = match prompt.zip(completion) {
            Some((prompt, completion)) => Some([prompt, completion].concat()),
            None => self.tokens(&["tokens"], sample)?,
        };
        if let Some(n_tokens) = record.tokens.as_ref().map(Vec::len) {
            let prompt_tokens = record.prompt_tokens.unwrap_or(n_tokens);
            if prompt_tokens == 0 || prompt_tokens > n_tokens {
                return Err(sample.refuse(Fault::Prompt { prompt_tokens, cached_tokens: 0, n_tokens }));
            }
            sample.n_tokens = Some(n_tokens);
        }
        sample.sampled = sample.n_tokens.is_none() || sample.n_tokens != record.prompt_tokens;
        if let (Some(start), Some(end), true) = (record.prompt_tokens, sample.n_tokens, sample.sampled) {
            record.turns.push(start..end);
        }
        Ok(())
    }

    /// The ids of the layers, which `r3 score` prints beside its lists, are those of the model.
    fn check_layer_ids(&self, model: &ModelShape, sample: &Sample) -> Result<(), WireError> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let found: Option<Vec<u32>> =
            self.value("layer_ids").and_then(Value::as_array).and_then(|ids| ids.iter().map(id).collect());
        match found {
            Some(found) if found != model.layer_ids() => {
                let expected = model.layer_ids().to_vec();
                Err(sample.refuse(Fault::LayerIds { found, expected }))
            }
            _ => Ok(()),
        }
    }

    fn value(&self, key: &str) -> Option<&'a Value> {
        self.holders.iter().find_map(|holder| holder.get(key)).filter(|value| !value.is_null())
    }

    /// A number of tokens or a position, of the answer or of its `usage`.
    fn number(&self, key: &str) -> Option<usize> {
        let usage = || self.value("usage").and_then(|usage| usage.get(key));
        let number = self.value(key).or_else(usage).and_then(Value::as_u64)?;
        usize::try_from(number).ok()
    }

    fn finish(&self) -> Option<FinishReason> {
        let finish = self.value("finish_reason")?;
        let name = finish.as_str().or_else(|| finish.get("type").and_then(Value::as_str))?;
        [FinishReason::Stop, FinishReason::Length, FinishReason::Abort]
            .into_iter()
            .find(|reason| reason.to_string() == name)
    }

    fn tokens(&self, keys: &[&'static str], sample: &Sample) -> Result<Option<Vec<TokenId>>, WireError> {
        let Some((key, value)) = keys.iter().find_map(|key| Some((*key, self.value(key)?))) else {
            return Ok(None);
        };
        let token = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok()).map(TokenId);
        let tokens = value.as_array().and_then(|values| values.iter().map(token).collect());
        match tokens {
            Some(tokens) => Ok(Some(tokens)),
            None => {
                let found = kind(value).to_owned();
                Err(sample.refuse(Fault::Key { key, found, needed: "a list of token ids" }))
            }
        }
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A record as one JSON value of another layout: its routes, and the tokens under the names that layout has for them.
/// Logprobs and versions have no place there. `element` is for vLLM's and ATOM's array.
///
/// # Errors
/// If the record has no routes, they are not of `model`, or the layout cannot hold them.
pub fn write(
    record: &Record,
    model: &ModelShape,
    element: Element,
    sample: &Sample,
) -> Result<Value, WireError> {
    let routes = record.routes.as_ref().ok_or_else(|| sample.refuse(Fault::Missing { turn: 0 }))?;
    record.check_model(model, sample)?;
    let sample = &Sample { start: routes.start, ..sample.clone() };
    let rows = routes.rows.view();
    let ids = |tokens: &[TokenId]| Value::from(tokens.iter().map(|token| token.0).collect::<Vec<_>>());
    // Tokens of which nobody knows where the prompt ends have no place there.
    let halves = record.tokens.as_ref().zip(record.prompt_tokens).map(|(tokens, prompt_tokens)| {
        let (prompt, completion) = tokens.split_at(prompt_tokens);
        (ids(prompt), ids(completion))
    });
    let finish = record.finish.map(|finish| finish.to_string());
    let choice = |payload: Value| {
        let mut choice = json!({ "index": record.index, "finish_reason": finish, "routed_experts": payload });
        let mut answer = Map::new();
        if let Some((prompt, completion)) = &halves {
            choice["token_ids"] = completion.clone();
            answer.insert("prompt_token_ids".into(), prompt.clone());
        }
        answer.insert("choices".into(), json!([choice]));
        answer
    };
    let answer = match sample.layout {
        Layout::Vllm | Layout::Atom => {
            let mut answer = choice(vllm::write_base64(rows, model, element, sample)?.into());
            if routes.start > 0 {
                answer.insert("routed_experts_prompt_start".into(), routes.start.into());
            }
            answer
        }
        Layout::PrimeRl => choice(json!(prime_rl::write(rows, model, sample)?)),
        Layout::NemoRl => named_halves(
            halves,
            ["prompt_token_ids", "generation_token_ids"],
            ("routed_experts", nemo_rl::write(rows, model, sample)?.into()),
        ),
        Layout::Sglang => {
            let n_tokens = record.n_tokens().unwrap_or_default();
            let meta_info = json!({
                "finish_reason": finish.map(|finish| json!({ "type": finish })),
                "prompt_tokens": record.prompt_tokens,
                "completion_tokens": record.prompt_tokens.map(|prompt| n_tokens.saturating_sub(prompt)),
                "routed_experts": sglang::write(rows, model, sample)?,
                "routed_experts_start_len": routes.start,
            });
            named_halves(halves, ["input_ids", "output_ids"], ("meta_info", meta_info))
        }
        Layout::R3 | Layout::Lists => {
            let (found, needed) =
                (sample.layout.to_string(), "a layout to write: r3's own is `r3_file::write`");
            return Err(sample.refuse(Fault::Key { key: "layout", found, needed }));
        }
    };
    Ok(Value::Object(answer))
}

fn named_halves(
    halves: Option<(Value, Value)>,
    names: [&str; 2],
    (key, payload): (&str, Value),
) -> Map<String, Value> {
    let mut answer = Map::new();
    if let Some((prompt, completion)) = halves {
        answer.extend(names.map(String::from).into_iter().zip([prompt, completion]));
    }
    answer.insert(key.into(), payload);
    answer
}
