#!/usr/bin/env python3
"""Whether PEFT, on transformers, makes of a base model and r3's adapter the model that r3 trained.

    r3 run recipes/tiny-lora.yaml
    r3 export runs/tiny-lora runs/adapter --adapter
    r3 export runs/tiny-lora runs/merged --dtype f32
    python peft_adapter.py R3 BASE runs/adapter runs/merged

R3 is the binary. On 64 random sequences of 24 tokens, all in float32, prints the largest difference of

  logits     of base with adapter and of the merged model, both in transformers
  logprobs   of base with adapter in transformers and of the merged model in `r3 score`, engine and trainer side
  merge      of logits after PEFT's own merge_and_unload and of the merged model
  base       of base with and without adapter: how much there is to get wrong

and fails if one of the first three is above 1e-4, or the last is not far above them. Needs: torch, transformers, peft
(run with torch 2.15, transformers 5.24, peft 0.21).
"""
import json
import subprocess
import sys

import peft
import torch
import transformers

TOLERANCE = 1e-4


def load(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def adapted(base, adapter):
    model = peft.PeftModel.from_pretrained(load(base), adapter).eval()
    factors = [name for name, _ in model.named_parameters() if "lora_" in name]
    stored = peft.utils.load_peft_weights(adapter)
    assert len(factors) == len(stored), f"{len(factors)} factors in the model, {len(stored)} in the file"
    return model


def scored(r3, directory, tokens, side):
    """Logprobs [B, T-1] of tokens 1 on, as r3 computes them."""
    lines = "".join(json.dumps({"tokens": row}) + "\n" for row in tokens.tolist())
    command = [r3, "score", directory, "--input", "-", "--side", side, "--dtype", "f32"]
    out = subprocess.run(command, input=lines, capture_output=True, text=True, check=True).stdout
    return torch.tensor([json.loads(line)["logprobs"] for line in out.splitlines()])


@torch.no_grad()
def main(r3, base, adapter, merged):
    torch.manual_seed(1)
    plain, ours, theirs = load(base), load(merged), adapted(base, adapter)
    tokens = torch.randint(3, plain.config.vocab_size, (64, 24))
    logits = theirs(tokens).logits
    logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    largest = {"logits": (logits - ours(tokens).logits).abs().max().item()}
    for side in ("engine", "trainer"):
        largest[f"logprobs, {side}"] = (logprobs - scored(r3, merged, tokens, side)).abs().max().item()
    largest["merge"] = (theirs.merge_and_unload()(tokens).logits - ours(tokens).logits).abs().max().item()
    effect = (logits - plain(tokens).logits).abs().max().item()
    for name, difference in [*largest.items(), ("base", effect)]:
        print(f"{name}: {difference:.2e}")
    assert max(largest.values()) <= TOLERANCE, "the adapter is not what r3 trained"
    assert effect > 100 * TOLERANCE, "the adapter does next to nothing, so this says nothing"


if __name__ == "__main__":
    main(*sys.argv[1:])
