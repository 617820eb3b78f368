//! What a run needs and does not get: memory, a port, room on the disk.

use std::fs;
use std::net::TcpListener;

use insta::assert_snapshot;
use serde_json::json;

use crate::directory::{Directory, Ended, config, ended};

#[test]
fn a_port_that_is_taken() {
    let directory = Directory::with_model();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let said =
        directory.refused(&["run", "recipe.yaml", "--set", &format!("metrics.listen=127.0.0.1:{port}")]);
    assert_snapshot!(said.replace(&port.to_string(), "PORT"), @r"
    exit 3
    error: cannot serve metrics at 127.0.0.1:PORT
      caused by: Address already in use (os error 98)

    hint: port PORT is taken, perhaps by another run: set `metrics.listen` to another port, or to 127.0.0.1:0 for any free one
    ");
}

#[test]
fn a_ring_too_small_for_the_rollouts_of_a_step() {
    let directory = Directory::with_model();
    assert_snapshot!(directory.refused(&["run", "recipe.yaml", "--set", "ring.bytes=1KiB"]), @r"
    exit 2
    error: the ring holds 1024 bytes, but the rollouts of one step may need 14256

    hint: set `ring.bytes` to at least 14256
    ");
}

#[test]
fn a_kv_memory_too_small_for_a_block_or_a_sequence() {
    let directory = Directory::with_model();
    let refused = |block_tokens: &str| {
        directory.refused(&["run", "recipe.yaml", "--set", "engine.kv_memory=400", "--set", block_tokens])
    };
    assert_snapshot!(refused("engine.block_tokens=16"), @r"
    exit 2
    error: the KV cache has 400 bytes, but one block of 16 tokens needs 1112

    hint: set `engine.kv_memory` to at least 1112 bytes, better a hundred times that
    ");
    assert_snapshot!(refused("engine.block_tokens=2"), @r"
    exit 2
    error: the KV cache of 400 bytes holds 4 tokens, but one sequence may need 6

    hint: set `engine.kv_memory` to at least 480, or shorten prompts or completions
    ");
}

#[test]
fn memory_that_the_machine_does_not_have() {
    let directory = Directory::with_model();
    // What is available is this machine's, and changes.
    let refused = |command: &str, memory: &str| {
        let said = directory.refused(&[command, "recipe.yaml", "--set", memory]);
        said.split(", but ").next().unwrap_or_default().to_owned()
    };
    assert_snapshot!(refused("run", "engine.kv_memory=100TiB"), @r"
    exit 3
    error: the KV cache needs 109951162777600 bytes of memory
    ");
    assert_snapshot!(refused("eval", "engine.kv_memory=100TiB"), @r"
    exit 3
    error: the KV cache needs 109951162777600 bytes of memory
    ");
    assert_snapshot!(refused("run", "ring.bytes=100TiB"), @r"
    exit 3
    error: the ring needs 109951162781696 bytes of memory
    ");
}

#[test]
fn a_sequence_longer_than_the_model_can_place() {
    let directory = Directory::with_model();
    assert_snapshot!(directory.refused(&["run", "recipe.yaml", "--set", "rollout.max_new_tokens=61"]), @r"
    exit 2
    error: prompt and completion may take 65 tokens, but the model has 64 positions

    hint: shorten the prompt or `rollout.max_new_tokens`
    ");
}

/// A limit on the size of files stands in for a full disk: it needs no mount, and fails the same writes.
#[test]
fn a_disk_without_room_for_the_next_checkpoint() {
    let directory = Directory::empty();
    let mut config = config();
    config["moe_intermediate_size"] = json!(256);
    directory.write("config.json", config.to_string());
    directory.done(&["new-model", ".", "model"]);
    directory.done(&["run", "recipe.yaml", "--set", "run.steps=1"]);
    let before = files(&directory, "run/step-000001");
    let limited = "ulimit -f 256; exec \"$0\" --threads 2 run recipe.yaml --resume";
    let Ended { code, stdout, stderr } =
        ended(directory.command("sh").args(["-c", limited, env!("CARGO_BIN_EXE_r3")]));
    assert_eq!(stdout, "");
    let error = stderr.lines().skip_while(|line| !line.starts_with("error")).collect::<Vec<_>>().join("\n");
    assert_snapshot!(format!("exit {code}\n{error}"), @r"
    exit 3
    error: cannot write run/step-000002.tmp/model.safetensors, which needs 1213248 bytes
      caused by: File too large (os error 27)

    hint: raise `ulimit -f`, or choose a file system that holds files of this size; what was there before is intact
    ");
    assert_eq!(files(&directory, "run/step-000001"), before);
    assert!(!directory.path("run/step-000002").exists() && !directory.path("run/step-000002.tmp").exists());
    directory.done(&["run", "recipe.yaml", "--resume"]);
}

#[test]
fn a_limit_on_the_size_of_files_is_said_by_whatever_meets_it() {
    let directory = Directory::with_model();
    directory.write("prompts.jsonl", "{\"prompt\": \"1+1=\"}\n".repeat(100));
    let rollout = "rollout model --prompts prompts.jsonl --max-new-tokens 8 --out";
    let out = fs::File::create(directory.path("stdout")).unwrap();
    for (command, file) in [
        ("new-model . new", "new/.unfinished/model.safetensors"),
        ("sft sft.yaml", "warm/.unfinished/model.safetensors"),
        ("export model exported", "exported/.unfinished/model.safetensors"),
        ("run recipe.yaml", "ftruncate failed for a ring of 69632 bytes"),
        (&format!("{rollout} out.jsonl"), "out.jsonl"),
        (&format!("{rollout} -"), "stdout"),
    ] {
        let limited = format!("ulimit -f 8; exec \"$0\" --threads 2 {command}");
        let mut shell = directory.command("sh");
        shell.args(["-c", &limited, env!("CARGO_BIN_EXE_r3")]).stdout(out.try_clone().unwrap());
        let ended = shell.output().unwrap();
        let stderr = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(3), "{command}: {stderr}");
        let error = stderr.lines().find(|line| line.starts_with("error: ")).expect(&stderr);
        assert!(error.contains(file), "{error}");
        assert!(stderr.contains("hint: raise `ulimit -f`"), "{stderr}");
    }
    for left in ["new", "warm", "exported", "run", "out.jsonl", "out.jsonl.partial"] {
        assert!(!directory.path(left).exists(), "{left}");
    }
}

#[test]
fn too_few_open_files_are_said_by_whatever_meets_them() {
    let directory = Directory::with_model();
    let mut said = Vec::new();
    for limit in 8..40 {
        let limited = format!("ulimit -n {limit}; exec \"$0\" --threads 2 run recipe.yaml --overwrite");
        let mut shell = directory.command("sh");
        let Ended { code, stderr, .. } = ended(shell.args(["-c", &limited, env!("CARGO_BIN_EXE_r3")]));
        if code == 0 {
            break;
        }
        let error = stderr.lines().find(|line| line.starts_with("error: ")).expect(&stderr);
        assert_eq!(code, 3, "{limit} files: {stderr}");
        assert!(stderr.contains("caused by: Too many open files"), "{limit} files: {stderr}");
        assert!(stderr.contains("hint: raise `ulimit -n`"), "{limit} files: {stderr}");
        said.push(error.to_owned());
    }
    let of_ring = "error: cannot read /proc/self/stat, by which the ring knows this process";
    assert!(said.iter().any(|error| error == of_ring), "{said:#?}");
    assert!(!said.iter().any(|error| error.contains(" 0 bytes")), "{said:#?}");
}

/// Names and contents.
fn files(directory: &Directory, name: &str) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(directory.path(name)).unwrap();
    let mut files: Vec<_> = entries
        .map(|entry| {
            let entry = entry.unwrap();
            (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())
        })
        .collect();
    files.sort();
    files
}
