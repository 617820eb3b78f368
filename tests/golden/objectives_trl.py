#!/usr/bin/env python3
"""What TRL makes of the same tensors, in float64: values of `GRPOTrainer._compute_loss` itself.

    python objectives_trl.py  # rewrites objectives_trl.safetensors

Laid out as objectives.safetensors is, and made from its batches (see objectives.py). TRL is given the completions that we train on,
padded, with our advantages: with a KL those of equal rewards are among them, and both trainers count them in their means. Without
one they have no gradient, TRL counts them all the same, and we leave them out beforehand. The reference policy is near here: TRL does not clamp its KL. TRL divides an entropy bonus by all tokens
whatever the loss does, and adds 1e-4 to a standard deviation, so neither is compared. TRL's two-sided clip `delta` is the
dual clip; its CISPO clamps at `epsilon_high` and not at 1 more.

Needs: torch, trl, numpy, safetensors (written with torch 2.15, trl 1.16).
"""
import json
import types

import numpy as np
import torch
from safetensors.numpy import save_file
from trl import GRPOTrainer

import objectives

TRL = {
    "grpo": dict(loss_type="grpo", epsilon_low=0.2, epsilon_high=0.2),
    "dr_grpo": dict(loss_type="dr_grpo", epsilon_low=0.2, epsilon_high=0.2),
    "dapo": dict(loss_type="dapo", epsilon_low=0.2, epsilon_high=0.28),
    "gspo": dict(loss_type="grpo", epsilon_low=3e-4, epsilon_high=4e-4, importance_sampling_level="sequence"),
    "cispo": dict(loss_type="cispo", epsilon_low=None, epsilon_high=5.0),
}


def cases():
    """Recipes, and what TRL is told beside the algorithm."""
    for name in TRL:
        yield name, name, {}, {}
        yield f"{name}, old of the trainer", name, {"old_logprobs": "trainer"}, {}
    yield "dapo, dual clip", "dapo", {"dual_clip": 1.4}, {"delta": 1.4}
    yield "grpo, k3", "grpo", {"kl": {"coef": 0.1}}, {"beta": 0.1}
    yield "dapo, unbiased", "dapo", {"kl": {"coef": 0.1, "estimator": "unbiased"}}, {"beta": 0.1, "use_bias_correction_kl": True}
    yield "dapo, opsm", "dapo", {"correction": {"opsm": {"delta": 0.05}}}, {"off_policy_mask_threshold": 0.05}
    tis = {"old_logprobs": "trainer", "correction": {"weight": {"tis": {"cap": 1.5}}}}
    yield "grpo, tis", "grpo", tis, {"vllm_importance_sampling_correction": True}
    yield "cispo, tis", "cispo", tis, {"vllm_importance_sampling_correction": True}


def trainer(algorithm, told):
    """As much of a GRPOTrainer as its loss looks at."""
    own = dict(loss_type=None, importance_sampling_level="token", beta=0.0, delta=None, use_bias_correction_kl=False,
               off_policy_mask_threshold=None, vllm_importance_sampling_correction=False) | TRL[algorithm] | told
    one = types.SimpleNamespace(**own)
    one.args = types.SimpleNamespace(delta=own["delta"], use_bias_correction_kl=own["use_bias_correction_kl"], steps_per_generation=1)
    one.use_vllm = own["vllm_importance_sampling_correction"]
    one.aux_loss_enabled = one._entropy_bonus_enabled = False
    one.top_entropy_quantile, one.max_completion_length, one.current_gradient_accumulation_steps = 1.0, objectives.MAX_NEW_TOKENS, 1
    one._metrics = {"train": {key: [] for key in ("kl", "entropy", "cispo_clip_ratio", "clip_ratio/low_mean", "clip_ratio/high_mean",
                                                  "clip_ratio/region_mean", "clip_ratio/low_min", "clip_ratio/high_max")}}
    one.accelerator = types.SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True)
    one.model = types.SimpleNamespace(training=True)
    one.get_off_policy_mask = GRPOTrainer.get_off_policy_mask
    return one


def padded(rows, fill=0.0):
    out = torch.full((len(rows), max(map(len, rows))), fill, dtype=torch.float64)
    for row, values in zip(out, rows):
        row[:len(values)] = torch.tensor(values, dtype=torch.float64)
    return out


def loss_and_gradient(prompts, algorithm, objective, told):
    rollouts = [r for prompt in prompts for r in prompt]
    column = lambda key: padded([r[key] for r in rollouts])
    policy, mask = column("policy").requires_grad_(), padded([r["mask"] for r in rollouts])
    old = column("old") if objective.get("old_logprobs") == "trainer" else column("rollout")
    one = trainer(algorithm, told)
    one._get_per_token_logps_and_entropies = lambda *_, **__: (policy, torch.zeros_like(policy), None)
    ids = torch.zeros(mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids, "completion_mask": mask,
        "advantages": padded([r["advantage"] for r in rollouts]), "old_per_token_logps": old,
        "sampling_per_token_logps": column("rollout"), "ref_per_token_logps": column("reference"),
        "importance_sampling_ratio": torch.clamp(torch.exp(column("old") - column("rollout")), max=1.5),
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(one, one.model, inputs)
    loss.backward()
    return loss.item(), {r["id"]: policy.grad[i, :len(r["mask"])].tolist() for i, r in enumerate(rollouts)}


def main():
    batches = [objectives.make_batch(seed, 5, 4) for seed in (11, 12)]
    for r in (r for batch in batches for group in batch for r in group):
        near = np.array(r["policy"]) + np.clip(np.array(r["reference"]) - np.array(r["policy"]), -1.0, 1.0)
        r["reference"] = [float(x) for x in near.astype(np.float32)]
    tensors, names = objectives.columns(batches), []
    for at, (name, algorithm, objective, told) in enumerate(cases()):
        names.append({"name": name, "algorithm": {algorithm: {}}, "objective": objective})
        for b, batch in enumerate(batches):
            prompts = objectives.advantages(batch, algorithm, objectives.defaults(algorithm, {}), objective)
            loss, gradient = loss_and_gradient(prompts, algorithm, objective, told)
            tensors[f"{at}.{b}.loss"] = np.array([loss])
            rollouts = [r for group in batch for r in group]
            tensors[f"{at}.{b}.grad"] = np.array([g for r in rollouts for g in gradient.get(r["id"], [0.0] * len(r["mask"]))])
    save_file(tensors, f"{objectives.HERE}/objectives_trl.safetensors", metadata=objectives.described(names))
    print(f"{len(names)} cases on {len(batches)} batches")


if __name__ == "__main__":
    main()
