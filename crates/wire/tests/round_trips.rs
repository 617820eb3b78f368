//! Any model's routes survive the way through every layout and back, byte for byte, and no damage to them panics.

use proptest::collection::vec;
use proptest::sample::{Index, select, subsequence};
use proptest::strategy::{Just, Strategy};
use proptest::{prop_assert, prop_assert_eq, proptest};
use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_core::rollout::{FinishReason, Reward};
use r3_core::routes::{RouteRows, write_ids};
use r3_core::support::SupportRows;
use r3_wire::array::Element;
use r3_wire::check::Sample;
use r3_wire::document::{self, Reading};
use r3_wire::error::{Fault, WireError};
use r3_wire::layout::Layout;
use r3_wire::model::ModelShape;
use r3_wire::r3_file::{self, Records};
use r3_wire::record::{Record, Routes, SamplingParams};
use r3_wire::{nemo_rl, prime_rl, sglang, vllm};

const FOREIGN: [Layout; 5] = [Layout::Vllm, Layout::Atom, Layout::Sglang, Layout::NemoRl, Layout::PrimeRl];

/// Dense layers anywhere, and numbers of experts around what a byte and an int16 hold.
fn models() -> impl Strategy<Value = ModelShape> {
    let layers = (1usize..6).prop_flat_map(|n_layers| {
        (Just(n_layers), subsequence((0..n_layers as u32).collect::<Vec<_>>(), 1..=n_layers))
    });
    let experts = select(vec![1usize, 2, 5, 127, 128, 129, 255, 256, 257, 512, 32_768, 32_769, 65_536]);
    let experts = experts.prop_flat_map(|n_experts| (Just(n_experts), 1..=n_experts.min(4)));
    (layers, experts).prop_map(|((n_layers, layer_ids), (n_experts, top_k))| {
        ModelShape::new(n_layers, layer_ids, top_k, n_experts).unwrap()
    })
}

/// `n_rows` rows of `model`, each choice without repetition. `draws` decides; ids near both ends are likely.
fn rows(model: &ModelShape, n_rows: usize, draws: &[u16]) -> RouteRows {
    let dims = model.dims();
    let mut rows = RouteRows::with_capacity(dims, n_rows);
    let mut draws = draws.iter().cycle();
    let (mut ids, mut bytes) = (vec![0; dims.row_ids()], vec![0; dims.row_bytes()]);
    for row in 0..n_rows {
        for choice in ids.chunks_exact_mut(dims.top_k) {
            let draw = usize::from(*draws.next().unwrap());
            let first =
                if draw.is_multiple_of(2) { dims.n_experts - 1 - draw % 3 % dims.n_experts } else { draw };
            for (k, id) in choice.iter_mut().enumerate() {
                *id = u16::try_from((first + k) % dims.n_experts).unwrap();
            }
            // A first row of zeros, and a short sample, would read as one that was never captured.
            if row == 0 && choice[0] == 0 && dims.n_experts > 1 {
                choice.fill(0);
                (0u16..).zip(choice).for_each(|(k, id)| *id = (k + 1) % dims.n_experts as u16);
            }
        }
        write_ids(&ids, dims.width(), &mut bytes);
        rows.append(&bytes);
    }
    rows
}

const SAMPLING: SamplingParams = SamplingParams { temperature: 0.7, sample_top_k: 0, top_p: 1.0, min_p: 0.0 };

const TRUNCATED: SamplingParams = SamplingParams { sample_top_k: 40, top_p: 0.9, min_p: 1e-3, ..SAMPLING };

/// A truncated rollout's: of each token but the fourth, which was given. `None` of no tokens.
fn supports(sampled: &[TokenId]) -> Option<SupportRows> {
    let mut supports = SupportRows::default();
    for (n, &TokenId(token)) in sampled.iter().enumerate() {
        let own = [token / 2, token, token + 7];
        supports.push(if n == 3 { &[] } else { &own[usize::from(token == 0)..] });
    }
    Some(supports).filter(|supports| supports.rows() > 0)
}

