//! Updates of low rank as files: r3's own, which lies beside the weights of a checkpoint, and PEFT's.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::Var;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype as StoredDtype;
use serde_json::{Value, json};

use crate::autograd::training::{factor_names, takes_low_rank};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::export::{FileTensor, write_json, write_safetensors};
use crate::source::{TensorSource, canonical_tensors, check_run};

/// Name of r3's own file in a checkpoint.
pub const FILE: &str = "lora.safetensors";

/// Where the file says of what its factors are.
const ABOUT: &str = "r3.lora";

/// What PEFT calls its two files.
pub const PEFT_CONFIG: &str = "adapter_config.json";
const PEFT_WEIGHTS: &str = "adapter_model.safetensors";

/// The factors of a model's updates of low rank: `W = W0 + (alpha / rank) B A`.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// Rows of `A`, columns of `B`.
    pub rank: usize,
    /// Size of an update.
    pub alpha: f64,
    /// Directory of the model without updates.
    pub base: PathBuf,
    /// By name, as [`factor_names`] has them.
    factors: Vec<(String, Factor)>,
}

/// A tensor in f32.
#[derive(Clone, Debug, PartialEq)]
struct Factor {
    shape: Vec<usize>,
    values: Vec<f32>,
}

/// `factors` as a file has them.
fn tensors(factors: &[(String, Factor)]) -> impl Iterator<Item = (String, FileTensor<'_>)> {
    factors
        .iter()
        .map(|(name, Factor { shape, values })| (name.clone(), FileTensor::f32(shape.clone(), values)))
}

impl Adapter {
    /// Copies the factors `vars`, which are all that is trained of a policy.
    ///
    /// # Errors
    /// If candle fails.
    pub fn new((rank, alpha): (usize, f64), base: &Path, vars: &[(String, Var)]) -> Result<Self, ModelError> {
        let copy = |(name, var): &(String, Var)| {
            let values = var.flatten_all()?.to_vec1::<f32>()?;
            Ok((name.clone(), Factor { shape: var.dims().to_vec(), values }))
        };
        let factors = vars.iter().map(copy).collect::<Result<_, ModelError>>()?;
        Ok(Self { rank, alpha, base: base.to_path_buf(), factors })
    }

