//! Frames: what goes in comes out, and nothing else is let in.

mod common;

use common::{Sample, Shape};
use proptest::prelude::{Just, Strategy, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};
use r3_core::ids::TokenId;
use r3_core::rollout::Reward;
use r3_core::routes::{RouteDims, RouteError, RouteRows};
use r3_core::support::{SupportError, SupportRows, SupportView};
use r3_ring::error::{FrameError, SampleFault};
use r3_ring::frame::{Frame, FrameMeta, decode_all, encode, frame_bytes, max_frame_bytes};
use xxhash_rust::xxh3::xxh3_64;

const DIMS: RouteDims = RouteDims { n_layers: 2, top_k: 2, n_experts: 8 };
const SHAPE: Shape = Shape { prompt_tokens: 3, n_sampled: 8, routes: Some(DIMS), max_support: 0 };

/// Where the fields of the header lie.
const TOKEN_DIGEST: usize = 40;
const N_TOKENS: usize = 56;
const PROMPT_TOKENS: usize = 64;
const CACHED_TOKENS: usize = 72;
const ROWS: usize = 80;
const START: usize = 88;
const N_LAYERS: usize = 104;
const TOP_K: usize = 108;
const N_EXPERTS: usize = 112;
const REWARD: usize = 116;
const FINISH: usize = 120;
const HEADER_BYTES: usize = 128;

/// Bytes that start on a multiple of eight, as in the ring.
struct Aligned {
    words: Vec<u64>,
    n_bytes: usize,
}

impl Aligned {
    fn filled(n_bytes: usize, word: u64) -> Self {
        Self { words: vec![word; n_bytes.div_ceil(8)], n_bytes }
    }

    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.n_bytes]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.n_bytes]
    }

    /// Makes the checksum fit whatever the bytes are now.
    fn seal(&mut self) {
        let checksum = xxh3_64(&self.bytes()[8..]);
        self.words[0] = checksum;
    }
}

fn encoded(sample: &Sample) -> Aligned {
    let mut frame = Aligned::filled(frame_bytes(&sample.rollout()), u64::MAX);
    encode(&sample.rollout(), &sample.meta(), frame.bytes_mut());
    frame
}

/// The error of a frame whose bytes from `at` on were set to `value` by somebody who fixed the checksum.
fn forged(at: usize, value: &[u8]) -> FrameError {
    let mut sample = Sample::new(5, SHAPE);
    sample.reward = Reward::Score(0.5);
    let mut frame = encoded(&sample);
    frame.bytes_mut()[at..at + value.len()].copy_from_slice(value);
    frame.seal();
    Frame::decode(frame.bytes()).expect_err("must be refused")
}

fn fault(error: FrameError) -> SampleFault {
    match error {
        FrameError::Sample { group: 5, index: 5, fault } => fault,
        other => panic!("{other:?} does not name the sample"),
    }
}

/// Where the sections of a frame with small routes lie.
struct Layout {
    tokens: usize,
    logprobs: usize,
    mask: usize,
}

impl Layout {
    fn of(sample: &Sample) -> Self {
        let padded = |n_bytes: usize| n_bytes.next_multiple_of(8);
        let n_sampled = sample.versions.len();
        let tokens = HEADER_BYTES + padded(4 * sample.layer_ids.len()) + 8 * n_sampled;
        let logprobs = tokens + padded(4 * sample.tokens.len());
        Self { tokens, logprobs, mask: logprobs + padded(4 * n_sampled) }
    }
}

fn shapes() -> impl Strategy<Value = Shape> {
    let dims = (1usize..4, 1usize..5, 0usize..300).prop_map(|(n_layers, top_k, more)| {
        let n_experts = (top_k + more).max(2);
        RouteDims { n_layers, top_k, n_experts }
    });
    let max_support = prop_oneof![1 => Just(0), 2 => 1usize..9];
    (1usize..40, 0usize..40, prop::option::of(dims), max_support).prop_map(
        |(prompt_tokens, n_sampled, routes, max_support)| Shape {
            prompt_tokens,
            n_sampled,
            routes,
            max_support,
        },
    )
}

