"""The tokenizer: byte-level BPE of 1,024 tokens over pieces that keep names and numbers copyable.

special tokens      <|endoftext|> <|im_start|> <|im_end|>
single tokens       ToolRL's tags, and the fixed pieces of its prompt (they survive skip_special_tokens=True)
spare tokens        special and unused, up to the round number
pieces for BPE      a word with a space or underscore before it, half a four-letter name, one digit,
                    anything else between them
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.mini.reading import Row, gold
from verl.data.rlla import CALL_THOUGHT, RESPONSE_THOUGHT

VOCABULARY = 1024
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = tuple(f"<{slash}{name}>" for name in ("think", "tool_call", "response", "obs", "user") for slash in ("", "/"))
FRAMES = (
    "**Available Tools**\nIn your response, you can use the following tools:\n1. Name: ",
    *(f"\n{number}. Name: " for number in (2, 3, 4)),
    "\nDescription: ",
    ".\nParameters: {",
    '": {"description": "',
    *(f'", "type": "{kind}", "default": ""}}' for kind in ("str", "int", "float", "bool")),
    "**Dialogue Records History**\n",
    '{"name": "',
    '", "parameters": {',
    '", "results": "',
    CALL_THOUGHT,
    RESPONSE_THOUGHT,
)
PIECES = "|".join(
    (
        r"[A-Z][a-z](?=[a-z]{2}(?![a-z]))",  # the first half of a word such as Kalo
        r"[A-Z][a-z]*",
        r"[ _]?[a-z]+",
        r":[0-9]{2}",
        r" ?[0-9]",  # the first digit of a number has the space, so its order shows
        r"[^A-Za-z0-9]+?(?=[ _]?[a-z0-9])|[^A-Za-z0-9]+",  # whatever stands between
    )
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train on `texts`; the result encodes any UTF-8 text and decodes it to itself."""
    whole = (*TAGS, *FRAMES)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(whole),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    between = re.compile("|".join(map(re.escape, sorted((*SPECIAL, *whole), key=len, reverse=True))))
    tokenizer.train_from_iterator((piece for text in texts for piece in between.split(text)), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in whole])
    spare = (f"<|spare_{number}|>" for number in range(VOCABULARY - tokenizer.get_vocab_size()))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in spare])
    return tokenizer


def chat_text(row: Row, with_reply: bool = True) -> str:
    """The row as CHAT_TEMPLATE renders it, up to the reply or to its end."""
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in row["prompt"])
    reply = f"{gold(row)}<|im_end|>\n" if with_reply else ""
    return f"{turns}<|im_start|>assistant\n{reply}"


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, which transformers.AutoTokenizer loads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
