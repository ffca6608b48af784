"""An agent of LangGraph: its prebuilt loop of a model and tools. The reward is that of openai_loop.py."""

from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent


def multiply(a: int, b: int) -> str:
    """The product of two integers."""
    return str(a * b)


async def run(base_url, task):
    agent = create_react_agent(ChatOpenAI(model="policy", base_url=base_url, max_tokens=64), [multiply])
    try:
        done = await agent.ainvoke({"messages": task["prompt"]}, {"recursion_limit": 6})
    except GraphRecursionError:  # only calls and no answer
        return -0.5
    text = done["messages"][-1].text
    return (task["answer"] in text) - len(text) / 1000