proptest! {
    #[test]
    fn a_rollout_comes_out_as_it_went_in(group in any::<u32>(), shape in shapes()) {
        let mut sample = Sample::new(group.into(), shape);
        let frame = encoded(&sample);
        // Supports of which every row is empty are none.
        sample.support = sample.support.filter(|support| !support.view().ids().is_empty());
        let decoded = Frame::decode(frame.bytes()).unwrap();
        prop_assert_eq!(format!("{:?}", decoded.rollout()), format!("{:?}", sample.rollout()));
        prop_assert_eq!(decoded.layer_ids(), &sample.layer_ids);
        prop_assert_eq!(decoded.weight_epoch(), sample.meta().weight_epoch);
        prop_assert_eq!(decoded.model_hash(), sample.meta().model_hash);
        prop_assert_eq!(decoded.reward(), sample.reward);
        prop_assert_eq!(decoded.mask(), &sample.mask);
    }

    #[test]
    fn the_bound_holds_and_is_tight(group in any::<u32>(), shape in shapes()) {
        let n_tokens = shape.prompt_tokens + shape.n_sampled;
        let actual = frame_bytes(&Sample::new(group.into(), shape).rollout());
        let max_support = Some(shape.max_support).filter(|&max_support| max_support > 0);
        let bound = max_frame_bytes(n_tokens, shape.routes, max_support);
        prop_assert!(actual <= bound);
        if max_support.is_some() {
            return Ok(());
        }
        // What the bound adds is the prompt's share of versions, logprobs and mask, and padding.
        let row_bytes = shape.routes.map_or(0, RouteDims::row_bytes);
        prop_assert!(bound - actual <= 13 * shape.prompt_tokens + row_bytes + 7 * 8);
    }

    #[test]
    fn the_same_rollout_is_the_same_bytes_wherever_it_is_written(group in any::<u32>(), shape in shapes()) {
        let sample = Sample::new(group.into(), shape);
        let mut again = Aligned::filled(frame_bytes(&sample.rollout()), 0x5555_5555_5555_5555);
        encode(&sample.rollout(), &sample.meta(), again.bytes_mut());
        let once = encoded(&sample);
        prop_assert_eq!(once.bytes(), again.bytes());
    }

    #[test]
    fn random_bytes_are_refused(words in prop::collection::vec(any::<u64>(), 0..64), cut in 0usize..8) {
        let n_bytes = (words.len() * 8).saturating_sub(cut);
        let frame = Aligned { words, n_bytes };
        prop_assert!(Frame::decode(frame.bytes()).is_err());
    }

    /// A forger who fixes the checksum gets no further than a self-consistent rollout.
    #[test]
    fn forged_bytes_never_panic(
        shape in shapes(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 1..6),
    ) {
        let mut frame = encoded(&Sample::new(1, shape));
        let n_bytes = frame.n_bytes;
        for (at, value, in_header) in edits {
            // The checksum, magic and length would end the check early.
            let at = 24 + at.index(if in_header { HEADER_BYTES } else { n_bytes } - 24);
            frame.bytes_mut()[at] = value;
        }
        frame.seal();
        if let Ok(decoded) = Frame::decode(frame.bytes()) {
            let rollout = decoded.rollout();
            prop_assert_eq!(rollout.completion().len(), rollout.rollout_logprobs.len());
            prop_assert_eq!(rollout.completion().len(), rollout.versions.len());
            let rows = rollout.tokens.len() - usize::from(!rollout.versions.is_empty());
            prop_assert!(rollout.routes.is_none_or(|routes| routes.check(rows).is_ok()));
            let is_of = |support: SupportView<'_>| support.check(rollout.completion(), Some(decoded.mask()));
            prop_assert!(rollout.support.is_none_or(|support| is_of(support).is_ok()));
        }
    }
}

#[test]
fn every_changed_byte_is_refused() {
    let mut frame = encoded(&Sample::new(5, Shape { max_support: 4, ..SHAPE }));
    for at in 0..frame.n_bytes {
        for flip in [1, 0x80, 0xff] {
            frame.bytes_mut()[at] ^= flip;
            assert!(Frame::decode(frame.bytes()).is_err(), "byte {at} ^ {flip:#x}");
            frame.bytes_mut()[at] ^= flip;
        }
    }
    assert!(Frame::decode(frame.bytes()).is_ok());
}

