//! Made-up rollouts for the tests of frames.

use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_core::rollout::{FinishReason, Reward, RolloutView};
use r3_core::routes::{RouteDims, RouteRows, write_ids};
use r3_core::support::SupportRows;
use r3_ring::frame::FrameMeta;

/// What a made-up rollout looks like from outside.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) prompt_tokens: usize,
    pub(crate) n_sampled: usize,
    pub(crate) routes: Option<RouteDims>,
    /// Tokens that a draw keeps at most; 0 keeps all.
    pub(crate) max_support: usize,
}

/// A rollout that owns everything a frame carries.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    pub(crate) group: u64,
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) prompt_tokens: usize,
    pub(crate) logprobs: Vec<f32>,
    pub(crate) versions: Vec<PolicyVersion>,
    pub(crate) mask: Vec<u8>,
    pub(crate) routes: Option<RouteRows>,
    pub(crate) support: Option<SupportRows>,
    pub(crate) layer_ids: Vec<u32>,
    pub(crate) reward: Reward,
    pub(crate) finish: FinishReason,
}

impl Sample {
    /// The rollout of `group`: the same group and shape always make the same rollout.
    pub(crate) fn new(group: u64, shape: Shape) -> Self {
        let mut random = Random(group);
        let Shape { prompt_tokens, n_sampled, routes, max_support } = shape;
        let n_tokens = prompt_tokens + n_sampled;
        let rows = n_tokens - usize::from(n_sampled > 0);
        let mut sample = Self {
            group,
            tokens: (0..n_tokens).map(|_| TokenId(random.below(1 << 32) as u32)).collect(),
            prompt_tokens,
            logprobs: (0..n_sampled).map(|_| -(random.below(1000) as f32) / 64.0).collect(),
            versions: (0..n_sampled).map(|_| PolicyVersion(random.below(1 << 40))).collect(),
            mask: (0..n_sampled).map(|_| random.below(2) as u8).collect(),
            support: None,
            routes: routes.map(|dims| route_rows(dims, rows, &mut random)),
            layer_ids: (0..routes.map_or(0, |dims| dims.n_layers as u32))
                .map(|layer| 2 * layer + 1)
                .collect(),
            reward: if random.below(4) == 0 {
                Reward::Failed
            } else {
                Reward::Score(random.below(9) as f32 - 4.0)
            },
            finish: FinishReason::from_byte(random.below(3) as u8).unwrap(),
        };
        sample.support = (max_support > 0).then(|| supports(&sample, max_support, &mut random));
        sample
    }

    pub(crate) fn rollout(&self) -> RolloutView<'_> {
        RolloutView {
            group: GroupId(self.group),
            index: self.group as u32 % 7,
            tokens: &self.tokens,
            prompt_tokens: self.prompt_tokens,
            rollout_logprobs: &self.logprobs,
            versions: &self.versions,
            routes: self.routes.as_ref().map(RouteRows::view),
            support: self.support.as_ref().map(SupportRows::view),
            finish: self.finish,
            cached_tokens: self.prompt_tokens / 2,
        }
    }

    pub(crate) fn meta(&self) -> FrameMeta<'_> {
        FrameMeta {
            layer_ids: &self.layer_ids,
            weight_epoch: self.group + 3,
            model_hash: !self.group,
            reward: self.reward,
            mask: Some(&self.mask),
        }
    }
}

fn route_rows(dims: RouteDims, rows: usize, random: &mut Random) -> RouteRows {
    let mut routes = RouteRows::with_capacity(dims, rows);
    let mut row_bytes = vec![0; dims.row_bytes()];
    for row in 0..rows {
        let mut ids = Vec::with_capacity(dims.row_ids());
        for _ in 0..dims.n_layers {
            // Distinct and unsorted; the first row is not expert 0, which everywhere would mean "not
            // captured".
            let first =
                if row == 0 { dims.n_experts - 1 } else { random.below(dims.n_experts as u64) as usize };
            ids.extend((0..dims.top_k).map(|k| ((first + k) % dims.n_experts) as u16));
        }
        write_ids(&ids, dims.width(), &mut row_bytes);
        routes.append(&row_bytes);
    }
    routes
}

/// What the tokens that are masked in may have been drawn from.
fn supports(sample: &Sample, max_support: usize, random: &mut Random) -> SupportRows {
    let mut supports = SupportRows::default();
    for (token, mask) in sample.tokens[sample.prompt_tokens..].iter().zip(&sample.mask) {
        let others = random.below(max_support as u64);
        let mut support: Vec<u32> = (0..others).map(|_| random.below(1 << 32) as u32).collect();
        support.push(token.0);
        support.sort_unstable();
        support.dedup();
        supports.push(if *mask == 1 { &support } else { &[] });
    }
    supports
}

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }
}
