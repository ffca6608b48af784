"""Environments in other libraries' forms, and real ones of gymnasium, TextArena and SkyRL-gym."""

from __future__ import annotations

import asyncio
import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.episodes import Played, play, respond
from tests.support.foreign import foreign_folder
from toolrl.envs.class_env.class_env import as_task_row
from verl.data.tasks import to_task
from verl.envs.base import Env
from verl.envs.registry import build_env_factory
from verl.errors import ConfigError
from verl.types import Message, Score, Task


def task(prompt: str = "Play.", **columns: Any) -> Task:
    return to_task(as_task_row({"prompt": prompt, **columns}), "rows.jsonl#7")


def made(name: str, row: Task, **options: Any) -> Env:
    return build_env_factory(name, options)(row)


def played(name: str, row: Task, *texts: str, **options: Any) -> Played:
    return asyncio.run(play(made(name, row, **options), [respond(text) for text in texts]))


def opening(name: str, row: Task, **options: Any) -> str:
    return asyncio.run(made(name, row, **options).reset()).messages[-1].content


FORMS = """
import time

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

class Final(Rllm):
    '''The last reward is that of the whole; several at a time would mix up.'''
    inside = 0
    @staticmethod
    def from_dict(row):
        return Final(row["most"])
    @staticmethod
    def is_multithread_safe():
        return False
    def reset(self):
        self.seen, self.goal = [], 3
        return {}, {}
    def step(self, action):
        Final.inside += 1
        assert Final.inside == 1, "two at a time"
        time.sleep(0.01)
        Final.inside -= 1
        self.seen.append(action)
        return {"question": "More?"}, 0.1, len(self.seen) == 3, None
    def compute_final_reward(self):
        assert not hasattr(self, "closed")
        return 5.0 * len(self.seen)
    def close(self):
        self.closed = True

class Returned(Final):
    '''As rLLM's single turns: its first observation is the task, gold answer included.'''
    @staticmethod
    def from_dict(row):
        made = Returned()
        made.max_steps = row.pop("max_steps", 3)
        made.task = row["task"] if "task" in row else row
        made.task.setdefault("asked", []).append(1)
        return made
    def reset(self):
        super().reset()
        return self.task, {}

class Spaces(Final):
    '''As rLLM's FrozenLake: gymnasium's own space is another one than that of its actions.'''
    class ACTION_SPACE:
        n, start = 4, 1
        contains = staticmethod(lambda value: 1 <= value <= 4)
    class action_space:
        n = 4
        contains = staticmethod(lambda value: 0 <= value < 4)
    @staticmethod
    def from_dict(row):
        return Spaces()
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
    shown = f"From 1 to {most}?"
    assert opening(forms(name), task(goal=3), **options) == (shown if name == "SkyRl" else f"Play.\n\n{shown}")


def test_the_final_reward_of_rllm_replaces_that_of_the_last_step(forms: Callable[[str], str]) -> None:
    assert played(forms("Final"), task(), "a", "b", "c", most=9).score == Score(0.1 + 0.1 + 15.0, {"steps": 3.0})
    assert played(forms("Final"), task(), "a", most=9).score == Score(5.0, {"steps": 1.0})  # ended by a limit
    assert played(forms("Final"), task(), most=9).score == Score(0.0, {"steps": 0.0})


async def test_episodes_of_an_environment_that_is_not_safe_in_threads_run_one_at_a_time(
    forms: Callable[[str], str],
) -> None:
    factory = build_env_factory(forms("Final"), {"most": 9})
    of_one_class = (play(factory(task()), [respond("a"), respond("b")]) for _ in range(6))
    assert [each.score for each in await asyncio.gather(*of_one_class)] == [Score(10.1, {"steps": 2.0})] * 6


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        ({}, "Play."),
        ({"ground_truth": "SECRET"}, "Play."),
        ({"task": {"ground_truth": "SECRET"}}, "Play."),
        ({"max_steps": 2, "ground_truth": "SECRET"}, "Play."),  # which it takes out of the row
        ({"question": "2 + 3?", "ground_truth": "SECRET"}, "Play.\n\n2 + 3?"),
        ({"task": {"question": "2 + 3?", "ground_truth": "SECRET"}}, "Play.\n\n2 + 3?"),
        ({"question": "Play.", "ground_truth": "SECRET"}, "Play."),
    ],
)
def test_the_policy_sees_the_question_of_a_task_returned_by_an_environment(
    columns: dict[str, Any], shown: str, forms: Callable[[str], str]
) -> None:
    row = task(**columns)
    assert opening(forms("Returned"), row) == opening(forms("Returned"), row) == shown
    assert "asked" not in row.extra and "asked" not in row.extra.get("task", {})  # an episode has a row of its own
    (step,) = played(forms("Returned"), row, "a")
    assert step.messages == (Message("user", "More?"),)


def test_the_space_of_an_environments_own_actions_counts(forms: Callable[[str], str]) -> None:
    zero, four = played(forms("Spaces"), task(), "0", "4")
    assert zero.messages == (Message("user", "Answer with a number from 1 to 4."),)
    assert four.messages == (Message("user", "More?"),)


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
def test_a_step_of_unknown_form_is_an_error(body: str, problem: str, tmp_path: Path) -> None:
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


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(foreign_folder(Path(__file__).with_name("libraries.txt"))))


@pytest.mark.long
@pytest.mark.usefixtures("libraries")
def test_frozen_lake_of_gymnasium_pays_what_it_reports() -> None:
    options = {"id": "FrozenLake-v1", "render_mode": "ansi", "is_slippery": False}
    right = ["1", "1", "2", "2", "1", "2"]  # down, down, right, right, down, right
    episode = played("gymnasium:make", task(), *right, **options)
    assert episode.score == Score(1.0, {"steps": 6.0}) and episode[-1].done
    assert played("gymnasium:make", task(), "2", "1", **options).score == Score(0.0, {"steps": 2.0})  # into a hole
    assert "FFF" in opening("gymnasium:make", task(), **options)


@pytest.mark.long
@pytest.mark.usefixtures("libraries")
def test_a_game_of_textarena_pays_what_it_reports() -> None:
    import textarena

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


@pytest.mark.long
@pytest.mark.usefixtures("libraries")
def test_gsm8k_of_skyrl_gym_pays_what_it_reports() -> None:
    name, row = "skyrl_gym.envs.gsm8k.env:GSM8kEnv", task("1 + 1?", reward_spec={"ground_truth": "2"})
    assert played(name, row, "So it is #### 2").score == Score(1.0, {"steps": 1.0})
    assert played(name, row, "#### 3").score == Score(0.0, {"steps": 1.0})
    assert opening(name, row) == "1 + 1?"
    several = "skyrl_gym.envs.gsm8k.multi_turn_env:GSM8kMultiTurnEnv"
    again = task("1 + 1?", reward_spec={"ground_truth": "2"}, extra_info={"max_turns": 4})
    wrong, none, right = episode = played(several, again, "#### 3", "Two?", "#### 2")
    assert episode.score == Score(0.05 + 0.0 + 1.0, {"steps": 3.0})
    assert "tentative" in wrong.messages[0].content and not none.done and right.done


GAMES = [
    ("gymnasium:make", {"id": "Taxi-v4", "render_mode": "ansi"}, [str(each) for each in range(6)]),
    ("gymnasium:make", {"id": "CliffWalking-v1"}, [str(each) for each in range(4)]),
    ("gymnasium:make", {"id": "Blackjack-v1"}, ["0", "1"]),
    ("textarena:make", {"env_id": "GuessTheNumber-v0", "max_turns": 4}, [f"[{each}]" for each in range(22)]),
    ("textarena:make", {"env_id": "Secretary-v0"}, ["[accept]", "[continue]", "hm"]),
    ("textarena:make", {"env_id": "Mastermind-v0"}, ["[1 2 3 4]", "[6 5 4 3]", "[1 1 2 2]", "no"]),
    ("textarena:make", {"env_id": "Minesweeper-v0"}, ["[0 0]", "[3 4]", "[5 1]", "[99 0]", "no"]),
]


def by_hand(name: str, options: Any, seed: int, moves: list[str]) -> tuple[float, int, bool]:
    """The sum of rewards, the number of steps, and whether the game has ended, in an object of the library."""
    own, ended, steps, total = importlib.import_module(name.partition(":")[0]).make(**options), False, 0, 0.0
    is_textarena = name.startswith("textarena")
    own.reset(seed=seed, **({"num_players": 1} if is_textarena else {}))
    while not ended and steps < len(moves):
        if is_textarena:
            own.get_observation()
            ended, _ = own.step(action=moves[steps])
        else:
            _, reward, terminated, truncated, _ = own.step(int(moves[steps]))
            total, ended = total + float(reward), terminated or truncated
        steps += 1
    return float((own.close()[0] or {}).get(0) or 0.0) if is_textarena else total, steps, ended


@pytest.mark.long
@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("name", "options", "answers"), GAMES)
def test_random_games_pay_what_the_library_reports(name: str, options: Any, answers: list[str]) -> None:
    """The same moves by hand: the same sum. Other moves have other sums."""
    sums = set()
    for seed in range(12):
        draw = random.Random(seed)
        moves = [draw.choice(answers) for _ in range(5)]
        total, steps, ended = by_hand(name, options, seed, moves)
        episode = played(name, task(seed=seed), *moves[:steps], **options)
        assert episode.score == Score(total, {"steps": float(steps)}) and episode[-1].done == ended, moves
        sums.add(total)
    assert len(sums) > 1, sums
