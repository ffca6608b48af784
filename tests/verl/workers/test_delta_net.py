"""Gated delta nets by kernels: equal to the loop over segments and to each sequence alone; what they are called with.

The kernels here are transformers' formulas in PyTorch with the arguments of fla-core's.
"""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from tests.conftest import ROOT
from tests.verl.workers.test_parity import own_logprobs
from tests.verl.workers.test_state import BOUND, CHAINS, largest_gap, mixers, model_of, segments_of, some_samples
from verl.batch.packed import Segment
from verl.batch.packing import make_units, pack
from verl.batch.samples import batch_of
from verl.errors import ConfigError
from verl.workers import delta_net
from verl.workers.delta_net import DeltaKernels, delta_plan, use_kernels, use_packages
from verl.workers.model import PackedPolicy, checkpoint_layers
from verl.workers.state import by_formulas, separate_states

KINDS = ["qwen3_5_text", "olmo_hybrid"]
CPU = torch.device("cpu")


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, None]:
    """As fla's over one row, which begins with zeros."""
    assert activation == "silu" and len(x) == 1 and x.is_contiguous()
    channels, width = weight.shape
    outputs = conv1d(x.transpose(1, 2), weight[:, None], bias, padding=width - 1, groups=channels)
    return silu(outputs[..., : x.shape[1]]).transpose(1, 2), None


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """As fla's over sequences side by side."""
    before = options.pop("initial_state")
    assert torch.equal(cu_seqlens, cu_seqlens_cpu) and int(cu_seqlens[-1]) == q.shape[1]
    formula: Callable[..., tuple[Tensor, Tensor]] = torch_chunk_gated_delta_rule.__wrapped__
    times = v.shape[2] // k.shape[2]
    of_heads = (q.repeat_interleave(times, 2), k.repeat_interleave(times, 2), v, g, beta)
    pairs = []
    for number, (start, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)):
        q_, k_, v_, g_, beta_ = (each[:, start:end] for each in of_heads)
        initial = None if before is None else before[number : number + 1]
        pairs.append(formula(q_, k_, v_, g=g_, beta=beta_, initial_state=initial, **options))
    outputs, states = zip(*pairs, strict=True)
    return torch.cat(outputs, dim=1), torch.cat(states) if options["output_final_state"] else None


KERNELS = DeltaKernels(convolve, delta_rule)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_random_packs_equal_separate_sequences(kind: str, seed: int) -> None:
    """As with the loop over segments (test_state.py)."""
    model, samples = model_of(kind).train(), some_samples(seed)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    policy, batch = PackedPolicy(model), batch_of(samples)
    use_kernels(policy, KERNELS)
    packed = pack(make_units(batch, share_prefix=True, max_tokens=10_000), batch)
    if seed % 2:
        checkpoint_layers(policy, 2)
    found_A = policy(packed, 0.7, False).logprobs
    expected = [own_logprobs(plain, each) for each in samples]
    for number, each in enumerate(expected):
        torch.testing.assert_close(found_A[packed.sample == number], each, rtol=0, atol=BOUND)
    ours = torch.autograd.grad((found_A * (1 + packed.sample)).sum(), [*model.parameters()], allow_unused=True)
    loss = torch.stack([(1 + number) * each.sum() for number, each in enumerate(expected)]).sum()
    assert largest_gap(ours, torch.autograd.grad(loss, [*plain.parameters()], allow_unused=True)) < BOUND


# Prompts behind responses
FOREST = [(3, None), (2, 0), (70, None), (1, 2), (4, 0), (2, 3), (5, None)]


