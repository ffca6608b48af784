"""A shop with a cart: a small environment for tests and demos, and an example of how to write one.

The policy must find products by name, stay within the stock and check out.
"""

import json
import random
from typing import Annotated, Any

from pydantic import BaseModel, Field

from verl.envs.base import Env, Observation, StepResult
from verl.envs.rows import check_row
from verl.envs.tools.base import ToolError
from verl.envs.tools.functions import Toolbox, answer_calls
from verl.types import Message, Score, Task

_GOODS = ("apples", "bread", "candles", "dates", "eggs", "flour", "grapes", "honey", "ink", "jam", "kale", "lamps")
Quantity = Annotated[int, Field(description="How many, 0 to take it out")]
ProductId = Annotated[str, Field(description="Id of a product, for example 'p3'")]


class Shop:
    """The tools, operating on one customer's cart."""

    def __init__(self, products: dict[str, dict[str, Any]]) -> None:
        self._products = products
        self._cart: dict[str, int] = {}
        self.bought: dict[str, int] | None = None

    def list_products(self) -> dict[str, str]:
        """Ids and names of all products."""
        return {id: product["name"] for id, product in self._products.items()}

    def get_product(self, product_id: ProductId) -> dict[str, Any]:
        """Name, price in cents and stock of a product."""
        if product_id not in self._products:
            raise ToolError(f"there is no product {product_id!r}")
        return self._products[product_id]

    def set_quantity(self, product_id: ProductId, quantity: Quantity) -> str:
        """Put a number of one product into the cart."""
        stock = self.get_product(product_id)["stock"]
        if not 0 <= quantity <= stock:
            raise ToolError(f"quantity must be between 0 and {stock}")
        self._cart = {id: n for id, n in (self._cart | {product_id: quantity}).items() if n}
        return "done"

    def checkout(self) -> dict[str, int]:
        """Buy what is in the cart, once, and get the bill in cents."""
        if self.bought is not None:
            raise ToolError("the cart has been paid already")
        self.bought = dict(self._cart)
        return {"paid": sum(self._products[id]["price"] * number for id, number in self.bought.items())}


_TOOLBOX = Toolbox.of(Shop)


class Product(BaseModel):
    name: str
    price: int
    stock: int


class ShopExtra(BaseModel):
    """Task.extra."""

    products: dict[str, Product]


class ShopEnv(Env):
    """One errand. Task.extra: `products`; Task.answer: JSON of {product id: number} to buy."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._shop = Shop(task.extra["products"])

    @staticmethod
    def check_task(task: Task) -> None:
        check_row("shop", task, ShopExtra, dict[str, int])

    async def reset(self) -> Observation:
        return Observation(self._task.prompt, tuple(_TOOLBOX.specs.values()))

    async def step(self, message: Message) -> StepResult:
        if message.tool_calls:
            return answer_calls(message.tool_calls, lambda call: _TOOLBOX.call(self._shop, call))
        return StepResult(done=True)

    async def judge(self) -> Score:
        bought = float(self._shop.bought == json.loads(self._task.answer))
        return Score(bought, {"bought": bought})


def shop_tasks(count: int = 8, seed: int = 0) -> list[Task]:
    """Errands for one to three products, deterministic in the seed."""
    rng = random.Random(seed)
    return [_errand(rng, f"shop#{seed}.{number}") for number in range(count)]


def _errand(rng: random.Random, id: str) -> Task:
    products = {
        f"p{rng.randrange(100)}{place}": {"name": name, "price": rng.randrange(50, 900), "stock": rng.randrange(3, 9)}
        for place, name in enumerate(rng.sample(_GOODS, 6))
    }
    quantities = {id: rng.randrange(1, 4) for id in rng.sample(sorted(products), rng.randrange(1, 4))}
    listing = ", ".join(f"{number} x {products[product]['name']}" for product, number in quantities.items())
    prompt = (
        Message(
            "system",
            "You shop for a customer with the shop's tools. "
            "Check out once, then say that you are done.",  # words: allowed
        ),
        Message("user", f"Please buy {listing}, and nothing else."),
    )
    return Task(id, prompt, json.dumps(quantities), data_source="shop", env="shop", extra={"products": products})
