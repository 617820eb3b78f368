//! `r3 score`: logprobs and routes of given tokens, on either side, free or replayed.

use r3_core::ids::{PolicyVersion, TokenId};
use r3_core::routes::{RouteDims, RouteError, RouteRows, RouteView, write_ids};
use r3_core::support::SupportRows;
use r3_engine::config::EngineConfig;
use r3_engine::engine::Engine;
use r3_engine::error::EngineError;
use r3_engine::score::{Scored, ToScore};
use r3_kernels::gemm::Dtype;
use r3_kernels::lm_head::kept::Kept;
use r3_kernels::numerics::Numerics;
use r3_kernels::route_record::RouteRecord;
use r3_kernels::router::Routing;
use r3_model::autograd::{Packed, Policy, Precision, Scored as ScoredUnder};
use r3_model::checkpoint::Checkpoint;
use r3_model::config::ModelConfig;
use r3_model::error::ModelError;
use r3_model::executor::check_vocabulary;
use serde::{Deserialize, Serialize};

use crate::error::RunError;

/// One line of input.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScoreInput {
    /// The sequence, at least two tokens, `[T]`.
    pub tokens: Vec<u32>,
    /// `[T - 1][L][K]`: experts to take instead of the router's.
    #[serde(default)]
    pub routed_experts: Option<Vec<Vec<Vec<u16>>>>,
    /// `[L]`: which of the model's layers the experts are of; the model's MoE layers, if it is said.
    #[serde(default)]
    pub layer_ids: Option<Vec<u32>>,
    /// Divides the logits; 1 if it is not said.
    #[serde(default)]
    pub temperature: Option<f32>,
    /// Ids, ascending, that each of the last tokens is scored over, at most `T - 1` lists; an empty one is all of the
    /// vocabulary, as it is for tokens without a list.
    #[serde(default)]
    pub supports: Option<Vec<Vec<u32>>>,
}

/// One line of output.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ScoreOutput {
    /// `[T - 1]` nats, of tokens 1 on, under the distribution that the input asks for.
    pub logprobs: Vec<f32>,
    /// `[T - 1][L][K]`: the experts taken, in router order.
    pub routed_experts: Vec<Vec<Vec<u16>>>,
    /// `[L]`: which of the model's layers the rows are of.
    pub layer_ids: Vec<u32>,
    /// Where the live router would have taken another set of experts; only for replayed input.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub live_differs: Option<Vec<Difference>>,
}

/// A token and layer where the live router disagrees with the replayed experts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The token.
    pub position: usize,
    /// The model's layer.
    pub layer_id: u32,
    /// What was replayed.
    pub replayed: Vec<u16>,
    /// What the router would have chosen.
    pub live: Vec<u16>,
}

/// Which implementation of the forward scores.
pub enum Scorer {
    /// The rollout engine: scheduler, paged cache, plain buffers.
    Engine(Box<Engine>),
    /// The trainer: candle tensors, packed sequences.
    Trainer(Box<Policy>),
}

impl Scorer {
    /// The engine, with room for one sequence of the model's longest, or of `max_tokens` if that is shorter.
    ///
    /// # Errors
    /// If the weights cannot be loaded.
    pub fn engine(checkpoint: &Checkpoint, dtype: Dtype, max_tokens: usize) -> Result<Self, RunError> {
        let model = checkpoint.config();
        let mut config = EngineConfig {
            dtype,
            numerics: Numerics::Exact,
            kv_bytes: 0,
            block_tokens: 16,
            max_batch_tokens: 2048,
            max_running: 1,
            prefix_cache: false,
            capture_routes: true,
            replay: None,
        };
        let n_blocks = max_tokens.min(model.max_positions).div_ceil(config.block_tokens).max(1);
        config.kv_bytes = config.block_bytes(model) * n_blocks as u64;
        Ok(Self::Engine(Box::new(Engine::new(config, model, checkpoint, PolicyVersion(0))?)))
    }

    /// The trainer, whose products are of `dtype`.
    ///
    /// # Errors
    /// If the weights cannot be loaded.
    pub fn trainer(checkpoint: &Checkpoint, dtype: Dtype) -> Result<Self, RunError> {
        let policy = Policy::load(checkpoint, checkpoint.config())?;
        Ok(Self::Trainer(Box::new(policy.with_precision(Precision { dtype, recompute: false }))))
    }

