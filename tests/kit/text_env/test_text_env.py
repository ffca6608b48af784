"""Environments in other libraries' forms, and real ones of gymnasium, TextArena and SkyRL-gym where installed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.episodes import Played, play, say
from verl.data.tasks import to_task
from verl.envs.base import Env
from verl.envs.registry import build_env_factory
from verl.errors import ConfigError
from verl.kit.class_env.class_env import as_task_row
from verl.types import Message, Score, Task


def task(prompt: str = "Play.", **columns: Any) -> Task:
    return to_task(as_task_row({"prompt": prompt, **columns}), "rows.jsonl#7")


def made(name: str, row: Task, **options: Any) -> Env:
    return build_env_factory(name, options)(row)


def played(name: str, row: Task, *texts: str, **options: Any) -> Played:
    return asyncio.run(play(made(name, row, **options), [say(text) for text in texts]))


def opening(name: str, row: Task, **options: Any) -> str:
    return asyncio.run(made(name, row, **options).reset()).messages[-1].content


FORMS = """
class Game:
    '''Guess a number: 0.25 for an attempt that is too small, 1 for the right one.'''
    def __init__(self, most: int = 9):
        self.most = most
    def begin(self, seed, goal):
        self.seed, self.goal, self.closed = seed, goal, False
        return f"From 1 to {self.most}?"
    def judged(self, action):
        right = int(action) == self.goal
        return ("Right." if right else "Larger."), (1.0 if right else 0.25), right
    def close(self):
        assert not self.closed
        self.closed = True

class Gymnasium(Game):
    def reset(self, *, seed=None, options=None):
        return self.begin(seed, options["goal"]), {}
    def step(self, action):
        text, reward, right = self.judged(action)
        return text, reward, right, False, {}

class Cut(Gymnasium):
    def step(self, action):
        return *self.judged(action)[:2], False, True, {}

class Rllm(Game):
    @staticmethod
    def from_dict(row):
        made = Rllm(row["most"])
        made.row = row
        return made
    def reset(self):
        return {"question": self.begin(0, self.row["goal"])}, {}
    def step(self, action):
        return *self.judged(action), {}

class SkyRl(Game):
    def __init__(self, env_config=None, extras={}):
        super().__init__()
        self.extras = extras
    def init(self, prompt):
        return [*prompt, {"role": "user", "content": self.begin(0, self.extras["goal"])}], {}
    def step(self, action):
        text, reward, right = self.judged(action)
        return {"observations": [{"role": "user", "content": text}], "reward": reward, "done": right, "metadata": {}}

class TextArena(Game):
    def reset(self, num_players, seed=None):
        self.text, self.total = self.begin(seed, 3), 0.0
    def get_observation(self):
        return 0, self.text
    def step(self, action):
        self.text, reward, right = self.judged(action)
        self.total += reward
        return right, {}
    def close(self):
        super().close()
        return {0: self.total}, {}

def make(most):
    return Gymnasium(most)
"""


@pytest.fixture
def forms(tmp_path: Path) -> Callable[[str], str]:
    (tmp_path / "games.py").write_text(FORMS)
    return lambda name: f"{tmp_path / 'games.py'}:{name}"


@pytest.mark.parametrize("name", ["Gymnasium", "Rllm", "SkyRl", "TextArena", "make"])
def test_every_form_is_played_to_its_end_and_its_rewards_are_summed(name: str, forms: Callable[[str], str]) -> None:
    options = {"make": {"most": 7}, "Rllm": {"most": 8}}.get(name, {})
    wrong, right = played(forms(name), task(goal=3), "2", "<think> 2 was small </think> 3", **options)
    assert [each.done for each in (wrong, right)] == [False, True]
    assert [(each.role, each.content) for each in wrong.messages] == [("user", "Larger.")] and right.messages == ()
    episode = played(forms(name), task(goal=3), "1", "2", "3", **options)
    assert episode.score == Score(1.5, {"steps": 3.0})
    most = options.get("most", 9)
    shown = f'{{"question": "From 1 to {most}?"}}' if name == "Rllm" else f"From 1 to {most}?"
    assert opening(forms(name), task(goal=3), **options) == (shown if name == "SkyRl" else f"Play.\n\n{shown}")


def test_a_cut_episode_ends_and_has_its_rewards(forms: Callable[[str], str]) -> None:
    (only,) = episode = played(forms("Cut"), task(goal=3), "2")
    assert only.done and episode.score == Score(0.25, {"steps": 1.0})


def test_an_episode_that_a_limit_ends_has_the_rewards_so_far(forms: Callable[[str], str]) -> None:
    for name in ("Gymnasium", "SkyRl", "TextArena"):
        assert played(forms(name), task(goal=3), "1", "2").score == Score(0.5, {"steps": 2.0})


def test_episodes_of_a_row_have_the_same_seed_and_those_of_others_another(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("""
class Seeded:
    def reset(self, seed, level=1):
        return f"{seed} {level}", {}
    def step(self, action):
        return "", 0.0, True, False, {}
