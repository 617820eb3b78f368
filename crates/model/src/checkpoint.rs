//! Reads the weights of a Hugging Face directory: one safetensors file or shards, bf16, f16 or f32, experts
//! one by one or fused.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use r3_kernels::cast::{widen_bf16, widen_f16};
use r3_kernels::parallel;
use safetensors::tensor::{Dtype as StoredDtype, Metadata};
use serde_json::Value;

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::source::{TensorSource, canonical_tensors, check_run};

/// Bytes read at once: they stay in a cache until they are cast and checked.
const READ_BYTES: usize = 1 << 16;

/// Multiply-adds that reading a value takes, about.
const READ_WORK: usize = 64;

/// A directory whose tensors have been matched, by name and shape, with its `config.json`.
///
/// Values are read from disk on demand: opening a large model costs its headers, and a tied model its stored head.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config: ModelConfig,
    files: Vec<(PathBuf, File)>,
    stored: HashMap<String, Stored>,
    parts: BTreeMap<String, Vec<String>>,
}

/// Where a stored tensor lies.
#[derive(Debug)]
struct Stored {
    file: usize,
    dtype: StoredDtype,
    shape: Vec<usize>,
    offset: u64,
    bytes: usize,
}

impl Stored {
    /// Its numbers.
    fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

/// How a file begins that stands for one in Git LFS, where that was not fetched; as a header it would have 2 EB.
const LFS_POINTER: &[u8; 8] = b"version ";

impl Checkpoint {
    /// Opens `dir` and checks that it holds exactly the tensors its `config.json` implies.
    ///
    /// # Errors
    /// The first file, key or tensor that is missing, truncated, misshapen, of a dtype r3 does not read, or surplus.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        let config = ModelConfig::load(dir)?;
        let mut checkpoint = Self {
            dir: dir.to_path_buf(),
            config,
            files: Vec::new(),
            stored: HashMap::new(),
            parts: BTreeMap::new(),
        };
        for path in weight_files(dir)? {
            checkpoint.index_file(path)?;
        }
        checkpoint.match_tensors()?;
        Ok(checkpoint)
    }

