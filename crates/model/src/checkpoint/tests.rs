//! Tests of model directories: what is read, and what is refused by name.

use safetensors::tensor::{TensorView, serialize, serialize_to_file};
use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::fixtures::{config_with, mixed_config};

/// A stored tensor: dtype, shape and bytes.
type Tensor = (StoredDtype, Vec<usize>, Vec<u8>);
type Tensors = BTreeMap<String, Tensor>;

fn tensor(shape: &[usize], values: impl IntoIterator<Item = f32>) -> Tensor {
    (StoredDtype::F32, shape.to_vec(), values.into_iter().flat_map(f32::to_le_bytes).collect())
}

/// Every tensor of `config`, experts one by one; its values count on from tensor to tensor.
fn tensors(config: &ModelConfig) -> Tensors {
    let mut next = 0.0;
    let mut count = |shape: &[usize]| {
        let len = shape.iter().product();
        let values = std::iter::repeat_with(|| {
            next += 0.5;
            next
        });
        tensor(shape, values.take(len).collect::<Vec<f32>>())
    };
    let all = canonical_tensors(config);
    let pieces = all.iter().flat_map(|(name, shape)| pieces(name, shape, config));
    pieces.map(|(name, shape)| (name, count(&shape))).collect()
}

fn views(tensors: &Tensors) -> impl Iterator<Item = (&String, TensorView<'_>)> {
    tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()))
}

fn write_config(config: &ModelConfig) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), Value::Object(config.raw.clone()).to_string()).unwrap();
    dir
}

fn write(config: &ModelConfig, tensors: &Tensors) -> TempDir {
    let dir = write_config(config);
    serialize_to_file(views(tensors), None, &dir.path().join("model.safetensors")).unwrap();
    dir
}

/// Writes `shards` under the names of `files`, with an index.
fn write_shards(config: &ModelConfig, shards: &[Tensors]) -> TempDir {
    let dir = write_config(config);
    let mut weight_map = serde_json::Map::new();
    for (index, shard) in shards.iter().enumerate() {
        let file = format!("{index}.safetensors");
        serialize_to_file(views(shard), None, &dir.path().join(&file)).unwrap();
        weight_map.extend(shard.keys().map(|name| (name.clone(), json!(file))));
    }
    write_index(&dir, &json!({ "weight_map": weight_map }));
    dir
}

