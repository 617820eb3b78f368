//! What the router chose in one pass, in the layout in which routes are kept.

use std::ops::Range;

use crate::router::{Choice, RouterConfig};

/// What the router chose in one pass: rows of bytes `[T, L, K]`, as r3 keeps routes everywhere.
///
/// An id is one byte wide for at most 256 experts, else two, little-endian. Layers narrow their choices into a row
/// each, `[L, T, K]`, while these are in cache; when all have, the whole is turned into rows at once, a few tokens at a
/// time, which costs a third of scattering every choice over the rows of all tokens. Reusable, and never resized once
/// it has seen its largest `T`.
#[derive(Clone, Debug)]
pub struct RouteRecord {
    config: RouterConfig,
    n_tokens: usize,
    /// Bytes `[L, T, K]`.
    chosen: Vec<u8>,
    /// Bytes `[T, L, K]`, of this pass once they were asked for.
    rows: Vec<u8>,
    recorded: Vec<bool>,
}

impl RouteRecord {
    /// A record of `n_layers` MoE layers with the router `config`, for no token yet.
    #[must_use]
    pub fn new(n_layers: usize, config: RouterConfig) -> Self {
        let (chosen, rows, recorded) = (Vec::new(), Vec::new(), vec![false; n_layers]);
        Self { config, n_tokens: 0, chosen, rows, recorded }
    }

    /// Forgets the last pass and makes room for one of `n_tokens`.
    pub fn start(&mut self, n_tokens: usize) {
        self.n_tokens = n_tokens;
        let n_bytes = self.n_layers() * n_tokens * self.choice_bytes();
        self.chosen.resize(n_bytes, 0);
        self.rows.resize(n_bytes, 0);
        self.recorded.fill(false);
    }

    /// Tokens of the pass, `T`.
    #[must_use]
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// MoE layers, `L`.
    #[must_use]
    pub fn n_layers(&self) -> usize {
        self.recorded.len()
    }

    /// Keeps what `layer` chose. [`crate::router::choose`] does this for whoever records.
    ///
    /// # Panics
    /// If the pass has another number of tokens, or the choice was made by another router: an id is below the
    /// choice's `E`, so ids of a larger `E` might not fit the record's width.
    pub fn keep(&mut self, layer: usize, choice: &Choice) {
        let held = (self.n_tokens, self.config.n_experts, self.config.top_k);
        let (ids, top_k, n_experts) = (choice.ids(), choice.top_k(), choice.n_experts());
        assert!(
            layer < self.n_layers() && (ids.len(), n_experts, top_k) == (held.0 * held.2, held.1, held.2),
            "layer {layer} chose [{}] ids, {top_k} of {n_experts} experts each; the record has {} layers and \
             (T, E, K) = {held:?}",
            ids.len(),
            self.n_layers(),
        );
        let span = self.span(layer);
        match self.id_bytes() {
            1 => {
                for (byte, id) in self.chosen[span].iter_mut().zip(ids) {
                    [*byte, _] = id.to_le_bytes();
                }
            }
            _ => {
                for (bytes, id) in self.chosen[span].as_chunks_mut().0.iter_mut().zip(ids) {
                    *bytes = id.to_le_bytes();
                }
            }
        }
        self.recorded[layer] = true;
    }

    /// The pass's routes, bytes `[T, L, K]`.
    ///
    /// # Panics
    /// If a layer was not recorded in this pass: its ids would be another pass's.
    #[must_use]
    pub fn rows(&mut self) -> &[u8] {
        (0..self.n_layers()).for_each(|layer| self.assert_recorded(layer));
        let (n_tokens, choice_bytes) = (self.n_tokens, self.choice_bytes());
        let (chosen, rows) = (&self.chosen, &mut self.rows);
        match choice_bytes {
            2 => turn::<2>(chosen, n_tokens, rows),
            4 => turn::<4>(chosen, n_tokens, rows),
            8 => turn::<8>(chosen, n_tokens, rows),
            16 => turn::<16>(chosen, n_tokens, rows),
            _ => {
                for (at, choice) in chosen.chunks_exact(choice_bytes).enumerate() {
                    let (layer, token) = (at / n_tokens, at % n_tokens);
                    let to = (token * self.recorded.len() + layer) * choice_bytes;
                    rows[to..to + choice_bytes].copy_from_slice(choice);
                }
            }
        }
        rows
    }

    /// A copy of what was chosen at `layer`, `[T, K]`.
    ///
    /// # Panics
    /// If this pass has not come to that layer.
    #[must_use]
    pub fn layer(&self, layer: usize) -> Vec<u16> {
        self.assert_recorded(layer);
        let id = |bytes: &[u8]| match *bytes {
            [low, high] => u16::from_le_bytes([low, high]),
            _ => bytes[0].into(),
        };
        self.chosen[self.span(layer)].chunks_exact(self.id_bytes()).map(id).collect()
    }

    fn assert_recorded(&self, layer: usize) {
        assert!(self.recorded[layer], "layer {layer} was not recorded in this pass");
    }

    fn id_bytes(&self) -> usize {
        if self.config.n_experts <= 256 { 1 } else { 2 }
    }

    fn choice_bytes(&self) -> usize {
        self.config.top_k * self.id_bytes()
    }

    fn span(&self, layer: usize) -> Range<usize> {
        let n_bytes = self.n_tokens * self.choice_bytes();
        layer * n_bytes..(layer + 1) * n_bytes
    }
}

