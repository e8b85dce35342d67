"""Captions of a sample: parsing of user input, and the format of the `captions` column in the samples index."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from streamvid.errors import Rejected

MAX_CAPTIONS = 256
"""Maximum number of captions per sample."""
MAX_CAPTIONS_BYTES = 256 * 2**10
"""Maximum total size of a sample's stored captions, in bytes."""

Captions: TypeAlias = tuple[tuple[str, float], ...]
"""(text, weight) pairs in the user's order. Weights are at least 0, and at least one of them is positive."""

_TEXTS = ("text", "caption")

CAPTION_COLUMNS = ("caption", "text", "prompt", "captions", "description", "sentence", "cap")
"""Names of caption columns to look for, in this order, if the user specifies no column."""


def parse_captions(value: object, weights: object = None) -> Captions:
    """Parse a user's captions: a string, a `{"text": ..., "weight": ...}` object, or a list of these.

    weights: one number per caption; None uses the weights in `value`, which are 1 by default.

    Captions without text are omitted. Raises Rejected for invalid captions or weights.
    """
    if isinstance(value, str) and weights is None:  # most rows
        return ((value, 1.0),) if value else ()
    items = value if isinstance(value, list | tuple) else [value]
    if len(items) > MAX_CAPTIONS:
        raise Rejected(f"the sample has {len(items)} captions; at most {MAX_CAPTIONS} are allowed")
    if weights is not None and (not isinstance(weights, list | tuple) or len(weights) != len(items)):
        said = f"{len(weights)} weight(s)" if isinstance(weights, list | tuple) else f"the weights {weights!r}"
        raise Rejected(
            f"the sample has {len(items)} captions and {said}; set the weights to a list with one number per caption"
        )
    pairs = [_pair(item) for item in items]
    if weights is not None:
        if any(weight is not None for _, weight in pairs):
            raise Rejected(
                "the sample has weights both in its captions and in the weight column; remove the weights from one of "
                "them"
            )
        pairs = [(text, weight) for (text, _), weight in zip(pairs, weights, strict=True)]
    is_list = isinstance(value, list | tuple)
    found = tuple((text, _weight(weight)) for text, weight in pairs if text and (text.strip() or not is_list))
    if found and not any(weight for _, weight in found):
        raise Rejected("all captions have weight 0; set at least one weight to a number above 0")
    return found


def _pair(item: object) -> tuple[str | None, object]:
    if item is None or (isinstance(item, float) and item != item):  # noqa: PLR0124 — NaN means no caption
        return None, None
    if isinstance(item, str):
        return item, None
    if isinstance(item, Mapping):
        names = [name for name in _TEXTS if name in item]
        unknown = [str(name) for name in item if name not in (*_TEXTS, "weight")]
        if len(names) == 1 and not unknown:
            return _pair(item[names[0]])[0], item.get("weight")
        raise Rejected(
            f"invalid caption fields ({', '.join(sorted(map(str, item)))[:200] or 'none'}); a caption must have "
            f"either {' or '.join(_TEXTS)}, and may have a weight"
        )
    raise Rejected(f'a caption has type {type(item).__name__}; it must be text or {{"text": ..., "weight": ...}}')


def _weight(weight: object) -> float:
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1e12:
        raise Rejected(f"a caption has weight {weight!r}; weights must be numbers from 0 to 1e12")
    return float(weight)


def captions_to_json(captions: Iterable[tuple[str, float]]) -> str:
    """Return the JSON text that the `captions` column stores: `[["text", 1.0], ...]`."""
    return json.dumps([[text, float(weight)] for text, weight in captions], ensure_ascii=False, separators=(",", ":"))


def captions_from_json(stored: str) -> Captions:
    """Parse the output of `captions_to_json`. Raises ValueError for any other text."""
    value: Any = json.loads(stored)
    if not isinstance(value, list) or not value:
        raise ValueError("the value is not a list of captions")
    for pair in value:
        if not isinstance(pair, Sequence) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ValueError("a caption is not a [text, weight] pair")
        if isinstance(pair[1], bool) or not isinstance(pair[1], int | float) or not 0 <= pair[1] < math.inf:
            raise ValueError(f"a caption has the invalid weight {pair[1]!r}")
    captions = tuple((text, float(weight)) for text, weight in value)
    if not sum(weight for _, weight in captions) > 0:
        raise ValueError("no caption has a weight above 0")
    return captions


def listed_captions(value: object) -> object:
    """Decode captions that are stored as a JSON list in text form, as in CSV files. Return other values unchanged.

    [text, weight] pairs in a list become {"text": ..., "weight": ...} objects.
    """
    found: Any = value
    if isinstance(value, str):
        if not value.lstrip().startswith("["):
            return value
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
    if not isinstance(found, list):
        return value
    if found and all(isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) for item in found):
        return [{"text": text, "weight": weight} for text, weight in found]
    # "[1]" may be a caption, but it is not a list of captions.
    return found if all(isinstance(item, str | dict | None) for item in found) else value
