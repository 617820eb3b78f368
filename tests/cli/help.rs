//! Help texts.

use insta::assert_snapshot;

use crate::directory::Directory;

pub(crate) fn help(arguments: &[&str]) -> String {
    let directory = Directory::empty();
    let ended = directory.r3(arguments);
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
    ended.stdout.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

#[test]
fn the_program() {
    assert_snapshot!(help(&["--help"]), @r"
    Reinforcement learning of mixture-of-experts language models, with the rollout's expert routes
    replayed in training.

    One process samples completions, scores them, trains on them and loads the new weights. A recipe,
    one YAML file, says all of it: begin with `r3 run recipes/tiny.yaml`, which takes a minute on two
    cores.

    Usage: r3 [OPTIONS] <COMMAND>

    Commands:
      run        Train the policy of a recipe, from its first step or from a checkpoint
      check      Check a recipe of `r3 run` or `r3 sft`, without opening the model or a device
      compare    Run a recipe twice, with replay on and off, and compare
      eval       Measure how many held-out problems a model solves
      sft        Train a model on the task's own answers: a warm start for `r3 run`
      rollout    Sample completions or conversations, with their expert routes, into a file
      score      Print the logprobs and expert routes of given tokens: the same-weight check
      routes     Show, compare and convert files of expert routes, r3's own and other engines'
      new-model  Write a model with random weights
      export     Write a checkpoint as a model that `transformers`, vLLM and SGLang load
      bench      Measure rollout, training, a whole step, kernels, the ring, and the cost of routes
      schema     Print the JSON schema of recipes, for editors, or the reference of every key
      help       Print this message or the help of the given subcommand(s)

    Options:
      -v, --verbose...
              Log more to stderr; -vv and -vvv still more

      -q, --quiet
              Log errors only, no warnings

          --threads <N>
              CPU threads to compute on; the cores this process may use by default

      -h, --help
              Print help (see a summary with '-h')

      -V, --version
              Print version

    Exit codes: 0 done, 1 a bug in r3, 2 the recipe, the arguments or a file they name, 3 the machine
    (memory, disk, ports), 4 the run diverged, 130 interrupted.

    Results go to stdout; progress, warnings and errors to stderr. NO_COLOR=1 turns colours off.
    ");
}

#[test]
fn run() {
    assert_snapshot!(help(&["run", "--help"]), @r"
    Train the policy of a recipe, from its first step or from a checkpoint

    Samples completions, scores them, trains on them with the rollout's routes replayed, loads the new
    weights into the rollout engine, and starts over. Shows one line a step, and a table of the whole
    run at the end. Into `run.out` go checkpoints (`step-000010`, Hugging Face directories with the
    optimiser's state beside the weights), `metrics.jsonl` (one object a step) and `recipe.yaml` (as it
    was run).

    Ctrl-C, SIGTERM or a terminal that is gone (SIGHUP) finishes the step, saves it and exits with 130;
    --resume continues from there. Under nohup a run outlives its terminal.

    Usage: r3 run [OPTIONS] <RECIPE>

    Arguments:
      <RECIPE>
              The recipe, a YAML file; docs/recipe.md explains every key

    Options:
          --set <KEY=VALUE>
              Put a value over the recipe's, as in --set train.lr=1e-5; can be repeated

          --resume
              Continue from the newest checkpoint in `run.out`

          --overwrite
              Discard the run that `run.out` holds

          --json
              End stdout with one line of JSON, the run in a dozen numbers; docs/json.md explains them

      -v, --verbose...
              Log more to stderr; -vv and -vvv still more

      -q, --quiet
              Log errors only, no warnings

          --threads <N>
              CPU threads to compute on; the cores this process may use by default

      -h, --help
              Print help (see a summary with '-h')

      -V, --version
              Print version

    Exit codes: 0 done, 1 a bug in r3, 2 the recipe, the arguments or a file they name, 3 the machine
    (memory, disk, ports), 4 the run diverged, 130 interrupted.

    Results go to stdout; progress, warnings and errors to stderr. NO_COLOR=1 turns colours off.
    ");
}

#[test]
fn check() {
    assert_snapshot!(help(&["check", "-h"]), @r"
    Check a recipe of `r3 run` or `r3 sft`, without opening the model or a device

    Usage: r3 check [OPTIONS] <RECIPE>

    Arguments:
      <RECIPE>  The recipe, a YAML file; docs/recipe.md explains every key

    Options:
          --set <KEY=VALUE>  Put a value over the recipe's, as in --set train.lr=1e-5; can be repeated
          --print            Print the whole recipe as YAML, with --set applied and every default
                             written out
      -v, --verbose...       Log more to stderr; -vv and -vvv still more
      -q, --quiet            Log errors only, no warnings
          --threads <N>      CPU threads to compute on; the cores this process may use by default
      -h, --help             Print help (see more with '--help')
      -V, --version          Print version
    ");
}

#[test]
fn compare() {
    assert_snapshot!(help(&["compare", "-h"]), @r"
    Run a recipe twice, with replay on and off, and compare

    Usage: r3 compare [OPTIONS] <RECIPE>

    Arguments:
      <RECIPE>  The recipe, a YAML file; docs/recipe.md explains every key

    Options:
          --set <KEY=VALUE>  Put a value over the recipe's, as in --set train.lr=1e-5; can be repeated
          --overwrite        Discard the comparison that `run.out` holds
          --json             End stdout with one line of JSON, the numbers of both runs under `on` and
                             `off`; docs/json.md explains them
      -v, --verbose...       Log more to stderr; -vv and -vvv still more
      -q, --quiet            Log errors only, no warnings
          --threads <N>      CPU threads to compute on; the cores this process may use by default
      -h, --help             Print help (see more with '--help')
      -V, --version          Print version

    Exit codes: 0 done, 1 a bug in r3, 2 the recipe, the arguments or a file they name, 3 the machine
    (memory, disk, ports), 4 the run diverged, 130 interrupted.

    Results go to stdout; progress, warnings and errors to stderr. NO_COLOR=1 turns colours off.
    ");
}

#[test]
fn eval() {
    assert_snapshot!(help(&["eval", "-h"]), @r"
    Measure how many held-out problems a model solves

    Usage: r3 eval [OPTIONS] <RECIPE>

    Arguments:
      <RECIPE>  The recipe, a YAML file; docs/recipe.md explains every key

    Options:
          --set <KEY=VALUE>  Put a value over the recipe's, as in --set train.lr=1e-5; can be repeated
          --model <DIR>      Evaluate this model instead of the recipe's: a Hugging Face directory, a
                             checkpoint, or a run, whose newest checkpoint is taken
          --problems <N>     Held-out problems to answer; the recipe's `eval.problems` by default
          --json             Print one line of JSON: accuracy, problems, seconds
      -v, --verbose...       Log more to stderr; -vv and -vvv still more
      -q, --quiet            Log errors only, no warnings
          --threads <N>      CPU threads to compute on; the cores this process may use by default
      -h, --help             Print help (see more with '--help')
      -V, --version          Print version
    ");
}

#[test]
fn sft() {
    assert_snapshot!(help(&["sft", "-h"]), @r"
    Train a model on the task's own answers: a warm start for `r3 run`

    Usage: r3 sft [OPTIONS] <RECIPE>

    Arguments:
      <RECIPE>  The recipe, a YAML file; docs/recipe.md explains every key

    Options:
          --set <KEY=VALUE>  Put a value over the recipe's, as in --set train.lr=1e-5; can be repeated
          --overwrite        Replace the model that `run.out` holds
          --json             End stdout with one line of JSON: steps, seconds, loss, eval_after
      -v, --verbose...       Log more to stderr; -vv and -vvv still more
      -q, --quiet            Log errors only, no warnings
          --threads <N>      CPU threads to compute on; the cores this process may use by default
      -h, --help             Print help (see more with '--help')
      -V, --version          Print version

    Exit codes: 0 done, 1 a bug in r3, 2 the recipe, the arguments or a file they name, 3 the machine
    (memory, disk, ports), 4 the run diverged, 130 interrupted.

    Results go to stdout; progress, warnings and errors to stderr. NO_COLOR=1 turns colours off.
    ");
}

#[test]
fn rollout() {
    let help = help(&["rollout", "--help"]);
    let (before, _) = help.split_once("Options:\n").unwrap();
    assert_snapshot!(before, @r#"
    Sample completions or conversations, with their expert routes, into a file

    Each line of --prompts is {"prompt": "1+1="} or {"prompt": [{"role": "user", "content": "1+1?"}]};
    "turns": ["and 2+2?"] says what follows each sampled turn. The sampled tokens stay as they are:
    where the chat template renders them otherwise in a later prompt, the conversation forks into
    another sample, and `trajectory_forks` counts it.

    Each line written is one sample: tokens, logprobs, versions, turns, text and routes; docs/json.md
    explains every key. `r3 score` replays them, `r3 routes` converts them. The file appears when it is
    whole. Ctrl-C or SIGTERM leaves whole lines in FILE.partial and exits with 130.

    Usage: r3 rollout [OPTIONS] --out <FILE> <--prompts <FILE>|--recipe <RECIPE>> <MODEL>

    Arguments:
      <MODEL>
              A Hugging Face directory, a checkpoint, or a run, whose newest checkpoint is taken
    "#);
}

#[test]
fn rollout_options() {
    let help = help(&["rollout", "--help"]);
    let (_, options) = help.split_once("Options:\n").unwrap();
    // Those of every command follow.
    let (own, _) = options.split_once("  -v, --verbose").unwrap();
    assert_snapshot!(own, @r#"
          --prompts <FILE>
              JSON lines to sample from

          --recipe <RECIPE>
              Sample the training problems of this recipe's task instead, and score them

          --set <KEY=VALUE>
              Put a value over the recipe's, as in --set task.arithmetic.digits=3; can be repeated

          --out <FILE>
              File to write; - is stdout

          --overwrite
              Replace the file if it is there

          --limit <N>
              Take the first N prompts only

          --group-size <N>
              Completions of each prompt

              [default: 1]

          --max-new-tokens <N>
              Tokens of a turn at most

              [default: 256]

          --temperature <T>
              Divides the logits; 0 takes the most likely token

              [default: 1]

          --top-p <P>
              Draws from the fewest most likely tokens that hold this much of what --top-k left; 1 takes
              all of them

              [default: 1]

          --top-k <N>
              Draws from this many most likely tokens; 0 takes all of them. With --top-p or --min-p it
              bounds what is kept for every token; without it, that may be the whole vocabulary

              [default: 0]

          --min-p <P>
              Draws from tokens at least this many times as likely as the most likely one; 0 takes all
              of them

              [default: 0]

          --seed <N>
              Seed of all draws

              [default: 0]

          --dtype <DTYPE>
              Format of weights, keys and values

              Possible values:
              - f32:  32-bit floating point
              - bf16: Brain float, 8 significant bits

              [default: bf16]

          --kv-memory <BYTES>
              Memory for keys, values and routes of all resident tokens

              [default: 64MiB]

          --max-running <N>
              Sequences decoded at once

              [default: 128]

          --return-routed-experts <BOOL>
              Whether to write the routes; without, no memory is held for them

              [default: true]
              [possible values: true, false]

          --routed-experts-start-len <N>
              Position of the first row of routes to write; at most the length of the shortest prompt

              [default: 0]

          --json
              Print one line of JSON at the end, the summary; docs/json.md explains it
    "#);
}

#[test]
fn score() {
    assert_snapshot!(help(&["score", "--help"]), @r#"
    Print the logprobs and expert routes of given tokens: the same-weight check

    For each line {"tokens": [...]} of T tokens it prints a line {"logprobs": [...], "routed_experts":
    [...], "layer_ids": [...]}: T - 1 logprobs, of tokens 1 on, in nats, at temperature 1 unless a
    "temperature" is given, and T - 1 rows of routes, one list of experts, in router order, for each MoE
    layer. Given "routed_experts" as well, it replays them, and adds "live_differs": where the router
    would have chosen otherwise. docs/json.md explains every key.

    Lines may also be those that `r3 rollout` wrote: they are scored under the distribution that their
    tokens were drawn from, and in the same format their own logprobs come out again, to the bit.

    Usage: r3 score [OPTIONS] --input <FILE> <MODEL>

    Arguments:
      <MODEL>
              A Hugging Face directory, a checkpoint, or a run, whose newest checkpoint is taken

    Options:
          --input <FILE>
              JSON lines to score; - is stdin

          --side <SIDE>
              Which of the two forward passes scores

              Possible values:
              - engine:  The rollout engine: paged cache, chunked prefill
              - trainer: The trainer: packed sequences

              [default: engine]

          --dtype <DTYPE>
              Format of weights, keys and values; of the trainer side, what products round to

              Possible values:
              - f32:  32-bit floating point
              - bf16: Brain float, 8 significant bits

              [default: f32]

          --max-tokens <N>
              Longest sequence the engine side makes room for

              [default: 8192]

      -v, --verbose...
              Log more to stderr; -vv and -vvv still more

      -q, --quiet
              Log errors only, no warnings

          --threads <N>
              CPU threads to compute on; the cores this process may use by default

      -h, --help
              Print help (see a summary with '-h')

      -V, --version
              Print version
    "#);
}

#[test]
fn new_model() {
    assert_snapshot!(help(&["new-model", "-h"]), @r"
    Write a model with random weights

    Usage: r3 new-model [OPTIONS] <CONFIG> <OUT>

    Arguments:
      <CONFIG>  A config.json of model type qwen3_moe or dots1, or a directory with one
      <OUT>     Directory to write

    Options:
          --seed <N>       Seed of the weights [default: 0]
          --dtype <DTYPE>  Format of the weights [default: bf16] [possible values: f32, bf16]
      -v, --verbose...     Log more to stderr; -vv and -vvv still more
      -q, --quiet          Log errors only, no warnings
          --threads <N>    CPU threads to compute on; the cores this process may use by default
      -h, --help           Print help (see more with '--help')
      -V, --version        Print version
    ");
}

#[test]
fn export() {
    assert_snapshot!(help(&["export", "-h"]), @r"
    Write a checkpoint as a model that `transformers`, vLLM and SGLang load

    Usage: r3 export [OPTIONS] <CHECKPOINT> <OUT>

    Arguments:
      <CHECKPOINT>  A checkpoint, a run, whose newest checkpoint is taken, or any model r3 reads
      <OUT>         Directory to write

    Options:
          --dtype <DTYPE>  Format of the weights [default: bf16] [possible values: f32, bf16]
          --adapter        Write the updates of `train.lora` alone, as an adapter for PEFT
      -v, --verbose...     Log more to stderr; -vv and -vvv still more
      -q, --quiet          Log errors only, no warnings
          --threads <N>    CPU threads to compute on; the cores this process may use by default
      -h, --help           Print help (see more with '--help')
      -V, --version        Print version
    ");
}

#[test]
fn schema() {
    assert_snapshot!(help(&["schema", "-h"]), @r"
    Print the JSON schema of recipes, for editors, or the reference of every key

    Usage: r3 schema [OPTIONS]

    Options:
          --sft          The schema of recipes for `r3 sft`, instead of those for `r3 run`
          --markdown     The reference of every key of both, in Markdown: docs/recipe.md
      -v, --verbose...   Log more to stderr; -vv and -vvv still more
      -q, --quiet        Log errors only, no warnings
          --threads <N>  CPU threads to compute on; the cores this process may use by default
      -h, --help         Print help
      -V, --version      Print version
    ");
}
