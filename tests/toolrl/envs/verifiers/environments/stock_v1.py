"""Tools, served by verifiers over MCP."""

import verifiers.v1 as vf


class StockTools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def price(self, item: str) -> int:
        """The price of an item."""
        return {"egg": 3, "jam": 5}[item]


class StockData(vf.TaskData):
    answer: str


class StockTask(vf.Task[StockData]):
    @classmethod
    def toolsets(cls, config):
        return [StockTools(vf.ToolsetConfig())]

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class StockTaskset(vf.Taskset[StockTask, vf.TasksetConfig]):
    def load(self):
        yield StockTask(StockData(prompt="Price of jam?", answer="5"), self.config.task)


__all__ = ["StockTaskset"]

if __name__ == "__main__":
    StockTools.run()
