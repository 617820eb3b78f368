//! Lines that `r3 score` reads: sequences, or rollouts as `r3 rollout` writes them.

use r3_core::ids::TokenId;
use r3_wire::error::WireError;
use r3_wire::r3_file;
use r3_wire::record::Record;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::score::{ScoreInput, unpack};

/// Why a line is nothing to score.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum InputError {
    #[error("not a sequence to score: {reason}")]
    Json { column: usize, reason: String },
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("the rollout has no tokens")]
    NoTokens,
    #[error(
        "the rollout was drawn from a part of the vocabulary, but does not say which for the token at position {position}"
    )]
    MissingSupport { position: usize },
    #[error("the routes of the rollout begin at position {start}, and those before cannot be replayed")]
    PartialRoutes { start: usize },
}

impl InputError {
    /// What the user can change.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::Json { .. } => {
                r#"write one object a line, such as {"tokens": [5, 17, 9]}, with "routed_experts" to replay routes"#
                    .into()
            }
            Self::Wire(error) => error.hint(),
            Self::NoTokens => "put them in with `r3 routes convert IN OUT --tokens FILE`".into(),
            Self::MissingSupport { .. } => {
                "score the file as `r3 rollout` wrote it, with `supports`, or sample without --top-p, --top-k and --min-p"
                    .into()
            }
            Self::PartialRoutes { .. } => {
                "sample with --routed-experts-start-len 0 to replay, or --return-routed-experts false to score freely"
                    .into()
            }
        }
    }
}

/// What tells a rollout from a sequence.
#[derive(Deserialize)]
struct Marker {
    r3: Option<IgnoredAny>,
}

/// Reads one line; `number` is what a refusal calls it.
///
/// Of a rollout, tokens, routes and what tokens were drawn from are taken; its own logprobs are what to compare the result
/// with.
///
/// # Errors
/// If it is neither a sequence nor a whole rollout, has routes of only a part of it, or was drawn from a part of the
/// vocabulary that it does not say for each token.
pub fn parse(line: &str, number: usize) -> Result<ScoreInput, InputError> {
    let fault = match serde_json::from_str(line) {
        Ok(input) => return Ok(input),
        Err(fault) => fault,
    };
    match serde_json::from_str(line) {
        Ok(Marker { r3: Some(_) }) => rollout(line, number),
        _ => Err(json(&fault)),
    }
}

fn rollout(line: &str, number: usize) -> Result<ScoreInput, InputError> {
    let record = r3_file::read(line.as_bytes(), number).map_err(|error| match error {
        WireError::Json { column, reason, .. } => InputError::Json { column, reason },
        error => error.into(),
    })?;
    let tokens = record.tokens.as_ref().ok_or(InputError::NoTokens)?;
    if let Some(start) = record.routes.as_ref().map(|routes| routes.start).filter(|&start| start > 0) {
        return Err(InputError::PartialRoutes { start });
    }
    check_supports(&record, tokens.len())?;
    let ids = |tokens: &[TokenId]| tokens.iter().map(|token| token.0).collect();
    Ok(ScoreInput {
        tokens: ids(tokens),
        routed_experts: record.routes.as_ref().map(|routes| unpack(routes.rows.view())),
        layer_ids: record.routes.map(|routes| routes.layer_ids),
        temperature: record.sampling.map(|sampling| sampling.divisor()),
        supports: record.support.map(|support| support.view().iter().map(ids).collect()),
    })
}

/// Refuses a truncated rollout of `n_tokens` tokens that does not say for each one sampled what it was drawn from.
fn check_supports(record: &Record, n_tokens: usize) -> Result<(), InputError> {
    if !record.sampling.is_some_and(|sampling| sampling.truncates()) {
        return Ok(());
    }
    let sizes = record.support.as_ref().map(|support| support.view().sizes());
    let first = record.prompt_tokens.unwrap_or(n_tokens);
    let is_whole = |&position: &usize| sizes.is_none_or(|sizes| sizes[position - first] == 0);
    // Who does not say which tokens were sampled has sampled them all.
    let all = first..n_tokens;
    let turns = if record.turns.is_empty() { std::slice::from_ref(&all) } else { &record.turns };
    match turns.iter().cloned().flatten().find(is_whole) {
        Some(position) => Err(InputError::MissingSupport { position }),
        None => Ok(()),
    }
}

