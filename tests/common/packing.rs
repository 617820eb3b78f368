//! Rollouts packed as the trainer packs them.

use r3_core::ids::TokenId;
use r3_core::routes::{RouteDims, RouteView};
use r3_core::support::SupportView;
use r3_kernels::lm_head::kept::Kept;
use r3_model::autograd::{Packed, Scored};

/// Sequences without padding: the inputs of each are its tokens but the last.
pub(crate) struct Packing {
    dims: RouteDims,
    tokens: Vec<TokenId>,
    targets: Vec<TokenId>,
    lengths: Vec<usize>,
    /// `[T, L, K]`.
    routes: Vec<u16>,
    support_sizes: Vec<u32>,
    support: Vec<u32>,
}

impl Packing {
    pub(crate) fn new(dims: RouteDims) -> Self {
        Self {
            dims,
            tokens: Vec::new(),
            targets: Vec::new(),
            lengths: Vec::new(),
            routes: Vec::new(),
            support_sizes: Vec::new(),
            support: Vec::new(),
        }
    }

    /// Appends `tokens` `[T]`, routed as `routes` `[T - 1, L, K]` says; the last ones were drawn from `support`, if they
    /// were truncated.
    pub(crate) fn add(
        &mut self,
        tokens: &[TokenId],
        routes: RouteView<'_>,
        support: Option<SupportView<'_>>,
    ) {
        let n_inputs = tokens.len() - 1;
        assert_eq!(routes.check(n_inputs), Ok(()));
        self.tokens.extend_from_slice(&tokens[..n_inputs]);
        self.targets.extend_from_slice(&tokens[1..]);
        self.lengths.push(n_inputs);
        if let Some(support) = support {
            self.support_sizes.resize(self.tokens.len() - support.rows(), 0);
            self.support_sizes.extend_from_slice(support.sizes());
            self.support.extend(support.ids().iter().map(|token| token.0));
        }
        self.support_sizes.resize(self.tokens.len(), 0);
        for row in 0..n_inputs {
            for layer in 0..self.dims.n_layers {
                self.routes.extend(routes.choice(row, layer));
            }
        }
    }

    /// Targets are scored at `temperature`, over what they were drawn from.
    pub(crate) fn scored(&self, temperature: f32) -> Scored<'_> {
        let Self { support_sizes: sizes, support: ids, .. } = self;
        let is_truncated = sizes.iter().any(|&size| size > 0);
        Scored { temperature, kept: is_truncated.then_some(Kept { sizes, ids }) }
    }

    pub(crate) fn packed(&self) -> Packed<'_> {
        Packed { tokens: &self.tokens, targets: &self.targets, lengths: &self.lengths, shared: &[] }
    }

    /// The routes as replay takes them, `[L, T, K]`.
    pub(crate) fn replayed(&self) -> Vec<u16> {
        let RouteDims { n_layers, top_k, .. } = self.dims;
        let rows = |layer: usize| {
            self.routes.chunks_exact(n_layers * top_k).flat_map(move |row| &row[layer * top_k..][..top_k])
        };
        (0..n_layers).flat_map(rows).copied().collect()
    }
}
