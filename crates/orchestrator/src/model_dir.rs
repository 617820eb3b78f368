//! Model directories: found, made from nothing, and exported.

use std::fs;
use std::path::{Path, PathBuf};

use r3_kernels::gemm::Dtype;
use r3_model::adapter::{Adapter, PEFT_CONFIG};
use r3_model::checkpoint::Checkpoint;
use r3_model::config::ModelConfig;
use r3_model::export::{Companions, write_weights};
use r3_model::init::FreshWeights;
use r3_model::source::TensorSource;
use r3_train::checkpoint::{Checkpoints, STATE_FILE, verify_weights};
use r3_wire::error::WireError;
use r3_wire::model::ModelShape;

use crate::error::{RunError, io_at};
use crate::run_dir::{RunDir, hold_for_model};

/// A model directory that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Weights in the model.
    pub parameters: usize,
    /// Format they are stored in.
    pub dtype: Dtype,
}

/// Opens the model of `dir`, a Hugging Face directory or a checkpoint.
///
/// # Errors
/// If there is no whole model, or its weights are not those that a run saved there.
pub fn open(dir: &Path) -> Result<Checkpoint, RunError> {
    let model = Checkpoint::open(dir)?;
    verify_weights(dir)?;
    Ok(model)
}

/// The directory of the model that `path` means: a Hugging Face directory, a checkpoint, or a run, whose newest checkpoint
/// it is then.
///
/// # Errors
/// If `path` is the directory of a run and cannot be read.
pub fn resolve(path: &Path) -> Result<PathBuf, RunError> {
    if path.join("config.json").exists() {
        return Ok(path.to_path_buf());
    }
    let newest = Checkpoints::new(path.to_path_buf(), 1).latest()?;
    Ok(newest.unwrap_or_else(|| path.to_path_buf()))
}

/// What a reader of routes must know of the model of `path`, which is found as [`resolve`] finds it; its weights are
/// not read.
///
/// # Errors
/// If its configuration cannot be read.
pub fn route_shape(path: &Path) -> Result<ModelShape, RunError> {
    let config = ModelConfig::load(&resolve(path)?)?;
    let shape = ModelShape::new(config.n_layers, config.moe_layers(), config.top_k, config.n_experts);
    Ok(shape.map_err(WireError::from)?)
}

/// Makes a model with random weights: `config` is a `config.json` or a directory with one, beside which the
/// tokenizer's files lie, if any.
///
/// # Errors
/// If the configuration is not one r3 runs, `out` holds a model already, or the files cannot be written.
pub fn create(config: &Path, out: &Path, seed: u64, dtype: Dtype) -> Result<Written, RunError> {
    let path = if config.is_dir() { config.join("config.json") } else { config.to_path_buf() };
    let model = ModelConfig::read(&path)?;
    let companions = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    write_new(out, companions, (&model, &FreshWeights::new(&model, seed)), dtype)
}

/// Copies the model of `checkpoint`, as [`resolve`] finds it, in a format that `transformers` loads.
///
/// # Errors
/// If it is not a whole model, its weights are not those that a run saved there, `out` holds a model already or is the
/// directory of a run, or the files cannot be written.
pub fn export(checkpoint: &Path, out: &Path, dtype: Dtype) -> Result<Written, RunError> {
    let dir = resolve(checkpoint)?;
    let model = open(&dir)?;
    write_new(out, &dir, (model.config(), &model), dtype)
}

/// Writes the updates of low rank of `checkpoint`, as [`resolve`] finds it, in the two files that PEFT loads onto the model
/// they are of, and gives the numbers in them.
///
/// # Errors
/// If it has none, its weights are not those that a run saved there, `out` holds an adapter already or is the directory of a
/// run, or the files cannot be written.
pub fn export_adapter(checkpoint: &Path, out: &Path) -> Result<usize, RunError> {
    let dir = resolve(checkpoint)?;
    let config = ModelConfig::load(&dir)?;
    let adapter = Adapter::load(&dir)?.ok_or_else(|| RunError::NoAdapter { path: dir.clone() })?;
    let _held = hold_for_model(out)?;
    if out.join(PEFT_CONFIG).exists() {
        return Err(RunError::WeightsThere { path: out.to_path_buf() });
    }
    verify_weights(&dir)?;
    adapter.write_peft(out, &config)?;
    Ok(adapter.n_parameters())
}

fn write_new(
    out: &Path,
    companions: &Path,
    (model, weights): (&ModelConfig, &dyn TensorSource),
    dtype: Dtype,
) -> Result<Written, RunError> {
    let held = hold_for_model(out)?;
    // A configuration is in the way, too, unless the model is made beside its own.
    let is_own =
        out.canonicalize().ok().is_some_and(|out| companions.canonicalize().is_ok_and(|dir| dir == out));
    if has_weights(out) || (out.join("config.json").exists() && !is_own) {
        return Err(RunError::WeightsThere { path: out.to_path_buf() });
    }
    let staged = Staged::write(held, &[companions], (model, weights), dtype)?;
    staged.publish()?;
    Ok(Written { parameters: model.n_parameters(), dtype })
}

