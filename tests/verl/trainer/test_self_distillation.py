"""A policy that teaches itself: its prompts with the gold response, the divergence that they make, what it learns."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.support.local_run import local_trainer
from tests.support.tiny import MINI, run_overrides
from tests.verl.batch.test_segments import edited
from toolrl.analysis.replay.record import Recorder, read_record, record_path
from verl.batch.samples import to_batch
from verl.build.algorithm import algorithm_of
from verl.build.demonstration import demonstrations
from verl.build.env import build_episode_runner
from verl.build.ranks import abs_paths, rank_spec
from verl.build.teacher import check_teacher
from verl.chat.template import ChatTemplate
from verl.config.load import load_config
from verl.config.schema import Config
from verl.errors import ConfigError
from verl.trainer.ppo import TrainStepResult
from verl.trainer.self_teacher import Demonstration, hinted, with_hints
from verl.types import (
    Completion,
    FinishReason,
    Message,
    Outcome,
    Score,
    StopReason,
    Task,
    Trajectory,
    TrajectoryGroup,
    Turn,
)


def one_group() -> TrajectoryGroup:
    """Three episodes of one prompt; some have segments that begin with another context."""
    return edited()


def test_the_gold_takes_the_place_of_the_prompt_by_hand() -> None:
    """All that the policy wrote and observed after it is the same; a segment with another context has none."""
    group = one_group()
    batch = to_batch([group])
    prompt = list(group.trajectories[0].turns[0].context_ids)
    found = with_hints(batch, [group], lambda group: [(prompt, [90, 91, *prompt, 92])] * 3)
    assert found.num_hints is not None
    samples = [turns for each in group.trajectories for turns in each.segments]
    begins = [list(turns[0].context_ids) == prompt for turns in samples]
    assert found.num_hints.tolist() == [(len(prompt) + 3) * each for each in begins]
    assert True in begins and False in begins
    shown = hinted(found)
    ends, ours = np.cumsum(shown.num_tokens), np.cumsum(batch.num_tokens)
    for row, has in enumerate(begins):
        theirs = shown.token_ids[ends[row] - shown.num_tokens[row] : ends[row]].tolist()
        mask = shown.action_mask[ends[row] - shown.num_tokens[row] : ends[row]].tolist()
        own = batch.token_ids[ours[row] - batch.num_tokens[row] : ours[row]].tolist()
        own_mask = batch.action_mask[ours[row] - batch.num_tokens[row] : ours[row]].tolist()
        assert theirs == ([90, 91, *prompt, 92, *own[len(prompt) :]] if has else own)
        assert mask == ([False] * (len(prompt) + 3) + own_mask[len(prompt) :] if has else own_mask)
    trained = shown.token_ids[shown.action_mask]
    assert np.array_equal(trained, batch.token_ids[batch.action_mask]) and shown.num_hints is None


def test_rows_without_a_demonstration_stay_as_they_are() -> None:
    batch = with_hints(to_batch([one_group()]), [one_group()], lambda group: [None] * 3)
    assert batch.num_hints is not None and not batch.num_hints.any()
    shown = hinted(batch)
    assert np.array_equal(shown.token_ids, batch.token_ids) and np.array_equal(shown.action_mask, batch.action_mask)


def test_each_rollout_has_its_own() -> None:
    """Samples: three of the first and second episodes each, whose later segments have other contexts; then one."""
    prompt = list(one_group().trajectories[0].turns[0].context_ids)
    pairs = [(prompt, [90, *prompt]), None, (prompt, [91, 92, *prompt])]
    groups = [one_group(), one_group()]
    found = with_hints(to_batch(groups), groups, lambda group: pairs)
    one, two = len(prompt) + 1, len(prompt) + 2
    assert found.num_hints is not None and found.hint_ids is not None
    assert found.num_hints.tolist() == [one, 0, 0, 0, 0, 0, two] * 2
    assert found.hint_ids.tolist() == [90, *prompt, 91, 92, *prompt] * 2


def test_the_prompts_travel_with_the_batch(tmp_path: Path) -> None:
    def demonstrate(group: TrajectoryGroup) -> Sequence[Demonstration | None]:
        prompt = one_group().trajectories[0].turns[0].context_ids
        return [(prompt, [90, *prompt])] * len(group.trajectories)

    batch = with_hints(to_batch([one_group()]), [one_group()], demonstrate)
    order = np.arange(len(batch))[::-1]
    turned, sent = batch.rows(order), pickle.loads(pickle.dumps(batch))
    Recorder(tmp_path, {}, {}).write(1, batch, {}, {})
    for each in (turned.rows(order), sent, read_record(record_path(tmp_path, 1)).batch):
        assert np.array_equal(hinted(each).token_ids, hinted(batch).token_ids)
    assert np.array_equal(hinted(turned).num_tokens, hinted(batch).num_tokens[::-1])


def rollouts(*texts: str, rewards: Sequence[float]) -> TrajectoryGroup:
    """Episodes of two turns, of which a tool answers the first."""
    task = Task("t", (Message("system", "Be brief."), Message("user", "One or two?")), "one", "rows")
    nothing = Completion((), (), FinishReason.STOP, 0)
    answers = (Message("tool", "42", tool="calculator"),)
    turns = [(Turn((), nothing, Message("assistant", each), answers), Turn((), nothing, END)) for each in texts]
    played = [Trajectory(task, number, each, StopReason.STOP, Outcome.SCORED) for number, each in enumerate(turns)]
    return TrajectoryGroup(task, tuple(played), tuple(Score(each, {}) for each in rewards), tuple(rewards))


END = Message("assistant", "So it is one.")


def test_the_best_response_is_shown_to_those_that_are_worse(tmp_path: Path) -> None:
    chat = ChatTemplate(AutoTokenizer.from_pretrained(MINI / "tokenizer"))
    config = configured(tmp_path, "teacher.path=best_of_group", "rollout.n=4", "data.max_prompt_length=10")
    demonstrate = demonstrations(build_episode_runner(config, chat), best_of_group=True)
    group = rollouts("bad", "good", "fair", "as good", rewards=(0.0, 2.0, 1.0, 2.0))
    pairs = demonstrate(group)
    assert [each is None for each in pairs] == [False, True, False, True] and pairs[0] == pairs[2]
    prompt, shown = map(chat.tokenizer.decode, pairs[0] or ())
    assert prompt == chat.rendered(group.task.prompt)
    demonstration = "\n\nThis is a right response:\n\ngood\n42\nSo it is one.\n\nNow give your own response"
    assert shown == prompt.replace("One or two?", f"One or two?{demonstration} to the same request.")
    assert demonstrate(rollouts("a", "b", rewards=(1.0, 1.0))) == [None, None]  # none is better
    assert demonstrate(rollouts(rewards=())) == []


def configured(tmp_path: Path, *overrides: str) -> Config:
    settings = [*run_overrides(MINI / "model", tmp_path, "hf", 2), "trainer.num_threads=1", "algorithm.name=opd"]
    return load_config([*settings, "teacher.path=self", "actor.optim.lr=3e-4", *overrides])


def steps(config: Config, again: int = 0) -> list[dict[str, float]]:
    """The metrics of a step, and of updates on its batch again."""

    async def one(trained: object) -> TrainStepResult:
        try:
            return await trained.train_step()  # type: ignore[attr-defined,no-any-return]
        finally:
            await trained.rollouts.close()  # type: ignore[attr-defined]

    with local_trainer(config) as trained:
        result = asyncio.run(one(trained))
        later = [trained.learner.learn(result.batch, step).metrics for step in range(1, 1 + again)]
        return [dict(each) for each in (result.metrics, *later)]


@pytest.mark.long
def test_a_policy_comes_nearer_to_what_it_writes_with_the_gold_in_view(tmp_path: Path) -> None:
    """The divergence in the states of the same samples, before three updates."""
    whole = ["actor.ppo_mini_batch_size=4", "teacher.top_k=20"]
    found = steps(configured(tmp_path, *whole), again=2)
    first, second, third = (each["actor/teacher_kl"] for each in found)
    assert found[0]["kl/demonstrated"] == 1.0
    assert first > 0.1 and third < second < first


@pytest.mark.long
def test_the_gold_in_view_changes_what_the_policy_holds_likely(tmp_path: Path) -> None:
    (metrics,) = steps(configured(tmp_path))
    assert metrics["kl/demonstrated"] == 1.0 and metrics["kl/teacher"] > 0.1
    assert metrics["actor/grad_norm"] > 0


@pytest.mark.long
def test_the_best_response_in_view_teaches_the_others(tmp_path: Path) -> None:
    """The gold is not: the reward is the number of characters, in which the responses differ."""
    rewarded = ["teacher.path=best_of_group", "rollout.n=8", f"reward.name={Path(__file__)}:longer"]
    whole = ["actor.ppo_mini_batch_size=4", "teacher.top_k=20"]
    found = steps(configured(tmp_path, *rewarded, *whole), again=2)
    assert 0.5 < found[0]["kl/demonstrated"] < 1.0  # the best of each group is not
    first, second, third = (each["actor/teacher_kl"] for each in found)
    assert first > 0.1 and third < second < first


def longer(response: str, answer: str) -> float:
    """A reward."""
    return float(len(response))


@pytest.mark.long
def test_rows_without_a_gold_response_teach_nothing(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": each}]} for each in ("One", "Two", "Three", "Four")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = [f"data.train_files=[{tmp_path / 'rows.jsonl'}]", f"reward.name={Path(__file__)}:nothing"]
    (metrics,) = steps(configured(tmp_path, *data, "actor.ppo_mini_batch_size=4"))
    assert metrics["kl/demonstrated"] == 0.0
    assert metrics["kl/teacher"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["actor/grad_norm"] == pytest.approx(0.0, abs=1e-4)


def nothing(response: str, answer: str) -> float:
    """A reward."""
    return 0.0


def test_no_model_is_loaded_for_a_policy_that_teaches_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even from a folder of that name."""
    (tmp_path / "self").mkdir()
    monkeypatch.chdir(tmp_path)
    config = abs_paths(configured(tmp_path))
    assert config.teacher.is_policy and config.teacher.local is None and config.teacher.url is None
    algorithm = algorithm_of(config)
    assert algorithm.teacher_weight == 1.0 and rank_spec(config, algorithm, "cpu", total_steps=1).teacher_path is None
    check_teacher(config)


def test_an_environment_that_writes_the_prompt_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with pytest.raises(ConfigError, match=r"teacher.path=self .* env.name=shop writes; it needs env.name=single_turn"):
        check_teacher(replace(config, env=replace(config.env, name="shop", tool_call_format="hermes")))


def test_one_response_is_the_best_of_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"best_of_group compares the responses to a prompt; set rollout.n=2 or more"):
        check_teacher(configured(tmp_path, "teacher.path=best_of_group", "rollout.n=1"))
