#!/usr/bin/env python3
"""Reference values of the golden tests, computed in float32 by PyTorch and transformers.

    python make.py [MODEL ..] # rewrites reference.safetensors of these, or of all, and the model itself but for nano/

nano/    a Qwen3-MoE as transformers writes it: tied head, every layer sparse; norm weights moved off 1 so that a
         mixed-up norm shows. Its weights are kept as they are; only the reference is computed.
mixed/   what nano is not: a dense first layer, attention bias, untied head, gates not renormalised, bf16 shards.
grouped/ a dots1: sigmoid scores, a selection bias, two of four groups, a scaling factor, shared experts, a dense first
         layer; float32, and the spelling of transformers 5.

Needs: torch, transformers, safetensors (written with torch 2.15, transformers 5.24). Tensors of a reference:
input_ids [B, T]; logits [B, T, V]; logprobs [B, T-1] of the next token; loss, their negative mean; router_logits
[L, B, T, E]; topk_ids and topk_weights [L, B, T, K]; grad_norm.<name> and grad.<name>, by checkpoint name;
adamw1.<name> after one AdamW step (lr 1e-3, betas 0.9/0.999, eps 1e-8, weight decay 0.01, no clipping) and
adamw1_loss; greedy_from16 [B, T], the greedy continuation of the first 16 tokens. Those prefixed `replay_` have
the experts forced to replay_topk_ids (random distinct ids) with the live softmax, or sigmoid, gathered there.
"""
import json
import os
import sys

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from transformers.models.dots1.modeling_dots1 import Dots1TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

HERE = os.path.dirname(os.path.abspath(__file__))
BATCH, TOKENS, PROMPT = 4, 48, 16


def make_mixed(directory):
    """Writes a small directory with every feature that nano lacks."""
    torch.manual_seed(4)
    config = transformers.Qwen3MoeConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, intermediate_size=44, mlp_only_layers=[0],
        decoder_sparse_step=1, norm_topk_prob=False, attention_bias=True, tie_word_embeddings=False, rms_norm_eps=1e-5,
        max_position_embeddings=256, initializer_range=0.2, bos_token_id=2, eos_token_id=1, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size="40KB")
    # The spelling of transformers 4, which most published checkpoints use.
    path = os.path.join(directory, "config.json")
    raw = json.load(open(path))
    raw["rope_theta"] = raw.pop("rope_parameters")["rope_theta"]
    raw["num_experts"] = raw.pop("num_local_experts", config.num_experts)
    raw["torch_dtype"] = raw.pop("dtype", "bfloat16")
    json.dump(raw, open(path, "w"), indent=2)


