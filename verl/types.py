"""The shared data types, as small frozen dataclasses. Imports no torch.

    Task -> Trajectory -> TrajectoryGroup (with Scores)

Shape legend: P prompts, G rollouts per prompt, L tokens of one completion or sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as described to the policy."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    schema: Mapping[str, Any] | None = None  # OpenAI schema of the row, if any, passed to chat templates


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the policy; `arguments` are parsed JSON, not validated against a schema."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None  # call id, to which the result refers, in OpenAI's rows


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, before the chat template is applied.

    content: the policy's is its turn as the chat sees it: the thought that its prompt opens, then all that it wrote,
        special tokens included, without the token that ended it
    tool_calls: calls of the assistant. The policy's are parsed from `content`, which is not modified; those of a row
        are given in addition to its content
    tool: in a message with role "tool", the tool's name (OpenAI's `name`)
    tool_call_id: in a message with role "tool", the call that it answers
    calls_in_content: False if the content does not contain the calls, so that the chat template must render them
    template_fields: other fields of a row's message, only for the chat template; they override the fields above
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool: str | None = None
    tool_call_id: str | None = None
    calls_in_content: bool = True
    template_fields: Mapping[str, Any] = field(default_factory=dict, hash=False)


GROUND_TRUTH = "reward_model.ground_truth"  # the field of a row from which `Task.answer` is read


@dataclass(frozen=True, slots=True)
class Task:
    """One task: a prompt, and the answer by which responses are scored.

    tools: tools listed in the row
    gold: the assistant turn of the row that the policy is to reproduce, if the row has one
    env, reward: specific to this task; None: those of the run's configuration
    text_prompt: the row's prompt is a text, not messages
    json_answer: the row's answer is another JSON value than a text, of which `answer` is the JSON text
    """

    id: str
    prompt: tuple[Message, ...]
    answer: str
    data_source: str
    env: str | None = None
    reward: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[ToolSpec, ...] = ()
    gold: Message | None = None
    text_prompt: bool = False
    json_answer: bool = False


class FinishReason(StrEnum):
    """Why the engine stopped generating."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Completion:
    """The engine's output for one request; exactly these tokens are trained.

    Engines return arrays, of four bytes a token: a step holds millions of tokens, and passes them between processes.
    """

    token_ids: Sequence[int]  # [L] array("i")
    logprobs: Sequence[float]  # [L] array("f") log p of each token under the sampling distribution
    finish_reason: FinishReason
    weight_version: int  # weight version that generated the last token
    token_versions: tuple[int, ...] = ()  # [L] if several weight versions generated it

    @property
    def versions(self) -> tuple[int, ...]:
        """[L] weight version of each token."""
        return self.token_versions or (self.weight_version,) * len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """What the tool-call format found in a response.

    calls: all of them, made or not
    error: why a call cannot be parsed
    complete: it has a call or an answer, after a thought if the format demands one
    content: the text before its calls, if it has any
    """

    calls: tuple[ToolCall, ...] = ()
    error: str | None = None
    complete: bool = True
    content: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One entry of an episode's ledger: the tokens of a prompt or observation, and the response to them.

    The ledger is append-only: its tokens are those of its turns in order, and no text is tokenized twice. An episode
    whose context is replaced (compaction, an edited message) or forked (a sub-agent, parallel requests) has several
    segments, a ledger each. A segment's first turn has its whole context, of which nothing is trained.
    """

    context_ids: Sequence[int]  # new context tokens: the prompt in a segment's first turn, else observations
    completion: Completion
    message: Message
    responses: tuple[Message, ...] = ()  # the environment's messages, with which the next turn begins
    reward: float | None = None  # the environment's reward for this turn, if any
    parsed: ParsedResponse | None = None  # None: the response reached a token limit
    segment: int = 0  # the ledger that this turn continues, or begins
    other_end: str = ""  # the token that ended the response, if it is not the chat template's end of a turn


class StopReason(StrEnum):
    """Why an episode ended."""

    STOP = "stop"  # the policy answered, or the environment is done
    LENGTH = "length"  # token limit reached
    MAX_TURNS = "max_turns"  # a tool call in the last turn
    MAX_TOOL_CALLS = "max_tool_calls"  # a tool call beyond the limit
    MALFORMED = "malformed"  # an unreadable call, if that ends the episode
    TURN_TIMEOUT = "turn_timeout"
    EPISODE_TIMEOUT = "episode_timeout"
    ABORT = "abort"  # aborted by the engine


class Outcome(StrEnum):
    """Outcome of an episode for scoring. After an infrastructure fault there is no trajectory."""

    SCORED = "scored"
    MODEL_FAULT = "model_fault"


@dataclass(frozen=True, slots=True)
class Score:
    """A reward and its named parts; the parts are logged, the total is used for training.

    exceeded: the limit that scoring exceeded, so that this is the score of an empty response; empty: none
    counted: False: the reward does not apply to the response, which is left out of its group
    not_counted: parts that do not apply to the response and are left out of their means
    details: JSON values besides the score, for the transcript
    """

    total: float
    parts: Mapping[str, float]
    exceeded: str = field(default="", repr=False)
    counted: bool = field(default=True, repr=False)
    not_counted: tuple[str, ...] = field(default=(), repr=False)
    details: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)


class ToolStatus(StrEnum):
    """Outcome of a tool call, with the cause of a failure."""

    SUCCESS = "success"
    USER_ERROR = "user_error"  # the policy's fault: wrong arguments, code that raises
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"  # the service failed: never the policy's fault


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Record of one tool call."""

    name: str
    status: ToolStatus
    seconds: float


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished episode of one task; `index` identifies it among the G rollouts of a prompt.

    The turns are in the order of time, also where they belong to several segments.
    """

    task: Task
    index: int
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    outcome: Outcome
    tool_uses: tuple[ToolUse, ...] = ()
    score: Score | None = None  # the environment's own score, if any
    num_malformed_calls: int = 0  # calls that could not be parsed
    lost_uses: tuple[ToolUse, ...] = ()  # tool uses of earlier attempts that failed with a service: logged, not scored
    repeats: int = 0  # earlier attempts that failed with a service
    opening: tuple[Message, ...] = ()  # the environment's first messages
    counts: Mapping[str, int] = field(default_factory=dict, hash=False)  # by metric, of a program that drives it
    tools: tuple[str, ...] = ()  # names of those that the environment offered, in the order of time
    decoded: str = ""  # `response_ids` without special tokens
    environment: bytes = b""  # the object of a plain class at the end, pickled by cloudpickle

    @property
    def prompt(self) -> tuple[Message, ...]:
        """What the policy responds to first."""
        return self.opening or self.task.prompt

    @property
    def segments(self) -> tuple[tuple[Turn, ...], ...]:
        """The turns of each segment, in the order in which the segments end: the last one has the episode's last turn.

        Each is one token sequence: the sample that is trained.
        """
        if len(self.turns) <= 1 or len({turn.segment for turn in self.turns}) == 1:
            return (self.turns,) if self.turns else ()
        latest_first: dict[int, list[Turn]] = {}
        for turn in reversed(self.turns):
            latest_first.setdefault(turn.segment, []).append(turn)
        return tuple(tuple(reversed(turns)) for turns in reversed(latest_first.values()))

    @property
    def response_ids(self) -> list[int]:
        """The tokens of the last segment after its first context: responses and what was observed between them."""
        turns = self.segments[-1] if self.turns else ()
        pieces = [piece for turn in turns for piece in (turn.context_ids, turn.completion.token_ids)]
        return [token for piece in pieces[1:] for token in piece]

    @property
    def num_tool_calls(self) -> int:
        return len(self.tool_uses)

    @property
    def turn_rewards(self) -> float:
        return sum(turn.reward for turn in self.turns if turn.reward is not None)

    @property
    def response(self) -> str:
        """The text of the policy's last turn; empty without turns."""
        return self.turns[-1].message.content if self.turns else ""


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """The G scored rollouts of one prompt; `rewards` are used for training, after any reward shaping in the group.

    A rollout that could not be scored is missing; it is reported in `faults` and never trained with reward 0.
    """

    task: Task
    trajectories: tuple[Trajectory, ...]  # [G]
    scores: tuple[Score, ...]  # [G]
    rewards: tuple[float, ...]  # [G]
    faults: tuple[str, ...] = ()  # one per missing rollout
    lost_uses: tuple[ToolUse, ...] = ()  # tool uses of attempts that failed with a service, also of missing rollouts
    baseline: float | None = None  # reward of an additional greedy rollout, if the algorithm needs one

    @property
    def returns(self) -> tuple[float, ...]:
        """[G] rewards plus turn rewards."""
        pairs = zip(self.rewards, self.trajectories, strict=True)
        return tuple(reward + trajectory.turn_rewards for reward, trajectory in pairs)
