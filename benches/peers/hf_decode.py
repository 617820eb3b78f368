"""Decoding with Hugging Face `generate`: sampled at temperature 1, nothing truncated, prefill included."""

import argparse
import time

import torch
import transformers

import worker


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--experts", default="grouped_mm", help="transformers' implementation of the experts")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    answers = worker.answers()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()
    model.set_experts_implementation(args.experts)
    model.generation_config.eos_token_id = None

    def measure(batch, prompt=32, new=128):
        tokens = torch.randint(4, model.config.vocab_size, (batch, prompt))
        start = time.perf_counter()
        with torch.inference_mode():
            sampled = model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                min_new_tokens=new,
                max_new_tokens=new,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - start
        assert sampled.shape == (batch, prompt + new)
        return {"tokens_per_second": batch * new / seconds, "peak_memory_bytes": worker.peak_memory_bytes()}

    worker.serve(measure, answers)


if __name__ == "__main__":
    main()
