//! The transformer, written once.

use r3_core::ids::TokenId;
use r3_kernels::router::Routing;

use crate::error::ModelError;
use crate::executor::{DenseMlp, Executor, Layer, Mlp, Weights};

/// Runs the decoder over packed `tokens` `[T]` and returns the final-norm hidden states `[T, D]`.
///
/// `attend` says which tokens see which; `routing` says who chooses the experts. Both are arguments, so the
/// rollout's recorded forward and the trainer's replayed one are this same function (Qwen3, arXiv 2505.09388;
/// R3, arXiv 2510.11370).
///
/// # Errors
/// If the executor fails.
pub fn forward<E: Executor>(
    exec: &mut E,
    weights: &Weights<E>,
    tokens: &[TokenId],
    attend: &mut E::Attend<'_>,
    routing: &mut Routing<'_>,
) -> Result<E::Act, ModelError> {
    let mut x = exec.embed(&weights.embed, tokens)?;
    let mut h = exec.rms_norm(&x, &weights.layers[0].input_norm)?;
    let mut moe_layer = 0;
    for (index, layer) in weights.layers.iter().enumerate() {
        let [stream, answer] = decoder_layer(exec, (index, layer), [x, h], attend, (moe_layer, routing))?;
        let next_norm = weights.layers.get(index + 1).map_or(&weights.norm, |layer| &layer.input_norm);
        let ends = exec.add_rms_norm(stream, answer, next_norm)?;
        [x, h] = exec.end_layer(ends);
        moe_layer += usize::from(weights.config.is_moe[index]);
    }
    exec.release(x);
    Ok(h)
}

/// One decoder layer of the residual stream `x` and its norm `h`, `[T, D]` each: the stream after attention, and what is
/// yet to be added to it. `moe_layer` counts the MoE layers before this one.
///
/// # Errors
/// If the executor fails.
pub(crate) fn decoder_layer<E: Executor>(
    exec: &mut E,
    (index, layer): (usize, &Layer<E>),
    [x, h]: [E::Act; 2],
    attend: &mut E::Attend<'_>,
    (moe_layer, routing): (usize, &mut Routing<'_>),
) -> Result<[E::Act; 2], ModelError> {
    let mixed = attention(exec, (index, layer), h, attend)?;
    let [x, h] = exec.add_rms_norm(x, mixed, &layer.post_norm)?;
    let y = match &layer.mlp {
        Mlp::Moe { router, bias, experts, shared } => {
            // First, so that running back the experts are the first to give `h` a gradient.
            let beside = shared.as_ref().map(|shared| dense_mlp(exec, &h, shared)).transpose()?;
            let scores = exec.linear(&h, router)?;
            let routed = exec.route(scores, bias.as_ref(), moe_layer, routing)?;
            let y = exec.experts(&h, routed, experts)?;
            match beside {
                Some(beside) => exec.add(y, beside)?,
                None => y,
            }
        }
        Mlp::Dense(mlp) => dense_mlp(exec, &h, mlp)?,
    };
    exec.release(h);
    Ok([x, y])
}

fn dense_mlp<E: Executor>(exec: &mut E, h: &E::Act, mlp: &DenseMlp<E>) -> Result<E::Act, ModelError> {
    let gate_up = exec.linear(h, &mlp.gate_up)?;
    let inner = exec.silu_mul(gate_up)?;
    let y = exec.linear(&inner, &mlp.down)?;
    exec.release(inner);
    Ok(y)
}

/// Logits `[T, V]` of hidden states `[T, D]`.
///
/// # Errors
/// If the executor fails.
pub fn logits<E: Executor>(
    exec: &mut E,
    weights: &Weights<E>,
    hidden: &E::Act,
) -> Result<E::Act, ModelError> {
    exec.linear(hidden, weights.head.as_ref().unwrap_or(&weights.embed))
}

/// Attention with per-head query and key norms, output projection included.
fn attention<E: Executor>(
    exec: &mut E,
    (index, layer): (usize, &Layer<E>),
    h: E::Act,
    attend: &mut E::Attend<'_>,
) -> Result<E::Act, ModelError> {
    let [q, k, v] = exec.qkv(&h, [&layer.q, &layer.k, &layer.v])?;
    exec.release(h);
    let q = exec.norm_rope(q, &layer.q_norm, attend)?;
    let k = exec.norm_rope(k, &layer.k_norm, attend)?;
    let mixed = exec.attend(index, [q, k, v], attend)?;
    let out = exec.linear(&mixed, &layer.o)?;
    exec.release(mixed);
    Ok(out)
}