#[test]
fn every_other_length_is_refused() {
    let mut frame = encoded(&Sample::new(5, SHAPE));
    for n_bytes in 0..frame.n_bytes {
        let refused = Frame::decode(&frame.bytes()[..n_bytes]);
        assert!(matches!(refused, Err(FrameError::Length { bytes, .. }) if bytes == n_bytes as u64));
    }
    frame.words.push(0);
    frame.n_bytes += 8;
    assert!(matches!(Frame::decode(frame.bytes()), Err(FrameError::Length { .. })));
}

#[test]
fn a_frame_off_its_alignment_is_refused() {
    let frame = encoded(&Sample::new(5, SHAPE));
    let mut shifted = Aligned::filled(frame.n_bytes + 1, 0);
    shifted.bytes_mut()[1..].copy_from_slice(frame.bytes());
    assert_eq!(Frame::decode(&shifted.bytes()[1..]).unwrap_err(), FrameError::Misaligned);
}

#[test]
fn another_format_is_named() {
    assert!(matches!(forged(8, b"R"), FrameError::NotAFrame { .. }));
    for found in [0, 3] {
        assert_eq!(forged(96, &[found]), FrameError::FormatVersion { found: found.into(), expected: 2 });
    }
}

#[test]
fn a_row_that_was_never_written_is_named() {
    // 10 rows: two bytes of bits, padded to the last eight bytes.
    let last_word = frame_bytes(&Sample::new(5, SHAPE).rollout()) - 8;
    assert_eq!(fault(forged(last_word, &[0b1101_1111])), SampleFault::Unwritten { position: 5 });
    let error = forged(last_word + 1, &[0b10]);
    assert_eq!(error.to_string(), "rollout 5 of group 5: position 8: its routes were never written");
}

#[test]
fn a_broken_route_names_sample_position_and_the_models_layer() {
    let mut sample = Sample::new(5, SHAPE);
    let rows = sample.routes.take().unwrap();
    let mut bytes = rows.view().bytes().to_vec();
    bytes[4 * 6 + 3] = bytes[4 * 6 + 2];
    let mut duplicate = RouteRows::with_capacity(DIMS, 10);
    duplicate.append(&bytes);
    sample.routes = Some(duplicate);
    let error = Frame::decode(encoded(&sample).bytes()).unwrap_err();
    let expert = u16::from(bytes[4 * 6 + 2]);
    let broken = RouteError::Duplicate { row: 6, layer: 1, expert };
    assert_eq!(fault(error.clone()), SampleFault::Routes { error: broken, layer_id: Some(3) });
    let message = format!("position 6, MoE layer 1: expert {expert} appears twice (layer 3 of the model)");
    assert_eq!(error.to_string(), format!("rollout 5 of group 5: {message}"));
    assert!(error.hint().contains("router_replay"));
}

#[test]
fn a_missing_row_is_refused() {
    let mut sample = Sample::new(5, SHAPE);
    let bytes = sample.routes.take().unwrap().view().bytes().to_vec();
    let mut short = RouteRows::with_capacity(DIMS, 9);
    short.append(&bytes[..9 * DIMS.row_bytes()]);
    sample.routes = Some(short);
    let error = Frame::decode(encoded(&sample).bytes()).unwrap_err();
    assert_eq!(fault(error), SampleFault::Rows { rows: 9, expected_rows: 10 });
}

