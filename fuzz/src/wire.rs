//! Routes as others write them: what is let in keeps the contract, and comes back from r3's own file as it was.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use r3_core::rollout::Reward;
use r3_wire::array::Element;
use r3_wire::diff::compare;
use r3_wire::document::{self, Reading};
use r3_wire::layout::Layout;
use r3_wire::load::LayerLoad;
use r3_wire::model::ModelShape;
use r3_wire::npy;
use r3_wire::r3_file;
use r3_wire::record::{Record, Routes};
use serde_json::json;

use crate::bounded::bounded;
use crate::input::Input;
use crate::said::check_said;

/// Reading a file may hold which choice last named each of 65,536 experts, and [`READ_FACTOR`] bytes for each of its
/// own: JSON as a tree, text as bytes, ids as rows.
const READ_BYTES: usize = 1 << 20;
const READ_FACTOR: usize = 1 << 8;

/// Layouts of others.
const FOREIGN: [Layout; 6] =
    [Layout::Vllm, Layout::Atom, Layout::Sglang, Layout::NemoRl, Layout::PrimeRl, Layout::Lists];

/// Any bytes as a file of r3.
///
/// # Panics
/// If a property does not hold.
pub fn r3_lines(input: &[u8]) -> bool {
    let _ = Layout::guess(input);
    read(input, &Reading { layout: Layout::R3, model: None, start: 0 })
}

/// Any bytes as a file in any other layout, of one of a few models.
///
/// # Panics
/// If a property does not hold.
pub fn foreign(input: &[u8]) -> bool {
    let mut input = Input(input);
    let (layout, model) = (FOREIGN[input.within(0, FOREIGN.len() - 1)], model(&mut input));
    let start = input.u8().into();
    let _ = Layout::guess(input.0);
    read(input.0, &Reading { layout, model: Some(&model), start })
}

/// Any bytes as an array in the envelope of any layout, so that what lies behind base64 and JSON is reached.
///
/// # Panics
/// If a property does not hold.
pub fn payloads(input: &[u8]) -> bool {
    let mut input = Input(input);
    let (layout, model) = (FOREIGN[input.within(0, FOREIGN.len() - 1)], model(&mut input));
    let start = usize::from(input.u8() % 4);
    let element = Element::ALL[input.within(0, Element::ALL.len() - 1)];
    let columns = if input.u8().is_multiple_of(2) { model.n_layers() } else { model.dims().n_layers };
    let top_k = model.dims().top_k + usize::from(input.u8() == 1);
    // As many rows as there are bytes for, but for one that is said to be there and is not.
    let rows = input.0.len() / (columns * top_k * element.bytes());
    let array = &input.0[..rows * columns * top_k * element.bytes()];
    let rows = rows + usize::from(array.first() == Some(&0xff));
    let payload = match layout {
        Layout::Vllm | Layout::Atom => json!(STANDARD.encode(numpy(element, [rows, columns, top_k], array))),
        Layout::NemoRl => {
            json!(format!("nrlre1:{element}:{rows}x{columns}x{top_k}:{}", STANDARD.encode(array)))
        }
        Layout::PrimeRl => {
            json!({ "data": STANDARD.encode(array), "shape": [rows, columns, top_k], "start": start,
            "dtype": element.name() })
        }
        Layout::Lists => {
            let rows = array.chunks(columns * top_k).map(|row| row.chunks(top_k).collect());
            json!(rows.collect::<Vec<Vec<&[u8]>>>())
        }
        Layout::Sglang | Layout::R3 => json!(STANDARD.encode(array)),
    };
    let answer = json!({ "choices": [{ "routed_experts": payload }], "routed_experts_start_len": start });
    read(answer.to_string().as_bytes(), &Reading { layout, model: Some(&model), start })
}

