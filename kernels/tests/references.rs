//! Forward passes against plain formulas, at the edges of registers, panels and tiles, and with as many experts as models
//! have. The ops' own tests go through smaller shapes, and through bits.

mod common;

use common::{edge, ids, noise};
use proptest::prelude::{
    Just, ProptestConfig, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest,
};
use proptest::sample::select;
use r3_kernels::attention::packed::{PackedAttention, PackedSequence};
use r3_kernels::attention::{Heads, KvCache, PagedSequence, paged_attention};
use r3_kernels::experts::{ExpertDims, ExpertScratch, Experts, Routed, forward};
use r3_kernels::gemm::{Dtype, PackedMatrix, matmul};
use r3_kernels::route_record::RouteRecord;
use r3_kernels::router::{Choice, Router, RouterConfig, Routing, Scoring, choose, gates};

fn dtype() -> impl Strategy<Value = Dtype> {
    prop_oneof![Just(Dtype::F32), Just(Dtype::Bf16)]
}

/// What a dtype makes of an operand.
fn rounded(dtype: Dtype, x: f32) -> f64 {
    match dtype {
        Dtype::F32 => f64::from(x),
        Dtype::Bf16 => f64::from(half::bf16::from_f32(x).to_f32()),
    }
}

/// `w x` for one row `x`, in f64, with the sum of magnitudes that bounds the rounding error.
fn products(w: &[f32], x: &[f32], dtype: Dtype) -> Vec<(f64, f64)> {
    let dot = |w: &[f32]| {
        let products = w.iter().zip(x).map(|(&w, &x)| rounded(dtype, w) * rounded(dtype, x));
        products.fold((0.0, 0.0), |(sum, size), product| (sum + product, size + product.abs()))
    };
    w.chunks_exact(x.len()).map(dot).collect()
}

/// Experts up to 300, any number of them for a token.
fn router() -> impl Strategy<Value = RouterConfig> {
    let experts = select(vec![1_usize, 2, 3, 15, 16, 17, 31, 33, 128, 255, 256, 257, 300]);
    (experts, 0.0_f64..1.0, any::<bool>()).prop_map(|(n_experts, share, norm_topk_prob)| {
        let top_k = (1 + (share * n_experts as f64) as usize).min(n_experts);
        RouterConfig::softmax(n_experts, top_k, norm_topk_prob)
    })
}

/// Groups of experts, of which some are kept, as sigmoid routers have them, and a scaling.
fn sigmoid_router() -> impl Strategy<Value = RouterConfig> {
    let sizes = (select(vec![1_usize, 2, 3, 8]), select(vec![2_usize, 3, 16, 33, 100]));
    (sizes, 0.0_f64..1.0, 0.0_f64..1.0, any::<bool>(), select(vec![1.0, 2.5])).prop_map(
        |((n_groups, group), kept, share, norm_topk_prob, scaling)| {
            let part = |share: f64, of: usize| (1 + (share * of as f64) as usize).min(of);
            let top_groups = part(kept, n_groups);
            let scoring = Scoring::Sigmoid { n_groups, top_groups };
            let top_k = part(share * share, top_groups * group);
            RouterConfig { n_experts: n_groups * group, top_k, scoring, norm_topk_prob, scaling }
        },
    )
}

/// The `n` largest of `values` by their indices, largest first, and how far the last of them is from the next.
fn largest(values: &[f64], n: usize) -> (Vec<usize>, f64) {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
    let steps = order.windows(2).take(n).map(|pair| values[pair[0]] - values[pair[1]]);
    let nearest = steps.fold(f64::INFINITY, f64::min);
    (order[..n].to_vec(), nearest)
}

