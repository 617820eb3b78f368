//! Conversations of several turns: what follows a sampled turn, as tokens.
//!
//! Token in, token out: what was sampled stays as it was sampled, and is never encoded again. The chat template's
//! rendering of the longer conversation is only compared with it. Where the two agree, the conversation goes on with the
//! tokens of what is new; where the template rewrites history, as those do that drop the thinking of earlier turns, it
//! forks: one sample ends, and another begins with the rendering as its prompt.

use serde_json::{Map, Value};

use r3_core::ids::TokenId;
use r3_core::rollout::FinishReason;

use crate::chat::Message;
use crate::error::TaskError;
use crate::tokenizer::Tokenizer;

/// How a conversation begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opening {
    /// Plain text: every turn is text that follows, and nothing is ever rendered.
    Text(String),
    /// Chat messages, rendered with the model's template.
    Messages(Vec<Message>),
}

/// A turn that was sampled, with all that came before it.
#[derive(Clone, Copy, Debug)]
pub struct SampledTurn<'a> {
    /// The conversation up to the end of the turn.
    pub tokens: &'a [TokenId],
    /// Where the turn begins in `tokens`: the first token that was sampled for it.
    pub start: usize,
    /// Why it ended. With [`FinishReason::Stop`] the last token is a stop token.
    pub finish: FinishReason,
}

/// What comes after a sampled turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NextTurn {
    /// The conversation goes on: its tokens stay, and these follow.
    Continue {
        /// At least one token, none of them sampled.
        given: Vec<TokenId>,
    },
    /// The template renders what was said otherwise than it was sampled.
    Fork {
        /// The prompt of a new sample, `[T]`: the whole conversation, rendered.
        prompt: Vec<TokenId>,
        /// Tokens that this prompt and the old conversation begin with alike; fewer than the old one has.
        shared_tokens: usize,
    },
}

/// One conversation between two of its turns.
#[derive(Clone, Debug)]
pub struct Conversation {
    /// What was said so far; `None` for plain text.
    chat: Option<Chat>,
    /// What the next turn is sampled after, as text.
    prompt: String,
}

#[derive(Clone, Debug)]
struct Chat {
    messages: Vec<Message>,
    variables: Map<String, Value>,
}

impl Conversation {
    /// A conversation of which nothing has been sampled. `variables` are handed to the chat template.
    ///
    /// # Errors
    /// If there are messages, but no chat template, or the template refuses them.
    pub fn begin(
        opening: Opening,
        variables: &Map<String, Value>,
        tokenizer: &Tokenizer,
    ) -> Result<Self, TaskError> {
        match opening {
            Opening::Text(prompt) => Ok(Self { chat: None, prompt }),
            Opening::Messages(messages) => {
                let prompt = tokenizer.chat_template()?.render(&messages, variables)?;
                Ok(Self { chat: Some(Chat { messages, variables: variables.clone() }), prompt })
            }
        }
    }

    /// The text that the next turn is sampled after.
    #[must_use]
    pub fn prompt(&self) -> &str {
        &self.prompt
    }

    /// Appends the sampled turn and the `message` that answers it. In plain text, that is its content.
    ///
    /// # Errors
    /// If the template refuses the conversation, `message` adds no token to it, or has text that the vocabulary lacks. The
    /// conversation is over then.
    pub fn reply(
        &mut self,
        turn: SampledTurn<'_>,
        message: &Message,
        tokenizer: &Tokenizer,
    ) -> Result<NextTurn, TaskError> {
        let said = spelled(turn, tokenizer)?;
        let mut shown = std::mem::take(&mut self.prompt) + &said;
        let next = match &mut self.chat {
            None => {
                let given = encode_after(turn.tokens, &message.content, tokenizer)?;
                shown += &message.content;
                self.prompt = shown;
                NextTurn::Continue { given }
            }
            Some(chat) => {
                let content = tokenizer.completion_text(&turn.tokens[turn.start..], turn.finish)?;
                chat.messages.push(Message { role: "assistant".into(), content });
                chat.messages.push(message.clone());
                self.prompt = tokenizer.chat_template()?.render(&chat.messages, &chat.variables)?;
                match self.prompt.strip_prefix(&shown) {
                    Some(new) => NextTurn::Continue { given: encode_after(turn.tokens, new, tokenizer)? },
                    None => fork(turn.tokens, tokenizer.encode(&self.prompt)?),
                }
            }
        };
        match &next {
            NextTurn::Continue { given } if given.is_empty() => Err(TaskError::Empty { what: "next turn" }),
            _ => Ok(next),
        }
    }
}

