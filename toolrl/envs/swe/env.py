"""An agent that solves an issue in a repository, with tools of its own runtime; hidden tests judge the patch it leaves.

    reset: a runtime starts -> step: the agent's calls -> judge: the patch, in a fresh runtime

The three stages have slots of their own. So a runtime that starts slowly, or a slow test suite, holds no slot of a
running agent. A lost runtime is an infrastructure fault: the episode starts again, or drops out, and never scores 0.
Every stage takes the episodes in the order of their groups; one that starts again keeps its place.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, get_args

from toolrl.swe.deployments import runtimes_at
from toolrl.swe.runtime import CommandFailedError, Runtime, RuntimeLostError, TaskFaultError
from toolrl.swe.scoring import PatchOutcome, PatchVerdict, SharedVerdicts, collect_patch, score_patch
from toolrl.swe.slots import OrderedSlots
from toolrl.swe.tasks import SweTask, check_environment, read_swe_task
from toolrl.swe.tools import SUBMIT, WAIT_OR_INTERRUPT, AgentTools
from verl.data.messages import read_tools
from verl.envs.base import Env, EnvFactory, Observation, StepResult
from verl.envs.clock import paused
from verl.envs.tools.base import ToolError, ToolTimeoutError
from verl.envs.tools.function import FunctionTool
from verl.envs.tools.functions import Toolbox
from verl.envs.tools.runner import MAX_CHARS
from verl.errors import ConfigError, DataError, EpisodeLostError
from verl.formats.prompt import PromptTemplate, load_template
from verl.host.services import check_services
from verl.text import shortened
from verl.types import Message, Score, Task, ToolCall, ToolSpec, ToolStatus, ToolUse

PROMPTS = Path(__file__).parent / "prompts"
TOOLS = {
    name: FunctionTool(getattr(AgentTools, name), name)
    for name in ("bash", "execute_bash", "str_replace_editor", "search", "finish", "edit_line")
}
SCORINGS = 3  # of a patch, if runtimes are lost
NUDGES_UNTIL_FINISH = 2  # messages without a call, after which the agent is reminded that it may finish
Stage = Literal["starting", "running", "scoring"]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Style:
    """What an agent is offered. nudge: after a message without a call; may_finish: follows it from the third on"""

    prompt: str  # a file of PROMPTS
    tools: tuple[str, ...]
    nudge: str
    may_finish: str


STYLES: Mapping[str, Style] = {
    "openhands": Style(
        "openhands",
        ("bash", "str_replace_editor", "search", "finish"),
        "Please continue with the task, in the way that you think is best. No questions are answered.",
        "If you think that you have solved it, call `finish`.",
    ),
    "skyrl": Style(
        "openhands",
        ("execute_bash", "finish", "str_replace_editor"),
        "Please continue with the task, in the way that you think is best. No questions are answered.",
        "If you want to give up, call `finish`.",
    ),
    "mini": Style(
        "mini",
        ("bash",),
        "Every message must contain exactly one command.",
        f"If you think that you have solved the task, end with: echo {SUBMIT}",
    ),
    "line": Style("line", ("edit_line",), "Call edit_line.", "Its first edit ends the session."),
}


class LoopDetector:
    """Whether an agent repeats itself, by OpenHands' rules: a step four times, or two in turn three times."""

    def __init__(self) -> None:
        self._steps: deque[Hashable] = deque(maxlen=6)

    def add(self, step: Hashable) -> bool:
        self._steps.append(step)
        steps = list(self._steps)
        return (len(steps) >= 4 and len(set(steps[-4:])) == 1) or (len(steps) == 6 and steps[:-2] == steps[2:])


