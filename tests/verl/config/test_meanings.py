"""Every setting has a sentence, and the values that it may have."""

from __future__ import annotations

import re

import pytest

from verl.config.commands import SFT, TRAIN
from verl.config.load import known_keys, load_config
from verl.config.meanings import meanings
from verl.config.schema import Config
from verl.config.show import key_help, leaves
from verl.errors import ConfigError

TEXTS = [key for key, kind, _ in leaves(Config()) if kind in (str, str | None)]


def test_every_setting_has_a_meaning() -> None:
    assert {key.rstrip(".") for key in known_keys()} == set(meanings())
    assert min(map(len, meanings().values())) > 5


def test_the_comment_above_a_field_comes_first() -> None:
    assert meanings()["rollout.on_weight_sync"] == (
        "responses in progress at a weight sync: continue | finish | abort_and_retry | auto (finish if env.name=agent, "
        "else continue)"
    )
    assert meanings()["critic.optim.lr"] == meanings()["actor.optim.lr"] == "learning rate of AdamW"


@pytest.mark.parametrize("key", TEXTS)
def test_values_that_an_error_lists_are_in_the_meaning(key: str) -> None:
    try:
        load_config([f"{key}=nonsense", "model.path=any"])
    except ConfigError as error:
        listed = re.search(rf"^{re.escape(key)} must be (?:one of )?(\w[\w-]*(?:(?:, | or )[\w-]+)+), got", str(error))
        for value in re.split(", | or ", listed[1]) if listed else ():
            assert re.search(rf"\b{value}\b", meanings()[key]), (key, value)


def test_help_has_two_lines_per_key() -> None:
    lines = [line for line in key_help(TRAIN).splitlines() if line]
    assert len(lines) == 2 * sum(TRAIN.has(key) for key, _, _ in leaves(Config()))
    assert lines[lines.index("actor.offload=none  (str)") + 1].startswith(
        "    to host memory when unused, on a GPU: none | "
    )
    assert "actor.optim.lr=1e-05  (float)" in key_help(SFT)
