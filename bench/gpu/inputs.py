"""Models of Qwen2.5's shapes with random weights, and wall times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from bench.gpu.place import ROOT, Place
from bench.shapes import QWEN2_5, qwen2

SIZE = "1.5B"
TINY = (128, 128, 2, 4, 2, 8192)  # more of a vocabulary than the tokenizer has, as the others


def shape(place: Place, layers: int | None = None) -> PretrainedConfig:
    """The configuration of the measured model. layers: all of them, or this many"""
    more = {"max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": 0}
    hidden, intermediate, own, *rest = TINY if place.rehearse else QWEN2_5[SIZE]
    config = qwen2(hidden, intermediate, layers or own, *rest, **more)
    config.architectures = ["Qwen2ForCausalLM"]
    return config


def model_folder(place: Place) -> Path:
    """That model with random bfloat16 weights and the embedded model's tokenizer; made once."""
    folder, unfinished = place.work / "model", place.work / "model.unfinished"
    if not folder.exists():
        torch.manual_seed(0)
        with torch.device(place.device):
            model = AutoModelForCausalLM.from_config(shape(place), dtype=torch.bfloat16)
        AutoTokenizer.from_pretrained(ROOT / "dataset/mini/tokenizer").save_pretrained(unfinished)
        model.save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder


def wait(place: Place) -> None:
    if place.device == "cuda":
        torch.cuda.synchronize()


def once(work: Callable[[], object], place: Place) -> float:
    """Wall time of `work` with the device idle before and after."""
    wait(place)
    started = time.perf_counter()
    work()
    wait(place)
    return time.perf_counter() - started


def seconds(work: Callable[[], object], place: Place, repeats: int = 5) -> float:
    """Median wall time, after one run that is not counted."""
    return statistics.median([once(work, place) for _ in range(repeats + 1)][1:])
