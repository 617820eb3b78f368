//! Frames: what is let in holds the contract, and is what would be written.

use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_core::rollout::{FinishReason, Reward, RolloutView};
use r3_core::routes::{RouteDims, RouteRows, write_ids};
use r3_core::support::SupportRows;
use r3_ring::frame::{Frame, FrameMeta, decode_all, encode, frame_bytes};
use xxhash_rust::xxh3::xxh3_64;

use crate::bounded::bounded;
use crate::input::{Aligned, Input};
use crate::said::check_said;

/// Which choice last named each of 65,536 experts is all that reading a frame holds.
const READ_BYTES: usize = (1 << 16) * size_of::<usize>();

/// Beside that, a list of frames holds a few words for each header of a frame.
const FRAMES_FACTOR: usize = 8;

/// Any bytes as a frame.
///
/// # Panics
/// If a property does not hold.
pub fn any_bytes(input: &[u8]) -> bool {
    check(Aligned::copy(input).bytes()).is_some()
}

/// Bytes as a frame by somebody who knows how to write magic, version, length, token digest and checksum, so that
/// what lies behind those is reached.
///
/// # Panics
/// If a property does not hold.
pub fn resealed(input: &[u8]) -> bool {
    let mut frame = Aligned::copy(input);
    reseal(frame.bytes_mut());
    check(frame.bytes()).is_some()
}

/// Frames one after another, as in a file, each resealed where it starts.
///
/// # Panics
/// If a property does not hold.
pub fn file(input: &[u8]) -> bool {
    let mut file = Aligned::copy(input);
    let starts =
        (0..input.len()).step_by(8).filter(|&at| input[at..].get(MAGIC..MAGIC + 8) == Some(MAGIC_BYTES));
    let mut ends: Vec<usize> = starts.filter(|&start| start > 0).chain([input.len()]).collect();
    ends.dedup();
    let mut start = 0;
    for end in ends {
        reseal(&mut file.bytes_mut()[start..end]);
        start = end;
    }
    let bytes = file.bytes();
    match bounded(bytes, READ_BYTES, FRAMES_FACTOR, || decode_all(bytes)) {
        Ok(frames) => {
            frames.iter().for_each(check_contract);
            let n_bytes: usize = frames.iter().map(|frame| frame_bytes(&frame.rollout())).sum();
            assert_eq!(n_bytes, bytes.len(), "{} frames", frames.len());
            !frames.is_empty()
        }
        Err(error) => {
            check_said(&error.to_string(), &error.hint());
            false
        }
    }
}

/// A rollout made of the bytes comes back as it was, and a frame with any bit changed does not come back.
///
/// # Panics
/// If a property does not hold.
pub fn round_trip(input: &[u8]) -> bool {
    let mut input = Input(input);
    let parts = Parts::draw(&mut input);
    let (rollout, meta) = (parts.rollout(), parts.meta());
    let mut frame = parts.frame();
    let sealed = frame.clone();
    reseal(frame.bytes_mut());
    assert_eq!(frame.bytes(), sealed.bytes(), "`reseal` seals as `encode` does");

    let read = check(frame.bytes()).expect("what was encoded is a frame");
    let (found, reward) = (read.rollout(), read.reward());
    assert_eq!((found.group, found.index), (rollout.group, rollout.index));
    assert_eq!((found.tokens, found.prompt_tokens), (rollout.tokens, rollout.prompt_tokens));
    assert_eq!((found.versions, found.routes), (rollout.versions, rollout.routes));
    assert_eq!(found.support, rollout.support.filter(|support| !support.ids().is_empty()));
    assert_eq!((found.finish, found.cached_tokens), (rollout.finish, rollout.cached_tokens));
    assert_eq!(bits(found.rollout_logprobs), bits(rollout.rollout_logprobs));
    assert_eq!((read.layer_ids(), read.mask()), (meta.layer_ids, &*parts.mask));
    assert_eq!((read.weight_epoch(), read.model_hash()), (meta.weight_epoch, meta.model_hash));
    assert_eq!(reward.score().map(f32::to_bits), parts.reward.score().map(f32::to_bits));

    let at = input.u32() as usize % frame.bytes().len();
    frame.bytes_mut()[at] ^= 1 << (input.u8() % 8);
    assert!(Frame::decode(frame.bytes()).is_err(), "byte {at} was changed");
    true
}

/// The frame of the rollout that [`round_trip`] makes of `input`.
#[must_use]
pub fn frame_of(input: &[u8]) -> Vec<u8> {
    Parts::draw(&mut Input(input)).frame().bytes().to_vec()
}

