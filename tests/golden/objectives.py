#!/usr/bin/env python3
"""Reference values of every objective, in float64, written from the papers and not from r3's code.

    python objectives.py      # rewrites objectives.safetensors

Three ragged batches of rollouts with prompts, masks, failed, equal and lone rewards and completions that were cut off; every
case is a recipe's `algorithm` and `objective`. Written for reading: one token at a time, no tensors. Gradients by the policy's
logprobs are complex-step derivatives (Squire and Trapp 1998), exact to rounding: a function is evaluated at x + ih, and Im f / h
is its derivative. What a paper detaches, sg(x), is the real part.

Needs: numpy, safetensors (written with numpy 2.3, safetensors 0.8). Tensors of batch b: per rollout `group`, `index`,
`prompt_tokens`, `n_sampled`, `reward` (NaN is a failed one), `cut_off`; per sampled token `mask`, `rollout`, `old`, `reference`
(float32: rollouts carry no more) and `policy`, `entropy` (float64). Per case and batch: `loss`, and `grad` of every token.
Sources: GRPO 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, GSPO 2507.18071, CISPO 2506.13585, RLOO 2402.14740, REINFORCE++
2501.03262, dual clip 1912.09729, decoupled PPO 2110.00641, TIS (fengyao.notion.site/off-policy-rl), IcePop 2510.18855, masks
of sequences (richardli.xyz/rl-collapse), OPSM and the unbiased KL 2512.02556, k1 to k3 (joschu.net/blog/kl-approx.html).
"""
import cmath
import json
import math
import os

import numpy as np
from safetensors.numpy import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
MAX_NEW_TOKENS = 12
STEP = 1e-100  # of the complex-step derivative: nothing is subtracted, so it may be as small as one likes
EPS = 1e-6     # added to every standard deviation that is divided by


def sg(x):
    return x.real


def smaller(a, b):
    return a if a.real <= b.real else b


def larger(a, b):
    return a if a.real >= b.real else b


def clamp(x, low, high):
    return smaller(larger(x, complex(low)), complex(high))


def std(values):
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))


# The algorithms: advantage, ratio, surrogate, mean.

def defaults(name, knobs):
    own = {"grpo": {"clip": 0.2, "std_normalise": True}, "dr_grpo": {"clip": 0.2},
           "dapo": {"clip_low": 0.2, "clip_high": 0.28}, "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
           "cispo": {"clip_low": 1.0, "clip_high": 4.0}, "rloo": {"clip": 0.2},
           "reinforce_plus_plus": {"clip": 0.2, "baseline": "none"}}[name] | knobs
    own.setdefault("clip_low", own.get("clip"))
    own.setdefault("clip_high", own.get("clip"))
    return own


AGGREGATION = {"grpo": "sequence_mean", "dr_grpo": "sequence_sum", "dapo": "token_mean", "gspo": "sequence_mean",
               "cispo": "token_mean", "rloo": "sequence_mean", "reinforce_plus_plus": "token_mean"}


def shaped_reward(rollout, overlong):
    """DAPO equation 13."""
    if overlong is None:
        return rollout["reward"]
    longest, cache, n = overlong["max_tokens"], overlong["cache_tokens"], sum(rollout["mask"])
    if n <= longest - cache:
        return rollout["reward"]
    part = 1.0 if n > longest else (n - (longest - cache)) / cache
    return rollout["reward"] - overlong.get("factor", 1.0) * part


def kl_estimate(name, x, ratio):
    """Of KL(policy || reference) at a token the policy sampled, from x = log policy - log reference."""
    x = clamp(x, -20.0, 20.0)
    k3 = cmath.exp(-x) - 1 + x
    estimate = {"k1": x, "k2": x * x / 2, "k3": k3, "unbiased": k3}[name]
    return clamp(estimate, -10.0, 10.0) * (ratio if name == "unbiased" else 1.0)


