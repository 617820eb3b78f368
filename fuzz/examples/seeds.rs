//! Writes the inputs that fuzzing starts from into `fuzz/corpus`: `cargo run -p r3-fuzz --example seeds`.
//!
//! They are made of the recipes and the model that come with r3, and of frames of made-up rollouts. Run it again when a
//! format changes; what fuzzing found lies beside them and stays.

use std::fs;
use std::io::Result;
use std::path::{Path, PathBuf};

use r3_fuzz::frame::frame_of;
use serde_json::{Map, Value, json};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn write(target: &str, name: &str, bytes: impl AsRef<[u8]>) -> Result<()> {
    let dir = root().join("fuzz/corpus").join(target);
    fs::create_dir_all(&dir)?;
    fs::write(dir.join(name), bytes)
}

fn main() -> Result<()> {
    frames()?;
    recipes()?;
    arguments()?;
    configs()?;
    rows()
}

/// Bytes of rollouts: prompt, sampled tokens, then as `Parts` draws them.
fn frames() -> Result<()> {
    for (seed, (prompt, sampled, routes)) in
        [(3, 5, 1), (1, 1, 1), (4, 0, 1), (2, 7, 0), (1, 0, 0), (9, 12, 2), (1, 3, 3), (5, 4, 2)]
            .into_iter()
            .enumerate()
    {
        let mut input = vec![prompt - 1, sampled, routes];
        let mut state = seed as u64 + 1;
        input.extend((0..600).map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        }));
        let frame = frame_of(&input);
        write("frame_bytes", &format!("seed-{seed}"), &frame)?;
        write("frame_bytes", &format!("seed-{seed}-cut"), &frame[..frame.len() - 8])?;
        write("frame_resealed", &format!("seed-{seed}"), &frame)?;
        let mut damaged = frame.clone();
        damaged[120 + seed] ^= 0x81;
        write("frame_resealed", &format!("seed-{seed}-damaged"), &damaged)?;
        write("frame_round_trip", &format!("seed-{seed}"), &input)?;
    }
    Ok(())
}

fn recipes() -> Result<()> {
    for name in ["tiny.yaml", "tiny-sft.yaml"] {
        write("recipe", &format!("seed-{name}"), fs::read(root().join("recipes").join(name))?)?;
    }
    let readme = fs::read_to_string(root().join("README.md"))?;
    let block = readme.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next());
    write("recipe", "seed-readme.yaml", block.expect("the recipe of the README"))?;
    for (name, text) in RECIPES {
        write("recipe", name, text)?;
    }
    Ok(())
}

/// Every section and every spelling once, and some of what people get wrong.
const RECIPES: [(&str, &str); 9] = [
    (
        "seed-all.yaml",
        "model: { path: m }\ntask: { arithmetic: { digits: 3, held_out: 10, seed: 1, reward: exact_match } }\n\
         rollout: { groups: 4, group_size: 2, max_new_tokens: 9, temperature: 0.7, top_p: 1, sample_top_k: 0, min_p: 0,\n  \
         dtype: f32, stop_token_ids: [1, 2] }\n\
         engine: { kv_memory: 2 GB, block_tokens: 8, max_batch_tokens: 64, max_running: 4, prefix_cache: false }\n\
         router_replay: { mode: \"off\", diagnose: true }\n\
         algorithm: { dapo: { clip_low: 0.2, clip_high: 0.28, dynamic_sampling: { max_batches: 3 },\n  \
         overlong: { max_tokens: 9, cache_tokens: 4, factor: 0.5 } } }\n\
         train: { dtype: f32, lr: 1e-6, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.01, grad_clip: 1.0,\n  \
         mini_steps: 2, micro_batch_tokens: 99 }\n\
         ring: { bytes: 1MiB, deadline_s: 60 }\neval: { every: 5, problems: 10 }\nmetrics: { listen: null }\n\
         run: { steps: 2, seed: 18446744073709551615, out: runs/x }\n",
    ),
    (
        "seed-grpo.yaml",
        "model: {path: \"a b\"}\ntask:\n  jsonl:\n    train: 't.jsonl'\n    eval: e.jsonl\n    prompt_key: q\n    \
         answer_key: a\n    reward: numeric_match\nrollout: {groups: 0x10, group_size: 8, max_new_tokens: 1_6}\n\
         algorithm: {grpo: {clip: .2}}\nrun: {steps: 1, out: o}\n",
    ),
    (
        "seed-sft.yaml",
        "model: { existing: { path: m } }\ntask: { jsonl: { train: t.jsonl, held_out: 4 } }\n\
         sft: { steps: 3, batch: 4, lr: 1e-3 }\nrun: { out: o }\n",
    ),
    ("seed-aliases.yaml", "a: &a [1, 2]\nb: &b [*a, *a]\nrun: { <<: *b }\n"),
    ("seed-tab.yaml", "run:\n\tsteps: 1\n"),
    ("seed-two-documents.yaml", "---\nrun: { steps: 1 }\n---\nrun: { steps: 2 }\n"),
    ("seed-twice.yaml", "run: { steps: 1, steps: 2 }\n"),
    ("seed-block-text.yaml", "\u{feff}model: { path: |\n  a\n   b\n }\nrun: { out: >-\n  x }\n"),
    ("seed-not-finite.yaml", "rollout: { temperature: .inf, top_p: .nan, min_p: 1e999 }\r\n"),
];

