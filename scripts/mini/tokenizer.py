"""The tokenizer: byte-level BPE of 1,024 tokens that keeps names and numbers copyable.

special tokens      <|endoftext|> <|im_start|> <|im_end|>
single tokens       ToolRL's tags, and the fixed pieces of its prompt (they survive skip_special_tokens=True)
spare tokens        special and unused, to fill up the vocabulary
merges              first all syllables of names, such as K+a and l+a, then trained merges within a word

Pre-tokenization is Qwen2's. This is required: next to a Qwen2 config.json, transformers applies Qwen2's
pre-tokenizer to our merges and ignores the one in tokenizer.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.mini.reading import Row, gold
from scripts.mini.values import SYLLABLES
from scripts.raw.rlla import CALL_THOUGHT, RESPONSE_THOUGHT

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
QWEN2_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Merges are trained within these, so that none joins a name to its context, or the two syllables of a name.
MERGE_UNITS = "|".join(
    (
        r"[A-Z][a-z](?=[a-z]{2}(?![a-z]))",  # the first half of a word such as Kala
        r"[A-Z][a-z]*",
        r"[ _]?[a-z]+",
    )
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(
    texts: Iterable[str], frames: tuple[str, ...] = FRAMES, units: str = MERGE_UNITS, size: int = VOCABULARY
) -> Tokenizer:
    """Train on `texts`; the result encodes any UTF-8 text and decodes it to itself. size: of the vocabulary"""
    whole = (*TAGS, *frames)
    between = re.compile("|".join(map(re.escape, sorted((*SPECIAL, *whole), key=len, reverse=True))))
    qwen2 = pre_tokenizers.Split(Regex(QWEN2_PIECES), behavior="isolated")
    merged = pre_tokenizers.Split(Regex(units), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cut = pre_tokenizers.Sequence([qwen2, merged, as_bytes])
    pieces = (piece for text in texts for part in between.split(text) for piece, _ in cut.pre_tokenize_str(part))
    tokens, merges = _train_merges(pieces, size - len(SPECIAL) - len(whole))
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *tokens))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([qwen2, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in whole])
    spare = (f"<|spare_{number}|>" for number in range(size - tokenizer.get_vocab_size()))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in spare])
    return tokenizer


def _train_merges(pieces: Iterable[str], size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """(tokens, merges): the bytes, the syllables, then BPE merges over syllables as symbols.

    For training, each syllable is replaced by one private-use character.
    """
    syllables = [written for each in SYLLABLES for written in (each, each.capitalize())]
    stands_for = {chr(0xE000 + number): written for number, written in enumerate(syllables)}
    symbol = {written: letter for letter, written in stands_for.items()}
    syllable = re.compile("|".join(symbol))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learner = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=[*alphabet, *stands_for], limit_alphabet=size, show_progress=False
    )
    learner.train_from_iterator((syllable.sub(lambda found: symbol[found[0]], piece) for piece in pieces), trainer)

    def spelled(token: str) -> str:
        return "".join(stands_for.get(letter, letter) for letter in token)

    learned = json.loads(learner.to_str())["model"]["merges"]
    merges = [*map(tuple, syllables), *((spelled(left), spelled(right)) for left, right in learned)]
    tokens = list(dict.fromkeys([*alphabet, *("".join(merge) for merge in merges)]))
    return tokens, list(dict.fromkeys(merges))


def chat_text(row: Row, with_response: bool = True) -> str:
    """The row rendered by CHAT_TEMPLATE, with or without the response."""
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in row["prompt"])
    response = f"{gold(row)}<|im_end|>\n" if with_response else ""
    return f"{turns}<|im_start|>assistant\n{response}"


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, for transformers.AutoTokenizer."""
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
