//! A rollout through the ring, written and read by one thread: what it costs without waiting for anybody.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_core::rollout::{FinishReason, Reward, RolloutView};
use r3_core::routes::{RouteDims, RouteRows};
use r3_ring::frame::{Frame, FrameMeta, encode, frame_bytes};
use r3_ring::ring::Ring;

const DIMS: RouteDims = RouteDims { n_layers: 48, top_k: 8, n_experts: 128 };
const PROMPT_TOKENS: usize = 32;

fn frames(c: &mut Criterion) {
    let mut group = c.benchmark_group("ring_frame");
    for n_tokens in [64, 512] {
        let n_sampled = n_tokens - PROMPT_TOKENS;
        let tokens: Vec<TokenId> = (0u32..).map(TokenId).take(n_tokens).collect();
        let (logprobs, versions) = (vec![-1.0; n_sampled], vec![PolicyVersion(1); n_sampled]);
        let mut routes = RouteRows::with_capacity(DIMS, n_tokens - 1);
        let row: Vec<u8> = (0..DIMS.row_bytes()).map(|at| (at % DIMS.top_k) as u8).collect();
        (1..n_tokens).for_each(|_| routes.append(&row));
        let layer_ids: Vec<u32> = (0u32..).take(DIMS.n_layers).collect();
        let rollout = RolloutView {
            group: GroupId(0),
            index: 0,
            tokens: &tokens,
            prompt_tokens: PROMPT_TOKENS,
            rollout_logprobs: &logprobs,
            versions: &versions,
            routes: Some(routes.view()),
            finish: FinishReason::Length,
            cached_tokens: 0,
            support: None,
        };
        let reward = Reward::Score(1.0);
        let meta = FrameMeta { layer_ids: &layer_ids, weight_epoch: 0, model_hash: 0, reward, mask: None };
        let bytes = frame_bytes(&rollout);
        let (mut writer, mut reader) = Ring::create(4 * bytes).expect("there is memory for a ring");
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function(format!("encode_and_decode/{n_tokens}"), |b| {
            b.iter(|| {
                let mut room = writer.reserve(bytes, Duration::ZERO).expect("the ring is empty");
                encode(&rollout, &meta, &mut room);
                room.commit();
                let id = reader.next(Duration::ZERO).expect("a frame was committed");
                black_box(Frame::decode(reader.bytes(id)).expect("it is whole"));
                reader.release(id);
            });
        });
    }
}

criterion_group!(ring, frames);
criterion_main!(ring);
