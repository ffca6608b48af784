"""Another author's run folder, given to every command that takes one: what it names is reported, and not run."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tests.toolrl.serve.openai_server.test_serve import SETTINGS, make_run
from toolrl.analysis.explain.gradient import gradient_share
from toolrl.analysis.replay.__main__ import main as replay
from toolrl.analysis.replay.record import Recorder
from toolrl.serve.chat import main as chat
from toolrl.serve.export.__main__ import main as export
from toolrl.serve.openai_server.__main__ import serving_command
from toolrl.serve.openai_server.served_model import find_model, trained_format
from toolrl.serve.openai_server.serving_files import TOOL_PARSER, is_our_parser, serving_texts
from verl.batch.samples import Sample, batch_of
from verl.checkpoint.manifest import read_manifest
from verl.config.load import flattened, load_config
from verl.config.schema import Config
from verl.errors import ConfigError, DataError
from verl.workers.checkpoint_reader import TensorPlanner, TensorReader

CODE = (
    "from pathlib import Path\nPath({ran!r}).write_text('ran')\n"
    "from verl.algorithms.algorithm import load_preset\nfrom toolrl.formats.hermes import HermesFormat as Format\n"
    "preset = load_preset('grpo')\n"
)


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """What the code of the folder leaves if it runs."""
    (tmp_path / "own.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    return tmp_path / "ran"


class Calls:
    """A pickle that writes a file."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.write_text, (self.ran, "ran")


def recorded(folder: Path, **settings: Any) -> Path:
    """A folder with the record of step 1."""
    sample = Sample(
        token_ids=np.array([1, 2, 3]),
        action_mask=np.array([False, True, True]),
        rollout_logprobs=np.zeros(2, dtype=np.float32),
        group=0,
        reward=1.0,
    )
    made_by = {"device": "cpu", "total_steps": 1}
    known = flattened({"trainer": {"n_gpus_per_node": 1}})
    Recorder(folder, {**known, **settings}, made_by).write(1, batch_of([sample]), {}, {"actor/loss": 0.1})
    return folder


