//! Help texts of `r3 bench`.

use insta::assert_snapshot;

use crate::help::help;

#[test]
fn the_commands() {
    assert_snapshot!(help(&["bench", "--help"]), @r"
    Measure rollout, training, a whole step, kernels, the ring, and the cost of routes

    Every measurement runs the code that a run runs, warms up with a round of its own, and says the
    median of the rounds with the lowest and the highest. Figures of a busy machine say little: close
    other programs first.

    Usage: r3 bench [OPTIONS] <COMMAND>

    Commands:
      engine   Measure how fast the engine samples, and what share of the machine it reaches
      train    Measure how fast the trainer learns: replayed forward, loss, backward, AdamW
      step     Measure a whole GRPO step: rollout, ring, replayed training, refit
      kernels  Measure every kernel, as a share of what binds it on this machine
      ring     Measure the ring: latency, and GB/s of rollouts beside a memcpy
      routes   Measure what recording routes adds to a decode tick, or to a whole engine
      help     Print this message or the help of the given subcommand(s)

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
    ");
}

#[test]
fn engine() {
    assert_snapshot!(help(&["bench", "engine", "--help"]), @r"
    Measure how fast the engine samples, and what share of the machine it reaches

    All sequences are submitted at once, without a prefix cache, and sample as many tokens as are asked
    for. Throughput counts sampled tokens over the time from submission until the last rollout was
    taken, in which prompts are computed, too.

    Of the machine it says two things, measured at the end: the GFLOP/s of its fastest large product in
    this format, beside those of the products with weights; and the GB/s at which it reads memory,
    beside the bytes of weights, each counted once in every tick that touches it. Attention to earlier
    tokens counts in neither.

    Usage: r3 bench engine [OPTIONS]

    Options:
          --model <DIR>
              A Hugging Face directory, a checkpoint, or a run, whose newest checkpoint is taken

              [default: assets/tiny-moe]

          --config <CONFIG>
              A config.json, or a directory with one: its shape with random weights, as `r3 new-model`
              makes them

          --batch <N>
              Sequences

              [default: 64]

          --prompt <N>
              Tokens of each prompt

              [default: 32]

          --new <N>
              Tokens that each sequence samples, at least 2

              [default: 128]

          --dtype <DTYPE>
              Format of weights, keys and values

              Possible values:
              - f32:  32-bit floating point
              - bf16: Brain float, 8 significant bits

              [default: bf16]

          --numerics <NUMERICS>
              Whether orders of sums may depend on the batch, as `numerics` in a recipe

              [default: exact]
              [possible values: exact, fast]

          --routes <ROUTES>
              Whether routes are captured and given back

              [default: on]
              [possible values: on, off]

          --rounds <N>
              Rounds, beside one that warms up

              [default: 3]

          --json
              End stdout with one line of JSON instead of the table; docs/json.md explains the keys

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
    ");
}

#[test]
fn train() {
    assert_snapshot!(help(&["bench", "train", "--help"]), @"
    Measure how fast the trainer learns: replayed forward, loss, backward, AdamW

    Rollouts are made of the policy's own forward, with its logprobs and routes. They are then trained
    on, one optimiser step a round, by what `r3 run` trains with: routes are replayed, and the mismatch
    is measured in the same forward. Throughput counts all tokens fed to the model over the whole step;
    every one of them predicts a token that is trained on. The forward's time includes gathering the
    batch and the loss, the backward's adding up the gradients.

    Usage: r3 bench train [OPTIONS]

    Options:
          --model <DIR>
              A Hugging Face directory, a checkpoint, or a run, whose newest checkpoint is taken

              [default: assets/tiny-moe]

          --config <CONFIG>
              A config.json, or a directory with one: its shape with random weights, as `r3 new-model`
              makes them

          --sequences <N>
              Sequences of one optimiser step

              [default: 8]

          --length <N>
              Tokens of each that are fed to the model

              [default: 256]

          --dtype <DTYPE>
              Format of the products

              Possible values:
              - f32:  32-bit floating point
              - bf16: Brain float, 8 significant bits

              [default: f32]

          --micro-batch-tokens <N>
              Tokens of one forward and backward; by default a recipe's

          --recompute
              Compute activations again in the backward, which takes less memory and more time

          --moments <MOMENTS>
              Format of AdamW's moments, as `train.moments` of a recipe

              Possible values:
              - f32:  32-bit floating point
              - 8bit: Small floats of a byte

              [default: f32]

          --rounds <N>
              Rounds, beside one that warms up

              [default: 3]

          --json
              End stdout with one line of JSON instead of the table; docs/json.md explains the keys

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
    ");
}

#[test]
fn step() {
    assert_snapshot!(help(&["bench", "step", "--help"]), @"
    Measure a whole GRPO step: rollout, ring, replayed training, refit

    The parts are those of `r3 run`, without files and metrics: the worker's thread samples and scores,
    frames pass the ring, the trainer replays their routes, and the engine loads the weights.
    Completions have the length that is asked for, and the reward only tells them apart. The tokenizer
    lies beside the model, or beside CONFIG.

    The first step warms up. Its optimiser step ends the time from the start of the process, which
    includes loading.

    Usage: r3 bench step [OPTIONS]

    Options:
          --model <DIR>
              A Hugging Face directory, a checkpoint, or a run, whose newest checkpoint is taken

              [default: assets/tiny-moe]

          --config <CONFIG>
              A config.json, or a directory with one: its shape with random weights, as `r3 new-model`
              makes them

          --completions <N>
              Completions of a step, a multiple of the group size

              [default: 64]

          --group-size <N>
              Completions of one prompt

              [default: 8]

          --prompt <N>
              Tokens of each prompt

              [default: 32]

          --new <N>
              Tokens of each completion

              [default: 64]

          --dtype <DTYPE>
              Format of the engine's weights, keys and values

              Possible values:
              - f32:  32-bit floating point
              - bf16: Brain float, 8 significant bits

              [default: bf16]

          --train-dtype <TRAIN_DTYPE>
              Format of the trainer's products

              Possible values:
              - f32:  32-bit floating point
              - bf16: Brain float, 8 significant bits

              [default: f32]

          --micro-batch-tokens <N>
              Tokens of one forward and backward; by default a recipe's

          --recompute
              Compute activations again in the backward, which takes less memory and more time

          --moments <MOMENTS>
              Format of AdamW's moments, as `train.moments` of a recipe

              Possible values:
              - f32:  32-bit floating point
              - 8bit: Small floats of a byte

              [default: f32]

          --rounds <N>
              Rounds, beside one that warms up

              [default: 3]

          --json
              End stdout with one line of JSON instead of the table; docs/json.md explains the keys

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
    ");
}

#[test]
fn kernels() {
    assert_snapshot!(help(&["bench", "kernels", "--help"]), @r"
    Measure every kernel, as a share of what binds it on this machine

    First the machine itself: the GFLOP/s of its fastest large product in either format, and the GB/s at
    which all threads read memory. Then each op at shapes of decoding (1, 8 and 64 tokens) and of
    training (2048), with the time that its products take at least, or reading what it reads from where
    a working set of that size lies, whichever is longer, as a share of the time it took. What is
    neither, such as the exponentials of a softmax, is not counted, so ops made of those stay below 100
    %.

    Usage: r3 bench kernels [OPTIONS] [OP]

    Arguments:
      [OP]
              Only ops whose name contains this

    Options:
          --rounds <N>
              Rounds, beside one that warms up

              [default: 3]

          --json
              End stdout with one line of JSON instead of the table; docs/json.md explains the keys

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
    ");
}

#[test]
fn ring() {
    assert_snapshot!(help(&["bench", "ring", "--help"]), @r"
    Measure the ring: latency, and GB/s of rollouts beside a memcpy

    One thread writes the same rollout over and over, another reads it in place. Latency is half of a
    word's way there and back through two rings.

    Usage: r3 bench ring [OPTIONS]

    Options:
          --tokens <N>
              Tokens of the rollout, half of them sampled

              [default: 512]

          --layers <N>
              MoE layers

              [default: 48]

          --top-k <N>
              Experts that a token takes in each layer

              [default: 8]

          --experts <N>
              Experts of each layer

              [default: 128]

          --frames <N>
              Frames of a round

              [default: 2000]

          --rounds <N>
              Rounds, beside one that warms up

              [default: 3]

          --json
              End stdout with one line of JSON instead of the table; docs/json.md explains the keys

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
    ");
}

#[test]
fn routes() {
    assert_snapshot!(help(&["bench", "routes", "--help"]), @r"
    Measure what recording routes adds to a decode tick, or to a whole engine

    Without --model, a scheduler runs as many sequences as are asked for, one taking the place of
    another that ends, and records the routes of choices made beforehand. Counted is all that this adds
    to a tick: narrowing the ids of every layer and turning them into rows, writing these beside the
    keys and values with their stamps and validity, and what planning, ending ticks and freeing rollouts
    costs more than in a scheduler without routes, which is where traces are copied. Not counted is the
    router's own choosing. In the same ticks the same bytes are copied by two memcpys, and by a plain
    loop over requests, layers and experts. Every trace is compared with the choices it was made of.
    Figures are medians over the rounds, in microseconds a tick.

    With --model, two engines of the same weights serve the same requests in every round, one with
    routes and one without, tick by tick in turn and without a prefix cache: all sequences at once,
    their prompts computed in one tick. They must sample the same tokens with the same logprobs.
    Throughput counts sampled tokens over an engine's own time from submission until the last rollout
    was taken; the first token is there at the end of its first tick. There are two such pairs, made in
    either order, since where its memory lies is worth a percent or two to an engine.

    One round more warms up.

    Usage: r3 bench routes [OPTIONS]

    Options:
          --model <DIR>
              Measure engines of this model: a Hugging Face directory, a checkpoint, or a run, whose
              newest checkpoint is taken

          --sequences <N>
              Running sequences; 256 by default, 64 with --model

          --layers <N>
              MoE layers

              [default: 48]

          --top-k <N>
              Experts that a token takes in each layer

              [default: 8]

          --experts <N>
              Experts of each layer

              [default: 128]

          --tokens <N>
              Tokens that every sequence samples, and ticks of a round

              [default: 512]

          --prompt <N>
              With --model: tokens of each prompt

              [default: 64]

          --new <N>
              With --model: tokens that each sequence samples, at least 2

              [default: 128]

          --dtype <DTYPE>
              With --model: format of weights, keys and values

              Possible values:
              - f32:  32-bit floating point
              - bf16: Brain float, 8 significant bits

              [default: bf16]

          --rounds <N>
              Rounds

              [default: 9]

          --json
              End stdout with one line of JSON instead of the table; docs/json.md explains the keys

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
    ");
}