def advantages(batch, algorithm, knobs, objective):
    """Sets `advantage` (a list, by token) on the rollouts that are trained on; returns those, prompt by prompt.

    Equal rewards leave a group out, unless the loss has more than advantages: every paper's mean is over all completions.
    DAPO's dynamic sampling leaves them out whatever the loss, and judges before the punishment of equation 13.
    """
    kl = objective.get("kl")
    in_reward = kl if kl and kl.get("place", "loss") == "reward" else None
    global_baseline = algorithm == "reinforce_plus_plus" and knobs["baseline"] == "none"
    dynamic = "dynamic_sampling" in objective
    keeps_equal = not dynamic and (kl is not None or objective.get("entropy_coef", 0.0) != 0.0)
    prompts = []
    for group in batch:
        valid = [r for r in group if not math.isnan(r["reward"])]
        equal = len({r["reward"] if dynamic else shaped_reward(r, objective.get("overlong")) for r in valid}) == 1
        if not global_baseline and (len(valid) < 2 or (equal and not keeps_equal)):
            continue
        totals = []
        for r in valid:
            r["kl"] = [m * kl_estimate(in_reward["estimator"], complex(q - f), None).real * in_reward["coef"]
                       if in_reward else 0.0 for q, f, m in zip(r["rollout"], r["reference"], r["mask"])]
            totals.append(shaped_reward(r, objective.get("overlong")) - (0.0 if global_baseline else sum(r["kl"])))
        mean = sum(totals) / len(totals)
        for i, (r, total) in enumerate(zip(valid, totals)):
            if algorithm == "reinforce_plus_plus":
                value = total if global_baseline else total - mean
            elif algorithm == "rloo":
                others = totals[:i] + totals[i + 1:]
                value = total - sum(others) / len(others)
            elif algorithm == "dr_grpo" or (algorithm == "grpo" and not knobs["std_normalise"]):
                value = total - mean
            else:
                value = (total - mean) / (std(totals) + EPS)
            r["advantage"] = [value] * len(r["mask"])
            if global_baseline:  # the reward less what the KL still costs from here on
                r["advantage"] = [value - sum(r["kl"][t:]) for t in range(len(r["mask"]))]
        trained = [r for r in valid if sum(r["mask"]) and not (objective.get("truncated") == "mask" and r["cut_off"])]
        if trained:
            prompts.append(trained)
    if algorithm == "reinforce_plus_plus":
        tokens = [a for p in prompts for r in p for a, m in zip(r["advantage"], r["mask"]) if m]
        mean, spread = sum(tokens) / len(tokens), std(tokens)
        for r in (r for p in prompts for r in p):
            r["advantage"] = [(a - mean) / (spread + EPS) for a in r["advantage"]]
    return prompts


def log_ratios(r, policy, old, algorithm):
    deltas = [p - o for p, o in zip(policy, old)]
    trained = [d for d, m in zip(deltas, r["mask"]) if m]
    if algorithm == "gspo":    # equation 7
        return [sum(trained) / len(trained)] * len(deltas)
    if algorithm == "rloo":    # the completion is one action
        return [sum(trained)] * len(deltas)
    return deltas


def surrogate(log_ratio, log_policy, advantage, algorithm, knobs, dual_clip):
    ratio = cmath.exp(clamp(log_ratio, -20.0, 20.0))
    clipped = clamp(ratio, 1 - knobs["clip_low"], 1 + knobs["clip_high"])
    if algorithm == "cispo":
        return sg(clipped) * advantage * log_policy
    value = smaller(ratio * advantage, clipped * advantage)
    return larger(value, complex(dual_clip * advantage)) if dual_clip and advantage < 0 else value