@pytest.mark.parametrize(
    ("key", "form"),
    [
        ("algorithm.name", "{}"),
        ("algorithm.filters", [{"name": "{}"}]),
        ("algorithm.filters", ["os:popen"]),
        ("algorithm.options.mine", "{}"),
    ],
)
def test_a_replay_runs_no_code_of_the_record(
    key: str, form: Any, ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = json.loads(json.dumps(form).replace("{}", f"{ran.parent}/own.py:preset"))
    run = recorded(ran.parent / "run", **{key: value})
    assert replay([str(run), "--step", "1"]) == 2
    output = " ".join(capsys.readouterr().out.split())
    assert "the record of step 1 names code, which --user-code runs: " in output and key in output
    with pytest.raises(ConfigError, match="which --user-code runs"):
        gradient_share(run, 1, 0)
    assert not ran.exists()


def test_a_replay_does_not_need_the_code_that_it_does_not_run(ran: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reward of one's own: the record holds what it gave. Here the settings are of another version."""
    run = recorded(ran.parent / "run", **{"reward.name": f"{ran.parent}/own.py:f", "no.such_key": 1})
    assert replay([str(run), "--step", "1"]) == 2
    assert "unknown key 'no.such_key'" in capsys.readouterr().out and not ran.exists()


@pytest.mark.parametrize("where", ["resume_config", "tool_call_format"])
def test_a_model_of_a_run_is_not_read_with_the_code_of_its_record(
    where: str, ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{ran.parent}/own.py:Format"
    run = make_run(ran.parent / "run", {**SETTINGS, "env.tool_call_format": name if where == "resume_config" else None})
    state = run / "checkpoints" / "step-000048" / "state.json"
    if where == "tool_call_format":
        state.write_text(json.dumps({**json.loads(state.read_text()), where: name}))
    message = f"names code as env.tool_call_format, which is run only if you name it: --tool-call-format {name}"
    with pytest.raises(ConfigError, match=r"names code as env\.tool_call_format"):
        trained_format(find_model(str(run)), "{{ tools }}")
    assert chat([str(run), "trainer.device=cpu", "rollout.name=hf"]) == 2
    assert message in " ".join(capsys.readouterr().out.split())
    assert export([str(run), "--out", str(ran.parent / "out")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not ran.exists() and not (ran.parent / "out").exists()
    assert export([str(run), "--out", str(ran.parent / "out"), "--tool-call-format", name]) == 0
    assert ran.exists()


def test_a_tool_parser_is_imported_only_if_we_wrote_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    model = find_model(str(run))
    ours = serving_texts(model.folder, trained_format(model, "{{ tools }} <tool_call>"))[TOOL_PARSER]
    path = tmp_path / TOOL_PARSER
    for text, known in (
        (ours, True),
        (ours + "\nimport os\n", False),
        (ours.replace('"toolrl"', '"os:popen"'), False),
        (ours.replace("json.loads('{}')", "json.loads('{}', cls=print)"), False),
        (ours.replace("json.loads('{}'), ", "json.loads('{}' + input() + ''), "), False),
        (ours.replace("'{}'", "''')\nimport os\n('''"), False),
        ("import os\n" + ours, False),
        ("", False),
    ):
        path.write_text(text)
        assert is_our_parser(path) is known, text
    hf = model.folder
    (hf / TOOL_PARSER).write_text("import os\n")
    (hf / "tool_chat_template.jinja").write_text("x")
    options = SimpleNamespace(
        model=str(hf.rename(tmp_path / "exported")), checkpoint="latest", tool_call_format=None, prompt_template=None
    )
    options.host, options.port, options.option, options.more, options.name = "127.0.0.1", 0, [], [], None
    try:
        import vllm  # noqa: F401
    except ImportError:
        return
    with pytest.raises(ConfigError, match="is code that toolrl did not write, so it is not imported"):
        serving_command(options, [])  # type: ignore[arg-type]


# --- checkpoints

alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    generator = {"numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    save(
        {"weight": torch.arange(4.0), "lr": 0.5, "host": ({"base_lrs": [0.1]}, [generator])},
        checkpoint_id=tmp_path / "c",
    )
    return tmp_path / "c"


def loaded(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = {"weight": torch.zeros(4), "lr": None, "host": None}
    load(state, storage_reader=TensorReader(folder), planner=TensorPlanner())
    return state


@alone
def test_a_checkpoint_comes_back_as_it_was_written(checkpoint: Path) -> None:
    state, plain = loaded(checkpoint), {"weight": torch.zeros(4), "lr": None, "host": None}
    load(plain, checkpoint_id=checkpoint)
    assert torch.equal(state["weight"], torch.arange(4.0)) and state["lr"] == 0.5
    assert repr(state["host"]) == repr(plain["host"])


@alone
def test_the_index_of_a_checkpoint_calls_nothing(checkpoint: Path, ran: Path) -> None:
    index = checkpoint / ".metadata"
    whole: Metadata = pickle.loads(index.read_bytes())
    whole.planner_data = Calls(ran)
    index.write_bytes(pickle.dumps(whole))
    ran.unlink(missing_ok=True)
    with pytest.raises(BaseException, match="which is no part of one and is not run"):
        loaded(checkpoint)
    assert not ran.exists()


@alone
@pytest.mark.parametrize("name", ["lr", "weight"])
def test_the_objects_of_a_checkpoint_call_nothing(name: str, checkpoint: Path, ran: Path) -> None:
    """Also where the index declares a tensor to be an object."""
    index = checkpoint / ".metadata"
    whole: Metadata = pickle.loads(index.read_bytes())
    (place,) = [each for each in whole.storage_data if each.fqn == name]
    found = whole.storage_data[place]
    path = checkpoint / "evil.distcp"
    torch.save(Calls(ran), path)
    found.relative_path, found.offset, found.length = path.name, 0, path.stat().st_size
    if name == "weight":
        assert isinstance(whole.state_dict_metadata[name], TensorStorageMetadata)
        whole.state_dict_metadata[name] = BytesStorageMetadata()
        whole.storage_data = {
            (type(place)(name) if each == place else each): info for each, info in whole.storage_data.items()
        }
    index.write_bytes(pickle.dumps(whole))
    ran.unlink(missing_ok=True)
    with pytest.raises(BaseException, match=r"[Uu]nsupported|weights_only|Weights only"):
        loaded(checkpoint)
    assert not ran.exists()


@pytest.mark.parametrize("name", ["../../own.py", "/etc/passwd", "own.py:preset"])
def test_a_manifest_names_files_of_its_checkpoint_alone(name: str, tmp_path: Path, ran: Path) -> None:
    folder = tmp_path / "step-000001"
    folder.mkdir()
    entry = {name: {"size": 1, "sha256": "0"}}
    (folder / "manifest.json").write_text(
        json.dumps({"format": 1, "step": 1, "number": 1, "score": None, "files": entry})
    )
    if ":" in name:
        assert read_manifest(folder).files == entry  # a file of that name
    else:
        with pytest.raises(DataError, match="is damaged"):
            read_manifest(folder)
    assert not ran.exists()


def test_a_run_given_as_a_model_brings_no_settings(tmp_path: Path, ran: Path) -> None:
    run = make_run(tmp_path / "run", {**SETTINGS, "reward.name": f"{ran.parent}/own.py:f"})
    (run / "config.yaml").write_text(f"reward: {{name: '{ran.parent}/own.py:f'}}\n")
    config = load_config([f"model={run}", "data.train_files=[x]"])
    assert config.model.path == str(run / "checkpoints" / "step-000048" / "hf")
    assert config.reward == Config().reward and not ran.exists()
