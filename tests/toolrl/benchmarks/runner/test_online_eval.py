"""Benchmarks during training: what is played, with whose prompts, and what is logged."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt

import pytest
from transformers import AutoTokenizer

from tests.support.metric_names import known
from tests.support.tiny import MINI
from toolrl.benchmarks.runner.benchmark import Aggregate, Benchmark, BenchmarkContext, Category, EpisodeConfig
from toolrl.benchmarks.runner.online import OnlineEvaluator, build_online_eval, eval_env
from toolrl.check.preflight.scripted_engine import ScriptedEngine
from verl.build.env import single_turn_runner
from verl.chat.template import ChatTemplate
from verl.config.load import load_config
from verl.config.schema import Config, EnvConfig
from verl.episodes.group import GroupRollout
from verl.errors import ConfigError
from verl.rollout.engine import Sampling
from verl.scoring.pool import DirectScorer
from verl.trainer import main_ppo
from verl.trainer.checkpointing import Checkpointing, Validated
from verl.trainer.loop import TrainingRun
from verl.types import Completion, FinishReason, Message, Task
from verl.utils.reward_score.base import build_reward

ASKED = {"2 + 2": "4", "3 + 3": "6", "5 + 5": "11"}  # the script answers the last one wrongly, by this benchmark


def tasks(*questions: str) -> list[Task]:
    return [Task(text, (Message("user", f"What is {text}?"),), ASKED.get(text, "0"), "sums") for text in questions]


def sums(setting: BenchmarkContext) -> Benchmark:
    """Two categories, one of which has the handler's prompt."""
    plain = EpisodeConfig("search_r1", uses_tools=False)
    categories = (
        Category("sums/plain", lambda: tasks("2 + 2", "5 + 5", "3 + 3"), plain, metric="correct"),
        Category("sums/handled", lambda: tasks("2 + 2", "long " * 400), EpisodeConfig("search_r1"), metric="correct"),
    )
    return Benchmark("sums", categories, (Aggregate("sums/mean", ("sums/plain", "sums/handled")),))


class Sometimes(ScriptedEngine):
    """Breaks off at a given question."""

    breaks: str = "never"

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        (made,) = await super().generate(prompt_ids, sampling)
        asked = CHAT.tokenizer.decode(prompt_ids)
        return (replace(made, finish_reason=FinishReason.ABORT) if self.breaks in asked else made,)


CHAT = ChatTemplate(AutoTokenizer.from_pretrained(MINI / "tokenizer"))


def response(prompt_ids: Sequence[int], number: int) -> Sequence[int]:
    text = CHAT.tokenizer.decode(prompt_ids)
    result = next((str(2 * int(question[0])) for question in ASKED if question in text), "nothing")
    return CHAT.response_ids(f"<answer> {result} </answer>")[0]


def configured(*overrides: str) -> Config:
    return load_config(
        [
            "eval.benchmarks=[tests.toolrl.benchmarks.runner.test_online_eval:sums]",
            "data.max_prompt_length=256",
            *overrides,
        ]
    )


def run(evaluator: OnlineEvaluator, breaks: str = "never", chat: ChatTemplate = CHAT) -> Mapping[str, float]:
    engine = Sometimes(response)
    engine.breaks = breaks
    scorer = DirectScorer(build_reward("rlla"))  # of the run; a benchmark brings its own
    sampling = Sampling(64, temperature=0.0)
    return asyncio.run(evaluator.run(GroupRollout(engine, scorer, sampling, single_turn_runner(chat, 64))))


