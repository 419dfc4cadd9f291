"""One HTML file around a page's data: the data as JSON, the drawing beside it, no request to anywhere.

The files in assets/ are put in as they are; a policy in the page (Content Security Policy, level 3) allows
these by their hashes and nothing else, so that no text of a run can become code.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from orchestra.run.files import Record, finite_or_null

_ASSETS = Path(__file__).parent / "assets"
_STYLE = "page.css"
# In the order in which they are read: each uses those before it.
_SCRIPTS = ("dom.js", "plots.js", "tables.js", "run.js", "sweep.js", "plan.js", "page.js")
_ICON = "data:,"


def html_page(title: str, data: Record, refresh_s: int | None = None) -> str:
    """Return the page. `data` is shown by assets/page.js; `refresh_s`: the page is loaded anew so often."""
    style = _text(_STYLE)
    script = "\n".join(_text(name) for name in _SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    # A text with </script> in it would end the block.
    block = json.dumps(finite_or_null(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    refresh = "" if refresh_s is None else f'<meta http-equiv="refresh" content="{refresh_s}">\n'
    said = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in _sentences(data))
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n{refresh}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<link rel="icon" href="{_ICON}">\n'
        f"<title>{html.escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<main id="page"><noscript><h1>{html.escape(title)}</h1>{said}'
        "<p>The plots are drawn by a script in this file, which is switched off.</p></noscript></main>\n"
        f'<script type="application/json" id="data">{block}</script>\n<script>{script}</script>\n'
        "</body>\n</html>\n"
    )
    # A file's name that is no UTF-8 leaves characters that no file holds.
    return page.encode(errors="replace").decode()


def _sentences(data: Record) -> Sequence[str]:
    parts = [*data.get("runs", ()), *filter(None, (data.get("sweep"),))]
    return [f"{part['name']}: {part['verdict']['sentence']}" for part in parts]


@cache
def _text(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
