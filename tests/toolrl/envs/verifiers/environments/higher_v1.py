"""Several turns: an environment that plays the user."""

import verifiers.v1 as vf


class HigherData(vf.TaskData):
    secret: int


class HigherTask(vf.Task[HigherData]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(str(self.data.secret) in trace.last_reply)


class HigherTaskset(vf.Taskset[HigherTask, vf.TasksetConfig]):
    def load(self):
        yield HigherTask(HigherData(prompt="Guess from 1 to 9.", secret=7), self.config.task)


class HigherEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class HigherEnv(vf.Env[HigherEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as player:
            guess = await player.turn()
            while not guess.terminated and str(task.data.secret) not in guess.last_reply:
                if not guess.last_reply.strip().isdigit():
                    return
                higher = int(guess.last_reply) < task.data.secret
                guess = await player.turn("higher" if higher else "lower")


__all__ = ["HigherEnv", "HigherTaskset"]