fn numpy(element: Element, [rows, columns, top_k]: [usize; 3], array: &[u8]) -> Vec<u8> {
    let description = match element {
        Element::Int8 => "|i1",
        Element::Uint8 => "|u1",
        Element::Int16 => "<i2",
        Element::Uint16 => "<u2",
        Element::Int32 => "<i4",
        Element::Uint32 => "<u4",
        Element::Int64 => "<i8",
    };
    let header = format!(
        "{{'descr': '{description}', 'fortran_order': False, 'shape': ({rows}, {columns}, {top_k}), }}\n"
    );
    let header_bytes = u16::try_from(header.len()).expect("a short header").to_le_bytes();
    [npy::MAGIC, &[1, 0], &header_bytes, header.as_bytes(), array].concat()
}

fn model(input: &mut Input<'_>) -> ModelShape {
    let (n_layers, layer_ids, top_k, n_experts) = match input.within(0, 3) {
        0 => (4, vec![1, 3], 2, 8),
        1 => (2, vec![0, 1], 1, 2),
        2 => (3, vec![0, 1, 2], 4, 300),
        _ => (1, vec![0], 8, 65_536),
    };
    ModelShape::new(n_layers, layer_ids, top_k, n_experts).expect("a model")
}

/// Reads a file; whether a record was let in.
fn read(bytes: &[u8], reading: &Reading<'_>) -> bool {
    match bounded(bytes, READ_BYTES, READ_FACTOR, || document::read(bytes, reading)) {
        Ok(records) => {
            for (number, record) in records.iter().enumerate() {
                check(record, number, reading);
            }
            !records.is_empty()
        }
        Err(error) => {
            check_said(&error.to_string(), &error.hint());
            false
        }
    }
}

/// A record differs from itself nowhere, and each of its rows names `K` experts of each layer.
fn check_counts(record: &Record) {
    let Some(routes) = record.routes.as_ref().map(Routes::view) else { return };
    let n_rows = routes.rows.rows();
    match compare(record, record, 0) {
        Ok((found, difference)) => {
            assert_eq!((found.tokens, found.choices_differing, difference), (n_rows, 0, None));
        }
        Err(error) => {
            assert!(n_rows == 0, "{error}");
            check_said(&error.to_string(), &error.hint());
        }
    }
    let mut layers = LayerLoad::of(&routes);
    LayerLoad::add(&mut layers, &routes);
    let n_choices = (n_rows * routes.rows.dims().top_k) as u64;
    assert!(layers.iter().all(|layer| layer.total() == n_choices));
}

fn check(record: &Record, number: usize, reading: &Reading<'_>) {
    let n_tokens = record.tokens.as_ref().map(Vec::len);
    assert!(record.n_tokens().is_some() || record.routes.is_none());
    if let Some(routes) = &record.routes {
        let rows = routes.rows.view();
        assert_eq!(rows.check(rows.rows()), Ok(()));
        assert_eq!(routes.layer_ids.len(), rows.dims().n_layers);
        assert!(routes.layer_ids.is_sorted_by(|a, b| a < b), "layers {:?}", routes.layer_ids);
        if let Some(model) = reading.model {
            assert_eq!((rows.dims(), &*routes.layer_ids), (model.dims(), model.layer_ids()));
        }
        if let Some(n_tokens) = n_tokens {
            let fed = n_tokens - usize::from(record.prompt_tokens != Some(n_tokens));
            assert_eq!(routes.start + rows.rows(), fed, "of {n_tokens} tokens");
        }
    }
    check_counts(record);
    for turn in &record.turns {
        assert!(turn.start < turn.end && n_tokens.is_none_or(|n_tokens| turn.end <= n_tokens));
    }
    assert!(record.turns.is_sorted_by(|a, b| a.end <= b.start));
    assert!(record.rollout_logprobs.iter().flatten().all(|logprob| logprob.is_finite()));
    assert!(record.reward.and_then(Reward::score).is_none_or(f32::is_finite));

    let mut line = Vec::new();
    r3_file::write(&record.view(), &mut line).expect("memory can be written");
    let again = r3_file::read(&line, number).unwrap_or_else(|error| panic!("{error}: {record:?}"));
    assert_eq!(again, *record);
}
