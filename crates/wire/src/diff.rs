//! How far the routes of two records of the same tokens differ.
//!
//! Experts are compared as sets, as the R3 paper counts (arXiv 2510.11370, "router discrepancy"); another order of the
//! same experts is counted apart, since it changes floating-point sums but not the choice.

use std::ops::AddAssign;

use r3_core::count::counted;

use crate::record::{Record, RoutesView};

/// Counts of one comparison, or of several added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Discrepancy {
    /// Tokens compared: rows that both have.
    pub tokens: usize,
    /// Pairs of token and MoE layer compared.
    pub choices: usize,
    /// Pairs with other experts.
    pub choices_differing: usize,
    /// Pairs with the same experts in another order.
    pub choices_reordered: usize,
    /// Tokens with other experts in at least one layer.
    pub tokens_differing: usize,
}

impl Discrepancy {
    /// Share of pairs of token and MoE layer with other experts; `None` if nothing was compared.
    #[must_use]
    pub fn token_layer_frac(&self) -> Option<f64> {
        share(self.choices_differing, self.choices)
    }

    /// Share of pairs with the same experts in another order.
    #[must_use]
    pub fn reordered_frac(&self) -> Option<f64> {
        share(self.choices_reordered, self.choices)
    }

    /// Share of tokens with other experts in at least one layer.
    #[must_use]
    pub fn token_any_frac(&self) -> Option<f64> {
        share(self.tokens_differing, self.tokens)
    }

    /// Layers with other experts, a token, on average.
    #[must_use]
    pub fn layers_per_token(&self) -> Option<f64> {
        share(self.choices_differing, self.tokens)
    }
}

impl AddAssign for Discrepancy {
    fn add_assign(&mut self, other: Self) {
        self.tokens += other.tokens;
        self.choices += other.choices;
        self.choices_differing += other.choices_differing;
        self.choices_reordered += other.choices_reordered;
        self.tokens_differing += other.tokens_differing;
    }
}

fn share(part: usize, whole: usize) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// A token and layer where two records have other experts, or the same in another order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Number of the sample in both files, from 0.
    pub sample: usize,
    /// The turn whose forward computed the row.
    pub turn: usize,
    /// The model's layer.
    pub layer: u32,
    /// The token.
    pub position: usize,
    /// Experts of the first record, in router order.
    pub a: Vec<u16>,
    /// Experts of the second.
    pub b: Vec<u16>,
}

/// Why two files or records cannot be compared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum Incomparable {
    #[error("the first file has {}, the second {b}", counted(*a, "sample"))]
    Samples { a: usize, b: usize },
    #[error("sample {sample}: the {which} file has no routes")]
    NoRoutes { sample: usize, which: &'static str },
    #[error("sample {sample}: routes of layers {a:?} and {b:?}")]
    Layers { sample: usize, a: Vec<u32>, b: Vec<u32> },
    #[error("sample {sample}: {a} and {b} experts a token")]
    TopK { sample: usize, a: usize, b: usize },
    #[error("sample {sample}: the tokens differ from position {position} on")]
    Tokens { sample: usize, position: usize },
    #[error("sample {sample}: rows of positions {}..{} and {}..{} have none in common", a[0], a[1], b[0], b[1])]
    Rows { sample: usize, a: [usize; 2], b: [usize; 2] },
}

impl Incomparable {
    /// What the user can change, printed as `hint: ...`.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::Samples { .. } | Self::Rows { .. } => {
                "write both files from the same samples, in the same order"
            }
            Self::NoRoutes { .. } => "sample with `router_replay: { mode: r3 }`",
            Self::Layers { .. } | Self::TopK { .. } => "compare routes of one model",
            Self::Tokens { .. } => {
                "compare routes of the same tokens: score the tokens of one file on the other side"
            }
        }
        .into()
    }
}