/// Reads `bytes` and checks what is refused and what is let in.
fn check(bytes: &[u8]) -> Option<Frame<'_>> {
    match bounded(bytes, READ_BYTES, 0, || Frame::decode(bytes)) {
        Ok(frame) => {
            check_contract(&frame);
            check_canonical(&frame, bytes);
            Some(frame)
        }
        Err(error) => {
            check_said(&error.to_string(), &error.hint());
            None
        }
    }
}

fn check_contract(frame: &Frame<'_>) {
    let rollout = frame.rollout();
    let (n_tokens, prompt_tokens) = (rollout.tokens.len(), rollout.prompt_tokens);
    assert!((1..=n_tokens).contains(&prompt_tokens) && rollout.cached_tokens <= prompt_tokens);
    let n_sampled = rollout.completion().len();
    let lengths = [rollout.rollout_logprobs.len(), rollout.versions.len(), frame.mask().len()];
    assert_eq!(lengths, [n_sampled; 3]);
    assert!(rollout.rollout_logprobs.iter().all(|logprob| logprob.is_finite()));
    assert!(frame.mask().iter().all(|&on| on <= 1));
    assert!(frame.reward().score().is_none_or(f32::is_finite));
    match rollout.routes {
        Some(routes) => {
            assert_eq!(routes.check(n_tokens - usize::from(n_sampled > 0)), Ok(()));
            assert_eq!(frame.layer_ids().len(), routes.dims().n_layers);
        }
        None => assert!(frame.layer_ids().is_empty()),
    }
    if let Some(support) = rollout.support {
        assert_eq!(support.check(rollout.completion(), Some(frame.mask())), Ok(()));
        assert!(!support.ids().is_empty(), "one way to say that nothing was cut");
    }
    assert!(frame.layer_ids().is_sorted_by(|a, b| a < b), "layers {:?}", frame.layer_ids());
}

/// There is one way to write a frame: no byte of it goes unread.
fn check_canonical(frame: &Frame<'_>, bytes: &[u8]) {
    let meta = FrameMeta {
        layer_ids: frame.layer_ids(),
        weight_epoch: frame.weight_epoch(),
        model_hash: frame.model_hash(),
        reward: frame.reward(),
        mask: Some(frame.mask()),
    };
    let mut again = Aligned::new(frame_bytes(&frame.rollout()));
    encode(&frame.rollout(), &meta, again.bytes_mut());
    assert_eq!(again.bytes(), bytes);
}

/// Where fields of the header lie; [`round_trip`] notices when they move.
const MAGIC: usize = 8;
const MAGIC_BYTES: &[u8] = b"r3frame\0";
const TOTAL_BYTES: usize = 16;
const TOKEN_DIGEST: usize = 40;
const N_TOKENS: usize = 56;
const PROMPT_TOKENS: usize = 64;
const FORMAT_VERSION: usize = 96;
const N_LAYERS: usize = 104;
const N_KEPT: usize = 124;
const HEADER_BYTES: usize = 128;

/// Makes bytes that are long enough look like a frame that came through unharmed.
fn reseal(bytes: &mut [u8]) {
    if bytes.len() < HEADER_BYTES {
        return;
    }
    let total_bytes = bytes.len() as u64;
    bytes[MAGIC..][..8].copy_from_slice(MAGIC_BYTES);
    bytes[TOTAL_BYTES..][..8].copy_from_slice(&total_bytes.to_le_bytes());
    let has_supports = Input(&bytes[N_KEPT..]).u32() > 0;
    bytes[FORMAT_VERSION..][..4].copy_from_slice(&(1 + u32::from(has_supports)).to_le_bytes());
    if let Some(token_digest) = tokens(bytes).map(xxh3_64) {
        bytes[TOKEN_DIGEST..][..8].copy_from_slice(&token_digest.to_le_bytes());
    }
    let checksum = xxh3_64(&bytes[8..]);
    bytes[..8].copy_from_slice(&checksum.to_le_bytes());
}

/// The tokens, after the ids of the layers and the versions, if they lie in the frame.
fn tokens(bytes: &[u8]) -> Option<&[u8]> {
    let field = |at: usize| Input(&bytes[at..]).u64();
    let n_layers = Input(&bytes[N_LAYERS..]).u32();
    let n_sampled = field(N_TOKENS).checked_sub(field(PROMPT_TOKENS))?;
    let versions = (HEADER_BYTES as u64 + 4 * u64::from(n_layers)).next_multiple_of(8);
    let start = usize::try_from(n_sampled.checked_mul(8)?.checked_add(versions)?).ok()?;
    let len = usize::try_from(field(N_TOKENS).checked_mul(4)?).ok()?;
    bytes.get(start..start.checked_add(len)?)
}

