//! How often routes name each expert of each layer.

use std::fmt::{self, Write as _};

use r3_core::routes::RouteDims;

use crate::record::RoutesView;

/// Counts of one MoE layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerLoad {
    /// The model's layer.
    pub layer: u32,
    /// `[E]`: rows that name each expert.
    pub counts: Vec<u64>,
}

/// Columns of a [`Histogram`] at most.
const MAX_COLUMNS: usize = 16;

impl LayerLoad {
    /// Counts of no rows, for the layers and experts of `routes`.
    #[must_use]
    pub fn of(routes: &RoutesView<'_>) -> Vec<Self> {
        let n_experts = routes.rows.dims().n_experts;
        let layer_ids = routes.header.layer_ids.iter();
        layer_ids.map(|&layer| Self { layer, counts: vec![0; n_experts] }).collect()
    }

    /// Adds all rows of `routes` to `layers`.
    ///
    /// # Panics
    /// If `layers` are not of the layers and experts of `routes`, or an id is not below `E`.
    pub fn add(layers: &mut [Self], routes: &RoutesView<'_>) {
        let RouteDims { n_layers, top_k, .. } = routes.rows.dims();
        assert_eq!(layers.len(), n_layers, "the same layers");
        for row in 0..routes.rows.rows() {
            for (at, layer) in layers.iter_mut().enumerate() {
                for k in 0..top_k {
                    layer.counts[usize::from(routes.rows.expert(row, at, k))] += 1;
                }
            }
        }
    }

    /// Choices counted.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Experts named at least once.
    #[must_use]
    pub fn n_used(&self) -> usize {
        self.counts.iter().filter(|count| **count > 0).count()
    }

    /// The expert named most often, the first of several.
    #[must_use]
    pub fn busiest(&self) -> usize {
        let most = self.counts.iter().max();
        self.counts.iter().position(|count| Some(count) == most).unwrap_or_default()
    }

    /// How far the busiest expert lies above the mean, as a share of the mean; `None` if nothing was counted. veRL calls
    /// it `max_vio`.
    #[must_use]
    pub fn max_vio(&self) -> Option<f64> {
        let mean = self.total() as f64 / self.counts.len() as f64;
        (mean > 0.0).then(|| self.counts[self.busiest()] as f64 / mean - 1.0)
    }

    /// The counts as a line of bars, neighbouring experts in one if there are more than 16.
    #[must_use]
    pub fn histogram(&self) -> Histogram<'_> {
        Histogram { counts: &self.counts }
    }
}

/// A line of bars, each an eighth of the highest at least, and a space where nothing was counted.
pub struct Histogram<'a> {
    counts: &'a [u64],
}

impl fmt::Display for Histogram<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.counts.len().div_ceil(MAX_COLUMNS).max(1);
        let columns: Vec<u64> = self.counts.chunks(width).map(|experts| experts.iter().sum()).collect();
        let highest = columns.iter().copied().max().unwrap_or_default();
        for count in columns {
            f.write_char(match (count * 8).checked_div(highest) {
                None | Some(0) if count == 0 => ' ',
                None | Some(0 | 1) => '▁',
                Some(2) => '▂',
                Some(3) => '▃',
                Some(4) => '▄',
                Some(5) => '▅',
                Some(6) => '▆',
                Some(7) => '▇',
                Some(_) => '█',
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use r3_core::routes::RouteRows;

    use super::*;
    use crate::record::Routes;

    #[test]
    fn every_choice_is_counted_under_its_layer() {
        let mut rows = RouteRows::with_capacity(RouteDims { n_layers: 2, top_k: 2, n_experts: 4 }, 2);
        rows.append(&[0, 1, 3, 2, 1, 2, 3, 0]);
        let routes = Routes::new(rows, 0, vec![4, 7]);
        let mut layers = LayerLoad::of(&routes.view());
        LayerLoad::add(&mut layers, &routes.view());
        assert_eq!(layers[0], LayerLoad { layer: 4, counts: vec![1, 2, 1, 0] });
        assert_eq!(layers[1], LayerLoad { layer: 7, counts: vec![1, 0, 1, 2] });
        assert_eq!((layers[0].n_used(), layers[0].busiest(), layers[0].total()), (3, 1, 4));
        assert_eq!(layers[0].max_vio(), Some(1.0));
        assert_eq!(LayerLoad { layer: 0, counts: vec![0; 3] }.max_vio(), None);
    }

    #[test]
    fn bars_grow_with_counts_and_share_columns() {
        let bars = |counts: Vec<u64>| LayerLoad { layer: 0, counts }.histogram().to_string();
        assert_eq!(bars(vec![0, 1, 8, 4]), " ▁█▄");
        assert_eq!(bars(vec![0; 3]), "   ");
        assert_eq!(bars((0..40).collect()).chars().count(), 14, "three experts a column");
    }
}
