"""A plan for people: tables of memory and time, and what to change."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from verl.config.schema import Config
from verl.trainer.memory import GIB
from verl.trainer.plan import Plan
from verl.trainer.threads import available_cores, threads_of


def show(plan: Plan, console: Console) -> None:
    """Print everything."""
    config, pack, lengths = plan.config, plan.pack, plan.lengths
    for name, said in {
        "model": f"{plan.policy.parameters / 1e6:.1f}M parameters, {plan.policy.layers} layers",
        "data": f"prompts of {lengths.prompt:.0f} tokens, replies of {lengths.response:.0f} ({lengths.source})",
        "batch": config.batch_arithmetic(),
        "pack": f"at most {pack.tokens:.0f} tokens, {pack.trained:.0f} of them trained where replies are as long as "
        f"allowed ({config.data.max_response_length})",
        "devices": devices_told(plan),
        "engine": f"KV cache for {plan.sequences:.0f} sequences of {plan.longest} tokens, "
        f"{plan.max_num_seqs} decoded at once",
        **({"ahead": ahead_told(plan)} if plan.ahead else {}),
    }.items():
        console.print(f"{name:9}{said}", markup=False, soft_wrap=True)
    console.print(memory_table(plan))
    if times := plan.seconds():
        console.print(time_table(plan, times))
        if not config.rollout.colocated:
            console.print(split_told(plan), markup=False, soft_wrap=True)
    show_mends(plan, console)


def devices_told(plan: Plan) -> str:
    """How many train and how many generate, and whether at the same time."""
    config = plan.config
    if plan.hardware.on_cpu:
        kind, engines, threads = "rank(s)", config.num_engines, threads_of(config)
        each = f"; of {available_cores()} cores {threads} for each of them"
    else:
        kind, engines, each = f"x {plan.hardware.name}", _engine_devices(config), ""
    if config.rollout.colocated:
        return f"{config.num_ranks} {kind} train, {config.num_engines} engine(s) beside them take turns with them{each}"
    engine = "engine(s)" if plan.hardware.on_cpu else kind
    when = "at the same time" if plan.ahead else "in turn: the one pool waits for the other (rollout.max_staleness=0)"
    return f"{config.num_ranks} {kind} train, {engines} more {engine} generate, {when}{each}"


def ahead_told(plan: Plan) -> str:
    """What is in flight while the policy learns."""
    rollout = plan.config.rollout
    decoded = min(plan.in_flight, plan.config.num_engines * plan.max_num_seqs)
    return (
        f"samples up to {rollout.max_staleness} version(s) old; at most {plan.in_flight} episodes in flight, {decoded} "
        f"decoded at once; once landed {plan.in_flight_gib:.2f} GiB of the controller's memory"
    )


def split_told(plan: Plan) -> str:
    """How the same GPUs would best be dealt to the two pools."""
    config = plan.config
    total = config.num_ranks + _engine_devices(config)
    way = plan.split(total)
    return (
        f"Of {total} GPUs, best {way['train']:.0f} train ({way['train_s']:.3g} s) and {way['generate']:.0f} generate "
        f"({way['generate_s']:.3g} s)."
    )


def _engine_devices(config: Config) -> int:
    return config.num_engines * config.rollout.tensor_model_parallel_size


def memory_table(plan: Plan) -> Table:
    """Rows: terms, and their sum. Columns: a training rank's phases, and an engine. GiB"""
    phases = plan.memory()
    table = Table(title=f"GiB of one training rank by phase, and of one engine ({plan.hardware.memory_gib:.1f} available)")
    for heading in ("", *phases):
        table.add_column(heading, justify="right" if heading else "left")
    for term in dict.fromkeys(name for terms in phases.values() for name in terms):
        table.add_row(term, *(f"{terms[term] / GIB:.2f}" if term in terms else "" for terms in phases.values()))
    table.add_section()
    table.add_row("sum", *(f"{sum(terms.values()) / GIB:.2f}" for terms in phases.values()))
    return table


def time_table(plan: Plan, times: Mapping[str, tuple[float, str]]) -> Table:
    """Lower bounds of a step's phases."""
    device = plan.hardware.device
    assert device is not None
    told = f"F {device.flops / 1e12:.0f} TFLOP/s, W {device.bytes_per_s / 1e12:.2f} TB/s, N parameters"
    table = Table(title=f"Seconds of a step, at least ({told})")
    for heading in ("phase", "seconds", "formula"):
        table.add_column(heading, justify="right" if heading == "seconds" else "left")
    for phase, (seconds, formula) in times.items():
        table.add_row(phase, f"{seconds:.3g}", formula)
    told = "rollout beside score, update and step: the longer; then publish" if plan.ahead else "one after the other"
    table.add_row("a step", f"{plan.step_seconds():.3g}", told)
    return table


def show_mends(plan: Plan, console: Console) -> None:
    """What does not fit, and what to change."""
    violations = plan.violations()
    if not violations:
        console.print("It fits.")
        return
    for shortage in violations:
        console.print(f"does not fit: {shortage}", markup=False, soft_wrap=True)
    console.print(f"to change: {format_suggestions(plan)}", markup=False, soft_wrap=True)


def format_suggestions(plan: Plan) -> str:
    """The changes in a line."""
    told = [
        " ".join(f"{key}={_value(value)}" for key, value in changes.items()) for changes in plan.suggested_changes()
    ]
    return "; or ".join(told) or "more than three keys, a smaller model or larger devices"


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def compared(plan: Plan, measured: Mapping[str, float]) -> str:
    """The expected peak of a training rank beside the measured one, after a run."""
    got, expected = measured["memory/trainer_gib"], plan.peak_gib()
    return f"memory of a training rank: {got:.2f} GiB at most, {expected:.2f} expected"
