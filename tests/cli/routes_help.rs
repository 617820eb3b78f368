//! Help texts of `r3 routes`.

use insta::assert_snapshot;

use crate::help::help;

#[test]
fn the_commands() {
    assert_snapshot!(help(&["routes", "-h"]), @r"
    Show, compare and convert files of expert routes, r3's own and other engines'

    Usage: r3 routes [OPTIONS] <COMMAND>

    Commands:
      show     Show what a file of routes holds: samples, rows, and how the experts are loaded
      diff     Compare the routes of two files, sample by sample
      convert  Convert routes from one layout to another; back again, they are the same bytes
      help     Print this message or the help of the given subcommand(s)

    Options:
      -v, --verbose...   Log more to stderr; -vv and -vvv still more
      -q, --quiet        Log errors only, no warnings
          --threads <N>  CPU threads to compute on; the cores this process may use by default
      -h, --help         Print help (see more with '--help')
      -V, --version      Print version
    ");
}

#[test]
fn show() {
    assert_snapshot!(help(&["routes", "show", "-h"]), @r"
    Show what a file of routes holds: samples, rows, and how the experts are loaded

    Usage: r3 routes show [OPTIONS] <FILE>

    Arguments:
      <FILE>  A file of routes; - is stdin

    Options:
          --from <LAYOUT>      Layout of the input; found by content where it can be no other [possible
                               values: r3, vllm, atom, sglang, nemo-rl, prime-rl, lists]
          --model <DIR>        Model that sampled: a Hugging Face directory, a checkpoint, or a run;
                               r3's own files need none
          --layers <N>         In place of --model: its decoder layers, dense ones included
          --moe-layers <LIST>  In place of --model: its MoE layers, as in 1-26 or 0,2,4
          --experts <N>        In place of --model: experts of a MoE layer
          --top-k <N>          In place of --model: experts a token takes
          --start <N>          Position of the first row, where the input does not say [default: 0]
          --weight-epoch <N>   Refuse routes that say they are of another weight epoch
          --sample <N>         This sample only, from 0
          --turn <N>           Rows that this turn computed, from 0
          --rows <A..B>        Rows of these positions, the last one left out
          --layer <ID>         This MoE layer only, by the model's own number
          --json               End stdout with one line of JSON
      -v, --verbose...         Log more to stderr; -vv and -vvv still more
      -q, --quiet              Log errors only, no warnings
          --threads <N>        CPU threads to compute on; the cores this process may use by default
      -h, --help               Print help (see more with '--help')
      -V, --version            Print version
    ");
}

#[test]
fn diff() {
    assert_snapshot!(help(&["routes", "diff", "-h"]), @r"
    Compare the routes of two files, sample by sample

    Usage: r3 routes diff [OPTIONS] <A> <B>

    Arguments:
      <A>  A file of routes; - is stdin
      <B>  Another, of the same samples in the same order

    Options:
          --from <LAYOUT>      Layout of the input; found by content where it can be no other [possible
                               values: r3, vllm, atom, sglang, nemo-rl, prime-rl, lists]
          --model <DIR>        Model that sampled: a Hugging Face directory, a checkpoint, or a run;
                               r3's own files need none
          --layers <N>         In place of --model: its decoder layers, dense ones included
          --moe-layers <LIST>  In place of --model: its MoE layers, as in 1-26 or 0,2,4
          --experts <N>        In place of --model: experts of a MoE layer
          --top-k <N>          In place of --model: experts a token takes
          --start <N>          Position of the first row, where the input does not say [default: 0]
          --weight-epoch <N>   Refuse routes that say they are of another weight epoch
          --json               End stdout with one line of JSON
      -v, --verbose...         Log more to stderr; -vv and -vvv still more
      -q, --quiet              Log errors only, no warnings
          --threads <N>        CPU threads to compute on; the cores this process may use by default
      -h, --help               Print help (see more with '--help')
      -V, --version            Print version
    ");
}

#[test]
fn convert() {
    assert_snapshot!(help(&["routes", "convert", "--help"]), @r#"
    Convert routes from one layout to another; back again, they are the same bytes

    Tokens go along, in the keys that the layout has for them; logprobs, versions and rewards stay in
    r3's own files, which alone have a place for them. Layouts other than r3's have all layers of the
    model: say which it is with --model, or, if IN is r3's own, how many layers it has with --layers.

    Usage: r3 routes convert [OPTIONS] <IN> <OUT>

    Arguments:
      <IN>
              A file of routes; - is stdin

      <OUT>
              File to write, - for stdout; .npy is one array, anything else JSON lines

    Options:
          --from <LAYOUT>
              Layout of the input; found by content where it can be no other

              Possible values:
              - r3:       JSON lines of `r3 rollout`
              - vllm:     .npy, or in base64 in a server's answers; dense layers 0
              - atom:     As vllm, dense layers -1
              - sglang:   int32 in base64, in `meta_info`
              - nemo-rl:  `nrlre1:` envelopes
              - prime-rl: Objects of data, shape, start and dtype
              - lists:    Nested lists, as `r3 score` prints them; read only

          --model <DIR>
              Model that sampled: a Hugging Face directory, a checkpoint, or a run; r3's own files need
              none

          --layers <N>
              In place of --model: its decoder layers, dense ones included

          --moe-layers <LIST>
              In place of --model: its MoE layers, as in 1-26 or 0,2,4

          --experts <N>
              In place of --model: experts of a MoE layer

          --top-k <N>
              In place of --model: experts a token takes

          --start <N>
              Position of the first row, where the input does not say

              [default: 0]

          --weight-epoch <N>
              Refuse routes that say they are of another weight epoch

          --to <LAYOUT>
              Layout of OUT; vllm if it ends in .npy, else r3 for any input but r3's own

              Possible values:
              - r3:       JSON lines, as `r3 rollout` writes them
              - vllm:     .npy, or in base64 in a server's answer; dense layers 0
              - atom:     As vllm, dense layers -1
              - sglang:   int32 in base64, in `meta_info`
              - nemo-rl:  `nrlre1:` envelopes
              - prime-rl: Objects of data, shape, start and dtype

          --sample <N>
              This sample only, from 0

          --tokens <FILE>
              JSON lines with the "tokens" and "prompt_tokens" of every sample, for input that lacks
              them

          --dtype <DTYPE>
              Element type of vLLM's and ATOM's array

              [default: int16]
              [possible values: int8, uint8, int16, uint16, int32]

          --overwrite
              Replace OUT if it is there

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
