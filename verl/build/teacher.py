"""Checks a teacher before anything starts: it has to read the policy's tokens."""

from __future__ import annotations

from verl.build.engines import sequence_length
from verl.config.schema import Config
from verl.errors import ConfigError
from verl.pretrained import read_model_config, read_tokenizer

_SHOWN = 3  # tokens listed in an error


def check_teacher(config: Config) -> None:
    """Raises ConfigError for a teacher that cannot score the policy's tokens: they have other ids or texts in its
    vocabulary, or a sequence has more tokens than it supports."""
    model, path = config.model, config.teacher.path
    if path is None:
        return
    assert model.path is not None
    key = "model.tokenizer_path" if model.tokenizer_path else "model.path"
    own = read_tokenizer(model.tokenizer_path or model.path, key).get_vocab()
    theirs = read_tokenizer(path, "teacher.path").get_vocab()
    if differing := sorted(token for token in own.keys() | theirs.keys() if own.get(token) != theirs.get(token)):
        shown = ", ".join(f"{each!r} ({own.get(each)} here, {theirs.get(each)} there)" for each in differing[:_SHOWN])
        raise ConfigError(
            f"teacher.path: the tokenizer of {path!r} has other ids than the policy's for {len(differing)} tokens, "
            f"such as {shown}. Distillation compares probabilities of the same tokens; set a teacher of the policy's "
            "family"
        )
    sizes = read_model_config(model.path), read_model_config(path, "teacher.path")
    here, there = (each.get_text_config().vocab_size for each in sizes)
    if there < here:
        raise ConfigError(
            f"teacher.path: {path!r} has {there} token ids and the policy {here}, so that it could not score all "
            "tokens that the policy may sample"
        )
    length, limit = sequence_length(config), getattr(sizes[1], "max_position_embeddings", None)
    if limit is not None and length > limit:
        lengths = "data.max_prompt_length + data.max_response_length"
        raise ConfigError(f"{lengths} is {length} tokens, but the teacher supports {limit}")
