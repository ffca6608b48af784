"""An agent of the OpenAI Agents SDK, through the responses API. The reward is that of openai_loop.py."""

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    ModelSettings,
    Runner,
    function_tool,
    set_tracing_disabled,
)

set_tracing_disabled(True)  # traces go to OpenAI


@function_tool
def multiply(a: int, b: int) -> str:
    """The product of two integers."""
    return str(a * b)


async def run(base_url, task):
    agent = Agent("Calculator", model="policy", tools=[multiply], model_settings=ModelSettings(max_tokens=64))
    try:
        done = await Runner.run(agent, task["prompt"], max_turns=3)
    except (MaxTurnsExceeded, ModelBehaviorError):  # only calls, or one of a tool that does not exist
        return -0.5
    text = done.final_output
    return (task["answer"] in text) - len(text) / 1000
