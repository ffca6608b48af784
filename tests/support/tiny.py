"""A model that loads anywhere in no time, with the tokenizer of dataset/mini, and the overrides of a run on it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from tests.conftest import ROOT

MINI = ROOT / "dataset" / "mini"
LONG = 32_768  # tokens
LISTS_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tiny_model(folder: Path, seed: int = 0) -> Path:
    """An untrained Qwen2 of 150,000 parameters with the tokenizer of dataset/mini."""
    tokenizer = AutoTokenizer.from_pretrained(MINI / "tokenizer")
    torch.manual_seed(seed)
    save_untrained(folder, len(tokenizer), tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    tokenizer.save_pretrained(folder)
    return folder


def save_long_model(folder: Path, seed: int = 0) -> Path:
    """An untrained model for 32,768 tokens that ends its turn after about 16, with a chat template that lists tools."""
    tokenizer = AutoTokenizer.from_pretrained(MINI / "tokenizer", chat_template=LISTS_TOOLS, model_max_length=LONG)
    torch.manual_seed(seed)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model = _untrained(len(tokenizer), end, pad_token_id=pad, max_position_embeddings=LONG, tie_word_embeddings=False)
    with torch.no_grad():  # one constant feature, which the end of a turn follows
        model.get_input_embeddings().weight[:, 0] = 0.1
        model.lm_head.weight[end, 0] = 1.2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_untrained(folder: Path, vocabulary: int, eos: int, **more: Any) -> None:
    """A Qwen2 of two thin layers with a tied head, without a tokenizer. `more`: further values of its configuration"""
    _untrained(vocabulary, eos, **more).save_pretrained(folder)


def _untrained(vocabulary: int, eos: int, **more: Any) -> Qwen2ForCausalLM:
    values = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        **more,
    }
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=vocabulary, eos_token_id=eos, **values))


def first_rows(path: Path, count: int, folder: Path) -> Path:
    """A file of the same name with the first rows of one: validations of whole files take most of a short run."""
    pq.write_table(pq.read_table(path).slice(0, count), folder / path.name)
    return folder / path.name


def with_heads(model: Path, size: int, folder: Path) -> Path:
    """That model's configuration and tokenizer, with heads of another size; plans read no weights."""
    for each in model.iterdir():
        if each.suffix != ".safetensors":
            shutil.copy(each, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "head_dim": size}))
    return folder


def run_overrides(model: Path, out: Path, engine: str, steps: int) -> list[str]:
    """Overrides for main_ppo: a few prompts, short responses, nothing but what the test asks for."""
    return [
        f"model.path={model}",
        "model.compute_dtype=float32",
        f"data.train_files=[{MINI / 'train.parquet'}]",
        "data.train_batch_size=4",
        "data.max_prompt_length=512",
        "data.max_response_length=16",
        "actor.ppo_mini_batch_size=2",
        "actor.optim.lr=1e-2",
        "algorithm.name=toolrl_grpo",
        "rollout.n=2",
        f"rollout.name={engine}",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={out}",
        "trainer.experiment_name=run",
        "trainer.device=cpu",
        "trainer.save_freq=0",
        "trainer.test_freq=0",
    ]
