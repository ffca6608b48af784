"""A run is what it learns from: a resume with other contents is refused by name, or allowed and recorded."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from verl.build.run import resumed_stream
from verl.checkpoint import contents, own_code
from verl.checkpoint.checkpoint import CheckpointStore
from verl.checkpoint.contents import contents_of
from verl.checkpoint.state import CHANGES, Saved, find_saved, resume_config
from verl.config.commands import SFT, TRAIN
from verl.config.load import load_config
from verl.config.schema import Config
from verl.data.tasks import TaskStream
from verl.errors import ConfigError, DataError
from verl.host import digests
from verl.tracking.jsonl import read_jsonl
from verl.trainer.records import append_changed, write_records
from verl.types import Task

SETTINGS = {
    "data.train_files": "[{place}/train.jsonl,{place}/more.jsonl]",
    "data.prompt_template": "{place}/prompt.txt",
    "data.map": "{place}/rows.py:split",
    "model.path": "{place}/model",
    "reward.name": "{place}/mine.py:brief",
    "reward.options": "{{terms: {place}/terms.json}}",
    "env.name": "agent",
    "env.command": "'python {place}/agent.py {{task_json}}'",
    "env.tool_call_format": "hermes",
    "env.tool_call_format_options": "{{prompt_template: {place}/tools.txt}}",
    "env.tools": "[{{name: {place}/tools.py:look, corpus: {place}/corpus.jsonl}}]",
}
FILES = ["train.jsonl", "more.jsonl", "prompt.txt", "rows.py", "mine.py", "terms.json", "agent.py", "tools.txt"]
FILES += ["tools.py", "corpus.jsonl", "model/config.json", "model/tokenizer.json", "model/chat_template.jinja"]
WEIGHTS = ["model/model.safetensors", "model/model.safetensors.index.json"]
LEFT_OUT = ["model/README.md", "model/LICENSE", "model/.cache/huggingface/lock"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with every file that the settings name, each with a text of its own."""
    for name in (*FILES, *WEIGHTS, *LEFT_OUT):
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name).write_text(f"content of {name}")
    return tmp_path / "here"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def settings_of(place: Path) -> dict[str, Any]:
    config = load_config([f"{key}={value.format(place=place)}" for key, value in SETTINGS.items()])
    return resume_config(config, TRAIN)


def save(folder: Path, settings: dict[str, Any], contents: dict[str, Any] | None, **more: Any) -> CheckpointStore:
    store = CheckpointStore(folder, keep_last=2, keep_best=0)
    state = {"command": "main_ppo", "resume_config": settings, "trainer": {"step": 3}, **more}
    with store.writing(3) as unfinished:
        unfinished.write_state(state if contents is None else {**state, "contents": contents})
    return store


def resumed(store: CheckpointStore, place: Path, reads_weights: bool = True, allowed: tuple[str, ...] = ()) -> Saved:
    settings = settings_of(place)
    saved = find_saved(store, "main_ppo", settings, contents_of(settings, reads_weights), allowed)
    assert saved is not None
    return saved


@pytest.fixture
def store(place: Path, tmp_path: Path) -> CheckpointStore:
    settings = settings_of(place)
    return save(tmp_path / "checkpoints", settings, contents_of(settings, reads_weights=True))


@pytest.mark.parametrize("name", [*FILES, *WEIGHTS])
def test_a_file_that_was_replaced_under_its_path_is_refused_by_name(
    name: str, store: CheckpointStore, place: Path
) -> None:
    resumed(store, place)
    (place / name).write_text("another content, which the run has not learned from")
    with pytest.raises(ConfigError, match="contains a run with different inputs") as refused:
        resumed(store, place)
    (key,) = [key for key, value in SETTINGS.items() if name.split("/")[0] in value]
    (key,) = [each for each in settings_of(place) if each.startswith(key)]  # options have a key each
    assert f"trainer.allow_changed=[{key}]" in str(refused.value)
    assert str(refused.value).count("sha256") == 2 and str(refused.value).count("(originally") == 1
    if name.startswith("model/"):
        assert f"model.path: {name.removeprefix('model/')}=sha256" in str(refused.value)
    saved = resumed(store, place, allowed=(key, "actor.optim.lr"))
    assert list(saved.changed) == [key] and saved.step == 3
    before, now = (json.dumps(saved.changed[key][side]) for side in ("before", "now"))
    assert before != now and before.count("sha256") == now.count("sha256")


