"""What a run records: files survive kills and resumes, the display fits its place, and numbers add up."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import ROOT
from tests.support.metric_names import known
from toolrl.trackers.services import MlflowTracker, SwanLabTracker, TrackioTracker, WandbTracker
from verl.config.load import load_config
from verl.config.schema import LOGGERS
from verl.errors import ConfigError, DataError
from verl.tracking import flops, names
from verl.tracking.console import Display, before_after_table, duration, sparkline
from verl.tracking.jsonl import JsonlTracker, read_jsonl
from verl.tracking.progress import Progress
from verl.tracking.tensorboard import TensorBoardTracker
from verl.tracking.timers import PhaseTimer
from verl.tracking.tracker import DISPLAYED, TRACKERS, RunInfo, Tracker, Trackers, build_trackers
from verl.tracking.transcripts import Transcripts, sample_rows
from verl.types import (
    Completion,
    FinishReason,
    Message,
    Outcome,
    Score,
    StopReason,
    Task,
    ToolStatus,
    ToolUse,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

METRICS = {"reward/total": 1.25, "reward/format": 0.75, "reward/zero_variance_groups": 0.5}
METRICS |= {"val/mini test/total": 2.0, "perf/tokens_per_s": 512.4, "time/step_s": 8.13}
METRICS |= {"time/rollout_s": 5.0, "time/rollout_cpu_s": 1.0, "time/update_s": 3.13}


@pytest.fixture
def run(tmp_path: Path) -> RunInfo:
    return RunInfo(tmp_path / "run")


def steps_of(path: Path) -> list[int]:
    return [row["step"] for row in read_jsonl(path)]


def test_jsonl_has_one_line_a_step_and_no_number_json_lacks(run: RunInfo) -> None:
    tracker = JsonlTracker(run)
    tracker.log(0, {"val/a/total": 1.5})
    tracker.log(1, {"actor/grad_norm": math.nan, "actor/loss": math.inf})
    lines = tracker.path.read_text().splitlines()
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert (first["step"], first["val/a/total"]) == (0, 1.5) and first["time"] > 1e9
    assert second["actor/grad_norm"] is None and second["actor/loss"] is None


def test_a_killed_writer_loses_no_whole_line_and_a_torn_one_goes_at_resume(run: RunInfo) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from verl.tracking.jsonl import JsonlTracker\n"
        "from verl.tracking.tracker import RunInfo\n"
        "tracker = JsonlTracker(RunInfo(Path(sys.argv[1])))\n"
        "for step in range(1, 6): tracker.log(step, {'reward/é/total': 1.0})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program, run.folder], cwd=ROOT).returncode == -9
    tracker = JsonlTracker(run)
    assert steps_of(tracker.path) == [1, 2, 3, 4, 5]
    with tracker.path.open("ab") as file:
        file.write('{"step": 6, "reward/é'.encode()[:-1])  # through the middle of a character
    tracker.restore(6, {})
    tracker.log(7, {})
    assert steps_of(tracker.path) == [1, 2, 3, 4, 5, 7]
    tracker.restore(3, {})
    tracker.log(4, {})
    assert steps_of(tracker.path) == [1, 2, 3, 4]
    tracker.restore(-1, {})
    assert steps_of(tracker.path) == []
    assert [path.name for path in run.folder.iterdir()] == ["metrics.jsonl"]


def test_an_unwritable_location_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"metrics\.jsonl: cannot be written .*Choose another path"):
        JsonlTracker(RunInfo(tmp_path / "file")).log(1, {})


@pytest.mark.parametrize(("make", "name"), [(JsonlTracker, "metrics.jsonl"), (TensorBoardTracker, "tensorboard")])
def test_a_full_disk_is_one_error_with_the_path(
    make: Callable[[RunInfo], Tracker], name: str, run: RunInfo, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker = make(run)
    tracker.log(1, {"reward/total": 1.0})
    file = next(path for path in run.folder.rglob("*") if path.is_file())
    whole = file.read_bytes()
    file.unlink()
    file.symlink_to("/dev/full")
    for _ in range(2):
        with pytest.raises(DataError, match=f"no space left on {re.escape(str(run.folder / name))}"):
            tracker.log(2, {"reward/total": 1.0})
    file.unlink()
    file.write_bytes(whole)
    tracker.log(2, {"reward/total": 2.0})  # of this tracker nothing is broken
    tracker.close()
    assert file.read_bytes().startswith(whole) and len(file.read_bytes()) > len(whole)
    assert capfd.readouterr() == ("", "")


def test_tensorboard_reads_what_was_written_and_forgets_what_a_resume_repeats(run: RunInfo) -> None:
    first = TensorBoardTracker(run)
    first.restore(-1, {})
    for step in (1, 2, 3):
        first.log(step, {"reward/total": step / 2, "actor/loss": 0.25})
    resumed = TensorBoardTracker(run)  # the first was never closed, as after a kill
    resumed.restore(2, {})
    resumed.log(3, {"reward/total": 9.0})
    resumed.close()
    first.close()
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/total")] == [(1, 0.5), (2, 1.0), (3, 9.0)]
    assert [event.step for event in events.Scalars("actor/loss")] == [1, 2]


def test_tracking_imports_neither_torch_nor_tensorflow(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('tensorflow is imported where it is installed')")
    modules = sorted(path.stem for path in (ROOT / "verl" / "tracking").glob("[!_]*.py"))
    program = (
        f"import sys, {', '.join(f'verl.tracking.{module}' for module in modules)}\n"
        "unwanted = {'torch', 'transformers', 'wandb', 'trackio', 'mlflow', 'swanlab'}\n"
        "sys.exit(', '.join(unwanted & set(sys.modules)) or 0)"
    )
    paths = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", program], env=paths, capture_output=True, text=True)
    assert done.stderr.strip() == "" and done.returncode == 0


class FakeWandb:
    """Remembers how it was called."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.logged: list[dict[str, float]] = []
        self.finished = 0

    def init(self, **settings: Any) -> Any:
        assert settings["resume"] == "allow" and settings["project"] == "toolrl"
        self.ids.append(settings["id"])
        return SimpleNamespace(log=self.logged.append, finish=self._finish, define_metric=lambda *_, **__: None)

    def _finish(self) -> None:
        self.finished += 1


