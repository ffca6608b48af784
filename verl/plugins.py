"""What this package loads by name from `toolrl`: one table for each kind of plug-in. Any of it may be missing.

Objects of users need no entry: they are named `package.module:attribute` or `path/to/file.py:attribute`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Generic, TypeVar, cast

from verl.errors import ConfigError

ENVS: Mapping[str, str] = {
    "agent": "toolrl.envs.agent.agent:AgentFactory",
    "bfcl": "toolrl.benchmarks.bfcl.env:BfclFactory",
    "openenv": "toolrl.envs.openenv.client:OpenEnvFactory",
    "remote": "toolrl.envs.openenv.remote:RemoteFactory",
    "shop": "toolrl.envs.shop.shop:ShopEnv",
    "swe": "toolrl.envs.swe.env:SweFactory",
    "tau2": "toolrl.benchmarks.tau2.env:Tau2Factory",
    "verifiers": "toolrl.envs.verifiers.env:VerifiersFactory",
}
ENV_ADAPTERS: Mapping[str, str] = {  # they make an environment of a class
    "plain class": "toolrl.envs.class_env.class_env:as_env_class",
    "text environment": "toolrl.envs.text_env.text_env:as_text_env",
}
ENV_TASKS: Mapping[str, str] = {  # functions that return tasks
    "bfcl": "toolrl.benchmarks.bfcl.tasks:bfcl_tasks",
    "shop": "toolrl.envs.shop.shop:shop_tasks",
    "tau2": "toolrl.benchmarks.tau2.tasks:tau2_tasks",
}
TOOLS: Mapping[str, str] = {
    "calculator": "toolrl.tools.calculator:calculator",
    "mcp": "toolrl.tools.mcp.mcp:McpServer",
    "python": "toolrl.sandbox.python_tool:PythonTool",
    "python_session": "toolrl.sandbox.python_tool:PythonSessions",
    "search": "toolrl.tools.retrieval.search:SearchTool",
    "shell": "toolrl.sandbox.shell_tool:ShellTool",
}
SANDBOXES: Mapping[str, str] = {
    "local": "toolrl.sandbox.local:LocalSandbox",
    "remote": "toolrl.sandbox.client:RemoteSandbox",
}
TOOL_CALL_FORMATS: Mapping[str, str] = {
    "artist": "toolrl.papers.formats.tags:ARTIST",
    "artist_tools": "toolrl.formats.hermes:ARTIST_TOOLS",
    "fence": "toolrl.papers.formats.fence:FenceFormat",
    "hermes": "toolrl.formats.hermes:HermesFormat",
    "llama3_json": "toolrl.formats.llama3_json:Llama3JsonFormat",
    "openhands": "toolrl.papers.formats.openhands:OpenHandsFormat",
    "otc_search": "toolrl.papers.formats.tags:OTC_SEARCH",
    "retool": "toolrl.papers.formats.tags:RETOOL",
    "search_r1": "toolrl.papers.formats.tags:SEARCH_R1",
    "tags": "toolrl.papers.formats.tags:TagsFormat",
    "tool_n1": "toolrl.papers.formats.tool_n1:ToolN1Format",
    "toolrl_published": "toolrl.papers.formats.toolrl_published:ToolRlPublishedFormat",
    "xml": "toolrl.formats.xml:XmlFormat",
    "zerotir": "toolrl.papers.formats.fence:ZeroTirFormat",
}
REWARDS: Mapping[str, str] = {
    "api_bank": "toolrl.benchmarks.api_bank.reward:ApiBankReward",
    "artist_math": "toolrl.papers.rewards.artist:ArtistMathReward",
    "artist_tools": "toolrl.papers.rewards.artist:ArtistToolsReward",
    "bfcl": "toolrl.benchmarks.bfcl.reward:BfclReward",
    "gsm8k": "toolrl.reward_score.gsm8k:Gsm8kReward",
    "judge": "toolrl.reward_score.judge:JudgeReward",
    "math": "toolrl.reward_score.math:MathReward",
    "math_dapo": "toolrl.reward_score.math_dapo:MathDapoReward",
    "number": "toolrl.reward_score.number:NumberReward",
    "otc_grpo": "toolrl.papers.rewards.otc:OtcGrpoReward",
    "otc_ppo": "toolrl.papers.rewards.otc:OtcPpoReward",
    "qa": "toolrl.benchmarks.qa.reward:QaReward",
    "retool": "toolrl.papers.rewards.retool:RetoolReward",
    "search_r1": "toolrl.papers.rewards.search_r1:SearchR1Reward",
    "tool_n1": "toolrl.papers.rewards.tool_n1:ToolN1Reward",
    "torl": "toolrl.papers.rewards.torl:TorlReward",
    "zerotir": "toolrl.papers.rewards.zerotir:ZeroTirReward",
}
REWARD_FORMS: Mapping[str, str] = {  # of reward functions; the first whose parameter a function has
    "completions": "toolrl.reward_forms.trl:TRL",
    "solution_strs": "toolrl.reward_forms.verl:VERL_BATCH",
    "solution_str": "toolrl.reward_forms.verl:VERL",
    "completion": "toolrl.reward_forms.verifiers:RUBRIC",
}
LAYOUTS: Mapping[str, str] = {  # of rows; the first that fits a row
    "xLAM": "toolrl.layouts.published:XLAM",
    "ShareGPT": "toolrl.layouts.published:SHAREGPT",
    "ToolMind": "toolrl.layouts.published:TOOL_MIND",
    "ToolACE": "toolrl.layouts.published:TOOL_ACE",
}
TRACKERS: Mapping[str, str] = {
    "mlflow": "toolrl.trackers.services:MlflowTracker",
    "swanlab": "toolrl.trackers.services:SwanLabTracker",
    "trackio": "toolrl.trackers.services:TrackioTracker",
    "wandb": "toolrl.trackers.services:WandbTracker",
}
HOOKS: Mapping[str, str] = {  # hooks of a training run; verl/trainer/hooks.py has their types
    "benchmarks": "toolrl.benchmarks.runner.online:build_online_eval",
    "check_benchmarks": "toolrl.benchmarks.runner.registry:check_benchmarks",
    "collapse": "toolrl.analysis.collapse.collapse:build_watch",
    "model_files": "toolrl.serve.export.model_files:write_model_files",
    "plan": "toolrl.check.plan.plan:plan_of_run",
    "preflight": "toolrl.check.preflight.preflight:preflight",
    "replay": "toolrl.analysis.replay.record:build_recorder",
    "samples": "toolrl.analysis.samples.keeper:build_keeper",
    "verdict": "toolrl.analysis.report.verdict:verdict_of",
}
_Typed = TypeVar("_Typed")


@dataclass(frozen=True, slots=True)
class Plugin(Generic[_Typed]):
    """An entry of a table, with the type of what it names."""

    path: str  # module:attribute

    def load(self) -> _Typed:
        """Raises ConfigError if it is not installed."""
        if (found := self.find()) is None:
            raise ConfigError(f"{self.path.partition(':')[0]}, or a module that it uses, is not installed")
        return found

    def find(self) -> _Typed | None:
        """None if it, or another module of `toolrl` that it uses, is missing."""
        module, _, attribute = self.path.partition(":")
        try:
            return cast(_Typed, getattr(import_module(module), attribute))
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "toolrl":
                return None
            raise