def test_code_that_rows_name_is_part_of_the_data(place: Path, tmp_path: Path) -> None:
    """The data file stays the same when a reward or an environment in it is edited."""
    reward, env = f"{place}/mine.py:brief", f"{place}/tools.py:Room"
    rows = [Task(f"train.jsonl#{number}", (), "", "mine", reward=reward, env=env) for number in range(3)]
    rows.append(Task("train.jsonl#3", (), "", "mine", reward="rlla", env="shop"))  # ours: known by the version
    settings = {"data.train_files": [f"{place}/train.jsonl"]}
    store = save(tmp_path / "checkpoints", settings, contents_of(settings, False, rows))
    find_saved(store, "main_ppo", settings, contents_of(settings, False, rows))
    for file, name in (("mine.py", reward), ("tools.py", env)):
        before = (place / file).read_text()
        (place / file).write_text("another content")
        with pytest.raises(ConfigError, match=r"different inputs: data\.train_files") as refused:
            find_saved(store, "main_ppo", settings, contents_of(settings, False, rows))
        assert str(refused.value).count(f"{name} is sha256") == 2
        changed = find_saved(store, "main_ppo", settings, contents_of(settings, False, rows), ["data.train_files"])
        assert changed is not None and list(changed.changed) == ["data.train_files"]
        (place / file).write_text(before)


def test_the_same_contents_elsewhere_are_the_same_run(store: CheckpointStore, place: Path) -> None:
    shutil.copytree(place, place.with_name("there"))
    shutil.rmtree(place)
    assert resumed(store, place.with_name("there")).changed == {}


def test_the_order_of_the_files_counts(store: CheckpointStore, place: Path) -> None:
    (place / "train.jsonl").rename(place / "first")
    (place / "more.jsonl").rename(place / "train.jsonl")
    (place / "first").rename(place / "more.jsonl")
    with pytest.raises(ConfigError, match=r"data\.train_files\[0\]=sha256 .*; data\.train_files\[1\]=sha256"):
        resumed(store, place)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_texts_beside_a_model_do_not_count(name: str, store: CheckpointStore, place: Path) -> None:
    (place / name).write_text("another")
    assert resumed(store, place).changed == {}


def test_weights_that_no_reference_reads_do_not_count(place: Path, tmp_path: Path) -> None:
    settings = settings_of(place)
    store = save(tmp_path / "checkpoints", settings, contents_of(settings, reads_weights=False))
    (place / WEIGHTS[0]).unlink()
    assert resumed(store, place, reads_weights=False).changed == {}
    (place / "model/tokenizer.json").write_text("another")
    with pytest.raises(ConfigError, match=r"model\.path: tokenizer\.json=sha256"):
        resumed(store, place, reads_weights=False)