#[test]
fn forged_fields_are_named() {
    assert!(matches!(fault(forged(TOKEN_DIGEST, &[1, 2])), SampleFault::TokenDigest { .. }));
    assert!(matches!(fault(forged(N_TOKENS, &[12])), SampleFault::Rows { rows: 10, expected_rows: 11 }));
    assert!(matches!(fault(forged(N_TOKENS, &[255; 8])), SampleFault::Rows { rows: 10, .. }));
    assert!(matches!(fault(forged(PROMPT_TOKENS, &[0])), SampleFault::Prompt { prompt_tokens: 0, .. }));
    assert!(matches!(fault(forged(PROMPT_TOKENS, &[12])), SampleFault::Prompt { prompt_tokens: 12, .. }));
    assert!(matches!(fault(forged(PROMPT_TOKENS, &[11])), SampleFault::Rows { expected_rows: 11, .. }));
    assert!(matches!(fault(forged(PROMPT_TOKENS, &[9])), SampleFault::Lengths { .. }));
    assert!(matches!(fault(forged(CACHED_TOKENS, &[4])), SampleFault::Prompt { cached_tokens: 4, .. }));
    assert_eq!(fault(forged(ROWS, &[9])), SampleFault::Rows { rows: 9, expected_rows: 10 });
    assert_eq!(fault(forged(START, &[1])), SampleFault::Start { start: 1 });
    assert!(matches!(fault(forged(N_LAYERS, &[0])), SampleFault::Dims { .. }));
    assert!(matches!(fault(forged(N_LAYERS, &[255; 4])), SampleFault::Lengths { .. }));
    assert!(matches!(fault(forged(TOP_K, &[9])), SampleFault::Dims { .. }));
    assert!(matches!(fault(forged(N_EXPERTS, &[0, 0, 2])), SampleFault::Dims { .. }));
    assert!(matches!(fault(forged(N_EXPERTS, &[4])), SampleFault::Routes { .. }));
    assert!(matches!(fault(forged(REWARD, &f32::NAN.to_le_bytes())), SampleFault::Reward { failed: 0, .. }));
    assert_eq!(fault(forged(FINISH, &[3])), SampleFault::Finish { byte: 3 });
    assert_eq!(fault(forged(FINISH + 1, &[1])), SampleFault::Reward { reward: 0.5, failed: 1 });
    assert!(matches!(fault(forged(FINISH + 2, &[0])), SampleFault::Dims { .. }));
    assert!(matches!(fault(forged(FINISH + 3, &[2])), SampleFault::Dims { id_bytes: 2, .. }));
    assert_eq!(fault(forged(FINISH + 4, &[1])), SampleFault::Kept { n_kept: 1, format_version: 1 });
    assert_eq!(fault(forged(96, &[2])), SampleFault::Kept { n_kept: 0, format_version: 2 });
}

#[test]
fn forged_values_are_named_by_position() {
    let layout = Layout::of(&Sample::new(5, SHAPE));
    let infinite = f32::NEG_INFINITY.to_le_bytes();
    let logprob = SampleFault::Logprob { position: 3 + 2, logprob: f32::NEG_INFINITY };
    assert_eq!(fault(forged(layout.logprobs + 2 * 4, &infinite)), logprob);
    assert_eq!(fault(forged(layout.mask + 7, &[2])), SampleFault::Mask { position: 3 + 7, mask: 2 });
    assert!(matches!(fault(forged(layout.tokens, &[1, 2, 3])), SampleFault::TokenDigest { .. }));
}

#[test]
fn bytes_that_belong_to_no_section_are_zero() {
    let sample = Sample::new(5, SHAPE);
    let (tokens_end, frame_end) = (Layout::of(&sample).tokens + 11 * 4, frame_bytes(&sample.rollout()));
    // 10 rows fill a byte of bits and two bits of the next; six bytes follow.
    let (last_bits, padding) = (frame_end - 7, frame_end - 6..frame_end);
    for at in (tokens_end..tokens_end + 4).chain(padding) {
        assert_eq!(fault(forged(at, &[0x80])), SampleFault::Padding { at, byte: 0x80 });
    }
    assert_eq!(fault(forged(last_bits, &[0b111])), SampleFault::Padding { at: last_bits, byte: 0b111 });
}

#[test]
fn layers_that_do_not_ascend_are_refused() {
    let second = HEADER_BYTES + 4;
    for layer_id in [0, 1] {
        let refused = SampleFault::LayerIds { layer: 1, layer_id, previous_id: 1 };
        assert_eq!(fault(forged(second, &[layer_id as u8])), refused);
    }
}

/// The rollout of [`SHAPE`] with `support` of its last token.
fn with_support(support: &[u32]) -> Sample {
    let mut sample = Sample::new(5, SHAPE);
    (sample.tokens[10], sample.mask) = (TokenId(40), vec![1; 8]);
    let mut supports = SupportRows::default();
    supports.fill(7);
    supports.push(support);
    sample.support = Some(supports);
    sample
}