class SweEnv(Env):
    """One episode. Score.parts: those of the verdict, and how the agent and its three stages went."""

    def __init__(self, owner: SweFactory, task: Task) -> None:
        self._owner, self._task = owner, owner.swe_task(task)
        self._initial = owner.initial_observation(task)
        self._place = owner.take_place(self._task)
        self._judged = False
        self._runtime: Runtime | None = None
        self._running = AsyncExitStack()  # the runtime and its slot
        self._loops = LoopDetector()
        self._stuck = False
        self._nudges = 0
        self._seconds: dict[str, float] = {"engine_s": 0.0}
        self._answered = 0.0  # when the agent was given its last observation

    async def reset(self) -> Observation:
        owner = self._owner
        async with self._slot("starting"):
            self._runtime = await self._start()
            self._running.push_async_callback(self._runtime.close)
            await self._running.enter_async_context(self._slot("running"))
        may_submit = "finish" not in owner.style.tools
        limits = (owner.command_timeout_s, owner.soft_timeout_s)
        self._tools = AgentTools(self._runtime, *limits, may_submit=may_submit, file=self._task.file)
        self._answered = perf_counter()
        return self._initial

    async def step(self, message: Message) -> StepResult:
        """Makes the calls in order; after a message without a call the agent is asked to go on."""
        self._note_engine()
        answers: list[tuple[Message, ToolUse]] = []
        try:
            for call in message.tool_calls:
                if not self._tools.finished:
                    answers.append(await self._answer(call))
        finally:
            self._answered = perf_counter()
        messages = tuple(answer for answer, _ in answers) or (self._nudge(),)
        shown = tuple((each.role, each.content) for each in messages)
        self._stuck = self._loops.add((message.content, repr(message.tool_calls), shown))
        return StepResult(messages, self._tools.finished or self._stuck, tuple(use for _, use in answers))

    async def judge(self) -> Score:
        """The verdict on the patch, also if a limit ended the episode."""
        self._judged = True
        self._note_engine()
        score = (await self._verdict()).score
        agent = {"finished": float(self._tools.finished), "stuck": float(self._stuck), "nudges": float(self._nudges)}
        agent["engine_share"] = self._seconds["engine_s"] / self._seconds["running_s"]
        parts = {f"swe/{name}": value for name, value in {**agent, **self._seconds}.items()}
        return replace(score, parts={**score.parts, **parts})

    async def close(self) -> None:
        if not self._judged:
            self._judged = True
            self._owner.keep_place(self._task, self._place)
        await self._running.aclose()

    async def _start(self) -> Runtime:
        return await self._owner.runtimes.start(self._task)

    async def _answer(self, call: ToolCall) -> tuple[Message, ToolUse]:
        start, status = perf_counter(), ToolStatus.SUCCESS
        try:
            self._owner.toolbox.check(call)
            text = await TOOLS[call.name].call(call.arguments, getattr(self._tools, call.name))
        except ToolTimeoutError as error:
            text, status = str(error), ToolStatus.TIMEOUT
        except (ToolError, CommandFailedError) as error:
            text, status = f"Error: {error}", ToolStatus.USER_ERROR
        answer = Message("tool", shortened(text, MAX_CHARS), tool=call.name)
        return answer, ToolUse(call.name, status, perf_counter() - start)

    def _note_engine(self) -> None:
        """The agent has waited for the engine since its last observation."""
        self._seconds["engine_s"] += perf_counter() - self._answered

    def _nudge(self) -> Message:
        style = self._owner.style
        self._nudges += 1
        text = f"{style.nudge}\n{style.may_finish}" if self._nudges > NUDGES_UNTIL_FINISH else style.nudge
        return Message("user", text)

    async def _verdict(self) -> PatchVerdict:
        assert self._runtime is not None
        try:
            patch = await collect_patch(self._runtime, self._task)
        except CommandFailedError as error:  # the agent left no work tree that git can read
            return PatchVerdict(PatchOutcome.PATCH_FAILED, detail=str(error))
        except RuntimeLostError as error:
            self._owner.keep_place(self._task, self._place)
            raise EpisodeLostError(error.service, error.problem) from error
        finally:
            await self.close()
        if not patch.strip():  # needs no runtime, and no slot
            return await self._scored(patch)
        if self._owner.shared_verdicts is None:
            return await self._scored_in_slot(patch)
        return await self._owner.shared_verdicts.get(self._task, patch, lambda: self._scored_in_slot(patch))

    async def _scored_in_slot(self, patch: str) -> PatchVerdict:
        async with self._slot("scoring"):
            return await self._scored(patch)

    async def _scored(self, patch: str) -> PatchVerdict:
        """Raises RuntimeLostError if every runtime is lost, or the task is at fault."""
        for left in reversed(range(SCORINGS)):
            try:
                return await score_patch(self._owner.runtimes, self._task, patch)
            except TaskFaultError:
                raise
            except RuntimeLostError as error:
                if not left:
                    raise
                log.warning("%s: %s; the patch is scored again", self._task.id, error)
        raise AssertionError("the last attempt returns or raises")

    @asynccontextmanager
    async def _slot(self, stage: Stage) -> AsyncIterator[None]:
        """Hold a slot of a stage, and note for how long. The wait for it counts against no limit."""
        slots, start = self._owner.slots[stage], perf_counter()
        async with paused():
            await slots.acquire(self._place)
        held = perf_counter()
        self._seconds[f"{stage}_wait_s"] = held - start
        try:
            yield
        finally:
            self._seconds[f"{stage}_s"] = perf_counter() - held
            slots.release()


