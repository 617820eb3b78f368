//! Why a recipe cannot become a run: what is wrong, where, and what to write instead.

use std::fmt::Write as _;
use std::path::PathBuf;

use crate::check::Rule;
use crate::place::Place;
use crate::reference;

/// Why a recipe cannot become a run.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// The file cannot be read.
    #[error("cannot read the recipe {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file holds bytes that are no text.
    #[error("the recipe {} is not UTF-8: line {line} holds byte 0x{byte:02x}", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// Line of the first bad byte, from 1.
        line: usize,
        /// The byte.
        byte: u8,
    },
    /// The text is larger than a recipe can be.
    #[error("the recipe {name} is longer than {max_bytes} bytes")]
    TooLarge {
        /// Name of the recipe.
        name: String,
        /// The most a recipe may have.
        max_bytes: u64,
    },
    /// The text says nothing.
    #[error("the recipe {name} is empty")]
    Empty {
        /// Name of the recipe.
        name: String,
    },
    /// An argument of `--set` is not `key=value`.
    #[error("`--set {}` {reason}", argument.escape_debug())]
    BadOverride {
        /// The argument.
        argument: String,
        /// What it lacks.
        reason: &'static str,
    },
    /// Something in the text is wrong.
    #[error("{problem}{}", shown(place.as_deref()))]
    Invalid {
        /// What.
        problem: Box<Problem>,
        /// Where; `None` if the value was not written in a text, but made by a program.
        place: Option<Box<Place>>,
    },
}

/// `text` with its control characters spelled out: they would move a terminal's cursor, or worse.
pub(crate) fn printable(text: &str) -> String {
    let spelled = |c: char| if c.is_control() { c.escape_debug().to_string() } else { c.to_string() };
    text.chars().map(spelled).collect()
}

fn shown(place: Option<&Place>) -> String {
    place.map(|place| format!("\n{place}")).unwrap_or_default()
}

impl RecipeError {
    /// What the user can change, printed as `hint: ...`.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::Read { .. } => "give the path of a recipe, such as `recipes/tiny.yaml`".into(),
            Self::NotUtf8 { .. } => "save the file as UTF-8; `iconv -t UTF-8` converts it".into(),
            Self::TooLarge { .. } => "a recipe is a page of YAML; is this the right file?".into(),
            Self::Empty { .. } => {
                "start from a copy of `recipes/tiny.yaml`; `docs/recipe.md` lists every key".into()
            }
            Self::BadOverride { .. } => {
                "write the dotted key, `=` and the value, such as `--set train.lr=1e-5`".into()
            }
            Self::Invalid { problem, .. } => problem.hint(),
        }
    }
}

/// What is wrong with a text. Paths are dotted, such as `rollout.group_size`; the root's is empty.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum Problem {
    /// Not YAML.
    #[error("not YAML: {message}")]
    Syntax {
        /// What the parser said.
        message: String,
    },
    /// A line is indented with a tab.
    #[error("not YAML: a tab in the indentation")]
    Tab,
    /// A second document follows.
    #[error("a second YAML document begins here")]
    SeveralDocuments,
    /// An infinity, a NaN, or a number that overflows to one.
    #[error("the number `{text}` is not finite")]
    NotFinite {
        /// The number as it is written.
        text: String,
    },
    /// More values, levels or aliases than a recipe can have.
    #[error("too many values, levels or aliases for a recipe")]
    TooComplex,
    /// A mapping holds a key twice.
    #[error("the key `{key}` is written twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// `--set` of a key inside a value that has no keys.
    #[error("{} holds no keys that could be set", name(path))]
    NotABlock {
        /// The value's key, with its path.
        path: String,
    },
    /// A recipe of the other kind.
    #[error("this is a recipe for `{command}`")]
    OtherCommand {
        /// The command that reads it.
        command: &'static str,
    },
    /// No such key here.
    #[error("unknown key `{path}`")]
    UnknownKey {
        /// The key, with its path.
        path: String,
        /// Keys there are at this place.
        known: &'static [&'static str],
        /// Paths at which this key does exist.
        elsewhere: Vec<String>,
    },
    /// A required key is not there.
    #[error("missing key `{path}`")]
    MissingKey {
        /// The key, with its path.
        path: String,
    },
    /// A value of another type, or out of the type's range.
    #[error("{} must be {expected}, not {found}", name(path))]
    WrongType {
        /// The key, with its path.
        path: String,
        /// What would be right.
        expected: String,
        /// What is written.
        found: String,
    },
    /// None of the words this key takes.
    #[error("{} must be {}, not `{}`", name(path), one_of(known), found.escape_debug())]
    UnknownWord {
        /// The key, with its path.
        path: String,
        /// The word.
        found: String,
        /// The words it takes.
        known: &'static [&'static str],
    },
    /// A key that takes one of several blocks, and got none or more than one.
    #[error("{} must hold {}, but holds {}", name(path), one_of(known), all_of(found))]
    NotOneVariant {
        /// The key, with its path.
        path: String,
        /// The blocks it got.
        found: Vec<String>,
        /// The blocks it takes.
        known: &'static [&'static str],
    },
    /// The name of a block without its settings.
    #[error("{} must hold the settings of `{word}`", name(path))]
    BareVariant {
        /// The key, with its path.
        path: String,
        /// The block's name.
        word: String,
    },
    /// A value that its type refuses.
    #[error("{}: {message}", name(path))]
    Refused {
        /// The key, with its path.
        path: String,
        /// Why.
        message: String,
    },
    /// A value that is well-formed but cannot be run.
    #[error(transparent)]
    Rule(#[from] Rule),
}

