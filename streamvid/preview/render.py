"""Renders pages from templates, in which every value is escaped, and formats numbers for display."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from streamvid.errors import ConfigError

_FOLDER = Path(__file__).parent
STATIC = {
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "bad.svg": "image/svg+xml",
}
"""Names of the static files, and their types."""


def static_file(name: str) -> bytes:
    """Return the contents of a static file.

    name: file name; a key of STATIC.
    """
    return (_FOLDER / "static" / name).read_bytes()


def render(template: str, **values: Any) -> str:
    """Render a template. All values except `Markup` values are escaped."""
    return str(_environment().get_template(template).render(**values))


@cache
def _environment() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise ConfigError(
            "web pages require the jinja2 package; install it with: pip install 'streamvid[preview]'"
        ) from error

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"num": number, "size": size, "seconds": seconds, "path": path, "query": query}
    return environment


def number(value: object, digits: int = 4) -> str:
    """Format a whole number with thousands separators, or any other number with `digits` significant digits."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "–" if value is None else str(value)
    if not math.isfinite(value):
        return "–"
    is_long = float(value).is_integer() or abs(value) >= 10 ** (digits - 1)
    return f"{value:,.0f}" if is_long else f"{value:,.{digits}g}"


def size(num_bytes: float) -> str:
    """Format a number of bytes in decimal units, for example as 12.3 MB."""
    value = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.1f} {unit}"
        value /= 1000
    raise AssertionError


def seconds(value: float) -> str:
    """Format a duration."""
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:,.1f} h"


def path(*parts: object) -> str:
    """Return a URL path with every part escaped."""
    return "/" + "/".join(quote(str(part), safe="") for part in parts)


def query(values: Mapping[str, object]) -> str:
    """Return a URL query string. Values that are None, empty or False are omitted."""
    kept = {name: 1 if value is True else value for name, value in values.items() if value not in (None, "", False)}
    return "?" + urlencode(kept) if kept else ""
