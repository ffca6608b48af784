"""A model as one GGUF file: weights under llama.cpp's names, the tokenizer and the chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PretrainedConfig, PreTrainedModel

from verl.errors import ConfigError
from verl.pretrained import read_causal_lm, read_model_config, read_tokenizer

FAMILIES = ("llama", "qwen2", "qwen3")  # model_type; the architectures of the same name in GGUF
_Q8_BLOCK = 32  # weights that share a scale
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {  # how a tokenizer splits text -> its name in llama.cpp
    rf"{_WORD}\p{{N}}{_REST}": "qwen2",
    rf"{_WORD}\p{{N}}{{1,3}}{_REST}": "llama-bpe",
}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # token types of GGUF


def write_gguf(model: Path, folder: Path, dtype: str) -> Path:
    """Write the model into `folder`. dtype: f16 or q8_0, of the matrices; vectors are float32.

    Raises ConfigError for other families, and for tokenizers and positions that the file would describe wrongly.
    """
    try:
        import gguf
    except ImportError as error:
        raise ConfigError("--format gguf needs the package gguf: pip install 'toolrl[gguf]'") from error
    config = read_model_config(str(model), "model")
    _check(config)
    tokenizer = read_tokenizer(str(model), "model")
    path = folder / f"model-{dtype}.gguf"
    writer = gguf.GGUFWriter(path, config.model_type)
    _add_config(writer, config, dtype)
    _add_tokenizer(writer, tokenizer, config.vocab_size)
    gguf.SpecialVocab(model, load_merges=True, n_vocab=config.vocab_size).add_to_gguf(writer, quiet=True)
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    for name, weight in _tensors(read_causal_lm(str(model), torch.float32, "model"), config):
        stored = _stored_kind(weight, kind)
        writer.add_tensor(name, gguf.quants.quantize(weight, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _check(config: PretrainedConfig) -> None:
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"--format gguf: models of type {config.model_type!r} are not known; known: {', '.join(FAMILIES)}"
        )
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    if kind != "default":
        raise ConfigError(f"--format gguf: rotary positions of type {kind!r} are not supported; known: default")
    if getattr(config, "use_sliding_window", False):
        raise ConfigError("--format gguf: sliding windows are not supported")


def _add_config(writer: Any, config: PretrainedConfig, dtype: str) -> None:
    import gguf

    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{dtype.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _add_tokenizer(writer: Any, tokenizer: Any, vocab_size: int) -> None:
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(described))
    added = {token["id"]: token for token in described["added_tokens"]}
    tokens = {**{number: text for text, number in described["model"]["vocab"].items()}}
    tokens |= {number: token["content"] for number, token in added.items()}
    kinds = {number: _CONTROL if token["special"] else _USER_DEFINED for number, token in added.items()}
    writer.add_token_list([tokens.get(number, f"[PAD{number}]") for number in range(vocab_size)])
    writer.add_token_types([kinds.get(each, _NORMAL if each in tokens else _UNUSED) for each in range(vocab_size)])


def _pre_tokenizer(described: dict[str, Any]) -> str:
    """llama.cpp's name. Raises ConfigError for tokenizers other than byte-level BPE, and unknown ones."""
    pieces = (described["pre_tokenizer"] or {}).get("pretokenizers", [described["pre_tokenizer"]])
    kinds = [piece["type"] for piece in pieces if piece]
    if described["model"]["type"] == "BPE" and "ByteLevel" in kinds:
        if kinds == ["Split", "ByteLevel"] and (split := pieces[0]["pattern"].get("Regex")) in _SPLITS:
            return _SPLITS[split]
        if kinds == ["Digits", "ByteLevel"]:
            return "smollm"
        if kinds == ["ByteLevel"]:
            return "gpt-2"
    raise ConfigError(
        "--format gguf: the tokenizer is not a byte-level BPE that splits text as Qwen's, Llama 3's or GPT-2's"
    )


def _tensors(model: PreTrainedModel, config: PretrainedConfig) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    import gguf

    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise ConfigError(f"--format gguf: the weight {name} has no name in {config.model_type} files")
        array = weight.numpy()
        if config.model_type == "llama" and ".self_attn.q_proj." in name:
            array = _interleave(array, config.num_attention_heads)
        if config.model_type == "llama" and ".self_attn.k_proj." in name:
            array = _interleave(array, config.num_key_value_heads)
        yield stored, array


def _interleave(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """llama.cpp rotates neighboring rows of a head in Llama models, transformers those of its two halves."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _stored_kind(weight: npt.NDArray[np.float32], kind: Any) -> Any:
    """The kind of a tensor: that of the file for matrices, if its blocks fit, and float32 for vectors."""
    import gguf

    if weight.ndim == 1:
        return gguf.GGMLQuantizationType.F32
    return kind if weight.shape[-1] % _Q8_BLOCK == 0 else gguf.GGMLQuantizationType.F16
