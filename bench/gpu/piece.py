"""Shared by the pieces of the first hour: the device that they need, their inputs, and one JSON file for each."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import machine, versions
from transformers import PretrainedConfig, Qwen2Config

from verl.system.files import replacing

ROOT = Path(__file__).resolve().parents[2]
NO_CARD = 3  # exit code
PROMPT, RESPONSE, RESPONSES = 900, 250, 4  # tokens, and responses per prompt
SHAPES = {  # of Qwen2.5: hidden, intermediate, layers, heads, key heads, vocabulary
    "tiny": (128, 128, 2, 4, 2, 8192),  # more than the tokenizer has, as the others
    "0.5B": (896, 4864, 24, 14, 2, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
}


@dataclass(frozen=True)
class Piece:
    """One piece's run. rehearse: on a CPU with tiny sizes, which shows that it runs and measures nothing"""

    name: str
    rehearse: bool
    out: Path

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.rehearse else "cuda")

    def size(self, name: str) -> str:
        return "tiny" if self.rehearse else name

    def write(self, figures: Mapping[str, float | str]) -> None:
        """The result, which also marks the piece as done."""
        device = "cpu, a rehearsal" if self.rehearse else torch.cuda.get_device_name()
        facts = {"piece": self.name, "device": device, "machine": machine(), "versions": versions()}
        with replacing(self.out / f"{self.name}.json") as file:
            file.write_text(json.dumps({**facts, "figures": dict(figures)}, indent=1))
        for name, value in figures.items():
            print(f"{self.name}: {name}: {value if isinstance(value, str) else f'{value:.4g}'}", flush=True)


def start(doc: str, needs: str = "an NVIDIA GPU", **more: Mapping[str, Any]) -> tuple[Piece, argparse.Namespace]:
    """Read the arguments; without a GPU, say so and exit, unless it is a rehearsal. more: further arguments"""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU with tiny sizes")
    parser.add_argument("--name", required=True, help="of the result, OUT/NAME.json")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/first_hour")
    for name, options in more.items():
        parser.add_argument(f"--{name}", **options)
    arguments = parser.parse_args()
    piece = Piece(arguments.name, arguments.rehearse, arguments.out / ("rehearsal" if arguments.rehearse else "."))
    piece.out.mkdir(parents=True, exist_ok=True)
    if not piece.rehearse and not torch.cuda.is_available():
        print(f"{piece.name}: needs {needs}; torch {torch.__version__} sees none", file=sys.stderr)
        raise SystemExit(NO_CARD)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return piece, arguments


def shape(size: str) -> PretrainedConfig:
    hidden, intermediate, layers, heads, key_heads, vocabulary = SHAPES[size]
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
        bos_token_id=None,
        eos_token_id=0,
    )
    config.architectures = ["Qwen2ForCausalLM"]
    return config


def random_folder(piece: Piece, size: str) -> Path:
    """A model of that shape with random bfloat16 weights and the embedded model's tokenizer; made once and whole."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = piece.out / "-".join(["model", *map(str, SHAPES[size])])
    if not folder.exists():
        unfinished = folder.with_suffix(".unfinished")
        torch.manual_seed(0)
        with torch.device(piece.device):
            model = AutoModelForCausalLM.from_config(shape(size), dtype=torch.bfloat16)
        AutoTokenizer.from_pretrained(ROOT / "dataset/mini/tokenizer").save_pretrained(unfinished)
        model.save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Median wall time of `work` with the device idle before and after, after one run that is not counted."""
    found = []
    for number in range(repeats + 1):
        wait(device)
        started = time.perf_counter()
        work()
        wait(device)
        if number:
            found.append(time.perf_counter() - started)
    return statistics.median(found)