    /// Writes r3's own file into `dir`: factors by their names, an expert's in its row of the stack.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, dir: &Path) -> Result<(), ModelError> {
        // One entry: several would come in any order, and a resumed run writes the same bytes.
        let about = json!({ "rank": self.rank, "alpha": self.alpha, "base": self.base });
        let metadata = HashMap::from([(ABOUT.to_owned(), about.to_string())]);
        write_safetensors(&dir.join(FILE), tensors(&self.factors), Some(metadata))
    }

    /// Reads what [`Self::write`] wrote; `None` if `dir` has no such file.
    ///
    /// # Errors
    /// If it cannot be read, is not whole, or holds a value that is not finite.
    pub fn load(dir: &Path) -> Result<Option<Self>, ModelError> {
        let path = dir.join(FILE);
        if !path.exists() {
            return Ok(None);
        }
        let bytes = fs::read(&path).map_err(|source| ModelError::Read { path: path.clone(), source })?;
        let broken = |reason: String| ModelError::Safetensors { path: path.clone(), reason };
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|error| broken(error.to_string()))?;
        let file = SafeTensors::deserialize(&bytes).map_err(|error| broken(error.to_string()))?;
        let about = header.metadata().as_ref().and_then(|metadata| metadata.get(ABOUT));
        let about: Value = about.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        let (rank, alpha, base) = (about["rank"].as_u64(), about["alpha"].as_f64(), about["base"].as_str());
        let (Some(rank), Some(alpha), Some(base)) = (rank, alpha, base) else {
            return Err(broken("it does not say rank, alpha and base".into()));
        };
        let mut factors = Vec::new();
        for (name, view) in file.tensors() {
            if view.dtype() != StoredDtype::F32 {
                return Err(broken(format!("`{name}` is not f32")));
            }
            let (numbers, _) = view.data().as_chunks::<4>();
            let values: Vec<f32> = numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            check_run(&name, 0, &values)?;
            factors.push((name, Factor { shape: view.shape().to_vec(), values }));
        }
        let rank = usize::try_from(rank).map_err(|error| broken(error.to_string()))?;
        Ok(Some(Self { rank, alpha, base: base.into(), factors }))
    }

    /// Writes `adapter_config.json` and `adapter_model.safetensors`, as PEFT reads them, into the existing `dir`.
    ///
    /// Projections are `target_modules`; what `transformers` 5 holds as parameters (routers, stacked experts) and the
    /// projections of a dense MLP are `target_parameters`, named in full.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn write_peft(&self, dir: &Path, model: &ModelConfig) -> Result<(), ModelError> {
        let mut peft = Peft::default();
        for (name, shape) in canonical_tensors(model).iter().filter(|(name, _)| takes_low_rank(name)) {
            let [a, b] = factor_names(name).map(|name| self.factor(&name));
            if let (Some(a), Some(b)) = (a, b) {
                peft.add(name, shape, [a, b], self);
            }
        }
        let alpha = if self.alpha.fract() == 0.0 { json!(self.alpha as i64) } else { json!(self.alpha) };
        let config = json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.rank,
            "lora_alpha": alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
            "init_lora_weights": true,
            "use_dora": false,
            "use_rslora": false,
            "target_modules": peft.modules,
            "target_parameters": if peft.parameters.is_empty() { Value::Null } else { json!(peft.parameters) },
        });
        write_json(&dir.join(PEFT_CONFIG), &config)?;
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        write_safetensors(&dir.join(PEFT_WEIGHTS), tensors(&peft.tensors), Some(metadata))
    }

    /// Numbers in all factors.
    #[must_use]
    pub fn n_parameters(&self) -> usize {
        self.factors.iter().map(|(_, factor)| factor.values.len()).sum()
    }

    fn factor(&self, name: &str) -> Option<&Factor> {
        self.factors.iter().find(|(known, _)| known == name).map(|(_, factor)| factor)
    }
}

impl TensorSource for Adapter {
    fn read(&self, name: &str, out: &mut Vec<f32>) -> Result<(), ModelError> {
        let factor = self.factor(name).ok_or_else(|| ModelError::NoSuchTensor { name: name.to_owned() })?;
        out.clone_from(&factor.values);
        Ok(())
    }
}

/// An adapter in PEFT's words.
#[derive(Default)]
struct Peft {
    modules: Vec<String>,
    parameters: Vec<String>,
    tensors: Vec<(String, Factor)>,
}

impl Peft {
    /// Adds weight `name` of `shape` with its factors, which are of `adapter`.
    fn add(&mut self, name: &str, shape: &[usize], [a, b]: [&Factor; 2], adapter: &Adapter) {
        let Some(module) = name.strip_suffix(".weight") else {
            return self.add_experts(name, shape, [a, b], adapter);
        };
        if module.contains(".self_attn.") {
            self.modules.push(module.to_owned());
            return self.push(module, a.clone(), b.clone());
        }
        let Some(mlp) = module.strip_suffix(".gate_up_proj") else {
            self.parameters.push(name.to_owned());
            return self.push(module, a.clone(), b.clone());
        };
        // A dense MLP's gate and up are one matrix here, and two with the same input there: one `A`, half a `B` each.
        let (half, len) = (b.shape[0] / 2, b.values.len() / 2);
        for (half_name, values) in [("gate_proj", &b.values[..len]), ("up_proj", &b.values[len..])] {
            let b = Factor { shape: vec![half, b.shape[1]], values: values.to_vec() };
            self.parameters.push(format!("{mlp}.{half_name}.weight"));
            self.push(&format!("{mlp}.{half_name}"), a.clone(), b);
        }
    }

