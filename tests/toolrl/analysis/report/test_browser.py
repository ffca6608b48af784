"""The report in a real browser: Debian's chromium, driven by selenium."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.damage import add_wrong_rows
from tests.support.programs import need
from tests.support.report_run import HOSTILE, PER_GROUP, damage, save_report_run
from toolrl.analysis.report.page import write_report
from toolrl.analysis.report.serve import ReportServer
from verl.tracking.jsonl import append_jsonl, read_jsonl, write_jsonl

PAGES = ("overview", "curves", "validation", "times", "distributions", "rollouts", "compare")
LATE_STREAM = """
const real = EventSource, waiting = [];
window.EventSource = function (at) {
  this.addEventListener = (...each) => waiting.push(each);
  window.late = () => { const stream = new real(at); waiting.forEach((each) => stream.addEventListener(...each)); };
}
"""
pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    need("chromium", "chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    started.set_script_timeout(20)
    yield started
    started.quit()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Reports of one run, and of two."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [save_report_run(folder / name, gain=gain) for name, gain in (("one", 0.1), ("two", 0.2))]
    write_report(runs[:1], folder / "one.html")
    write_report(runs, folder / "two.html")
    return folder / "one.html", folder / "two.html"


def until(driver: Any, expression: str, seconds: float = 15.0) -> Any:
    """The value of a JavaScript expression, once it is true."""
    end = time.monotonic() + seconds
    while not (value := driver.execute_script(f"return ({expression})")):
        assert time.monotonic() < end, f"never true: {expression}"
        time.sleep(0.05)
    return value


def load(driver: Any, url: str, page: str = "overview") -> None:
    driver.get("about:blank")
    driver.get(f"{url}#{page}")
    until(driver, "document.documentElement.dataset.ready")


def texts(driver: Any, selector: str) -> list[str]:
    return driver.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector
    )


def setting(driver: Any, name: str, value: str) -> None:
    """As if typed into the filter of this name."""
    driver.execute_script(
        "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        "e.dispatchEvent(new Event(e.tagName === 'SELECT' ? 'change' : 'input', { bubbles: true }))",
        name,
        value,
    )


def press(driver: Any, key: str) -> None:
    driver.execute_script(
        "document.body.dispatchEvent(new KeyboardEvent('keydown', { key: arguments[0], bubbles: true }))", key
    )


@pytest.mark.parametrize("which", [0, 1])
def test_every_page_opens_without_an_error_or_a_request(driver: Any, files: tuple[Path, Path], which: int) -> None:
    load(driver, files[which].as_uri())
    for log in ("browser", "performance"):
        driver.get_log(log)
    for page in PAGES:
        driver.execute_script("location.hash = arguments[0]", page)
        until(driver, f"document.querySelector('nav a[aria-current]').hash === '#{page}'")
        for theme in ("dark", "light"):
            driver.execute_script("setTheme(arguments[0])", theme)
        until(driver, "document.querySelectorAll('main canvas').length || document.querySelector('main article')")
    assert driver.title != "taken"
    assert driver.get_log("browser") == []
    requested = [entry["message"] for entry in driver.get_log("performance") if "requestWillBeSent" in entry["message"]]
    assert [message for message in requested if '"url":"data:' not in message] == []


def test_text_of_the_model_is_shown_as_text(driver: Any, files: tuple[Path, Path]) -> None:
    load(driver, files[0].as_uri(), "rollouts")
    until(driver, "document.querySelector('article .message')")
    shown = texts(driver, "article .message pre")
    assert f"question 0 {HOSTILE}" in shown and any(HOSTILE in text for text in texts(driver, "article .gold pre"))
    assert driver.execute_script("return document.querySelectorAll('main img, main script').length") == 0
    press(driver, "t")
    until(driver, "document.querySelector('.tokens')")
    assert f"{HOSTILE}9 " in texts(driver, ".tokens span.trained")
    driver.execute_script(
        "document.querySelector('.tokens span.trained').dispatchEvent(new MouseEvent('mouseover', { bubbles: true }))"
    )
    until(driver, "document.querySelector('.tip')")
    press(driver, "t")
    assert driver.title == "one" and driver.get_log("browser") == []


def test_filters_choose_rollouts(driver: Any, files: tuple[Path, Path]) -> None:
    load(driver, files[0].as_uri(), "rollouts")
    every = 12 * 3 * PER_GROUP

    def counted(number: int) -> None:
        until(driver, f"document.getElementById('count').textContent === '{number} of {every} rollouts'")

    counted(every)
    for name, value, number in (
        ("filter-step", "5", 3 * PER_GROUP),
        ("filter-low", "2", 2 * 2),
        ("filter-stop", "length", 2),
        ("filter-stop", "", 4),
        ("filter-status", "t", 2),
        ("filter-status", "", 4),
        ("filter-low", "", 3 * PER_GROUP),
        ("filter-task", "task1", PER_GROUP),
        ("filter-task", "", 3 * PER_GROUP),
        ("filter-step", "", every),
        ("search", "step 7 GROUP 2", PER_GROUP),
        ("search", HOSTILE[:20], every),
        ("search", '"city": "oslo"', every),
        ("search", "responses", 0),  # a name in the record, and in no text
        ("search", "", every),
    ):
        setting(driver, name, value)
        counted(number)
    for name in ("filter-equal", "filter-kept"):
        driver.execute_script("document.getElementById(arguments[0]).click()", name)
        counted(12 * PER_GROUP)
        driver.execute_script("document.getElementById(arguments[0]).click()", name)


def test_an_address_opens_its_rollout(driver: Any, files: tuple[Path, Path]) -> None:
    shown = "location.hash === '#rollouts/0/5/7' && document.querySelector('article h3')?.textContent.startsWith"
    load(driver, files[0].as_uri(), "rollouts/0/5/7")
    until(driver, f"{shown}('step 5, rollout {7 % PER_GROUP}')")
    driver.execute_script("document.querySelector('article').remove()")
    press(driver, "d")
    until(driver, f"{shown}('step 5, rollout {7 % PER_GROUP}')")
    press(driver, "d")


def test_a_group_is_compared_and_keys_move(driver: Any, files: tuple[Path, Path]) -> None:
    load(driver, files[0].as_uri(), "rollouts")
    until(driver, "document.querySelectorAll('article').length === 1")
    driver.execute_script("document.querySelectorAll('[title=\"show beside\"]')[2].click()")
    until(driver, "document.querySelectorAll('article').length === 2")
    assert "rollout 2" in texts(driver, "article h3")[1]
    ordered = driver.execute_script(
        "const m = meta(), rows = groupOf(0), lines = rows.map((row) => m.line[row]), turned = [...lines].reverse();"
        "const put = (given) => rows.forEach((row, place) => { m.line[row] = given[place] }); put(turned);"
        "const found = groupOf(0).map((row) => m.line[row]); put(lines); return [found, lines]"
    )
    assert ordered[0] == ordered[1] == sorted(ordered[1]) and len(ordered[0]) == PER_GROUP
    press(driver, "p")
    until(driver, "document.getElementById('pin').getAttribute('aria-pressed') === 'true'")
    for _ in range(4):
        press(driver, "j")
    until(driver, "location.hash === '#rollouts/0/1/4' && document.querySelectorAll('article').length === 2")
    assert [text[:17] for text in texts(driver, "article h3")] == ["step 1, rollout 0"] * 2  # of two groups
    for _ in range(4):
        press(driver, "k")
    until(driver, "location.hash === '#rollouts/0/1/0' && document.querySelectorAll('article').length === 1")
    press(driver, "p")
    press(driver, "j")
    until(driver, "location.hash === '#rollouts/0/1/1' && document.querySelectorAll('article').length === 1")
    press(driver, "k")
    until(driver, "location.hash === '#rollouts/0/1/0'")
    press(driver, "2")
    until(driver, "location.hash === '#curves'")


def test_the_token_view_marks_what_is_trained_in_every_segment(driver: Any, files: tuple[Path, Path]) -> None:
    load(driver, files[0].as_uri(), "rollouts/0/3/0")
    press(driver, "t")
    until(driver, "document.querySelectorAll('.segment').length === 2")
    first, second = texts(driver, ".segment > p")
    lines = texts(driver, ".segment:first-of-type .explained p")
    assert any(line.startswith("share of this sample: 0.25 = weight * (3.75)") for line in lines)
    assert texts(driver, ".explained code")[0].endswith("/one --step 3 --sample 0")
    check = "the computed shares of 5 samples add up to 1.25, actor/loss is 1.25: they agree within 1.3e-05"
    assert f"sum check: {check}" in lines
    assert first.startswith("segment 1 of 2: 3 of 5 tokens trained") and second.startswith("segment 2 of 2")
    marks = driver.execute_script("return [...document.querySelector('.tokens').children].map((e) => e.className)")
    assert marks == ["", "", "trained", "trained", "trained"]
    options = texts(driver, ".segment:first-child option, .segment option")
    assert {"advantage", "log p of engine - trainer", "entropy", "weight version"} <= set(options)
    driver.execute_script(
        "const e = document.querySelector('.shade'); e.value = 'entropy'; e.dispatchEvent(new Event('change'))"
    )
    backs = driver.execute_script(
        "return [...document.querySelector('.segment').querySelectorAll('.trained')].map((e) => e.style.background)"
    )
    assert len(set(backs)) == 3
    press(driver, "t")
    until(driver, "!document.querySelector('.tokens')")


@pytest.mark.parametrize(
    ("score", "text"),
    [
        ({"total": 3, "parts": {"a": 1, "b": 2}}, "a 1 + b 2 = 3; for training 7"),
        ({"total": 5, "parts": {"a": 1, "b": 2}}, "5; the parts do not add up to it, but to 3; for training 7"),
        ({"total": 5, "parts": {}}, "5; for training 7"),
        (None, "for training 7"),
    ],
    ids=str,
)
def test_the_recorded_total_is_shown_and_parts_that_do_not_add_up(
    driver: Any, files: tuple[Path, Path], score: Any, text: str
) -> None:
    load(driver, files[0].as_uri())
    assert driver.execute_script("return rewardText({ reward: 7 }, arguments[0])", score) == text


def test_an_explanation_is_shown_as_text(driver: Any, files: tuple[Path, Path]) -> None:
    load(driver, files[0].as_uri(), "rollouts/0/3/1/explain")
    until(driver, "document.querySelector('.explained[open]') && location.hash === '#rollouts/0/3/1/explain'")
    assert not texts(driver, ".tokens") and not texts(driver, ".message")
    press(driver, "e")
    until(driver, "document.querySelector('.message') && location.hash === '#rollouts/0/3/1'")
    press(driver, "e")
    until(driver, "document.querySelector('.explained[open]')")
    press(driver, "t")
    until(driver, "document.querySelector('.tokens') && !document.querySelector('.explained[open]')")
    press(driver, "t")
    sections = [["Texts", [f"assistant: {HOSTILE}"]], [HOSTILE, ["1 + 2 = 3"]]]
    driver.execute_script(
        "const sample = { step: 3, number: 1, explanation: { sections: arguments[0], failed: [arguments[1]] } };"
        "document.querySelector('main').append(explanation(sample, null, true))",
        sections,
        HOSTILE,
    )
    assert texts(driver, ".explained h4") == ["Texts", HOSTILE]
    assert texts(driver, ".explained section p") == [f"assistant: {HOSTILE}", "1 + 2 = 3"]
    assert texts(driver, ".explained .bad") == [f"checks that fail: {HOSTILE}"]
    driver.execute_script(
        "const check = (agrees) => ({ text: 'a check', agrees }), columns = { advantages: [1, 1] };"
        "const sample = { reward: 3, group_returns: [1, 3], columns, share: check(true), total: check(false) };"
        "document.querySelector('main').replaceChildren(explanation({ ...sample, explanation: null }, null, true))"
    )
    assert texts(driver, ".explained td")[:6:2] == ["reward", "group", "advantage"]
    assert texts(driver, ".explained td")[1:6:2] == ["for training 3", "mean 2, std 1.414 (n - 1)", "1 on every token"]
    assert texts(driver, ".explained .bad") == texts(driver, ".explained .good") == ["a check"]
    assert driver.execute_script("return document.querySelectorAll('main img, main script').length") == 0
    assert driver.title == "one" and driver.get_log("browser") == []


def test_tokens_are_reached_by_keys(driver: Any, files: tuple[Path, Path]) -> None:
    """The tab key goes to one token of a segment, arrows to the others, and the tooltip is that of the focus."""
    keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
    load(driver, files[0].as_uri(), "rollouts/0/3/0")
    press(driver, "t")
    until(driver, "document.querySelectorAll('.segment').length === 2")

    def place() -> list[str]:
        tip = texts(driver, ".tip td.number")
        focused = driver.execute_script("return document.activeElement.dataset.place ?? document.activeElement.tagName")
        return [focused, *tip[1:2]]

    def typed(*pressed: str) -> list[str]:
        driver.switch_to.active_element.send_keys(*pressed)
        return place()

    driver.execute_script("document.querySelector('.shade').focus()")
    assert typed(keys.TAB) == ["0", "0"]
    assert typed(keys.ARROW_RIGHT) == ["1", "1"] and typed(keys.ARROW_RIGHT, keys.ARROW_RIGHT) == ["3", "3"]
    assert typed(keys.ARROW_LEFT) == ["2", "2"] and typed(keys.END) == ["4", "4"] and typed(keys.ARROW_RIGHT)[0] == "4"
    assert typed(keys.HOME) == ["0", "0"] and typed(keys.ARROW_LEFT)[0] == "0" and typed(keys.ARROW_UP)[0] == "0"
    assert typed(keys.ARROW_RIGHT) == ["1", "1"] and typed(keys.ESCAPE) == ["1"]
    assert typed(keys.TAB) == ["SUMMARY"] and typed(keys.SHIFT + keys.TAB) == ["1", "1"]  # back to where it was
    driver.execute_script("document.querySelectorAll('.tokens span').forEach((e) => { e.style.display = 'block' })")
    assert typed(keys.ARROW_DOWN) == ["2", "2"] and typed(keys.ARROW_UP, keys.ARROW_UP) == ["0", "0"]
    press(driver, "t")
    assert driver.get_log("browser") == []


def test_keyboard_shortcuts(driver: Any, files: tuple[Path, Path]) -> None:
    """Real key presses: pages, theme, search, and the focus in a field, which takes the keys until Escape."""
    keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
    load(driver, files[0].as_uri())

    def typed(*pressed: str) -> None:
        driver.switch_to.active_element.send_keys(*pressed)

    for number, page in enumerate(PAGES, 1):
        typed(str(number))
        until(driver, f"document.querySelector('nav a[aria-current]').hash === '#{page}'")
    theme = driver.execute_script("return document.documentElement.dataset.theme")
    typed("d")
    until(driver, f"document.documentElement.dataset.theme !== '{theme}'")
    typed("6")
    until(driver, "document.querySelector('article')")
    typed("/")
    typed("step 7 group 2")
    until(driver, "document.getElementById('count').textContent.startsWith('4 of')")
    typed(keys.ESCAPE)
    typed("t")
    until(driver, "document.getElementById('tokens').getAttribute('aria-pressed') === 'true'")
    typed("t", keys.TAB)
    assert driver.execute_script("return document.activeElement.tagName") != "BODY"
    setting(driver, "search", "")


def test_curves_over_steps_hours_and_tokens(driver: Any, files: tuple[Path, Path]) -> None:
    load(driver, files[0].as_uri(), "curves")
    for axis, last in (("step", 12), ("time", 12 * 60 / 3600), ("tokens", 12 * 0.0045)):
        driver.execute_script(
            "const e = document.querySelector('[title=\"horizontal axis\"]'); e.value = arguments[0];"
            "e.dispatchEvent(new Event('change'))",
            axis,
        )
        assert driver.execute_script("return axisOf(report.data.runs[0]).at(-1)") == pytest.approx(last)
        until(driver, "document.querySelector('[data-metric] canvas')")
    assert driver.get_log("browser") == []


@pytest.mark.parametrize(
    ("steps", "values"),
    [([1, 2, 3, 4], [0.1, 0.3, 0.2, 0.4]), ([1, 2], [12345678.0, 98765432.0]), ([7], [1.0]), ([1, 9], [1e-7, 3e-7])],
    ids=str,
)
def test_ticks_are_steps_and_labels_have_room(driver: Any, files: tuple[Path, Path], steps: Any, values: Any) -> None:
    load(driver, files[0].as_uri())
    ticks, labels, widths, room = driver.execute_script(
        "view.axis = 'step'; const box = document.querySelector('main').appendChild(element('div', {}));"
        "const plot = draw(box, arguments[0], [{ label: 'a', color: '#000' }]);"
        "return new Promise((done) => setTimeout(() => { const [x, y] = plot.axes; plot.ctx.font = y.font[0];"
        "  const wide = (text) => plot.ctx.measureText(text).width / devicePixelRatio;"
        "  done([x._values, y._values, y._values.map(wide), y._size - y.ticks.size - y.gap]) }, 300))",
        [steps, values],
    )
    shown = [tick for tick in ticks if tick]
    assert shown and all(float(tick).is_integer() for tick in shown)
    assert len(set(labels)) == len(labels) > 1 and max(widths) <= room


def test_a_phone_shows_every_page_without_scrolling_sideways(driver: Any, files: tuple[Path, Path]) -> None:
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        load(driver, files[1].as_uri())
        for page in PAGES:
            driver.execute_script("location.hash = arguments[0]", page)
            until(driver, "document.querySelectorAll('main canvas').length || document.querySelector('main article')")
            width = driver.execute_script("return document.documentElement.scrollWidth")
            assert width <= 390, page
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_long_names_are_broken_on_a_phone(driver: Any, tmp_path: Path) -> None:
    """Names of runs, metrics, tools and tasks without a space."""
    long = "toolrl_grpo_qwen2_5_7b_instruct_lr1e6_bs512_run1" * 2
    runs = [save_report_run(tmp_path / f"{long}{number}", steps=2) for number in (1, 2)]
    for run in runs:
        append_jsonl(run / "metrics.jsonl", {"step": 3, "time": 9e3, f"mine/{long}": 1.0})
        path = run / "transcripts" / "step-000001.jsonl"
        text = path.read_text().replace("weather", long).replace('"task0', f'"{long}')
        rows = [{**json.loads(line), "tools": [long]} for line in text.split("\n")[:-1]]
        write_jsonl(path, rows)
    write_report(runs, tmp_path / "report.html")
    size = {"width": 360, "height": 780, "deviceScaleFactor": 1, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        load(driver, (tmp_path / "report.html").as_uri())
        for page in (*PAGES, "rollouts/0/1/0"):
            driver.execute_script("location.hash = arguments[0]", page)
            until(driver, "document.querySelector('main').childElementCount")
            driver.execute_script("scrollTo(0, document.body.scrollHeight)")
            time.sleep(0.5)  # curves and their legends
            assert driver.execute_script("return document.documentElement.scrollWidth") <= 360, page
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_damaged_files_are_named_and_the_rest_is_shown(driver: Any, tmp_path: Path) -> None:
    run = save_report_run(tmp_path / "run")
    damage(run)
    write_report([run], tmp_path / "report.html")
    load(driver, (tmp_path / "report.html").as_uri())
    assert len(texts(driver, ".notes li")) == 4 and texts(driver, ".verdict")[0].startswith(
        "The run learned. The mean reward rose"
    )
    driver.execute_script("location.hash = 'rollouts'")
    until(driver, "document.querySelector('article .message')")
    assert driver.get_log("browser") == []


def test_rollouts_of_strange_shapes_are_shown(driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every field missing or of another type: what is left in can be filtered, searched and shown."""
    run = save_report_run(tmp_path / "run", steps=2)
    add_wrong_rows(run / "transcripts" / "step-000001.jsonl")
    for step in (0, 2):
        add_wrong_rows(run / "validation" / f"step-{step:06d}.jsonl")
    monkeypatch.setattr("toolrl.analysis.report.rollouts.MAX_ROLLOUTS", 40)
    write_report([run, run], tmp_path / "report.html")
    load(driver, (tmp_path / "report.html").as_uri())
    (shown,) = set(texts(driver, ".left-out"))
    assert re.match(r"Limits of this file: (37|40) of 94 rollouts fit into the file, of 2 of 2 steps spread", shown)
    for page in PAGES:
        driver.execute_script("location.hash = arguments[0]", page)
        until(driver, f"document.querySelector('nav a[aria-current]').hash === '#{page}'")
    driver.execute_script("location.hash = 'rollouts'")
    until(driver, "document.querySelector('article')")
    assert re.match(r"(\d+) of \1 rollouts \(\1 of 94 ", texts(driver, "#count")[0])
    found = driver.execute_script(
        "found.low = '0.5'; found.task = 'task'; filtered(); found.low = found.task = '';"
        "return withText(filtered(), 'question').then((rows) => Promise.all(rows.map(rolloutBox)))"
        ".then((boxes) => boxes.map((box) => box.textContent.length))"
    )
    assert len(found) > 20 and min(found) > 50 and driver.get_log("browser") == []


