"""Resource plan of a run, from the model's configuration and the data's lengths; no weights are loaded.

    Config + model config + lengths + device -> Plan -> memory(), seconds(), violations(), suggested_changes()

Times are lower bounds, if every group has nonzero advantages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import torch

from toolrl.check.head_sizes import check_head_size
from toolrl.commands import PLAN
from verl.algorithms.algorithm import Algorithm
from verl.build.algorithm import algorithm_of, build_kl_control, check_algorithm, needs_reference
from verl.build.engines import default_num_seqs, engine_dtype, sequence_length
from verl.build.env import prompt_fn
from verl.build.ranks import check_adapter, largest_pack, sees_gpu
from verl.build.run import Inputs
from verl.chat.template import ChatTemplate
from verl.config.schema import Config
from verl.data.lengths import PromptIds, fitting
from verl.data.report import RowReport
from verl.errors import ConfigError
from verl.lora import Lora, add_adapter, lora_of
from verl.pretrained import class_of, read_model_config
from verl.rollout.gpu_share import CONTEXT_GIB, MANY_TOKENS, engine_share
from verl.rollout.hf_engine import MAX_BATCH
from verl.tracking.flops import DEVICES, FROZEN, TRAINING, DecoderShape, Device, find_device, find_memory, forward_flops
from verl.transfer.bucket import BUCKET_BYTES
from verl.types import Task
from verl.units import GIB
from verl.workers.delta_net import fla_release, use_kernels
from verl.workers.fsdp_engine import Offload
from verl.workers.logprobs import max_kept_bytes
from verl.workers.memory import (
    ModelShape,
    PackShape,
    RankSettings,
    Terms,
    cache_per_sequence,
    cache_per_token,
    gathered,
    layers_to_checkpoint,
    optimizer_step,
    reference_model,
    resident,
    scoring,
    shape_of,
    updating,
    weight_export,
)
from verl.workers.model import PackedCritic, PackedPolicy
from verl.workers.parity import check_packs
from verl.workers.state_memory import KEEPING

_BYTES = {"bfloat16": 2, "float32": 4}
_AWAKE = ("rollout", "weight_sync", "save")  # phases in which a colocated vLLM engine holds its memory
_NUM_ROWS = 256  # rows per file that are read, evenly spaced
_TOKEN_BYTES = 72  # per token of a sample in the controller: id and log-prob, each a Python object and a list entry
_PROCESS_GIB = 0.6  # resident memory of a CPU process that has imported torch, transformers and Ray, measured
_OPTIMIZER_BYTES = 32  # memory traffic per parameter of clipping, AdamW and zero_grad
_SYNC_BYTES = 4  # per parameter: one read and one write in bf16


@dataclass(frozen=True, slots=True)
class Lengths:
    prompt: float
    response: float
    source: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware of a run. memory_gib: of one GPU; on CPU, the machine's available memory"""

    name: str
    memory_gib: float
    device: Device | None  # None on CPU and for an unknown GPU: no times
    on_cpu: bool = False


