"""Single turn: a taskset in verifiers' published form."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.5)
    async def correct(self, trace: vf.Trace) -> float:
        if "raise" in trace.last_reply:
            raise ValueError("odd answer")
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    size: int = 5


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        print("loading", flush=True)  # must not reach the trainer's lines
        for number in range(self.config.size):
            data = SumData(prompt=f"{number} + 2 = ?", answer=str(number + 2), system_prompt="Be brief.")
            yield SumTask(data, self.config.task)


__all__ = ["SumTaskset"]