@pytest.mark.parametrize("chain", [*CHAINS, FOREST], ids=["short", "long", "forest"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_equals_the_loop_over_its_segments(kind: str, chain: list[tuple[int, int | None]]) -> None:
    """Prefixes of prefixes, and one-token segments; the gradients, too."""
    model = model_of(kind)
    separate_states(model.get_decoder())
    segments = segments_of(chain)
    hidden = torch.randn(1, segments[-1].end, model.config.hidden_size, requires_grad=True)
    weight = torch.randn_like(hidden)
    results = []
    for _ in ("loop", "kernels"):
        layer = mixers(model)[0]
        layer.segments = segments
        inputs = [hidden, *layer.module.parameters()]
        output = layer(hidden)
        results.append((output, torch.autograd.grad((output * weight).sum(), inputs)))
        use_kernels(model, KERNELS)
    (expected, theirs), (found, ours) = results
    assert not torch.equal(found, torch.zeros_like(found))
    torch.testing.assert_close(found, expected, rtol=BOUND, atol=BOUND)
    assert largest_gap(ours, theirs) < BOUND


def test_the_plan_of_a_pack_by_hand() -> None:
    """Two prompts of 2 and 1 tokens, each with a response; a convolution over three tokens."""
    segments = (Segment(0, 2), Segment(2, 5, 0), Segment(5, 6), Segment(6, 8, 2))
    plan = delta_plan(segments, 3, CPU)
    assert plan.order.keys.tolist() == [0, 1, 5, 2, 3, 4, 6, 7]  # prompts first
    assert plan.back.keys.tolist() == [0, 1, 3, 4, 5, 2, 6, 7]
    zero = 8
    behind = [[zero, zero, 0, 1], [zero, zero, 2], [0, 1, 3, 4, 5], [zero, 2, 6, 7]]
    assert plan.behind_prefixes.keys.tolist() == [each for part in behind for each in part]
    assert plan.own.keys.tolist() == [2, 3, 6, 9, 10, 11, 14, 15]
    prompts, responses = plan.levels
    assert prompts.ends.tolist() == [0, 2, 3] and prompts.prefixes is None and prompts.continued
    assert responses.ends.tolist() == [0, 3, 5] and responses.prefixes is not None and not responses.continued
    assert responses.prefixes.tolist() == [0, 1] and (prompts.tokens, responses.tokens) == (3, 5)


def test_a_rule_is_called_once_per_level() -> None:
    calls: list[tuple[int, bool]] = []

    def counted(*args: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        calls.append((len(options["cu_seqlens"]) - 1, options["output_final_state"]))
        return delta_rule(*args, **options)

    policy, batch = PackedPolicy(model_of("qwen3_5_text")), batch_of(some_samples(0))
    use_kernels(policy, DeltaKernels(convolve, counted))
    packed = pack(make_units(batch, share_prefix=True, max_tokens=10_000), batch)
    policy(packed, 1.0, False)
    prompts = sum(each.prefix is None for each in packed.segments)
    assert calls == [(prompts, True), (len(packed.segments) - prompts, False)]


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "Qwen3_5GatedDeltaNet: one sequence of a pack after the other; pip install 'fla-core<0.7,>=0.6'"),
        ("0.5.2", "Qwen3_5GatedDeltaNet: one sequence of a pack after the other; pip install 'fla-core<0.7,>=0.6'"),
        ("0.6.0", "Qwen3_5GatedDeltaNet: all sequences of a pack at once, by fla-core 0.6.0"),
    ],
)
def test_how_layers_are_computed_is_logged(
    version: str | None, message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def installed(name: str) -> str:
        if version is None or name != "fla-core":
            raise delta_net.importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(delta_net.importlib.metadata, "version", installed)
    monkeypatch.setattr(delta_net, "fla_kernels", lambda: KERNELS)
    policy = PackedPolicy(model_of("qwen3_5_text"))
    with caplog.at_level(logging.WARNING):
        use_packages(policy)
    assert message in caplog.text
    used = [each for each in mixers(policy) if isinstance(each, delta_net.ByLevels)]
    assert len(used) == (1 if version == "0.6.0" else 0)


def test_other_layers_with_state_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        use_packages(PackedPolicy(model_of("granitemoehybrid")))
    (message,) = caplog.messages
    assert message.startswith("GraniteMoeHybridMambaLayer: one sequence of a pack after the other, by the kernels that")


def test_an_activation_that_the_kernels_leave_out_stays_in_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("qwen3_5_text")
    layer = model.get_decoder().layers[0].linear_attn
    layer.activation = "gelu"
    policy = PackedPolicy(model)
    use_kernels(policy, KERNELS)
    assert not any(isinstance(each, delta_net.ByLevels) for each in mixers(policy))


def test_a_package_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_net, "fla_release", lambda: "0.6.0")
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ConfigError, match=r"fla-core is installed but cannot be imported .*fused_kernels=none"):
        use_packages(PackedPolicy(model_of("qwen3_5_text")))


PACKAGES = {  # where transformers looks for kernels
    "fla/__init__.py": "",
    "fla/ops/__init__.py": "",
    "fla/ops/gated_delta_rule/__init__.py": "chunk_gated_delta_rule = fused_recurrent_gated_delta_rule = REFUSE",
    "causal_conv1d/__init__.py": "causal_conv1d_fn = causal_conv1d_update = REFUSE",
}
REFUSES = "def REFUSE(*args, **options): raise RuntimeError('a kernel for a GPU')\n"
CHECK = """
import sys
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs
from tests.support.stateful import STATEFUL
from tests.verl.workers.test_parity import tiny_config
from verl.workers.parity import packing_gap
try:
    theirs.torch_chunk_gated_delta_rule(None, None, None, None, None)
except RuntimeError as error:
    assert "a kernel for a GPU" in str(error)
    print("seen", packing_gap(tiny_config("qwen3_5_text", **STATEFUL["qwen3_5_text"])) < 1e-5)
"""


def test_packages_of_kernels_do_not_compute_on_a_cpu(tmp_path: Path) -> None:
    """transformers takes them wherever they can be imported. The start check runs on a CPU, also before a GPU's run."""
    for name, text in PACKAGES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(REFUSES + text)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", CHECK], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["seen", "True"], done.stderr


def test_formulas_are_found_in_modules_that_the_package_kernels_makes() -> None:
    """As its `_create_func_module` does."""
    wrapped: Any = torch_chunk_gated_delta_rule

    class Func(torch.nn.Module):
        def forward(self, *args: Any, **options: Any) -> Any:
            return wrapped(*args, **options)

    forward = FunctionType((lambda: rule()).__code__, {"rule": Func()})  # type: ignore[name-defined]  # noqa: F821
    found: Any = by_formulas(forward)
    assert found.__globals__["rule"] is torch_chunk_gated_delta_rule.__wrapped__


def test_a_forward_by_formulas_calls_what_transformers_wraps() -> None:
    model = model_of("qwen3_5_text")
    separate_states(model.get_decoder())
    forward = type(mixers(model)[0].module).forward
    found: Any = by_formulas(forward)
    assert found.__globals__["torch_chunk_gated_delta_rule"] is torch_chunk_gated_delta_rule.__wrapped__
    assert found.__globals__["F"] is torch.nn.functional
