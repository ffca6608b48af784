"""Prints a plan: tables of memory and time, and suggested changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from toolrl.check.plan.plan import Hardware, Plan
from toolrl.check.plan.seconds import Rates, decode_step, estimate_step
from verl.build.threads import available_cores, threads_of
from verl.config.schema import Config
from verl.errors import ConfigError
from verl.tracking.flops import DEVICES
from verl.units import GIB


def show(plan: Plan, console: Console) -> None:
    config, pack, lengths = plan.config, plan.pack, plan.lengths
    for name, text in {
        "model": format_model(plan),
        "data": f"prompts of {lengths.prompt:.0f} tokens, responses of {lengths.response:.0f} ({lengths.source})",
        "batch": config.batch_arithmetic(),
        "pack": f"at most {pack.tokens:.0f} tokens, {pack.trained:.0f} of them trained at the maximum response length "
        f"({config.data.max_response_length})",
        "episode": format_episode(plan),
        "devices": format_devices(plan),
        "engine": format_engine(plan),
        **({"ahead": format_in_flight(plan)} if plan.ahead else {}),
    }.items():
        console.print(f"{name:9}{text}", markup=False, soft_wrap=True)
    console.print(memory_table(plan))
    if times := plan.seconds():
        estimate = _estimate(plan, console)
        console.print(time_table(plan, times, estimate))
        if estimate:
            console.print(format_decoding(plan), markup=False, soft_wrap=True)
    print_suggestions(plan, console)


def format_model(plan: Plan) -> str:
    shape = plan.policy
    text = f"{shape.parameters / 1e6:.1f}M parameters, {shape.layers} layers"
    if shape.with_state:
        text += f", {shape.with_state} of them with state"
    if not shape.adapter:
        return text
    lr, sync = plan.config.actor.optim.lr, plan.config.lora.sync
    return f"{text}; of these {shape.adapter / 1e6:.1f}M of an adapter are trained, lr {lr:g}, lora.sync={sync}"


def format_episode(plan: Plan) -> str:
    """Whether the longest episode can be trained; there is no context parallelism that would cut it."""
    needed, room = plan.episode_gib(), plan.hardware.memory_gib
    does = "fits" if needed <= room else "does not fit"
    where = "a rank" if plan.hardware.on_cpu else f"one {plan.hardware.name}"
    text = (
        f"{plan.longest} tokens at most, {does} on {where} without context parallelism: {needed:.1f} of {room:.1f} GiB"
    )
    return f"{text}; {format_gpus(plan)}" if plan.hardware.on_cpu else text


def format_gpus(plan: Plan) -> str:
    """The GPUs that can train the longest episode, for a machine that has none."""
    each = {name.lower().replace(" ", "-"): device for name, device in DEVICES.items()}
    plans = {name: replace(plan, hardware=Hardware(name, gpu.memory_gib, gpu)) for name, gpu in each.items()}
    fitting = [name for name, planned in plans.items() if planned.episode_gib() <= planned.hardware.memory_gib]
    return f"on a node of {plan.config.trainer.n_gpus_per_node} GPUs: {', '.join(fitting) or 'no known GPU'}"


def format_devices(plan: Plan) -> str:
    config = plan.config
    if plan.hardware.on_cpu:
        kind, engines, threads = "rank(s)", config.num_engines, threads_of(config)
        each = f"; {threads} of {available_cores()} cores each"
    else:
        kind, engines, each = f"x {plan.hardware.name}", _engine_devices(config), ""
    if config.rollout.colocated:
        return f"{config.num_ranks} {kind} train, {config.num_engines} colocated engine(s) alternate with them{each}"
    engine = "engine(s)" if plan.hardware.on_cpu else kind
    when = "concurrently" if plan.ahead else "alternately: each pool waits for the other (rollout.max_staleness=0)"
    return f"{config.num_ranks} {kind} train, {engines} more {engine} generate, {when}{each}"


def format_engine(plan: Plan) -> str:
    rollout = plan.config.rollout
    vllm = f", {plan.max_num_batched_tokens} tokens per forward pass" if rollout.name == "vllm" else ""
    share = f", {plan.gpu_share:.0%} of a GPU's memory" if vllm and not plan.hardware.on_cpu else ""
    return (
        f"KV cache for {plan.sequences:.0f} sequences of {plan.longest} tokens, "
        f"{plan.max_num_seqs} decoded concurrently{vllm}{share}"
    )


def format_in_flight(plan: Plan) -> str:
    rollout = plan.config.rollout
    decoded = min(plan.in_flight, plan.config.num_engines * plan.max_num_seqs)
    return (
        f"samples up to {rollout.max_staleness} version(s) old; at most {plan.in_flight} episodes in flight, {decoded} "
        f"decoded concurrently; {plan.in_flight_gib:.2f} GiB of controller memory when finished"
    )


def format_decoding(plan: Plan) -> str:
    """The bottleneck of decoding: the GPU, or vLLM's own Python."""
    assert plan.hardware.device is not None
    step = decode_step(plan, Rates.of(plan.hardware.device))
    return (
        f"A decoding step of {step.sequences} sequences takes the GPU {1e3 * step.gpu:.3g} ms, vLLM's core process "
        f"{1e3 * step.host:.3g} ms of CPU (measured by bench/engine_host.py); the estimate counts the longer."
    )


