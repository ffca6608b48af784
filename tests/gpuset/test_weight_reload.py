"""Weight sync into vLLM's own model classes: every architecture of docs/training.md, on CPU tensors.

What arrives must be what vLLM loads itself from the same weights, in the same memory (CUDA graphs keep addresses).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.verl.workers.test_parity import FULL, SLIDING, tiny_config
from verl.errors import EngineError
from verl.rollout.vllm_engine import VLLMSettings, _compare, _known_names, engine_arguments
from verl.rollout.vllm_extension import WeightReceiver
from verl.transfer.bucket import plan
from verl.transfer.shared_memory import SharedMemory

pytestmark = pytest.mark.gpuset
BUCKET_BYTES = 20_000  # a layer is spread over several
# Windows change no weight, and vLLM refuses some. A head of its own: the two ways in which vLLM loads a tied one.
KINDS = {**SLIDING, **FULL, "olmo": {"num_key_value_heads": 4}}  # vLLM's OLMo has as many key heads as query heads
UNUSABLE = ("olmo3", "glm4")  # below
CASES = [(kind, settings, True) for kind, settings in KINDS.items() if kind not in UNUSABLE]
CASES += [(kind, {}, False) for kind in ("llama", "qwen2", "qwen3")]
NAMES = [f"{kind}-{'tied' if tied else 'untied'}" for kind, _, tied in CASES]


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's models need its process groups, of one process here."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    store = tmp_path_factory.mktemp("group") / "store"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1, backend="gloo")
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


class Worker(WeightReceiver):
    """What the receiver uses of vLLM's worker, around a model that vLLM has built and not loaded."""

    def __init__(self, config: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        self.vllm_config, self.device, self.rank = config, torch.device("cpu"), 0
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            self.model = initialize_model(config)
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)

    def load(self, weights: dict[str, Tensor]) -> None:
        """As vLLM loads a checkpoint."""
        from vllm.config import set_current_vllm_config

        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            self.model.load_weights((name, weight.detach()) for name, weight in weights.items())

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters(remove_duplicate=False))


def vllm_config(folder: Path, settings: VLLMSettings | None = None) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    settings = settings or VLLMSettings(model_path=str(folder), max_model_len=64)
    config = AsyncEngineArgs(**engine_arguments(settings, on_cpu=False)).create_engine_config()
    config.device_config.device = torch.device("cpu")
    return config


def untrained(config: PretrainedConfig, folder: Path) -> dict[str, Tensor]:
    """Saves a random model; returns its weights, with a tied head under both of its names."""
    torch.manual_seed(0)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder)
    return dict(model.named_parameters(remove_duplicate=False))


def send(worker: Worker, weights: dict[str, Tensor]) -> list[str]:
    """A weight sync, as the engine drives it; the parameters that were not loaded."""
    layouts = plan(weights.items(), torch.bfloat16, BUCKET_BYTES)
    known = set(worker.weight_names())
    _compare(_known_names(layouts, known), known)
    sender = SharedMemory()
    worker.begin_weights(pickle.dumps(layouts))
    for layout in layouts:
        flat = sender.buffer(layout)
        for piece, view in layout.unpack(flat):
            view.copy_(weights[piece.names[0]].detach())
        worker.load_bucket(pickle.dumps((layout, [sender.send(layout, flat)])))
    assert len(layouts) > 3
    return worker.end_weights()


@pytest.mark.parametrize(("kind", "settings", "tied"), CASES, ids=NAMES)
def test_every_weight_arrives_in_its_old_place(kind: str, settings: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    weights = untrained(tiny_config(kind, tie_word_embeddings=tied, **settings), tmp_path)
    expected, receiver = Worker(vllm_config(tmp_path)), Worker(vllm_config(tmp_path))
    expected.load(weights)
    receiver.load({name: torch.zeros_like(weight) for name, weight in weights.items()})
    places = {name: each.data_ptr() for name, each in receiver.parameters().items()}
    assert send(receiver, weights) == []
    for name, parameter in receiver.parameters().items():
        assert torch.equal(parameter, expected.parameters()[name]), name
        assert parameter.data_ptr() == places[name], name


def test_the_worker_extension_hides_nothing_of_the_gpu_worker() -> None:
    from vllm.v1.worker.gpu_worker import Worker as GPUWorker

    ours = {name for name in vars(WeightReceiver) if not name.startswith("__")}
    assert ours and not ours & set(dir(GPUWorker))


def test_a_layer_that_only_transformers_fuses_is_refused_by_name(tmp_path: Path) -> None:
    """vLLM's GLM-4 lists gate and up projections, which are one weight in checkpoints."""
    weights = untrained(tiny_config("glm4"), tmp_path)
    with pytest.raises(EngineError, match=r"gate_up_proj.* unknown to vLLM's model"):
        send(Worker(vllm_config(tmp_path)), weights)


def test_olmo3_is_not_built_by_this_vllm(tmp_path: Path) -> None:
    """Its rotary settings are by layer type in this release of transformers."""
    untrained(tiny_config("olmo3", **KINDS["olmo3"]), tmp_path)
    with pytest.raises(KeyError, match="rope_theta"):
        Worker(vllm_config(tmp_path))


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    weights = untrained(tiny_config("qwen3_moe", **moe), tmp_path)
    with pytest.raises(EngineError, match=r"weight sync rejected, the old weights stay: .*experts"):
        send(Worker(vllm_config(tmp_path)), weights)