def specs_of(path: str, names: Sequence[str]) -> tuple[ToolSpec, ...]:
    """The tools of these names as a file describes them to the policy.

    Raises ConfigError if it lacks one, or has parameters that the tool does not take.
    """
    try:
        specs = {spec.name: spec for spec in read_tools(Path(path).read_text(encoding="utf-8"))}
    except (OSError, ValueError, DataError) as error:
        raise ConfigError(f"environment 'swe': tools={path} cannot be read ({error})") from error
    for name in names:
        if name not in specs:
            raise ConfigError(f"environment 'swe': tools={path} has {', '.join(specs)}, and no {name}")
        known = TOOLS[name].spec.parameters["properties"]
        if unknown := [each for each in specs[name].parameters.get("properties", {}) if each not in known]:
            raise ConfigError(f"environment 'swe': tools={path}: {name} takes {', '.join(known)}, and no {unknown[0]}")
    return tuple(specs[name] for name in names)


class SweFactory(EnvFactory):
    """Creates episodes, and owns the place where their runtimes start: this machine, or servers.

    urls:        servers of `toolrl runtime-server`; without them and `deployment`, runtimes start on this machine
    deployment:  of SWE-ReX, which runs the images of tasks (toolrl/swe/deployments.py)
    prepared:    folder with the repositories of published rows (docs/swe.md)
    style:       openhands (four tools), skyrl (OpenHands' three, by its names and parameters, for published agents),
                 mini (bash alone) or line (one edit of one line, for small policies)
    prompt:      a file with {question} that replaces the style's prompt
    tools:       a JSON file of function schemas, shown in place of those of the style's tools, as a published agent has
                 them; what the tools take stays
    command_timeout_s: of a command of the agent, which is then stopped
    soft_timeout_s: after which a command is reported as running; the agent may wait for it, or interrupt it
    max_starting, max_running, max_scoring: runtimes that start, agents at work, patches that are scored at a time
    share_verdicts: score equal patches of one task once; for tests whose outcome is always the same
    require_cgroup: refuse to start runtimes without cgroups; sandbox.isolation=strict sets it
    """

    def __init__(
        self,
        urls: Sequence[str] = (),
        deployment: Mapping[str, Any] | None = None,
        prepared: str = "",
        style: str = "openhands",
        prompt: str = "",
        tools: str = "",
        command_timeout_s: float = 120.0,
        soft_timeout_s: float | None = None,
        max_starting: int = 8,
        max_running: int = 64,
        max_scoring: int = 8,
        share_verdicts: bool = False,
        require_cgroup: bool = False,
    ) -> None:
        if style not in STYLES:
            raise ConfigError(f"environment 'swe': style={style!r} must be one of {', '.join(STYLES)}")
        limits = {"starting": max_starting, "running": max_running, "scoring": max_scoring}
        if too_few := [f"max_{stage}" for stage, limit in limits.items() if limit < 1]:
            raise ConfigError(f"environment 'swe': {too_few[0]} must be at least 1")
        if soft_timeout_s is not None and (deployment or not 0 < soft_timeout_s < command_timeout_s):
            raise ConfigError(
                f"environment 'swe': soft_timeout_s={soft_timeout_s:g} must be above 0 and below command_timeout_s, "
                "without `deployment` (servers of SWE-ReX have no soft time-outs)"
            )
        if not 0 < command_timeout_s < math.inf:
            raise ConfigError(f"environment 'swe': command_timeout_s={command_timeout_s:g} must be positive and finite")
        if prepared and not Path(prepared).is_dir():
            raise ConfigError(f"environment 'swe': prepared={prepared} is not a folder")
        if require_cgroup and (urls or deployment):
            raise ConfigError(
                "environment 'swe': sandbox.isolation=strict (require_cgroup) needs runtimes on this machine: no urls "
                "(toolrl runtime-server --require-cgroup), no deployment"
            )
        if prepared and deployment:
            raise ConfigError("environment 'swe': give prepared (folders) or deployment (images), not both")
        self.style, self.command_timeout_s, self.soft_timeout_s = STYLES[style], command_timeout_s, soft_timeout_s
        self.slots: dict[Stage, OrderedSlots] = {stage: OrderedSlots(limits[stage]) for stage in get_args(Stage)}
        self.shared_verdicts = SharedVerdicts() if share_verdicts else None
        self._places = itertools.count()
        self._kept: defaultdict[str, list[int]] = defaultdict(list)  # places of episodes that start again, by task
        self.toolbox = Toolbox(map(self._spec, self.style.tools))
        self.shown_tools = specs_of(tools, self.style.tools) if tools else tuple(self.toolbox.specs.values())
        self._prompt: PromptTemplate = load_template(prompt or str(PROMPTS / f"{self.style.prompt}.txt"))
        self._prepared, self._runs_images = Path(prepared) if prepared else None, bool(deployment)
        self.runtimes = runtimes_at(urls, deployment, require_cgroup=require_cgroup)

    def __call__(self, task: Task) -> SweEnv:
        return SweEnv(self, task)

    def _spec(self, name: str) -> ToolSpec:
        spec = TOOLS[name].spec
        if name not in ("bash", "execute_bash") or self.soft_timeout_s is None:
            return spec
        waiting = f"After {self.soft_timeout_s:g} s a command is reported as running. {WAIT_OR_INTERRUPT}"
        return replace(spec, description=f"{spec.description} {waiting}")

    def take_place(self, task: SweTask) -> int:
        """The place of a new episode, in the order of its group, or of the one that it repeats."""
        kept = self._kept.pop(task.id, [])
        place = kept.pop(0) if kept else next(self._places)
        if kept:
            self._kept[task.id] = kept
        return place

    def keep_place(self, task: SweTask, place: int) -> None:
        self._kept[task.id].append(place)

    def swe_task(self, task: Task) -> SweTask:
        """Raises DataError for a row that is none, or whose runtime is missing."""
        check_environment(task.extra, self._prepared)
        return read_swe_task(task.extra, self._prepared, remote=self._runs_images)

    def check_task(self, task: Task) -> None:
        swe = self.swe_task(task)
        for field, path in (("repository", swe.repository and swe.repository.path), ("environment", swe.environment)):
            if path and not Path(path).exists():
                raise DataError(f"there is no {path}", "a path on this machine", field=field)
        if "edit_line" in self.style.tools and not swe.file:
            raise DataError("is missing", "the path of the file that `edit_line` edits", field="file")
        if self._runs_images and not swe.image:
            raise DataError("names no image, which the option `deployment` needs", "an image", field="docker_image")

    def initial_observation(self, task: Task) -> Observation:
        *before, last = task.prompt
        asked = replace(last, content=self._prompt.fill(last.content, ""))
        return Observation((*before, asked), self.shown_tools)

    async def check_services(self) -> None:
        await check_services([self.runtimes])

    async def close(self) -> None:
        await self.runtimes.close()
