"""One training step of PyTorch on a Hugging Face model: forward, mean cross-entropy, backward, fused AdamW."""

import argparse
import time

import torch
import transformers

import worker


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32", help="bf16: autocast over f32 weights")
    parser.add_argument("--experts", default="grouped_mm", help="transformers' implementation of the experts")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    answers = worker.answers()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).train()
    model.config.use_cache = False
    model.set_experts_implementation(args.experts)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    forward = torch.compile(model) if args.compile else model

    def measure(sequences, length):
        tokens = torch.randint(4, model.config.vocab_size, (sequences, length))
        marks = [time.perf_counter()]
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bf16"):
            logits = forward(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        marks.append(time.perf_counter())
        return {
            "tokens_per_second": sequences * length / (marks[3] - marks[0]),
            "forward_seconds": marks[1] - marks[0],
            "backward_seconds": marks[2] - marks[1],
            "optimiser_seconds": marks[3] - marks[2],
            "peak_memory_bytes": worker.peak_memory_bytes(),
        }

    worker.serve(measure, answers)


if __name__ == "__main__":
    main()