    /// The model's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes of all weights on disk.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.stored.values().map(|stored| stored.bytes as u64).sum()
    }

    fn index_file(&mut self, path: PathBuf) -> Result<(), ModelError> {
        let read = |source| ModelError::Read { path: path.clone(), source };
        let broken = |reason: String| ModelError::Safetensors { path: path.clone(), reason };
        let file = File::open(&path).map_err(read)?;
        let file_bytes = file.metadata().map_err(read)?.len();
        let mut prefix = [0; 8];
        if file_bytes < 8 {
            return Err(broken(format!("it is only {file_bytes} bytes long")));
        }
        file.read_exact_at(&mut prefix, 0).map_err(read)?;
        if prefix == *LFS_POINTER {
            return Err(ModelError::LfsPointer { path });
        }
        let header_bytes = u64::from_le_bytes(prefix);
        if header_bytes > file_bytes - 8 {
            return Err(broken(format!("its header says {header_bytes} bytes, the file has {file_bytes}")));
        }
        let header_len = usize::try_from(header_bytes).map_err(|error| broken(error.to_string()))?;
        let mut header = vec![0; header_len];
        file.read_exact_at(&mut header, 8).map_err(read)?;
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|error| broken(format!("its header is not the JSON it should be ({error})")))?;
        let data_bytes = metadata.tensors().values().map(|tensor| tensor.data_offsets.1).max().unwrap_or(0);
        let needed = (8 + header_bytes).saturating_add(data_bytes as u64);
        if needed != file_bytes {
            return Err(broken(format!("its tensors need {needed} bytes, the file has {file_bytes}")));
        }
        let index = self.files.len();
        for (name, tensor) in metadata.tensors() {
            let (start, end) = tensor.data_offsets;
            let stored = Stored {
                file: index,
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
                offset: 8 + header_bytes + start as u64,
                bytes: end - start,
            };
            if self.stored.insert(name.clone(), stored).is_some() {
                return Err(broken(format!("tensor `{name}` is in another shard as well")));
            }
        }
        self.files.push((path, file));
        Ok(())
    }

    /// Finds, for every canonical tensor, the stored tensors that make it up.
    fn match_tensors(&mut self) -> Result<(), ModelError> {
        let mut surplus: BTreeSet<&str> = self.stored.keys().map(String::as_str).collect();
        let mut parts = BTreeMap::new();
        for (name, shape) in canonical_tensors(&self.config) {
            let pieces = match self.stored.contains_key(&name) {
                true => vec![(name.clone(), shape)],
                false => pieces(&name, &shape, &self.config),
            };
            for (piece, needed) in &pieces {
                self.check_stored(piece, needed)?;
                surplus.remove(piece.as_str());
            }
            parts.insert(name, pieces.into_iter().map(|(piece, _)| piece).collect());
        }
        if self.config.tied_head && surplus.contains("lm_head.weight") {
            self.check_tied_head()?;
            surplus.remove("lm_head.weight");
        }
        if let Some(name) = surplus.first() {
            return Err(ModelError::Surplus { dir: self.dir.clone(), name: (*name).to_owned() });
        }
        self.parts = parts;
        Ok(())
    }

    fn check_stored(&self, name: &str, needed: &[usize]) -> Result<(), ModelError> {
        let missing = || ModelError::Missing { dir: self.dir.clone(), name: name.to_owned() };
        let stored = self.stored.get(name).ok_or_else(missing)?;
        if stored.shape != needed {
            let (found, needed) = (stored.shape.clone(), needed.to_vec());
            return Err(ModelError::Shape { dir: self.dir.clone(), name: name.to_owned(), found, needed });
        }
        if !matches!(stored.dtype, StoredDtype::BF16 | StoredDtype::F16 | StoredDtype::F32) {
            let found = format!("{:?}", stored.dtype);
            return Err(ModelError::Dtype { dir: self.dir.clone(), name: name.to_owned(), found });
        }
        Ok(())
    }

    /// A tied model may store its head all the same, but only as a copy of the embedding.
    fn check_tied_head(&self) -> Result<(), ModelError> {
        self.check_stored("lm_head.weight", &[self.config.vocab_size, self.config.hidden_size])?;
        let [embedding, head] = ["model.embed_tokens.weight", "lm_head.weight"].map(|name| {
            let mut values = Vec::new();
            self.read_parts(&[name.to_owned()], &mut values).map(|()| values)
        });
        if embedding? == head? {
            return Ok(());
        }
        Err(ModelError::Surplus { dir: self.dir.clone(), name: "lm_head.weight".to_owned() })
    }

    /// The stored tensors that make up tensor `name`.
    fn parts(&self, name: &str) -> Result<&[String], ModelError> {
        let parts = self.parts.get(name).ok_or_else(|| ModelError::NoSuchTensor { name: name.to_owned() })?;
        Ok(parts)
    }

    /// Reads the stored tensors `parts` one after the other into `out`, on all threads: each reads runs of their own into
    /// their place.
    fn read_parts(&self, parts: &[String], out: &mut Vec<f32>) -> Result<(), ModelError> {
        let len = parts.iter().map(|part| self.stored[part].len()).sum();
        if out.capacity() < len {
            *out = vec![0.0; len]; // Nobody has touched it: whoever reads a run is the first.
        } else {
            out.resize(len, 0.0);
        }
        let failed: Mutex<Option<(usize, ModelError)>> = Mutex::new(None);
        parallel::for_rows(out, 1, READ_WORK, |first, values| {
            let Err(error) = self.read_run(parts, first, values) else { return };
            // A run ends with its first error, so the earliest run has the one that a single thread would meet.
            let mut failed = failed.lock().expect("nobody panics with the lock held");
            if failed.as_ref().is_none_or(|(earliest, _)| first < *earliest) {
                *failed = Some((first, error));
            }
        });
        let failed = failed.into_inner().expect("nobody panics with the lock held");
        failed.map_or(Ok(()), |(_, error)| Err(error))
    }

    /// Reads those values of `parts` that start with number `first`.
    fn read_run(&self, parts: &[String], first: usize, values: &mut [f32]) -> Result<(), ModelError> {
        let (mut start, end) = (0, first + values.len());
        for part in parts {
            let len = self.stored[part].len();
            let (from, to) = (first.max(start), end.min(start + len));
            if from < to {
                self.read_stored(part, from - start, &mut values[from - first..to - first])?;
            }
            start += len;
        }
        Ok(())
    }

    /// Reads those values of a stored tensor that start with number `first`.
    fn read_stored(&self, name: &str, mut first: usize, values: &mut [f32]) -> Result<(), ModelError> {
        let stored = &self.stored[name];
        let (path, file) = &self.files[stored.file];
        let (width, n_narrow) = match stored.dtype {
            StoredDtype::F32 => (4, 0),
            _ => (2, READ_BYTES.min(2 * values.len())),
        };
        let mut narrow = vec![0; n_narrow];
        for values in values.chunks_mut(READ_BYTES / width) {
            let bytes = match stored.dtype {
                StoredDtype::F32 => bytemuck::cast_slice_mut(values),
                _ => &mut narrow[..width * values.len()],
            };
            file.read_exact_at(bytes, stored.offset + (width * first) as u64)
                .map_err(|source| ModelError::Read { path: path.clone(), source })?;
            match stored.dtype {
                StoredDtype::BF16 => widen_bf16(narrow[..width * values.len()].as_chunks().0, values),
                StoredDtype::F16 => widen_f16(narrow[..width * values.len()].as_chunks().0, values),
                // They are in their place, and on most machines what they should be.
                _ => values.iter_mut().for_each(|value| *value = f32::from_le_bytes(value.to_ne_bytes())),
            }
            check_run(name, first, values)?;
            first += values.len();
        }
        Ok(())
    }
}