    /// Scores one sequence.
    ///
    /// # Errors
    /// If there are fewer than two tokens, a token is outside the vocabulary, the sequence is too long, nothing can be
    /// divided by the temperature, routes or supports break their contract, or a logprob is not finite.
    pub fn score(&mut self, input: &ScoreInput) -> Result<ScoreOutput, RunError> {
        let tokens: Vec<TokenId> = input.tokens.iter().copied().map(TokenId).collect();
        if tokens.len() < 2 {
            return Err(EngineError::NothingToScore { tokens: tokens.len() }.into());
        }
        let model = match self {
            Self::Engine(engine) => engine.model(),
            Self::Trainer(policy) => policy.config(),
        };
        check_tokens(&tokens, model)?;
        let (dims, layer_ids) = (model.route_dims(), model.moe_layers());
        if let Some(found) = input.layer_ids.as_ref().filter(|&found| *found != layer_ids) {
            return Err(RunError::ReplayLayers { found: found.clone(), expected: layer_ids });
        }
        let replayed = input.routed_experts.as_ref().map(|rows| pack(rows, dims)).transpose()?;
        let view = replayed.as_ref().map(RouteRows::view);
        let support = input.supports.as_deref().map(support_rows);
        let support = support.as_ref().map(SupportRows::view);
        let temperature = divisor(input.temperature)?;
        let sequence = ToScore { tokens: &tokens, routes: view, temperature, support };
        let Scored { logprobs, live_routes: live } = match self {
            Self::Engine(engine) => engine.score(&sequence)?,
            Self::Trainer(policy) => score_trainer(policy, &sequence)?,
        };
        if let Some(at) = logprobs.iter().position(|logprob| !logprob.is_finite()) {
            return Err(EngineError::ScoreNonFinite { position: at + 1, logprob: logprobs[at] }.into());
        }
        Ok(ScoreOutput {
            logprobs,
            routed_experts: unpack(view.unwrap_or(live.view())),
            live_differs: view.map(|view| differences(view, live.view(), &layer_ids)),
            layer_ids,
        })
    }
}

fn check_tokens(tokens: &[TokenId], model: &ModelConfig) -> Result<(), ModelError> {
    let (vocab_size, max_positions) = (model.vocab_size, model.max_positions);
    if tokens.len() > max_positions {
        return Err(ModelError::TooLong { tokens: tokens.len(), max_positions });
    }
    check_vocabulary(tokens, vocab_size)
}

/// What logits can be divided by: not by what overflows when it is inverted.
fn divisor(temperature: Option<f32>) -> Result<f32, EngineError> {
    let temperature = temperature.unwrap_or(1.0);
    let divides = temperature > 0.0 && temperature.is_finite() && temperature.recip().is_finite();
    if divides { Ok(temperature) } else { Err(EngineError::Temperature { temperature }) }
}

fn support_rows(supports: &[Vec<u32>]) -> SupportRows {
    let mut rows = SupportRows::default();
    supports.iter().for_each(|support| rows.push(support));
    rows
}

fn score_trainer(policy: &mut Policy, sequence: &ToScore<'_>) -> Result<Scored, RunError> {
    let ToScore { tokens, routes: replayed, temperature, .. } = *sequence;
    sequence.check(policy.config().vocab_size)?;
    let dims = policy.config().route_dims();
    let n_inputs = tokens.len() - 1;
    let ids = replayed.map(layer_major);
    let mut live = RouteRecord::new(dims.n_layers, policy.config().router());
    live.start(n_inputs);
    let mut routing = match &ids {
        Some(ids) => Routing::Replay { ids, native: Some(&mut live) },
        None => Routing::Record(&mut live),
    };
    let packed =
        Packed { tokens: &tokens[..n_inputs], targets: &tokens[1..], lengths: &[n_inputs], shared: &[] };
    let kept = sequence.kept();
    let kept = kept.as_ref().map(|(sizes, ids)| Kept { sizes, ids });
    let output = policy.measure(&packed, &mut routing, ScoredUnder { temperature, kept })?;
    let logprobs = output.logprobs.to_vec1::<f32>().map_err(ModelError::from)?;
    let mut rows = RouteRows::with_capacity(dims, n_inputs);
    rows.append(live.rows());
    Ok(Scored { logprobs, live_routes: rows })
}

/// `[rows, L, K]` to `[L, rows, K]`.
fn layer_major(view: RouteView<'_>) -> Vec<u16> {
    (0..view.dims().n_layers).flat_map(|layer| view.layer(layer)).collect()
}

