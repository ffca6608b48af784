"""Customer service: gold actions play as the data expect, episodes share nothing that they change, users answer."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import real_data
from tests.support.episodes import call, calls, play, respond, run
from toolrl.benchmarks.tau2.common import ServiceTools
from toolrl.benchmarks.tau2.database import Database
from toolrl.benchmarks.tau2.env import Domain, Tau2Env, Tau2Factory, run_actions
from toolrl.benchmarks.tau2.retail import RetailTools
from toolrl.benchmarks.tau2.tasks import tau2_tasks
from toolrl.benchmarks.tau2.users import ChatUser, ScriptedUser
from verl.envs.clock import EnvTimer
from verl.envs.registry import build_env_factory
from verl.envs.tools.base import ToolError
from verl.envs.tools.functions import Toolbox
from verl.errors import ConfigError, ServiceDownError
from verl.types import Message, Score, Task, ToolCall, ToolStatus

ADDRESS = {"address1": "1 A St", "address2": "", "city": "Rome", "state": "NY", "country": "USA", "zip": "10001"}
SHIRTS = {
    "i1": {"item_id": "i1", "options": {"color": "red"}, "available": True, "price": 10.0},
    "i2": {"item_id": "i2", "options": {"color": "blue"}, "available": True, "price": 12.5},
    "i3": {"item_id": "i3", "options": {"color": "green"}, "available": False, "price": 1.0},
}


def small_base() -> dict[str, dict[str, Any]]:
    """A shop with a user, a product and two orders."""
    item = {"name": "Shirt", "product_id": "p1", "item_id": "i1", "price": 10.0, "options": {"color": "red"}}
    paid = {"transaction_type": "payment", "amount": 20.0, "payment_method_id": "gift_card_1"}
    order = {"user_id": "ann_1", "address": ADDRESS, "items": [item, item], "payment_history": [paid]}
    user = {
        "user_id": "ann_1",
        "name": {"first_name": "Ann", "last_name": "Lee"},
        "address": ADDRESS,
        "email": "ann@example.com",
        "payment_methods": {
            "gift_card_1": {"source": "gift_card", "id": "gift_card_1", "balance": 4.0},
            "credit_card_1": {"source": "credit_card", "id": "credit_card_1"},
        },
        "orders": ["#W1", "#W2"],
    }
    base = {
        "products": {"p1": {"name": "Shirt", "product_id": "p1", "variants": SHIRTS}},
        "users": {"ann_1": user},
        "orders": {
            "#W1": {"order_id": "#W1", "status": "pending", **order},
            "#W2": {"order_id": "#W2", "status": "delivered", **order},
        },
    }
    return json.loads(json.dumps(base))  # type: ignore[no-any-return]  # no record within another


def small_domain() -> Domain:
    return Domain(RetailTools, Toolbox.of(RetailTools), small_base())


def small_task(actions: list[dict[str, Any]], communicate: list[str]) -> Task:
    instructions = {
        "reason_for_call": "You want it.",
        "known_info": "You are Ann Lee.",
        "task_instructions": "Be brief.",
    }
    prompt = (Message("system", "policy"), Message("user", "opening"))
    answer = json.dumps({"actions": actions, "communicate": communicate})
    return Task("t#1", prompt, answer, "tau2", "tau2", extra={"domain": "retail", "instructions": instructions})


def used(name: str, **arguments: Any) -> tuple[Any, dict[str, Any]]:
    """What one call of the small shop gives, and what it changes."""
    domain = small_domain()
    database, tools = domain.open()
    return domain.toolbox.call(tools, ToolCall(name, arguments)), database.changes()


def refused(name: str, **arguments: Any) -> str:
    domain = small_domain()
    database, failures = run_actions(domain, [ToolCall(name, arguments)])
    assert database.changes() == {} and len(failures) == 1
    return failures[0]


def test_cancelling_refunds_what_was_paid_at_once_to_a_gift_card() -> None:
    order, changes = used("cancel_pending_order", order_id="#W1", reason="no longer needed")
    assert (order["status"], order["cancel_reason"]) == ("cancelled", "no longer needed")
    refund = {"transaction_type": "refund", "amount": 20.0, "payment_method_id": "gift_card_1"}
    assert order["payment_history"][1:] == [refund]
    assert changes["users"]["ann_1"]["payment_methods"]["gift_card_1"]["balance"] == 24.0


def test_an_order_that_was_paid_anew_is_refunded_once() -> None:
    actions = [
        ToolCall("modify_pending_order_payment", {"order_id": "#W1", "payment_method_id": "credit_card_1"}),
        ToolCall("cancel_pending_order", {"order_id": "#W1", "reason": "ordered by mistake"}),
    ]
    database, failures = run_actions(small_domain(), actions)
    assert not failures
    assert database["users"]["ann_1"]["payment_methods"]["gift_card_1"]["balance"] == 24.0
    flows = [
        (entry["transaction_type"], entry["payment_method_id"])
        for entry in database["orders"]["#W1"]["payment_history"]
    ]
    assert flows[1:] == [("payment", "credit_card_1"), ("refund", "gift_card_1"), ("refund", "credit_card_1")]


def test_modified_items_take_their_own_prices_and_the_difference_is_paid() -> None:
    order, changes = used(
        "modify_pending_order_items",
        order_id="#W1",
        item_ids=["i1"],
        new_item_ids=["i2"],
        payment_method_id="gift_card_1",
    )
    assert [(item["item_id"], item["price"]) for item in order["items"]] == [("i2", 12.5), ("i1", 10.0)]
    assert order["items"][0]["options"] == {"color": "blue"} and order["status"] == "pending (item modified)"
    assert changes["users"]["ann_1"]["payment_methods"]["gift_card_1"]["balance"] == 1.5


def test_exchanges_and_returns_are_written_into_the_order() -> None:
    items = {"item_ids": ["i1", "i1"], "payment_method_id": "credit_card_1"}
    order, _ = used("exchange_delivered_order_items", order_id="#W2", new_item_ids=["i2", "i2"], **items)
    assert (order["status"], order["exchange_price_difference"]) == ("exchange requested", 5.0)
    order, changes = used(
        "return_delivered_order_items", order_id="#W2", item_ids=["i1"], payment_method_id="gift_card_1"
    )
    assert (order["status"], order["return_items"], list(changes)) == ("return requested", ["i1"], ["orders"])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("get_order_details", {"order_id": "W1"}, "Order W1 not found"),
        ("find_user_id_by_email", {"email": "bob@example.com"}, "User not found"),
        ("cancel_pending_order", {"order_id": "#W2", "reason": "no longer needed"}, "#W2 is delivered"),
        ("cancel_pending_order", {"order_id": "#W1", "reason": "bored"}, "is not one of"),
        ("modify_pending_order_payment", {"order_id": "#W1", "payment_method_id": "gift_card_1"}, "different"),
        ("modify_pending_order_payment", {"order_id": "#W1", "payment_method_id": "visa"}, "visa not found"),
        (
            "modify_pending_order_items",
            {
                "order_id": "#W1",
                "item_ids": ["i1", "i1"],
                "new_item_ids": ["i2"] * 2,
                "payment_method_id": "gift_card_1",
            },
            "Insufficient gift card balance",
        ),
        (
            "modify_pending_order_items",
            {
                "order_id": "#W1",
                "item_ids": ["i1"] * 3,
                "new_item_ids": ["i2"] * 3,
                "payment_method_id": "credit_card_1",
            },
            "Item i1 not found as often",
        ),
        (
            "exchange_delivered_order_items",
            {"order_id": "#W2", "item_ids": ["i1"], "new_item_ids": ["i3"], "payment_method_id": "credit_card_1"},
            "not available",
        ),
        (
            "return_delivered_order_items",
            {"order_id": "#W2", "item_ids": ["i1"], "payment_method_id": "credit_card_1"},
            "original payment method",
        ),
    ],
)
def test_impossible_actions_are_refused_and_change_nothing(
    name: str, arguments: Mapping[str, Any], message: str
) -> None:
    assert message in refused(name, **arguments)


@pytest.mark.parametrize(
    ("expression", "value"), [("2 * (3.5 - 1)", "5.0"), ("-1/3", "-0.33"), ("3131.1 + 4777.75 + 367.38", "8276.23")]
)
def test_calculate(expression: str, value: str) -> None:
    assert ServiceTools(Database({})).calculate(expression) == value


@pytest.mark.parametrize(
    "expression", ["9**9**9", "1/0", "(", "__import__('os')", "1 if 1 else 2", "'a'*3", "(" * 201, "True"]
)
def test_calculate_understands_nothing_else(expression: str) -> None:
    with pytest.raises(ToolError):
        ServiceTools(Database({})).calculate(expression)


RECORDS = st.dictionaries(
    st.sampled_from("abcd"), st.fixed_dictionaries({"n": st.integers(), "l": st.lists(st.integers())})
)
EDITS = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers()))


@given(RECORDS, EDITS, EDITS)
def test_databases_over_one_base_do_not_see_each_other(
    records: dict[str, Any], first: list[tuple[str, int]], second: list[tuple[str, int]]
) -> None:
    before = json.dumps(records)
    pairs = []
    for edits in (first, second):
        database, copy = Database({"t": records}), json.loads(before)
        pairs.append((database, copy, edits))
    for database, copy, edits in pairs:
        for key, number in edits:
            if key in database["t"]:
                database["t"].edit(key)["l"].append(number)
            else:
                database["t"][key] = {"n": 0, "l": [number]}
            copy.setdefault(key, {"n": 0, "l": []})["l"].append(number)
    for database, copy, _ in pairs:
        assert dict(database["t"]) == copy and len(database["t"]) == len(copy)
    (ours, our_copy, _), (theirs, their_copy, _) = pairs
    assert (ours.changes() == theirs.changes()) == (our_copy == their_copy)
    assert json.dumps(records) == before


def test_an_edit_without_a_difference_is_no_change() -> None:
    database = Database({"t": {"a": {"n": 1}}})
    database["t"].edit("a")["n"] = 2
    assert database.changes() == {"t": {"a": {"n": 2}}}
    database["t"].edit("a")["n"] = 1
    assert database.changes() == {}


CANCEL = {"name": "cancel_pending_order", "arguments": {"order_id": "#W1", "reason": "no longer needed"}}


def scores(task: Task, *messages: Message) -> dict[str, float]:
    env = Tau2Env(task, small_domain(), ScriptedUser(), max_user_turns=3)
    played = asyncio.run(play(env, messages))
    assert played[-1].done and played.score is not None
    return {"total": played.score.total, **played.score.parts}


def test_both_the_database_and_the_communicated_facts_count() -> None:
    task = small_task([CANCEL], ["1,020.50", "red"])
    cancel = calls(ToolCall(**CANCEL))
    assert scores(task, cancel, respond("It is RED and costs 1020.50.")) == {"total": 1, "db": 1, "communicate": 1}
    assert scores(task, cancel, respond("It is red.")) == {"total": 0, "db": 1, "communicate": 0}
    assert scores(task, respond("It is red and costs 1,020.50.")) == {"total": 0, "db": 0, "communicate": 1}
    assert scores(task, cancel, respond("<think>red, 1020.50</think>Done.")) == {"total": 0, "db": 1, "communicate": 0}


def test_a_conversation_that_is_cut_off_is_judged_as_it_stands() -> None:
    env = partial(Tau2Env, small_task([CANCEL], ["red"]), small_domain(), ScriptedUser(), 3)
    cancel = calls(ToolCall(**CANCEL))
    assert asyncio.run(play(env(), [cancel])).score == Score(0.0, {"db": 1.0, "communicate": 0.0})
    asked = asyncio.run(play(env(), [cancel, respond("It is red, is it?")]))
    assert not asked[-1].done and asked.score == Score(1.0, {"db": 1.0, "communicate": 1.0})


def test_the_scripted_user_answers_questions_and_hangs_up_otherwise() -> None:
    env = Tau2Env(small_task([], []), small_domain(), ScriptedUser(), max_user_turns=3)
    opening = asyncio.run(env.reset())
    assert [message.role for message in opening.messages] == ["system", "user"]
    assert all(text in opening.messages[1].content for text in ("You want it.", "You are Ann Lee.", "Be brief."))
    asked = asyncio.run(env.step(respond("<think>who?</think>Who are you?")))
    assert asked.messages == (Message("user", "You are Ann Lee.\nYes, please go ahead with what I asked for."),)
    assert asyncio.run(env.step(respond("<think>really?</think>Good bye."))).done


def test_the_user_sees_no_tags_and_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    with endpoint(["Hi.", "Ann Lee."]) as (url, asked):

        async def talk(user: ChatUser) -> None:
            env = Tau2Env(small_task([], []), small_domain(), user, max_user_turns=9)
            await env.reset()
            await env.step(call("get_order_details", order_id="#1"))
            await env.step(respond("<think>who?</think>\n<response> Who are you? </response>"))

        asyncio.run(chat_with(url, talk))
    contents = [message["content"] for message in asked[1][2]["messages"]]
    assert contents[1:] == ["Hi.", "Who are you?"] and "My case" not in contents[0]


def test_the_user_ends_the_dialogue_at_the_turn_limit() -> None:
    env = Tau2Env(small_task([], []), small_domain(), ScriptedUser(), max_user_turns=3)
    results = asyncio.run(play(env, [respond("Sure?")] * 3))
    assert [result.done for result in results] == [False, False, True]


@contextmanager
def endpoint(
    responses: Sequence[str | None], status: int = 200, after_s: float = 0.0
) -> Iterator[tuple[str, list[Any]]]:
    """An OpenAI-compatible endpoint that answers these, and what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append((self.path, self.headers["authorization"], body))
            content = {"choices": [{"message": {"content": responses[min(len(asked), len(responses)) - 1]}}]}
            time.sleep(after_s)
            self.send_response(status)
            self.end_headers()
            with suppress(BrokenPipeError):  # the client has not waited
                self.wfile.write(json.dumps(content).encode())

        def log_message(self, format: str, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked
    server.shutdown()
    server.server_close()


def test_a_language_model_can_be_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER_KEY", "k")
    with endpoint(["Hi, I want it.", "Ann Lee.", "###STOP###"]) as (url, asked):

        async def talk() -> None:
            user = ChatUser(url, "tiny", "USER_KEY", 5.0)
            task, domain = small_task([], []), small_domain()
            env = Tau2Env(task, domain, user, max_user_turns=9)
            opening = await env.reset()
            again = await Tau2Env(task, domain, user, max_user_turns=9).reset()
            assert opening.messages == again.messages and opening.messages[1].content == "Hi, I want it."
            assert (await env.step(respond("<think>?</think>Who are you?"))).messages[0].content == "Ann Lee."
            assert (await env.step(respond("Done?"))).done
            await user.close()

        asyncio.run(talk())
    path, key, body = asked[1]
    assert (path, key, body["model"]) == ("/v1/chat/completions", "Bearer k", "tiny")
    assert [message["role"] for message in body["messages"]] == ["system", "assistant", "user"]
    assert body["messages"][2]["content"] == "Who are you?" and len(asked) == 3


async def chat_with(url: str, do: Callable[[ChatUser], Awaitable[Any]]) -> Any:
    user = ChatUser(url, "tiny", "NO_SUCH_KEY", 5.0)
    try:
        return await do(user)
    finally:
        await user.close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolrl.benchmarks.tau2.users._PAUSES_S", (0.0, 0.0))


def test_a_user_that_does_not_answer_is_a_service_that_is_down() -> None:
    def ask(url: str) -> Any:
        return chat_with(url, lambda user: user.opening(small_task([], [])))

    raised = pytest.raises(ServiceDownError, match=r"returned status 500: .*out of memory")
    with endpoint(["out of memory"], status=500) as (url, asked), raised:
        asyncio.run(ask(url))
    assert len(asked) == 3
    with pytest.raises(ServiceDownError, match=r"simulated user at .* ConnectError"):
        asyncio.run(ask(url))
    with pytest.raises(ServiceDownError, match="simulated user at not a url"):
        asyncio.run(ask("not a url"))


@pytest.mark.parametrize("text", [None, "", "<think>What do I want?</think>\n"])
def test_an_empty_user_completion_is_a_service_fault(text: str | None) -> None:
    with endpoint([text]) as (url, _), pytest.raises(ServiceDownError, match="returned an empty completion"):
        asyncio.run(chat_with(url, lambda user: user.answer(small_task([], []), [Message("assistant", "Hi?")])))


def test_a_user_that_ends_before_its_first_message_is_a_service_fault() -> None:
    with endpoint(["###STOP###"]) as (url, _), pytest.raises(ServiceDownError, match="hangs up on 'Hello"):
        asyncio.run(chat_with(url, lambda user: user.opening(small_task([], []))))


def test_thoughts_of_the_user_end_nothing_and_are_not_shown() -> None:
    with endpoint(["<think>Then I write ###STOP###.</think>Ann Lee."]) as (url, _):
        answer = asyncio.run(
            chat_with(url, lambda user: user.answer(small_task([], []), [Message("assistant", "Who are you?")]))
        )
    assert answer == "Ann Lee."


def test_a_refusing_endpoint_is_reported_at_the_start() -> None:
    raised = pytest.raises(ServiceDownError, match=r"status 401: .*no such key.* correct user_url, user_model and")
    with endpoint(["no such key"], status=401) as (url, _), raised as found:
        asyncio.run(chat_with(url, lambda user: user.check_services()))
    assert found.value.__cause__ is None  # a traceback would add nothing
    with pytest.raises(ServiceDownError, match=r"ConnectError.* Start it, or"):
        asyncio.run(chat_with(url, lambda user: user.check_services()))
    with endpoint(["Hi."]) as (url, asked):
        asyncio.run(chat_with(url, lambda user: user.check_services()))
    assert len(asked) == 1


def test_time_of_the_user_is_not_charged_to_the_agent() -> None:
    async def timed(user: ChatUser) -> float:
        clock = EnvTimer(60.0)
        async with clock.running():
            await user.answer(small_task([], []), [Message("assistant", "Hi?")])
        return clock.seconds

    with endpoint(["Ann Lee."], after_s=0.5) as (url, _):
        assert asyncio.run(chat_with(url, timed)) < 0.5


def test_a_slow_endpoint_is_warned_of_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("toolrl.benchmarks.tau2.users._CHECK_S", 0.05)
    with endpoint(["Hi."], after_s=0.5) as (url, _):
        asyncio.run(chat_with(url, lambda user: user.check_services()))
    assert "no answer within 0.05 s" in caplog.text


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="user must be scripted or chat"):
        build_env_factory("tau2", {"data": "x", "user": "me"})
    with pytest.raises(ConfigError, match="needs user_url"):
        build_env_factory("tau2", {"data": "x", "user": "chat"})
    with pytest.raises(ConfigError, match="are of user=chat, but user is scripted"):
        build_env_factory("tau2", {"data": "x", "user_url": "http://127.0.0.1:1/v1", "user_model": "big"})
    with pytest.raises(ConfigError, match=r"there is no file .*policy\.md"):
        tau2_tasks(str(tmp_path))