fn arguments() -> Result<()> {
    for (name, lines) in [
        ("seed-numbers", "train.lr=3e-6\nrun.steps=2\nengine.kv_memory=1GiB"),
        (
            "seed-blocks",
            "algorithm={grpo: {clip: 0.1}}\ntask={jsonl: {train: t, held_out: 9}}\neval.problems=9",
        ),
        ("seed-words", "router_replay.mode=off\nrollout.dtype=f32\nengine.prefix_cache=false"),
        ("seed-list", "rollout.stop_token_ids=[1, 2, 3]\ntrain.betas=[0.9, 0.99]"),
        ("seed-text", "run.out=\"a: b # c\"\nmodel.path='it''s'"),
        ("seed-unknown", "rollout.group_sise=8"),
        ("seed-not-a-block", "run.steps.more=1"),
        ("seed-no-value", "run.steps"),
        ("seed-empty", "=1"),
    ] {
        write("recipe_set", name, lines)?;
    }
    Ok(())
}

fn configs() -> Result<()> {
    let text = fs::read_to_string(root().join("assets/tiny-moe/config.json"))?;
    write("model_config", "seed-tiny-moe.json", &text)?;
    let tiny: Map<String, Value> = serde_json::from_str(&text)?;
    for (name, changes) in [
        ("seed-experts-5", json!({ "num_experts": null, "num_local_experts": 8 })),
        (
            "seed-rope-5",
            json!({ "rope_theta": null, "rope_parameters": { "rope_type": "default", "rope_theta": 1e6 } }),
        ),
        ("seed-yarn", json!({ "rope_scaling": { "type": "yarn", "factor": 4.0 } })),
        (
            "seed-dense-layers",
            json!({ "mlp_only_layers": [0, 2], "decoder_sparse_step": 1, "intermediate_size": 64 }),
        ),
        ("seed-every-other", json!({ "decoder_sparse_step": 2, "attention_bias": true })),
        ("seed-no-moe", json!({ "decoder_sparse_step": 99 })),
        ("seed-odd-head", json!({ "head_dim": 3 })),
        (
            "seed-30b",
            json!({
                "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
                "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128,
                "num_experts_per_tok": 8, "max_position_embeddings": 262_144, "rope_theta": 1e7
            }),
        ),
    ] {
        let mut config = tiny.clone();
        config.extend(changes.as_object().expect("changes of keys").clone());
        write("model_config", name, serde_json::to_string(&config)?)?;
    }
    Ok(())
}

/// `K - 1`, `E - 1` in two bytes, `L - 1`, rows, and the ids.
fn rows() -> Result<()> {
    write("route_rows", "seed-two-layers", [1, 7, 0, 1, 2, 3, 1, 0, 2, 2, 0, 1, 7])?;
    write("route_rows", "seed-wide-ids", [1, 44, 1, 0, 2, 44, 1, 0, 1, 1, 0, 2, 0])?;
    write("route_rows", "seed-top-1", [0, 255, 0, 0, 3, 255, 0, 0])?;
    write("route_rows", "seed-zeros", [1, 7, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0])?;
    write("route_rows", "seed-ragged", [1, 7, 0, 1, 2, 3, 1, 0])?;
    write("route_rows", "seed-none", [1, 7, 0, 1, 0])
}
