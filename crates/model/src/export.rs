//! Writes a Hugging Face directory that `transformers`, vLLM and SGLang load.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use r3_kernels::gemm::Dtype;
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype as StoredDtype, View, serialize_to_file};
use serde_json::{Value, json};

use crate::checkpoint::pieces;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::source::{SELECTION_BIAS, TensorSource, append_bytes, canonical_tensors};

/// Largest weight file; what `save_pretrained` uses.
const SHARD_BYTES: usize = 5_000_000_000;

/// Files beside the weights that make a directory usable, copied when they exist.
const COMPANIONS: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
];

/// Writes `config.json` and the weights of `source` as `dtype`, experts one by one, into the existing `dir`.
///
/// # Errors
/// If a tensor cannot be read or a file cannot be written.
pub fn write_weights(
    dir: &Path,
    config: &ModelConfig,
    source: &dyn TensorSource,
    dtype: Dtype,
) -> Result<(), ModelError> {
    write_in_shards(dir, config, source, dtype, SHARD_BYTES)
}

fn write_in_shards(
    dir: &Path,
    config: &ModelConfig,
    source: &dyn TensorSource,
    dtype: Dtype,
    max_shard_bytes: usize,
) -> Result<(), ModelError> {
    write_config(dir, config, dtype)?;
    let reader = PieceReader { source, last: RefCell::default() };
    let mut shards: Vec<Vec<(String, Piece<'_>)>> = vec![Vec::new()];
    let mut shard_bytes = 0;
    for (name, shape) in canonical_tensors(config) {
        let mut first = 0;
        for (piece_name, piece_shape) in pieces(&name, &shape, config) {
            let len: usize = piece_shape.iter().product();
            // Rounded, it would choose other experts; `transformers` keeps it so, too.
            let dtype = if name.ends_with(SELECTION_BIAS) { Dtype::F32 } else { dtype };
            let piece = Piece { reader: &reader, name: name.clone(), first, shape: piece_shape, dtype };
            first += len;
            if shard_bytes > 0 && shard_bytes + piece.data_len() > max_shard_bytes {
                shards.push(Vec::new());
                shard_bytes = 0;
            }
            shard_bytes += piece.data_len();
            shards.last_mut().expect("there is always a shard").push((piece_name, piece));
        }
    }
    // Pieces are written in the file's own order, so a tensor that cannot be read must be found before.
    let mut values = Vec::new();
    for (name, _) in canonical_tensors(config) {
        source.read(&name, &mut values)?;
    }
    write_shards(dir, shards)
}

/// Tokenizer and generation files, held so that they can be written beside weights at any later time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Companions {
    files: BTreeMap<&'static str, Vec<u8>>,
}

impl Companions {
    /// Adds those that exist in directory `from`, or, if that is a `tokenizer.json` of any name, it and those beside
    /// it; they replace those of the same name.
    ///
    /// # Errors
    /// If a file exists but cannot be read.
    pub fn add(&mut self, from: &Path) -> Result<(), ModelError> {
        let is_file = from.is_file();
        let dir = if is_file { from.parent().unwrap_or(Path::new("")) } else { from };
        for name in COMPANIONS {
            let path = if is_file && name == "tokenizer.json" { from.to_path_buf() } else { dir.join(name) };
            if path.exists() {
                let bytes = fs::read(&path).map_err(|source| ModelError::Read { path, source })?;
                self.files.insert(name, bytes);
            }
        }
        Ok(())
    }

    /// Writes them into `to`.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn write(&self, to: &Path) -> Result<(), ModelError> {
        self.files.iter().try_for_each(|(name, bytes)| {
            let path = to.join(name);
            fs::write(&path, bytes).map_err(|source| ModelError::Write { path, source })
        })
    }
}

fn write_config(dir: &Path, config: &ModelConfig, dtype: Dtype) -> Result<(), ModelError> {
    let mut raw = config.raw.clone();
    raw.remove("torch_dtype");
    let name = match dtype {
        Dtype::F32 => "float32",
        Dtype::Bf16 => "bfloat16",
    };
    raw.insert("dtype".to_owned(), Value::from(name));
    write_json(&dir.join("config.json"), &Value::Object(raw))
}

pub(crate) fn write_json(path: &Path, value: &Value) -> Result<(), ModelError> {
    fs::write(path, format!("{value:#}\n"))
        .map_err(|source| ModelError::Write { path: path.to_path_buf(), source })
}