/// The text of a sampled turn, its stop token included, as it stands after what came before: some decoders drop a space
/// at the beginning of a text, which is none in the middle of one.
fn spelled(turn: SampledTurn<'_>, tokenizer: &Tokenizer) -> Result<String, TaskError> {
    let SampledTurn { tokens, start, .. } = turn;
    if start > 0 {
        let before = tokenizer.decode(&tokens[start - 1..start])?;
        let both = tokenizer.decode(&tokens[start - 1..])?;
        if let Some(said) = both.strip_prefix(&before) {
            return Ok(said.into());
        }
    }
    tokenizer.decode(&tokens[start..])
}

/// The tokens of `text`, which follows `tokens`. Some tokenizers put a space before what begins a text; so the last token
/// is encoded along where it stays what it is, and taken off again.
fn encode_after(tokens: &[TokenId], text: &str, tokenizer: &Tokenizer) -> Result<Vec<TokenId>, TaskError> {
    if let Some(&last) = tokens.last() {
        let spelled = tokenizer.decode(&[last])?;
        let stays = tokenizer.encode(&spelled).is_ok_and(|alone| alone == [last]);
        if stays
            && let [first, given @ ..] = &tokenizer.encode(&(spelled + text))?[..]
            && *first == last
        {
            return Ok(given.to_vec());
        }
    }
    tokenizer.encode(text)
}

