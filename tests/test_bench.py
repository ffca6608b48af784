"""The benchmarks' own arithmetic, the page they write, and the cheapest of them end to end."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.common import Result, Side, alternate, median_ratio
from bench.results import BEGIN, END
from tests.conftest import ROOT
from verl.rollout.engine import Sampling
from verl.types import Completion, FinishReason


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


def test_a_side_that_fails_is_named_with_its_last_words() -> None:
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
    seven = {"row": 7, "name": "publication", "ratio": 0.3, "target": 0.25}
    share = {"row": 2, "name": "share", "ratio": 0.01, "target": 0.03, "lower_is_better": True}
    first = share | {"ratio": 0.5}
    assert write_page(tmp_path, [seven, first, share]).returncode == 0
    text = page.read_text()
    assert text.startswith(f"above\n{BEGIN}\n")
    assert text.endswith(f"{END}\nbelow\n")
    assert "old table" not in text
    rows = [line for line in text.splitlines() if line.startswith(("| 2", "| 7"))]
    assert [row.split(" | ")[2:5] for row in rows] == [["**0.01**", "<= 0.03", "yes"], ["**0.3**", ">= 0.25", "yes"]]


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("by hand\n")
    done = write_page(tmp_path, [{"row": 7, "name": "publication", "ratio": 0.3, "target": 0.25}])
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


def run_bench(script: str, *words: str) -> tuple[list[dict[str, Any]], str]:
    done = subprocess.run([sys.executable, f"bench/{script}", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_shared_prompts_are_measured_and_their_gradients_compared() -> None:
    words = ("--model", "dataset/mini/model", "--prompt", "80", "--reply", "40", "--n", "2", "--rounds", "1")
    (line,), table = run_bench("shared_prompt.py", *words)
    assert line["row"] == 3
    assert line["ratio"] > 0
    ((gap, bound),) = line["limits"].values()
    assert 0 < gap < bound
    assert line["versions"]["torch"]
    assert "CPU s" in table


def test_a_padded_batch_trains_the_same() -> None:
    words = ("--model", "dataset/mini/model", "--data", "dataset/mini/test.parquet", "--rows", "3", "--rounds", "1")
    (line,), _ = run_bench("padding.py", *words)
    assert line["theirs"]["tokens"] > line["ours"]["tokens"]
    assert line["limits"]["relative difference of the gradients"][0] < 1e-5


def test_both_losses_are_the_same_loss() -> None:
    sizes = ["--tokens", "1024", "--vocabulary", "8192", "--hidden", "16"]  # enough to be seen in resident memory
    lines, _ = run_bench("loss_memory.py", *sizes, "--rounds", "1")
    assert [line["row"] for line in lines] == [5, 5]
    for line in lines:
        assert line["ours"]["loss"] == pytest.approx(line["theirs"]["loss"], rel=1e-4)


@pytest.mark.parametrize("script", ["step.py", "shared_prompt.py", "padding.py"])
def test_without_the_model_a_row_is_skipped(script: str) -> None:
    lines, said = run_bench(script, "--model", "no/such/folder")
    assert lines == []
    assert "prepare_smollm2" in said


def test_a_scripted_reply_goes_on_where_it_was_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    pipeline = importlib.import_module("pipeline")
    script = pipeline.Script(call=(1, 2, 3), answer=(1, 9))
    assert script((7,), 0) == (1, 2, 3) and script((7, 1, 2), 0) == (3,)
    asked = (7, *(1, 2, 3, 8) * pipeline.CALLS)
    assert script(asked[:-4], 0) == (1, 2, 3) and script(asked, 0) == (1, 9) and script((*asked, 1), 0) == (9,)

    async def replies() -> list[Completion]:
        engine = pipeline.PacedEngine(script, token_s=60.0, places=1)  # the second one waits for the first one's place
        started = [asyncio.ensure_future(engine.generate((7,), Sampling(8))) for _ in range(2)]
        await asyncio.sleep(0.01)
        await engine.interrupt()
        return [completion for each in await asyncio.gather(*started) for completion in each]

    assert all(each.token_ids == () and each.finish_reason is FinishReason.ABORT for each in asyncio.run(replies()))


@pytest.mark.slow
def test_rollouts_go_on_beside_training() -> None:
    words = ("--rounds", "1", "--steps", "1", "--token-ms", "1", "--tool-ms", "20")
    lines, _ = run_bench("pipeline.py", *words)
    assert [line["row"] for line in lines] == [14, 14, 14]
    lags = [line["limits"]["versions behind"] for line in lines]
    assert [bound for _, bound in lags] == [1.0, 1.0, 4.0] and all(1 <= lag <= bound for lag, bound in lags)
    assert all(line["theirs"]["versions"] == 0 for line in lines)
