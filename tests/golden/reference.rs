//! Reference tensors of `tests/golden/make.py`.

use std::collections::HashMap;
use std::path::PathBuf;

use r3_core::ids::TokenId;
use r3_core::routes::{IdWidth, RouteDims, RouteRows, write_ids};
use safetensors::{Dtype as StoredDtype, SafeTensors};

/// Tokens of a sequence, `T`.
pub(crate) const TOKENS: usize = 48;
/// Sequences, `B`.
pub(crate) const BATCH: usize = 4;
/// Largest difference of a logit or a logprob.
pub(crate) const LOGIT_TOLERANCE: f32 = 2e-5;

pub(crate) fn dir(model: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "../../tests/golden", model].iter().collect()
}

/// Reference tensors, integers as f32 (all are below 2^24).
pub(crate) struct Reference(pub(crate) HashMap<String, Vec<f32>>);

impl Reference {
    pub(crate) fn load(model: &str) -> Self {
        let bytes = std::fs::read(dir(model).join("reference.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let read = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
            let words = view.data().chunks_exact(4).map(|word| <[u8; 4]>::try_from(word).unwrap());
            let values = match view.dtype() {
                StoredDtype::F32 => words.map(f32::from_le_bytes).collect(),
                StoredDtype::I32 => words.map(|word| i32::from_le_bytes(word) as f32).collect(),
                other => panic!("{name} is {other:?}"),
            };
            (name, values)
        };
        Self(file.tensors().into_iter().map(read).collect())
    }

    pub(crate) fn get(&self, name: &str) -> &[f32] {
        self.0.get(name).unwrap_or_else(|| panic!("no reference {name}"))
    }

    pub(crate) fn ids(&self, name: &str) -> Vec<u16> {
        self.get(name).iter().map(|&id| id as u16).collect()
    }

    pub(crate) fn tokens(&self, name: &str) -> Vec<TokenId> {
        self.get(name).iter().map(|&id| TokenId(id as u32)).collect()
    }

    pub(crate) fn sequences(&self) -> Vec<Vec<TokenId>> {
        self.tokens("input_ids").chunks(TOKENS).map(<[TokenId]>::to_vec).collect()
    }
}

pub(crate) fn max_diff(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// The first `T - 1` route rows of sequence `index`, `[T - 1, L, K]`.
pub(crate) fn route_rows(reference: &Reference, prefix: &str, index: usize, dims: RouteDims) -> RouteRows {
    let ids = reference.ids(&format!("{prefix}topk_ids"));
    let mut rows = RouteRows::with_capacity(dims, TOKENS - 1);
    let mut bytes = vec![0; dims.row_bytes()];
    for token in 0..TOKENS - 1 {
        let row: Vec<u16> = (0..dims.n_layers)
            .flat_map(|layer| {
                let at = ((layer * BATCH + index) * TOKENS + token) * dims.top_k;
                ids[at..at + dims.top_k].to_vec()
            })
            .collect();
        write_ids(&row, IdWidth::U8, &mut bytes);
        rows.append(&bytes);
    }
    rows
}
