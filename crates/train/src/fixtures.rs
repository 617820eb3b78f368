//! Rollouts and a policy for tests.

use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_core::rollout::{FinishReason, Reward, RolloutView};
use r3_core::routes::{RouteDims, RouteRows, write_ids};
use r3_core::support::SupportRows;
use r3_kernels::route_record::RouteRecord;
use r3_kernels::router::Routing;
use r3_model::autograd::{Packed, Policy};
use r3_model::config::ModelConfig;
use r3_model::init::FreshWeights;
use r3_recipe::algorithm::{Algorithm, Dapo, Grpo};
use r3_recipe::objective::ObjectiveTerms;

use crate::batch::{Group, Sample};
use crate::objective::Objective;

/// DAPO with its defaults.
pub(crate) fn dapo() -> Objective {
    Objective::new(&Algorithm::Dapo(Dapo::default()), &ObjectiveTerms::default(), 8)
}

/// GRPO with its defaults.
pub(crate) fn grpo() -> Objective {
    Objective::new(&Algorithm::Grpo(Grpo::default()), &ObjectiveTerms::default(), 8)
}

/// A dense layer between two MoE layers of 4 experts, top 2; weights large enough for uneven choices.
pub(crate) fn tiny_policy(seed: u64) -> Policy {
    policy_like(seed, false)
}

/// The same, perhaps with a head that is the embedding table.
pub(crate) fn policy_like(seed: u64, tied: bool) -> Policy {
    let raw = serde_json::json!({
        "model_type": "qwen3_moe", "vocab_size": 13, "hidden_size": 8, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 12,
        "moe_intermediate_size": 4, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": true,
        "mlp_only_layers": [1], "max_position_embeddings": 64, "initializer_range": 0.5,
        "tie_word_embeddings": tied,
    });
    let serde_json::Value::Object(raw) = raw else { unreachable!("it is written as one") };
    let config = ModelConfig::parse(raw, "config.json".as_ref()).unwrap();
    Policy::load(&FreshWeights::new(&config, seed), &config).unwrap()
}

/// Gives `rollout` the logprobs and routes that `policy` itself would have had when it sampled those tokens.
pub(crate) fn sampled_by(policy: &mut Policy, mut rollout: OwnedRollout) -> OwnedRollout {
    for token in &mut rollout.tokens {
        token.0 = (token.0 * 7 + rollout.index) % 13;
    }
    scored_by(policy, rollout)
}

/// The same for tokens as they are.
pub(crate) fn scored_by(policy: &mut Policy, mut rollout: OwnedRollout) -> OwnedRollout {
    let dims = policy.config().route_dims();
    let n_inputs = rollout.tokens.len() - 1;
    let mut record = RouteRecord::new(dims.n_layers, policy.config().router());
    record.start(n_inputs);
    let packed = Packed {
        tokens: &rollout.tokens[..n_inputs],
        targets: &rollout.tokens[1..],
        lengths: &[n_inputs],
        shared: &[],
    };
    let output = policy.logprobs(&packed, &mut Routing::Record(&mut record), 1.0).unwrap();
    rollout.rollout_logprobs = output.logprobs.to_vec1::<f32>().unwrap().split_off(rollout.prompt_tokens - 1);
    let mut rows = RouteRows::with_capacity(dims, n_inputs);
    rows.append(record.rows());
    rollout.routes = Some(rows);
    rollout
}

/// A rollout that owns what a [`RolloutView`] borrows.
#[derive(Clone, Debug)]
pub(crate) struct OwnedRollout {
    pub(crate) group: u64,
    pub(crate) index: u32,
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) prompt_tokens: usize,
    pub(crate) rollout_logprobs: Vec<f32>,
    pub(crate) version: u64,
    pub(crate) routes: Option<RouteRows>,
    pub(crate) support: Option<SupportRows>,
    pub(crate) mask: Option<Vec<u8>>,
    pub(crate) reward: Reward,
}

impl OwnedRollout {
    /// `n_prompt` and `n_sampled` tokens whose ids say which they are; logprobs are `-index`, `-index - 1`,
    /// ...
    pub(crate) fn new(group: u64, index: u32, lengths: (usize, usize), reward: f32) -> Self {
        let (prompt_tokens, n_sampled) = lengths;
        let first = u32::try_from(group).unwrap() * 1000 + index * 100;
        Self {
            group,
            index,
            tokens: (first..).take(prompt_tokens + n_sampled).map(TokenId).collect(),
            prompt_tokens,
            rollout_logprobs: (0..n_sampled).map(|n| -(index as f32) - n as f32).collect(),
            version: 0,
            routes: None,
            support: None,
            mask: None,
            reward: Reward::Score(reward),
        }
    }

    /// Adds rows in which token `t` takes experts `t`, `t + 1`, ... modulo `E`, shifted by the layer.
    pub(crate) fn with_routes(mut self, dims: RouteDims) -> Self {
        let n_rows = self.tokens.len() - 1;
        let mut rows = RouteRows::with_capacity(dims, n_rows);
        let mut bytes = vec![0; dims.row_bytes()];
        for row in 0..n_rows {
            let expert = |layer: usize, k: usize| ((row + layer + k) % dims.n_experts) as u16;
            let ids: Vec<u16> =
                (0..dims.n_layers).flat_map(|layer| (0..dims.top_k).map(move |k| expert(layer, k))).collect();
            write_ids(&ids, dims.width(), &mut bytes);
            rows.append(&bytes);
        }
        self.routes = Some(rows);
        self
    }
}

/// Lends `rollouts` with as many `versions` as any of them needs to a batch, through `use_groups`.
pub(crate) fn with_groups<R>(rollouts: &[OwnedRollout], use_groups: impl FnOnce(&[Group<'_>]) -> R) -> R {
    let versions: Vec<Vec<PolicyVersion>> = rollouts
        .iter()
        .map(|rollout| vec![PolicyVersion(rollout.version); rollout.tokens.len() - rollout.prompt_tokens])
        .collect();
    let mut groups: Vec<Group<'_>> = Vec::new();
    for (rollout, versions) in rollouts.iter().zip(&versions) {
        let sample = Sample {
            rollout: RolloutView {
                group: GroupId(rollout.group),
                index: rollout.index,
                tokens: &rollout.tokens,
                prompt_tokens: rollout.prompt_tokens,
                rollout_logprobs: &rollout.rollout_logprobs,
                versions,
                routes: rollout.routes.as_ref().map(RouteRows::view),
                support: rollout.support.as_ref().map(SupportRows::view),
                finish: FinishReason::Stop,
                cached_tokens: 0,
            },
            reward: rollout.reward,
            mask: rollout.mask.as_deref(),
        };
        match groups.iter_mut().find(|group| group.id == GroupId(rollout.group)) {
            Some(group) => group.samples.push(sample),
            None => groups.push(Group { id: GroupId(rollout.group), samples: vec![sample] }),
        }
    }
    use_groups(&groups)
}