@pytest.mark.parametrize("before", [{}, {"WITHLENGTH": "1"}, {"CORRECTMAX1": "1"}])
@pytest.mark.parametrize("now", [{}, {"WITHLENGTH": "1"}, {"WITHLENGTH": "0"}])
def test_the_reward_s_variables_are_part_of_a_run(
    before: dict[str, str], now: dict[str, str], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as first:
        for name, value in before.items():
            first.setenv(name, value)
        settings = settings_of(place)
        store = save(tmp_path / "checkpoints", settings, contents_of(settings, True))
    for name, value in now.items():
        monkeypatch.setenv(name, value)
    on = {name: value for name, value in now.items() if value == "1"}
    differing = sorted(name for name in {*before, *on} if before.get(name) != on.get(name))
    for name in differing:
        with pytest.raises(ConfigError, match=rf"{name}={on.get(name)} \(originally {before.get(name)}\)"):
            resumed(store, place)
    assert list(resumed(store, place, allowed=tuple(differing)).changed) == differing


def test_settings_can_be_allowed_to_change_and_unknown_ones_have_a_hint(store: CheckpointStore, place: Path) -> None:
    settings = settings_of(place)
    contents, faster = contents_of(settings, True), {**settings, "actor.optim.lr": 0.5}
    with pytest.raises(
        ConfigError, match=r"actor\.optim\.lr=0\.5 \(originally 1e-06\).*allow_changed=\[actor\.optim\.lr\]"
    ):
        find_saved(store, "main_ppo", faster, contents)
    saved = find_saved(store, "main_ppo", faster, contents, ["actor.optim.lr"])
    assert saved is not None and saved.changed == {"actor.optim.lr": {"before": 1e-06, "now": 0.5}}
    for name, near in (
        ("optim.lr", "actor.optim.lr"),
        ("WITHLENGHT", "WITHLENGTH"),
        ("data.files", "data.train_files"),
    ):
        with pytest.raises(ConfigError, match=f"allow_changed: '{name}' is not compared on a resume.*{near}"):
            find_saved(store, "main_ppo", settings, contents, [name])


def options_of(*overrides: str) -> dict[str, Any]:
    return resume_config(load_config(["recipe=mini_grpo", *overrides]), TRAIN)


@pytest.mark.parametrize(
    ("before", "now"),
    [((), ("true",)), (("false",), ()), (("true",), ("false",))],
)
def test_how_an_engine_runs_the_model_may_change(before: tuple[str, ...], now: tuple[str, ...], tmp_path: Path) -> None:
    first, second = (
        options_of(*(f"rollout.enforce_eager={each}" for each in overrides)) for overrides in (before, now)
    )
    saved = find_saved(save(tmp_path / "checkpoints", first, None), "main_ppo", second)
    assert saved is not None and not saved.changed


def test_an_option_that_only_one_of_the_runs_has_can_be_allowed_to_change(tmp_path: Path) -> None:
    key = "rollout.engine_options.block_size"
    runs = options_of(f"{key}=32"), options_of()
    for place, (before, now) in enumerate((runs, runs[::-1])):
        store = save(tmp_path / str(place), before, None)
        with pytest.raises(ConfigError, match=rf"trainer\.allow_changed=\[{key}\]$"):
            find_saved(store, "main_ppo", now)
        saved = find_saved(store, "main_ppo", now, allowed=[key])
        assert saved is not None and list(saved.changed) == [key]
    again = find_saved(save(tmp_path / "again", options_of(), None), "main_ppo", options_of(), allowed=[key])
    assert again is not None and not again.changed
    with pytest.raises(ConfigError, match=r"'rollout.engine_options.enforce_eager' is not compared on a resume"):
        find_saved(store, "main_ppo", options_of(), allowed=["rollout.engine_options.enforce_eager"])


def test_a_checkpoint_of_an_earlier_version_is_compared_by_settings_alone(place: Path, tmp_path: Path) -> None:
    store = save(tmp_path / "checkpoints", settings_of(place), None)
    (place / "train.jsonl").write_text("another")
    assert resumed(store, place).changed == {}


def test_code_in_modules_and_names_that_are_no_files(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "ours_of_test.py").write_text("def brief(response, answer): return 1.0")
    (place / "hermes").write_text("a file with the name of a format")
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.chdir(place)
    settings = {
        "reward.name": "ours_of_test:brief",
        "env.name": "verl.envs.single_turn:SingleTurnEnv",
        "env.tool_call_format": "hermes",
        "env.agent": "no_such_module:f",
        "sandbox.urls": ["http://host:8080"],
        "env.options": {"text": "a" * 5000, "ratio": 0.5, "none": None},
        "data.prompt_template": "hermes",
    }
    found = contents_of(settings, True)
    assert found == {
        "reward.name": f"sha256 {digests.file_digest(place / 'ours_of_test.py')}:brief",
        "data.prompt_template": f"sha256 {digests.file_digest(place / 'hermes')}",
    }
    assert "ours_of_test" not in sys.modules


def test_a_model_of_the_hub_is_known_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--owner--name"
    for commit in ("a" * 40, "b" * 40):
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "tokenizer_config.json").write_text("{}")
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
        settings = {"model.path": "owner/name", "critic.path": "owner/other"}
        assert contents_of(settings, True) == {"model.path": f"owner/name at commit {commit}"}