/// Tokens whose rows are written together: they stay in the nearest cache, and eight choices of eight bytes are a line.
const TOKENS: usize = 8;

/// Turns choices of `N` bytes from `[L, T]` to `[T, L]`. With `N` known, a choice is one load and one store.
fn turn<const N: usize>(chosen: &[u8], n_tokens: usize, rows: &mut [u8]) {
    let ((chosen, _), (rows, _)) = (chosen.as_chunks::<N>(), rows.as_chunks_mut::<N>());
    let n_layers = chosen.len() / n_tokens.max(1);
    for (block, rows) in rows.chunks_mut((TOKENS * n_layers).max(1)).enumerate() {
        for layer in 0..n_layers {
            let choices = &chosen[layer * n_tokens + block * TOKENS..];
            match choices.first_chunk::<TOKENS>() {
                Some(choices) if rows.len() == TOKENS * n_layers => {
                    for (token, choice) in choices.iter().enumerate() {
                        rows[token * n_layers + layer] = *choice;
                    }
                }
                _ => {
                    for (row, choice) in rows.chunks_exact_mut(n_layers).zip(choices) {
                        row[layer] = *choice;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::{Routing, choose};

    fn router(n_experts: usize, top_k: usize) -> RouterConfig {
        RouterConfig::softmax(n_experts, top_k, true)
    }

    /// A choice of `[T, K]` ids, made by replaying them.
    fn choice(config: RouterConfig, ids: &[u16]) -> Choice {
        let mut choice = Choice::empty();
        let scores = vec![0.0; ids.len() / config.top_k * config.n_experts];
        choose(&scores, config, 0, &mut Routing::Replay { ids, native: None }, &mut choice);
        choice
    }

    fn panic_of(body: impl FnOnce() + std::panic::UnwindSafe) -> String {
        *std::panic::catch_unwind(body).unwrap_err().downcast::<String>().unwrap()
    }

    /// Token `t` takes experts `t * 31 + layer * 7 + 0..K` modulo `E`.
    fn ids(layer: usize, n_tokens: usize, config: RouterConfig) -> Vec<u16> {
        let id = |t: usize, k: usize| u16::try_from((t * 31 + layer * 7 + k) % config.n_experts).unwrap();
        (0..n_tokens).flat_map(|t| (0..config.top_k).map(move |k| id(t, k))).collect()
    }

    #[test]
    fn rows_are_row_major_in_either_width_whatever_the_order_of_the_layers() {
        for (n_experts, top_k) in
            [(4, 1), (4, 2), (4, 3), (8, 4), (8, 8), (256, 8), (257, 8), (257, 4), (300, 1), (65_536, 3)]
        {
            let config = router(n_experts, top_k);
            let mut record = RouteRecord::new(3, config);
            for n_tokens in [5, 0, 19, 8, 2] {
                record.start(n_tokens);
                for layer in [2, 0, 1] {
                    record.keep(layer, &choice(config, &ids(layer, n_tokens, config)));
                }
                let layers: Vec<_> = (0..3).map(|layer| ids(layer, n_tokens, config)).collect();
                let mut expected: Vec<u8> = Vec::new();
                for t in 0..n_tokens {
                    for id in layers.iter().flat_map(|ids| &ids[t * top_k..(t + 1) * top_k]) {
                        expected.extend(&id.to_le_bytes()[..if n_experts <= 256 { 1 } else { 2 }]);
                    }
                }
                assert_eq!(record.rows(), expected, "{n_tokens} tokens, {top_k} of {n_experts}");
                assert_eq!([0, 1, 2].map(|layer| record.layer(layer)), layers[..]);
            }
        }
    }

    #[test]
    fn rows_of_another_pass_are_never_handed_out() {
        let config = router(4, 2);
        let mut record = RouteRecord::new(2, config);
        record.start(1);
        record.keep(0, &choice(config, &[3, 2]));
        record.keep(1, &choice(config, &[0, 1]));
        assert_eq!(record.rows(), [3, 2, 0, 1]);
        record.start(1);
        record.keep(0, &choice(config, &[1, 2]));
        assert_eq!(record.layer(0), [1, 2]);
        let (mut one, other) = (record.clone(), record);
        for message in [panic_of(move || drop(one.rows().to_vec())), panic_of(move || drop(other.layer(1)))] {
            assert_eq!(message, "layer 1 was not recorded in this pass");
        }
    }

    #[test]
    fn a_choice_of_another_shape_or_router_is_never_kept() {
        let config = router(256, 2);
        let (more_experts, other_k) = (router(257, 2), router(256, 1));
        let misfits = [
            (0, choice(more_experts, &[256, 0]), "layer 0 chose [2] ids, 2 of 257 experts each"),
            (0, choice(other_k, &[1, 2]), "layer 0 chose [2] ids, 1 of 256"),
            (0, choice(config, &[1, 2, 3, 4]), "layer 0 chose [4] ids"),
            (1, choice(config, &[1, 2]), "layer 1 chose"),
        ];
        for (layer, misfit, message) in misfits {
            let kept = panic_of(move || {
                let mut record = RouteRecord::new(1, config);
                record.start(1);
                record.keep(layer, &misfit);
            });
            assert!(kept.starts_with(message), "{kept}");
        }
    }
}