fn json(error: &serde_json::Error) -> InputError {
    let message = error.to_string();
    // serde_json counts the lines of what it was handed, and that is one.
    let reason = message.split(" at line 1 column").next().unwrap_or(&message).to_owned();
    InputError::Json { column: error.column(), reason }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use r3_core::ids::GroupId;
    use r3_core::routes::{RouteDims, RouteRows};
    use r3_core::support::SupportRows;
    use r3_wire::record::{Routes, SamplingParams};

    use super::*;

    const TRUNCATED: SamplingParams =
        SamplingParams { temperature: 0.5, sample_top_k: 3, top_p: 1.0, min_p: 0.0 };

    fn line(start: usize) -> String {
        let mut rows = RouteRows::with_capacity(RouteDims { n_layers: 2, top_k: 1, n_experts: 4 }, 2);
        rows.append(&[0, 1, 2, 3][2 * start..]);
        let record = Record {
            tokens: Some([5, 6, 7].map(TokenId).to_vec()),
            prompt_tokens: Some(2),
            routes: Some(Routes::new(rows, start, vec![1, 3])),
            ..Record::unknown(GroupId(0), 0)
        };
        let mut line = Vec::new();
        r3_file::write(&record.view(), &mut line).unwrap();
        String::from_utf8(line).unwrap()
    }

    #[test]
    fn a_rollout_is_its_tokens_routes_and_layers() {
        let expected = ScoreInput {
            tokens: vec![5, 6, 7],
            routed_experts: Some(vec![vec![vec![0], vec![1]], vec![vec![2], vec![3]]]),
            layer_ids: Some(vec![1, 3]),
            temperature: None,
            supports: None,
        };
        assert_eq!(parse(&line(0), 0).unwrap(), expected);
    }

    #[test]
    fn routes_of_a_part_cannot_be_replayed() {
        let error = parse(&line(1), 0).unwrap_err();
        assert!(matches!(error, InputError::PartialRoutes { start: 1 }), "{error}");
    }

    /// A rollout of a prompt of one token and three more, of which the second was given.
    fn drawn(sampling: SamplingParams, supports: &[&[u32]], turns: &[Range<usize>]) -> String {
        let mut rows = SupportRows::default();
        supports.iter().for_each(|support| rows.push(support));
        let record = Record {
            tokens: Some([5, 6, 7, 8].map(TokenId).to_vec()),
            prompt_tokens: Some(1),
            sampling: Some(sampling),
            support: Some(rows).filter(|rows| rows.rows() > 0),
            turns: turns.to_vec(),
            ..Record::unknown(GroupId(0), 0)
        };
        let mut line = Vec::new();
        r3_file::write(&record.view(), &mut line).unwrap();
        String::from_utf8(line).unwrap()
    }

    const TURNS: [Range<usize>; 2] = [1..2, 3..4];

    #[test]
    fn a_truncated_rollout_is_scored_as_it_was_drawn() {
        let supports: [&[u32]; 3] = [&[6, 9], &[], &[8]];
        let input = parse(&drawn(TRUNCATED, &supports, &TURNS), 0).unwrap();
        assert_eq!(
            (input.temperature, input.supports),
            (Some(0.5), Some(supports.map(<[u32]>::to_vec).into()))
        );
        let greedy = SamplingParams { temperature: 0.0, ..TRUNCATED };
        let input = parse(&drawn(greedy, &[], &TURNS), 0).unwrap();
        assert_eq!((input.temperature, input.supports), (Some(1.0), None), "nothing was cut off");
    }

    #[test]
    fn a_truncated_rollout_is_not_scored_over_everything() {
        let missing = |supports: &[&[u32]], turns: &[Range<usize>]| match parse(
            &drawn(TRUNCATED, supports, turns),
            0,
        ) {
            Err(InputError::MissingSupport { position }) => position,
            other => panic!("{other:?}"),
        };
        assert_eq!(missing(&[], &TURNS), 1);
        assert_eq!(missing(&[&[6, 9], &[], &[]], &TURNS), 3);
        assert_eq!(missing(&[&[6, 9], &[], &[8]], &[]), 2, "all were sampled if nothing says otherwise");
    }

    #[test]
    fn a_broken_line_is_of_its_kind() {
        let error = parse(&line(0).replace("[5,6,7]", "[5,6,8]"), 4).unwrap_err();
        assert!(matches!(error, InputError::Wire(WireError::Sample { sample: 4, .. })), "{error}");
        let error = parse(r#"{"tokens": [1, 2], "text": ""}"#, 0).unwrap_err().to_string();
        assert!(error.starts_with("not a sequence to score: unknown field `text`"), "{error}");
        assert!(matches!(parse(r#"{"r3": 1, "group": 0, "index": 0}"#, 0), Err(InputError::NoTokens)));
    }
}