IMPORTS = {  # an import in a user's file: the file whose content counts, too
    "import helpers": "helpers.py",
    "from helpers import terms": "helpers.py",
    "import package.inner": "package/inner.py",
    "from package import inner": "package/inner.py",
    "from package import inner as other": "package/__init__.py",
    "def brief():\n    import helpers": "helpers.py",
    "import chain": "helpers.py",
    "import space.module": "space/module.py",
    "import paths": "path/paths.py",
}
NOT_OURS = {  # an import: a file that does not count
    "import json": "json_.py",
    "import numpy": "helpers.py",
    "import verl.types": "verl.py",
    "text = 'import helpers'": "helpers.py",
    "import missing": "helpers.py",
    "import (": "helpers.py",
}
MODULES = {
    "helpers.py": "terms = 1",
    "package/__init__.py": "",
    "package/inner.py": "from . import other",
    "package/other.py": "",
    "space/module.py": "",
    "chain.py": "import chain, helpers",
    "path/paths.py": "",
    "json_.py": "",
    "verl.py": "",
}


def code_content(place: Path, file: str = "mine.py", key: str = "reward.name") -> Any:
    settings = {"reward.name": f"{place / file}:brief", "env.command": f"python {place / file}"}
    return contents_of({key: settings[key]}, True)[key]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in MODULES.items():
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "code" / "path"))
    return tmp_path / "code"


@pytest.mark.parametrize("key", ["reward.name", "env.command"])
@pytest.mark.parametrize(("line", "file"), [*IMPORTS.items(), *NOT_OURS.items()])
def test_modules_that_a_file_imports_from_its_folder_are_part_of_it(
    line: str, file: str, key: str, modules: Path
) -> None:
    (modules / "mine.py").write_text(line)
    before = code_content(modules, key=key)
    (modules / file).write_text(f"{MODULES[file]}\n# another")
    assert (code_content(modules, key=key) != before) == (line in IMPORTS)
    (modules / file).write_text(MODULES[file])
    shutil.copytree(modules, modules.with_name("moved"))
    if line != "import paths":  # by the user's paths, which have not moved
        shutil.rmtree(modules)
        assert code_content(modules.with_name("moved"), key=key) == before


def test_a_module_of_a_package_is_known_with_what_it_imports(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(modules))
    (modules / "package/inner.py").write_text("from .deeper.rewards import brief\nfrom .. import nothing")
    (modules / "package/deeper").mkdir()
    (modules / "package/deeper/rewards.py").write_text("from ..other import a\nfrom .... import a\nimport helpers")
    settings = {"reward.name": "package.inner:brief"}
    seen = [contents_of(settings, True)]
    for file in ("package/deeper/rewards.py", "package/other.py", "helpers.py", "package/__init__.py"):
        (modules / file).write_text((modules / file).read_text() + "\n# another")
        seen.append(contents_of(settings, True))
    assert len({str(each) for each in seen}) == len(seen)
    del sys.modules["package"]  # finding a module of a package runs the package
    assert not {"package.inner", "helpers"} & sys.modules.keys()


def add(folder: Path) -> None:
    (folder / "inner" / "b.txt").write_text("more")


def rename(folder: Path) -> None:
    (folder / "a.txt").rename(folder / "c.txt")


def rewrite(folder: Path) -> None:
    (folder / "inner" / "d.txt").write_text("another")


def compiled(folder: Path) -> None:
    (folder / "inner" / "x.cpython-311.pyc").write_text("another")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "index" / "inner").mkdir(parents=True)
    for name in ("a.txt", "inner/d.txt"):
        (tmp_path / "index" / name).write_text(name)
    return tmp_path / "index"