@pytest.mark.parametrize(
    ("domain", "num_tasks", "num_calls", "num_refused", "num_changed"),
    [("retail", 114, 550, 18, 103), ("airline", 50, 142, 0, 26)],
)
def test_gold_actions_of_the_real_data(
    domain: Any, num_tasks: int, num_calls: int, num_refused: int, num_changed: int
) -> None:
    data = str(real_data("tau2", domain, "tasks.json").parents[1])
    found = Tau2Factory(data).domain(domain)
    before = json.dumps(found.base, sort_keys=True)
    tasks = tau2_tasks(data, domain, "all")
    golds = [[ToolCall(**action) for action in json.loads(task.answer)["actions"]] for task in tasks]
    played = [run_actions(found, gold) for gold in golds]
    assert (len(tasks), sum(map(len, golds))) == (num_tasks, num_calls)
    assert sum(len(failures) for _, failures in played) == num_refused
    assert sum(bool(database.changes()) for database, _ in played) == num_changed
    assert json.dumps(found.base, sort_keys=True) == before


@pytest.mark.parametrize(("domain", "idle_wins"), [("retail", 11), ("airline", 24)])
def test_the_gold_wins_in_the_real_data(domain: Any, idle_wins: int) -> None:
    data = str(real_data("tau2", domain, "tasks.json").parents[1])
    factory = Tau2Factory(data)
    won = 0
    for task in tau2_tasks(data, domain, "all"):
        gold = json.loads(task.answer)
        closing = respond(" ".join(["Done.", *gold["communicate"]]))
        acted = run(
            factory, task, *(call(action["name"], **action["arguments"]) for action in gold["actions"]), closing
        )
        assert acted.score is not None and acted.score.total == 1.0, task.id
        idle = run(factory, task, closing).score
        assert idle is not None
        won += idle.total == 1.0
    assert won == idle_wins  # those whose database must stay as it is


