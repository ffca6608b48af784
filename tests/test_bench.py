"""The benchmarks' own arithmetic, the page they write, and the cheapest of them end to end."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.common import Result, Side, alternate, median_ratio
from bench.results import BEGIN, END, scoreboard
from tests.conftest import ROOT
from tests.support.every import every
from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from verl.rollout.engine import Sampling
from verl.types import Completion, FinishReason, Score


def result(ratio: float, **fields: Any) -> Result:
    return Result(3, "some row", ratio, 2.0, {"CPU s": 1.0}, {"CPU s": ratio}, **fields)


def test_a_target_is_met_with_its_limits_alone() -> None:
    assert result(2.0).met
    assert not result(1.9).met
    assert result(1.9, lower_is_better=True).met
    assert not result(2.1, lower_is_better=True).met
    assert result(2.5, limits={"time": (1.1, 1.15)}).met
    assert not result(2.5, limits={"time": (1.2, 1.15)}).met


def test_sides_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    sides = {"ours": lambda: calls.append("ours"), "theirs": lambda: calls.append("theirs")}
    counter = iter(range(100))

    def measure(work: Any) -> int:
        work()
        return next(counter)

    assert alternate(sides, 2, measure) == {"ours": [2, 4], "theirs": [3, 5]}
    assert calls == ["ours", "theirs"] * 3


def test_the_ratio_is_taken_round_by_round() -> None:
    assert median_ratio([2.0, 40.0, 6.0], [1.0, 10.0, 2.0]) == 3.0


def test_a_failing_side_is_named_with_the_end_of_its_output() -> None:
    with (
        pytest.raises(SystemExit, match="no such thing"),
        Side([sys.executable, "-c", "raise OSError('no such thing')"]) as side,
    ):
        side.ask()


def write_page(tmp_path: Path, lines: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    (tmp_path / "lines.jsonl").write_text("noise\n" + "".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "bench/results.py", tmp_path / "lines.jsonl", "--page", tmp_path / "page.md"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_page_keeps_what_is_written_by_hand(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"above\n{BEGIN}\nan old table\n{END}\nbelow\n")
    seven = {"row": 7, "name": "weight sync", "ratio": 0.3, "target": 0.25}
    share = {"row": 2, "name": "share", "ratio": 0.01, "target": 0.03, "lower_is_better": True}
    first = share | {"ratio": 0.5}
    assert write_page(tmp_path, [seven, first, share]).returncode == 0
    text = page.read_text()
    assert text.startswith(f"above\n{BEGIN}\n")
    assert text.endswith(f"{END}\nbelow\n")
    assert "old table" not in text
    rows = [line for line in text.splitlines() if line.startswith(("| 2", "| 7"))]
    assert "- **" not in text  # no side has values
    assert [row.split(" | ")[2:5] for row in rows] == [["**0.01**", "<= 0.03", "yes"], ["**0.3**", ">= 0.25", "yes"]]


def test_values_limits_and_notes_are_listed_below_the_table() -> None:
    line = {"row": 2, "name": "a|b", "ratio": 2.0, "target": 1.0, "ours": {"CPU s": 1234.5}, "theirs": 7}
    assert "| 2 | a\\|b |" in scoreboard([line])
    assert "\n\n- **2** a|b.\n  Ours: CPU s 1,234.\n  Theirs: 7.\n\n(a)" in scoreboard([line])
    more = {"limits": {"x": (0.1, 0.2)}, "note": "why"}
    assert "  Limits: x 0.1, <= 0.2.\n  Note: why.\n" in scoreboard([line | more])


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("by hand\n")
    done = write_page(tmp_path, [{"row": 7, "name": "weight sync", "ratio": 0.3, "target": 0.25}])
    assert done.returncode == 1
    assert BEGIN in done.stderr
    assert (tmp_path / "page.md").read_text() == "by hand\n"


def test_nothing_measured_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"{BEGIN}\nthe table\n{END}\n")
    assert write_page(tmp_path, []).returncode == 1
    assert "the table" in (tmp_path / "page.md").read_text()


def test_the_page_of_the_project_has_its_markers() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text()
    assert page.index(BEGIN) < page.index(END)


def run_bench(script: str, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    done = subprocess.run([sys.executable, f"bench/{script}", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.long
def test_the_cards_that_hold_a_model_are_those_of_the_page() -> None:
    command = [sys.executable, "bench/lora_cards.py", "--models", "0.5B,7B"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    page = (ROOT / "docs/lora.md").read_text().splitlines()
    assert len(lines := done.stdout.splitlines()) == 8 and all(line in page for line in lines)


@pytest.mark.slow
def test_shared_prompts_are_measured_and_their_gradients_compared() -> None:
    argv = ("--model", "dataset/mini/model", "--prompt", "80", "--response", "40", "--n", "2", "--rounds", "1")
    (line,), table = run_bench("shared_prompt.py", *argv)
    assert line["row"] == 3
    assert line["ratio"] > 0
    ((gap, bound),) = line["limits"].values()
    assert 0 < gap < bound
    assert line["versions"]["torch"]
    assert "CPU s" in table


@pytest.mark.slow
def test_a_padded_batch_trains_the_same() -> None:
    argv = ("--model", "dataset/mini/model", "--data", "dataset/mini/test.parquet", "--rows", "3", "--rounds", "1")
    (line,), _ = run_bench("padding.py", *argv)
    assert line["theirs"]["tokens"] > line["ours"]["tokens"]
    assert 0 < line["limits"]["relative difference of the gradients"][0] < 1e-5  # equal if padding were left out


@pytest.mark.long
def test_both_losses_are_the_same_loss() -> None:
    sizes = ["--tokens", "1024", "--vocabulary", "8192", "--hidden", "16"]  # enough to be seen in resident memory
    lines, _ = run_bench("loss_memory.py", *sizes, "--rounds", "1")
    assert [line["row"] for line in lines] == [5, 5]
    for line in lines:
        assert line["ours"]["loss"] == pytest.approx(line["theirs"]["loss"], rel=1e-4)


@pytest.mark.long
def test_the_controllers_thread_is_measured_without_what_it_simulates() -> None:
    sizes = ("--sizes", "4x2,16x4", "--ranks", "2", "--tokens", "40,20", "--rounds", "1")
    (line,), _ = run_bench("controller_scale.py", *sizes)
    names = [f"{size} on 2 ranks: us" for size in ("4 x 2", "16 x 4")]
    assert list(line["ours"]) == names and line["ratio"] == line["ours"][names[-1]] > 0
    assert set(line["limits"]) == {"bytes per token and column", "largest / smallest size on 2 ranks"}


@pytest.mark.long
def test_every_request_is_measured() -> None:
    sizes = ("--sessions", "2", "--requests", "2", "--rounds", "1", "--tokens", "8")
    (line,), _ = run_bench("gateway.py", *sizes, "--model", "dataset/mini/model")
    assert line["row"] == 18 and line["ratio"] == line["ours"]["gateway or proxy alone"] > 0
    assert all(value > 0 for value in line["theirs"].values())


@pytest.mark.long
def test_the_cost_of_a_gpu_step_is_counted(tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    command = [sys.executable, "bench/gpu_cost.py", "--models", "0.5B", "--gpus", "h200", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    step = found["steps"]["0.5B, h200"]
    assert (
        step["ToolRL"]["bound"] < step["ToolRL"]["seconds"] < step["peer"]["seconds"] < step["peer, padded"]["seconds"]
    )
    totals = [sum(phases.values()) for phases in found["choices"].values()]
    assert all(one >= other - 1e-9 for one, other in pairwise(totals)), "no choice costs time"
    counted, faster_host, *slower, together = found["range"].values()
    assert faster_host < counted < min(slower) and max(slower) < together
    assert f"| as counted | {counted:.1f} |" in done.stdout
    assert f"| 0.5B, h200 | 1 | {step['one update']['bound']:.1f} |" in done.stdout


@pytest.mark.long
def test_vllms_own_python_is_measured_by_stage(tmp_path: Path) -> None:
    out = tmp_path / "host.json"
    command = [sys.executable, "bench/engine_host.py", "--sequences", "4,8", "--steps", "3", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["us"]
    for row in found.values():
        assert all(value > 0 for value in row.values())
        assert row["core"] == pytest.approx(row["schedule"] + row["update"] + row["encode"])
    assert done.stdout.splitlines()[-1].startswith(f"| 8 | {found['8']['schedule']:.1f} |")


def test_without_the_model_a_row_is_skipped() -> None:
    lines, output = run_bench("step.py", "--model", "no/such/folder")
    assert lines == []
    assert "prepare_smollm2" in output


def test_a_scripted_response_continues_where_it_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    pipeline = importlib.import_module("pipeline")
    script = pipeline.Script(call=(1, 2, 3), answer=(1, 9))
    assert script((7,), 0) == (1, 2, 3) and script((7, 1, 2), 0) == (3,)
    asked = (7, *(1, 2, 3, 8) * pipeline.CALLS)
    assert script(asked[:-4], 0) == (1, 2, 3) and script(asked, 0) == (1, 9) and script((*asked, 1), 0) == (9,)

    async def responses() -> list[Completion]:
        engine = pipeline.PacedEngine(script, token_s=60.0, places=1)  # the second one waits for the first one's place
        started = [asyncio.ensure_future(engine.generate((7,), Sampling(8))) for _ in range(2)]
        await asyncio.sleep(0.01)
        await engine.interrupt()
        return [completion for each in await asyncio.gather(*started) for completion in each]

    assert every(each.token_ids == () and each.finish_reason is FinishReason.ABORT for each in asyncio.run(responses()))


@pytest.mark.slow
def test_rollouts_go_on_beside_training() -> None:
    argv = ("--rounds", "1", "--steps", "1", "--token-ms", "1", "--tool-ms", "20")
    lines, _ = run_bench("pipeline.py", *argv)
    assert [line["row"] for line in lines] == [14, 14, 14]
    lags = [line["limits"]["versions behind"] for line in lines]
    assert [bound for _, bound in lags] == [1.0, 1.0, 4.0] and all(1 <= lag <= bound for lag, bound in lags)
    assert all(line["theirs"]["versions"] == 0 for line in lines)


def test_the_busiest_stage_bounds_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two episodes of 2 + 6 + 10 seconds with 2 slots for agents: 6 s and 2 * 10 / 8 s in stages, 18 s in one slot."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    pipeline = importlib.import_module("swe_pipeline")
    parts = {"starting": 3.0, "running_wait": 1.0, "running": 6.0, "scoring": 10.0}
    scores = [Score(1.0, {f"swe/{name}_s": seconds for name, seconds in parts.items()})] * 2
    ours = pipeline.figures(pipeline.Stages, scores, wall_s=9.0, engine_s=9.0, agents=2, scoring=8)
    runtimes = 2 * (3.0 + 6.0 + 10.0) / 9.0
    expected = {"s": 9.0, "bound s": 6.0, "s / bound": 1.5, "engine busy": 0.5, "mean runtimes": runtimes}
    assert ours == pytest.approx(expected)
    assert pipeline.figures(pipeline.OneSlotEach, scores, 36.0, 9.0, 2, 2)["s / bound"] == 2.0


@pytest.mark.slow
def test_agents_in_repositories_are_measured_on_both_sides() -> None:
    need_bubblewrap()
    (line,), _ = run_bench("swe_pipeline.py", "--agents", "2", "--episodes", "4", "--case", "2")
    assert line["row"] == 17 and line["ratio"] > 0
    assert line["theirs"]["most runtimes"] <= 4 and 0 < line["theirs"]["engine busy"] < line["ours"]["engine busy"] < 1


def write_run(folder: Path, staleness: int, seed: int, finished: bool = True, **rewards: float) -> None:
    """A run whose validations, one every 10 steps of 2 s, gave these rewards."""
    run = folder / f"k{staleness}_seed{seed}"
    run.mkdir(parents=True)
    rows: list[dict[str, Any]] = [{"step": step, "time": 1e9 + 2.0 * step} for step in range(10 * len(rewards) - 9)]
    for row in rows[1:]:
        row |= {"time/step_s": 2.0, "actor/grad_norm": 1.0, "correction/ess": 0.9, "correction/engine_kl": 0.01}
        row |= {"staleness/mean": staleness * 0.5} if staleness else {}
    for row, reward in zip(rows[::10], rewards.values(), strict=True):
        row["val/test/total"] = reward
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        (run / "done").touch()


def test_final_rewards_are_compared_in_pairs(tmp_path: Path) -> None:
    folder = tmp_path / "composed"
    for seed, shortfall in enumerate([0.0, 0.1, 0.2]):
        write_run(folder, 0, seed, before=0.5, halfway=1.5, after=2.0)
        write_run(folder, 1, seed, before=0.5, halfway=1.0, after=2.0 - shortfall)
    write_run(folder, 0, 3, before=0.5, halfway=1.5, after=2.0)
    write_run(folder, 1, 3, finished=False, before=1.0, halfway=1.0, after=-3.0)
    (line,), output = run_bench("convergence.py", str(folder))
    # of 0, 0.1 and 0.2: mean 0.1, standard error 0.1 / sqrt(3), the t of two degrees of freedom 4.3027
    assert line["ratio"] == pytest.approx(0.1)
    assert "3 pairs, 95 % t interval -0.148 to +0.348" in line["note"]
    assert line["met"]
    assert line["theirs"] == pytest.approx({"final reward": 2.0, "s a step": 2.0})
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in output.splitlines() if row.startswith("|")]
    ours, theirs = ([row for row in rows if row[0] == k] for k in "10")
    assert ours[0][2:] == ["0.50 (0 s)", "1.00 (20 s)", "1.90 (40 s)"]
    assert theirs[0][1] == "0 1 2 3"
    # k=0 comes to 1.5 with its second validation, and half of the way to the third to 1.75; of k=1 one run comes to 2,
    # with its last validation
    assert theirs[1][2:4] == ["10.0 (20)", "15.0 (30)"]
    assert ours[1][4] == "20.0 (40, 1 of 3)"
    assert ours[1][5:] == ["2", "0.5", "0.9", "10", "1"]
    assert theirs[1][6] == "0"


def test_an_agents_final_reward_is_compared_with_the_environments(tmp_path: Path) -> None:
    (tmp_path / "cold_start").mkdir()
    (tmp_path / "cold_start" / "done").touch()
    for seed, more in enumerate([0.0, 0.1, 0.2]):
        folder = tmp_path / f"seed{seed}"
        for way, reward in (("tool", 0.5), ("agent", 0.5 + more)):
            write_run(folder, 0, seed, before=-1.0, halfway=0.0, after=reward)
            (folder / f"k0_seed{seed}").rename(folder / f"{way}_20")
    (line,), _ = run_bench("agents_learning.py", "--steps", "20", "--out", str(tmp_path))
    assert line["ratio"] == pytest.approx(0.1)
    (limit,) = line["limits"].values()
    assert limit == pytest.approx([0.1, 0.1 / 3**0.5 * 4.3027], abs=1e-4)  # the t of two degrees of freedom
    assert line["theirs"] == pytest.approx({"final reward": 0.5, "first reward": -1.0, "s a step": 2.0})


def test_runs_of_different_lengths_are_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "composed", 0, 0, before=1.0, after=2.0)
    write_run(tmp_path / "composed", 1, 0, before=1.0, halfway=1.5, after=2.0)
    command = [sys.executable, "bench/convergence.py", str(tmp_path / "composed")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "[10, 20] steps" in done.stderr


TRAINS_AT_ONCE = f"""#!{sys.executable}
import json, os, pathlib, sys
if "verl.trainer.main_ppo" not in sys.argv:
    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