@dataclass(frozen=True)
class Plan:
    config: Config
    algorithm: Algorithm
    policy: ModelShape
    critic: ModelShape | None
    lengths: Lengths
    hardware: Hardware
    teacher: ModelShape | None = None

    @property
    def pack(self) -> PackShape:
        """The largest pack: prompts of mean length, responses of maximum length."""
        return largest_pack(self.config, self.lengths.prompt)

    @property
    def rank(self) -> RankSettings:
        """States are sharded within a node and replicated across nodes; liger-kernel is assumed on GPUs."""
        config, on_cpu = self.config, self.hardware.on_cpu
        compute = _BYTES[config.model.compute_dtype]
        fused = config.model.fused_kernels != "none" and not on_cpu
        kept = max_kept_bytes(self.hardware.memory_gib * GIB) if fused else 0
        settings = RankSettings(compute, config.trainer.n_gpus_per_node, 0, on_cpu, fused, kept)
        return replace(settings, checkpointed=self._num_checkpointed(settings))

    def _num_checkpointed(self, settings: RankSettings) -> int:
        """Layers that an update recomputes; with auto those that ranks choose, from maximum lengths."""
        setting = self.config.model.enable_gradient_checkpointing
        if setting != "auto" or self.hardware.on_cpu:
            return max(each.layers for each in self._trained) if setting is True else 0
        pack = largest_pack(self.config, self.config.data.max_prompt_length)
        held = sum(sum(resident(each, settings).values()) for each in self._trained)
        if not self.config.ref.offload_params:
            held += sum(reference_model(each, settings) for each in self._frozen.values())
        room = self.hardware.memory_gib * GIB
        return max(layers_to_checkpoint(each, pack, settings, room, held) for each in self._trained)

    @property
    def _sends_adapter(self) -> bool:
        return bool(self.policy.adapter) and self.config.lora.sync == "adapter"

    def memory(self) -> dict[str, Terms]:
        """{phase: bytes by term} of a training rank; "engine": of one engine's share of a device."""
        return {**self._phases(), "engine": self.engine()}

    def _phases(self) -> dict[str, Terms]:
        temporary: dict[str, Terms] = {
            "rollout": {},
            **self._passes(self.pack),
            "step": _largest(optimizer_step(model, self.rank) for model in self._trained),
            "weight_sync": {
                **weight_export(self.policy, self.rank, BUCKET_BYTES, self._sends_adapter),
                "gathered": gathered(self.policy, self.rank),
            },
            "save": weight_export(self.policy, self.rank),  # full tensors, one at a time
        }
        return {phase: self._resident(phase) | terms for phase, terms in temporary.items()}

    @property
    def _trained(self) -> list[ModelShape]:
        return [self.policy, self.critic] if self.critic else [self.policy]

    @property
    def _frozen(self) -> dict[str, ModelShape]:
        """Reference and teacher, if there are; the reference of an adapter is its base."""
        has_reference = needs_reference(self.algorithm) and not self.policy.adapter
        found = {"reference": self.policy if has_reference else None, "teacher": self.teacher}
        return {name: shape for name, shape in found.items() if shape is not None}

    def _passes(self, pack: PackShape) -> dict[str, Terms]:
        """{phase: bytes by term} of passes over a pack."""
        update = _largest(updating(model, pack, self.rank) for model in self._trained)
        scorers = [self.policy, self.teacher] if self.teacher else [self.policy]
        return {"score": _largest(scoring(model, pack, self.rank) for model in scorers), "update": update}

    def episode_gib(self) -> float:
        """Memory of a rank for a pack of one episode of maximum length, which ranks cannot share."""
        data = self.config.data
        alone = PackShape.of(self.longest, data.max_prompt_length, data.max_response_length, 1, shared=False)
        return max(sum((self._resident(phase) | terms).values()) for phase, terms in self._passes(alone).items()) / GIB

    def _resident(self, phase: str) -> Terms:
        """Bytes that stay on the device between phases, without those offloaded in this phase."""
        terms = {"process": _PROCESS_GIB * GIB if self.hardware.on_cpu else CONTEXT_GIB * GIB}
        terms |= resident(self.policy, self.rank)
        if self.critic:
            terms |= {f"critic's {name}": size for name, size in resident(self.critic, self.rank).items()}
        terms |= {name: reference_model(shape, self.rank) for name, shape in self._frozen.items()}
        if self.hardware.on_cpu:
            return terms
        actor, critic = (Offload.of(each.offload) for each in (self.config.actor, self.config.critic))
        offloaded = {
            "parameters": actor.params and phase == "rollout",
            "optimizer": actor.optimizer and phase in ("rollout", "score", "weight_sync", "save"),
            "critic's parameters": critic.params and phase in ("rollout", "weight_sync", "save"),
            "critic's optimizer": critic.optimizer and phase in ("rollout", "score", "weight_sync", "save"),
            **dict.fromkeys(("reference", "teacher"), self.config.ref.offload_params and phase != "score"),
        }
        return {name: size for name, size in terms.items() if not offloaded.get(name)}

    def engine(self) -> Terms:
        """Memory of one engine on one device; vLLM allocates its whole share of a GPU."""
        rollout = self.config.rollout
        weights = self.policy.parameters * self._engine_bytes / rollout.tensor_model_parallel_size
        if rollout.name == "hf":
            cache = self.max_num_seqs * self._cache_of_longest
        elif self.hardware.on_cpu:
            cache = rollout.kv_cache_gib * GIB
        else:
            cache = self.gpu_share * self.hardware.memory_gib * GIB - weights
        terms = {"weights": weights, "KV cache": max(0.0, cache)}
        return terms | {"process": _PROCESS_GIB * GIB} if self.hardware.on_cpu else terms

    @property
    def gpu_share(self) -> float:
        """vLLM's share of a GPU: as configured, or what a rank on the same GPU leaves while the engine is awake."""
        rollout = self.config.rollout
        if rollout.gpu_memory_utilization is not None:
            return rollout.gpu_memory_utilization
        phases = self._phases() if rollout.colocated else {}
        held = max((sum(terms.values()) for phase, terms in phases.items() if phase in _AWAKE), default=0.0)
        return engine_share(held, self.hardware.memory_gib * GIB)

    @property
    def sequences(self) -> float:
        """Sequences of maximum length that fit into one engine's KV cache."""
        return self.engine()["KV cache"] / self._cache_of_longest

    @property
    def max_num_seqs(self) -> int:
        """Concurrent sequences per engine: as configured, many if they fit, or the engine's default for the device."""
        rollout = self.config.rollout
        if rollout.name == "hf":
            return rollout.max_num_seqs or MAX_BATCH
        return rollout.max_num_seqs or self._colocated_num_seqs or self._batch_defaults[0]

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens per forward pass of vLLM: likewise."""
        many = self.config.rollout.max_num_seqs is None and self._colocated_num_seqs
        return self.config.rollout.max_num_batched_tokens or (MANY_TOKENS if many else self._batch_defaults[1])

    @property
    def _colocated_num_seqs(self) -> int | None:
        if self.hardware.on_cpu or not self.config.rollout.colocated:
            return None
        return default_num_seqs(self.config, self.policy, self.gpu_share * self.hardware.memory_gib * GIB)

    @property
    def _batch_defaults(self) -> tuple[int, int]:
        """(sequences, tokens) of vLLM's EngineArgs.get_batch_defaults for offline batches."""
        device = self.hardware
        if device.on_cpu:
            return 256, 4096
        large = device.memory_gib >= 70 and "a100" not in device.name.lower()
        return (1024, 16384) if large else (256, 8192)

    @property
    def _engine_bytes(self) -> int:
        return _BYTES[engine_dtype(self.config)]

    @property
    def _cache_of_longest(self) -> float:
        """Bytes of keys, values and states of a sequence of maximum length."""
        shape, size = self.policy, self._engine_bytes
        cached = self.longest * cache_per_token(shape, size) + cache_per_sequence(shape, size)
        return cached / self.config.rollout.tensor_model_parallel_size

    @property
    def longest(self) -> int:
        return self.config.data.max_prompt_length + self.config.data.max_response_length

    @property
    def ahead(self) -> bool:
        """Whether rollouts continue during the update (off-policy)."""
        return self.config.rollout.max_staleness > 0

    @property
    def in_flight(self) -> int:
        """Maximum number of episodes that have started and are not yet trained on."""
        config, greedy = self.config, self.algorithm.greedy_baseline
        return (config.rollout.max_staleness + 1) * config.data.train_batch_size * (config.rollout.n + greedy)

    @property
    def in_flight_gib(self) -> float:
        """Controller memory of these episodes, once finished and of maximum length."""
        return self.in_flight * (self.lengths.prompt + self.config.data.max_response_length) * _TOKEN_BYTES / GIB

    def peak_gib(self) -> float:
        """Comparable to memory/trainer_gib of a rank: on a GPU without the CUDA context."""
        peak = max(sum(terms.values()) for terms in self._phases().values())
        return peak / GIB - (0.0 if self.hardware.on_cpu else CONTEXT_GIB)

    def format_peak(self, measured: Mapping[str, float]) -> str:
        got, expected = measured["memory/trainer_gib"], self.peak_gib()
        return f"peak memory of a training rank: {got:.2f} GiB, expected {expected:.2f}"

    def violations(self) -> list[str]:
        room = self.hardware.memory_gib
        phases = {name: sum(each.values()) / GIB for name, each in self._phases().items()}
        engine = sum(self.engine().values()) / GIB
        if self.hardware.on_cpu:
            everywhere = self.config.num_ranks * max(phases.values()) + self.config.num_engines * engine
            needed = everywhere / self.config.trainer.nnodes
            problems = [f"ranks and engines need {needed:.1f} of {room:.1f} GiB available"] if needed > room else []
        else:
            if self.config.rollout.colocated:
                awake = _AWAKE if self.config.rollout.name == "vllm" else phases.keys()
                phases |= {name: phases[name] + engine for name in awake}
            needs = {**phases, "the engine": engine}
            problems = [f"{name} needs {gib:.1f} of {room:.1f} GiB" for name, gib in needs.items() if gib > room]
        if self.sequences < 1:
            problems.append(f"the engine's KV cache cannot hold one sequence of {self.longest} tokens")
        return problems

    def suggested_changes(self) -> list[dict[str, Any]]:
        """The smallest changes that make the run fit: of any single key, else of the first pair or triple of keys."""
        if not self.violations():
            return []
        options = self._options()
        for number in (1, 2, 3):
            fitting = []
            for keys in combinations(options, number):
                every = (dict(zip(keys, values, strict=True)) for values in product(*(options[key] for key in keys)))
                if changes := next(filter(self._fits_with, every), None):
                    fitting.append(changes)
            if fitting:
                return fitting if number == 1 else fitting[:1]
        return []

    def _options(self) -> dict[str, Sequence[Any]]:
        """Candidate changes: cheap keys first, and the smallest change of each first."""
        config = self.config
        share = config.rollout.gpu_memory_utilization or 0.0  # one that is not set fits already
        shares = [tenths / 10 for tenths in range(8, 1, -1) if tenths / 10 < share]
        limits = [config.actor.max_tokens_per_pack >> times for times in range(1, 6)]
        hf, on_cpu = config.rollout.name == "hf", self.hardware.on_cpu
        caches = [config.rollout.kv_cache_gib / parts for parts in (2, 4, 8)]
        now = config.trainer.n_gpus_per_node  # more GPUs have more memory in total, more CPU processes need more
        ranks = [each for each in (4, 2, 1) if each < now] if on_cpu else [each for each in (2, 4, 8) if each > now]
        return {
            "actor.max_tokens_per_pack": [limit for limit in limits if limit >= self.longest],
            "model.enable_gradient_checkpointing": [True] * (config.model.enable_gradient_checkpointing is False),
            "rollout.gpu_memory_utilization": [] if on_cpu or hf else shares,
            **self._offloads(),
            "rollout.max_num_seqs": [32, 8] if hf else [],
            "rollout.kv_cache_gib": caches if on_cpu and not hf else [],
            "trainer.n_gpus_per_node": ranks,
            "rollout.tensor_model_parallel_size": [] if hf or on_cpu else [2, 4, 8],
            "rollout.placement": ["separate"] * (config.rollout.colocated and not on_cpu),
        }

    def _offloads(self) -> dict[str, list[Any]]:
        """Options not enabled yet: they free memory for an engine on the same GPU."""
        if self.hardware.on_cpu or not self.config.rollout.colocated:
            return {}
        further = {"none": ["optimizer", "params", "all"], "optimizer": ["all"], "params": ["all"], "all": []}
        options: dict[str, list[Any]] = {"actor.offload": further[self.config.actor.offload]}
        if self.critic:
            options["critic.offload"] = further[self.config.critic.offload]
        if self._frozen and not self.config.ref.offload_params:
            options["ref.offload_params"] = [True]
        return options

    def _fits_with(self, changes: dict[str, Any]) -> bool:
        try:
            config = self.config
            for key, value in changes.items():
                config = changed(config, key, value)
            PLAN.check(config)
        except ConfigError:
            return False
        return not replace(self, config=config).violations()

    def seconds(self) -> dict[str, tuple[float, str]]:
        """{phase: (seconds, formula)} at the device's peak; {} if that is unknown."""
        if self.hardware.device is None:
            return {}
        config, speed = self.config, self.hardware.device
        ranks, checkpointed = config.num_ranks, self.rank.checkpointed / self.policy.layers
        engines = config.num_engines * config.rollout.tensor_model_parallel_size
        policy = self._forward(self.policy)
        critic, teacher = (self._forward(each) if each else 0.0 for each in (self.critic, self.teacher))
        passes = self.score_passes
        cost = FROZEN if self.policy.adapter else TRAINING
        epochs = config.actor.ppo_epochs * (cost + checkpointed)
        parameters = self.policy.trained + (self.critic.trained if self.critic else 0)
        sent = self.policy.trained if self._sends_adapter else self.policy.parameters
        moved = _OPTIMIZER_BYTES * parameters * config.updates_per_step
        return {
            "rollout": self._rollout(engines, speed),
            "score": (
                (passes * policy + critic + teacher) / ranks / speed.flops,
                f"{passes + bool(self.critic) + bool(self.teacher):g} forwards: FLOP / F",
            ),
            "update": (
                epochs * (policy + critic) / ranks / speed.flops,
                f"{epochs:.3g} forwards of all trained models: FLOP / F",
            ),
            "step": (moved / self.rank.shards / speed.bytes_per_s, f"{_OPTIMIZER_BYTES} N bytes / W, each update"),
            "weight_sync": (_SYNC_BYTES * sent / speed.bytes_per_s, f"{_SYNC_BYTES} N bytes / W"),
        }

    @property
    def score_passes(self) -> float:
        """Passes of the policy's size without gradients over a step's samples: old log-probs, and the reference's."""
        config, algorithm, lengths = self.config, self.algorithm, self.lengths
        if lengths.prompt + config.rollout.n * lengths.response > config.actor.max_tokens_per_pack:
            algorithm = replace(algorithm, by_group=False)  # no update sees a whole group
        old = algorithm.old_pass_share(config.minibatches_per_step, config.actor.ppo_epochs)
        return old + needs_reference(algorithm)

    def step_seconds(self) -> float:
        """Lower bound of all phases together."""
        return self.total_seconds({name: value for name, (value, _) in self.seconds().items()})

    def total_seconds(self, times: Mapping[str, float]) -> float:
        """The sum of the phases, but max(rollout, training) if they overlap."""
        training = sum(value for name, value in times.items() if name not in ("rollout", "weight_sync"))
        rollout = times["rollout"]
        both = max(rollout, training) if self.ahead else rollout + training
        return both + times["weight_sync"]

    def _forward(self, shape: ModelShape) -> float:
        """FLOPs of one forward pass over a step's samples, logits at response tokens only."""
        prompts, n = self.config.data.train_batch_size, self.config.rollout.n
        prompt, response = round(self.lengths.prompt), round(self.lengths.response)
        group = [(prompt, 0), *[(response, prompt)] * n]
        return prompts * forward_flops(decoder_of(shape), group, n * response)

    def _rollout(self, devices: int, speed: Device) -> tuple[float, str]:
        """Prefill, then decoding: bound by FLOPs, or by memory reads of weights and cache."""
        config, shape = self.config, decoder_of(self.policy)
        prompt, response = round(self.lengths.prompt), round(self.lengths.response)
        prompts = config.data.train_batch_size
        samples = prompts * (config.rollout.n + self.algorithm.greedy_baseline)
        prefill = prompts * forward_flops(shape, [(prompt, 0)])
        computed = samples * forward_flops(shape, [(response, prompt)], response)
        waves = math.ceil(samples / config.num_engines / self.max_num_seqs)
        weights = self._engine_bytes * (shape.parameters + shape.head_parameters) * config.num_engines
        cached = samples * (prompt + response / 2) * cache_per_token(self.policy, self._engine_bytes)
        cached += samples * 2 * cache_per_sequence(self.policy, self._engine_bytes)  # read and written
        decode = max(computed / speed.flops, response * (waves * weights + cached) / speed.bytes_per_s)
        return (prefill / speed.flops + decode) / devices, "prefill FLOP / F + max(decode FLOP / F, bytes / W)"


