"""Checks a teacher before anything starts: it has to read the policy's tokens."""

from __future__ import annotations

from typing import Any

from verl.build.engines import sequence_length
from verl.config.schema import BEST_OF_GROUP, Config
from verl.errors import ConfigError
from verl.host.daemon import run_async
from verl.pretrained import read_model_config, read_tokenizer
from verl.trainer.teacher_server import TeacherServer, teacher_server

_SHOWN = 3  # tokens listed in an error


def check_teacher(config: Config) -> None:
    """Raises ConfigError for a teacher that cannot score the policy's tokens: they have other ids or texts in its
    vocabulary, or a sequence has more tokens than it supports."""
    model, path = config.model, config.teacher.path
    if path is None:
        return
    if config.teacher.is_policy:
        _num_ids(config)
        if config.env.name not in ("single_turn", "tool"):
            raise ConfigError(
                f"teacher.path={path} shows the policy a response in its prompt, which env.name={config.env.name} "
                "writes; it needs env.name=single_turn or tool"
            )
        if path == BEST_OF_GROUP and config.rollout.n == 1:
            raise ConfigError(f"teacher.path={path} compares the responses to a prompt; set rollout.n=2 or more")
        return
    if config.teacher.url is not None:
        connect_teacher(config)
        return
    assert model.path is not None
    own = _own_tokenizer(config).get_vocab()
    theirs = read_tokenizer(path, "teacher.path").get_vocab()
    if differing := sorted(token for token in own.keys() | theirs.keys() if own.get(token) != theirs.get(token)):
        shown = ", ".join(f"{each!r} ({own.get(each)} here, {theirs.get(each)} there)" for each in differing[:_SHOWN])
        raise ConfigError(
            f"teacher.path: the tokenizer of {path!r} has other ids than the policy's for {len(differing)} tokens, "
            f"such as {shown}. Distillation compares probabilities of the same tokens; set a teacher of the policy's "
            "family"
        )
    theirs_config = read_model_config(path, "teacher.path")
    here, there = _num_ids(config), theirs_config.get_text_config().vocab_size
    if there < here:
        raise ConfigError(
            f"teacher.path: {path!r} has {there} token ids and the policy {here}, so that it could not score all "
            "tokens that the policy may sample"
        )
    length, limit = sequence_length(config), getattr(theirs_config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        lengths = "data.max_prompt_length + data.max_response_length"
        raise ConfigError(f"{lengths} is {length} tokens, but the teacher supports {limit}")


def connect_teacher(config: Config) -> TeacherServer:
    """The teacher behind the URL in `teacher.path`. Raises ConfigError as `check_teacher`, ServiceDownError."""
    assert config.teacher.url is not None
    if config.rollout.temperature != 1:
        raise ConfigError(
            f"a served teacher gives log-probs at temperature 1, and the policy samples at rollout.temperature="
            f"{config.rollout.temperature:g}; set it to 1, or teacher.path to a folder"
        )
    tokenizer = _own_tokenizer(config)
    ids = sorted(tokenizer.get_vocab().values())
    num_ids = _num_ids(config)
    asked = config.teacher.url, sequence_length(config), ids
    return run_async(teacher_server(*asked, lambda part: tokenizer.decode(list(part)), num_ids))


def _num_ids(config: Config) -> int:
    """Token ids of the policy's model. Raises ConfigError for a larger teacher.top_k."""
    assert config.model.path is not None
    size = int(read_model_config(config.model.path).get_text_config().vocab_size)
    if config.teacher.top_k is not None and config.teacher.top_k > size:
        raise ConfigError(f"teacher.top_k={config.teacher.top_k} is more than the policy's {size} token ids")
    return size


def _own_tokenizer(config: Config) -> Any:
    """The policy's."""
    model = config.model
    assert model.path is not None
    key = "model.tokenizer_path" if model.tokenizer_path else "model.path"
    return read_tokenizer(model.tokenizer_path or model.path, key)
