"""Pictures of a report for docs/assets/report, drawn by chromium.

    bash train_grpo.sh
    toolrl report outputs/composed_grpo
    python scripts/report_pictures.py outputs/composed_grpo/report.html docs/assets/report [--dark] [--phone] [PAGE ..]

Needs the packages selenium and pillow, and Debian's chromium and chromium-driver.
"""

from __future__ import annotations

import argparse
import shutil
import time
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

_LAST = "found.step = String(Math.max(...meta().step)); found.kept = true;"
_CHOOSE = "[...document.querySelectorAll('.item')].find((item) => !item.textContent.includes('· 4 ·'))?.click()"
_SHADE = "const e = document.querySelector('.shade'); e.value = 'entropy'; e.dispatchEvent(new Event('change'))"
_TIP = (
    "document.querySelector('.tokens').scrollIntoView({ block: 'center' });"
    "document.querySelectorAll('.tokens .trained')[2].dispatchEvent(new MouseEvent('mouseover', { bubbles: true }))"
)
_EXPLAIN = "document.querySelectorAll('.explained h4')[1].scrollIntoView(); scrollBy(0, -60)"  # below the header
_TEXTS, _TOKENS, _EXPLAINED = (
    f"{_LAST} Object.assign(found, {{ tokens: {tokens}, explain: {explain} }})"
    for tokens, explain in (("false", "false"), ("true", "false"), ("false", "true"))
)
# picture: page, script before it is opened, scripts after
_PICTURES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "overview": ("overview", "", ()),
    "curves": ("curves", "", ()),
    "validation": ("validation", "", ()),
    "times": ("times", "", ()),
    "distributions": ("distributions", "", ()),
    "rollouts": ("rollouts", _TEXTS, (_CHOOSE,)),
    "tokens": (
        "rollouts",
        _TOKENS,
        (_CHOOSE, _SHADE, _TIP),
    ),
    "reasons": ("rollouts", _EXPLAINED, (_CHOOSE, _EXPLAIN)),
    "compare": ("compare", "", ()),
}


def browser(phone: bool) -> Any:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    width, height = (390, 844) if phone else (1180, 860)
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    return driver


def _run(driver: Any, script: str) -> None:
    """Run a script, again until it finds its elements: a busy machine shows them late."""
    from selenium.common.exceptions import JavascriptException

    for _ in range(50):
        try:
            driver.execute_script(script)
            return
        except JavascriptException:
            time.sleep(0.2)
    driver.execute_script(script)


def draw(driver: Any, name: str, theme: str, path: Path) -> None:
    page, before, after = _PICTURES[name]
    driver.execute_script(f"setTheme('{theme}'); report.shown = null; location.hash = ''")
    time.sleep(0.5)
    driver.execute_script(before)
    for script in (f"location.hash = '{page}'", *after):
        _run(driver, script)
        time.sleep(1.0)  # curves are drawn and chunks are read
    image = Image.open(BytesIO(driver.get_screenshot_as_png()))
    colors = image.convert("RGB").quantize(
        256, method=Image.Quantize.MAXCOVERAGE
    )  # rare ones stay: signs are green or red
    colors.save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"default: all of {', '.join(_PICTURES)}")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--phone", action="store_true", help="390 pixels wide")
    options = parser.parse_intermixed_args()
    driver = browser(options.phone)
    try:
        driver.get(options.report.resolve().as_uri())
        while not driver.execute_script("return document.documentElement.dataset.ready"):
            time.sleep(0.05)
        for name in options.pages or _PICTURES:
            draw(driver, name, "dark" if options.dark else "light", options.folder / f"{name}.png")
    finally:
        driver.quit()


if __name__ == "__main__":
    main()