/// A model, and a rollout of it in several turns, whose rows begin at a position up to `max_start`.
fn rollouts(max_start: usize) -> impl Strategy<Value = (ModelShape, Record)> {
    let sizes = (1usize..6, 0usize..9, 0..=max_start);
    (models(), sizes, vec(0u16.., 64), vec(0u32..1000, 16)).prop_map(
        |(model, (prompt_tokens, sampled, start), draws, token_ids)| {
            let n_tokens = prompt_tokens + sampled;
            let end = n_tokens - usize::from(sampled > 0);
            let start = start.min(prompt_tokens).min(end);
            let mut routes =
                Routes::new(rows(&model, end - start, &draws), start, model.layer_ids().to_vec());
            routes.weight_epoch = Some(u64::from(draws[0]));
            routes.model_hash = Some(u64::MAX - u64::from(draws[1]));
            // The fourth token of a longer completion was given.
            let turns = match sampled {
                0..4 => [prompt_tokens..n_tokens, n_tokens..n_tokens],
                _ => [prompt_tokens..prompt_tokens + 3, prompt_tokens + 4..n_tokens],
            };
            let turns = turns.into_iter().filter(|turn| !turn.is_empty()).collect();
            let tokens: Vec<TokenId> =
                token_ids.iter().cycle().take(n_tokens).copied().map(TokenId).collect();
            let record = Record {
                finish: Some(FinishReason::Length),
                support: supports(&tokens[prompt_tokens..]).filter(|_| draws[2].is_multiple_of(2)),
                tokens: Some(tokens),
                prompt_tokens: Some(prompt_tokens),
                cached_tokens: prompt_tokens / 2,
                turns,
                rollout_logprobs: Some((0..sampled).map(|n| -0.1 * n as f32).collect()),
                sampling: [None, Some(SAMPLING), Some(TRUNCATED)][usize::from(draws[3] % 3)],
                versions: Some((0..sampled as u64).map(PolicyVersion).collect()),
                reward: [None, Some(Reward::Failed), Some(Reward::Score(0.3))][start % 3],
                text: Some("\"2 + 2\"\n".into()).filter(|_| start % 2 == 0),
                routes: Some(routes),
                ..Record::unknown(GroupId(u64::MAX), 3)
            };
            (model, record)
        },
    )
}

fn r3_line(record: &Record) -> Vec<u8> {
    let mut line = Vec::new();
    r3_file::write(&record.view(), &mut line).unwrap();
    line
}

/// What an engine of `layout` would have sent, if it can say this record.
fn foreign(record: &Record, model: &ModelShape, layout: Layout) -> Result<String, WireError> {
    let sample = record.sample(layout, 0);
    Ok(format!("{}\n", document::write(record, model, Element::Int16, &sample)?))
}

/// Whether `layout` has a place for `record`: an int16 ends at 32,767, an envelope begins at position 0 and takes a last
/// token for one that was sampled.
fn can_say(record: &Record, layout: Layout) -> bool {
    let routes = record.routes.as_ref().unwrap();
    let view = routes.rows.view();
    let dims = view.dims();
    let cells = (0..view.rows()).flat_map(|row| (0..dims.n_layers).map(move |layer| (row, layer)));
    let largest =
        cells.flat_map(|(row, layer)| (0..dims.top_k).map(move |k| view.expert(row, layer, k))).max();
    match layout {
        Layout::Vllm | Layout::Atom => largest.unwrap_or(0) < 32_768,
        Layout::NemoRl => routes.start == 0,
        _ => true,
    }
}