fn chosen<'a>(scores: &[f32], router: impl Into<Router<'a>>, routing: &mut Routing<'_>) -> Choice {
    let mut choice = Choice::empty();
    choose(scores, router, 0, routing, &mut choice);
    choice
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_product_is_right_at_every_edge(t in edge(), n in edge(), k in edge(), dtype in dtype(), seed in 0_u32..1000) {
        let (x, w) = (noise(t * k, seed), noise(n * k, seed + 1));
        let mut y = vec![f32::NAN; t * n];
        matmul(&x, &PackedMatrix::pack(&w, n, k, dtype), None, &mut y);
        for (x, y) in x.chunks_exact(k).zip(y.chunks_exact(n)) {
            for (&y, (exact, size)) in y.iter().zip(products(&w, x, dtype)) {
                prop_assert!((f64::from(y) - exact).abs() <= 1e-6 * size, "{y}, not {exact}");
            }
        }
    }

    #[test]
    fn the_router_takes_the_highest_of_up_to_300(config in router(), n_tokens in 0_usize..5, seed in 0_u32..1000) {
        let RouterConfig { n_experts, top_k, norm_topk_prob, .. } = config;
        // Eighths: many scores are equal.
        let scores: Vec<f32> =
            noise(n_tokens * n_experts, seed).into_iter().map(|x| (x * 32.0).round() / 8.0).collect();
        let choice = chosen(&scores, config, &mut Routing::Free);
        let mut weights = vec![f32::NAN; n_tokens * top_k];
        gates(&scores, config, &choice, &mut weights);
        let rows = scores.chunks_exact(n_experts).zip(choice.ids().chunks_exact(top_k));
        for ((scores, ids), weights) in rows.zip(weights.chunks_exact(top_k)) {
            let mut order: Vec<usize> = (0..n_experts).collect();
            // A stable sort: equal scores, 0 and -0 among them, stay in the order of their ids.
            order.sort_by(|&a, &b| scores[b].partial_cmp(&scores[a]).unwrap());
            prop_assert!(ids.iter().map(|&id| usize::from(id)).eq(order[..top_k].iter().copied()));
            let exp = |id: usize| f64::from(scores[id]).exp();
            let among = if norm_topk_prob { top_k } else { n_experts };
            let total: f64 = order[..among].iter().map(|&id| exp(id)).sum();
            for (&weight, &id) in weights.iter().zip(ids) {
                let want = exp(usize::from(id)) / total;
                prop_assert!((f64::from(weight) - want).abs() <= 2e-6 * want, "{weight}, not {want}");
            }
        }
    }

    #[test]
    fn a_sigmoid_router_takes_the_best_biased_scores_of_the_best_groups(
        config in sigmoid_router(), n_tokens in 0_usize..5, has_bias in any::<bool>(), seed in 0_u32..1000,
    ) {
        let RouterConfig { n_experts, top_k, scoring, norm_topk_prob, scaling } = config;
        let Scoring::Sigmoid { n_groups, top_groups } = scoring else { unreachable!("a sigmoid router") };
        let scores: Vec<f32> = noise(n_tokens * n_experts, seed).into_iter().map(|x| 6.0 * x).collect();
        let bias = has_bias.then(|| noise(n_experts, seed + 1));
        let router = Router { config, bias: bias.as_deref() };
        let choice = chosen(&scores, router, &mut Routing::Free);
        let mut weights = vec![f32::NAN; n_tokens * top_k];
        gates(&scores, config, &choice, &mut weights);
        let rows = scores.chunks_exact(n_experts).zip(choice.ids().chunks_exact(top_k));
        for ((scores, ids), weights) in rows.zip(weights.chunks_exact(top_k)) {
            let plain: Vec<f64> = scores.iter().map(|&s| 1.0 / (1.0 + (-f64::from(s)).exp())).collect();
            let bias_of = |id: usize| bias.as_ref().map_or(0.0, |bias| f64::from(bias[id]));
            let mut biased: Vec<f64> = (0..n_experts).map(|id| plain[id] + bias_of(id)).collect();
            let sum_of_two = |group: &[f64]| largest(group, 2).0.iter().map(|&at| group[at]).sum::<f64>();
            let group = n_experts / n_groups;
            let sums: Vec<f64> = biased.chunks_exact(group).map(sum_of_two).collect();
            let (kept, groups_apart) = largest(&sums, top_groups);
            (0..n_experts).filter(|id| !kept.contains(&(id / group))).for_each(|id| biased[id] = f64::NEG_INFINITY);
            let (order, apart) = largest(&biased, top_k);
            // Closer than f32 can tell: either may be taken.
            if apart.min(groups_apart) > 1e-6 {
                prop_assert!(ids.iter().map(|&id| usize::from(id)).eq(order.iter().copied()));
            }
            let at = |id: &u16| plain[usize::from(*id)];
            let total = if norm_topk_prob { ids.iter().map(at).sum::<f64>() + 1e-20 } else { 1.0 };
            for (&weight, id) in weights.iter().zip(ids) {
                let want = at(id) / total * f64::from(scaling);
                prop_assert!((f64::from(weight) - want).abs() <= 2e-6 * want, "{weight}, not {want}");
            }
        }
    }

    #[test]
    fn what_is_recorded_layer_by_layer_is_what_replay_takes(
        config in router(), n_layers in 1_usize..4, n_tokens in 1_usize..5, seed in 0_u32..1000,
    ) {
        let len = n_tokens * config.n_experts;
        let scores = noise(n_layers * len, seed);
        let mut record = RouteRecord::new(n_layers, config);
        record.start(n_tokens);
        let mut recorded = Vec::new();
        for (layer, scores) in scores.chunks_exact(len).enumerate() {
            let mut choice = Choice::empty();
            choose(scores, config, layer, &mut Routing::Record(&mut record), &mut choice);
            recorded.extend_from_slice(choice.ids());
        }
        // Other scores would choose otherwise, and still take what was recorded.
        let mut native = RouteRecord::new(n_layers, config);
        native.start(n_tokens);
        for layer in 0..n_layers {
            prop_assert_eq!(&record.layer(layer), &recorded[layer * n_tokens * config.top_k..][..n_tokens * config.top_k]);
            let other = noise(len, seed + 7 + layer as u32);
            let mut replayed = Choice::empty();
            let routing = &mut Routing::Replay { ids: &recorded, native: Some(&mut native) };
            choose(&other, config, layer, routing, &mut replayed);
            prop_assert_eq!(replayed.ids(), record.layer(layer));
            let own = chosen(&other, config, &mut Routing::Free);
            prop_assert_eq!(native.layer(layer), own.ids());
        }
        let id_bytes = if config.n_experts <= 256 { 1 } else { 2 };
        prop_assert_eq!(record.rows().len(), n_tokens * n_layers * config.top_k * id_bytes);
    }

    #[test]
    fn experts_add_up_with_up_to_300_of_which_most_are_empty(
        config in router(), n_tokens in 1_usize..6, width in edge(), inter in 1_usize..20, dtype in dtype(),
        seed in 0_u32..1000,
    ) {
        // Few dimensions where there are many experts, so that a case takes milliseconds.
        let (width, inter) = if config.n_experts > 64 { (width.min(17), inter.min(9)) } else { (width, inter) };
        let dims = ExpertDims { n_experts: config.n_experts, width, inter };
        let gate_up = noise(dims.n_experts * 2 * inter * width, seed);
        let down = noise(dims.n_experts * width * inter, seed + 1);
        let (x, weights) = (noise(n_tokens * width, seed + 2), noise(n_tokens * config.top_k, seed + 3));
        let ids = ids(n_tokens, config.top_k, config.n_experts, seed);
        let scores = vec![0.0; n_tokens * config.n_experts];
        let choice = chosen(&scores, config, &mut Routing::Replay { ids: &ids, native: None });
        let mut y = vec![f32::NAN; x.len()];
        let experts = Experts::pack(&gate_up, &down, dims, dtype);
        forward(&x, Routed { choice: &choice, gates: &weights }, &experts, &mut ExpertScratch::default(), &mut y);
        let pairs = ids.chunks_exact(config.top_k).zip(weights.chunks_exact(config.top_k));
        for ((x, y), (ids, weights)) in x.chunks_exact(width).zip(y.chunks_exact(width)).zip(pairs) {
            let (mut want, mut size) = (vec![0.0; width], vec![0.0; width]);
            for (&id, &weight) in ids.iter().zip(weights) {
                let expert = usize::from(id);
                let hidden = products(&gate_up[expert * 2 * inter * width..][..2 * inter * width], x, dtype);
                let silu = |gate: f64| gate / (1.0 + (-gate).exp());
                let act: Vec<f32> =
                    (0..inter).map(|i| (silu(hidden[i].0) * hidden[inter + i].0) as f32).collect();
                let answers = products(&down[expert * width * inter..][..width * inter], &act, dtype);
                for (at, (answer, magnitude)) in answers.into_iter().enumerate() {
                    want[at] += f64::from(weight) * answer;
                    size[at] += f64::from(weight).abs() * magnitude;
                }
            }
            // In bf16 the activation between the products may round to the other neighbour.
            let unit = if dtype == Dtype::F32 { 4e-6 } else { 1e-2 };
            for ((&y, want), size) in y.iter().zip(want).zip(size) {
                prop_assert!((f64::from(y) - want).abs() <= unit * (size + 0.1), "{y}, not {want}");
            }
        }
    }

    #[test]
    fn sequences_paged_together_are_those_packed_together(
        lengths in proptest::collection::vec(select(vec![1_usize, 2, 15, 16, 17, 31, 33]), 1..4),
        (n_kv_heads, group) in select(vec![(1, 1), (2, 3), (3, 1), (1, 17)]),
        half in select(vec![1_usize, 7, 8, 9, 17]),
        block_tokens in select(vec![1_usize, 3, 16]),
    ) {
        let heads = Heads { n_heads: n_kv_heads * group, n_kv_heads, head_dim: 2 * half };
        let t: usize = lengths.iter().sum();
        let [q_len, kv_len] = [heads.n_heads, n_kv_heads].map(|n| t * n * heads.head_dim);
        let (q, k, v) = (noise(q_len, 1), noise(kv_len, 2), noise(kv_len, 3));
        let mut packed = vec![f32::NAN; q_len];
        let sequences: Vec<_> = lengths.iter().copied().map(PackedSequence::whole).collect();
        PackedAttention::new(heads, Dtype::F32).forward(&q, (&k, &v), &sequences, &mut packed);

        // Blocks of all sequences lie interleaved, the last ones first.
        let n_blocks: Vec<usize> = lengths.iter().map(|length| length.div_ceil(block_tokens)).collect();
        let total: usize = n_blocks.iter().sum();
        let mut next = total as u32;
        let mut tables = vec![Vec::new(); lengths.len()];
        for block in 0..n_blocks.iter().copied().max().unwrap_or(0) {
            for (table, &n_blocks) in tables.iter_mut().zip(&n_blocks) {
                if block < n_blocks {
                    next -= 1;
                    table.push(next);
                }
            }
        }
        let mut cache = KvCache::new(1, total * block_tokens, heads, Dtype::F32);
        let slots: Vec<u32> = lengths.iter().zip(&tables).flat_map(|(&length, table)| {
            (0..length).map(move |p| table[p / block_tokens] * block_tokens as u32 + (p % block_tokens) as u32)
        }).collect();
        cache.write(0, &slots, &k, &v);
        let sequences: Vec<PagedSequence<'_>> = lengths.iter().zip(&tables)
            .map(|(&n_queries, blocks)| PagedSequence { n_queries, start: 0, blocks }).collect();
        let mut paged = vec![f32::NAN; q_len];
        paged_attention(&q, &cache, (0, block_tokens), &sequences, &mut paged);
        prop_assert!(paged.iter().zip(&packed).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}
