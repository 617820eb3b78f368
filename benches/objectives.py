#!/usr/bin/env python3
"""Trains recipes/tiny.yaml under each objective, with replay on and off, and prints a table in Markdown.

    benches/objectives.py --r3 target/release/r3 [--seeds 5] [--steps 30] [--out runs/objectives] [algorithm ...]

Held-out accuracy before and after, mean and sample standard deviation over seeds, and the mean k3 KL between rollout and trainer.
The seed orders prompts and samples; the start is the same model. Runs whose summary is there are not repeated.
"""
import argparse
import json
import pathlib
import statistics
import subprocess

ALGORITHMS = {
    "GRPO": "grpo: {}",
    "Dr. GRPO": "dr_grpo: {}",
    "DAPO": "dapo: {dynamic_sampling: {max_batches: 1}}",
    "GSPO": "gspo: {}",
    "CISPO": "cispo: {}",
    "RLOO": "rloo: {}",
    "REINFORCE++": "reinforce_plus_plus: {}",
    "REINFORCE++ with baseline": "reinforce_plus_plus: {baseline: group}",
}


def run(options, algorithm, mode, seed):
    """Summary of one run, the object that `r3 run --json` ends with."""
    name = f"{algorithm}-{mode}-{seed}".replace(" ", "-").lower()
    out = options.out / name
    summary = out.with_suffix(".json")
    if not summary.exists():
        overrides = [f"algorithm={{{ALGORITHMS[algorithm]}}}", f"router_replay.mode={mode}", f"run.seed={seed}", f"run.out={out}",
                     f"run.steps={options.steps}", "run.save_every=0", "metrics.listen=null"]
        command = [options.r3, "run", options.recipe, "--overwrite", "--json"] + [x for o in overrides for x in ("--set", o)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        out.mkdir(parents=True, exist_ok=True)
        summary.write_text(done.stdout.splitlines()[-1])
    return json.loads(summary.read_text())


def spread(values):
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):.1f} ± {100 * deviation:.1f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--r3", default="target/release/r3")
    parser.add_argument("--recipe", default="recipes/tiny.yaml")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/objectives"))
    parser.add_argument("algorithms", nargs="*", default=["GRPO", "DAPO", "GSPO", "CISPO"])
    options = parser.parse_args()
    print("| objective | replay | before, % | after, % | mean k3, nats |\n| --- | --- | --- | --- | --- |")
    for algorithm in options.algorithms:
        for mode in ("r3", "off"):
            runs = [run(options, algorithm, mode, seed) for seed in range(1, options.seeds + 1)]
            before, after = ([one[key] for one in runs] for key in ("eval_before", "eval_after"))
            k3 = statistics.mean(one["rollout_train_k3_kl"] for one in runs)
            print(f"| {algorithm} | {'on' if mode == 'r3' else 'off'} | {spread(before)} | {spread(after)} | {k3:.2e} |", flush=True)


if __name__ == "__main__":
    main()