/// What a frame is made of, drawn from bytes.
struct Parts {
    group: GroupId,
    index: u32,
    tokens: Vec<TokenId>,
    prompt_tokens: usize,
    logprobs: Vec<f32>,
    versions: Vec<PolicyVersion>,
    mask: Vec<u8>,
    routes: Option<RouteRows>,
    support: Option<SupportRows>,
    layer_ids: Vec<u32>,
    finish: FinishReason,
    cached_tokens: usize,
    weight_epoch: u64,
    model_hash: u64,
    reward: Reward,
}

impl Parts {
    fn draw(input: &mut Input<'_>) -> Self {
        let prompt_tokens = input.within(1, 40);
        let n_sampled = input.within(0, 40);
        let rows = prompt_tokens + n_sampled - usize::from(n_sampled > 0);
        let routes = (!input.u8().is_multiple_of(4)).then(|| draw_routes(rows, input));
        let mut layer = 0;
        let mut next_layer = || {
            layer += 1 + u32::from(input.u8() % 3);
            layer - 1
        };
        let layer_ids = 0..routes.as_ref().map_or(0, |rows| rows.view().dims().n_layers);
        let mut parts = Self {
            layer_ids: layer_ids.map(|_| next_layer()).collect(),
            group: GroupId(input.u64()),
            index: input.u32(),
            finish: [FinishReason::Stop, FinishReason::Length, FinishReason::Abort][input.within(0, 2)],
            cached_tokens: input.within(0, prompt_tokens),
            weight_epoch: input.u64(),
            model_hash: input.u64(),
            reward: if input.u8().is_multiple_of(4) { Reward::Failed } else { Reward::Score(finite(input)) },
            tokens: (0..prompt_tokens + n_sampled).map(|_| TokenId(input.u32())).collect(),
            logprobs: (0..n_sampled).map(|_| finite(input)).collect(),
            versions: (0..n_sampled).map(|_| PolicyVersion(input.u64())).collect(),
            mask: (0..n_sampled).map(|_| input.u8() % 2).collect(),
            prompt_tokens,
            routes,
            support: None,
        };
        parts.support = (input.u8() % 4 == 1).then(|| draw_supports(&parts, input));
        parts
    }

    fn frame(&self) -> Aligned {
        let mut frame = Aligned::new(frame_bytes(&self.rollout()));
        encode(&self.rollout(), &self.meta(), frame.bytes_mut());
        frame
    }

    fn rollout(&self) -> RolloutView<'_> {
        RolloutView {
            group: self.group,
            index: self.index,
            tokens: &self.tokens,
            prompt_tokens: self.prompt_tokens,
            rollout_logprobs: &self.logprobs,
            versions: &self.versions,
            routes: self.routes.as_ref().map(RouteRows::view),
            support: self.support.as_ref().map(SupportRows::view),
            finish: self.finish,
            cached_tokens: self.cached_tokens,
        }
    }

    fn meta(&self) -> FrameMeta<'_> {
        FrameMeta {
            layer_ids: &self.layer_ids,
            weight_epoch: self.weight_epoch,
            model_hash: self.model_hash,
            reward: self.reward,
            mask: Some(&self.mask),
        }
    }
}

/// Rows that hold the contract: in each choice distinct experts, in any order that a stride makes.
fn draw_routes(rows: usize, input: &mut Input<'_>) -> RouteRows {
    let n_experts = [1, 2, 5, 32, 127, 256, 257, 1009, 65_536][input.within(0, 8)];
    let dims =
        RouteDims { n_layers: input.within(1, 5), top_k: input.within(1, n_experts.min(8)), n_experts };
    let mut routes = RouteRows::with_capacity(dims, rows);
    let mut bytes = vec![0; dims.row_bytes()];
    for _ in 0..rows {
        let choices = (0..dims.n_layers).flat_map(|_| {
            let (first, forward) = (usize::from(input.u16()), input.u8().is_multiple_of(2));
            let step = move |k: usize| if forward { k } else { n_experts - k };
            (0..dims.top_k).map(move |k| ((first + step(k)) % n_experts) as u16)
        });
        let ids: Vec<u16> = choices.collect();
        write_ids(&ids, dims.width(), &mut bytes);
        routes.append(&bytes);
    }
    routes
}

/// Supports that hold their tokens; none of tokens that were given.
fn draw_supports(parts: &Parts, input: &mut Input<'_>) -> SupportRows {
    let mut supports = SupportRows::default();
    for (token, mask) in parts.tokens[parts.prompt_tokens..].iter().zip(&parts.mask) {
        let mut support: Vec<u32> = (0..input.within(0, 5)).map(|_| input.u32()).collect();
        support.push(token.0);
        support.sort_unstable();
        support.dedup();
        supports.push(if *mask == 1 { &support } else { &[] });
    }
    supports
}

fn finite(input: &mut Input<'_>) -> f32 {
    let value = f32::from_bits(input.u32());
    if value.is_finite() { value } else { -0.0 }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
