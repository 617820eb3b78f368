//! Help texts of `r3 bench`.

use insta::assert_snapshot;

use crate::help::help;

#[test]
fn the_commands() {
    assert_snapshot!(help(&["bench", "--help"]), @r"
    Measure what capturing routes costs

    Usage: r3 bench [OPTIONS] <COMMAND>

    Commands:
      routes  Measure what recording routes adds to a decode tick, without a model
      engine  Measure an engine with routes captured and without, taking turns
      help    Print this message or the help of the given subcommand(s)

    Options:
      -v, --verbose...   Log more to stderr; -vv and -vvv still more
      -q, --quiet        Log errors only, no warnings
          --threads <N>  CPU threads to compute on; the cores this process may use by default
      -h, --help         Print help
      -V, --version      Print version
    ");
}

#[test]
fn routes() {
    assert_snapshot!(help(&["bench", "routes", "--help"]), @r"
    Measure what recording routes adds to a decode tick, without a model

    A scheduler runs as many sequences as are asked for, one taking the place of another that ends, and
    records the routes of choices made beforehand. Counted is all that this adds to a tick: narrowing
    the ids of every layer and turning them into rows, writing these beside the keys and values with
    their stamps and validity, and what planning, ending ticks and freeing rollouts costs more than in a
    scheduler without routes, which is where traces are copied. Not counted is the router's own
    choosing. In the same ticks the same bytes are copied by two memcpys, and by a plain loop over
    requests, layers and experts. Every trace is compared with the choices it was made of.

    Figures are medians over the rounds, in microseconds a tick; one round more warms up.

    Usage: r3 bench routes [OPTIONS]

    Options:
          --sequences <N>
              Running sequences

              [default: 256]

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

#[test]
fn engine() {
    assert_snapshot!(help(&["bench", "engine", "--help"]), @r"
    Measure an engine with routes captured and without, taking turns

    In every round two engines of the same weights serve the same requests, tick by tick in turn and
    without a prefix cache: all sequences at once, their prompts computed in one tick. They must sample
    the same tokens with the same logprobs. Throughput counts sampled tokens over an engine's own time
    from submission until the last rollout was taken; the first token is there at the end of its first
    tick. One round more warms up. There are two such pairs, made in either order, since where its
    memory lies is worth a percent or two to an engine.

    Usage: r3 bench engine [OPTIONS]

    Options:
          --model <DIR>
              A Hugging Face directory, a checkpoint, or a run, whose newest checkpoint is taken

              [default: assets/tiny-moe]

          --sequences <N>
              Sequences

              [default: 64]

          --prompt-tokens <N>
              Tokens of each prompt

              [default: 64]

          --new-tokens <N>
              Tokens that each sequence samples, at least 2

              [default: 128]

          --rounds <N>
              Rounds

              [default: 9]

          --dtype <DTYPE>
              Format of weights, keys and values

              Possible values:
              - f32:  32-bit floating point
              - bf16: Brain float, 8 significant bits

              [default: bf16]

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