/// Whether `dir` holds weights, in one file or in shards.
pub(crate) fn has_weights(dir: &Path) -> bool {
    ["model.safetensors", INDEX].iter().any(|name| dir.join(name).exists())
}

/// Says which shard holds which tensor.
const INDEX: &str = "model.safetensors.index.json";

/// Where files wait, inside the directory they are for, until all are there.
const UNFINISHED: &str = ".unfinished";

/// A model that lies beside the place it is for, all of it, which nobody else writes to meanwhile.
#[derive(Debug)]
pub(crate) struct Staged {
    held: RunDir,
    path: PathBuf,
}

impl Staged {
    /// Writes a model beside the files of `held`: tokenizer files from `companions`, of which a later directory's win, then
    /// config and weights.
    ///
    /// # Errors
    /// If a tensor cannot be read or a file cannot be written. Nothing is left then.
    pub(crate) fn write(
        held: RunDir,
        companions: &[&Path],
        (model, weights): (&ModelConfig, &dyn TensorSource),
        dtype: Dtype,
    ) -> Result<Self, RunError> {
        let path = held.join(UNFINISHED);
        stage(&path, companions, (model, weights), dtype).inspect_err(|_| remove(&path))?;
        Ok(Self { held, path })
    }

    /// Moves it over the files of the model that may be there.
    ///
    /// # Errors
    /// If a file cannot be moved.
    pub(crate) fn publish(self) -> Result<(), RunError> {
        publish(&self.path, self.held.path()).inspect_err(|_| remove(&self.path))
    }

    /// Moves it, if no model has appeared there while this one was trained; otherwise leaves it where it lies and says so.
    ///
    /// # Errors
    /// If a model is there, or a file cannot be moved.
    pub(crate) fn publish_new(self) -> Result<(), RunError> {
        match self.held.path() {
            path if has_weights(path) => {
                Err(RunError::ModelAppeared { path: path.to_path_buf(), unfinished: self.path })
            }
            _ => self.publish(),
        }
    }
}

/// Removes what is not whole. The error at hand matters more than one while cleaning up.
fn remove(staged: &Path) {
    let _ = fs::remove_dir_all(staged);
}

fn stage(
    staged: &Path,
    companions: &[&Path],
    (model, weights): (&ModelConfig, &dyn TensorSource),
    dtype: Dtype,
) -> Result<(), RunError> {
    if staged.exists() {
        fs::remove_dir_all(staged).map_err(io_at(staged))?;
    }
    fs::create_dir(staged).map_err(io_at(staged))?;
    let mut held = Companions::default();
    companions.iter().try_for_each(|dir| held.add(dir))?;
    held.write(staged)?;
    write_weights(staged, model, weights, dtype)?;
    Ok(())
}

fn publish(staged: &Path, out: &Path) -> Result<(), RunError> {
    remove_replaced(out)?;
    for entry in fs::read_dir(staged).map_err(io_at(staged))? {
        let entry = entry.map_err(io_at(staged))?;
        let target = out.join(entry.file_name());
        fs::rename(entry.path(), &target).map_err(io_at(&target))?;
    }
    fs::remove_dir(staged).map_err(io_at(staged))
}