/// Leaves `tokens` where `prompt` differs from them; goes on with them where it does not.
fn fork(tokens: &[TokenId], prompt: Vec<TokenId>) -> NextTurn {
    let shared_tokens = tokens.iter().zip(&prompt).take_while(|(old, new)| old == new).count();
    if shared_tokens == tokens.len() {
        return NextTurn::Continue { given: prompt[shared_tokens..].to_vec() };
    }
    NextTurn::Fork { prompt, shared_tokens }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::{Just, ProptestConfig, Strategy, prop, proptest};
    use proptest::{prop_assert, prop_assert_eq, prop_oneof};
    use serde_json::json;

    use super::*;
    use crate::tokenizer::tests::{directory, tiny};

    /// Renders every message as it is. (What ends a template with a newline needs `{{ '' }}` after it: Jinja drops it.)
    const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                          {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

    /// Drops the thinking of every assistant turn but one that nobody answered yet, as reasoning models do.
    const FORGETFUL: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n\
                             {{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}\
                             <|im_end|>\n{% endfor %}<|im_start|>assistant\n{{ '' }}";

    /// Puts something into the newest prompt that history does not have, as models do that are told not to think.
    const HINTED: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                          <|im_start|>assistant\n<think></think>";

    /// Trims what was said.
    const TRIMMED: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.strip() }}<|im_end|>\n\
                           {% endfor %}<|im_start|>assistant\n{{ '' }}";

    const END: TokenId = TokenId(2);
    const OTHER_END: TokenId = TokenId(3);

    /// Letters, digits and a few signs; pairs that merge; and the tokens that frame turns.
    fn tokenizer_json() -> String {
        let mut vocab: BTreeMap<String, u32> = BTreeMap::new();
        let special = ["<unk>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"];
        let single = ('a'..='z').chain('0'..='9').chain("\n \\<>/|_?".chars()).map(String::from);
        let merged = ["ab", "abc", "or", "er", "us", "user", "th", "in"].map(String::from);
        for token in special.map(String::from).into_iter().chain(single).chain(merged) {
            let id = u32::try_from(vocab.len()).unwrap();
            vocab.insert(token, id);
        }
        let added = (0..4).zip(special).map(|(id, content)| {
            json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true })
        });
        json!({ "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
                "pre_tokenizer": null, "post_processor": null, "decoder": { "type": "Fuse" },
                "added_tokens": added.collect::<Vec<_>>(),
                "model": { "type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": false,
                           "continuing_subword_prefix": null, "end_of_word_suffix": null,
                           "byte_fallback": false, "ignore_merges": false, "vocab": vocab,
                           "merges": ["a b", "ab c", "o r", "e r", "u s", "us er", "t h", "i n"] } })
        .to_string()
    }

    fn tokenizer(template: &str) -> Tokenizer {
        let files = [
            ("tokenizer.json", &*tokenizer_json()),
            ("generation_config.json", r#"{"eos_token_id": [2, 3]}"#),
            ("chat_template.jinja", template),
        ];
        Tokenizer::load(directory(&files).path(), 100).unwrap()
    }

    fn user(content: &str) -> Message {
        Message { role: "user".into(), content: content.into() }
    }

    fn begin(tokenizer: &Tokenizer) -> (Conversation, Vec<TokenId>) {
        let opening = Opening::Messages(vec![user("hi")]);
        let conversation = Conversation::begin(opening, &Map::new(), tokenizer).unwrap();
        let tokens = tokenizer.encode(conversation.prompt()).unwrap();
        (conversation, tokens)
    }

    /// `template` after `hi`, `said` token by token, and the answer `ok`. Returns the tokens before the answer, too.
    fn after(template: &str, said: &[&str], finish: FinishReason) -> (Tokenizer, Vec<TokenId>, NextTurn) {
        let tokenizer = tokenizer(template);
        let (mut conversation, mut tokens) = begin(&tokenizer);
        let start = tokens.len();
        for piece in said {
            tokens.extend(tokenizer.encode(piece).unwrap());
        }
        let turn = SampledTurn { tokens: &tokens, start, finish };
        let next = conversation.reply(turn, &user("ok"), &tokenizer).unwrap();
        (tokenizer, tokens, next)
    }

    fn given(tokenizer: &Tokenizer, next: &NextTurn) -> String {
        match next {
            NextTurn::Continue { given } => tokenizer.decode(given).unwrap(),
            NextTurn::Fork { shared_tokens, .. } => panic!("it forks after {shared_tokens} tokens"),
        }
    }

    const ANSWER: &str = "\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n";

    #[test]
    fn a_conversation_goes_on_after_the_tokens_that_were_sampled() {
        // `ab` is one token when encoded, but was sampled as two: it must stay two.
        let (tokenizer, tokens, next) = after(CHATML, &["a", "b", "<|im_end|>"], FinishReason::Stop);
        assert_eq!(tokenizer.encode("ab").unwrap().len(), 1);
        assert_eq!(given(&tokenizer, &next), ANSWER);
        let whole = tokenizer.encode(&(tokenizer.decode(&tokens).unwrap() + ANSWER)).unwrap();
        assert_ne!(tokens, whole[..tokens.len()], "encoded anew, the sampled tokens would be others");
    }

    #[test]
    fn a_turn_that_was_cut_off_is_given_its_end() {
        let (tokenizer, _, next) = after(CHATML, &["abc"], FinishReason::Length);
        assert_eq!(given(&tokenizer, &next), format!("<|im_end|>{ANSWER}"));
    }

    #[test]
    fn an_end_that_the_template_does_not_write_forks_before_it() {
        let (tokenizer, tokens, next) = after(CHATML, &["abc", "<|endoftext|>"], FinishReason::Stop);
        assert_eq!(tokens.last(), Some(&OTHER_END));
        let NextTurn::Fork { prompt, shared_tokens } = next else { panic!("{next:?}") };
        assert_eq!(shared_tokens, tokens.len() - 1);
        assert_eq!(prompt[shared_tokens], END);
        assert!(tokenizer.decode(&prompt).unwrap().ends_with(&format!("assistant\nabc<|im_end|>{ANSWER}")));
    }

    #[test]
    fn dropped_thinking_forks_where_the_thinking_began() {
        let said = ["<think>", "hm", "</think>", "abc", "<|im_end|>"];
        let (tokenizer, tokens, next) = after(FORGETFUL, &said, FinishReason::Stop);
        let NextTurn::Fork { prompt, shared_tokens } = next else { panic!("{next:?}") };
        let shared = tokenizer.decode(&tokens[..shared_tokens]).unwrap();
        assert_eq!(shared, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
        assert_eq!(prompt[..shared_tokens], tokens[..shared_tokens]);
        let expected = format!("{shared}abc<|im_end|>{ANSWER}");
        assert_eq!(tokenizer.decode(&prompt).unwrap(), expected);
        let (tokenizer, _, next) = after(FORGETFUL, &["abc", "<|im_end|>"], FinishReason::Stop);
        assert_eq!(given(&tokenizer, &next), ANSWER, "where nothing was thought, nothing is dropped");
    }

    #[test]
    fn a_prompt_that_history_forgets_forks_within_the_prompt() {
        let (tokenizer, tokens, next) = after(HINTED, &["abc", "<|im_end|>"], FinishReason::Stop);
        let NextTurn::Fork { prompt, shared_tokens } = next else { panic!("{next:?}") };
        assert!(tokenizer.decode(&tokens[shared_tokens..]).unwrap().starts_with("<think></think>"));
        assert!(tokenizer.decode(&prompt[shared_tokens..]).unwrap().starts_with("abc<|im_end|>"));
    }

    #[test]
    fn a_trimmed_space_forks_at_the_space() {
        let (tokenizer, tokens, next) = after(TRIMMED, &["x", " ", "<|im_end|>"], FinishReason::Stop);
        let NextTurn::Fork { shared_tokens, .. } = next else { panic!("{next:?}") };
        assert_eq!(tokenizer.decode(&tokens[shared_tokens..]).unwrap(), " <|im_end|>");
        let (tokenizer, _, next) = after(TRIMMED, &["x", "<|im_end|>"], FinishReason::Stop);
        assert_eq!(given(&tokenizer, &next), ANSWER);
    }

    #[test]
    fn plain_text_goes_on_with_the_text() {
        let tokenizer = tiny();
        let opening = Opening::Text("1+1=".into());
        let mut conversation = Conversation::begin(opening, &Map::new(), &tokenizer).unwrap();
        let tokens = tokenizer.encode("1+1=3<eos>").unwrap();
        let turn = SampledTurn { tokens: &tokens, start: 4, finish: FinishReason::Stop };
        let next = conversation.reply(turn, &user("no, 1+1="), &tokenizer).unwrap();
        assert_eq!(next, NextTurn::Continue { given: tokenizer.encode("no, 1+1=").unwrap() });
        assert_eq!(conversation.prompt(), "1+1=3<eos>no, 1+1=");
        let error = conversation.reply(turn, &user(""), &tokenizer).unwrap_err();
        assert_eq!(error.to_string(), "the next turn is empty");
    }

    /// A tokenizer over `vocab`, of which token 1 ends a turn, with a chat template that writes `u:` and `y:`.
    fn small(model: &serde_json::Value, spaces: &serde_json::Value, template: &str) -> Tokenizer {
        let json = json!({ "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
            "pre_tokenizer": spaces, "post_processor": null,
            "decoder": (spaces["type"] == "Metaspace").then_some(spaces),
            "added_tokens": [{ "id": 1, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
                               "normalized": false, "special": true }],
            "model": model });
        let files = [
            ("tokenizer.json", &*json.to_string()),
            ("generation_config.json", r#"{"eos_token_id": 1}"#),
            ("chat_template.jinja", template),
        ];
        Tokenizer::load(directory(&files).path(), 9).unwrap()
    }

    /// What follows `said`, sampled after the user's `x`, when the user says `x` again; and the prompt before it.
    fn after_x(tokenizer: &Tokenizer, said: &[u32]) -> (Vec<TokenId>, NextTurn) {
        let opening = Opening::Messages(vec![user("x")]);
        let mut conversation = Conversation::begin(opening, &Map::new(), tokenizer).unwrap();
        let prompt = tokenizer.encode(conversation.prompt()).unwrap();
        let tokens = [prompt.clone(), said.iter().copied().map(TokenId).collect()].concat();
        let turn = SampledTurn { tokens: &tokens, start: prompt.len(), finish: FinishReason::Stop };
        (prompt, conversation.reply(turn, &user("x"), tokenizer).unwrap())
    }

    fn continued(given: &[u32]) -> NextTurn {
        NextTurn::Continue { given: given.iter().copied().map(TokenId).collect() }
    }

    /// SentencePiece puts a space before what begins a text, and takes it off when it decodes.
    #[test]
    fn a_space_that_only_begins_a_text_is_not_put_into_its_middle_nor_taken_out_of_it() {
        let pieces = ["<unk>", "</s>", "\u{2581}", "\u{2581}u", "\u{2581}x", "u", "x", ":", "y"];
        let vocab: Vec<_> = pieces.iter().map(|piece| json!([piece, -1.0])).collect();
        let model = json!({ "type": "Unigram", "unk_id": 0, "vocab": vocab });
        let spaces = json!({ "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "first", "split": true });
        let template = "{% for m in messages %}{{ 'u:' if m.role == 'user' else 'y:' }}{{ m.content }}\
                        {{ '</s>' if m.role == 'assistant' }}{% endfor %}y:";
        let tokenizer = small(&model, &spaces, template);
        let (prompt, next) = after_x(&tokenizer, &[6, 1]);
        assert_eq!(prompt, [3, 7, 6, 8, 7].map(TokenId), "` u:xy:`");
        assert_eq!(next, continued(&[5, 7, 6, 8, 7]), "`u:xy:`");
        let (_, next) = after_x(&tokenizer, &[4, 1]);
        assert!(
            matches!(next, NextTurn::Fork { shared_tokens: 5, .. }),
            "` x` was said and `x` is shown: {next:?}"
        );
    }

    /// Where spaces are not in the tokens at all, text says less than tokens do.
    #[test]
    fn texts_that_differ_in_what_no_token_holds_go_on() {
        let model = json!({ "type": "WordLevel", "unk_token": "<unk>",
                            "vocab": { "<unk>": 0, "</s>": 1, "u:": 2, "y:": 3, "x": 4 } });
        let template = "{% for m in messages %}{{ 'u:' if m.role == 'user' else 'y:' }}\n{{ m.content }}\n\
                        {{ '</s>' if m.role == 'assistant' }}{% endfor %}y:";
        let tokenizer = small(&model, &json!({ "type": "WhitespaceSplit" }), template);
        let (prompt, next) = after_x(&tokenizer, &[4, 4, 1]);
        assert_eq!((prompt, next), ([2, 4, 3].map(TokenId).to_vec(), continued(&[2, 4, 3])));
    }

    #[test]
    fn a_template_that_forgets_everything_forks_into_the_beginning() {
        let tokenizer = tokenizer("{{ messages[0].content }}");
        let (mut conversation, mut tokens) = begin(&tokenizer);
        tokens.push(END);
        let turn = SampledTurn { tokens: &tokens, start: tokens.len() - 1, finish: FinishReason::Stop };
        match conversation.reply(turn, &user("ok"), &tokenizer).unwrap() {
            NextTurn::Fork { prompt, shared_tokens } => assert_eq!(prompt.len(), shared_tokens),
            NextTurn::Continue { given } => panic!("{given:?}"),
        }
    }

    /// A sampled turn: any tokens that do not frame turns, with or without its end.
    fn sampled() -> impl Strategy<Value = (Vec<u32>, FinishReason)> {
        let finish = prop_oneof![Just(FinishReason::Stop), Just(FinishReason::Length)];
        (prop::collection::vec(4_u32..57, 0..12), finish)
    }

    fn replies() -> impl Strategy<Value = Vec<((Vec<u32>, FinishReason), String)>> {
        prop::collection::vec((sampled(), "[a-z ?]{0,6}"), 1..5)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

        /// With a template that renders what was said, a conversation only ever grows, and reads as it is rendered.
        #[test]
        fn a_plain_template_never_forks(replies in replies()) {
            let tokenizer = tokenizer(CHATML);
            let (mut conversation, mut tokens) = begin(&tokenizer);
            for ((said, finish), reply) in replies {
                let start = tokens.len();
                tokens.extend(said.into_iter().map(TokenId));
                tokens.extend((finish == FinishReason::Stop).then_some(END));
                let turn = SampledTurn { tokens: &tokens, start, finish };
                match conversation.reply(turn, &user(&reply), &tokenizer).unwrap() {
                    NextTurn::Continue { given } => tokens.extend(given),
                    NextTurn::Fork { shared_tokens, .. } => prop_assert!(false, "forks after {shared_tokens}"),
                }
                prop_assert_eq!(tokenizer.decode(&tokens).unwrap(), conversation.prompt());
            }
        }

        /// Whatever a template does, the next prompt is what it renders; and a fork shares just the tokens that agree.
        #[test]
        fn a_fork_shares_what_agrees_and_no_more(
            replies in replies(), template in prop_oneof![Just(FORGETFUL), Just(HINTED), Just(TRIMMED)], think: bool
        ) {
            let tokenizer = tokenizer(template);
            let (mut conversation, mut tokens) = begin(&tokenizer);
            for ((said, finish), reply) in replies {
                let start = tokens.len();
                if think {
                    tokens.extend(tokenizer.encode("<think>ab</think>").unwrap());
                }
                tokens.extend(said.into_iter().map(TokenId));
                tokens.extend((finish == FinishReason::Stop).then_some(END));
                let turn = SampledTurn { tokens: &tokens, start, finish };
                match conversation.reply(turn, &user(&reply), &tokenizer).unwrap() {
                    NextTurn::Continue { given } => tokens.extend(given),
                    NextTurn::Fork { prompt, shared_tokens } => {
                        prop_assert_eq!(&prompt[..shared_tokens], &tokens[..shared_tokens]);
                        prop_assert!(shared_tokens < tokens.len());
                        prop_assert!(prompt.get(shared_tokens) != tokens.get(shared_tokens));
                        tokens = prompt;
                    }
                }
                prop_assert_eq!(tokenizer.decode(&tokens).unwrap(), conversation.prompt());
            }
        }
    }
}
