"""What a model was trained on, in its folder, and what an evaluation makes of it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.local_run import local_fit, local_trainer
from tests.support.tiny import MINI, run_overrides, save_tiny_model
from tests.toolrl.benchmarks.runner.test_online_eval import sums
from toolrl.analysis.collapse.collapse import CollapseWatch
from toolrl.benchmarks.bfcl.tasks import bfcl_tasks
from toolrl.benchmarks.runner.benchmark import BenchmarkContext
from toolrl.benchmarks.runner.evaluate import _trained_on
from toolrl.benchmarks.runner.registry import build_benchmarks
from toolrl.commands import EVAL
from verl.build.run import load_inputs
from verl.config.load import load_config
from verl.data.overlap import TRAIN_TASKS, Trace, TrainTasks, check_overlap, trace_of
from verl.data.tasks import TaskSet
from verl.errors import ConfigError, DataError
from verl.sft.build import tasks_of
from verl.sft.demonstrations import read_demonstrations
from verl.trainer.main_eval import main
from verl.types import Message, Task

NOTHING = TrainTasks()


def question(text: str, id: str = "a.jsonl#0", *before: Message) -> Task:
    return Task(id, (*before, Message("user", text)), "4", "test")


def scenario(number: int, text: str) -> Task:
    """As scripts/make_env_tasks.py writes it: the environment's name of the task is in its row."""
    name = f"multi_turn_base_{number}"
    return Task("train.jsonl#7", (Message("user", text),), "[]", "bfcl", env="bfcl", extra={"id": name})


def test_a_question_is_identified_by_its_user_messages() -> None:
    trained = TrainTasks.of([question("What is 2 + 2?", "a.jsonl#0", Message("system", "Be brief."))], NOTHING)
    assert trained.has(question("  what is\n2 + 2?", "b.jsonl#5"))
    assert not trained.has(question("What is 2 + 3?", "a.jsonl#0"))  # the name of a row means nothing elsewhere


def test_a_scenario_is_identified_by_its_name_and_its_text() -> None:
    trained = TrainTasks.of([scenario(3, "Sort my files.")], NOTHING)
    assert trained.has(Task("multi_turn_base_3", (Message("user", "In other terms."),), "[]", "bfcl", env="bfcl"))
    assert trained.has(Task("multi_turn_miss_func_3", (Message("user", "Sort my files."),), "[]", "bfcl", env="bfcl"))
    assert not trained.has(Task("multi_turn_base_4", (Message("user", "Delete them."),), "[]", "bfcl", env="bfcl"))
    assert not trained.has(Task("multi_turn_base_3", (Message("user", "Hello."),), "[]", "tau2", env="tau2"))


def test_tasks_without_user_messages_are_not_all_equal() -> None:
    def silent(*texts: str) -> Task:
        return Task("a.jsonl#0", tuple(Message("system", each) for each in texts), "4", "test", env="mine")

    trained = TrainTasks.of([silent("Sort my files."), silent()], NOTHING)
    assert trained.has(silent("sort  my files."))
    assert not trained.has(replace(silent("Delete them."), id="b.jsonl#1"))
    assert not trained.has(replace(silent(), id="b.jsonl#1"))


def test_the_list_outlives_the_disk_and_adds_up(tmp_path: Path) -> None:
    first = TrainTasks.of([question("A?"), scenario(3, "S\udc80"), question("a?")], NOTHING)
    path = tmp_path / "hf" / TRAIN_TASKS
    first.write(path)
    assert TrainTasks.read(str(path.parent)) == first
    assert [*json.loads(path.read_text().splitlines()[0])] == [*Trace._fields]
    both = TrainTasks.of([question("B?"), question("A?")], TrainTasks.read(str(path.parent)))
    assert both.has(question("B?")) and both.has(scenario(3, "")) and len(both.traces) == len(first.traces) + 1
    assert TrainTasks.read("Qwen/Qwen2.5-1.5B") == TrainTasks.read(str(tmp_path)) == TrainTasks.read(None) == NOTHING
    path.write_text('{"task": 1}\n')
    with pytest.raises(DataError, match=r"is not a list of training tasks.*expected env, task, digest"):
        TrainTasks.read(str(path.parent))


def test_an_overlap_is_refused_or_noted() -> None:
    trained = TrainTasks.of([question("2?"), question("4?")], NOTHING)
    tasks = [question(f"{number}?", f"t#{number}") for number in range(5)]
    asked = {"toy/a": tasks, "toy/b": tasks[:2]}
    with pytest.raises(ConfigError) as refused:
        check_overlap(trained, asked, "outputs/m/hf", "eval.allow_train_overlap=true")
    message = str(refused.value)
    assert "toy/a: 2 of 5 tasks are in the training data of outputs/m/hf (t#2, t#4)" in message
    assert "eval.allow_train_overlap=true" in message and "toy/b" not in message
    (note,) = check_overlap(trained, asked, "m", None)
    assert note.startswith("toy/a: 2 of 5")
    assert check_overlap(NOTHING, asked, "m", "eval.allow_train_overlap=true") == []