fn write_index(dir: &TempDir, index: &Value) {
    fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// All values as bits, in canonical order.
fn values(dir: &TempDir) -> Vec<Vec<u32>> {
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let mut values = Vec::new();
    let names = canonical_tensors(checkpoint.config());
    let mut bits = |name: &str| {
        checkpoint.read(name, &mut values).unwrap();
        values.iter().map(|value| value.to_bits()).collect()
    };
    names.iter().map(|(name, _)| bits(name)).collect()
}

/// Why the directory cannot be opened, without the directory.
fn refused(dir: &TempDir) -> String {
    let error = Checkpoint::open(dir.path()).map(drop).unwrap_err();
    error
        .to_string()
        .replace(&format!("{}/", dir.path().display()), "")
        .replace(&format!("{}: ", dir.path().display()), "")
}

const GATE_UP: &str = "model.layers.1.mlp.experts.gate_up_proj";
const DOWN: &str = "model.layers.1.mlp.experts.down_proj";

#[test]
fn fused_experts_are_the_experts_one_by_one_in_order() {
    let config = mixed_config();
    let apart = tensors(&config);
    let mut fused = apart.clone();
    for (name, shape) in canonical_tensors(&config) {
        let parts = pieces(&name, &shape, &config);
        let bytes: Vec<u8> = parts.iter().flat_map(|(piece, _)| fused.remove(piece).unwrap().2).collect();
        fused.insert(name, (StoredDtype::F32, shape, bytes));
    }
    assert_eq!(apart.len(), fused.len() + 3 * 3 - 2 + 1, "two fused tensors of the experts, one of the MLP");
    assert_eq!(values(&write(&config, &apart)), values(&write(&config, &fused)));

    let checkpoint = Checkpoint::open(write(&config, &apart).path()).unwrap();
    let (mut gate_up, mut piece) = (Vec::new(), [7.0; 48]);
    checkpoint.read(GATE_UP, &mut gate_up).unwrap();
    checkpoint.read_stored("model.layers.1.mlp.experts.1.up_proj.weight", 0, &mut piece).unwrap();
    assert_eq!(gate_up[3 * 48..4 * 48], piece, "expert 1's up rows come fourth");
}

#[test]
fn shards_are_one_model() {
    let config = mixed_config();
    let all = tensors(&config);
    let (even, odd): (Vec<_>, Vec<_>) = all.clone().into_iter().zip(0..).partition(|(_, at)| at % 2 == 0);
    let shard = |part: Vec<((String, Tensor), i32)>| part.into_iter().map(|(tensor, _)| tensor).collect();
    let sharded = write_shards(&config, &[shard(even), shard(odd)]);
    assert_eq!(values(&sharded), values(&write(&config, &all)));
    let bytes = |dir: &TempDir| Checkpoint::open(dir.path()).unwrap().bytes();
    assert_eq!(bytes(&sharded), 4 * config.n_parameters() as u64);
}

#[test]
fn a_single_file_comes_before_an_index() {
    let config = mixed_config();
    let dir = write(&config, &tensors(&config));
    write_index(&dir, &json!({ "weight_map": { "old": "gone.safetensors" } }));
    assert!(Checkpoint::open(dir.path()).is_ok());
}

#[test]
fn every_stored_format_gives_its_exact_values() {
    let config = mixed_config();
    let stored: [(StoredDtype, Vec<u8>, f32); 5] = [
        (StoredDtype::F32, 0.1f32.to_le_bytes().into(), 0.1),
        (StoredDtype::F32, f32::from_bits(1).to_le_bytes().into(), f32::from_bits(1)),
        (StoredDtype::BF16, 0x3F81_u16.to_le_bytes().into(), 1.007_812_5),
        (StoredDtype::F16, 0x3C01_u16.to_le_bytes().into(), 1.000_976_6),
        (StoredDtype::F16, 0x0001_u16.to_le_bytes().into(), 5.960_464_5e-8),
    ];
    for (dtype, bytes, expected) in stored {
        let mut changed = tensors(&config);
        changed.insert("model.norm.weight".into(), (dtype, vec![8], bytes.repeat(8)));
        let dir = write(&config, &changed);
        let mut found = vec![7.0];
        Checkpoint::open(dir.path()).unwrap().read("model.norm.weight", &mut found).unwrap();
        assert_eq!(found, [expected; 8], "{dtype:?}");
    }
}

#[test]
fn a_tensor_of_several_reads_is_read_whole() {
    const { assert!(9001 * 8 * 2 > 2 * READ_BYTES && !(9001_usize * 8 * 2).is_multiple_of(READ_BYTES)) };
    let config = config_with(json!({ "vocab_size": 9001 }));
    let name = "model.embed_tokens.weight";
    let numbers: Vec<u16> = (0..9001 * 8).map(|i: u32| (i * 7 % 0x7bff) as u16).collect();
    let bf16s: Vec<f32> = numbers.iter().map(|&bits| half::bf16::from_bits(bits).to_f32()).collect();
    let f16s: Vec<f32> = numbers.iter().map(|&bits| half::f16::from_bits(bits).to_f32()).collect();
    let narrow: Vec<u8> = numbers.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let wide: Vec<u8> = bf16s.iter().flat_map(|value| value.to_le_bytes()).collect();
    for (dtype, bytes, expected) in [
        (StoredDtype::BF16, narrow.clone(), &bf16s),
        (StoredDtype::F16, narrow, &f16s),
        (StoredDtype::F32, wide, &bf16s),
    ] {
        let mut changed = tensors(&config);
        changed.insert(name.into(), (dtype, vec![9001, 8], bytes));
        let checkpoint = Checkpoint::open(write(&config, &changed).path()).unwrap();
        let mut found = vec![7.0; 3];
        in_pool(3, || checkpoint.read(name, &mut found)).unwrap();
        assert!(found == *expected, "{dtype:?}");
        for len in [found.len() + 1, 5] {
            found.resize(len, 7.0);
            checkpoint.read(name, &mut found).unwrap();
            assert!(found == *expected, "{dtype:?} on one thread, over {len}");
        }
        found.clear();
        checkpoint.visit(name, &mut |run| found.extend_from_slice(run)).unwrap();
        assert!(found == *expected, "{dtype:?}, visited");
    }
}

#[test]
fn experts_that_are_visited_are_the_experts_that_are_read() {
    let config = mixed_config();
    let checkpoint = Checkpoint::open(write(&config, &tensors(&config)).path()).unwrap();
    for name in [GATE_UP, DOWN, "model.norm.weight"] {
        let (mut expected, mut found) = (Vec::new(), Vec::new());
        checkpoint.read(name, &mut expected).unwrap();
        checkpoint.visit(name, &mut |run| found.extend_from_slice(run)).unwrap();
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn a_tensor_that_is_not_as_it_should_be_is_refused_by_name() {
    let config = mixed_config();
    let refusal = |change: &dyn Fn(&mut Tensors)| {
        let mut changed = tensors(&config);
        change(&mut changed);
        refused(&write(&config, &changed))
    };
    let up = "model.layers.1.mlp.experts.2.up_proj.weight";
    let bias = "model.layers.0.self_attn.o_proj.bias";
    let missing = refusal(&|tensors| drop(tensors.remove(up)));
    assert_eq!(missing, format!("tensor `{up}` is missing"));
    let missing = refusal(&|tensors| drop(tensors.remove(bias)));
    assert_eq!(missing, format!("tensor `{bias}` is missing"));
    let surplus = refusal(&|tensors| drop(tensors.insert("extra".into(), tensor(&[1], [0.0]))));
    assert_eq!(surplus, "tensor `extra` is not part of this model");
    let beside = refusal(&|tensors| drop(tensors.insert(DOWN.into(), tensor(&[3, 8, 6], [0.0; 144]))));
    assert_eq!(beside, "tensor `model.layers.1.mlp.experts.0.down_proj.weight` is not part of this model");
    let turned = refusal(&|tensors| tensors.get_mut(up).unwrap().1.reverse());
    assert_eq!(turned, format!("tensor `{up}` has shape [8, 6], but config.json implies [6, 8]"));
    let whole = refusal(&|tensors| tensors.get_mut(bias).unwrap().0 = StoredDtype::I32);
    assert_eq!(whole, format!("tensor `{bias}` is stored as I32"));
}

#[test]
fn a_stored_head_of_a_tied_model_has_to_be_the_embedding() {
    let config = config_with(json!({ "tie_word_embeddings": true }));
    let refusal = |head: Tensor| {
        let mut changed = tensors(&config);
        changed.insert("lm_head.weight".into(), head);
        let dir = write(&config, &changed);
        Checkpoint::open(dir.path()).map(drop).map_err(|_| refused(&dir))
    };
    let embedding = tensors(&config)["model.embed_tokens.weight"].clone();
    assert_eq!(refusal(embedding.clone()), Ok(()));
    let mut other = embedding.clone();
    other.2[0] ^= 1;
    assert_eq!(refusal(other), Err("tensor `lm_head.weight` is not part of this model".into()));
    let turned = (StoredDtype::F32, vec![8, 10], embedding.2.clone());
    let shape = "has shape [8, 10], but config.json implies [10, 8]";
    assert_eq!(refusal(turned), Err(format!("tensor `lm_head.weight` {shape}")));
    let whole = (StoredDtype::I32, vec![10, 8], embedding.2);
    assert_eq!(refusal(whole), Err("tensor `lm_head.weight` is stored as I32".into()));
}

#[test]
fn a_file_that_is_not_whole_is_refused_with_its_size() {
    let config = mixed_config();
    let whole = serialize(views(&tensors(&config)), None).unwrap();
    let with_header = |header: &str| {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes
    };
    let lying = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#;
    for (bytes, reason) in [
        (whole[..7].to_vec(), "it is only 7 bytes long".to_owned()),
        (whole[..99].to_vec(), "the file has 99".into()),
        (whole[..whole.len() - 1].to_vec(), format!("the file has {}", whole.len() - 1)),
        ([&whole[..], &[0]].concat(), format!("the file has {}", whole.len() + 1)),
        ([&u64::MAX.to_le_bytes()[..], &whole[8..]].concat(), "its header says".into()),
        (with_header("{ no"), "its header is not the JSON it should be".into()),
        (with_header(lying), "its header is not the JSON it should be".into()),
    ] {
        let dir = write_config(&config);
        fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        let said = refused(&dir);
        assert!(said.starts_with("model.safetensors is not a whole safetensors file: "), "{said}");
        assert!(said.contains(&reason), "{said}");
    }
}

#[test]
fn shards_that_do_not_fit_each_other_are_refused() {
    let config = mixed_config();
    let all = tensors(&config);
    let twice = write_shards(&config, &[all.clone(), [all.first_key_value().unwrap()].map(owned).into()]);
    assert!(refused(&twice).contains("tensor `lm_head.weight` is in another shard as well"));

    let gone = write_shards(&config, &[all]);
    fs::remove_file(gone.path().join("0.safetensors")).unwrap();
    assert_eq!(refused(&gone), "cannot read 0.safetensors");

    for index in [
        json!({ "weight_map": { "a": "../model.safetensors" } }),
        json!({ "weight_map": { "a": "/etc/passwd" } }),
        json!({ "weight_map": { "a": ".." } }),
        json!({ "weight_map": { "a": 1 } }),
        json!({ "weight_map": [] }),
        json!({}),
    ] {
        let dir = write_config(&config);
        write_index(&dir, &index);
        assert!(refused(&dir).contains("`weight_map` is unusable"), "{index}");
    }
    let dir = write_config(&config);
    assert_eq!(refused(&dir), "no model.safetensors and no model.safetensors.index.json");
}

fn owned((name, tensor): (&String, &Tensor)) -> (String, Tensor) {
    (name.clone(), tensor.clone())
}

#[test]
fn a_value_that_is_not_finite_is_found_where_it_lies() {
    let config = mixed_config();
    let up = "model.layers.1.mlp.experts.2.up_proj.weight";
    for (value, said) in [(f32::NAN, "NaN"), (f32::NEG_INFINITY, "-inf")] {
        let mut changed = tensors(&config);
        changed.get_mut(up).unwrap().2[4 * 5..4 * 6].copy_from_slice(&value.to_le_bytes());
        let dir = write(&config, &changed);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let read = checkpoint.read(GATE_UP, &mut Vec::new());
        let visited = checkpoint.visit(GATE_UP, &mut |_| {});
        for error in [read.unwrap_err(), visited.unwrap_err()] {
            assert_eq!(error.to_string(), format!("tensor `{up}` is {said} at element 5"));
        }
    }
}

#[test]
fn the_first_of_several_bad_values_is_named_whoever_finds_one_first() {
    let config = config_with(json!({ "vocab_size": 60_001 }));
    let name = "model.embed_tokens.weight";
    let mut changed = tensors(&config);
    let values = changed.get_mut(name).unwrap();
    for at in [200_003, 300_000, 479_999] {
        values.2[4 * at..4 * (at + 1)].copy_from_slice(&f32::INFINITY.to_le_bytes());
    }
    let checkpoint = Checkpoint::open(write(&config, &changed).path()).unwrap();
    for threads in [1, 2, 3, 8] {
        // A thread that reads the end of the tensor is the first to fail now and then.
        for _ in 0..50 {
            let error = in_pool(threads, || checkpoint.read(name, &mut Vec::new())).unwrap_err();
            assert_eq!(error.to_string(), format!("tensor `{name}` is inf at element 200003"), "{threads}");
        }
    }
}

#[test]
fn a_file_that_is_cut_off_while_it_is_read_is_named() {
    let config = config_with(json!({ "vocab_size": 9001 }));
    let dir = write(&config, &tensors(&config));
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let path = dir.path().join("model.safetensors");
    let whole = fs::metadata(&path).unwrap().len();
    File::options().write(true).open(&path).unwrap().set_len(whole - 9001 * 8 * 4).unwrap();
    let names = canonical_tensors(&config).into_iter().map(|(name, _)| name);
    let failed: Vec<String> = names
        .filter_map(|name| in_pool(3, || checkpoint.read(&name, &mut Vec::new())).err())
        .map(|error| error.to_string())
        .collect();
    assert!(!failed.is_empty());
    assert!(failed.iter().all(|said| *said == format!("cannot read {}", path.display())), "{failed:?}");
}

fn in_pool<R: Send>(threads: usize, body: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(body)
}
