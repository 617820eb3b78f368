#!/usr/bin/env python3
"""Writes the text files of the tiny model: its character tokenizer and its configuration.

    python3 assets/make_tokenizer.py [DIRECTORY]        (default: assets/tiny-moe)

Standard library only. Running it again writes the same bytes. The configuration is spelled as transformers 5.24
writes Qwen3-MoE; the weights beside it come from `r3 sft`.
"""

import json
import pathlib
import string
import sys

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
CHARACTERS = string.digits + "+-*/=()%^" + " \n" + string.ascii_lowercase + ".,:;?!'\"<>[]_"
VOCABULARY = SPECIAL + list(CHARACTERS)
PAD, EOS, BOS = (SPECIAL.index(token) for token in ("<pad>", "<eos>", "<bos>"))
TRANSFORMERS = "5.24.0"


def tokenizer():
    """One token a character, in the format of the `tokenizers` library."""
    added = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, token in enumerate(SPECIAL)
    ]
    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing", "single": [first], "pair": [first, second], "special_tokens": {},
        },
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel", "vocab": {token: i for i, token in enumerate(VOCABULARY)}, "unk_token": "<unk>",
        },
    }


TOKENIZER_CONFIG = {
    "backend": "tokenizers",
    "bos_token": "<bos>",
    "clean_up_tokenization_spaces": False,
    "eos_token": "<eos>",
    "model_max_length": 4096,
    "pad_token": "<pad>",
    "padding_side": "left",
    "tokenizer_class": "TokenizersBackend",
    "unk_token": "<unk>",
}

GENERATION_CONFIG = {
    "_from_model_config": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "output_attentions": False,
    "output_hidden_states": False,
    "pad_token_id": PAD,
    "transformers_version": TRANSFORMERS,
    "use_cache": True,
}

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS,
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "eos_token_id": EOS,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "max_position_embeddings": 4096,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": PAD,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": TRANSFORMERS,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": len(VOCABULARY),
}


def main():
    """Writes the four files into the directory named on the command line."""
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 64
    here = pathlib.Path(__file__).parent
    directory = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "tiny-moe"
    directory.mkdir(parents=True, exist_ok=True)
    files = {
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": TOKENIZER_CONFIG,
        "generation_config.json": GENERATION_CONFIG,
        "config.json": CONFIG,
    }
    for name, content in files.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (directory / name).write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
