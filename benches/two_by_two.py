#!/usr/bin/env python3
"""Replay on and off by numerics exact and fast: what each does to the mismatch between rollout and trainer.

    python3 benches/two_by_two.py --r3 target/release/r3 --seeds 7 8 9 > table.md

Every row is `r3 compare recipes/tiny.yaml`, once for each seed: the same seed with replay on and off. Rows differ in the dtypes
of both sides, in numerics, and in the optimiser steps taken on one batch: 1 is on-policy. Cells are medians over seeds, with
the range where it is not a point; a cell of |delta| max is the largest of all.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

# Rollout dtype, train dtype, numerics. Unlike dtypes have no exact order.
SIDES = ["f32/f32/exact", "f32/f32/fast", "bf16/bf16/exact", "bf16/bf16/fast", "bf16/f32/fast"]
MINI_STEPS = [1, 8]

# Column, key in the summary, how to show it.
COLUMNS = [
    ("KL", "rollout_train_k3_kl", "{:.2e}"),
    ("mean abs", "rollout_train_logprobs_abs_diff_mean", "{:.2e}"),
    ("max abs", "abs_diff_max", "{:.2e}"),
    ("F(2)", "rollout_train_extreme_frac_tau2", "{:.1e}"),
    ("router", "router_discrepancy_token_layer_frac", "{:.4f}"),
    ("reward", "reward", "{:.3f}"),
    ("accuracy", "eval_after", "{:.3f}"),
    ("rollout tokens/s", "rollout_tokens_per_second", "{:.0f}"),
    ("train tokens/s", "train_tokens_per_second", "{:.0f}"),
]


def steps(run):
    """The records of a run's steps; the first line of the file is its header."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "reward/mean" in record]


def compare(args, seed, sides, mini_steps, out):
    """The numbers of both runs, by `on` and `off`."""
    rollout, train, numerics = sides.split("/")
    settings = {
        "rollout.dtype": rollout,
        "train.dtype": train,
        "numerics": numerics,
        "train.mini_steps": mini_steps,
        "run.seed": seed,
        "run.steps": args.steps,
        "run.out": out,
    }
    command = [args.r3, "compare", args.recipe, "--json", "--overwrite"]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    numbers = json.loads(done.stdout.splitlines()[-1])
    for mode, summary in numbers.items():
        records = steps(Path(out) / mode)
        summary["abs_diff_max"] = max(record["rollout_train_logprobs_abs_diff_max"] for record in records)
        summary["reward"] = statistics.mean(record["reward/mean"] for record in records[-5:])
    return numbers


def cell(form, values):
    """The median, and the range in brackets where values differ as shown."""
    shown = [form.format(value) for value in sorted(values)]
    middle = form.format(statistics.median(values))
    return middle if shown[0] == shown[-1] else f"{middle} ({shown[0]} to {shown[-1]})"


def row(sides, mini_steps, mode, summaries):
    """One line of the table."""
    cells = []
    for _, key, form in COLUMNS:
        values = [summary[key] for summary in summaries if summary.get(key) is not None]
        cells.append(cell(form, [max(values)] if key == "abs_diff_max" else values) if values else "")
    rollout, train, numerics = sides.split("/")
    return "| " + " | ".join([f"{rollout} / {train}", numerics, str(mini_steps), mode, *cells]) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--r3", default="target/release/r3")
    parser.add_argument("--recipe", default="recipes/tiny.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8, 9])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--mini-steps", type=int, nargs="+", default=MINI_STEPS)
    args = parser.parse_args()
    head = ["rollout / train", "numerics", "mini-steps", "replay", *(name for name, _, _ in COLUMNS)]
    print("| " + " | ".join(head) + " |")
    print("| " + " | ".join(["---"] * len(head)) + " |")
    with tempfile.TemporaryDirectory() as out:
        for mini_steps in args.mini_steps:
            for sides in args.sides:
                found = [compare(args, seed, sides, mini_steps, out) for seed in args.seeds]
                for mode in ("on", "off"):
                    print(row(sides, mini_steps, mode, [numbers[mode] for numbers in found]), flush=True)


if __name__ == "__main__":
    main()
