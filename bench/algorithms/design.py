"""The study's design, written before its runs: rules, tasks, learning rates, seeds, steps and margins.

A run has the same prompts, rollouts and updates under every rule: 16 prompts of 8 responses a step, two updates each.
KL and entropy bonus are off, so rules differ in what names them: advantage, loss, aggregation, filters, critic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from verl.algorithms import ALGORITHMS

BASE = "grpo"
RULES = [name for name in ALGORITHMS if name != "opd"]  # which learns from a teacher, not from rewards
RATES = (1e-4, 3e-4, 1e-3)
SWEEP_SEED = 100  # of the runs that select a rate: no other run has it
_RIGHT = 3  # of ToolRL's reward, at most 4 where calls are due: one of two calls is not right
_WITH_CRITIC = ("ppo", "vapo")
_CRITIC = ("critic.optim.lr=1e-3", "critic.optim.weight_decay=0")
_SAME = (
    "algorithm.kl_placement=none",
    "algorithm.entropy_coefficient=0",
    "actor.optim.weight_decay=0",
    "actor.optim.schedule=constant",
    "actor.optim.warmup_steps=3",
    "data.train_batch_size=16",
    "actor.ppo_mini_batch_size=8",
    "rollout.n=8",
    "rollout.name=hf",
    "rollout.max_num_seqs=512",
    "trainer.device=cpu",
    "trainer.num_threads=1",
    "trainer.logger=[]",
    "trainer.samples_kept=0",
    "trainer.save_freq=0",
    "trainer.val_before_train=false",
)


@dataclass(frozen=True, slots=True)
class StudyTask:
    """margin: difference of mean rewards up to which two rules count as equivalent

    own: overrides that a rule needs on this task, by its name
    """

    overrides: Sequence[str]
    margin: float
    own: Mapping[str, Sequence[str]] = field(default_factory=dict)


CALLS, TOOL_LOOP = "calls", "tool_loop"
TASKS: Mapping[str, StudyTask] = {
    CALLS: StudyTask(
        ("recipe=composed_grpo", "data.max_response_length=96"),
        0.15,
        {
            "raft_pp": (f"algorithm.options.threshold={_RIGHT}",),
            "vapo": (f"algorithm.options.threshold={_RIGHT}",),
        },
    ),
    TOOL_LOOP: StudyTask(("recipe=tool_loop",), 0.1),
}


@dataclass(frozen=True, slots=True, order=True)
class StudyRun:
    stage: str
    task: str
    rule: str
    rate: float
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.stage}-{self.task}-{self.rule}-{self.rate:g}-{self.seed}"

    def overrides(self, data: Sequence[str]) -> list[str]:
        """The run's settings. data: files and initial model, where the task's recipe names none"""
        task = TASKS[self.task]
        own = [*task.own.get(self.rule, ())]
        if self.rule in _WITH_CRITIC:
            own += _CRITIC
        if self.rule == "vapo":  # its lambda of responses of fewer than 20 tokens is 0
            own.append("algorithm.options.length_alpha=1")
        steps = f"trainer.total_training_steps={self.steps}", f"trainer.test_freq={self.steps}"
        chosen = f"algorithm.name={self.rule}", f"actor.optim.lr={self.rate:g}", f"trainer.seed={self.seed}"
        return [*task.overrides, *data, *_SAME, *steps, *chosen, *own]


STEPS = {"sweep": 6, "sort": 6, "confirm": 24}
SORT_SEEDS, CONFIRM_SEEDS = range(3), range(8)


def sweep() -> Iterator[StudyRun]:
    """One run of every rule and rate, on calls: a rule's rate is that of its best one."""
    for rate in RATES:
        for rule in RULES:
            yield StudyRun("sweep", CALLS, rule, rate, SWEEP_SEED, STEPS["sweep"])


def sort(rates: Mapping[str, float]) -> Iterator[StudyRun]:
    """Stage 1: every rule at its rate, seed by seed, so that an interrupted study has whole comparisons."""
    for seed in SORT_SEEDS:
        for task in TASKS:
            for rule in RULES:
                yield StudyRun("sort", task, rule, rates[rule], seed, STEPS["sort"])


def confirm(rules: Sequence[str], rates: Mapping[str, float]) -> Iterator[StudyRun]:
    """Stage 2: few rules, more steps and seeds."""
    for seed in CONFIRM_SEEDS:
        for task in TASKS:
            for rule in rules:
                yield StudyRun("confirm", task, rule, rates[rule], seed, STEPS["confirm"])
