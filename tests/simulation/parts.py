"""What a simulated run is made of besides processes: modes, configuration, tasks, a tokenizer, an environment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.simulation.scorer import DigestReward
from tests.simulation.workers import END, VOCABULARY
from tests.simulation.world import World
from verl.build.algorithm import build_algorithm
from verl.build.run import Inputs
from verl.chat.observations import ObservationTokenizer
from verl.chat.template import ChatTemplate
from verl.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    Config,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    TrainerConfig,
)
from verl.data.overlap import TrainTasks
from verl.envs.base import Env, EnvFactory, Observation, StepResult
from verl.envs.task_envs import TaskEnvs
from verl.episodes.episode import EpisodeLimits, EpisodeRunner
from verl.errors import ServiceDownError
from verl.formats.base import Calls, Final
from verl.formats.plain import PLAIN
from verl.formats.split import Split
from verl.scoring.rewards import Rewards
from verl.types import Message, Task, ToolCall, ToolSpec, ToolStatus, ToolUse

STEPS, BATCH, MINI, ROLLOUTS = 20, 2, 1, 2
ROWS, VAL_ROWS = 11, 2  # an epoch ends within a step
TURN_S, SERVICE = 20.0, "the shelf"


@dataclass(frozen=True)
class Mode:
    """The degrees of freedom of a run."""

    ranks: int = 1
    engines: int = 1
    max_staleness: int = 0
    on_weight_sync: str = "auto"
    max_reuse: int = 1
    turns: int = 1
    filtered: bool = False
    save_freq: int = 3
    save_on_signal: bool = True

    @classmethod
    def chosen(cls, source: random.Random) -> Mode:
        staleness = source.choice((0, 0, 1, 2))
        return cls(
            ranks=source.choice((1, 2)),
            engines=source.choice((1, 2)),
            max_staleness=staleness,
            on_weight_sync=source.choice(("continue", "finish", "abort_and_retry")) if staleness else "auto",
            max_reuse=2 if staleness == 2 and source.random() < 0.3 else 1,
            turns=source.choice((1, 1, 3)),
            filtered=source.random() < 0.25,
            save_freq=source.choice((2, 3, 5)),
            save_on_signal=source.random() < 0.7,
        )

    @property
    def repeatable(self) -> bool:
        """Whether what is trained does not depend on times."""
        return self.max_staleness == 0

    def config(self, folder: Path) -> Config:
        return Config(
            data=DataConfig(train_batch_size=BATCH, max_response_length=64),
            model=ModelConfig(path=str(folder.parent / "model"), compute_dtype="float32"),
            actor=ActorConfig(ppo_mini_batch_size=MINI, max_tokens_per_pack=1024),
            rollout=RolloutConfig(
                name="hf",
                n=ROLLOUTS,
                max_staleness=self.max_staleness,
                max_reuse=self.max_reuse,
                on_weight_sync=self.on_weight_sync,
                num_engines=self.engines,
            ),
            algorithm=AlgorithmConfig(
                name="grpo",
                kl_placement="none",
                filters=[{"name": "zero_variance", "least_spread": 0.1}] if self.filtered else None,
                max_resample_rounds=4 if self.filtered else None,
            ),
            reward=RewardConfig(num_workers=2, max_fault_share=0.5),
            trainer=TrainerConfig(
                total_training_steps=STEPS,
                save_freq=self.save_freq,
                test_freq=7,
                keep_last=2,
                experiment_name=folder.name,
                default_local_dir=str(folder.parent),
                n_gpus_per_node=self.ranks,
                stall_timeout_s=600.0,
                save_on_signal=self.save_on_signal,
                samples_kept=0,
                device="cpu",
            ),
        )


class CallsOnEvenNumbers:
    """A response whose last word is even asks for more."""

    template_tools: ClassVar[bool] = True
    final_stop_strings: ClassVar[tuple[str, ...]] = ()
    turns_per_call: ClassVar[int] = 1
    parallel_calls: ClassVar[bool] = False

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Sequence[Message]:
        return messages

    def stop_strings(self, written: str) -> tuple[str, ...]:
        return ()

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Calls | Final:
        terms = written.replace("<eos>", "").split()
        asks = bool(terms) and int(terms[-1].removeprefix("w")) % 2 == 0
        return Calls((ToolCall("look", {}),)) if asks else Final()

    def observation(self, results: Sequence[Message], written: str) -> str:
        return " " + " ".join(result.content for result in results)

    def split(self, text: str, tools: Sequence[ToolSpec] = ()) -> Split:
        return Split(text)

    def certain_content(self, text: str) -> str:
        return text

    def render(self, calls: Sequence[ToolCall]) -> str:
        return ""


class Shelves(EnvFactory):
    """Environments whose service can be down or slow."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.down_until = self.slow_until = -1.0
        self.open = 0

    def __call__(self, task: Task) -> Env:
        self.open += 1
        return Shelf(self, task)

    @staticmethod
    def initial_observation(task: Task) -> Observation:
        return Observation(task.prompt)


class Shelf(Env):
    def __init__(self, shelves: Shelves, task: Task) -> None:
        self._shelves, self._task = shelves, task

    async def reset(self) -> Observation:
        return Shelves.initial_observation(self._task)

    async def step(self, message: Message) -> StepResult:
        if not message.tool_calls:
            return StepResult(done=True)
        world = self._shelves.world
        await asyncio.sleep(world.delay(0.02, 0.1) if world.now > self._shelves.slow_until else 10 * TURN_S)
        if world.now < self._shelves.down_until:
            raise ServiceDownError(SERVICE, "is closed", tool="look")
        return StepResult((Message("tool", "w5 w7"),), tool_uses=(ToolUse("look", ToolStatus.SUCCESS, 0.0),))

    async def close(self) -> None:
        self._shelves.open -= 1


@cache
def chat() -> ChatTemplate:
    vocabulary = {"<eos>": END} | {f"w{number}": number for number in range(1, VOCABULARY)}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    return ChatTemplate(PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>", chat_template=template))


@cache
def tasks(name: str, count: int) -> tuple[Task, ...]:
    first = 100 if name == "train" else 500
    return tuple(Task(f"{name}{n}", (Message("user", f"w{first + n}"),), "w1", "shelf") for n in range(count))


def inputs(mode: Mode, config: Config, shelves: Shelves) -> Inputs:
    style = PLAIN if mode.turns == 1 else CallsOnEvenNumbers()
    limits = EpisodeLimits(max_turns=mode.turns, max_tokens=64, turn_s=TURN_S)
    observations = ObservationTokenizer(chat(), style, max_observation_tokens=16)
    rows, envs = tasks("train", ROWS), TaskEnvs("single_turn" if mode.turns == 1 else "shelf", shelves)
    return Inputs(
        algorithm=build_algorithm(config.algorithm, config.data.max_response_length, mode.max_staleness),
        rewards=Rewards(DigestReward(), "digest"),
        episode_runner=EpisodeRunner(envs, observations, limits),
        train=[rows],
        val={"val": tasks("val", VAL_ROWS)},
        online_eval=None,
        reports=[],
        train_tasks=TrainTasks.of(rows, TrainTasks()),
    )


MODES = tuple(Mode.chosen(random.Random(number)) for number in range(16))
