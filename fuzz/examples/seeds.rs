//! Writes the inputs that fuzzing starts from into `fuzz/corpus`: `cargo run -p r3-fuzz --example seeds`.
//!
//! They are made of the recipes and the model that come with r3, and of frames of made-up rollouts. Run it again when a
//! format changes; what fuzzing found lies beside them and stays.

use std::fs;
use std::io::Result;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use r3_fuzz::frame::frame_of;
use r3_wire::npy;
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
    values()?;
    configs()?;
    rows()?;
    files()
}

/// Bytes of rollouts: prompt, sampled tokens, then as `Parts` draws them.
fn frames() -> Result<()> {
    let mut written: Vec<Vec<u8>> = Vec::new();
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
        written.push(frame.clone());
        write("frame_file", &format!("seed-{seed}"), written[written.len().saturating_sub(3)..].concat())?;
        write("frame_bytes", &format!("seed-{seed}-cut"), &frame[..frame.len() - 8])?;
        write("frame_resealed", &format!("seed-{seed}"), &frame)?;
        write("frame_file", &format!("seed-{seed}-cut"), &frame[..frame.len() - 8])?;
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
    let many = |text: &str| text.repeat(90);
    write("recipe", "seed-many-aliases.yaml", format!("a: &a [{}]\nb: [{}]\n", many("1,"), many("*a,")))
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

/// Five numbers, three counts, two token ids, and texts that YAML takes for something else.
fn values() -> Result<()> {
    for (seed, texts) in [
        "models/a\0runs/b\0t.jsonl\0e.jsonl\0prompt\0answer",
        "off\0null\0~\0 1e3\0a: b\0# c",
        "0x10\0- a\0a\n\nb\n\0\u{85}a\0\u{feff}\0\u{7f}\u{2028}",
        "'\0\"\0\\\0\ta\t\0...\0<<",
    ]
    .into_iter()
    .enumerate()
    {
        let numbers = [0.7, 3e-6, 0.9, 0.999, 0.01].map(f64::to_le_bytes).concat();
        let counts = [u64::MAX, seed as u64, 3 << 30].map(u64::to_le_bytes).concat();
        let ids = [&[2][..], &7_u32.to_le_bytes(), &9_u32.to_le_bytes()].concat();
        write(
            "recipe_values",
            &format!("seed-{seed}"),
            [&numbers, &counts, &ids, texts.as_bytes()].concat(),
        )?;
    }
    write("recipe_values", "seed-not-finite", [0xff; 99])
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
        (
            "seed-dots1",
            json!({
                "model_type": "dots1", "n_routed_experts": 32, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
                "first_k_dense_replace": 1, "routed_scaling_factor": 2.5
            }),
        ),
        (
            "seed-odd-groups",
            json!({ "model_type": "dots1", "n_routed_experts": 32, "n_shared_experts": 1, "n_group": 5 }),
        ),
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

/// Layout, model and start, and a file of that layout: two MoE layers of four, top 2 of 8.
fn files() -> Result<()> {
    let rows: Vec<u8> = [[1, 0, 3, 7], [2, 5, 4, 6], [7, 1, 0, 2]].concat();
    let all_layers = |dense: u8| -> Vec<u8> {
        rows.chunks(4).flat_map(|row| [dense, dense, row[0], row[1], dense, dense, row[2], row[3]]).collect()
    };
    let base64 = |bytes: &[u8]| STANDARD.encode(bytes);
    let numpy = |dense| {
        let header = "{'descr': '<i2', 'fortran_order': False, 'shape': (3, 4, 2), }\n";
        let ids = wide(&all_layers(dense), 2);
        [npy::MAGIC, &[1, 0, header.len() as u8, 0], header.as_bytes(), &ids].concat()
    };
    let padded = [&all_layers(0)[..], &[0, 1].repeat(4)].concat();
    let sglang = base64(&wide(&all_layers(0), 4));
    for (name, layout, file) in [
        ("vllm.npy", 0, numpy(0)),
        (
            "vllm.json",
            0,
            json!({ "prompt_token_ids": [5, 6], "choices": [{ "index": 0, "finish_reason": "stop", "token_ids": [7, 8],
                "routed_experts": base64(&numpy(0)) }] })
            .to_string()
            .into(),
        ),
        ("atom.npy", 1, numpy(0xff)),
        ("sglang", 2, sglang.clone().into()),
        (
            "sglang.json",
            2,
            json!({ "output_ids": [7, 8], "meta_info": { "prompt_tokens": 2, "completion_tokens": 2,
                "finish_reason": { "type": "length" }, "routed_experts": sglang } })
            .to_string()
            .into(),
        ),
        ("nemo-rl", 3, format!("nrlre1:int8:4x4x2:{}", base64(&padded)).into()),
        (
            "prime-rl.json",
            4,
            json!({ "data": base64(&rows), "shape": [3, 2, 2], "start": 0, "dtype": "uint8" }).to_string().into(),
        ),
        (
            "no-prompt.json",
            2,
            json!({ "prompt_token_ids": [], "token_ids": [7], "routed_experts": "" }).to_string().into(),
        ),
        (
            "lists.json",
            5,
            json!({ "layer_ids": [1, 3], "tokens": [5, 6, 7, 8], "routed_experts":
                [[[1, 0], [3, 7]], [[2, 5], [4, 6]], [[7, 1], [0, 2]]] })
            .to_string()
            .into(),
        ),
        ("never-captured", 2, base64(&[0; 96]).into()),
    ] {
        write("wire_foreign", &format!("seed-{name}"), [&[layout, 0, 0], &file[..]].concat())?;
    }
    arrays(&rows, &all_layers(0), &padded)?;
    lines(&rows)
}

/// Ids of one byte in little-endian numbers of `width` bytes; 255 is -1.
fn wide(ids: &[u8], width: usize) -> Vec<u8> {
    let sign = |id: u8| if id == 0xff { 0xff } else { 0 };
    ids.iter().flat_map(|&id| (0..width).map(move |at| if at == 0 { id } else { sign(id) })).collect()
}

/// Layout, model, start, element type and columns, and an array.
fn arrays(rows: &[u8], all_layers: &[u8], padded: &[u8]) -> Result<()> {
    for (name, [layout, element, columns], array) in [
        ("vllm", [0, 2, 0], wide(all_layers, 2)),
        ("sglang", [2, 4, 0], wide(all_layers, 4)),
        ("nemo-rl", [3, 0, 0], padded.to_vec()),
        ("nemo-rl-moe", [3, 0, 1], [rows, &[0, 1, 0, 1]].concat()),
        ("prime-rl", [4, 1, 1], rows.to_vec()),
        ("lists", [5, 1, 1], rows.to_vec()),
        ("zeros", [0, 2, 0], vec![0; 48]),
    ] {
        let header = [layout, 0, 0, element, columns, 0];
        write("wire_payloads", &format!("seed-{name}"), [&header[..], &array].concat())?;
    }
    Ok(())
}

/// r3's own file.
fn lines(rows: &[u8]) -> Result<()> {
    let routes = json!({ "rows": 3, "start": 0, "layer_ids": [1, 3], "top_k": 2, "n_experts": 8, "dtype": "u8",
        "weight_epoch": 2, "model_hash": "00000000000000ff", "data": STANDARD.encode(rows), "validity": STANDARD.encode([7]) });
    let line = json!({ "r3": 1, "group": 3, "index": 1, "finish": "stop", "prompt_tokens": 2, "cached_tokens": 1,
        "turns": [[2, 4]], "reward": 0.5, "text": "4\n", "tokens": [5, 6, 7, 8], "logprobs": [-0.25, 0.0],
        "versions": [2, 3], "routed_experts": routes });
    write("wire_r3_lines", "seed-whole", format!("{line}\n"))?;
    write(
        "wire_r3_lines",
        "seed-two-lines",
        "{\"r3\":1,\"group\":0,\"index\":0}\n\n{\"r3\":1,\"group\":0,\"index\":1,\"reward\":null}",
    )?;
    write(
        "wire_r3_lines",
        "seed-no-tokens",
        "{\"r3\":1,\"group\":0,\"index\":0,\"logprobs\":[-1.5],\"turns\":[[2,3]],\"reward\":1}",
    )?;
    write(
        "wire_r3_lines",
        "seed-start",
        "{\"r3\":1,\"group\":0,\"index\":0,\"routed_experts\":{\"rows\":1,\"start\":18446744073709551615,\"layer_ids\":[0],\
         \"top_k\":1,\"n_experts\":4,\"dtype\":\"u8\",\"data\":\"Aw==\"}}",
    )?;
    write("wire_r3_lines", "seed-version", "{\"r3\":2,\"group\":0,\"index\":0}")
}