/// Nested JSON rows to bytes; rows that are not `[L][K]` or hold no possible id are refused by position.
fn pack(rows: &[Vec<Vec<u16>>], dims: RouteDims) -> Result<RouteRows, EngineError> {
    let mut packed = RouteRows::with_capacity(dims, rows.len());
    let mut bytes = vec![0; dims.row_bytes()];
    for (position, row) in rows.iter().enumerate() {
        let is_whole = row.len() == dims.n_layers && row.iter().all(|layer| layer.len() == dims.top_k);
        if !is_whole {
            return Err(EngineError::ReplayShape { position, layers: dims.n_layers, top_k: dims.top_k });
        }
        let ids: Vec<u16> = row.concat();
        if let Some(at) = ids.iter().position(|id| usize::from(*id) >= dims.n_experts) {
            return Err(EngineError::ReplayRoutes(RouteError::OutOfRange {
                row: position,
                layer: at / dims.top_k,
                expert: ids[at],
                n_experts: dims.n_experts,
            }));
        }
        write_ids(&ids, dims.width(), &mut bytes);
        packed.append(&bytes);
    }
    Ok(packed)
}

/// Rows as nested JSON, `[rows][L][K]`.
pub(crate) fn unpack(view: RouteView<'_>) -> Vec<Vec<Vec<u16>>> {
    let of_row = |row| (0..view.dims().n_layers).map(|layer| view.choice(row, layer).collect()).collect();
    (0..view.rows()).map(of_row).collect()
}

fn differences(replayed: RouteView<'_>, live: RouteView<'_>, layer_ids: &[u32]) -> Vec<Difference> {
    let (replayed, live) = (unpack(replayed), unpack(live));
    let mut found = Vec::new();
    for (position, (replayed, live)) in replayed.iter().zip(&live).enumerate() {
        for ((replayed, live), &layer_id) in replayed.iter().zip(live).zip(layer_ids) {
            if replayed.iter().any(|expert| !live.contains(expert)) {
                found.push(Difference { position, layer_id, replayed: replayed.clone(), live: live.clone() });
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIMS: RouteDims = RouteDims { n_layers: 2, top_k: 2, n_experts: 300 };

    fn rows() -> Vec<Vec<Vec<u16>>> {
        vec![vec![vec![0, 299], vec![7, 3]], vec![vec![5, 4], vec![1, 2]], vec![vec![8, 9], vec![298, 0]]]
    }

    #[test]
    fn nested_rows_go_to_bytes_and_back_in_router_order() {
        assert_eq!(unpack(pack(&rows(), DIMS).unwrap().view()), rows());
    }

    #[test]
    fn replay_takes_rows_layer_by_layer() {
        let packed = pack(&rows(), DIMS).unwrap();
        assert_eq!(layer_major(packed.view()), [0, 299, 5, 4, 8, 9, 7, 3, 1, 2, 298, 0]);
    }

    #[test]
    fn a_row_of_another_shape_is_refused_by_position() {
        for broken in [vec![], vec![vec![1, 2]], vec![vec![1, 2], vec![3]], vec![vec![1, 2]; 3]] {
            let mut rows = rows();
            rows[1] = broken;
            match pack(&rows, DIMS) {
                Err(EngineError::ReplayShape { position: 1, layers: 2, top_k: 2 }) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn an_id_that_does_not_fit_its_bytes_is_refused_rather_than_cut() {
        let narrow = RouteDims { n_experts: 256, ..DIMS };
        let error = pack(&rows(), narrow).unwrap_err();
        let EngineError::ReplayRoutes(RouteError::OutOfRange { row, layer, expert, n_experts }) = error
        else {
            panic!("{error}")
        };
        assert_eq!((row, layer, expert, n_experts), (0, 0, 299, 256));
    }

    #[test]
    fn routes_differ_as_sets_and_name_the_models_layer() {
        let replayed = pack(&rows(), DIMS).unwrap();
        let mut other = rows();
        other[0][1].reverse();
        other[2][0] = vec![9, 1];
        let live = pack(&other, DIMS).unwrap();
        let expected = Difference { position: 2, layer_id: 3, replayed: vec![8, 9], live: vec![9, 1] };
        assert_eq!(differences(replayed.view(), live.view(), &[3, 5]), [expected]);
    }
}