""")
    name = f"{tmp_path / 'mine.py'}:Seeded"
    row, other = task(), to_task(as_task_row({"prompt": "Play."}), "rows.jsonl#8")
    assert opening(name, row) == opening(name, row) != opening(name, other)
    assert opening(name, task(seed=5, level=2)) == "Play.\n\n5 2"  # the row's own columns


def test_a_number_is_the_action_where_actions_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("""
class Space:
    n, start = 4, 1
    def contains(self, value):
        return 1 <= value <= 4
class Board:
    action_space, render_mode = Space(), "ansi"
    def reset(self, seed=None, options=None):
        self.seen = []
        return [0, 1], {}
    def step(self, action):
        self.seen.append(action)
        return [1, 1], float(action), len(self.seen) == 2, False, {}
    def render(self):
        return f"|{self.seen}|" if hasattr(self, "seen") else "||"
""")
    name = f"{tmp_path / 'mine.py'}:Board"
    first, none, out, last = episode = played(name, task(), "Go 1, or rather 3.", "Right.", "7", "4")
    assert first.messages == (Message("user", "|[3]|"),) and last.done
    assert none.messages == out.messages == (Message("user", "Answer with a number from 1 to 4."),)
    assert episode.score == Score(7.0, {"steps": 2.0})  # the texts without an action are no steps


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return 'moved'", "step returned 'moved', not gymnasium's five values"),
        ("return None", "step returned None"),
        ("return 1, 2, 3", r"step returned \(1, 2, 3\)"),
    ],
)
def test_a_step_of_no_known_form_is_told(body: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"""
class Odd:
    def reset(self):
        return "", {{}}
    def step(self, action):
        {body}
""")
    with pytest.raises(TypeError, match=problem):
        played(f"{tmp_path / 'mine.py'}:Odd", task(), "go")


def test_unknown_options_are_refused_before_a_run(forms: Callable[[str], str]) -> None:
    with pytest.raises(ConfigError, match="has no option 'least'"):
        build_env_factory(forms("Gymnasium"), {"least": 1})


def test_frozen_lake_of_gymnasium_pays_what_it_reports() -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    options = {"id": "FrozenLake-v1", "render_mode": "ansi", "is_slippery": False}
    right = ["1", "1", "2", "2", "1", "2"]  # down, down, right, right, down, right
    episode = played("gymnasium:make", task(), *right, **options)
    assert episode.score == Score(1.0, {"steps": 6.0}) and episode[-1].done
    assert played("gymnasium:make", task(), "2", "1", **options).score == Score(0.0, {"steps": 2.0})  # into a hole
    assert "FFF" in opening("gymnasium:make", task(), **options)


def test_a_game_of_textarena_pays_what_it_reports() -> None:
    textarena = pytest.importorskip("textarena", reason="textarena is not installed")
    own = textarena.make("GuessTheNumber-v0")
    row = task(seed=3)
    text = opening("textarena:make", row, env_id="GuessTheNumber-v0")
    assert text == opening("textarena:make", row, env_id="GuessTheNumber-v0")
    guesses = [f"[{number}]" for number in (10, 5)]
    episode = played("textarena:make", row, *guesses, env_id="GuessTheNumber-v0")
    own.reset(num_players=1, seed=3)
    own.get_observation()
    shown = []
    for guess in guesses:
        done, _ = own.step(action=guess)
        shown.append(own.get_observation()[1])
        assert not done
    assert [each.messages[0].content for each in episode] == shown
    rewards, _ = own.close()
    assert episode.score is not None and episode.score.total == float((rewards or {}).get(0) or 0.0)


def test_gsm8k_of_skyrl_gym_pays_what_it_reports() -> None:
    pytest.importorskip("skyrl_gym", reason="skyrl-gym is not installed")
    name, row = "skyrl_gym.envs.gsm8k.env:GSM8kEnv", task("1 + 1?", reward_spec={"ground_truth": "2"})
    assert played(name, row, "So it is #### 2").score == Score(1.0, {"steps": 1.0})
    assert played(name, row, "#### 3").score == Score(0.0, {"steps": 1.0})
    assert opening(name, row) == "1 + 1?"