def test_wandb_continues_its_run_on_resume_and_not_at_a_start_over(
    run: RunInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]

    def session(step: int, state: dict[str, Any], run: RunInfo = run) -> dict[str, Any]:
        trackers = build_trackers(["wandb"], run)
        trackers.restore(step, state)
        trackers.log(step + 1, {"actor/lr": 0.5})
        trackers.close()
        return trackers.state()

    state = session(0, {})
    session(1, state)
    session(1, {})  # known from the folder
    session(1, state, RunInfo(run.folder / "copy"))  # known from the checkpoint
    assert len(set(fake.ids)) == 1 and len(fake.ids) == fake.finished == 4
    assert fake.logged[1] == {"step": 2, "actor/lr": 0.5}
    session(-1, {})
    assert fake.ids[-1] != fake.ids[0]


@pytest.mark.parametrize(
    ("name", "install"),
    [("wandb", "wandb"), ("trackio", "trackio"), ("mlflow", "mlflow-skinny"), ("swanlab", "swanlab")],
)
def test_a_missing_package_is_named_as_on_the_index(
    name: str, install: str, run: RunInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"names {name}, which cannot be imported .*: pip install {install};"):
        build_trackers([name], run)


def test_every_package_has_an_extra_with_bounds() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["dynamic"][
        "optional-dependencies"
    ]
    for each in (WandbTracker, TrackioTracker, MlflowTracker, SwanLabTracker):
        (file,) = extras[each.package]["file"]
        (line,) = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
        assert re.fullmatch(rf"{each.install or each.package}>=[\d.]+,<[\d.]+", line)


def test_the_settings_know_every_tracker(run: RunInfo) -> None:
    assert set(LOGGERS) == {*DISPLAYED, *TRACKERS}
    with pytest.raises(ConfigError, match="did you mean 'wandb'"):
        build_trackers(["wandbb"], run)


OWN = """
from verl.tracking.tracker import Tracker

class Lines(Tracker):
    def __init__(self, run):
        self.path = run.folder / "lines.txt"
        self.path.parent.mkdir(parents=True)

    def log(self, step, metrics):
        with self.path.open("a") as file:
            print(step, metrics["actor/lr"], file=file)

    def log_rollouts(self, step, rows):
        raise RuntimeError("no table here")

class Bare:
    def __init__(self, run):
        pass
    def log(self, step, metrics):
        pass

class Unready(Tracker):
    def __init__(self, run):
        raise RuntimeError("no key")
"""