fn write_shards(dir: &Path, shards: Vec<Vec<(String, Piece<'_>)>>) -> Result<(), ModelError> {
    let n_shards = shards.len();
    let mut weight_map = BTreeMap::new();
    let mut total_bytes = 0;
    for (index, shard) in shards.into_iter().enumerate() {
        let file = match n_shards {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{n_shards:05}.safetensors", index + 1),
        };
        for (name, piece) in &shard {
            weight_map.insert(name.clone(), file.clone());
            total_bytes += piece.data_len();
        }
        let path = dir.join(&file);
        let metadata = [("format".to_owned(), "pt".to_owned())].into();
        write_safetensors(&path, shard, Some(metadata))?;
    }
    if n_shards > 1 {
        let index = json!({ "metadata": { "total_size": total_bytes }, "weight_map": weight_map });
        write_json(&dir.join("model.safetensors.index.json"), &index)?;
    }
    Ok(())
}

/// Writes one safetensors file, as readable as any file of this process: left alone, safetensors makes it its owner's.
///
/// # Errors
/// If the file cannot be written.
pub fn write_safetensors<V: View>(
    path: &Path,
    tensors: impl IntoIterator<Item = (String, V)>,
    metadata: Option<HashMap<String, String>>,
) -> Result<(), ModelError> {
    let failed = |source| ModelError::Write { path: path.to_path_buf(), source };
    let created = fs::File::create(path).and_then(|file| file.metadata()).map_err(failed)?;
    serialize_to_file(tensors, metadata, path).map_err(|error| match error {
        SafeTensorError::IoError(source) => failed(source),
        other => failed(std::io::Error::other(other)),
    })?;
    fs::set_permissions(path, created.permissions()).map_err(failed)
}

/// A tensor of a file, written from where it lies.
#[derive(Clone, Debug)]
pub struct FileTensor<'a> {
    dtype: StoredDtype,
    shape: Vec<usize>,
    bytes: Cow<'a, [u8]>,
}

impl<'a> FileTensor<'a> {
    /// Of numbers, row-major.
    #[must_use]
    pub fn f32(shape: Vec<usize>, values: &'a [f32]) -> Self {
        let bytes = if cfg!(target_endian = "little") {
            Cow::Borrowed(bytemuck::cast_slice(values))
        } else {
            Cow::Owned(values.iter().flat_map(|value| value.to_le_bytes()).collect())
        };
        Self { dtype: StoredDtype::F32, shape, bytes }
    }

    /// Of bytes, in a row.
    #[must_use]
    pub fn u8(bytes: &'a [u8]) -> Self {
        Self { dtype: StoredDtype::U8, shape: vec![bytes.len()], bytes: Cow::Borrowed(bytes) }
    }
}

impl View for FileTensor<'_> {
    fn dtype(&self) -> StoredDtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Keeps the last fused tensors, so that their pieces are cut from one read.
///
/// Files are ordered by name, which takes an expert's down projection before its gate and up projections: of a
/// layer's two tensors, one is kept for each.
struct PieceReader<'a> {
    source: &'a dyn TensorSource,
    last: RefCell<[(String, Vec<f32>); 2]>,
}

/// A tensor of the written file: `shape` values of canonical tensor `name` from element `first` on.
struct Piece<'a> {
    reader: &'a PieceReader<'a>,
    name: String,
    first: usize,
    shape: Vec<usize>,
    dtype: Dtype,
}