def make_grouped(directory):
    """Writes a small dots1 with every feature of its router."""
    torch.manual_seed(5)
    config = transformers.Dots1Config(
        vocab_size=50, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
        n_routed_experts=12, n_shared_experts=2, num_experts_per_tok=3, moe_intermediate_size=12, intermediate_size=44,
        n_group=4, topk_group=2, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5,
        attention_bias=False, tie_word_embeddings=False, max_position_embeddings=256, initializer_range=0.2,
        bos_token_id=2, eos_token_id=1, pad_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    model = transformers.Dots1ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
    model.save_pretrained(directory)


ROUTERS = (Qwen3MoeTopKRouter, Dots1TopkRouter)


def watch_routers(model):
    """Makes every router record (logits, gates, ids) and take `forced` ids [L, T, K] instead of its own."""
    watch = {"forced": None, "seen": []}

    def watch_grouped(router, index):
        own = router.forward

        def forward(hidden):
            logits, gates, ids = own(hidden)
            scores = logits.sigmoid()
            if watch["forced"] is None:
                # transformers leaves them unsorted.
                order = (scores + router.e_score_correction_bias).gather(-1, ids).argsort(-1, descending=True)
                gates, ids = gates.gather(-1, order), ids.gather(-1, order)
            else:
                ids = watch["forced"][index]
                gates = scores.gather(-1, ids)
                gates = gates / (gates.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor
            watch["seen"].append((logits.detach(), gates.detach(), ids.detach()))
            return logits, gates, ids
        router.forward = forward

    for index, router in enumerate(m for m in model.modules() if isinstance(m, ROUTERS)):
        if isinstance(router, Dots1TopkRouter):
            watch_grouped(router, index)
            continue

        def forward(hidden, router=router, index=index):
            logits = F.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
            probabilities = F.softmax(logits, dtype=torch.float, dim=-1)
            if watch["forced"] is None:
                gates, ids = torch.topk(probabilities, router.top_k, dim=-1)
            else:
                ids = watch["forced"][index]
                gates = probabilities.gather(-1, ids)
            if router.norm_topk_prob:
                gates = gates / gates.sum(-1, keepdim=True)
            watch["seen"].append((logits.detach(), gates.detach(), ids.detach()))
            return logits, gates, ids
        router.forward = forward
    return watch


def per_expert(named):
    """Fused experts under their checkpoint names."""
    out = {}
    for name, value in named:
        if name.endswith(".experts.gate_up_proj"):
            gate, up = value.chunk(2, dim=1)
            for e in range(value.shape[0]):
                out[name.replace("gate_up_proj", f"{e}.gate_proj.weight")] = gate[e]
                out[name.replace("gate_up_proj", f"{e}.up_proj.weight")] = up[e]
        elif name.endswith(".experts.down_proj"):
            for e in range(value.shape[0]):
                out[name.replace("down_proj", f"{e}.down_proj.weight")] = value[e]
        else:
            out[name] = value
    return out


def reference(directory, whole):
    """Reference tensors of one model; `whole` names the gradients that are kept entire."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.train().set_experts_implementation("eager")
    config = model.config
    generator = torch.Generator().manual_seed(1234)
    ids = torch.randint(4, config.vocab_size, (BATCH, TOKENS), generator=generator)
    watch = watch_routers(model)
    n_layers = sum(isinstance(m, ROUTERS) for m in model.modules())
    n_experts = getattr(config, "n_routed_experts", None) or config.num_experts
    shuffled = [torch.rand(BATCH * TOKENS, n_experts, generator=generator).argsort(-1) for _ in range(n_layers)]
    forced = torch.stack([order[:, :config.num_experts_per_tok] for order in shuffled])
    out = {"input_ids": ids.int()}
    for prefix, choice in (("", None), ("replay_", forced)):
        watch.update(forced=choice, seen=[])
        model.zero_grad(set_to_none=True)
        logits = model(input_ids=ids, use_cache=False).logits
        logprobs = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
        loss = -logprobs.mean()
        loss.backward()
        out |= {f"{prefix}logits": logits, f"{prefix}logprobs": logprobs, f"{prefix}loss": loss.reshape(1)}
        for key, seen in zip(("router_logits", "topk_weights", "topk_ids"), zip(*watch["seen"])):
            out[prefix + key] = torch.stack(seen).view(n_layers, BATCH, TOKENS, -1)
        out[prefix + "topk_ids"] = out[prefix + "topk_ids"].int()
        gradients = per_expert((n, p.grad) for n, p in model.named_parameters())
        out |= {f"{prefix}grad_norm.{n}": g.norm().reshape(1) for n, g in gradients.items()}
        out |= {f"{prefix}grad.{n}": gradients[n].clone() for n in whole}
        if choice is None:
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01).step()
            after = per_expert((n, p.detach()) for n, p in model.named_parameters())
            out |= {f"adamw1.{n}": after[n].clone() for n in whole}
            with torch.no_grad():
                stepped = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
                out["adamw1_loss"] = F.cross_entropy(stepped, ids[:, 1:].flatten()).reshape(1)
                for n, p in model.named_parameters():
                    p.copy_(before[n])
    watch["forced"] = None
    model.eval().generation_config.eos_token_id = None
    out["greedy_from16"] = model.generate(
        input_ids=ids[:, :PROMPT], attention_mask=torch.ones(BATCH, PROMPT, dtype=torch.long),
        max_new_tokens=TOKENS - PROMPT, do_sample=False, pad_token_id=0).int()
    return {name: tensor.detach().contiguous() for name, tensor in out.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    made = {"torch": torch.__version__, "transformers": transformers.__version__, "dtype": "float32"}
    makers = {"nano": lambda _: None, "mixed": make_mixed, "grouped": make_grouped}
    for name in sys.argv[1:] or makers:
        makers[name](f"{HERE}/{name}")
        sparse = 1
        whole = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_norm.weight",
                 "model.layers.0.self_attn.k_norm.weight", f"model.layers.{sparse}.mlp.gate.weight",
                 f"model.layers.{sparse}.mlp.experts.3.gate_proj.weight", f"model.layers.{sparse}.mlp.experts.3.up_proj.weight",
                 f"model.layers.{sparse}.mlp.experts.3.down_proj.weight", "model.layers.3.input_layernorm.weight",
                 "model.layers.3.post_attention_layernorm.weight", "model.norm.weight"]
        tensors = reference(f"{HERE}/{name}", whole)
        save_file(tensors, f"{HERE}/{name}/reference.safetensors", metadata=made)
        print(f"{name}: loss {tensors['loss'].item():.6f}, replayed {tensors['replay_loss'].item():.6f}")