def _engine_devices(config: Config) -> int:
    return config.num_engines * config.rollout.tensor_model_parallel_size


def memory_table(plan: Plan) -> Table:
    """Rows: terms, and their sum. Columns: phases of a training rank, and an engine. In GiB"""
    phases = plan.memory()
    table = Table(title=f"GiB per training rank and phase, and per engine ({plan.hardware.memory_gib:.1f} available)")
    for heading in ("", *phases):
        table.add_column(heading, justify="right" if heading else "left")
    for term in dict.fromkeys(name for terms in phases.values() for name in terms):
        table.add_row(term, *(f"{terms[term] / GIB:.2f}" if term in terms else "" for terms in phases.values()))
    table.add_section()
    table.add_row("sum", *(f"{sum(terms.values()) / GIB:.2f}" for terms in phases.values()))
    return table


def _estimate(plan: Plan, console: Console) -> dict[str, float]:
    try:
        return estimate_step(plan)
    except ConfigError as error:
        console.print(f"no estimate: {error}", markup=False, soft_wrap=True)
        return {}


def time_table(plan: Plan, times: Mapping[str, tuple[float, str]], estimate: Mapping[str, float]) -> Table:
    """Rows: phases. Columns: the bound, the estimate from counted work if there is one, the bound's formula."""
    device = plan.hardware.device
    assert device is not None
    legend = f"F {device.flops / 1e12:.0f} TFLOP/s, W {device.bytes_per_s / 1e12:.2f} TB/s, N parameters"
    table = Table(title=f"Seconds of a step: lower bound ({legend}), and estimate from counted work")
    for heading in ("phase", "bound", "estimate", "formula"):
        table.add_column(heading, justify="right" if heading in ("bound", "estimate") else "left")
    for phase in {**times, **estimate}:
        bound, formula = times.get(phase, (0.0, "controller: assumed"))
        table.add_row(phase, f"{bound:.3g}", f"{estimate[phase]:.3g}" if phase in estimate else "", formula)
    formula = "max(rollout, training) + weight_sync" if plan.ahead else "sum"
    total = f"{plan.total_seconds(estimate):.3g}" if estimate else ""
    table.add_row("total", f"{plan.step_seconds():.3g}", total, formula)
    return table


def print_suggestions(plan: Plan, console: Console) -> None:
    violations = plan.violations()
    if not violations:
        console.print("It fits.")
        return
    for violation in violations:
        console.print(f"does not fit: {violation}", markup=False, soft_wrap=True)
    console.print(f"suggested changes: {format_suggestions(plan)}", markup=False, soft_wrap=True)


def format_suggestions(plan: Plan) -> str:
    options = [
        " ".join(f"{key}={'true' if value is True else value}" for key, value in changes.items())
        for changes in plan.suggested_changes()
    ]
    return "; or ".join(options) or "more than three keys, a smaller model or larger devices"