def test_names_of_metrics_and_settings_are_text_without_controls(driver: Any, tmp_path: Path) -> None:
    """Escape sequences, and marks that turn the direction of the text behind them, are shown as in a terminal."""
    run, name = save_report_run(tmp_path / "run", steps=3), f"{HOSTILE}\u202edlo\x1b[31m\u2066\x07"
    row = {"step": 4, "time": 2000.0, f"{name}/x": 1.0, "__proto__": 2.0, "constructor": 3.0, "": 4.0}
    append_jsonl(run / "metrics.jsonl", row)
    (run / "config.yaml").write_text(json.dumps({"model": {"path": name}, name: {"a": [name]}}))
    write_report([run], tmp_path / "report.html")
    load(driver, (tmp_path / "report.html").as_uri())
    turned = "[...document.querySelector('main').textContent].filter((c) => CONTROLS.test(c)).length"
    for page in PAGES:
        driver.execute_script("location.hash = arguments[0]", page)
        until(driver, "document.querySelectorAll('main canvas').length || document.querySelector('main article')")
        assert driver.execute_script(f"CONTROLS.lastIndex = 0; return {turned}") == 0, page
        assert driver.execute_script("return document.querySelectorAll('main img, main script').length") == 0
        if page == "curves":
            assert f"{HOSTILE}\ufffddlo\ufffd[31m\ufffd\ufffd/x" in texts(driver, "h3")
            assert {"__proto__", "constructor", ""} <= set(texts(driver, "h3"))
    assert driver.title != "taken" and driver.get_log("browser") == []