def test_artist_is_evaluated_on_other_problems_than_it_is_trained_on(tmp_path: Path) -> None:
    """BFCL's train split against its own benchmark, which has all scenarios, and against those that are held out."""
    pytest.importorskip("bfcl_eval")
    trained = TrainTasks.of(bfcl_tasks("base", "train"), NOTHING)
    setting = BenchmarkContext(tmp_path, tool_call_format="artist_tools")

    def counted(*names: str) -> list[str]:
        found = [category for benchmark in build_benchmarks(names, setting) for category in benchmark.categories]
        return check_overlap(trained, {each.name: each.first(None) for each in found}, "m", None)

    (base,) = counted("bfcl/multi_turn_base")
    assert base.startswith("bfcl/multi_turn_base: 150 of 199 tasks")
    assert counted("bfcl/multi_turn_miss_func")  # the same requests, with a function withheld
    assert counted("bfcl_multi_turn") == []
    recipe = load_config(["recipe=artist_tools"])
    assert counted(*recipe.eval.benchmarks) == []
    assert len(build_benchmarks(recipe.eval.benchmarks, setting)[0].categories) == 1


def test_the_command_refuses_before_it_starts_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny_model(tmp_path / "hf")
    test = MINI / "test.parquet"
    TrainTasks.of(TaskSet(str(test))[:4], NOTHING).write(model / TRAIN_TASKS)
    overrides = [f"model.path={model}", f"eval.benchmarks=[{test}]", "eval.limit=6"]
    assert main([*overrides, f"eval.output={tmp_path}", "rollout.name=hf", "trainer.device=cpu"]) == 2
    printed = " ".join(capsys.readouterr().out.split())
    assert "4 of 6 tasks are in the training data" in printed and "eval.allow_train_overlap=true" in printed
    asked = [
        (category, category.first(6))
        for category in build_benchmarks([str(test)], BenchmarkContext(tmp_path))[0].categories
    ]
    assert len(_trained_on(load_config([*overrides, "eval.allow_train_overlap=true"], EVAL), asked)) == 1
    other = load_config([f"model.path={tmp_path}", f"eval.compare={model}"], EVAL)
    with pytest.raises(ConfigError, match="4 of 6 tasks"):
        _trained_on(other, asked)


def test_training_refuses_to_be_judged_by_what_it_trains_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = tmp_path / "rows.jsonl"
    row = {"data_source": "sums", "prompt": [{"role": "user", "content": "What is 2 + 2?"}]}
    data.write_text(json.dumps({**row, "reward_model": {"ground_truth": "4"}}) + "\n")
    overrides = [*run_overrides(save_tiny_model(tmp_path / "model"), tmp_path, "hf", 1), f"data.train_files=[{data}]"]
    overrides += ["reward.name=math", f"eval.benchmarks=[{sums.__module__}:sums]", "data.train_batch_size=1"]
    overrides.append("actor.ppo_mini_batch_size=1")
    with pytest.raises(ConfigError, match=r"sums/plain: 1 of 3 .* this run .*eval\.allow_train_overlap=true"):
        load_inputs(load_config(overrides))
    load_inputs(load_config([*overrides, "eval.allow_train_overlap=true"]))
    assert "sums/plain: 1 of 3 tasks" in caplog.text


def test_an_exported_model_knows_what_it_was_trained_on(tmp_path: Path) -> None:
    model, data = save_tiny_model(tmp_path / "model"), tmp_path / "rows.parquet"
    TrainTasks.of([question("Seen before?")], NOTHING).write(model / TRAIN_TASKS)
    pq.write_table(pq.read_table(MINI / "train.parquet").slice(0, 4), data)
    config = load_config(
        [*run_overrides(model, tmp_path, "hf", 1), "trainer.num_threads=1", f"data.train_files=[{data}]"]
    )
    with local_trainer(config) as trained:
        fit = local_fit(trained, config, CollapseWatch())
        fit.checkpointing.train_tasks = load_inputs(config).train_tasks
        last = asyncio.run(fit.run())
    exported = TrainTasks.read(str(last / "hf"))
    assert exported == fit.checkpointing.train_tasks and exported.has(question("Seen before?"))
    assert [trace_of(task) for task in TaskSet(str(data))] == [*exported.traces[1:]]


def test_demonstrations_are_trained_on_as_well(tmp_path: Path) -> None:
    """Every response of a dialogue answers a task: what the user has written until then."""
    data = tmp_path / "sft.jsonl"
    turns = [("system", "s"), ("user", "A?"), ("assistant", "a"), ("user", "B?"), ("assistant", "b")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    data.write_text(json.dumps(row) + "\n")
    trained = TrainTasks.of(tasks_of(read_demonstrations(str(data))), NOTHING)
    assert trained.has(question("a?")) and len(trained.traces) == 2
    assert trained.has(question("B?", "x#1", Message("user", "A?"), Message("assistant", "else")))
    assert not trained.has(question("B?"))
