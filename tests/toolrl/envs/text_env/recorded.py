"""Environments of three libraries, as they are, whose objects write down what they reported, one line an episode."""

import json
import os
from pathlib import Path

import gymnasium
import textarena
from skyrl_gym.envs.gsm8k.multi_turn_env import GSM8kMultiTurnEnv


def note(seed, steps, reward):
    with Path(os.environ["REPORTED"]).open("a") as file:
        file.write(json.dumps({"seed": seed, "steps": steps, "reward": reward}) + "\n")


class Taxi(gymnasium.Wrapper):
    def __init__(self):
        super().__init__(gymnasium.make("Taxi-v4", render_mode="ansi"))

    def reset(self, *, seed=None, options=None):
        self.seed, self.rewards = seed, []
        return self.env.reset(seed=seed)

    def step(self, action):
        found = self.env.step(action)
        self.rewards.append(float(found[1]))
        return found

    def close(self):
        note(self.seed, len(self.rewards), sum(self.rewards))
        self.env.close()


class GuessTheNumber(textarena.Wrapper):
    def __init__(self):
        super().__init__(textarena.make("GuessTheNumber-v0", max_turns=1))

    def reset(self, num_players, seed=None):
        self.seed, self.steps = seed, 0
        return self.env.reset(num_players=num_players, seed=seed)

    def step(self, action):
        self.steps += 1
        return self.env.step(action)

    def close(self):
        found = self.env.close()
        note(self.seed, self.steps, (found[0] or {}).get(0, 0.0))
        return found


class Gsm8k(GSM8kMultiTurnEnv):
    def __init__(self, env_config=None, extras=None):
        super().__init__(env_config, extras)
        self.seed, self.rewards = extras["seed"], []

    def step(self, action):
        found = super().step(action)
        self.rewards.append(float(found["reward"]))
        return found

    def close(self):
        note(self.seed, self.turns, sum(self.rewards))
