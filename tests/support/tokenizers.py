"""Small tokenizers of every kind, with a chat template: byte-level BPE, and three ways of SentencePiece's spaces."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

KINDS = ("bytes", "first", "always", "prepend")  # the last three put a space before a text, or before every part of it
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<search>", "</search>", "<answer>", "</answer>")
MARKS = ("<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]")
_TEXT = "The answer is yes and no in this text, so a function with name and arguments runs: Paris Rome 21 degrees"
_CHARS = [chr(code) for code in range(32, 127)]

_HEAD = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
_ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TEMPLATES = {
    "chatml": _HEAD + _ASK,
    "opened": _HEAD + _ASK.replace("assistant\n", "assistant\n<think>\n"),
    "line_below": _HEAD + _ASK.replace("assistant\n", "assistant"),
    "glm": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'assistant' and '</think>' not in m['content'] %}{{ '<think></think>\n' }}{% endif %}"
        "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}" + _ASK.replace("assistant\n", "assistant")
    ),
    "inst": (
        "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] + '</s>' }}"
        "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
    ),
    "empty_thought": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'assistant' and loop.last and '</think>' not in m['content'] %}"
        "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}" + _ASK
    ),
}


@cache
def _trained(kind: str) -> str:
    """As JSON, without added tokens."""
    if kind == "bytes":
        made = Tokenizer(BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>"))
        alphabet = [*_CHARS, "▁"]
        if kind == "prepend":  # as Llama 2 and Mistral in their first files
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            made.decoder = decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            )
        else:
            made.pre_tokenizer = pre_tokenizers.Metaspace("▁", kind, split=False)
            made.decoder = decoders.Sequence(
                [decoders.ByteFallback(), decoders.Metaspace("▁", kind, split=False), decoders.Fuse()]
            )
    bytes_ = [] if kind == "bytes" else ["<unk>", *(f"<0x{code:02X}>" for code in range(256))]
    trainer = BpeTrainer(vocab_size=600, special_tokens=bytes_, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([_TEXT] * 4, trainer)
    return str(made.to_str())


def small_tokenizer(
    kind: str, template: str, special: bool = False, eos: str = "<|im_end|>", tags: Iterable[str] = TAGS
) -> PreTrainedTokenizerFast:
    """special: whether the tags are special tokens; template: a name in TEMPLATES, or its text"""
    made = Tokenizer.from_str(_trained(kind))
    made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    made.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in tags])
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=eos, pad_token="<|endoftext|>")
    found.chat_template = TEMPLATES.get(template, template)
    return found
