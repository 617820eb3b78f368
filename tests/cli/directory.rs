//! A directory with a configuration, a tokenizer, a model and recipes, in which `r3` runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

/// `recipe.yaml`: two steps of the smallest run that trains.
pub(crate) const RECIPE: &str = "\
model: { path: model }
task: { arithmetic: { digits: 1, held_out: 8 } }
rollout: { groups: 4, group_size: 8, max_new_tokens: 3 }
engine: { kv_memory: 64KiB, max_running: 8 }
algorithm: { grpo: { clip: 0.2 } }
train: { lr: 1.0e-3 }
ring: { bytes: 64KiB, deadline_s: 60 }
eval: { problems: 8 }
metrics: { listen: null }
run: { steps: 2, seed: 7, out: run, save_every: 1 }
";

/// `sft.yaml`: teaches `model` enough to be right now and then, into `warm`.
pub(crate) const SFT_RECIPE: &str = "\
model: { existing: { path: model } }
task: { arithmetic: { digits: 1, held_out: 8 } }
sft: { steps: 20, batch: 16, lr: 3.0e-2, eval_problems: 8, max_new_tokens: 3 }
run: { seed: 1, out: warm }
";

/// What a command came to.
pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

pub(crate) struct Directory {
    temp: TempDir,
}

impl Directory {
    /// Configuration, tokenizer and recipes.
    pub(crate) fn empty() -> Self {
        let directory = Self { temp: tempfile::tempdir().unwrap() };
        let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-moe");
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            fs::copy(assets.join(name), directory.path(name)).unwrap();
        }
        directory.write("config.json", config().to_string());
        directory.write("recipe.yaml", RECIPE);
        directory.write("sft.yaml", SFT_RECIPE);
        directory
    }

    /// The same, and `model` with random weights.
    pub(crate) fn with_model() -> Self {
        let directory = Self::empty();
        directory.done(&["new-model", ".", "model", "--seed", "3"]);
        directory
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    /// What lies in a directory, by name.
    pub(crate) fn names(&self, name: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(name)).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(name), content).unwrap();
    }

    /// `recipe.yaml` with one text replaced.
    pub(crate) fn edit_recipe(&self, from: &str, to: &str) {
        assert!(RECIPE.contains(from), "{from}");
        self.write("recipe.yaml", RECIPE.replace(from, to));
    }

    /// `program` with this directory as its own, and nothing of the caller's terminal.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.temp.path()).stdin(Stdio::null());
        command.env_remove("COLUMNS").env_remove("NO_COLOR").env_remove("RUST_BACKTRACE");
        command
    }

    /// Runs `r3`.
    pub(crate) fn r3(&self, arguments: &[&str]) -> Ended {
        let mut command = self.command(env!("CARGO_BIN_EXE_r3"));
        ended(command.args(["--threads", "2"]).args(arguments))
    }

    /// Runs `r3`, which has to succeed; returns stdout.
    pub(crate) fn done(&self, arguments: &[&str]) -> String {
        let Ended { code, stdout, stderr } = self.r3(arguments);
        assert_eq!(code, 0, "{arguments:?}: {stderr}");
        stdout
    }

    /// Runs `r3`, which has to succeed; returns the last line of stdout.
    pub(crate) fn done_json(&self, arguments: &[&str]) -> Value {
        let stdout = self.done(arguments);
        serde_json::from_str(stdout.lines().next_back().expect("there is a line")).unwrap()
    }

    /// Runs `r3`, which has to refuse without a result; returns exit code and stderr.
    pub(crate) fn refused(&self, arguments: &[&str]) -> String {
        let Ended { code, stdout, stderr } = self.r3(arguments);
        assert_eq!(stdout, "", "{arguments:?}");
        format!("exit {code}\n{stderr}")
    }
}

/// Runs a command to its end.
pub(crate) fn ended(command: &mut Command) -> Ended {
    let output = command.output().unwrap();
    Ended {
        code: output.status.code().expect("it was not killed"),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Two MoE layers of four experts, and the 64 tokens of the shipped tokenizer.
pub(crate) fn config() -> Value {
    json!({
        "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32,
        "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": true,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": true,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu", "attention_bias": false,
        "eos_token_id": 1
    })
}