/// Removes what would be wrong beside other weights: what a run says of the bytes it saved, and the index and the shards,
/// since whoever followed the index would load those.
fn remove_replaced(out: &Path) -> Result<(), RunError> {
    let state = out.join(STATE_FILE);
    if state.exists() {
        fs::remove_file(&state).map_err(io_at(&state))?;
    }
    let index = out.join(INDEX);
    if !index.exists() {
        return Ok(());
    }
    fs::remove_file(&index).map_err(io_at(&index))?;
    for entry in fs::read_dir(out).map_err(io_at(out))? {
        let entry = entry.map_err(io_at(out))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("model-") && name.contains("-of-") && name.ends_with(".safetensors") {
            fs::remove_file(entry.path()).map_err(io_at(&entry.path()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use r3_core::ids::PolicyVersion;
    use r3_train::checkpoint::Position;
    use r3_train::error::TrainError;

    use super::*;
    use crate::fixtures::names;

    fn assets() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-moe")
    }

    /// Writes a model over whatever is there.
    fn write(out: &Path, model: (&ModelConfig, &dyn TensorSource)) {
        let held = hold_for_model(out).unwrap();
        Staged::write(held, &[&assets()], model, Dtype::F32).unwrap().publish().unwrap();
    }

    #[test]
    fn a_seed_names_the_weights_and_an_f32_copy_keeps_their_bits() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        create(&assets(), &at("one"), 1, Dtype::F32).unwrap();
        create(&assets().join("config.json"), &at("same"), 1, Dtype::F32).unwrap();
        create(&assets(), &at("two"), 2, Dtype::F32).unwrap();
        export(&at("one"), &at("copy"), Dtype::F32).unwrap();
        let weights = |name: &str| fs::read(at(name).join("model.safetensors")).unwrap();
        assert_eq!(weights("one"), weights("same"));
        assert_eq!(weights("one"), weights("copy"));
        assert_ne!(weights("one"), weights("two"));
        assert_eq!(
            names(&at("copy")),
            [
                "config.json",
                "generation_config.json",
                "model.safetensors",
                "tokenizer.json",
                "tokenizer_config.json"
            ]
        );
    }

    #[test]
    fn a_model_can_be_made_where_its_configuration_lies() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["config.json", "tokenizer.json"] {
            fs::copy(assets().join(name), dir.path().join(name)).unwrap();
        }
        create(dir.path(), dir.path(), 1, Dtype::Bf16).unwrap();
        assert_eq!(names(dir.path()), ["config.json", "model.safetensors", "tokenizer.json"]);
        let tokenizer = fs::read(dir.path().join("tokenizer.json")).unwrap();
        assert_eq!(tokenizer, fs::read(assets().join("tokenizer.json")).unwrap());
    }

    #[test]
    fn weights_written_over_shards_leave_none_of_them() {
        let (dir, assets) = (tempfile::tempdir().unwrap(), assets());
        let mixed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/mixed");
        for entry in fs::read_dir(&mixed).unwrap().map(Result::unwrap) {
            fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
        let model = Checkpoint::open(&assets).unwrap();
        write(dir.path(), (model.config(), &model));
        let left = names(dir.path()).into_iter().filter(|name| name.contains("safetensors"));
        assert_eq!(left.collect::<Vec<_>>(), ["model.safetensors", "reference.safetensors"]);
        assert_eq!(Checkpoint::open(dir.path()).unwrap().config().n_layers, model.config().n_layers);
    }

    #[test]
    fn weights_written_over_a_checkpoint_are_a_plain_model() {
        let (root, assets) = (tempfile::tempdir().unwrap(), assets());
        let position = Position { step: 1, version: PolicyVersion(1), optimiser_steps: 1, score: None };
        let save = |dir: &Path| {
            fs::copy(assets.join("config.json"), dir.join("config.json")).unwrap();
            let config = ModelConfig::load(dir)?;
            Ok(write_weights(dir, &config, &FreshWeights::new(&config, 1), Dtype::F32)?)
        };
        let dir = Checkpoints::new(root.path().to_path_buf(), 1).save(position, 0, save).unwrap();
        let saved = open(&dir).unwrap();
        let other = FreshWeights::new(saved.config(), 2);
        write_weights(&dir, saved.config(), &other, Dtype::F32).unwrap();
        assert!(matches!(open(&dir), Err(RunError::Train(TrainError::Damaged { .. }))));
        write(&dir, (saved.config(), &other));
        open(&dir).unwrap();
    }

    #[test]
    fn an_existing_model_is_never_replaced() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("model.safetensors"), "precious").unwrap();
        let error = create(&assets(), dir.path(), 1, Dtype::Bf16).unwrap_err();
        assert!(matches!(error, RunError::WeightsThere { .. }));
        assert_eq!(names(dir.path()), ["model.safetensors"]);
        fs::rename(dir.path().join("model.safetensors"), dir.path().join("config.json")).unwrap();
        let error = create(&assets(), dir.path(), 1, Dtype::Bf16).unwrap_err();
        assert!(matches!(error, RunError::WeightsThere { .. }));
        assert_eq!(fs::read_to_string(dir.path().join("config.json")).unwrap(), "precious");
    }

    #[test]
    fn what_cannot_be_exported_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("above/to"));
        create(&assets(), &from, 1, Dtype::F32).unwrap();
        let path = from.join("model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        let end = bytes.len();
        bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
        fs::write(&path, bytes).unwrap();
        assert!(export(&from, &to, Dtype::Bf16).is_err());
        assert_eq!(names(dir.path()), ["from"]);
    }

    #[test]
    fn a_model_that_has_appeared_meanwhile_is_not_replaced_and_the_new_one_not_lost() {
        let dir = tempfile::tempdir().unwrap();
        let (out, other) = (dir.path().join("out"), dir.path().join("other"));
        create(&assets(), &other, 1, Dtype::Bf16).unwrap();
        let model = Checkpoint::open(&other).unwrap();
        let stage = || {
            let held = hold_for_model(&out).unwrap();
            Staged::write(held, &[&other], (model.config(), &model), Dtype::Bf16).unwrap()
        };
        let staged = stage();
        let busy = create(&assets(), &out, 1, Dtype::Bf16).unwrap_err();
        assert!(matches!(busy, RunError::OutBusy { .. }));
        fs::write(out.join("model.safetensors"), "precious").unwrap();
        let error = staged.publish_new().unwrap_err();
        let RunError::ModelAppeared { unfinished, .. } = &error else { panic!("{error}") };
        assert_eq!(names(unfinished), names(&other));
        assert_eq!(names(&out), [".unfinished", "model.safetensors"]);
        assert_eq!(fs::read_to_string(out.join("model.safetensors")).unwrap(), "precious");
        fs::remove_file(out.join("model.safetensors")).unwrap();
        stage().publish_new().unwrap();
        assert_eq!(names(&out), names(&other));
    }
}