@pytest.mark.parametrize(("change", "differs"), [(add, True), (rename, True), (rewrite, True), (compiled, False)])
@pytest.mark.parametrize(
    "key", ["env.options.index", "env.tools", "reward.options", "env.tool_call_format_options.terms", "env.command"]
)
def test_a_folder_among_options_is_known_by_its_files(
    key: str, change: Callable[[Path], None], differs: bool, folder: Path
) -> None:
    values: dict[str, Any] = {
        "env.tools": [{"name": "search", "where": {"corpus": str(folder)}}],
        "env.command": f"run --data {folder}/",
    }
    settings = {key: values.get(key, str(folder))}
    before = contents_of(settings, True)
    assert "of 2 files" in str(before)
    change(folder)
    assert (contents_of(settings, True) != before) == differs


def test_a_folder_over_the_limits_is_known_by_its_path_with_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"env.options.index": str(folder)}
    for name, limit in (("_MAX_FILES", 1), ("_MAX_BYTES", 5)):
        with monkeypatch.context() as patched:
            patched.setattr(contents, name, limit)
            assert contents_of(settings, True) == {}
        assert f"env.options.index: a resume does not notice if files of the folder '{folder}'" in caplog.text
        assert "it has more than" in caplog.text
        caplog.clear()
    assert len(contents_of(settings, True)) == 1 and not caplog.records


