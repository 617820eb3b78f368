//! What a reader of routes must know of the model.

use r3_core::routes::RouteDims;

use crate::error::ModelError;

/// Layers a model has at most; the deepest public ones have fewer than 200.
const MAX_LAYERS: usize = 1 << 16;

/// Which layers of a model route, and over what. Checked once, when it is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelShape {
    n_layers: usize,
    layer_ids: Vec<u32>,
    dims: RouteDims,
}

impl ModelShape {
    /// A model of `n_layers` decoder layers, of which `layer_ids`, ascending, are MoE layers that send every token to
    /// `top_k` of `n_experts` experts.
    ///
    /// # Errors
    /// If there is no MoE layer, an id is not ascending or not below `n_layers`, there are no experts, more than
    /// 65,536, or fewer than `top_k`.
    pub fn new(
        n_layers: usize,
        layer_ids: Vec<u32>,
        top_k: usize,
        n_experts: usize,
    ) -> Result<Self, ModelError> {
        if n_layers > MAX_LAYERS {
            return Err(ModelError::TooDeep { n_layers, max_layers: MAX_LAYERS });
        }
        let dims = checked_dims(&layer_ids, top_k, n_experts)?;
        match layer_ids.last() {
            Some(&last) if last as usize >= n_layers => {
                Err(ModelError::LayerBeyond { layer_id: last, n_layers })
            }
            _ => Ok(Self { n_layers, layer_ids, dims }),
        }
    }

    /// Decoder layers, dense ones included.
    #[must_use]
    pub fn n_layers(&self) -> usize {
        self.n_layers
    }

    /// The MoE layers, ascending, `[L]`.
    #[must_use]
    pub fn layer_ids(&self) -> &[u32] {
        &self.layer_ids
    }

    /// Shape of a route row.
    #[must_use]
    pub fn dims(&self) -> RouteDims {
        self.dims
    }

    /// For each decoder layer, dense ones included, whether it routes.
    pub(crate) fn is_moe(&self) -> Vec<bool> {
        let mut is_moe = vec![false; self.n_layers];
        for &layer in &self.layer_ids {
            is_moe[layer as usize] = true;
        }
        is_moe
    }
}

/// The shape of rows over `layer_ids`, if a model may have it.
pub(crate) fn checked_dims(
    layer_ids: &[u32],
    top_k: usize,
    n_experts: usize,
) -> Result<RouteDims, ModelError> {
    if layer_ids.is_empty() {
        return Err(ModelError::NoMoeLayer);
    }
    if let Some(pair) = layer_ids.windows(2).find(|pair| pair[0] >= pair[1]) {
        return Err(ModelError::LayerOrder { before: pair[0], after: pair[1] });
    }
    if !(1..=n_experts).contains(&top_k) || n_experts > 1 << 16 {
        return Err(ModelError::Experts { top_k, n_experts });
    }
    Ok(RouteDims { n_layers: layer_ids.len(), top_k, n_experts })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dense_layers_lie_between_the_moe_layers() {
        let model = ModelShape::new(4, vec![1, 3], 2, 8).unwrap();
        assert_eq!(model.dims(), RouteDims { n_layers: 2, top_k: 2, n_experts: 8 });
        assert_eq!(model.is_moe(), [false, true, false, true]);
    }

    #[test]
    fn a_model_that_cannot_be_is_refused() {
        let refused = |n_layers, layer_ids: &[u32], top_k, n_experts| {
            ModelShape::new(n_layers, layer_ids.to_vec(), top_k, n_experts).unwrap_err()
        };
        assert_eq!(refused(4, &[], 2, 8), ModelError::NoMoeLayer);
        assert_eq!(refused(4, &[2, 1], 2, 8), ModelError::LayerOrder { before: 2, after: 1 });
        assert_eq!(refused(4, &[1, 1], 2, 8), ModelError::LayerOrder { before: 1, after: 1 });
        assert_eq!(refused(4, &[1, 4], 2, 8), ModelError::LayerBeyond { layer_id: 4, n_layers: 4 });
        assert_eq!(refused(4, &[1], 9, 8), ModelError::Experts { top_k: 9, n_experts: 8 });
        assert_eq!(refused(4, &[1], 0, 8), ModelError::Experts { top_k: 0, n_experts: 8 });
        let too_wide = ModelError::Experts { top_k: 2, n_experts: 65_537 };
        assert_eq!(refused(4, &[1], 2, 65_537), too_wide);
        let too_deep = ModelError::TooDeep { n_layers: usize::MAX, max_layers: 65_536 };
        assert_eq!(refused(usize::MAX, &[1], 2, 8), too_deep);
    }
}
