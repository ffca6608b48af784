"""Train in your own environment: its public methods are the tools, and `get_reward` scores the episode."""

import toolrl


class Counter:
    def reset(self, goal: int) -> str:  # a column of the row; the text is appended to the prompt
        self.value, self.goal = 0, goal
        return f"The counter is at 0, the goal is {goal}."

    def add(self, number: int) -> int:
        """Add a number to the counter."""
        self.value += number
        return self.value

    def get_reward(self) -> float:
        return float(self.value == self.goal)


small = {"rollout.name": "hf", "rollout.n": 4, "data.train_batch_size": 2, "actor.ppo_mini_batch_size": 2}  # for a laptop
small |= {"env.tool_call_format": "toolrl", "data.max_prompt_length": 800, "data.max_response_length": 200}
rows = [{"prompt": "Reach the goal. ", "goal": goal} for goal in (3, 5)]
run = toolrl.train("embedded", rows, env=Counter, recipe="mini_grpo", steps=2, settings=small)
print(run.metrics[-1]["reward/total"], run.model_path)