def corrections(r, policy, objective):
    """Detached weight of each token: rho = trainer / rollout, of the old weights where there are such."""
    own = objective.get("correction", {})
    trainer = r["old"] if objective.get("old_logprobs") == "trainer" else [sg(p) for p in policy]
    deltas = [a - b for a, b in zip(trainer, r["rollout"])]
    trained = [d for d, m in zip(deltas, r["mask"]) if m]
    rho = lambda x: math.exp(max(-20.0, min(20.0, x)))
    product, geometric = rho(sum(trained)), rho(sum(trained) / len(trained))
    drift = -sum(sg(p) - q for p, q, m in zip(policy, r["rollout"], r["mask"]) if m) / len(trained)
    out = []
    for t, delta in enumerate(deltas):
        weight, keep = 1.0, True
        if kind := own.get("weight"):
            if "tis" in kind:
                weight = min(rho(delta), kind["tis"].get("cap", 2.0))
            elif "sequence_tis" in kind:
                weight = min(product, kind["sequence_tis"].get("cap", 5.0))
            else:
                band = {"low": 0.5, "high": 5.0} | kind["icepop"]
                weight = rho(delta) if band["low"] <= rho(delta) <= band["high"] else 0.0
        if band := own.get("sequence_mask"):
            keep &= band["low"] <= product <= band["high"]
        if band := own.get("geometric_mask"):
            keep &= band["low"] <= geometric <= band["high"]
        if veto := own.get("veto"):
            keep &= min(rho(d) for d in trained) >= veto["below"]
        if opsm := own.get("opsm"):
            keep &= not (r["advantage"][t] < 0 and drift > opsm["delta"])
        out.append(weight if keep else 0.0)
    return out


def loss(prompts, policies, recipe):
    """-J of one optimiser step over all of `prompts`."""
    (algorithm, knobs), = recipe["algorithm"].items()
    objective = recipe.get("objective", {})
    knobs = defaults(algorithm, knobs)
    aggregation = objective.get("aggregation", AGGREGATION[algorithm])
    horizon = objective.get("horizon", MAX_NEW_TOKENS)
    count = lambda rollouts: sum(sum(r["mask"]) for r in rollouts)
    everyone = [r for p in prompts for r in p]
    kl = objective.get("kl")
    kl = kl if kl and kl.get("place", "loss") == "loss" else None
    total = 0j
    for prompt in prompts:
        for r in prompt:
            policy = policies[r["id"]]
            old = r["old"] if objective.get("old_logprobs") == "trainer" else r["rollout"]
            ratios, weights = log_ratios(r, policy, old, algorithm), corrections(r, policy, objective)
            share = {"token_mean": 1 / count(everyone), "sequence_mean": 1 / (len(everyone) * sum(r["mask"])),
                     "sequence_sum": 1 / (len(everyone) * horizon),
                     "prompt_mean": 1 / (len(prompts) * count(prompt))}[aggregation]
            for t, kept in enumerate(r["mask"]):
                if not kept:
                    continue
                value = -weights[t] * surrogate(ratios[t], policy[t], r["advantage"][t], algorithm, knobs,
                                                objective.get("dual_clip"))
                if kl:
                    ratio = cmath.exp(clamp(policy[t] - old[t], -20.0, 20.0))
                    value += kl["coef"] * kl_estimate(kl.get("estimator", "k3"), policy[t] - r["reference"][t], ratio)
                value -= objective.get("entropy_coef", 0.0) * r["entropy"][t]
                total += share * value
    return total


# The batches and the cases.

