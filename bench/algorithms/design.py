"""The study's design, written before its runs: rules, tasks, learning rates, seeds, steps and margins.

A run has the same number of responses under every rule: 128 a step, of 16 prompts, for two updates. Exceptions are
those that a rule's own page asks for (`_OWN`). KL and entropy bonus are off, so rules differ in what names them:
advantage, loss, aggregation, filters, critic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from verl.algorithms import ALGORITHMS

BASE = "grpo"
RULES = [name for name in ALGORITHMS if name != "opd"]  # which learns from a teacher, not from rewards
SWEEP_SEED = 100  # of the runs that select a rate: no other run has it
_CRITIC = ("critic.optim.lr=1e-3", "critic.optim.weight_decay=0")
_ONE_UPDATE = ("actor.ppo_mini_batch_size=16",)  # the loss corrects for no other policy
_OWN: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("rloo", "remax", "opo", "gpg"), _ONE_UPDATE),
    "ppo": _CRITIC,
    "vapo": (*_CRITIC, "algorithm.options.length_alpha=1"),  # its lambda of responses of fewer than 20 tokens is 0
    # Of eight responses two are mostly equal best, and then none has an advantage; pairs show more.
    "pass_at_k": ("rollout.n=2", "data.train_batch_size=64", "actor.ppo_mini_batch_size=32"),
}
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

    rates: learning rates of the sweep; a task without any takes those that are chosen for `TOOL_LOOP`
    copies: rules that compute on this task what `toolrl_grpo` does, up to rounding and the scale of the gradient: they
        show what chance alone makes of a difference, and are neither tested nor selected
    unsuited: rules that the rewards of this task do not suit; neither selected
    """

    overrides: Sequence[str]
    margin: float
    rates: Sequence[float] = ()
    copies: Sequence[str] = ()
    unsuited: Sequence[str] = ()


CALLS, TOOL_LOOP, SHOP = "calls", "tool_loop", "shop"
TASKS: Mapping[str, StudyTask] = {
    CALLS: StudyTask(
        ("recipe=composed_grpo",),
        0.15,
        rates=(1e-4, 3e-4, 1e-3, 3e-3),
        copies=("aspo", "gigpo", "kpop", "matchtir", "simpletir"),
        unsuited=("grpo_roc", "max_rl", "raft_pp"),
    ),
    TOOL_LOOP: StudyTask(("recipe=tool_loop",), 0.1, rates=(1e-4, 3e-4), copies=("kpop",), unsuited=("max_rl",)),
    SHOP: StudyTask(
        (
            "model.compute_dtype=float32",
            "data.max_prompt_length=224",
            "data.max_response_length=256",
            "env.tool_call_format=toolrl",
            "env.max_turns=4",
            "reward.name=env",
        ),
        0.05,
        copies=("kpop",),
    ),
}
SORT_TASKS = (CALLS, TOOL_LOOP)


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

    def settings(self) -> list[str]:
        """Overrides of the task's recipe."""
        steps = f"trainer.total_training_steps={self.steps}", f"trainer.test_freq={self.steps}"
        chosen = f"algorithm.name={self.rule}", f"actor.optim.lr={self.rate:g}", f"trainer.seed={self.seed}"
        return [*TASKS[self.task].overrides, *_SAME, *steps, *chosen, *_OWN.get(self.rule, ())]


STEPS = {"sweep": 6, "sort": 6, "confirm": 12}
SORT_SEEDS, CONFIRM_SEEDS = range(3), range(10, 18)  # apart: the first stage selects the rules of the second


def sweep() -> Iterator[StudyRun]:
    """One run of every rule and rate, for `best_rates`."""
    for task in SORT_TASKS:
        for rate in TASKS[task].rates:
            for rule in RULES:
                yield StudyRun("sweep", task, rule, rate, SWEEP_SEED, STEPS["sweep"])


def rate_of(task: str, rule: str, rates: Mapping[str, Mapping[str, float]]) -> float:
    """rates: by task and rule, from the sweep"""
    swept = task if TASKS[task].rates else TOOL_LOOP
    return rates[swept].get(rule, TASKS[swept].rates[0])  # the lowest, if all runs of its sweep have failed


def sort(rates: Mapping[str, Mapping[str, float]]) -> Iterator[StudyRun]:
    """Stage 1: every rule at its rate, seed by seed, so that an interrupted study has whole comparisons."""
    for seed in SORT_SEEDS:
        for task in SORT_TASKS:
            for rule in RULES:
                yield StudyRun("sort", task, rule, rate_of(task, rule, rates), seed, STEPS["sort"])


def confirm(rules: Sequence[str], rates: Mapping[str, Mapping[str, float]]) -> Iterator[StudyRun]:
    """Stage 2: few rules, more steps and seeds."""
    for seed in CONFIRM_SEEDS:
        for task in TASKS:
            for rule in rules:
                yield StudyRun("confirm", task, rule, rate_of(task, rule, rates), seed, STEPS["confirm"])