def test_numbers_stay_in_their_line_and_the_list_in_sight(driver: Any, files: tuple[Path, Path]) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        load(driver, files[1].as_uri(), "compare")
        until(driver, "document.querySelector('article.flipped')")
        rows = "[...document.querySelectorAll('td.number')].map((cell) => cell.offsetHeight)"
        assert max(driver.execute_script(f"return {rows}")) < 60
        wide, tables = "(box) => box.scrollWidth > box.clientWidth", "[...document.querySelectorAll('.scroll')]"
        by_keys = f"{tables}.every((box) => ({wide})(box) === (box.tabIndex === 0))"
        assert driver.execute_script(f"return [{tables}.some({wide}), {by_keys}]") == [True, True]
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    load(driver, files[0].as_uri(), "rollouts/0/3/1/explain")
    until(driver, "document.querySelector('.explained[open]')")
    driver.execute_script("document.querySelector('.explained section:last-of-type').scrollIntoView({ block: 'end' })")
    top, header = driver.execute_script(
        "return ['.list', 'header'].map((name) => document.querySelector(name).getBoundingClientRect())"
    )
    assert header["bottom"] <= top["top"] < 100 and driver.execute_script("return scrollY") > 300


def test_runs_are_compared(driver: Any, files: tuple[Path, Path]) -> None:
    load(driver, files[1].as_uri(), "curves")
    until(driver, "document.querySelector('[data-metric=\"reward/total\"]')")
    driver.execute_script("document.querySelector('[data-metric=\"reward/total\"]').scrollIntoView()")
    until(driver, "document.querySelector('[data-metric=\"reward/total\"] canvas')")
    labels = texts(driver, '[data-metric="reward/total"] .u-label')
    assert labels[-4:] == ["one, raw", "one", "two, raw", "two"]
    driver.execute_script("location.hash = 'overview'")
    until(driver, "document.querySelectorAll('h2 .swatch').length === 2")


