"""Writes a Qwen3-MoE model of Hugging Face layout as a GGUF file for llama.cpp, without a vocabulary.

llama.cpp's own converter insists on a tokenizer it knows; its batched bench needs none.
"""

import argparse
import json
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file

ARCH = gguf.MODEL_ARCH.QWEN3MOE


def header(writer, config):
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def stack_experts(tensors, n_layers):
    """One `[experts, out, in]` tensor for each projection of a layer, in place of one tensor an expert."""
    for layer in range(n_layers):
        stem = f"model.layers.{layer}.mlp.experts"
        n_experts = sum(name.startswith(f"{stem}.") and name.endswith(".up_proj.weight") for name in tensors)
        for projection in ("gate_proj", "up_proj", "down_proj"):
            experts = [tensors.pop(f"{stem}.{expert}.{projection}.weight") for expert in range(n_experts)]
            tensors[f"{stem}.{projection}.weight"] = torch.stack(experts)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()

    config = json.loads(Path(args.model, "config.json").read_text())
    tensors = {}
    for shard in sorted(Path(args.model).glob("*.safetensors")):
        tensors.update(load_file(shard))
    stack_experts(tensors, config["num_hidden_layers"])

    writer = gguf.GGUFWriter(args.out, gguf.MODEL_ARCH_NAMES[ARCH])
    header(writer, config)
    names = gguf.get_tensor_name_map(ARCH, config["num_hidden_layers"])
    for name, tensor in tensors.items():
        # llama.cpp keeps vectors and the router in f32 whatever the file's type.
        narrow = args.dtype == "bf16" and tensor.dim() > 1 and not name.endswith("mlp.gate.weight")
        kind = gguf.GGMLQuantizationType.BF16 if narrow else gguf.GGMLQuantizationType.F32
        array = gguf.quants.quantize(tensor.float().numpy(), kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
