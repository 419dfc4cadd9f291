"""What tests ask of a page of `orchestra report` in a browser: drawn whole, silent, readable for all.

Accessibility is judged by axe-core, as the package axe-core-python brings it, beside checks of our own that
say more of plots (page_checks.js).
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from tests.support.browser import Browser

# The sections of a run's page without experts.
SECTIONS = (
    *("loss", "gradients", "speed", "goodput", "attempts", "ranks", "memory", "checkpoints", "profile"),
    *("energy", "configuration"),
)
_CHECKS = Path(__file__).with_name("page_checks.js").read_text().strip()
# What axe calls worse than moderate.
_SERIOUS = ("serious", "critical")


def assert_sound(browser: Browser, page: Path) -> None:
    """Open a page at both widths in light and dark: drawn whole, silent, on its own, readable."""
    for width in (390, 1280):
        for is_dark in (True, False):
            browser.open(page, width=width, is_dark=is_dark)
            where = f"{page.name} at {width}, {'dark' if is_dark else 'light'}"
            assert browser.value("document.documentElement.dataset.drawn") == "true", where
            assert browser.complaints == [], where
            assert browser.requests == [page.absolute().as_uri()], where
            for check in ("empty", "nameless", "pale"):
                assert browser.value(f"{_CHECKS}.{check}()") == [], f"{check}: {where}"
            assert browser.value("document.documentElement.scrollWidth") <= width, where
            ids = browser.value("[...document.querySelectorAll('[id]')].map(each => each.id)")
            assert len(ids) == len(set(ids)), where
    # Once: it takes seconds. Contrast is looked at above, in both themes.
    assert serious(browser) == [], f"axe: {page.name}"


def texts(browser: Browser, selector: str) -> list[str]:
    """Return the text of each element that a selector finds."""
    found: list[str] = browser.value(
        f"[...document.querySelectorAll({json.dumps(selector)})].map(each => each.textContent)"
    )
    return found


def focus(browser: Browser, selector: str) -> None:
    """Give an element the keyboard."""
    browser.value(f"document.querySelector({json.dumps(selector)}).focus()")


def data_of(page: Path) -> Any:
    """Return what a page is drawn from."""
    found = re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def assert_prints(browser: Browser, page: Path) -> None:
    """Show a page as it is printed, for a reader whose screen is dark: light, within the paper's width, and
    with its configuration.
    """
    browser.open(page, width=680, is_dark=True)
    browser.ask("Emulation.setEmulatedMedia", media="print")
    browser.value("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.value("document.documentElement.scrollWidth") <= 680
    assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    is_within = "(each) => each.getBoundingClientRect().right <= 681"
    assert browser.value(f"[...document.querySelectorAll('table')].every({is_within})")
    assert any("train.seed" in text for text in texts(browser, "#configuration tbody tr"))
    browser.value("window.dispatchEvent(new Event('afterprint'))")
    assert not browser.value("document.querySelector('#configuration details').open")
    browser.ask("Emulation.setEmulatedMedia", media="")


@cache
def _axe() -> str:
    return resources.files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")


def serious(browser: Browser) -> list[str]:
    """Return what axe finds serious, each with the first element that it names."""
    browser.value(f"{_axe()};0")
    found: list[dict[str, Any]] = browser.value(
        "axe.run({resultTypes: ['violations']}).then(found => found.violations.map(({id, impact, nodes}) => "
        "({id, impact, html: nodes[0].html.slice(0, 300), count: nodes.length})))"
    )
    return [f"{each['id']} ({each['count']}): {each['html']}" for each in found if each["impact"] in _SERIOUS]