def test_flipped_tasks_lie_beside_each_other(driver: Any, files: tuple[Path, Path]) -> None:
    load(driver, files[1].as_uri(), "compare")
    until(driver, "document.querySelectorAll('article.flipped').length === 6")
    cells = texts(driver, "main td")
    assert cells[cells.index("source") :][:3] == ["source", "source of 0.1", "source of 0.2"]
    assert "No difference." in texts(driver, "main p")  # of the data files
    wide = driver.execute_script(
        "const cell = document.querySelector('main td'); cell.textContent = 'x'.repeat(200); return cell.offsetWidth"
    )
    assert 24 * 15 < wide < 24 * 15 + 60  # a digest wraps
    assert "+0.375" in cells and "3 → 6" in cells  # of 8 tasks
    heads = texts(driver, "article.flipped h3")[-2:]
    assert heads == ["one, step 12: reward 0", "two, step 12: reward 1"]
    driver.execute_script("[...document.querySelectorAll('.item')].at(-1).click()")
    until(driver, "[...document.querySelectorAll('article.flipped .quiet')].at(-1).textContent === 'test · test5'")
    assert f"step 12 {HOSTILE}" in texts(driver, "article.flipped pre") and driver.get_log("browser") == []


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, ReportServer]]:
    run = save_report_run(tmp_path / "run")
    with ReportServer([run]) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield run, server
        server.shutdown()
        thread.join()