def test_code_with_too_many_modules_is_known_by_the_first_with_a_warning(
    modules: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (modules / "mine.py").write_text("import chain")  # which imports another
    assert "of 3 files" in code_content(modules) and not caplog.records
    monkeypatch.setattr(own_code, "_MAX_MODULES", 1)
    assert "of 2 files" in code_content(modules)
    assert "mine.py imports more than 1 modules of yours" in caplog.text


@pytest.mark.parametrize("value", [".", "..", "/", "./", "../", "no/such/folder", "a" * 5000 + "/b"])
def test_texts_that_are_no_folder_of_a_user_stay(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert contents_of({"env.options.text": value}, True) == {}


def test_folders_of_other_settings_stay(folder: Path) -> None:
    assert contents_of({"trainer.somewhere": str(folder)}, True) == {}


def test_an_sft_run_is_compared_in_the_same_way(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WITHLENGTH", "1")  # of the reward, which it has not
    overrides = [f"data.train_files=[{place}/train.jsonl]", f"model.path={place}/model"]
    settings = resume_config(load_config(overrides, SFT), SFT)
    before = contents_of(settings, reads_weights=False)
    assert before.keys() == {"data.train_files", "model.path"}
    (place / "train.jsonl").write_text("another")
    (place / WEIGHTS[0]).write_text("others")
    now = contents_of(settings, reads_weights=False)
    assert now["data.train_files"] != before["data.train_files"] and now["model.path"] == before["model.path"]


@pytest.mark.parametrize(
    ("file", "rows", "changed", "expected"),
    [
        ("moved.jsonl", 4, {}, ["moved.jsonl", 3, 2]),  # the same content under another name
        ("train.jsonl", 4, {"reward.name": {}}, ["train.jsonl", 3, 2]),
        ("train.jsonl", 6, {"data.train_files": {}}, ["train.jsonl", 0, 0]),  # other rows: from their start
    ],
)
def test_where_the_data_goes_on(
    file: str, rows: int, changed: dict[str, Any], expected: list[Any], tmp_path: Path
) -> None:
    def tasks(file: str, rows: int) -> list[list[Task]]:
        return [[Task(f"{file}#{number}", (), "", "s") for number in range(rows)]]

    old = TaskStream(tasks("train.jsonl", 4))
    for _ in range(3):
        next(old)
    state = {"data": asdict(old.cursor), "pending": [{"drawn": [each], "attempt": 1} for each in (1, 2)]}
    saved = Saved(tmp_path, {"contents": {}, "trainer": {"rollouts": state}}, changed)
    stream = resumed_stream(Config(), tasks(file, rows), saved)
    assert [next(stream).id.partition("#")[0], stream.cursor.drawn[0] - 1, len(state["pending"])] == expected
    if file != "train.jsonl":  # of an earlier version, whose files were not compared
        del saved.state["contents"]
        with pytest.raises(DataError, match="differ from those of the saved run in files"):
            resumed_stream(Config(), tasks(file, rows), saved)


# --- digests of large files


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read for their digest."""
    names: list[str] = []
    plain = digests._hashed

    def hashed(path: Path) -> str:
        names.append(path.name)
        return plain(path)

    monkeypatch.setattr(digests, "_hashed", hashed)
    monkeypatch.setattr(digests, "_SETTLED_S", 0.0)
    return names


def same_size_and_time(path: Path) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path: Path) -> None:
    path.with_name("new").write_bytes(b"y" * 2**20)
    path.with_name("new").replace(path)


@pytest.mark.parametrize("change", [same_size_and_time, replaced, lambda path: os.truncate(path, 2**20 + 5)])
def test_a_large_file_is_read_once_and_again_when_it_changed(
    change: Callable[[Path], None], tmp_path: Path, read: list[str]
) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"a" * 2**20)
    first = digests.file_digest(path)
    assert [digests.file_digest(path) for _ in range(3)] == [first] * 3 and read == ["large"]
    path.rename(tmp_path / "moved")
    assert digests.file_digest(tmp_path / "moved") == first  # renaming sets ctime
    (tmp_path / "moved").rename(path)
    del read[:]
    change(path)
    assert digests.file_digest(path) != first and read == ["large"]


def test_a_file_that_changed_just_now_is_not_remembered(
    tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_SETTLED_S", 60.0)
    (tmp_path / "large").write_bytes(b"a" * 2**20)
    assert digests.file_digest(tmp_path / "large") == digests.file_digest(tmp_path / "large") and len(read) == 2


@pytest.mark.parametrize("damage", ["{", "[]", '{"1": 2}', "", None])
def test_a_cache_that_cannot_be_used_costs_time_alone(damage: str | None, tmp_path: Path, read: list[str]) -> None:
    (tmp_path / "large").write_bytes(b"a" * 2**20)
    cache = digests.cache_path()
    if damage is None:  # a file where its folder should be
        cache.parent.parent.mkdir()
        cache.parent.write_text("")
    else:
        cache.parent.mkdir(parents=True)
        cache.write_text(damage)
    expected = "9bc1b2a288b26af7257a36277ae3816a7d4f16e89c1e7e77d0a5c48bad62b360"  # of sha256sum
    assert digests.file_digest(tmp_path / "large") == digests.file_digest(tmp_path / "large") == expected
    assert len(read) == (2 if damage is None else 1)


# --- records


def test_records_are_appended_and_only_what_differs(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [f"data.train_files=[{place}/train.jsonl,{place}/more.jsonl]"]
    config, folder = load_config([*overrides, "model.path=m"]), tmp_path / "run"
    write_records(folder, config, TRAIN, None)
    first = {path.name: path.read_bytes() for path in folder.glob("*_version*")}
    write_records(folder, config, TRAIN, Saved(tmp_path, {"trainer": {"step": 4}}))
    assert {path.name: path.read_bytes() for path in folder.glob("*_version*")} == first
    monkeypatch.setenv("WITHLENGTH", "1")
    (place / "more.jsonl").write_text("another")
    change = {"WITHLENGTH": {"before": None, "now": "1"}}
    write_records(folder, config, TRAIN, Saved(tmp_path, {"trainer": {"step": 6}}, change))
    code, data = read_jsonl(folder / "code_version.json"), read_jsonl(folder / "data_versions.jsonl")
    assert [(row["step"], row.get("WITHLENGTH")) for row in code] == [(0, None), (6, "1")]
    assert [(row["step"], Path(row["source"]).name) for row in data] == [
        (0, "train.jsonl"),
        (0, "more.jsonl"),
        (6, "more.jsonl"),
    ]
    assert data[1]["sha256"] != data[2]["sha256"]
    assert read_jsonl(folder / CHANGES) == [{"step": 6, "changed": change}]
    (folder / "data_versions.jsonl").write_text("[1]\n")
    with pytest.raises(DataError, match=r"data_versions\.jsonl: is damaged.*Move it"):
        append_changed(folder / "data_versions.jsonl", [{"source": "a"}], 7, key="source")