    /// PEFT's `A` of a stack is `[E r, K]`, expert by expert, but its `B` is `[N, r E]`, rank by rank. The parameters of
    /// one module are wrapped one around the other, `gate_up_proj` first: then it is `base_layer`.
    fn add_experts(&mut self, name: &str, shape: &[usize], [a, b]: [&Factor; 2], adapter: &Adapter) {
        let (module, parameter) = name.rsplit_once('.').expect("experts are a module's");
        let [count, n, k] = shape[..] else { unreachable!("a stack of matrices") };
        let rank = adapter.rank;
        let both = adapter.factor(&factor_names(&format!("{module}.down_proj"))[0]).is_some();
        let inner = parameter == "gate_up_proj" && both;
        let module = if inner { format!("{module}.base_layer") } else { module.to_owned() };
        let mut turned = vec![0.0; b.values.len()];
        for (at, value) in b.values.iter().enumerate() {
            let (expert, row, column) = (at / (n * rank), at / rank % n, at % rank);
            turned[(row * rank + column) * count + expert] = *value;
        }
        self.parameters.push(name.to_owned());
        let a = Factor { shape: vec![count * rank, k], values: a.values.clone() };
        self.push(&module, a, Factor { shape: vec![n, rank * count], values: turned });
    }

    fn push(&mut self, module: &str, a: Factor, b: Factor) {
        for (factor, tensor) in [("A", a), ("B", b)] {
            self.tensors.push((format!("base_model.model.{module}.lora_{factor}.weight"), tensor));
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::*;
    use crate::autograd::Policy;
    use crate::autograd::training::Training;
    use crate::fixtures::mixed_config;
    use crate::init::FreshWeights;

    /// Every factor of the mixed model, all different.
    fn policy(is_target: impl Fn(&str) -> bool) -> Policy {
        let config = mixed_config();
        let policy = Policy::load(&FreshWeights::new(&config, 3), &config).unwrap();
        let how = |name: &str| match takes_low_rank(name) && is_target(name) {
            true => Training::LowRank { rank: 2, scale: 1.5 },
            false => Training::Frozen,
        };
        let mut policy = policy.with_training(how, 7).unwrap();
        policy.change(|vars| {
            for (at, (_, var)) in vars.iter().enumerate() {
                let values: Vec<f32> = (0..var.elem_count()).map(|i| (at * 1000 + i) as f32).collect();
                var.set(&Tensor::from_vec(values, var.dims(), &Device::Cpu).unwrap()).unwrap();
            }
        });
        policy
    }

    fn adapter(is_target: impl Fn(&str) -> bool) -> Adapter {
        Adapter::new((2, 3.0), Path::new("some/base"), policy(is_target).vars()).unwrap()
    }

    fn peft(adapter: &Adapter) -> (Value, HashMap<String, Factor>) {
        let dir = tempfile::tempdir().unwrap();
        adapter.write_peft(dir.path(), &mixed_config()).unwrap();
        let config = fs::read(dir.path().join(PEFT_CONFIG)).unwrap();
        let bytes = fs::read(dir.path().join(PEFT_WEIGHTS)).unwrap();
        let read = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
            let values = view.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            (name, Factor { shape: view.shape().to_vec(), values })
        };
        let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors().into_iter().map(read).collect();
        (serde_json::from_slice(&config).unwrap(), tensors)
    }

    #[test]
    fn what_is_written_reads_back_to_the_bit() {
        let (dir, written) = (tempfile::tempdir().unwrap(), adapter(|_| true));
        assert_eq!(Adapter::load(dir.path()).unwrap(), None);
        written.write(dir.path()).unwrap();
        let read = Adapter::load(dir.path()).unwrap().unwrap();
        assert_eq!((read.rank, read.alpha, &read.base), (2, 3.0, &written.base));
        assert_eq!(read.n_parameters(), written.n_parameters());
        for (name, factor) in &written.factors {
            assert_eq!(read.factor(name), Some(factor), "{name}");
        }
        let bytes = fs::read(dir.path().join(FILE)).unwrap();
        fs::write(dir.path().join(FILE), &bytes[..bytes.len() - 1]).unwrap();
        assert!(matches!(Adapter::load(dir.path()), Err(ModelError::Safetensors { .. })));
    }

    #[test]
    fn peft_finds_projections_as_modules_and_the_rest_as_parameters() {
        let (config, tensors) = peft(&adapter(|_| true));
        let attention = |layer: usize| {
            ["q", "k", "v", "o"].map(|which| format!("model.layers.{layer}.self_attn.{which}_proj"))
        };
        assert_eq!(config["target_modules"], json!([attention(0), attention(1)].concat()));
        let parameters = [
            "model.layers.0.mlp.gate_proj.weight",
            "model.layers.0.mlp.up_proj.weight",
            "model.layers.0.mlp.down_proj.weight",
            "model.layers.1.mlp.gate.weight",
            "model.layers.1.mlp.experts.gate_up_proj",
            "model.layers.1.mlp.experts.down_proj",
        ];
        assert_eq!(config["target_parameters"], json!(parameters));
        let alpha = (&config["r"], &config["lora_alpha"], &config["base_model_name_or_path"]);
        assert_eq!(alpha, (&json!(2), &json!(3), &json!("some/base")));
        // Width 8, two heads of 4 with one of keys, dense width 12, three experts of 6.
        for (module, a, b) in [
            ("model.layers.1.self_attn.k_proj", [2, 8], [4, 2]),
            ("model.layers.0.mlp.gate_proj", [2, 8], [12, 2]),
            ("model.layers.0.mlp.up_proj", [2, 8], [12, 2]),
            ("model.layers.0.mlp.down_proj", [2, 12], [8, 2]),
            ("model.layers.1.mlp.gate", [2, 8], [3, 2]),
            ("model.layers.1.mlp.experts.base_layer", [6, 8], [12, 6]),
            ("model.layers.1.mlp.experts", [6, 6], [8, 6]),
        ] {
            for (factor, shape) in [("A", a), ("B", b)] {
                let name = format!("base_model.model.{module}.lora_{factor}.weight");
                assert_eq!(tensors[&name].shape, shape, "{name}");
            }
        }
        assert_eq!(tensors.len(), 2 * (4 + 3 + 4 + 1 + 2));
    }

    #[test]
    fn one_of_two_expert_weights_is_not_wrapped_by_the_other() {
        let (config, tensors) = peft(&adapter(|name| name.ends_with("experts.gate_up_proj")));
        assert_eq!(config["target_modules"], json!([]));
        let mut names: Vec<_> = tensors.into_keys().collect();
        names.sort();
        let module = "base_model.model.model.layers.1.mlp.experts";
        assert_eq!(names, [format!("{module}.lora_A.weight"), format!("{module}.lora_B.weight")]);
    }

    /// PEFT's `einsum("o r e, e r i -> e o i")` of the reshaped factors.
    #[test]
    fn factors_of_experts_multiply_to_the_same_update() {
        let adapter = adapter(|name| name.ends_with("experts.down_proj"));
        let [a, b] = ["A", "B"].map(|factor| {
            adapter.factor(&format!("model.layers.1.mlp.experts.down_proj.lora_{factor}.weight")).unwrap()
        });
        let (_, tensors) = peft(&adapter);
        let of_peft = |factor: &str| {
            &tensors[&format!("base_model.model.model.layers.1.mlp.experts.lora_{factor}.weight")].values
        };
        let (peft_a, peft_b) = (of_peft("A"), of_peft("B"));
        let (count, n, k, rank) = (3, 8, 6, 2);
        for (expert, row, column) in [(0, 0, 0), (1, 3, 5), (2, 7, 1)] {
            let ours: f32 = (0..rank)
                .map(|r| b.values[(expert * n + row) * rank + r] * a.values[(expert * rank + r) * k + column])
                .sum();
            let theirs: f32 = (0..rank)
                .map(|r| {
                    peft_b[row * rank * count + r * count + expert] * peft_a[(expert * rank + r) * k + column]
                })
                .sum();
            assert_eq!(ours, theirs, "expert {expert}");
        }
    }
}