def make_batch(seed, n_groups, group_size):
    rng = np.random.default_rng(seed)
    single = lambda values: [float(np.float32(v)) for v in values]
    batch, n = [], 0
    for group in range(n_groups):
        # One group of equal rewards, one with a failed reward, one with a single valid reward; the others as they come.
        rewards = rng.choice([0.0, 0.25, 1.0], group_size)
        rewards[:2] = [0.0, 1.0]
        if group == 1:
            rewards[:] = 1.0
        if group == 2:
            rewards[-1] = math.nan
        if group == 3:
            rewards[1:] = math.nan
        rollouts = []
        for index in range(group_size):
            length = int(rng.integers(1, MAX_NEW_TOKENS + 1))
            mask = [1] * length
            if length > 4 and index % 3 == 2:
                mask[1:3] = [0, 0]  # given between two turns
            policy = -rng.exponential(1.5, length) - 0.05
            # Most tokens hardly moved, some did a lot.
            moved = lambda scale: scale * rng.standard_normal(length) * rng.choice([0.02, 0.3, 1.5], length, p=[0.6, 0.3, 0.1])
            old = single(np.minimum(policy + moved(1.0), -1e-3))
            rollouts.append({
                "id": n, "group": 10 * group + 3, "index": index, "prompt_tokens": int(rng.integers(1, 4)), "mask": mask,
                "reward": float(np.float32(rewards[index])), "cut_off": length == MAX_NEW_TOKENS or index == 1,
                "policy": [float(p) for p in policy], "old": old, "entropy": [float(e) for e in rng.exponential(1.0, length)],
                "rollout": single(np.minimum(np.array(old) + moved(0.5), -1e-3)),
                "reference": single(np.minimum(policy + moved(2.0), -1e-3)),
            })
            n += 1
        batch.append(rollouts)
    return batch


def cases():
    algorithms = {"grpo": {}, "dr_grpo": {}, "dapo": {}, "gspo": {}, "cispo": {}, "rloo": {}, "reinforce_plus_plus": {}}
    out = {}

    def case(name, algorithm, knobs=None, **objective):
        out[name] = {"algorithm": {algorithm: knobs or {}}, "objective": objective}

    for name in algorithms:
        case(name, name)
        case(f"{name}, old of the trainer", name, old_logprobs="trainer")
        for aggregation in ("token_mean", "sequence_mean", "sequence_sum", "prompt_mean"):
            case(f"{name}, {aggregation}", name, aggregation=aggregation)
    case("grpo without std", "grpo", {"std_normalise": False, "clip": 0.1})
    case("reinforce_plus_plus with baseline", "reinforce_plus_plus", {"baseline": "group"})
    case("gspo, wide", "gspo", {"clip_low": 0.1, "clip_high": 0.2})
    case("cispo, bounded below", "cispo", {"clip_low": 0.3, "clip_high": 0.5})
    case("a horizon", "dr_grpo", horizon=5)
    for name in ("grpo", "dapo", "gspo", "rloo", "reinforce_plus_plus"):
        case(f"{name}, dual clip", name, dual_clip=1.3)
    case("overlong", "dapo", overlong={"max_tokens": 11, "cache_tokens": 6, "factor": 0.5})
    case("overlong, dynamic sampling", "dapo", overlong={"max_tokens": 11, "cache_tokens": 6, "factor": 0.5}, dynamic_sampling={})
    case("overlong of gspo", "gspo", overlong={"max_tokens": 8, "cache_tokens": 4})
    case("truncated", "dapo", truncated="mask")
    case("truncated, prompt_mean", "grpo", truncated="mask", aggregation="prompt_mean")
    trainer = {"old_logprobs": "trainer"}
    for name in ("dapo", "gspo", "cispo", "rloo"):
        for kind in ({"tis": {}}, {"tis": {"cap": 1.2}}, {"sequence_tis": {"cap": 1.5}}, {"icepop": {"low": 0.8, "high": 1.5}}):
            (word, own), = kind.items()
            case(f"{name}, {word} {own}", name, correction={"weight": kind}, **trainer)
    masks = {"sequence_mask": {"low": 0.5, "high": 2.0}, "geometric_mask": {"low": 0.95, "high": 1.1},
             "opsm": {"delta": 0.05}, "veto": {"below": 0.3}}
    for word, own in masks.items():
        case(f"dapo, {word}", "dapo", correction={word: own})
        case(f"grpo, {word}, old of the trainer", "grpo", correction={word: own}, **trainer)
    every = {"weight": {"tis": {"cap": 1.5}}, "geometric_mask": {"low": 0.8, "high": 1.3}, "opsm": {"delta": 0.1}, "veto": {"below": 0.05}}
    case("several corrections", "dapo", correction=every, dual_clip=3.0, **trainer)
    for estimator in ("k1", "k2", "k3", "unbiased"):
        case(f"dapo, {estimator}", "dapo", kl={"coef": 0.3, "estimator": estimator})
    case("grpo, k3", "grpo", kl={"coef": 0.04})
    case("gspo, unbiased, old of the trainer", "gspo", kl={"coef": 0.1, "estimator": "unbiased"}, **trainer)
    case("reinforce_plus_plus with baseline, k2", "reinforce_plus_plus", {"baseline": "group"}, kl={"coef": 0.1, "estimator": "k2"})
    for name in algorithms:
        case(f"{name}, k1 in the reward", name, kl={"coef": 0.05, "estimator": "k1", "place": "reward"})
    case("dapo, k3 in the reward", "dapo", kl={"coef": 0.1, "estimator": "k3", "place": "reward"})
    case("reinforce_plus_plus with baseline, k2 in the reward", "reinforce_plus_plus", {"baseline": "group"},
         kl={"coef": 0.1, "estimator": "k2", "place": "reward"})
    case("entropy", "dapo", entropy_coef=0.05)
    case("entropy, prompt_mean", "grpo", entropy_coef=0.05, aggregation="prompt_mean")
    case("entropy and k3, dynamic sampling", "dapo", entropy_coef=0.05, kl={"coef": 0.1}, dynamic_sampling={})
    case("everything", "gspo", {"clip_low": 0.05, "clip_high": 0.1}, entropy_coef=0.01, kl={"coef": 0.02}, correction=every,
         aggregation="prompt_mean", **trainer)
    return out