def test_the_page_follows_a_run_and_keeps_filters(driver: Any, served: tuple[Path, ReportServer]) -> None:
    run, server = served
    load(driver, f"http://127.0.0.1:{server.port}/", "rollouts")
    setting(driver, "filter-step", "5")
    until(driver, "document.getElementById('count').textContent.startsWith('12 of')")
    for _ in range(3):
        press(driver, "j")
    until(driver, "location.hash === '#rollouts/0/5/3'")
    driver.execute_script("document.querySelectorAll('[title=\"show beside\"]')[2].click()")
    until(driver, "document.querySelectorAll('article').length === 2")
    press(driver, "p")
    until(driver, "document.getElementById('pin').getAttribute('aria-pressed') === 'true'")
    driver.execute_script("document.getElementById('search').focus()")
    append_jsonl(run / "metrics.jsonl", {"step": 13, "time": 2000.0, "reward/total": 9.5})
    until(driver, "document.documentElement.dataset.refreshed")
    assert driver.execute_script("return report.data.runs[0].metrics.step.at(-1)") == 13
    until(driver, "document.getElementById('count')?.textContent.startsWith('12 of')")
    assert driver.execute_script("return document.getElementById('filter-step').value") == "5"
    assert driver.execute_script("return [location.hash, document.activeElement.id]") == ["#rollouts/0/5/3", "search"]
    until(driver, "document.querySelectorAll('article').length === 2")
    assert [text[:17] for text in texts(driver, "article h3")] == ["step 5, rollout 3", "step 5, rollout 2"]
    pressed = texts(driver, '[title="show beside"][aria-pressed="true"]')
    assert [text[:2] for text in pressed] == ["#2", "#3"]
    assert driver.execute_script("return document.getElementById('pin').getAttribute('aria-pressed')") == "true"
    assert driver.get_log("browser") == []
    driver.get("about:blank")


