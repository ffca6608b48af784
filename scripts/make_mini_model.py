"""The untrained embedded model: python scripts/make_mini_model.py --out FOLDER [--seed 0]

A Qwen2 of 1.8 million parameters with a tied head and the tokenizer of dataset/mini. scripts/make_mini_model.sh trains
it with the project's own SFT.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
_MULTIPLE = 8  # the vocabulary size is rounded up to this, for matrix kernels


def main() -> None:
    """Initialize and save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "dataset" / "mini" / "tokenizer")
    torch.manual_seed(args.seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=-(-len(tokenizer) // _MULTIPLE) * _MULTIPLE,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            initializer_range=0.06,  # larger than usual: few layers then learn to copy sooner
            rope_theta=10000.0,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{sum(each.numel() for each in model.parameters()):,} parameters in {args.out}")


if __name__ == "__main__":
    main()