/// Compares the rows that `a` and `b`, both sample `sample` of their files, have in common. The second result is the
/// first pair that differs as sets, or, if none does, in order.
///
/// # Errors
/// If one has no routes, or they are not of the same layers, `K` and tokens, or have no row in common.
pub fn compare(
    a: &Record,
    b: &Record,
    sample: usize,
) -> Result<(Discrepancy, Option<Difference>), Incomparable> {
    let (ours, theirs) = comparable(a, b, sample)?;
    let (start, end) = overlap(&ours, &theirs);
    let (layer_ids, top_k) = (ours.header.layer_ids, ours.rows.dims().top_k);
    let mut counts = Discrepancy { tokens: end - start, ..Discrepancy::default() };
    counts.choices = counts.tokens * layer_ids.len();
    let (mut first_other, mut first_reordered) = (None, None);
    let (mut x, mut y) = (vec![0; top_k], vec![0; top_k]);
    for position in start..end {
        let before = counts.choices_differing;
        for (layer, &layer_id) in layer_ids.iter().enumerate() {
            ours.rows.copy_layer(position - ours.header.start, layer, &mut x);
            theirs.rows.copy_layer(position - theirs.header.start, layer, &mut y);
            if x == y {
                continue;
            }
            let (mut sorted_x, mut sorted_y) = (x.clone(), y.clone());
            sorted_x.sort_unstable();
            sorted_y.sort_unstable();
            let first = if sorted_x == sorted_y {
                counts.choices_reordered += 1;
                &mut first_reordered
            } else {
                counts.choices_differing += 1;
                &mut first_other
            };
            first.get_or_insert_with(|| Difference {
                sample,
                turn: a.sample(crate::layout::Layout::R3, sample).turn_of(position),
                layer: layer_id,
                position,
                a: x.clone(),
                b: y.clone(),
            });
        }
        counts.tokens_differing += usize::from(counts.choices_differing > before);
    }
    Ok((counts, first_other.or(first_reordered)))
}

fn comparable<'a>(
    a: &'a Record,
    b: &'a Record,
    sample: usize,
) -> Result<(RoutesView<'a>, RoutesView<'a>), Incomparable> {
    let missing = |which| Incomparable::NoRoutes { sample, which };
    let ours = a.routes.as_ref().ok_or_else(|| missing("first"))?.view();
    let theirs = b.routes.as_ref().ok_or_else(|| missing("second"))?.view();
    let layers = [ours, theirs].map(|routes| routes.header.layer_ids.to_vec());
    if layers[0] != layers[1] {
        let [a, b] = layers;
        return Err(Incomparable::Layers { sample, a, b });
    }
    let [x, y] = [ours, theirs].map(|routes| routes.rows.dims().top_k);
    if x != y {
        return Err(Incomparable::TopK { sample, a: x, b: y });
    }
    if let (Some(x), Some(y)) = (&a.tokens, &b.tokens)
        && x != y
    {
        let position = x.iter().zip(y).take_while(|(x, y)| x == y).count();
        return Err(Incomparable::Tokens { sample, position });
    }
    let (start, end) = overlap(&ours, &theirs);
    let span = |routes: &RoutesView<'_>| [routes.header.start, routes.header.start + routes.rows.rows()];
    if start > end || (start == end && span(&ours) != span(&theirs)) {
        return Err(Incomparable::Rows { sample, a: span(&ours), b: span(&theirs) });
    }
    Ok((ours, theirs))
}

/// Positions from the later start to the earlier end; reversed if there is a gap between.
fn overlap(a: &RoutesView<'_>, b: &RoutesView<'_>) -> (usize, usize) {
    let end = |routes: &RoutesView<'_>| routes.header.start + routes.rows.rows();
    (a.header.start.max(b.header.start), end(a).min(end(b)))
}

#[cfg(test)]
mod tests {
    use r3_core::ids::{GroupId, TokenId};
    use r3_core::routes::{RouteDims, RouteRows};

    use super::*;
    use crate::record::Routes;