def test_a_refresh_moves_nothing_in_the_viewer(driver: Any, served: tuple[Path, ReportServer]) -> None:
    """What is being read and typed stays: scroll positions, open details, the focused token, the caret."""
    keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
    run, server = served
    load(driver, f"http://127.0.0.1:{server.port}/", "rollouts/0/3/0")
    press(driver, "t")
    until(driver, "document.querySelectorAll('.segment').length === 2")

    def step(number: int) -> None:
        append_jsonl(run / "metrics.jsonl", {"step": number, "time": 2000.0, "reward/total": 9.5})
        until(
            driver,
            f"report.data.runs[0].metrics.step.at(-1) === {number} && document.documentElement.dataset.refreshed",
        )

    driver.execute_script(
        "document.querySelector('.explained summary').click(); document.querySelector('.list').scrollTop = 300;"
        "scrollTo(0, 200); document.querySelector('.tokens .trained').focus({ preventScroll: true })"
    )
    place = (
        "return [scrollY, document.querySelector('.list').scrollTop, document.querySelector('.explained').open,"
        "document.activeElement.dataset.place, document.querySelector('.tip')?.textContent]"
    )
    before = driver.execute_script(place)
    assert before[0] > 100 and before[1:4] == [300, True, "2"] and before[4]
    step(13)
    time.sleep(0.5)
    assert driver.execute_script(place) == before
    driver.execute_script("document.getElementById('search').focus()")
    driver.switch_to.active_element.send_keys("st")
    step(14)
    driver.switch_to.active_element.send_keys("ep", keys.ARROW_LEFT)
    step(15)
    driver.switch_to.active_element.send_keys("p")
    assert driver.execute_script("return document.activeElement.value") == "stepp"
    setting(driver, "search", "")
    press(driver, "t")
    until(driver, "document.querySelector('article .message') && !document.querySelector('.tokens')")  # of new rows
    assert texts(driver, "article h3")[0].startswith("step 3, rollout 0")
    driver.execute_script("location.hash = 'curves'")
    until(driver, "document.querySelector('[data-metric]')")
    driver.execute_script("document.getElementById('search').focus()")
    driver.switch_to.active_element.send_keys("re")
    step(16)
    driver.switch_to.active_element.send_keys("ward")
    assert driver.execute_script("return document.activeElement.value") == "reward"
    setting(driver, "search", "")
    assert driver.get_log("browser") == []
    driver.get("about:blank")


