"""Benchmarks by hub name: what is asked for, how published rows become ours, what is reported where nothing loads."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import close_session

from tests.support.service import free_port, service
from tests.toolrl.benchmarks.runner.eval_play import category
from toolrl.benchmarks.qa.math import math
from toolrl.benchmarks.qa.search import bamboogle, search
from toolrl.benchmarks.runner.benchmark import BenchmarkContext
from verl.errors import ConfigError, DataError
from verl.types import Task

ELSEWHERE: Mapping[str, Any] = {"retriever": "http", "urls": "http://127.0.0.1:9/retrieve"}
PROBLEM = {"problem": "What is 6 * 7?", "answer": "42"}
PUBLISHED: Mapping[str, tuple[tuple[str, str | None, str], Mapping[str, Any]]] = {
    "math/gsm8k": (("openai/gsm8k", "main", "test"), {"question": "What is 6 * 7?", "answer": "6*7=42\n#### 42"}),
    "math/math500_python": (("HuggingFaceH4/MATH-500", None, "test"), {**PROBLEM, "unique_id": "test/1.json"}),
    "math/aime24": (("HuggingFaceH4/aime_2024", None, "train"), {**PROBLEM, "id": 60}),
    "math/aime25": (("math-ai/aime25", None, "test"), {**PROBLEM, "answer": 42}),
    "math/amc23": (("math-ai/amc23", None, "test"), {"question": "What is 6 * 7?", "answer": 42.0}),
    "math/olympiadbench": (
        ("Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train"),
        {"id": 1606, "question": "What is 6 * 7?", "final_answer": ["42"]},
    ),
    "bamboogle": (
        ("RUC-NLPIR/FlashRAG_datasets", "bamboogle", "test"),
        {"id": "test_0", "question": "What is 6 * 7?", "golden_answers": ["42"]},
    ),
    "search/hotpotqa_dev": (
        ("RUC-NLPIR/FlashRAG_datasets", "hotpotqa", "dev"),
        {"id": "dev_0", "question": "What is 6 * 7?", "golden_answers": ["42"]},
    ),
    "search/nq_open": (
        ("google-research-datasets/nq_open", None, "validation"),
        {"question": "What is 6 * 7?", "answer": ["42"]},
    ),
}


class Hub:
    """Stands for the package datasets: knows what was published, and in which part of it."""

    def __init__(self, published: Mapping[tuple[str, str | None, str], Sequence[Mapping[str, Any]]]) -> None:
        self._published, self.asked = published, 0
        self.config = SimpleNamespace(HF_HUB_OFFLINE=True)

    def load_dataset(self, name: str, config: str | None, split: str) -> Sequence[Mapping[str, Any]]:
        self.asked += 1
        if (name, config, split) not in self._published:
            raise ConnectionError(f"Couldn't reach {name!r} on the Hub")
        return self._published[name, config, split]


def of(name: str, setting: BenchmarkContext) -> list[Task]:
    make = {"math": math, "search": search, "bamboogle": bamboogle}[name.partition("/")[0]]
    return list(category(make(setting), name).tasks())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rows_become_tasks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, row = PUBLISHED[name]
    monkeypatch.setitem(sys.modules, "datasets", Hub({place: [row]}))
    (task,) = of(name, BenchmarkContext(tmp_path, search=ELSEWHERE))
    assert (task.prompt[-1].content, task.answer) == ("What is 6 * 7?", "42" if "math" in name else '["42"]')


def test_faulty_rows_are_known_by_their_published_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, row = PUBLISHED["math/olympiadbench"]
    monkeypatch.setitem(sys.modules, "datasets", Hub({place: [row, {**row, "id": 1782}]}))
    (task,) = of("math/olympiadbench", BenchmarkContext(tmp_path))
    assert task.id == "olympiadbench-1606"


def test_a_file_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub({})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    (tmp_path / "aime24.jsonl").write_text(json.dumps({"id": "mine", **PROBLEM}))
    (task,) = of("math/aime24", BenchmarkContext(tmp_path))
    assert (task.id, hub.asked) == ("mine", 0)


def test_data_that_is_neither_found_nor_loaded_is_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub({})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(
        ConfigError, match=r"gsm8k cannot be loaded \(Couldn't reach .*, and gsm8k_test.jsonl is not in"
    ):
        of("math/gsm8k", BenchmarkContext(tmp_path))
    assert hub.asked == 1
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install datasets\), and gsm8k_test.jsonl is not in"):
        of("math/gsm8k", BenchmarkContext(tmp_path))
    with pytest.raises(ConfigError, match=r"^hotpotqa_100.jsonl is not in"):  # no data set on the hub
        of("search/hotpotqa_100", BenchmarkContext(tmp_path, search=ELSEWHERE))


def test_an_unreachable_hub_is_reported_before_the_package_connects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, row = PUBLISHED["math/gsm8k"]
    hub = Hub({place: [row]})
    hub.config = SimpleNamespace(HF_HUB_OFFLINE=False, HF_ENDPOINT=f"http://127.0.0.1:{free_port()}")
    monkeypatch.setitem(sys.modules, "datasets", hub)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    close_session()  # one that knows that this is no offline mode
    with pytest.raises(ConfigError, match=r"gsm8k cannot be loaded \(http://127.* is unreachable.*HF_HUB_OFFLINE=1"):
        of("math/gsm8k", BenchmarkContext(tmp_path))
    assert hub.asked == 0
    with service("-m", "http.server", hub.config.HF_ENDPOINT.rpartition(":")[2], url=hub.config.HF_ENDPOINT):
        (task,) = of("math/gsm8k", BenchmarkContext(tmp_path))
    assert task.answer == "42"


def test_any_exception_of_the_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Hub):
        def load_dataset(self, name: str, config: str | None, split: str) -> Sequence[Mapping[str, Any]]:
            raise RuntimeError("Dataset scripts are no longer supported")

    monkeypatch.setitem(sys.modules, "datasets", Broken({}))
    with pytest.raises(ConfigError, match=r"gsm8k cannot be loaded \(Dataset scripts"):
        of("math/gsm8k", BenchmarkContext(tmp_path))


def test_published_rows_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, row = PUBLISHED["math/aime24"]
    monkeypatch.setitem(sys.modules, "datasets", Hub({place: [row, {"problem": "What?"}]}))
    with pytest.raises(DataError, match=r"HuggingFaceH4/aime_2024, row 1, field 'answer': is missing"):
        of("math/aime24", BenchmarkContext(tmp_path))


def test_a_downloaded_copy_is_read_by_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    copy = tmp_path / "openai" / "gsm8k"
    copy.mkdir(parents=True)
    (copy / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: test\n    path: test.jsonl\n---\n"
    )
    (copy / "test.jsonl").write_text(json.dumps(PUBLISHED["math/gsm8k"][1]) + "\n")
    (task,) = of("math/gsm8k", BenchmarkContext(tmp_path))
    assert (task.id, task.answer) == ("gsm8k-0", "42")
    (tmp_path / "math-ai" / "aime25").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"math-ai/aime25 cannot be loaded from .*, and aime25.jsonl is not in"):
        of("math/aime25", BenchmarkContext(tmp_path))