def test_a_users_tracker_is_taken_from_a_file_and_its_failure_ends_it_alone(
    run: RunInfo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    for name, reason in (
        ("Bare", "has no log_rollouts, close, state, restore; inherit from verl.tracking.tracker.Tracker"),
        ("Unready", r"cannot start \(RuntimeError: no key\)"),
        ("Missing", "has no 'Missing'"),
    ):
        with pytest.raises(ConfigError, match=reason):
            build_trackers([f"{file}:{name}"], run)
    trackers = build_trackers([f"{file}:Lines"], run)
    trackers.restore(-1, {})
    trackers.log(1, {"actor/lr": 0.5})
    assert not caplog.records
    trackers.log_rollouts(1, [])  # nothing to show
    trackers.log(2, {"actor/lr": 0.25})
    for _ in range(2):
        trackers.log_rollouts(2, [{"task": "a"}])
    trackers.log(3, {"actor/lr": 0.125})
    trackers.close()
    assert (run.folder / "lines.txt").read_text() == "1 0.5\n2 0.25\n"
    (warning,) = caplog.messages
    assert "mine.py:Lines has failed and is off; the run goes on (RuntimeError: no table here)" in warning
    assert steps_of(run.folder / "metrics.jsonl") == [1, 2, 3]


class Failing(Tracker):
    def close(self) -> None:
        raise OSError("gone")


def test_all_trackers_receive_metrics_and_are_closed_though_one_fails(run: RunInfo) -> None:
    members = build_trackers(["console"], run, Display(3, Console(file=io.StringIO()))).members
    assert [type(member).__name__ for member in members] == ["Display", "JsonlTracker", "TensorBoardTracker"]
    trackers = Trackers((*members, Failing()))
    trackers.log(1, {"actor/lr": 1})
    with pytest.raises(OSError, match="gone"):
        trackers.close()
    assert steps_of(run.folder / "metrics.jsonl") == [1]


def group(response: str) -> TrajectoryGroup:
    task = Task("train.parquet#17", (Message("system", "be good"), Message("user", "1+1?")), "two [gold]", "sums")
    answers = (Message("tool", "2"),)
    turns = (
        Turn((1, 2), Completion((3, 4), (-0.1, -0.2), FinishReason.STOP, 5), Message("assistant", response), answers),
        Turn((5,), Completion((6,), (-0.3,), FinishReason.STOP, 5), Message("assistant", "two")),
    )
    uses = (ToolUse("calculator", ToolStatus.SUCCESS, 0.25),)
    both = tuple(Trajectory(task, index, turns, StopReason.STOP, Outcome.SCORED, uses) for index in range(2))
    scores = (Score(1.5, {"format": 1.0, "correctness": 0.5}), Score(-3.0, {"format": 0.0, "correctness": -3.0}))
    return TrajectoryGroup(task, both, scores, (1.0, -1.0))


def test_transcripts_come_back_as_they_were(tmp_path: Path) -> None:
    response = "line\nbreak \u2028 é \ud800 [bold]\x1b[31m"  # a lone surrogate, markup and an escape sequence among it
    path = Transcripts(tmp_path).write(12, [group(response), group("b" * 50)])
    assert path == tmp_path / "transcripts" / "step-000012.jsonl" and list(path.parent.iterdir()) == [path]
    rows = read_jsonl(path)
    assert [row["index"] for row in rows] == [0, 1, 0, 1]
    assert rows[1] == {
        "step": 12,
        "task_id": "train.parquet#17",
        "data_source": "sums",
        "index": 1,
        "group": 0,
        "prompt": [{"role": "system", "content": "be good"}, {"role": "user", "content": "1+1?"}],
        "responses": [
            {"role": "assistant", "content": response},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "two"},
        ],
        "answer": "two [gold]",
        "score": {"total": -3.0, "parts": {"format": 0.0, "correctness": -3.0}},
        "reward": -1.0,
        "stop_reason": "stop",
        "outcome": "scored",
        "num_tokens": 3,
        "turn_rewards": [None, None],
        "tool_uses": [{"name": "calculator", "status": "success", "seconds": 0.25}],
    }


def test_rows_for_tables_are_few_and_plain() -> None:
    rows = sample_rows([group("bad \ud800"), TrajectoryGroup(group("").task, (), (), ()), *[group("good")] * 9])
    assert len(rows) == 8 and json.dumps(rows).isascii()
    assert rows[0] == {
        "task": "train.parquet#17",
        "prompt": "system: be good\n\nuser: 1+1?",
        "response": "assistant: bad ?\n\ntool: 2\n\nassistant: two",
        "answer": "two [gold]",
        "score": 1.5,
    }