def test_a_new_choice_of_a_filter_moves_nothing(driver: Any, served: tuple[Path, ReportServer]) -> None:
    """The step that a refresh brings has the first rollouts with another stop reason, and with a tool out of reach."""
    run, server = served
    load(driver, f"http://127.0.0.1:{server.port}/", "rollouts/0/3/0/explain")
    until(driver, "document.querySelector('.explained[open]')")
    setting(driver, "filter-stop", "stop")
    driver.execute_script(
        "window.kept = [...document.querySelectorAll('.explained, select')];"
        "document.querySelector('.explained').open = false"
    )
    rows = read_jsonl(run / "transcripts" / "step-000012.jsonl")
    rows[0] |= {"stop_reason": "max_turns", "tool_uses": [{"name": "weather", "status": "unavailable", "seconds": 1}]}
    write_jsonl(run / "transcripts" / "step-000013.jsonl", [{**row, "step": 13} for row in rows])
    append_jsonl(run / "metrics.jsonl", {"step": 13, "time": 2000.0, "reward/total": 9.5})
    until(driver, "document.documentElement.dataset.refreshed")
    assert driver.execute_script("return kept.every((each) => each.isConnected)")
    assert driver.execute_script("return document.querySelector('.explained').open") is False
    assert texts(driver, "#filter-stop option") == ["stop reason", "length", "stop", "max_turns"]
    assert texts(driver, "#filter-status option") == ["tool status", "success", "timeout", "unavailable"]
    assert driver.execute_script("return document.getElementById('filter-stop').value") == "stop"
    setting(driver, "filter-stop", "max_turns")
    until(driver, "document.getElementById('count').textContent.startsWith('1 of')")
    assert driver.get_log("browser") == []
    driver.get("about:blank")


