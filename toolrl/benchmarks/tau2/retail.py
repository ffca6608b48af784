"""The tools of the retail domain. Their names and parameters are those of the data's gold actions."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Literal

from pydantic import Field

from toolrl.benchmarks.tau2.common import ServiceTools, UserId
from toolrl.benchmarks.tau2.database import Record
from verl.envs.tools.base import ToolError

ProductId = Annotated[str, Field(description="Id of a product, not of an item")]
ItemId = Annotated[str, Field(description="Id of an item, not of a product")]
OrderId = Annotated[str, Field(description="Id of an order with its leading '#', for example '#W0000000'")]
PaymentId = Annotated[str, Field(description="Id of a payment method of the user, for example 'gift_card_0000000'")]
Items = Annotated[list[str], Field(description="Item ids of the order, one for each piece")]
NewItems = Annotated[
    list[str], Field(description="Item ids of the same products that take their places, in the same order")
]
_OPEN = ("pending", "pending (item modified)")


class RetailTools(ServiceTools):
    """Tools of a retail agent."""

    calculate = ServiceTools.calculate

    def find_user_id_by_email(self, email: str) -> str:
        """Find a user by email."""
        return self._user_where(lambda user: user["email"].lower() == email.lower())

    def find_user_id_by_name_zip(self, first_name: str, last_name: str, zip: str) -> str:
        """Find a user by name and zip code. Try the email first."""
        key = (first_name.lower(), last_name.lower(), zip)
        return self._user_where(lambda user: _name_and_zip(user) == key)

    def get_user_details(self, user_id: UserId) -> Record:
        """Profile of a user: name, address, payment methods, orders."""
        return self._find("users", "User", user_id)

    def get_order_details(self, order_id: OrderId) -> Record:
        """Items, address, status and payments of an order."""
        return self._find("orders", "Order", order_id)

    def get_product_details(self, product_id: ProductId) -> Record:
        """A product and its variants, with prices and availability."""
        return self._find("products", "Product", product_id)

    def get_item_details(self, item_id: ItemId) -> Record:
        """Options, price and availability of one item."""
        for product in self._database["products"].values():
            if item_id in product["variants"]:
                item: Record = product["variants"][item_id]
                return item
        raise ToolError(f"Item {item_id} not found")

    def list_all_product_types(self) -> dict[str, str]:
        """Names and product ids of all products."""
        products = self._database["products"].values()
        return dict(sorted((product["name"], product["product_id"]) for product in products))

    def cancel_pending_order(
        self, order_id: OrderId, reason: Literal["no longer needed", "ordered by mistake"]
    ) -> Record:
        """Cancel a pending order, once the user has confirmed it. Gift cards are refunded at once."""
        order = self._order(order_id, ("pending",), "cancelled")
        for method, amount in _paid(order).items():
            self._pay(order, method, -amount)
        order["status"], order["cancel_reason"] = "cancelled", reason
        return order

    def modify_pending_order_address(
        self, order_id: OrderId, address1: str, address2: str, city: str, state: str, country: str, zip: str
    ) -> Record:
        """Change the shipping address of a pending order, once the user has confirmed it."""
        order = self._order(order_id, _OPEN, "modified")
        order["address"] = _address(address1, address2, city, state, country, zip)
        return order

    def modify_pending_order_payment(self, order_id: OrderId, payment_method_id: PaymentId) -> Record:
        """Pay a pending order by another method, once the user has confirmed it."""
        order = self._order(order_id, _OPEN, "modified")
        history = order["payment_history"]
        if len(history) != 1 or history[0]["transaction_type"] != "payment":
            raise ToolError("There should be exactly one payment for a pending order")
        paid = history[0]
        if paid["payment_method_id"] == payment_method_id:
            raise ToolError("The new payment method should be different from the current one")
        self._check_payment(order, payment_method_id, paid["amount"])
        self._pay(order, payment_method_id, paid["amount"])
        self._pay(order, paid["payment_method_id"], -paid["amount"])
        return order

    def modify_pending_order_items(
        self, order_id: OrderId, item_ids: Items, new_item_ids: NewItems, payment_method_id: PaymentId
    ) -> Record:
        """Replace items of a pending order by others of the same products, once the user has confirmed it.

        Can be done only once for an order. The payment method pays the difference or receives it.
        """
        order = self._order(order_id, ("pending",), "modified")
        if any(old == new for old, new in zip(item_ids, new_item_ids, strict=False)):
            raise ToolError("The new item id should be different from the old item id")
        variants, difference = self._replacements(order, item_ids, new_item_ids)
        self._check_payment(order, payment_method_id, difference)
        self._pay(order, payment_method_id, difference)
        for old, variant in zip(item_ids, variants, strict=True):
            item = next(item for item in order["items"] if item["item_id"] == old)
            item.update(item_id=variant["item_id"], price=variant["price"], options=dict(variant["options"]))
        order["status"] = "pending (item modified)"
        return order

    def exchange_delivered_order_items(
        self, order_id: OrderId, item_ids: Items, new_item_ids: NewItems, payment_method_id: PaymentId
    ) -> Record:
        """Exchange items of a delivered order for others of the same products, once the user has confirmed it.

        Can be done only once for an order. The payment method pays the difference or receives it.
        """
        order = self._order(order_id, ("delivered",), "exchanged")
        _, difference = self._replacements(order, item_ids, new_item_ids)
        self._check_payment(order, payment_method_id, difference)
        order.update(
            status="exchange requested",
            exchange_items=sorted(item_ids),
            exchange_new_items=sorted(new_item_ids),
            exchange_payment_method_id=payment_method_id,
            exchange_price_difference=difference,
        )
        return order

    def return_delivered_order_items(self, order_id: OrderId, item_ids: Items, payment_method_id: PaymentId) -> Record:
        """Return items of a delivered order, once the user has confirmed it.

        The refund goes to the method that paid, or to a gift card.
        """
        order = self._order(order_id, ("delivered",), "returned")
        method = self._payment_method(order, payment_method_id)
        if method["source"] != "gift_card" and payment_method_id != order["payment_history"][0]["payment_method_id"]:
            raise ToolError("Payment method should be the original payment method or a gift card")
        _check_items(order, item_ids)
        order.update(
            status="return requested", return_items=sorted(item_ids), return_payment_method_id=payment_method_id
        )
        return order

    def modify_user_address(
        self, user_id: UserId, address1: str, address2: str, city: str, state: str, country: str, zip: str
    ) -> Record:
        """Change a user's default address, once the user has confirmed it."""
        self._find("users", "User", user_id)
        user = self._database["users"].edit(user_id)
        user["address"] = _address(address1, address2, city, state, country, zip)
        return user

    transfer_to_human_agents = ServiceTools.transfer_to_human_agents

    def _user_where(self, fits: Callable[[Record], bool]) -> str:
        for user_id, user in self._database["users"].items():
            if fits(user):
                return user_id
        raise ToolError("User not found")

    def _order(self, order_id: str, allowed: Collection[str], done: str) -> Record:
        """The episode's own copy of an order. Its status must be one of `allowed` for the action `done`."""
        status = self._find("orders", "Order", order_id)["status"]
        if status not in allowed:
            raise ToolError(f"Order {order_id} is {status}: it cannot be {done}")
        return self._database["orders"].edit(order_id)

    def _payment_method(self, order: Record, payment_method_id: str) -> Record:
        methods: dict[str, Record] = self._find("users", "User", order["user_id"])["payment_methods"]
        if payment_method_id not in methods:
            raise ToolError(f"Payment method {payment_method_id} not found")
        return methods[payment_method_id]

    def _check_payment(self, order: Record, payment_method_id: str, amount: float) -> None:
        method = self._payment_method(order, payment_method_id)
        if method["source"] == "gift_card" and method["balance"] < amount:
            raise ToolError("Insufficient gift card balance")

    def _pay(self, order: Record, payment_method_id: str, amount: float) -> None:
        """Write a payment into the order, or a refund where the amount is negative; gift cards change at once."""
        kind = "payment" if amount > 0 else "refund"
        payment = {"transaction_type": kind, "amount": abs(amount), "payment_method_id": payment_method_id}
        order["payment_history"].append(payment)
        if self._payment_method(order, payment_method_id)["source"] == "gift_card":
            card = self._database["users"].edit(order["user_id"])["payment_methods"][payment_method_id]
            card["balance"] = round(card["balance"] - amount, 2)

    def _replacements(
        self, order: Record, item_ids: Sequence[str], new_item_ids: Sequence[str]
    ) -> tuple[list[Record], float]:
        """The replacement variants, and the price difference."""
        _check_items(order, item_ids)
        if len(item_ids) != len(new_item_ids):
            raise ToolError("The number of items and of new items should match")
        variants, difference = [], 0.0
        for old, new in zip(item_ids, new_item_ids, strict=True):
            item = next(item for item in order["items"] if item["item_id"] == old)
            variant = self._find("products", "Product", item["product_id"])["variants"].get(new)
            if variant is None or not variant["available"]:
                raise ToolError(f"New item {new} not found or not available")
            variants.append(variant)
            difference += variant["price"] - item["price"]
        return variants, round(difference, 2)


def _name_and_zip(user: Record) -> tuple[str, str, str]:
    return user["name"]["first_name"].lower(), user["name"]["last_name"].lower(), user["address"]["zip"]


def _paid(order: Record) -> dict[str, float]:
    """Net payments for an order by method."""
    amounts: defaultdict[str, float] = defaultdict(float)
    for entry in order["payment_history"]:
        sign = 1 if entry["transaction_type"] == "payment" else -1
        amounts[entry["payment_method_id"]] += sign * entry["amount"]
    return {method: round(amount, 2) for method, amount in amounts.items() if amount > 0}


def _check_items(order: Record, item_ids: Sequence[str]) -> None:
    there = Counter(item["item_id"] for item in order["items"])
    for item_id in Counter(item_ids) - there:
        raise ToolError(f"Item {item_id} not found as often in the order")


def _address(address1: str, address2: str, city: str, state: str, country: str, zip: str) -> Record:
    return {"address1": address1, "address2": address2, "city": city, "state": state, "country": country, "zip": zip}