def _largest(terms: Iterable[Terms]) -> Terms:
    return max(terms, key=lambda each: sum(each.values()))


def changed(config: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    return replace(config, **{name: changed(getattr(config, name), rest, value) if rest else value})


def build_plan(config: Config, lengths: Lengths, hardware: Hardware) -> Plan:
    """Raises ConfigError for a model that cannot be read or computed, or whose context is too short."""
    algorithm = algorithm_of(config)
    check_algorithm(algorithm, config)
    assert config.model.path is not None
    longest = sequence_length(config)
    build_kl_control(config.algorithm, algorithm)
    check_packs(config.model.path, longest)
    check_adapter(config)
    dtype, on_cpu = config.model.compute_dtype, hardware.on_cpu
    fused = config.model.fused_kernels != "none" and dtype == "bfloat16" and not on_cpu
    policy, critic = read_shape(config.model.path, PackedPolicy, lora=lora_of(config.lora), fused=fused), None
    check_head_size(policy.head_size, "model.path", on_cpu, config.rollout.name, dtype)
    if algorithm.needs_critic:
        key = "model.path" if config.critic.path is None else "critic.path"
        path = config.critic.path or config.model.path
        check_packs(path, longest, key)
        critic = read_shape(path, PackedCritic, key, lora_of(config.lora), fused)
        check_head_size(critic.head_size, key, on_cpu, None, dtype)
    teacher = None
    if config.teacher.local is not None:
        check_packs(config.teacher.local, longest, "teacher.path")
        teacher = read_shape(config.teacher.local, PackedPolicy, "teacher.path", fused=fused)
        check_head_size(teacher.head_size, "teacher.path", on_cpu, None, dtype)
    return Plan(config, algorithm, policy, critic, lengths, hardware, teacher)


def read_shape(
    path: str,
    wrapper: type[PackedPolicy] | type[PackedCritic],
    key: str = "model.path",
    lora: Lora | None = None,
    fused: bool = False,
) -> ModelShape:
    """From the model's configuration. Raises ConfigError, naming `key`, if there is none.

    fused: whether layers with state use fla-core where it is installed
    """
    config = read_model_config(path, key)
    try:
        with torch.device("meta"):
            model = class_of(config).from_config(config)
            if lora is not None:
                add_adapter(model, replace(lora, path=None))
            module = wrapper(model)
        if fused and fla_release():
            use_kernels(module, KEEPING)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{key}: {path!r} contains no causal language model ({error})") from error
    return shape_of(module, config.get_text_config())


def decoder_of(shape: ModelShape) -> DecoderShape:
    matrices = shape.layers * shape.layer_parameters
    products = 0 if shape.states is None else shape.states.products
    return DecoderShape(matrices, shape.attending, shape.query, shape.hidden * shape.vocabulary, states=products)


def read_lengths(config: Config, chat: ChatTemplate, files: Sequence[Sequence[Task]], prompt_ids: PromptIds) -> Lengths:
    """Mean lengths of prompts and golden responses; the maximum lengths without a file, and of multi-turn responses.

    Raises DataError for rows that cannot be used, as training would.
    """
    data = config.data
    if not files:
        return Lengths(data.max_prompt_length, data.max_response_length, "no file given: maximum lengths")
    prompts, responses = [], []
    for tasks in files:
        sample = tasks[:: max(1, len(tasks) // _NUM_ROWS)]
        report = RowReport(sample[0].id.partition("#")[0], len(sample))
        for task in fitting(sample, prompt_ids, data, report):
            prompts.append(min(len(prompt_ids(task)), data.max_prompt_length))
            golden = len(chat.response_ids(task.answer.strip())[0]) + 1
            longest = config.env.multi_turn
            responses.append(data.max_response_length if longest else min(golden, data.max_response_length))
    names = ", ".join(Path(source).name for source in data.train_files)
    kind = "episodes of maximum length" if config.env.multi_turn else "golden responses"
    return Lengths(mean(prompts), mean(responses), f"means of {len(prompts)} tasks of {names}; {kind}")


def find_hardware(config: Config, gpu: str | None = None) -> Hardware:
    """The named GPU type or memory size, or this machine's hardware. Raises ConfigError for an unknown type."""
    if gpu is not None and gpu.lower() != "cpu":
        device, size = find_device(gpu), find_memory(gpu)
        if device is None and not size:
            raise ConfigError(f"--gpu={gpu} is unknown; choose one of {', '.join(DEVICES)}, cpu, or a size as in 24GiB")
        return Hardware(gpu, device.memory_gib if device else size or 0.0, device)
    if gpu is None and sees_gpu(config.trainer):
        name, total = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
        return Hardware(name, total / GIB, find_device(name))
    return Hardware("cpu", psutil.virtual_memory().available / GIB, None, on_cpu=True)


def plan_of_run(config: Config, inputs: Inputs) -> Plan:
    runner = inputs.episode_runner
    lengths = read_lengths(config, runner.chat, inputs.train, prompt_fn(runner))
    return build_plan(config, lengths, find_hardware(config))
