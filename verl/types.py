"""The nouns that travel through the house, one small frozen dataclass each. Imports no torch.

    Task -> Trajectory -> TrajectoryGroup (with Scores) -> Sample

Shape legend: P prompts, G rollouts per prompt, L tokens of one completion or sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """What a policy is told of a tool."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    schema: Mapping[str, Any] | None = None  # OpenAI's form as a row wrote it, which chat templates then get


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the policy asks for; `arguments` is what JSON gave, not checked against any schema."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None  # that its result refers to, in OpenAI's rows


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, before any template has turned it into tokens.

    tool_calls: of the assistant. A format reads the policy's from `content`, which stays as it was written; those of a
        row stand beside its content
    tool: in a message of the role "tool", the tool that says it (OpenAI's `name`)
    tool_call_id: in a message of the role "tool", the call that it answers
    calls_in_content: False where chat templates are to write the calls, because the content does not hold them
    template_fields: what else a row's message has, for the chat template alone; over the fields above
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool: str | None = None
    tool_call_id: str | None = None
    calls_in_content: bool = True
    template_fields: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do: a prompt, and what a good response is judged by.

    tools: that the row lists beside its prompt
    env, reward: of this task alone; None: those of the run's configuration

    Example: Task(id="train.parquet#17", prompt=(system, user), answer="<think>..</think>\\n<tool_call>..", ...)
    """

    id: str
    prompt: tuple[Message, ...]
    answer: str
    data_source: str
    env: str | None = None
    reward: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[ToolSpec, ...] = ()


class FinishReason(StrEnum):
    """Why the engine stopped generating."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine emitted for one request; these very tokens are the ones that are trained."""

    token_ids: tuple[int, ...]  # [L]
    logprobs: tuple[float, ...]  # [L] log p of each token under the sampling distribution
    finish_reason: FinishReason
    weight_version: int  # of the weights that wrote the last token
    token_versions: tuple[int, ...] = ()  # [L] where several versions wrote it

    @property
    def versions(self) -> tuple[int, ...]:
        """[L] version of the weights that wrote each token."""
        return self.token_versions or (self.weight_version,) * len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Turn:
    """One entry of an episode's ledger: the tokens that were put before the policy, and those that it wrote after them.

    The ledger only grows: the tokens of an episode are those of its turns in order, and no text is tokenised twice.
    """

    context_ids: tuple[int, ...]  # new ones: the prompt in the first turn, what was observed in the others
    completion: Completion
    message: Message
    responses: tuple[Message, ...] = ()  # of the environment, which the next turn begins with
    reward: float | None = None  # of the environment for this turn, where it gives any


class StopReason(StrEnum):
    """Why an episode ended."""

    STOP = "stop"  # the policy answered, or the environment was done
    LENGTH = "length"  # no tokens left
    MAX_TURNS = "max_turns"  # it wanted to call tools in its last turn
    MAX_TOOL_CALLS = "max_tool_calls"  # ... and had made all calls that it may
    MALFORMED = "malformed"  # a call that cannot be read, where that ends the episode
    TURN_TIMEOUT = "turn_timeout"
    EPISODE_TIMEOUT = "episode_timeout"
    ABORT = "abort"  # the engine broke off


class Outcome(StrEnum):
    """How an episode ended, as far as scoring is concerned. After an infrastructure fault there is no trajectory."""

    SCORED = "scored"
    MODEL_FAULT = "model_fault"


@dataclass(frozen=True, slots=True)
class Score:
    """A reward and its named parts; the parts are logged, the total is trained on.

    exceeded: the limit that scoring the response passed, so that this is the score of an empty one; empty: none
    """

    total: float
    parts: Mapping[str, float]
    exceeded: str = field(default="", repr=False)


class ToolStatus(StrEnum):
    """How a tool call ended, and whose fault it was if badly."""

    SUCCESS = "success"
    USER_ERROR = "user_error"  # the policy's: wrong arguments, code that raises
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"  # the service's: never the policy's fault


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One tool call that was made."""

    name: str
    status: ToolStatus
    seconds: float


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished episode of one task; `index` tells the G rollouts of a prompt apart."""

    task: Task
    index: int
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    outcome: Outcome
    tool_uses: tuple[ToolUse, ...] = ()
    score: Score | None = None  # the environment's own, where it has one
    num_malformed_calls: int = 0  # texts that meant to be calls, but could not be read
    lost_uses: tuple[ToolUse, ...] = ()  # of earlier attempts, which a broken service ended: counted, never judged

    @property
    def num_tool_calls(self) -> int:
        """Calls that were made, whatever came of them."""
        return len(self.tool_uses)

    @property
    def turn_rewards(self) -> float:
        """The sum of what the environment gave for single turns."""
        return sum(turn.reward for turn in self.turns if turn.reward is not None)

    @property
    def response(self) -> str:
        """The text of the policy's last turn; empty when it wrote nothing."""
        return self.turns[-1].message.content if self.turns else ""


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """The G rollouts of one prompt, scored; `rewards` is what is trained on, after any shaping within the group.

    A rollout that could not be scored is not among them: it is told in `faults`, and never trained as a zero.
    """

    task: Task
    trajectories: tuple[Trajectory, ...]  # [G]
    scores: tuple[Score, ...]  # [G]
    rewards: tuple[float, ...]  # [G]
    faults: tuple[str, ...] = ()  # one for each rollout that is missing
    lost_uses: tuple[ToolUse, ...] = ()  # of attempts that a broken service ended, of the missing rollouts, too
    baseline: float | None = None  # the reward of a greedy rollout beside them, where the algorithm asks for one

    @property
    def returns(self) -> tuple[float, ...]:
        """[G] rewards and what was given for single turns, together."""
        pairs = zip(self.rewards, self.trajectories, strict=True)
        return tuple(reward + trajectory.turn_rewards for reward, trajectory in pairs)


@dataclass(frozen=True, slots=True)
class Sample:
    """One token sequence to train on. Nobody shifts: logprobs[t] is log p(token_ids[t] | token_ids[:t])."""

    token_ids: tuple[int, ...]  # [L]
    action_mask: tuple[bool, ...]  # [L] True where the policy sampled the token
    rollout_logprobs: tuple[float, ...]  # [L] the engine's; 0 where the mask is False, NaN where another wrote
    group: int  # samples of one prompt share it
    reward: float  # of the episode, paid at the last trained token
    turn_rewards: tuple[tuple[int, float], ...] = ()  # (last token of a turn, reward for that turn), in addition