def test_the_prompt_is_the_environments_where_it_writes_one(tmp_path: Path) -> None:
    known = group("a")
    opened = replace(known.trajectories[0], opening=(Message("user", "You wake up in a cave."),))
    groups = [replace(known, trajectories=(opened, known.trajectories[1]))]
    path = Transcripts(tmp_path).write(1, groups)
    assert [[each["content"] for each in row["prompt"]] for row in read_jsonl(path)] == [
        ["You wake up in a cave."], ["be good", "1+1?"]
    ]  # fmt: skip


def test_transcripts_of_later_steps_go_at_resume(tmp_path: Path) -> None:
    transcripts = Transcripts(tmp_path)
    for step in (1, 2, 3):
        transcripts.write(step, [])
        transcripts.write_validation(step, [{"step": step}])
    transcripts.truncate_after(1)
    assert [path.name for path in transcripts.validation.iterdir()] == ["step-000001.jsonl"]
    assert [path.name for path in transcripts.folder.iterdir()] == ["step-000001.jsonl"]


def test_without_a_terminal_every_line_has_a_date_and_no_width() -> None:
    console = Console(file=io.StringIO(), width=40)
    with_display(Display(4, console))
    lines = undated(console)
    assert lines[:2] == ["start: data", "start: ranks"]
    assert re.fullmatch(r"started in 0 s: data 0\.\d s, ranks 0\.\d s", lines[2])
    facts = "reward 1.250 (format 0.750), validation mini test 2.000, speed 512 tokens/s"
    assert lines[3] == "step 0/4, validation mini test 0.500" and len(lines) == 5
    times = re.escape("took 8.1 s (rollout 5.0 s, update 3.1 s), left ") + r"\d+ s"
    assert re.fullmatch(re.escape(f"step 1/4, {facts}, ") + times, lines[4])


def undated(console: Console) -> list[str]:
    """The printed lines without their dates."""
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    found = [re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (.*)", line) for line in lines]
    assert all(found), lines
    return [each[1] for each in found if each]


def test_a_long_rollout_is_a_line_every_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves by 20 s with every response: the second and the fourth are reported."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    console, progress = Console(file=io.StringIO(), width=20), Progress(clock=lambda: clock.now)
    display = Display(9, console)
    display.watch(progress)
    display.started()
    progress.ask(8)
    progress.finish(5)  # before the rollout: seven of eight are in flight when it starts
    display.phase("rollout")
    progress.ask(1)
    for tokens in (100, 300, 0, 400):
        clock.now += 20.0
        progress.finish(tokens)
    first, second = undated(console)
    assert first == "step 1/9, rollout (40 s): 2 of 8 responses, 400 tokens, 10 tokens/s"
    assert second == "step 1/9, rollout (80 s): 4 of 8 responses, 800 tokens, 10 tokens/s"


def test_a_rollout_of_which_no_response_is_done_shows_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is looked at every 10 s. It had written 500 tokens before the rollout, of which 5 of a whole response;
    it writes 20 tokens/s, and one response of 700 tokens ends."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    console, progress = Console(file=io.StringIO(), width=20), Progress(clock=lambda: clock.now)
    display = Display(9, console)
    display.watch(progress)
    display.started()
    progress.ask(8)
    progress.finish(5)
    progress.write(500)
    display.phase("rollout")
    for written in (700, 900, 1100, 1300, 1290, 1700):  # one was counted twice at 40 s
        clock.now += 10.0
        progress.write(written)
    progress.finish(700)
    first, second = undated(console)
    assert first == "step 1/9, rollout (30 s): 0 of 7 responses, 600 tokens, 20 tokens/s"
    assert second == "step 1/9, rollout (60 s): 0 of 7 responses, 1200 tokens, 20 tokens/s"
    assert str(progress) == "1 of 7 responses, 1200 tokens, 20 tokens/s"


def test_a_terminal_shows_the_start_and_the_responses() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, _environ={"TERM": "xterm"})
    display, progress = Display(None, console), Progress()
    display.watch(progress)
    shown = []
    for name in ("Ray", "ranks", "rollout"):
        display.phase(name)
        progress.ask(4)
        with console.capture() as captured:
            console.print(display)
        shown.append(" ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", captured.get()).split()))
        if name == "ranks":
            display.started()
    display.close()
    assert "now Ray (0 s): 0 of 4 responses, 0 tokens, 0 tokens/s" in shown[0]
    assert re.search(r"start Ray \d\.\d s now ranks \(0 s\)", shown[1])
    assert "now rollout (0 s): 0 of 12 responses" in shown[2] and "start" not in shown[2]