def test_an_address_changes_run_and_view(driver: Any, files: tuple[Path, Path]) -> None:
    load(driver, files[1].as_uri(), "rollouts/0/1/0")
    until(driver, "document.querySelector('article .message')")
    for address, opened in (
        ("1/2/5", "step 2, rollout 1"),
        ("0/3/1/explain", "step 3, rollout 1"),
        ("0/3/1", "step 3,"),
    ):
        driver.execute_script("location.hash = arguments[0]", f"rollouts/{address}")
        until(driver, f"document.querySelector('article h3')?.textContent.startsWith('{opened}')")
        until(driver, f"!document.querySelector('.explained') === {'false' if 'explain' in address else 'true'}")
        assert driver.execute_script("return [location.hash, found.run]") == [f"#rollouts/{address}", int(address[0])]
        assert driver.execute_script("return document.querySelector('[title=run]').value") == address[0]
    assert driver.get_log("browser") == []


def test_an_address_of_nothing_opens_a_page(driver: Any, files: tuple[Path, Path]) -> None:
    for address in ("%", "rollouts/-1/1/1", "rollouts/1.5/x/", "rollouts/0/99/99/explain", "nothing"):
        load(driver, files[0].as_uri(), address)
        until(driver, "document.querySelector('main canvas') || document.querySelector('article')")
    assert driver.get_log("browser") == []


def test_curves_and_fields_have_names(driver: Any, files: tuple[Path, Path]) -> None:
    """For those who do not see them."""
    load(driver, files[0].as_uri())
    until(driver, "document.querySelector('canvas')")
    label = "document.querySelector('[data-metric=\"reward/total\"] canvas').getAttribute('aria-label')"
    assert driver.execute_script(f"return {label}").startswith("reward/total: raw from 0.14 to ")
    for page in ("curves", "rollouts"):
        driver.execute_script("location.hash = arguments[0]", page)
        until(driver, "document.querySelector('.bar input')")
        unnamed = "filter((e) => !e.labels.length && !e.ariaLabel).length"
        assert driver.execute_script(f"return [...document.querySelectorAll('input, select')].{unnamed}") == 0


def test_outcomes_of_tool_calls_are_stacked(driver: Any, tmp_path: Path) -> None:
    run = save_report_run(tmp_path / "run", steps=2)
    for step in (3, 4):
        append_jsonl(run / "metrics.jsonl", {"step": step, "time": 9e3, "tools/success": 0.75, "tools/timeout": 0.25})
    write_report([run], tmp_path / "report.html")
    load(driver, (tmp_path / "report.html").as_uri(), "distributions")
    until(driver, "document.querySelector('[data-outcomes] canvas')")
    assert texts(driver, "[data-outcomes] p")[0].split() == ["tools/success", "tools/timeout"]
    heads = texts(driver, "[data-metric] h3")
    assert heads.index("reward/total") < heads.index("tools/success") and driver.get_log("browser") == []


def test_a_step_before_the_stream_is_open_is_shown(driver: Any, served: tuple[Path, ReportServer]) -> None:
    """The page's script waits until the step has ended, then opens the stream."""
    run, server = served
    driver.get("about:blank")
    identifier = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": LATE_STREAM})["identifier"]
    load(driver, f"http://127.0.0.1:{server.port}/")
    driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", {"identifier": identifier})
    append_jsonl(run / "metrics.jsonl", {"step": 13, "time": 2000.0, "reward/total": 9.5})
    driver.execute_script("late()")
    until(driver, "report.data.runs[0].metrics.step.at(-1) === 13")
    driver.get("about:blank")
