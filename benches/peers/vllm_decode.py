"""Decoding with vLLM's CPU build: sampled at temperature 1, nothing truncated, prefill included."""

import argparse
import json
import os
import random
import time
from pathlib import Path

import worker


def settings(threads):
    """What vLLM reads from the environment; it must stand there before vLLM is imported."""
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    answers = worker.answers()
    os.environ.update(settings(args.threads))
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=args.model,
        dtype={"f32": "float32", "bf16": "bfloat16"}[args.dtype],
        max_model_len=1024,
        max_num_seqs=64,
        enforce_eager=args.eager,
        enable_prefix_caching=False,
        seed=0,
    )
    vocab = json.loads(Path(args.model, "config.json").read_text())["vocab_size"]

    def measure(batch, prompt=32, new=128):
        prompts = [{"prompt_token_ids": random.choices(range(4, vocab), k=prompt)} for _ in range(batch)]
        sampling = SamplingParams(temperature=1.0, min_tokens=new, max_tokens=new, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        rollouts = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(rollout.outputs[0].token_ids) == new for rollout in rollouts)
        return {"tokens_per_second": batch * new / seconds}

    worker.serve(measure, answers)


if __name__ == "__main__":
    main()
