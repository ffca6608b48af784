"""Agents of Pydantic AI: one that answers with a text, one whose answer is an object. Its thoughts become parts that
are not sent back. The first reward is that of openai_loop.py."""

from pydantic import BaseModel
from pydantic_ai import Agent, ModelSettings, UsageLimits
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.messages import ModelRequest, ModelResponse, SystemPromptPart, TextPart, UserPromptPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Product(BaseModel):
    """The product of the numbers."""

    value: int


def multiply(a: int, b: int) -> str:
    """The product of two integers."""
    return str(a * b)


async def run(base_url, task):
    text = await answer(base_url, task, str)
    return -0.5 if text is None else (task["answer"] in text) - len(text) / 1000


async def run_with_output_type(base_url, task):
    product = await answer(base_url, task, Product)
    return -0.5 if product is None else float(str(product.value) == task["answer"])


async def answer(base_url, task, output_type):
    """What the agent returns; None if it has only calls, or wrong ones."""
    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url))
    agent = Agent(model, output_type=output_type, tools=[multiply], model_settings=ModelSettings(max_tokens=64))
    *history, last = task["prompt"]
    earlier = [PARTS[each["role"]](each["content"]) for each in history]
    try:
        done = await agent.run(last["content"], message_history=earlier, usage_limits=UsageLimits(request_limit=3))
    except (UnexpectedModelBehavior, UsageLimitExceeded):
        return None
    return done.output


PARTS = {
    "system": lambda text: ModelRequest([SystemPromptPart(text)]),
    "user": lambda text: ModelRequest([UserPromptPart(text)]),
    "assistant": lambda text: ModelResponse([TextPart(text)]),
}
