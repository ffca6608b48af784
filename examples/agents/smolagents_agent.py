"""A ToolCallingAgent of smolagents, which repeats calls as text of its own. The reward is that of openai_loop.py."""

from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.monitoring import LogLevel


@tool
def multiply(a: int, b: int) -> str:
    """The product of two integers.

    Args:
        a: the first
        b: the second
    """
    return str(a * b)


def run(base_url, task):
    model = OpenAIModel("policy", api_base=base_url, max_tokens=64)
    agent = ToolCallingAgent([multiply], model, max_steps=3, verbosity_level=LogLevel.OFF)
    text = str(agent.run("\n".join(message["content"] for message in task["prompt"])))
    return (task["answer"] in text) - len(text) / 1000
