"""A teacher behind an OpenAI server: its log-probs of every sample, what it may not be, and vLLM's own."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import need_vllm
from tests.support.local_run import local_fit, local_trainer
from tests.support.tiny import MINI, run_overrides
from tests.toolrl.serve.openai_server.test_serve import serving
from toolrl.analysis.collapse.collapse import CollapseWatch
from verl.batch.packing import Sharding
from verl.batch.token_batch import TokenBatch
from verl.build.algorithm import algorithm_of
from verl.build.ranks import abs_paths, rank_spec
from verl.build.teacher import connect_teacher
from verl.checkpoint.contents import contents_of
from verl.config.load import flattened, load_config
from verl.errors import ConfigError, ServiceDownError
from verl.host.daemon import run_async
from verl.tracking.jsonl import read_jsonl
from verl.trainer import teacher_server as module
from verl.trainer.teacher_server import TeacherServer, teacher_server

VOCABULARY = range(3000)


def text(ids: Any) -> str:
    return "".join(f"<{each}>" for each in ids)


class Server(ThreadingHTTPServer):
    """Answers as vLLM 0.32 does: the log-prob of token t after token s is -(10 s + t) / 100.

    change: of the answer to a path, (path, answer, number of the request) -> (status, answer)
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.change: Callable[[str, Any, int], tuple[int, Any]] = lambda path, answer, number: (200, answer)
        self.requests: list[Any] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._send({"object": "list", "data": [{"id": "big", "object": "model", "max_model_len": 64}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        if self.path == "/detokenize":
            return self._send({"prompt": text(request["tokens"])})
        assert self.path == "/v1/completions" and request["max_tokens"] == 1
        ids, k = request["prompt"], request["prompt_logprobs"]
        scores = [
            {str(each): {"logprob": -(10 * s + each) / 100, "rank": each + 1} for each in (t, *range(k))}
            for s, t in pairwise(ids)
        ]
        found = [None, *scores]
        return self._send({"choices": [{"index": 0, "text": "a", "prompt_logprobs": found}]})

    def _send(self, answer: Any) -> None:
        status, changed = self.server.change(self.path, answer, len(self.server.requests))
        body = json.dumps(changed).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(module, "_WAITS_S", (0.0, 0.0))
    with Server() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def connect(server: Server, num_tokens: int = 63) -> TeacherServer:
    return run_async(teacher_server(server.url, num_tokens, VOCABULARY, text, len(VOCABULARY)))


def sharding(*samples: tuple[list[int], list[bool]]) -> Sharding:
    ids, masks = ([sample[part] for sample in samples] for part in (0, 1))
    batch = TokenBatch(
        token_ids=np.array([each for row in ids for each in row], dtype=np.int32),
        action_mask=np.array([each for row in masks for each in row], dtype=bool),
        num_tokens=np.array(list(map(len, ids))),
        num_trained=np.array(list(map(sum, masks))),
        groups=np.arange(len(ids)),
    )
    return Sharding(batch, [], 1)


NO, YES = False, True
SAMPLES = sharding(([1, 2, 3, 4, 5], [NO, YES, NO, YES, NO]), ([7, 8], [NO, NO]), ([9, 1], [NO, YES]))


def test_log_probs_of_the_trained_tokens_by_hand(server: Server) -> None:
    """Of 2 after 1, 4 after 3 and 1 after 9; what follows the last trained token is not sent, nor is its sample."""
    scores = connect(server).score(SAMPLES)
    assert scores.dtype == np.float32 and scores.tolist() == pytest.approx([-0.12, -0.34, -0.91])
    prompts = [request["prompt"] for request in server.requests if "prompt" in request]
    assert sorted(prompts) == [[1, 2, 3, 4], [9, 1]]


def test_the_likeliest_tokens_by_hand(server: Server) -> None:
    """After 1, 3 and 9 these are 0 and 1; 2, 4 and 1 of the prompts are listed, too."""
    found = connect(server).top(SAMPLES, 2)
    assert found["ids"].tolist() == [[0, 1]] * 3
    np.testing.assert_allclose(found["logprobs"], [[-0.1, -0.11], [-0.3, -0.31], [-0.9, -0.91]], rtol=1e-6)
    assert [request["prompt_logprobs"] for request in server.requests if "prompt" in request] == [2, 2]


@pytest.mark.parametrize(
    ("by_id", "problem"),
    [
        ({"0": -1.0}, "1 tokens of rank 1 to 2"),
        ({"0": -1.0, "7": -3.0}, "2 tokens of rank 1 to 2"),
        ({"0": -1.0, "3000": -2.0}, "the token id 3000 of 3000"),
    ],
)
def test_likeliest_tokens_that_cannot_be_used(by_id: dict[str, float], problem: str, server: Server) -> None:
    """Fewer than were asked for, one of rank 3, and one that the policy does not have."""
    teacher = connect(server)
    entry = {token: {"logprob": each, "rank": round(-each)} for token, each in by_id.items()}
    server.change = lambda *_: (200, choices([None, *[entry] * 4]))
    with pytest.raises(ServiceDownError, match=problem):
        teacher.top(sharding(([1, 2, 3, 4, 5], [NO, YES, NO, YES, YES])), 2)


def test_the_whole_vocabulary_is_compared(server: Server) -> None:
    connect(server)
    compared = [each for request in server.requests for each in request["tokens"]]
    assert sorted(compared) == list(VOCABULARY)


def with_prompt(change: Callable[[str], str]) -> Callable[[str, Any, int], tuple[int, Any]]:
    return lambda path, answer, _: (200, {"prompt": change(answer["prompt"])} if path == "/detokenize" else answer)


def test_one_other_token_is_refused(server: Server) -> None:
    server.change = with_prompt(lambda found: found.replace("<2047>", "<2046>"))
    with pytest.raises(ConfigError, match="other texts for the ids 1024 to 2047 than the policy's"):
        connect(server)


def test_a_context_that_is_too_short_is_refused(server: Server) -> None:
    """A request has the tokens and one that the server writes."""
    with pytest.raises(ConfigError, match=r"is 64 tokens, but the teacher at .* supports 64, one more"):
        connect(server, num_tokens=64)


def test_a_server_of_several_models_is_refused(server: Server) -> None:
    several = {"data": [{"id": "big"}, {"id": "other"}]}
    server.change = lambda path, answer, _: (200, several if path == "/v1/models" else answer)
    with pytest.raises(ConfigError, match=r"has several models \(big, other\); serve the teacher alone"):
        connect(server)


def test_a_server_without_detokenize_is_named(server: Server) -> None:
    server.change = lambda path, answer, _: (404, {"detail": "Not Found"}) if path == "/detokenize" else (200, answer)
    with pytest.raises(ServiceDownError, match=r"/detokenize: returned status 404: .*Not Found"):
        connect(server)


def test_a_busy_server_is_asked_again(server: Server) -> None:
    teacher = connect(server)
    failed: list[int] = []

    def change(path: str, answer: Any, number: int) -> tuple[int, Any]:
        failed.append(number)
        return (503, {}) if len(failed) <= 2 else (200, answer)

    server.change = change
    assert len(teacher.score(SAMPLES)) == 3
    server.change = lambda path, answer, _: (503, {})
    with pytest.raises(ServiceDownError, match=r"the teacher at .*/completions: returned status 503"):
        teacher.score(SAMPLES)


def choices(found: Any) -> Any:
    return {"choices": [{"prompt_logprobs": found}]}


@pytest.mark.parametrize(
    "answer",
    [{}, {"choices": []}, choices(None), choices([None]), choices([None] * 4), choices([None, {"0": {}}, {}, {}]), [1]],
)
def test_an_answer_without_log_probs_is_a_fault(answer: Any, server: Server) -> None:
    teacher = connect(server)
    server.change = lambda *_: (200, answer)
    with pytest.raises(ServiceDownError, match=r"has no prompt_logprobs of the tokens|is no JSON \(no object\)"):
        teacher.score(SAMPLES)


def test_a_server_that_is_gone(server: Server) -> None:
    teacher = connect(server)
    server.shutdown()
    server.server_close()
    with pytest.raises(ServiceDownError, match="ConnectError"):
        teacher.score(SAMPLES)


def test_another_temperature_is_refused() -> None:
    overrides = ["teacher.path=http://h/v1", "rollout.temperature=0.9"]
    with pytest.raises(ConfigError, match=r"at temperature 1, and the policy samples at rollout.temperature=0.9"):
        connect_teacher(load_config([*run_overrides(MINI / "model", Path("out"), "hf", 1), *overrides]))


@pytest.mark.parametrize("more", [["algorithm.kl_placement=none"], ["algorithm.kl_placement=loss", "lora.rank=4"]])
def test_a_served_teacher_has_nothing_to_offload(more: list[str]) -> None:
    settings = [*run_overrides(MINI / "model", Path("out"), "hf", 1), "ref.offload_params=true", *more]
    with pytest.raises(ConfigError, match=r"ref.offload_params=.* has no effect"):
        load_config([*settings, "trainer.device=cuda", "teacher.path=http://h/v1"])
    load_config([*settings, "trainer.device=cuda", "teacher.path=folder"])


def test_a_served_teacher_is_no_model_of_the_ranks() -> None:
    settings = [*run_overrides(MINI / "model", Path("out"), "hf", 1), "teacher.path=http://h/v1"]
    config = abs_paths(load_config(settings))
    assert config.teacher.url == config.teacher.path == "http://h/v1"
    assert rank_spec(config, algorithm_of(config), "cpu", 1).teacher_path is None
    assert "teacher.path" not in contents_of(flattened(asdict(config)), reads_weights=True)


@pytest.mark.long
def test_vllm_scores_as_the_ranks_do(tmp_path: Path) -> None:
    """Two steps with a changed copy of the policy as the teacher, served by vLLM or on the rank, in float32: by the
    sampled tokens, and by the likeliest five."""
    need_vllm()
    folder = tmp_path / "teacher"
    shutil.copytree(MINI / "model", folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    noise = {name: torch.randn(each.shape, generator=generator) for name, each in weights.items()}
    save_file(
        {name: each + 0.03 * noise[name].to(each.dtype) for name, each in weights.items()}, folder / "model.safetensors"
    )

    def divergences(name: str, *more: str) -> list[float]:
        settings = run_overrides(MINI / "model", tmp_path / name, "hf", 2)
        config = load_config([*settings, "trainer.num_threads=1", "algorithm.name=opd", "actor.optim.lr=1e-3", *more])
        with local_trainer(config) as trainer:
            asyncio.run(local_fit(trainer, config, CollapseWatch()).run())
        rows = read_jsonl(tmp_path / name / "run" / "metrics.jsonl")
        return [row[key] for row in rows for key in ("kl/teacher", "actor/teacher_kl") if key in row]

    with serving(folder, tmp_path / "log", "--tool-call-format", "toolrl") as url:
        served = divergences("served", f"teacher.path={url}")
        served += divergences("served-top", f"teacher.path={url}", "teacher.top_k=5")
    ours = divergences("ours", f"teacher.path={folder}")
    ours += divergences("ours-top", f"teacher.path={folder}", "teacher.top_k=5")
    assert len(ours) == 4 and min(map(abs, ours)) > 0.01
    assert served == pytest.approx(ours, rel=0.01)