proptest! {
    #[test]
    fn a_record_reads_back_from_r3s_own_file((model, record) in rollouts(5)) {
        let line = r3_line(&record);
        let records: Vec<Record> = Records::new(&line[..]).collect::<Result<_, _>>().unwrap();
        prop_assert_eq!(&records, std::slice::from_ref(&record));
        prop_assert_eq!(r3_line(&records[0]), &line[..]);
        prop_assert_eq!(Layout::guess(&line), Some(Layout::R3));
        records[0].check_model(&model, &records[0].sample(Layout::R3, 0)).unwrap();
    }

    #[test]
    fn every_layout_goes_through_r3_and_back_byte_for_byte((model, record) in rollouts(5)) {
        for layout in FOREIGN {
            if !can_say(&record, layout) {
                prop_assert!(foreign(&record, &model, layout).is_err());
                continue;
            }
            let sent = foreign(&record, &model, layout).unwrap();
            let guessed = if layout == Layout::Atom { Layout::Vllm } else { layout };
            prop_assert_eq!(Layout::guess(sent.as_bytes()), Some(guessed));
            if layout == Layout::NemoRl && record.turns.is_empty() {
                // All tokens were inputs, but NeMo-RL has padding for the last.
                continue;
            }
            let reading = Reading { layout, model: Some(&model), start: 0 };
            let read = document::read(sent.as_bytes(), &reading).unwrap();
            prop_assert_eq!(read.len(), 1);
            let (found, expected) = (read[0].routes.as_ref().unwrap(), record.routes.as_ref().unwrap());
            prop_assert_eq!(found.view().rows, expected.view().rows);
            prop_assert_eq!((found.start, &found.layer_ids), (expected.start, &expected.layer_ids));
            prop_assert_eq!((&read[0].tokens, read[0].prompt_tokens), (&record.tokens, record.prompt_tokens));
            let through_r3 = r3_file::read(&r3_line(&read[0]), 0).unwrap();
            prop_assert_eq!(foreign(&through_r3, &model, layout).unwrap(), sent);
        }
    }

    #[test]
    fn every_element_type_that_holds_the_ids_is_read_from_numpy((model, record) in rollouts(0)) {
        let sample = record.sample(Layout::Vllm, 0);
        let rows = record.routes.as_ref().unwrap().rows.view();
        for element in Element::ALL {
            match vllm::write_npy(rows, &model, element, &sample) {
                Ok(file) => {
                    let read = vllm::read_npy(&file, &model, &sample).unwrap();
                    prop_assert_eq!(read.view(), rows);
                }
                Err(WireError::Sample { fault: Fault::TooWide { expert, .. }, .. }) => {
                    prop_assert!(!element.holds(expert.into()));
                }
                Err(other) => panic!("{other}"),
            }
        }
    }

    #[test]
    fn cut_or_changed_payloads_are_refused_or_read_but_never_panic(
        (model, record) in rollouts(3),
        (at, byte) in (proptest::arbitrary::any::<Index>(), 0u8..),
        layout in select(FOREIGN.to_vec()),
    ) {
        let whole = if can_say(&record, layout) {
            foreign(&record, &model, layout).unwrap().into_bytes()
        } else {
            r3_line(&record)
        };
        let mut changed = whole.clone();
        let at = at.index(whole.len());
        changed[at] = byte;
        for bytes in [&whole[..at], &changed] {
            for layout in FOREIGN.into_iter().chain([Layout::R3]) {
                let reading = Reading { layout, model: Some(&model), start: 0 };
                if let Err(error) = document::read(bytes, &reading) {
                    prop_assert!(!error.to_string().is_empty() && !error.hint().is_empty());
                }
            }
            let _ = Layout::guess(bytes);
        }
    }

    #[test]
    fn any_text_is_refused_or_read(text in ".{0,40}", bytes in vec(0u8.., 0..80), model in models()) {
        let sample = Sample::new(Layout::Sglang, 0);
        let _ = sglang::read(&text, &model, &sample);
        let _ = vllm::read_base64(&text, &model, &sample);
        let _ = vllm::read_npy(&[b"\x93NUMPY\x01\x00", &bytes[..]].concat(), &model, &sample);
        let _ = nemo_rl::read(&format!("nrlre1:int8:1x1x1:{text}"), &model, &sample);
        let _ = nemo_rl::read(&format!("nrlre1:{text}"), &model, &sample);
        let shape = bytes.iter().map(|&size| usize::from(size) << 60).collect();
        let payload = prime_rl::Payload { data: text, shape, start: usize::MAX, dtype: "int64".into() };
        let _ = prime_rl::read(&payload, &model, &sample);
        let _ = r3_file::read(&bytes, 0);
    }
}