overrides = dict(word.split("=", 1) for word in sys.argv if "=" in word)
run = pathlib.Path(overrides["trainer.default_local_dir"], overrides["trainer.experiment_name"])
run.mkdir()  # fails where an unfinished run was left
if os.environ.get("FAILS") == run.name:
    sys.exit("out of order")
rows = [{{"step": step, "time": step, "time/step_s": 1, "val/test/total": 2}} for step in (0, 1)]
(run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""


@pytest.mark.long
def test_an_interrupted_measurement_resumes(tmp_path: Path) -> None:
    python = tmp_path / "bin/python3"
    python.parent.mkdir()
    python.write_text(TRAINS_AT_ONCE)
    python.chmod(0o755)
    settings = {"OUT": str(tmp_path), "STALENESS": "0 1", "SEEDS": "0", "PAIR_SEEDS": "7"}
    path = f"{python.parent}:{os.environ['PATH']}"

    def measure(**variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        done = subprocess.run(
            ["bash", "bench/convergence.sh", "composed"],
            env={**os.environ, "PATH": path, **settings, **variables},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        return done, [
            line.split(maxsplit=1)[1] for line in done.stderr.splitlines() if ", rollout.max_staleness=" in line
        ]

    done, began = measure(FAILS="k1_seed0")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"failed: {tmp_path}/composed/k1_seed0.log"
    assert "out of order" in (tmp_path / "composed/k1_seed0.log").read_text()
    order = [(0, 0), (0, 1), (7, 0), (7, 1)]
    assert began == [f"composed, seed {seed}, rollout.max_staleness={k}" for seed, k in order]
    assert "one pair" in json.loads(done.stdout)["note"]
    done, began = measure()
    assert done.returncode == 0, done.stderr
    assert began == ["composed, seed 0, rollout.max_staleness=1"]
    assert "2 pairs" in json.loads(done.stdout)["note"]


def test_growth_is_that_of_a_straight_line_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    soaked = importlib.import_module("soak").Soaked()
    for step in range(1, 301):
        soaked.add(step, {"flat": 10.0, "rises": 100.0 + max(0, step - 100) / 10, "first steps": min(step, 100)})
    assert abs(soaked.growth("flat")) < 1e-9 and abs(soaked.growth("first steps")) < 1e-9
    assert 0.19 < soaked.growth("rises") < 0.21


def soak_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("soak")


def soaked_run(soak: Any, folder: Path, dropped: frozenset[tuple[str, int]] = frozenset(), **memory: float) -> Any:
    """What `grown` finds in 300 steps at which all is flat, but a rank's memory at the steps named s<step>."""
    (folder / "run").mkdir(exist_ok=True)
    rows = [{"step": step, "time/step_s": 1.0, "reward/infrastructure_faults": 0.0} for step in range(1, 301)]
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    soaked = soak.Soaked()
    for step in range(1, 301):
        found = dict.fromkeys(soak.SAMPLED, 10.0)
        found["rank memory, MiB"] = memory.get(f"s{step}", 10.0)
        soaked.add(step, {name: value for name, value in found.items() if (name, step) not in dropped})
    return soak.grown(folder, soaked, 300, 0)


def test_memory_that_grows_is_found_with_samples_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    soak, name = soak_module(monkeypatch), "rank memory, MiB"
    assert soaked_run(soak, tmp_path)["met"]
    rising = {f"s{step}": 10.0 * step for step in range(1, 301)}
    missed = soaked_run(soak, tmp_path, frozenset({(name, 150)}), **rising)
    assert not missed["met"]
    assert missed["figures"][name]["growth"] > 1.9 and missed["figures"][name]["samples"] == 299


def test_a_figure_with_few_samples_or_none_meets_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    soak, name = soak_module(monkeypatch), "rank sockets"
    one_in_ten = frozenset((name, step) for step in range(1, 301) if step % 10 == 0)
    assert soaked_run(soak, tmp_path, one_in_ten)["met"]
    late = frozenset((name, step) for step in range(250, 301))
    none = frozenset((name, step) for step in range(1, 301))
    for dropped in (late, none):
        result = soaked_run(soak, tmp_path, dropped)
        assert not result["met"] and result["figures"][name]["growth"] is None
        json.dumps(result, allow_nan=False)


def test_a_figure_that_rises_from_nothing_or_is_no_number_meets_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    soak, name = soak_module(monkeypatch), "rank memory, MiB"
    from_nothing = {f"s{step}": float(step > 290) for step in range(1, 301)}  # its line begins below zero
    assert soaked_run(soak, tmp_path, **from_nothing)["figures"][name]["growth"] == 1.0
    assert soaked_run(soak, tmp_path, **dict.fromkeys(from_nothing, 0.0))["met"]
    no_number = soaked_run(soak, tmp_path, s200=float("nan"))
    assert not no_number["met"] and no_number["figures"][name]["growth"] is None


def test_a_soak_kills_processes_of_all_kinds_or_of_the_given_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    soak, kills = soak_module(monkeypatch), []
    monkeypatch.setattr(soak.tempfile, "tempdir", str(tmp_path))

    def grow(folder: Path, options: Any) -> dict[str, Any]:
        kills.append(options.kill)
        return {"met": True}

    monkeypatch.setattr(soak, "grow", grow)
    monkeypatch.setattr(soak.signal, "signal", lambda *_: None)
    for argv in ([], ["--kill", "env,scorer"], ["--kill", ""]):
        monkeypatch.setattr(sys, "argv", ["soak.py", "grow", *argv])
        assert soak.main() == 0
    assert kills == [["scorer", "sandbox", "engine", "env"], ["env", "scorer"], []]
