"""Coding agents as they come from npm: each trains one step with the real engine, on a small repository."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.conftest import need_vllm
from tests.examples.test_agents import CODING, FOLDER, environment
from tests.support.tiny import save_long_model
from tests.verl.trainer.test_run import rows, start_code
from toolrl.analysis.report.loss import computed_loss, sum_check
from toolrl.analysis.samples.sample_files import read_samples, samples_path

pytestmark = pytest.mark.slow
N = 2  # episodes
OVERHEARD = """
import json, os, sys
from tests.examples.test_agents import Overheard, in_ledger
from verl.episodes.episode import EpisodeRunner
from verl.trainer.main_ppo import main

async def overheard(self, engine, *given, run=EpisodeRunner.run):
    engine = Overheard(engine)
    found = await run(self, engine, *given)
    segments = {}
    for turn in found.turns:
        tokens, mask = segments.setdefault(turn.segment, ([], []))
        tokens += [*turn.context_ids, *turn.completion.token_ids]
        mask += [*[False] * len(turn.context_ids), *[True] * len(turn.completion.token_ids)]
    with open(os.environ["OVERHEARD"], "a") as log:
        seen = {"ledger": in_ledger(found), "engine": engine.requests, "segments": [*segments.values()]}
        log.write(json.dumps(seen) + chr(10))
    return found

if __name__ == "__main__":
    EpisodeRunner.run = overheard
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("name", CODING)
def test_a_coding_agent_trains_a_step_on_what_the_engine_sampled(name: str, tmp_path: Path) -> None:
    """Tokens of the engine, the ledger and the update are equal. One episode has the reward 1.0, the other 0.0."""
    need_vllm()
    environment(name)
    (tmp_path / ".agents").symlink_to(FOLDER)
    extra = {"files": {"f.py": "def f():\n    return 2\n"}, "test": f"mkdir {tmp_path / 'first'}"}
    row = {"messages": [{"role": "user", "content": "Make f() return 3 in f.py."}], "extra_info": extra}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    overrides = [
        *(f"data={tmp_path / 'rows.jsonl'}", f"model={save_long_model(tmp_path / 'model')}", f"agent={name}"),
        *("env.tool_call_format=hermes", "env.max_turns=3", "rollout.num_engines=1", f"rollout.n={N}"),
        *("data.train_batch_size=1", "actor.ppo_mini_batch_size=1", "actor.optim.lr=1e-3"),
        *("data.max_prompt_length=24576", "data.max_response_length=4096", "trainer.total_training_steps=1"),
        *(f"trainer.default_local_dir={tmp_path}", "trainer.experiment_name=run", "trainer.save_freq=0"),
        *("trainer.test_freq=0", "model.compute_dtype=float32", "trainer.device=cpu"),
    ]
    log = tmp_path / "overheard.jsonl"
    process = start_code(OVERHEARD, *overrides, cwd=tmp_path, OVERHEARD=str(log))
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    played = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(played) == N and all(sorted(each["ledger"]) == sorted(each["engine"]) for each in played)
    (step,) = (row for row in rows(tmp_path) if row["step"] == 1)
    assert math.isfinite(step["actor/loss"]) and 0 < step["actor/grad_norm"] < math.inf
    kept = read_samples(samples_path(tmp_path / "run", 1))
    updated = sorted([sample.token_ids.tolist(), sample.mask.tolist()] for sample in kept.samples)
    assert updated == sorted(segment for each in played for segment in each["segments"])
    check = sum_check(kept, computed_loss(kept), step["actor/loss"])
    assert check.agrees, check.text
    lengths = [(len(shown), len(output)) for each in played for shown, output in each["engine"]]
    print(f"{name}: (prompt, response) {lengths}, loss {step['actor/loss']:.4f}, norm {step['actor/grad_norm']:.4f}")
