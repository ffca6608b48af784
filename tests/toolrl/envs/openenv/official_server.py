"""Servers of the official package, run by its interpreter: python official_server.py KIND PORT [MAX_SESSIONS]"""

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class GuessAction(Action):
    """Guess the number."""

    number: int


class WordAction(Action):
    message: str


class Shown(Observation):
    text: str


class Base(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.steps = 0

    @property
    def state(self):
        return State(step_count=self.steps)


class Guess(Base):
    def reset(self, seed=None, episode_id=None, secret=None, **kwargs):
        self.secret = secret if secret is not None else seed % 10
        self.steps = 0
        return Shown(text="From 0 to 9?")

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        if action.number == 66:
            raise RuntimeError("bad luck")
        right = action.number == self.secret
        return Shown(text="right" if right else "wrong", reward=1.0 if right else -0.25, done=right)


class Talk(Base):
    def reset(self, seed=None, episode_id=None, **kwargs):
        return Shown(text="Write stop.")

    def step(self, action, timeout_s=None, **kwargs):
        return Shown(text=f"got {action.message}", reward=0.5, done="stop" in action.message)


class Echo(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("echo")

        @server.tool
        def echo(message: str, times: int = 1) -> str:
            """Repeats a message."""
            if times < 0:
                raise ValueError("negative")
            return message * times

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation()

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise NotImplementedError

    @property
    def state(self):
        return State()


KINDS = {
    "guess": (Guess, GuessAction, Shown),
    "talk": (Talk, WordAction, Shown),
    "echo": (Echo, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    kind, port, sessions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    app = create_app(*KINDS[kind], env_name=kind, max_concurrent_envs=sessions)
    uvicorn.run(app, port=port, log_level="warning")