def test_on_a_terminal_the_phase_is_live() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, _environ={"TERM": "xterm"})
    with_display(Display(4, console))
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    assert re.search(r"now +rollout \(\d+ s\)", shown) and "1.250 (format 0.750)" in shown
    assert re.search(r"step +━+.*1/4, 3 left, \d+ s", shown)


def test_the_live_view_of_a_long_run_fits_a_small_screen() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, _environ={"TERM": "xterm"})
    display = Display(1000, console)
    times = {"time/rollout_s": 4.04, "time/rollout_cpu_s": 1.0, "time/update_s": 3.5, "time/overhead_s": 0.5}
    for step in range(1, 501):
        display.log(step, {**METRICS, **times, "reward/total": step / 500})
    console.print(display)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue()).splitlines()  # type: ignore[attr-defined]
    assert len(lines) <= 10 and max(map(len, lines)) <= 80
    shown = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    assert shown["phases"] == "rollout 4.0 s, update 3.5 s, overhead 0.5 s"
    assert len(shown["rewards"]) == 40 and sorted(shown["rewards"]) == list(shown["rewards"])
    assert re.fullmatch(r"━+╺?━* 500/1000, 500 left, \d+ s", shown["step"])


def test_a_sparkline_has_a_character_per_value_or_per_mean() -> None:
    assert sparkline([0.0, 1.0, 0.5, 0.25]) == "▁█▅▃"  # 7 * 0.5 = 3.5 rounds to 4, 7 * 0.25 = 1.75 to 2
    assert sparkline([0.0, 2.0, 4.0, 6.0], width=2) == "▁█"
    assert sparkline([3.0, 3.0]) == "▁▁"


def test_a_reward_that_is_not_finite_leaves_the_others_in_the_sparkline() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, _environ={"TERM": "xterm"})
    display = Display(9, console)
    for step, reward in enumerate((math.nan, 1.0, 2.0, math.inf), 1):
        display.log(step, {"reward/total": reward})
    console.print(display)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())  # type: ignore[attr-defined]
    assert re.search("^rewards +▁█ *$", shown, re.MULTILINE)


def test_a_rollout_of_every_step_is_printed_on_request_cut_and_harmless() -> None:
    printed = {}
    for logger in ("[console]", "[console,rollouts]"):
        console = Console(file=io.StringIO(), width=100)
        asked = "rollouts" in load_config([f"trainer.logger={logger}"]).trainer.logger
        for response in ("[red]\x1b[31m", "b" * 700):
            Display(9, console, asked).log_rollouts(1, sample_rows([group(response), group("of another prompt")]))
        printed[logger] = console.file.getvalue()  # type: ignore[attr-defined]
    assert printed["[console]"] == ""
    shown = printed["[console,rollouts]"]
    assert shown.count("step 1, train.parquet#17: 1.5") == 2 and "another prompt" not in shown
    assert "[red]" in shown and "\x1b" not in shown and "two [gold]" in shown
    assert "more characters]" in shown and 300 <= shown.count("b") < 700


def with_display(display: Display) -> None:
    display.phase("data")
    display.phase("ranks")
    display.restore(-1, {})
    display.started()
    display.phase("validation")
    display.log(0, {"val/mini test/total": 0.5})
    display.phase("rollout")
    display.log(1, METRICS)
    display.close()
    display.close()