impl Problem {
    /// Says where the problem lies; a missing key keeps its own name at the end.
    pub(crate) fn set_path(&mut self, to: &str) {
        match self {
            Self::MissingKey { path } if !to.is_empty() => path.insert_str(0, &format!("{to}.")),
            Self::UnknownKey { path, .. }
            | Self::WrongType { path, .. }
            | Self::UnknownWord { path, .. }
            | Self::NotOneVariant { path, .. }
            | Self::BareVariant { path, .. }
            | Self::Refused { path, .. } => to.clone_into(path),
            Self::MissingKey { .. }
            | Self::Syntax { .. }
            | Self::Tab
            | Self::SeveralDocuments
            | Self::NotFinite { .. }
            | Self::TooComplex
            | Self::DuplicateKey { .. }
            | Self::NotABlock { .. }
            | Self::OtherCommand { .. }
            | Self::Rule(_) => {}
        }
    }

    /// What to write instead.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::Syntax { .. } => {
                "check colons, quotes, brackets and indentation at and before this place".into()
            }
            Self::Tab => "YAML indents with spaces".into(),
            Self::SeveralDocuments => "a recipe is one document: remove the `---` and what follows".into(),
            Self::NotFinite { .. } => "write a finite number, or remove the key for its default".into(),
            Self::TooComplex => {
                "a recipe is a page of YAML; write values out instead of nesting aliases".into()
            }
            Self::DuplicateKey { key } => format!("keep one `{key}`"),
            Self::NotABlock { path } if path.is_empty() => {
                "begin the recipe with a key, such as `model:`".into()
            }
            Self::NotABlock { path } => format!("set `{path}` itself"),
            Self::OtherCommand { command } => format!("run `{command}` with it, or remove this section"),
            Self::UnknownKey { path, known, elsewhere } => unknown_key_hint(path, known, elsewhere),
            Self::MissingKey { path } => format!("add {}", meaning(path)),
            Self::WrongType { path, expected, found } => wrong_type_hint(path, expected, found),
            Self::UnknownWord { found, known, .. } => match nearest(found, known) {
                Some(word) => format!("did you mean `{word}`?"),
                None => format!("write {}", one_of(known)),
            },
            Self::NotOneVariant { path, found, known } => match found.last() {
                Some(last) => format!(
                    "keep one; on the command line, `--set '{path}={{{last}: {{}}}}'` replaces the block"
                ),
                None => format!("write `{path}: {{ {}: {{}} }}`, say", known[0]),
            },
            Self::BareVariant { path, word } => {
                format!("write `{path}: {{ {word}: {{}} }}` to take its defaults")
            }
            Self::Refused { path, .. } => meaning(path),
            Self::Rule(rule) => rule.hint(),
        }
    }
}

