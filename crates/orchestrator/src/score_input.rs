//! Lines that `r3 score` reads: sequences, or rollouts as `r3 rollout` writes them.

use r3_wire::error::WireError;
use r3_wire::r3_file;
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
    #[error("the rollout was sampled from a part of the vocabulary, and scoring is over all of it")]
    Truncated,
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
            Self::Truncated => "sample without top-p, top-k and min-p to compare logprobs".into(),
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
/// Of a rollout, tokens and routes are taken; its own logprobs are what to compare the result with.
///
/// # Errors
/// If it is neither a sequence nor a whole rollout, has routes of only a part of it, or was sampled from a truncated
/// distribution, which its logprobs would not compare with.
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
    if record.support.is_some() {
        return Err(InputError::Truncated);
    }
    let tokens = record.tokens.ok_or(InputError::NoTokens)?;
    let tokens = tokens.into_iter().map(|token| token.0).collect();
    let Some(routes) = record.routes else {
        return Ok(ScoreInput { tokens, routed_experts: None, layer_ids: None });
    };
    if routes.start > 0 {
        return Err(InputError::PartialRoutes { start: routes.start });
    }
    let routed_experts = Some(unpack(routes.rows.view()));
    Ok(ScoreInput { tokens, routed_experts, layer_ids: Some(routes.layer_ids) })
}

fn json(error: &serde_json::Error) -> InputError {
    let message = error.to_string();
    // serde_json counts the lines of what it was handed, and that is one.
    let reason = message.split(" at line 1 column").next().unwrap_or(&message).to_owned();
    InputError::Json { column: error.column(), reason }
}

#[cfg(test)]
mod tests {
    use r3_core::ids::{GroupId, TokenId};
    use r3_core::routes::{RouteDims, RouteRows};
    use r3_wire::record::{Record, Routes};

    use super::*;

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
        };
        assert_eq!(parse(&line(0), 0).unwrap(), expected);
    }

    #[test]
    fn routes_of_a_part_cannot_be_replayed() {
        let error = parse(&line(1), 0).unwrap_err();
        assert!(matches!(error, InputError::PartialRoutes { start: 1 }), "{error}");
    }

    #[test]
    fn a_truncated_rollout_is_not_scored_over_everything() {
        let truncated = line(0).replace(r#""routed_experts""#, r#""supports":[[4,7]],"routed_experts""#);
        let error = parse(&truncated, 0).unwrap_err();
        assert!(matches!(error, InputError::Truncated), "{error}");
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
