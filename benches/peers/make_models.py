"""Makes the three models the peers and r3 are compared on: random Qwen3-MoE weights of Hugging Face layout.

Their tokenizer has a token for each character, so that 32 characters are 32 tokens.
"""

import argparse
import string
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

# vocabulary, width, layers, heads, heads of keys and values, head, experts, of them chosen, width of an expert
SHAPES = {
    "nano": (64, 128, 4, 4, 2, 32, 8, 2, 128),  # 1.8 M parameters
    "tiny": (512, 256, 6, 8, 4, 32, 16, 4, 256),  # 20 M
    "small": (32000, 768, 12, 12, 4, 64, 32, 4, 384),  # 408 M
}
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]


def config(name):
    vocab, width, layers, heads, kv_heads, head, experts, top_k, expert_width = SHAPES[name]
    return transformers.Qwen3MoeConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        num_experts=experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=expert_width,
        norm_topk_prob=True,
        tie_word_embeddings=name == "nano",
        max_position_embeddings=4096,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )


def tokenizer(vocab):
    letters = list("\n " + string.ascii_lowercase + string.digits + "+-*/=().,:;?!'\"")
    letters += [letter for letter in string.printable[:94] if letter not in letters]
    tokens = (SPECIAL + letters)[:vocab]
    tokens += [f"<{i}>" for i in range(len(tokens), vocab)]
    model = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    model.decoder = decoders.Fuse()
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), SPECIAL))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, **names)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="the folder in which a folder for each model is made")
    parser.add_argument("--models", default="nano,tiny,small")
    args = parser.parse_args()

    for seed, name in enumerate(SHAPES):
        if name in args.models.split(","):
            torch.manual_seed(seed)
            model = transformers.Qwen3MoeForCausalLM(config(name)).float()
            out = Path(args.out, name)
            model.save_pretrained(out)
            tokenizer(SHAPES[name][0]).save_pretrained(out)
            print(f"{out}: {sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