def test_splits_of_the_real_data() -> None:
    data = str(real_data("tau2", "retail", "tasks.json").parents[1])
    assert [len(tau2_tasks(data, "retail", split)) for split in ("train", "test")] == [74, 40]
    assert [len(tau2_tasks(data, "airline", split)) for split in ("train", "test")] == [30, 20]


def test_airline_bookings_in_the_real_data() -> None:
    data = str(real_data("tau2", "airline", "tasks.json").parents[1])
    domain = Tau2Factory(data).domain("airline")
    _, tools = domain.open()
    trip = {"origin": "ORD", "destination": "PHL", "date": "2024-05-26"}
    trips = domain.toolbox.call(tools, ToolCall("search_onestop_flight", trip))
    assert trips and all(first["destination"] == second["origin"] for first, second in trips)
    flight = domain.toolbox.call(tools, ToolCall("search_direct_flight", trip))[0]
    booking = {
        "user_id": "sophia_silva_7557",
        "origin": "ORD",
        "destination": "PHL",
        "flight_type": "one_way",
        "cabin": "economy",
        "flights": [{"flight_number": flight["flight_number"], "date": "2024-05-26"}],
        "passengers": [{"first_name": "Sophia", "last_name": "Silva", "dob": "1957-10-05"}],
        "payment_methods": [{"payment_id": "credit_card_4196779", "amount": flight["prices"]["economy"] + 30 + 50}],
        "total_baggages": 2,
        "nonfree_baggages": 1,
        "insurance": "yes",
    }
    short = {**booking, "payment_methods": [{"payment_id": "credit_card_4196779", "amount": 1}]}
    database, failures = run_actions(
        domain, [ToolCall("book_reservation", short), ToolCall("book_reservation", booking)]
    )
    assert len(failures) == 1 and "payments add up to 1" in failures[0]
    after = database["flights"][flight["flight_number"]]["dates"]["2024-05-26"]["available_seats"]["economy"]
    assert after == flight["available_seats"]["economy"] - 1
    assert database["users"]["sophia_silva_7557"]["reservations"][-1] == "HATHAT"


def test_wrong_arguments_are_answers() -> None:
    env = Tau2Env(small_task([], []), small_domain(), ScriptedUser(), max_user_turns=3)
    results = asyncio.run(
        play(env, [call("get_order_details", order_id=1), call("_find"), call("open"), call("__init__")])
    )
    assert all(result.tool_uses[0].status is ToolStatus.USER_ERROR for result in results)