/// What peers call things, as the last part of a key, and r3's path for it.
const PEER_KEYS: [(&str, &str); 27] = [
    ("batch_size", "rollout.groups"),
    ("train_batch_size", "rollout.groups"),
    ("n", "rollout.group_size"),
    ("num_generations", "rollout.group_size"),
    ("max_tokens", "rollout.max_new_tokens"),
    ("max_response_length", "rollout.max_new_tokens"),
    ("top_k", "rollout.sample_top_k"),
    ("over_sampling_batch_size", "rollout.over_sampling_groups"),
    ("partial_rollout", "refit.in_flight"),
    ("learning_rate", "train.lr"),
    ("max_grad_norm", "train.grad_clip"),
    ("filter_groups", "algorithm.dapo.dynamic_sampling"),
    ("overlong_buffer", "algorithm.dapo.overlong"),
    ("rollout_is", "objective.correction.weight"),
    ("rollout_rs", "objective.correction.sequence_mask"),
    ("tis_imp_ratio_cap", "objective.correction.weight.tis.cap"),
    ("kl_loss_coef", "objective.kl.coef"),
    ("kl_coef", "objective.kl.coef"),
    ("beta", "objective.kl.coef"),
    ("kl_loss_type", "objective.kl.estimator"),
    ("entropy_coeff", "objective.entropy_coef"),
    ("clip_ratio_c", "objective.dual_clip"),
    ("loss_agg_mode", "objective.aggregation"),
    ("mask_truncated_completions", "objective.truncated"),
    ("clip_ratio_low", "algorithm.dapo.clip_low"),
    ("clip_ratio_high", "algorithm.dapo.clip_high"),
    ("enable_return_routed_experts", "router_replay.mode"),
];

fn unknown_key_hint(path: &str, known: &[&str], elsewhere: &[String]) -> String {
    let (parent, key) = path.rsplit_once('.').unwrap_or(("", path));
    let mut hint = String::new();
    if let Some(word) = nearest(key, known) {
        let _ = write!(hint, "did you mean `{word}`? ");
    } else if let Some((_, r3)) = PEER_KEYS.iter().find(|(peer, _)| *peer == key) {
        let _ = write!(hint, "r3 calls this `{r3}`; ");
    } else if !elsewhere.is_empty() {
        let _ = write!(hint, "there is {}; ", all_of(elsewhere));
    }
    let place = if parent.is_empty() { "a recipe".to_owned() } else { format!("`{parent}`") };
    let _ = write!(hint, "{place} takes {}", quoted(known));
    hint
}

fn wrong_type_hint(path: &str, expected: &str, found: &str) -> String {
    let quoted = found.strip_prefix("the text `").and_then(|text| text.strip_suffix('`'));
    if expected.contains("number") && quoted.is_some_and(|text| text.parse().is_ok_and(f64::is_finite)) {
        return "remove the quotes".into();
    }
    match (expected, found) {
        ("a text" | "a path", "a list" | "a mapping" | "nothing") => format!("write a text after `{path}:`"),
        ("a text" | "a path", _) => "put it in quotes".into(),
        ("a mapping of keys to values", "nothing") => {
            format!("remove `{path}`, or write `{path}: {{}}` for its defaults")
        }
        _ => meaning(path),
    }
}

/// What the key is for, as its documentation says.
fn meaning(path: &str) -> String {
    let key = path.split('[').next().unwrap_or(path);
    match reference::meaning(key) {
        Some(meaning) => format!("`{key}`: {meaning}"),
        None => "`docs/recipe.md` lists every key".into(),
    }
}

/// The known word that `word` was probably meant to be.
fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let distance = |candidate: &str| strsim::damerau_levenshtein(&word.to_lowercase(), candidate);
    let (best, at) =
        known.iter().map(|&candidate| (candidate, distance(candidate))).min_by_key(|&(_, at)| at)?;
    (at <= (best.len() / 3).max(1)).then_some(best)
}

fn name(path: &str) -> String {
    if path.is_empty() { "a recipe".into() } else { format!("`{path}`") }
}

/// The words in backticks, with commas.
pub(crate) fn quoted(words: &[impl AsRef<str>]) -> String {
    words.iter().map(|word| format!("`{}`", word.as_ref())).collect::<Vec<_>>().join(", ")
}

fn one_of(words: &[&str]) -> String {
    if let [word] = words { format!("`{word}`") } else { format!("one of {}", quoted(words)) }
}

fn all_of(words: &[impl AsRef<str>]) -> String {
    if words.is_empty() { "nothing".into() } else { quoted(words) }
}
