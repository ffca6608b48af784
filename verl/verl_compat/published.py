"""What the arguments of published commands and the rows of published data mean: docs/migration.md prints these tables.

COMMANDS   an argument -> the recipe whose environment and reward it stands for
VERSIONS   a key that only one version of veRL has -> that version's defaults
SOURCES    `data_source` of a row -> its reward with `reward.name=auto`, and its publisher's treatment of long prompts
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from verl.errors import DataError

AUTO = "auto"  # reward.name: by the row; data.truncation: by its publisher


@dataclass(frozen=True, slots=True)
class Line:
    """An argument that stands for parts of a recipe.

    key, value: veRL's key, without `actor_rollout_ref.`, and its value, with wildcards; a file of this name that runs
        without veRL is the user's own
    recipe, parts: groups and keys of this recipe's settings, as far as the command does not set them itself
    switch: a boolean key that disables it, if false, and its default
    """

    system: str
    key: str
    value: str
    recipe: str
    parts: tuple[str, ...]
    switch: tuple[str, bool] | None = None

    def fits(self, written: Mapping[str, Any]) -> bool:
        """written: the command's short keys and values"""
        if self.switch is not None and not written.get(*self.switch):
            return False
        return any(
            self.has(key) and value is not None and fnmatchcase(str(value), self.value) and not _runs_here(str(value))
            for key, value in written.items()
        )

    def has(self, key: str) -> bool:
        return fnmatchcase(key, self.key)


def _runs_here(value: str) -> bool:
    """Whether the value is a file of code without veRL's tools and recipes: a user's own under a published name."""
    try:
        return value.endswith(".py") and not _OF_VERL.search(Path(value).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


_OF_VERL = re.compile(r"^\s*(?:from|import)\s+(?:verl\.tools|recipe)\b", re.MULTILINE)
_ENV, _REWARD, _ROWS = ("env", "sandbox"), ("reward",), ("data.map",)
_RETOOL, _TURNS = "veRL's recipe of ReTool", "rollout.multi_turn"
_MULTI_TURN = (f"{_TURNS}.enable", False)
COMMANDS = (
    Line("Search-R1", "retriever.*", "*", "search_r1", _ENV + _REWARD, ("do_search", True)),
    Line("ToRL", "rollout.num_llm_calls_available", "*", "torl", _ENV + _REWARD),
    Line(_RETOOL, f"{_TURNS}.tool_config_path", "*retool/*tool_config.yaml", "retool_dapo", _ENV, _MULTI_TURN),
    Line(_RETOOL, "custom_reward_function.path", "*retool/retool.py", "retool_dapo", _REWARD),
    Line(_RETOOL, "data.custom_cls.path", "*retool/retool.py", "retool_dapo", _ROWS),
    Line("SkyRL-v0", "reward_model.reward_manager", "swebench", "skyrl_swe_8b", _ENV + _REWARD + _ROWS),
)


_OWN = {"env": ("env.name", "env.tool_call_format"), "reward": ("reward.name",)}


@dataclass(frozen=True, slots=True)
class Version:
    """A version or fork of veRL whose defaults differ from ToolRL's, which are ours."""

    name: str
    sign: str  # a key that only this version has
    defaults: Mapping[str, tuple[str, Any]]  # {our key: (veRL's, the value)}
    overlong: str  # what its trainer does with overlong prompts, without a key for it


_TRUNCATION = "data.truncation"
_LATER = {
    "algorithm.entropy_coefficient": ("actor.entropy_coeff", 0.0),
    "algorithm.dual_clip": ("actor.clip_ratio_c", 3.0),
}
VERSIONS = (
    Version("later versions of veRL", "algorithm.use_kl_in_reward", _LATER, "error"),
    Version("Search-R1", "rollout.n_agent", {"rollout.top_p": ("rollout.top_p", 0.95)}, "error"),
    Version(
        "SkyRL", "rollout.n_trajectories", {"trainer.val_before_train": ("trainer.val_before_train", False)}, "error"
    ),
    Version("ToRL", "rollout.num_llm_calls_available", {_TRUNCATION: (_TRUNCATION, "drop")}, "drop"),
)


@dataclass(frozen=True, slots=True)
class Source:
    """Rows of published data.

    names: of `data_source`; * is a wildcard
    reward, options: with `reward.name=auto`; None: there is none here, for the reason `why`
    versions: options by `extra_info.prompt_type`, for rows that have it
    overlong: what the publisher's trainer does with overlong prompts
    why: whose reward it is, and where it differs from veRL's
    """

    names: tuple[str, ...]
    reward: str | None
    why: str
    options: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    overlong: str = "drop"

    def fits(self, data_source: str) -> bool:
        return any(fnmatchcase(data_source, name) for name in self.names)

    def options_of(self, extra: Mapping[str, Any]) -> Mapping[str, Any]:
        """The reward's options for a row with this `extra_info`. Raises DataError for an unknown version."""
        version = extra.get("prompt_type")
        if not self.versions or version is None:
            return self.options
        if version not in self.versions:
            known = ", ".join(self.versions)
            raise DataError(f"is {version!r}", f"one of {known}", field="extra_info.prompt_type")
        return self.versions[version]


_QA = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
_TOOL_N1 = {
    "qwen": "v0",
    "qwen_lexico": "v1",
    "qwen_wo_reason": "v2",
    "qwen_partial_reason": "v3",
    "qwen_partial_reason_funcname": "v4",
    "llama": "llama",
}
_BOX = "1 for the right box; equal by math-verify, not as strings"
SOURCES = (  # the first that fits
    Source(("*rlla*",), "rlla", "ToolRL's", overlong="left"),
    Source(
        ("toolcall",),
        "tool_n1",
        "Tool-N1's; `extra_info.prompt_type` selects the version",
        {"version": "v0"},
        {name: {"version": version} for name, version in _TOOL_N1.items()},
    ),
    Source(("openai/gsm8k",), "gsm8k", "veRL's: 1 for the right number after `####`"),
    Source(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), "math", _BOX),
    Source(
        ("math_dapo", "math", "math_dapo_reasoning", "aime*"),
        "math_dapo",
        "veRL's of DAPO: 1 or -1 by the last `Answer:`, or else the last box; equal by math-verify",
    ),
    Source(tuple(f"numina_{name}" for name in (
        "aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads",
    )), "math", _BOX),
    Source(
        (*_QA, "web_questions", "strategyqa", *(f"searchR1_{name}" for name in _QA)),
        "search_r1",
        "Search-R1's exact match, without veRL's quarter for more than ten answer tags",
    ),
    Source(("codecontests", "apps", "codeforces", "taco"), None, "veRL runs the answer's program on test cases"),
    Source(("hiyouga/geometry3k",), None, "its prompts have images"),
    Source(("*multiply*", "*arithmetic*", "*countdown*"), None, "TinyZero's toy tasks"),
)  # fmt: skip


def source_of(data_source: str) -> Source | None:
    return next((source for source in SOURCES if source.fits(data_source)), None)


def overlong_of(data_source: str) -> str:
    """data.truncation=auto: what the rows' own trainer does with overlong prompts, "left" or "drop"."""
    source = source_of(data_source)
    return "drop" if source is None else source.overlong


def lines_of(written: Mapping[str, Any]) -> list[Line]:
    """The lines that a command's short keys and values select: none for an environment or a reward of its own."""
    own = {group for group, keys in _OWN.items() if not written.keys().isdisjoint(keys)}
    return [line for line in COMMANDS if own.isdisjoint(line.parts) and line.fits(written)]