def columns(batches):
    """Tensors of the batches."""
    tensors = {}
    for b, batch in enumerate(batches):
        rollouts = [r for group in batch for r in group]
        for key, dtype in (("group", np.int32), ("index", np.int32), ("prompt_tokens", np.int32), ("reward", np.float32),
                           ("cut_off", np.uint8)):
            tensors[f"{b}.{key}"] = np.array([r[key] for r in rollouts], dtype)
        tensors[f"{b}.n_sampled"] = np.array([len(r["mask"]) for r in rollouts], np.int32)
        for key, dtype in (("mask", np.uint8), ("rollout", np.float32), ("old", np.float32), ("reference", np.float32),
                           ("policy", np.float64), ("entropy", np.float64)):
            tensors[f"{b}.{key}"] = np.array([x for r in rollouts for x in r[key]], dtype)
    return tensors


def described(names):
    """Metadata of a file: the recipe of each case. One entry, or their order would change the file."""
    return {"recipes": json.dumps({"max_new_tokens": MAX_NEW_TOKENS, "cases": names})}


def main():
    batches = [make_batch(1, 5, 4), make_batch(2, 4, 3), make_batch(3, 6, 5)]
    tensors = columns(batches)
    every = cases()
    for at, (name, recipe) in enumerate(every.items()):
        (algorithm, knobs), = recipe["algorithm"].items()
        for b, batch in enumerate(batches):
            prompts = advantages(batch, algorithm, defaults(algorithm, knobs), recipe["objective"])
            policies = [[complex(p) for p in r["policy"]] for group in batch for r in group]
            gradient = []
            trained = {r["id"] for p in prompts for r in p}
            for r, policy in enumerate(policies):
                for t in range(len(policy)):
                    if r not in trained:
                        gradient.append(0.0)
                        continue
                    policy[t] += 1j * STEP
                    gradient.append(loss(prompts, policies, recipe).imag / STEP)
                    policy[t] = complex(policy[t].real)
            tensors[f"{at}.{b}.loss"] = np.array([loss(prompts, policies, recipe).real])
            tensors[f"{at}.{b}.grad"] = np.array(gradient)
    names = [{"name": name, **recipe} for name, recipe in every.items()]
    save_file(tensors, f"{HERE}/objectives.safetensors", metadata=described(names))
    print(f"{len(every)} cases on {len(batches)} batches")


if __name__ == "__main__":
    main()