#[test]
fn a_support_that_contradicts_its_token_is_refused() {
    let refused = |sample: &Sample| fault(Frame::decode(encoded(sample).bytes()).unwrap_err());
    assert!(Frame::decode(encoded(&with_support(&[3, 40])).bytes()).is_ok());
    let missing = SupportError::Missing { row: 7, token: TokenId(40) };
    assert_eq!(refused(&with_support(&[3, 41])), SampleFault::Support(missing));
    let order = SupportError::Order { row: 7, token: TokenId(3), before: TokenId(40) };
    assert_eq!(refused(&with_support(&[40, 3])), SampleFault::Support(order));
    let mut given = with_support(&[40]);
    given.mask[7] = 0;
    assert_eq!(refused(&given), SampleFault::Support(SupportError::Given { row: 7 }));
    // The size of the last support, in front of its two tokens.
    let mut frame = encoded(&with_support(&[3, 40]));
    let at = frame.n_bytes - 8 - 4;
    frame.bytes_mut()[at] = 1;
    frame.seal();
    let ids = SampleFault::Support(SupportError::Ids { ids: 2, needed_ids: 1 });
    assert_eq!(fault(Frame::decode(frame.bytes()).unwrap_err()), ids);
}

#[test]
fn without_a_truncated_draw_a_frame_is_as_if_there_were_none() {
    let plain = Sample::new(5, SHAPE);
    let mut empty = plain.clone();
    let mut supports = SupportRows::default();
    supports.fill(8);
    empty.support = Some(supports);
    assert_eq!(encoded(&empty).bytes(), encoded(&plain).bytes());
    assert_eq!(encoded(&plain).bytes()[96], 1, "the format of before");
    assert_eq!(encoded(&with_support(&[40])).bytes()[96], 2);
}

#[test]
fn a_failed_reward_is_zero_and_not_minus_zero() {
    let mut sample = Sample::new(5, SHAPE);
    sample.reward = Reward::Failed;
    let mut frame = encoded(&sample);
    frame.bytes_mut()[REWARD..REWARD + 4].copy_from_slice(&(-0.0_f32).to_le_bytes());
    frame.seal();
    let error = Frame::decode(frame.bytes()).expect_err("must be refused");
    assert_eq!(fault(error), SampleFault::Reward { reward: -0.0, failed: 1 });
}

#[test]
fn nothing_sampled_needs_a_row_for_every_token() {
    let shape = Shape { prompt_tokens: 4, n_sampled: 0, routes: Some(DIMS), max_support: 0 };
    let frame = encoded(&Sample::new(5, shape));
    assert_eq!(Frame::decode(frame.bytes()).unwrap().rollout().routes.unwrap().rows(), 4);
}

#[test]
fn without_a_mask_every_sampled_token_is_trained_on() {
    let sample = Sample::new(5, SHAPE);
    let mut frame = Aligned::filled(frame_bytes(&sample.rollout()), 0);
    encode(&sample.rollout(), &FrameMeta { mask: None, ..sample.meta() }, frame.bytes_mut());
    assert_eq!(Frame::decode(frame.bytes()).unwrap().mask(), [1; 8]);
}

#[test]
fn frames_that_lie_one_after_another_are_read_in_order_and_none_is_half_read() {
    let samples = [SHAPE, Shape { n_sampled: 0, ..SHAPE }, Shape { routes: None, ..SHAPE }];
    let samples: Vec<Sample> =
        samples.into_iter().zip(3..).map(|(shape, group)| Sample::new(group, shape)).collect();
    let frames: Vec<Vec<u8>> = samples.iter().map(|sample| encoded(sample).bytes().to_vec()).collect();
    let all = frames.concat();
    let mut file = Aligned::filled(all.len(), 0);
    file.bytes_mut().copy_from_slice(&all);
    let groups: Vec<u64> =
        decode_all(file.bytes()).unwrap().iter().map(|frame| frame.rollout().group.0).collect();
    assert_eq!(groups, [3, 4, 5]);
    assert!(decode_all(&[]).unwrap().is_empty());
    let ends: Vec<usize> = frames
        .iter()
        .scan(0, |end, frame| {
            *end += frame.len();
            Some(*end)
        })
        .collect();
    for n_bytes in 1..all.len() {
        let decoded = decode_all(&file.bytes()[..n_bytes]);
        match ends.iter().position(|end| *end == n_bytes) {
            Some(at) => assert_eq!(decoded.unwrap().len(), at + 1),
            None => assert!(matches!(decoded, Err(FrameError::Length { .. })), "{n_bytes}"),
        }
    }
    // Lengths that lie, also one that would never end.
    for length in [0_u64, 1, 127, 128, u64::MAX] {
        file.bytes_mut()[16..24].copy_from_slice(&length.to_le_bytes());
        assert!(decode_all(file.bytes()).is_err(), "{length}");
    }
}