@pytest.mark.parametrize(("seconds", "text"), [(45.4, "45 s"), (750, "12 min"), (3 * 3600 + 5 * 60, "3 h 05 min")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_table_at_the_end() -> None:
    before = {"test": {"total": 0.5, "exact": 0.25}}
    sources = {"one/total": 3.0, "one/exact": 0.9, "two/total": 1.5}
    after = {"test": {"total": 2.0, "exact": 0.75, **sources}, "new tools": {"total": 1.0}}
    console = Console(file=io.StringIO(), width=80)
    console.print(before_after_table(before, after))
    cells = [re.findall(r"[^│┃ ]+", line) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert ["set", "metric", "before", "after", "change"] in cells
    assert ["test", "total", "0.500", "2.000", "+1.500"] in cells
    assert ["exact", "0.250", "0.750", "+0.500"] in cells
    assert ["one/exact", "0.900"] in cells and ["two/total", "1.500"] in cells
    assert ["one/total", "3.000"] not in cells  # of a source with its share of exact ones
    assert ["new", "tools", "total", "1.000"] in cells


def ticking(*times: float) -> Callable[[], float]:
    return iter(times).__next__


def test_phases_and_overhead_add_up() -> None:
    phases: list[str] = []
    timer = PhaseTimer(
        phases.append, wall=ticking(0, 100, 101, 104, 104.5, 106.5, 107, 108, 110), cpu=ticking(*range(6))
    )
    timer.start()
    with timer.phase("rollout"):
        pass
    with pytest.raises(ZeroDivisionError), timer.phase("update"):
        _ = 1 / 0
    with timer.phase("rollout"):
        pass
    metrics = timer.metrics()
    assert phases == ["rollout", "update", "rollout"]
    assert metrics == {
        "time/rollout_s": 4.0,
        "time/update_s": 2.0,
        "time/rollout_cpu_s": 2.0,
        "time/update_cpu_s": 1.0,
        "time/step_s": 10.0,
        "time/overhead_s": 4.0,
    }
    assert all(known(name) for name in metrics)


def test_flops_by_hand() -> None:
    shape = flops.DecoderShape(parameters=100, layers=2, hidden=8, head_parameters=50)
    # 3 tokens alone: 2*100*3 + 4*2*8*(1+2+3); 2 tokens behind 3: 2*100*2 + 4*2*8*(4+5); logits at 2: 2*50*2
    assert flops.forward_flops(shape, [(3, 0), (2, 3)], num_logits=2) == (600 + 384) + (400 + 576) + 200
    selecting = replace(shape, selecting=30)
    assert flops.forward_flops(selecting, [(3, 0), (2, 3)], 2) == (420 + 384) + (280 + 576) + 200 + 120
    whole, split = flops.forward_flops(shape, [(5, 0)]), flops.forward_flops(shape, [(3, 0), (2, 3)])
    assert whole == split


def test_mfu_is_reported_where_the_peak_is_known() -> None:
    assert flops.peak_flops("NVIDIA H100 PCIe") == 756e12 and flops.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert flops.peak_flops("NVIDIA A100-SXM4-80GB") == 312e12 and flops.peak_flops("anything") is None
    assert flops.peak_flops(None) is None and flops.peak_flops("cpu") is None
    assert flops.mfu(1e15, 2.0, 1e15, num_devices=2) == {"perf/mfu": 0.25}
    assert flops.mfu(1e15, 2.0, None) == {}


def test_every_name_in_the_table_is_well_formed() -> None:
    listed = [metric.name for metric in names.METRICS]
    assert len(set(listed)) == len(listed)
    groups = "reward|rollout|response_length|filter|staleness|tools|actor|critic|engine|correction|collapse|kl|val|eval"
    for metric in names.METRICS:
        assert re.fullmatch(
            rf"({groups}|agent|dpo|segments|time|perf|memory)(/(<[a-z_]+>|[a-z_]+)(_[a-z]+)*)+", metric.name
        ), metric
        assert metric.unit and metric.meaning and "|" not in metric.unit + metric.meaning
        assert known(re.sub("<[a-z_]+>", "anything", metric.name)), metric


@pytest.mark.parametrize("name", [*METRICS, "reward/openai/gsm8k/total", "time/weight_sync_s", "actor/ppo_kl"])
def test_known_names(name: str) -> None:
    assert known(name)


@pytest.mark.parametrize(
    "name", ["reward", "actor/typo", "time/rollout", "val/total", "reward/<part>", "", "perf/mfu2"]
)
def test_unknown_names(name: str) -> None:
    assert not known(name)


def test_tensorboard_shows_rollouts_as_a_table_of_text(run: RunInfo) -> None:
    from tensorboard.plugins.text.text_plugin import text_array_to_html
    from tensorboard.util.tensor_util import make_ndarray

    tracker = TensorBoardTracker(run)
    tracker.log_rollouts(3, [{"task": "a#1", "response": "<img src=x onerror=alert(1)>", "score": 1.5}])
    tracker.close()
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("rollouts")
    cells = make_ndarray(event.tensor_proto)
    assert event.step == 3 and [cell.decode() for cell in cells[0]] == ["task", "response", "score"]
    assert [cell.decode() for cell in cells[1]] == ["a#1", "<img src=x onerror=alert(1)>", "1.5"]
    page = text_array_to_html(cells, enable_markdown=True)
    assert (
        "<table>" in page and "<td>" in page and "onerror=alert" not in page.replace("&lt;img src=x onerror=alert", "")
    )
