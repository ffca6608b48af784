"""Names of modules that earlier versions had, for the errors of users' files that name them."""

from collections.abc import Mapping

MOVED: Mapping[str, str] = {
    "verl.cli": "toolrl.cli",
    "verl.algorithms.table": "toolrl.algorithms",
    "verl.config.completion": "toolrl.completion",
    "verl.config.legacy": "verl.verl_compat.legacy",
    "verl.config.published": "verl.verl_compat.published",
    "verl.config.verl_keys": "verl.verl_compat.verl_keys",
    "verl.data.python_calls": "toolrl.layouts.python_calls",
    "verl.envs.tools.calculator": "toolrl.tools.calculator",
    "verl.formats.hermes": "toolrl.formats.hermes",
    "verl.formats.llama3_json": "toolrl.formats.llama3_json",
    "verl.formats.typed": "toolrl.formats.typed",
    "verl.formats.xml": "toolrl.formats.xml",
    "verl.kit.agent": "toolrl.envs.agent",
    "verl.kit.api": "toolrl.api",
    "verl.kit.api_bank": "toolrl.benchmarks.api_bank",
    "verl.kit.bfcl": "toolrl.benchmarks.bfcl",
    "verl.kit.class_env": "toolrl.envs.class_env",
    "verl.kit.collapse": "toolrl.analysis.collapse",
    "verl.kit.doctor": "toolrl.check.doctor",
    "verl.kit.evaluation": "toolrl.benchmarks.runner",
    "verl.kit.explain": "toolrl.analysis.explain",
    "verl.kit.export": "toolrl.serve.export",
    "verl.kit.generation": "toolrl.serve.generation",
    "verl.kit.generation.chat": "toolrl.serve.chat",
    "verl.kit.kept_samples": "toolrl.analysis.samples",
    "verl.kit.lab": "toolrl.check.lab",
    "verl.kit.mcp": "toolrl.tools.mcp",
    "verl.kit.openai_server": "toolrl.serve.openai_server",
    "verl.kit.openenv": "toolrl.envs.openenv",
    "verl.kit.papers": "toolrl.papers",
    "verl.kit.plan": "toolrl.check.plan",
    "verl.kit.plan.parity": "verl.workers.parity",
    "verl.kit.preflight": "toolrl.check.preflight",
    "verl.kit.probe": "toolrl.check.probe",
    "verl.kit.qa": "toolrl.benchmarks.qa",
    "verl.kit.replay": "toolrl.analysis.replay",
    "verl.kit.report": "toolrl.analysis.report",
    "verl.kit.retrieval": "toolrl.tools.retrieval",
    "verl.kit.sandbox": "toolrl.sandbox",
    "verl.kit.serving": "toolrl.servers",
    "verl.kit.sft": "verl.sft",
    "verl.kit.shop": "toolrl.envs.shop",
    "verl.kit.swe": "toolrl.swe",
    "verl.kit.tau2": "toolrl.benchmarks.tau2",
    "verl.kit.text_env": "toolrl.envs.text_env",
    "verl.kit.trackers": "toolrl.trackers",
    "verl.kit.verifiers": "toolrl.envs.verifiers",
    "verl.net.hub": "verl.host.hub",
    "verl.net.services": "verl.host.services",
    "verl.rollout.head_sizes": "toolrl.check.head_sizes",
    "verl.tracking.verl_names": "verl.verl_compat.metric_names",
    "verl.system": "verl.host",
    "verl.trainer.builders": "verl.build",
    "verl.trainer.verl_metrics": "verl.verl_compat.metrics",
    "verl.utils.reward_score.answers": "toolrl.reward_score.answers",
    "verl.utils.reward_score.gsm8k": "toolrl.reward_score.gsm8k",
    "verl.utils.reward_score.math": "toolrl.reward_score.math",
    "verl.utils.reward_score.math_dapo": "toolrl.reward_score.math_dapo",
    "verl.utils.reward_score.math_equality": "toolrl.reward_score.math_equality",
}


def new_name(module: str) -> str | None:
    """Where a module of an earlier version is now; None if it has not moved."""
    for old in sorted(MOVED, key=len, reverse=True):
        if module == old or module.startswith(f"{old}."):
            return MOVED[old] + module.removeprefix(old)
    return None