impl TensorSource for Checkpoint {
    fn read(&self, name: &str, out: &mut Vec<f32>) -> Result<(), ModelError> {
        self.read_parts(self.parts(name)?, out)
    }

    fn visit(&self, name: &str, each: &mut dyn FnMut(&[f32])) -> Result<(), ModelError> {
        let mut values = vec![0.0; READ_BYTES / size_of::<f32>()];
        for part in self.parts(name)? {
            let len = self.stored[part].len();
            for first in (0..len).step_by(values.len()) {
                let n_values = values.len().min(len - first);
                let run = &mut values[..n_values];
                self.read_stored(part, first, run)?;
                each(run);
            }
        }
        Ok(())
    }
}

/// The safetensors files of `dir`, each once. A single file comes before an index, as `transformers` has it.
fn weight_files(dir: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let single = dir.join("model.safetensors");
    if single.exists() {
        return Ok(vec![single]);
    }
    let index_path = dir.join("model.safetensors.index.json");
    if !index_path.exists() {
        return Err(ModelError::NoWeights { dir: dir.to_path_buf() });
    }
    let text = fs::read_to_string(&index_path)
        .map_err(|source| ModelError::Read { path: index_path.clone(), source })?;
    let index: Value = serde_json::from_str(&text)
        .map_err(|source| ModelError::Json { path: index_path.clone(), source })?;
    let names: Option<BTreeSet<&str>> = index
        .get("weight_map")
        .and_then(Value::as_object)
        .and_then(|map| map.values().map(Value::as_str).collect());
    let is_plain = |name: &&str| Path::new(name).file_name().is_some_and(|file| file == *name);
    match names {
        Some(names) if names.iter().all(is_plain) => {
            Ok(names.into_iter().map(|name| dir.join(name)).collect())
        }
        _ => Err(ModelError::Config {
            path: index_path,
            key: "weight_map",
            found: "unusable".into(),
            needed: "a map from tensor names to files of this directory".into(),
        }),
    }
}

/// The per-expert or per-projection tensors that a fused canonical tensor is concatenated from, with shapes.
///
/// Concatenated in this order their values are the canonical tensor; any other tensor is its own only piece.
#[must_use]
pub fn pieces(name: &str, shape: &[usize], config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let (d, inter) = (config.hidden_size, config.moe_inter);
    if let Some(mlp) = name.strip_suffix("experts.gate_up_proj") {
        let expert = |e| {
            ["gate_proj", "up_proj"].map(|part| (format!("{mlp}experts.{e}.{part}.weight"), vec![inter, d]))
        };
        (0..config.n_experts).flat_map(expert).collect()
    } else if let Some(mlp) = name.strip_suffix("experts.down_proj") {
        let expert = |e| (format!("{mlp}experts.{e}.down_proj.weight"), vec![d, inter]);
        (0..config.n_experts).map(expert).collect()
    } else if let Some(mlp) = name.strip_suffix("gate_up_proj.weight") {
        ["gate_proj", "up_proj"].map(|part| (format!("{mlp}{part}.weight"), vec![shape[0] / 2, d])).into()
    } else {
        vec![(name.to_owned(), shape.to_vec())]
    }
}

#[cfg(test)]
mod tests;