def test_scores_of_categories_and_aggregates() -> None:
    metrics = run(build_online_eval(configured(), CHAT))
    thirds = 2 / 3
    assert metrics == {
        "eval/sums/plain/score": pytest.approx(thirds),
        "eval/sums/plain/score_stderr": pytest.approx(sqrt(thirds * (1 - thirds) / 3), rel=0.1),  # a bootstrap
        "eval/sums/handled/score": 0.5,  # the prompt that is too long is a wrong answer
        "eval/sums/handled/score_stderr": pytest.approx(sqrt(0.5 * 0.5 / 2), rel=0.1),
        "eval/sums/mean/score": pytest.approx((2 / 3 + 1 / 2) / 2),
        "eval/sums/mean/score_stderr": pytest.approx(sqrt(thirds / 9 + 1 / 8) / 2, rel=0.1),
    }
    assert all(known(name) for name in metrics)


def test_a_run_that_cuts_its_prompts_does_not_cut_those_of_benchmarks() -> None:
    """Half of a question is another question."""
    assert run(build_online_eval(configured(), CHAT), chat=replace(CHAT, max_prompt_tokens=8)) == run(
        build_online_eval(configured(), CHAT)
    )


def test_a_limit_holds_for_every_category() -> None:
    metrics = run(build_online_eval(configured("eval.limit=1"), CHAT))
    assert set(metrics.values()) == {1.0}


def test_failed_episodes_are_missing_and_logged_but_not_wrong(caplog: pytest.LogCaptureFixture) -> None:
    metrics = run(build_online_eval(configured(), CHAT), breaks="5 + 5")
    assert metrics["eval/sums/plain/missing"] == 1
    assert metrics["eval/sums/plain/score"] == 1.0
    assert known("eval/sums/plain/missing")
    assert (
        "sums/plain: 1 of 3 could not be judged; the first: 5 + 5, response 0: the rollout engine: aborted"
        in caplog.text
    )


def test_a_run_without_benchmarks_plays_none() -> None:
    evaluator = build_online_eval(Config(), CHAT)
    assert not evaluator.eval_tasks
    assert run(evaluator) == {}


def test_the_format_is_that_of_the_run() -> None:
    play = EpisodeConfig("search_r1", max_turns=3)
    assert eval_env(play, EnvConfig()).tool_call_format == "toolrl"
    trained = EnvConfig(tool_call_format="xml", tool_call_format_options={"thinking": False}, max_turns=9)
    found = eval_env(play, trained)
    assert (found.tool_call_format, found.tool_call_format_options, found.max_turns) == ("xml", {"thinking": False}, 3)
    assert eval_env(EpisodeConfig("search_r1", uses_tools=False), trained) == EnvConfig()


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("bfcll", "unknown benchmark 'bfcll'; did you mean 'bfcl'"),
        ("tests.toolrl.benchmarks.runner.test_online_eval:sums/plane", "has no category"),
        ("bfcl,bfcl", "benchmarks has duplicates"),
    ],
)
def test_unknown_names_are_refused_before_anything_starts(
    named: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"model.path={MINI / 'model'}", f"data.train_files=[{MINI / 'train.parquet'}]"]
    assert main_ppo.main([*overrides, f"eval.benchmarks=[{named}]"]) == 2
    assert message in capsys.readouterr().out


def test_two_files_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"two benchmarks have the name 'test\.parquet'"):
        build_online_eval(configured("eval.benchmarks=[a/test.parquet,b/test.parquet]"), CHAT)


def fit_after(**metrics: float) -> TrainingRun:
    fit = object.__new__(TrainingRun)
    fit.checkpointing = object.__new__(Checkpointing)
    fit.checkpointing.validated = Validated(after={name.replace("__", "/"): value for name, value in metrics.items()})
    return fit


def test_the_best_checkpoint_is_chosen_by_validation_unless_there_is_none() -> None:
    both = fit_after(eval__sums__plain__score=0.5, val__test__total=2.0)
    assert both._score() == 2.0
    assert fit_after(eval__sums__plain__missing=1.0, eval__sums__plain__score=0.5)._score() == 0.5
    assert fit_after()._score() is None
    assert both.table()[1] == {"benchmarks": {"sums/plain": 0.5}, "test": {"total": 2.0}}
