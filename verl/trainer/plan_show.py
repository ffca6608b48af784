"""A plan for people: tables of memory and time, and what to change."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from verl.trainer.memory import GIB
from verl.trainer.plan import Plan


def show(plan: Plan, console: Console) -> None:
    """Print everything."""
    config, pack, lengths = plan.config, plan.pack, plan.lengths
    separate = not config.rollout.colocated
    devices = config.num_engines * config.rollout.tensor_model_parallel_size
    kind = "ranks" if plan.place.on_cpu else f"x {plan.place.name}"
    for name, said in {
        "model": f"{plan.policy.parameters / 1e6:.1f}M parameters, {plan.policy.layers} layers",
        "data": f"prompts of {lengths.prompt:.0f} tokens, replies of {lengths.reply:.0f} ({lengths.source})",
        "batch": config.batch_arithmetic(),
        "pack": f"at most {pack.tokens:.0f} tokens, {pack.trained:.0f} of them trained where replies are as long as "
        f"allowed ({config.data.max_response_length})",
        "devices": f"{config.num_ranks} {kind} train"
        + (f", {devices} more generate" if separate else f", {config.num_engines} engine(s) beside them"),
        "engine": f"KV cache for {plan.sequences:.0f} sequences of {plan.longest} tokens, "
        f"{config.rollout.max_num_seqs} decoded at once",
    }.items():
        console.print(f"{name:9}{said}", markup=False, soft_wrap=True)
    console.print(memory_table(plan))
    if times := plan.seconds():
        console.print(time_table(plan, times))
        total = config.num_ranks + devices
        if separate:
            way = plan.split(total)
            console.print(
                f"Of {total} GPUs, best {way['train']} train ({way['train_s']:.3g} s) and {way['generate']} generate "
                f"({way['generate_s']:.3g} s)."
            )
    show_mends(plan, console)


def memory_table(plan: Plan) -> Table:
    """Rows: terms, and their sum. Columns: a training rank's phases, and an engine. GiB"""
    phases = plan.memory()
    table = Table(title=f"GiB of one training rank by phase, and of one engine ({plan.place.memory_gib:.1f} available)")
    for heading in ("", *phases):
        table.add_column(heading, justify="right" if heading else "left")
    for term in dict.fromkeys(name for terms in phases.values() for name in terms):
        table.add_row(term, *(f"{terms[term] / GIB:.2f}" if term in terms else "" for terms in phases.values()))
    table.add_section()
    table.add_row("sum", *(f"{sum(terms.values()) / GIB:.2f}" for terms in phases.values()))
    return table


def time_table(plan: Plan, times: Mapping[str, tuple[float, str]]) -> Table:
    """Lower bounds of a step's phases."""
    device = plan.place.device
    assert device is not None
    told = f"F {device.flops / 1e12:.0f} TFLOP/s, W {device.bytes_per_s / 1e12:.2f} TB/s, N parameters"
    table = Table(title=f"Seconds of a step, at least ({told})")
    for heading in ("phase", "seconds", "formula"):
        table.add_column(heading, justify="right" if heading == "seconds" else "left")
    for phase, (seconds, formula) in times.items():
        table.add_row(phase, f"{seconds:.3g}", formula)
    table.add_row("sum", f"{sum(seconds for seconds, _ in times.values()):.3g}", "")
    return table


def show_mends(plan: Plan, console: Console) -> None:
    """What does not fit, and what to change."""
    shortages = plan.shortages()
    if not shortages:
        console.print("It fits.")
        return
    for shortage in shortages:
        console.print(f"does not fit: {shortage}", markup=False, soft_wrap=True)
    console.print(f"to change: {mends_told(plan)}", markup=False, soft_wrap=True)


def mends_told(plan: Plan) -> str:
    """The changes in a line."""
    told = [" ".join(f"{key}={_value(value)}" for key, value in changes.items()) for changes in plan.mends()]
    return "; or ".join(told) or "more than three keys, a smaller model or larger devices"


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def compared(plan: Plan, measured: Mapping[str, float]) -> str:
    """The expected peak of a training rank beside the measured one, after a run."""
    got, expected = measured["memory/trainer_gib"], plan.peak_gib()
    return f"memory of a training rank: {got:.2f} GiB at most, {expected:.2f} expected"