    fn record(start: usize, rows: &[u8]) -> Record {
        let mut packed = RouteRows::with_capacity(RouteDims { n_layers: 2, top_k: 2, n_experts: 8 }, 4);
        packed.append(rows);
        let routes = Routes::new(packed, start, vec![1, 3]);
        Record { routes: Some(routes), ..Record::unknown(GroupId(0), 0) }
    }

    const ROWS: [u8; 12] = [0, 1, 2, 3, 4, 5, 6, 7, 0, 2, 4, 6];

    #[test]
    fn equal_routes_do_not_differ() {
        let a = record(0, &ROWS);
        let (counts, first) = compare(&a, &a, 0).unwrap();
        assert_eq!((counts.tokens, counts.choices, first), (3, 6, None));
        assert_eq!((counts.token_layer_frac(), counts.token_any_frac()), (Some(0.0), Some(0.0)));
    }

    #[test]
    fn sets_and_orders_are_counted_apart_and_the_first_other_set_is_named() {
        let a = record(0, &ROWS);
        // Row 0: reordered in layer 1. Row 1: others in both layers. Row 2: the same.
        let b = record(0, &[1, 0, 2, 3, 4, 6, 5, 7, 0, 2, 4, 6]);
        let (counts, first) = compare(&a, &b, 9).unwrap();
        assert_eq!((counts.choices_differing, counts.choices_reordered, counts.tokens_differing), (2, 1, 1));
        assert_eq!(counts.token_layer_frac(), Some(2.0 / 6.0));
        assert_eq!(counts.reordered_frac(), Some(1.0 / 6.0));
        assert_eq!(counts.token_any_frac(), Some(1.0 / 3.0));
        assert_eq!(counts.layers_per_token(), Some(2.0 / 3.0));
        let expected = Difference { sample: 9, turn: 0, layer: 1, position: 1, a: vec![4, 5], b: vec![4, 6] };
        assert_eq!(first, Some(expected));
        let mut sum = counts;
        sum += counts;
        assert_eq!((sum.tokens, sum.choices, sum.token_any_frac()), (6, 12, Some(1.0 / 3.0)));
        let reordered = record(0, &[1, 0, 2, 3, 4, 5, 6, 7, 0, 2, 4, 6]);
        let (_, first) = compare(&a, &reordered, 0).unwrap();
        assert_eq!(first.map(|first| (first.position, first.layer)), Some((0, 1)));
    }

    #[test]
    fn rows_are_compared_by_position() {
        let (a, b) = (record(0, &ROWS), record(1, &ROWS[4..]));
        let (counts, first) = compare(&a, &b, 0).unwrap();
        assert_eq!((counts.tokens, first), (2, None));
    }

    #[test]
    fn what_is_not_of_the_same_model_and_tokens_cannot_be_compared() {
        let a = record(0, &ROWS);
        let refused = |change: &dyn Fn(&mut Record)| {
            let mut b = a.clone();
            change(&mut b);
            compare(&a, &b, 2).unwrap_err()
        };
        assert_eq!(refused(&|b| b.routes = None), Incomparable::NoRoutes { sample: 2, which: "second" });
        let layers = refused(&|b| b.routes.as_mut().unwrap().layer_ids = vec![1, 2]);
        assert_eq!(layers, Incomparable::Layers { sample: 2, a: vec![1, 3], b: vec![1, 2] });
        for start in [3, 4] {
            let apart = refused(&|b| b.routes.as_mut().unwrap().start = start);
            assert_eq!(apart, Incomparable::Rows { sample: 2, a: [0, 3], b: [start, start + 3] });
        }
        let mut a = a.clone();
        a.tokens = Some([1, 2, 3, 4].map(TokenId).to_vec());
        let mut b = a.clone();
        b.tokens.as_mut().unwrap()[2] = TokenId(9);
        assert_eq!(compare(&a, &b, 2), Err(Incomparable::Tokens { sample: 2, position: 2 }));
        b.tokens.as_mut().unwrap().truncate(2);
        assert_eq!(compare(&a, &b, 2), Err(Incomparable::Tokens { sample: 2, position: 2 }));
    }
}