impl View for Piece<'_> {
    fn dtype(&self) -> StoredDtype {
        match self.dtype {
            Dtype::F32 => StoredDtype::F32,
            Dtype::Bf16 => StoredDtype::BF16,
        }
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut kept = self.reader.last.borrow_mut();
        let last = &mut kept[usize::from(self.name.ends_with("down_proj"))];
        if last.0 != self.name {
            self.reader.source.read(&self.name, &mut last.1).expect("every tensor was read once before");
            last.0.clone_from(&self.name);
        }
        let len: usize = self.shape.iter().product();
        let mut bytes = Vec::with_capacity(self.data_len());
        append_bytes(&last.1[self.first..self.first + len], self.dtype, &mut bytes);
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        let value_bytes = match self.dtype {
            Dtype::F32 => 4,
            Dtype::Bf16 => 2,
        };
        self.shape.iter().product::<usize>() * value_bytes
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::checkpoint::Checkpoint;
    use crate::fixtures::{grouped_config, mixed_config};
    use crate::init::FreshWeights;

    #[test]
    fn what_is_written_reads_back_to_the_bit() {
        let (config, dir) = (mixed_config(), tempfile::tempdir().unwrap());
        let fresh = FreshWeights::new(&config, 3);
        let (mut written, mut found) = (Vec::new(), Vec::new());
        for dtype in [Dtype::F32, Dtype::Bf16] {
            write_weights(dir.path(), &config, &fresh, dtype).unwrap();
            let read = Checkpoint::open(dir.path()).unwrap();
            for (name, _) in canonical_tensors(&config) {
                fresh.read(&name, &mut written).unwrap();
                if dtype == Dtype::Bf16 {
                    written.iter_mut().for_each(|value| *value = half::bf16::from_f32(*value).to_f32());
                }
                read.read(&name, &mut found).unwrap();
                assert_eq!(written, found, "{name} as {dtype}");
            }
            assert_eq!(read.config().raw["some_future_key"], json!([1, 2]));
        }
    }

    /// Weights that bf16 rounds.
    struct Thirds;

    impl TensorSource for Thirds {
        fn read(&self, name: &str, out: &mut Vec<f32>) -> Result<(), ModelError> {
            let tensors = canonical_tensors(&grouped_config());
            let (_, shape) = tensors.iter().find(|(known, _)| known == name).unwrap();
            *out = vec![1.0 / 3.0; shape.iter().product()];
            Ok(())
        }
    }

    #[test]
    fn a_selection_bias_is_written_unrounded_and_shared_experts_by_projection() {
        let (config, dir) = (grouped_config(), tempfile::tempdir().unwrap());
        write_weights(dir.path(), &config, &Thirds, Dtype::Bf16).unwrap();
        let read = Checkpoint::open(dir.path()).unwrap();
        let mut found = Vec::new();
        for (name, _) in canonical_tensors(&config) {
            read.read(&name, &mut found).unwrap();
            assert_eq!(found[0] == 1.0 / 3.0, name.ends_with(SELECTION_BIAS), "{name}");
        }
        let bytes = fs::read(dir.path().join("model.safetensors")).unwrap();
        let stored = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let up = stored.tensor("model.layers.1.mlp.shared_experts.up_proj.weight").unwrap();
        assert_eq!(up.shape(), [12, 8]);
    }

    #[test]
    fn shards_read_back_as_the_single_file_does() {
        let config = mixed_config();
        let fresh = FreshWeights::new(&config, 3);
        let (single, sharded) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write_weights(single.path(), &config, &fresh, Dtype::Bf16).unwrap();
        write_in_shards(sharded.path(), &config, &fresh, Dtype::Bf16, 500).unwrap();
        let n_files = |dir: &Path| fs::read_dir(dir).unwrap().count();
        assert_eq!(n_files(single.path()), 2);
        assert!(n_files(sharded.path()) > 4);
        let [single, sharded] = [&single, &sharded].map(|dir| Checkpoint::open(dir.path()).unwrap());
        assert_eq!(single.bytes(), sharded.bytes());
        let (mut expected, mut found) = (Vec::new(), Vec::new());
        for (name, _) in canonical_tensors(&config) {
            single.read(&name, &mut expected).unwrap();
            sharded.read(&name, &mut found).unwrap();
            assert_eq!(found, expected, "{name}");
        }
    }

    /// Counts the reads of each tensor.
    struct Counted<'a> {
        source: &'a FreshWeights,
        reads: Mutex<BTreeMap<String, usize>>,
    }

    impl TensorSource for Counted<'_> {
        fn read(&self, name: &str, out: &mut Vec<f32>) -> Result<(), ModelError> {
            *self.reads.lock().unwrap().entry(name.to_owned()).or_default() += 1;
            self.source.read(name, out)
        }
    }

    #[test]
    fn a_tensor_is_read_once_to_be_checked_and_once_to_be_written() {
        let (config, dir) = (mixed_config(), tempfile::tempdir().unwrap());
        let source = Counted { source: &FreshWeights::new(&config, 3), reads: Mutex::default() };
        write_weights(dir.path(), &config, &source, Dtype::F32).unwrap();
        for (name, reads) in source.reads.into_inner().unwrap() {
            assert_eq!(reads, 2, "{name}");
        }
    }

    #[test]
    fn companions_of_a_read_only_directory_can_be_written_over() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = from.path().join("tokenizer.json");
        fs::write(&path, "{}").unwrap();
        let mut read_only = fs::metadata(&path).unwrap().permissions();
        read_only.set_readonly(true);
        fs::set_permissions(&path, read_only).unwrap();
        let mut companions = Companions::default();
        companions.add(from.path()).unwrap();
        companions.add(&path).unwrap();
        for _ in 0..2 {
            companions.write(to.path()).unwrap();
        }
        let written = to.path().join("tokenizer.json");
        assert_eq!(fs::read_to_string(&written).unwrap(), "{}");
        assert!(!fs::metadata(&written).unwrap().permissions().readonly());
    }

    #[test]
    fn the_weights_are_as_readable_as_the_config() {
        use std::os::unix::fs::PermissionsExt;
        let (config, dir) = (mixed_config(), tempfile::tempdir().unwrap());
        write_weights(dir.path(), &config, &FreshWeights::new(&config, 3), Dtype::F32).unwrap();
        let mode = |name: &str| fs::metadata(dir.path().join(name)).unwrap().permissions().mode();
        assert_eq!(mode("model.safetensors"), mode("config.json"));
    }
}
