"""URL parameters: the samples, the visit, and the loader settings that a page shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from streamvid.errors import ConfigError
from streamvid.loader.view.text import TextOptions
from streamvid.loader.view.view import Spatial, Temporal, ViewOptions
from streamvid.plan.options import Shuffle, Sync
from streamvid.plan.tail import Tail
from streamvid.preview.browse import RowQuery
from streamvid.preview.deliver import ViewSettings
from streamvid.preview.steps import StepQuery

MAX_TEXT = 2000
"""Maximum number of characters in a value."""

MAX_RANKS, MAX_BATCH, MAX_GLOBAL_BATCH = 1 << 16, 1 << 12, 1 << 20
MAX_VISIT = _MAX = (1 << 62) - 1

Values = Mapping[str, str]


def whole(values: Values, name: str, default: int, least: int, most: int) -> int:
    """Parse an integer URL parameter. Raises ConfigError for anything but an integer from `least` to `most`."""
    text = values.get(name, "").strip()
    if not text:
        return default
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdecimal() or len(digits) > 19 or not least <= int(text) <= most:
        raise ConfigError(f"{name}={text[:40]!r}: must be an integer from {least} to {most}")
    return int(text)


def _text(values: Values, name: str) -> str | None:
    text = values.get(name, "")
    if len(text) > MAX_TEXT:
        raise ConfigError(f"{name} has {len(text)} characters; at most {MAX_TEXT} are allowed")
    return text if text.strip() else None


def _share(values: Values, name: str) -> float:
    text = values[name]
    try:
        return float(text[:40])
    except ValueError:
        raise ConfigError(f"{name}={text[:40]!r}: must be a number greater than 0 and at most 1") from None


def _choice(values: Values, name: str, allowed: Any, default: str) -> Any:
    value = values.get(name) or default
    if value not in get_args(allowed):
        raise ConfigError(f"{name}={value[:40]!r}: must be one of {', '.join(get_args(allowed))}")
    return value


def row_query(values: Values) -> RowQuery:
    """Return the selection of samples that a URL specifies."""
    return RowQuery(
        bucket=_text(values, "bucket"),
        split=_text(values, "split"),
        where=_text(values, "where"),
        sort=_text(values, "sort"),
        descending=bool(values.get("desc")),
    )


@dataclass(frozen=True)
class ViewQuery:
    """Visit to a sample, and the loader settings for this visit."""

    visit: int
    settings: ViewSettings

    def to_query(self, **changes: object) -> dict[str, object]:
        """Return the URL parameters for this visit and these settings, omitting default values."""
        view, text = self.settings.view, self.settings.text
        scale = view.spatial_scale or (None, None)
        found: dict[str, object] = {
            "visit": self.visit or None,
            "seed": self.settings.seed or None,
            "temporal": None if view.temporal == "random" else view.temporal,
            "spatial": None if view.spatial == "resize_crop" else view.spatial,
            "interval": None if view.max_interval == 1 else view.max_interval,
            "scale_from": scale[0],
            "scale_to": scale[1],
            "caption": None if text.column == "text" else text.column,
            "choice": None if text.choice == "draw" else text.choice,
            "template": text.template,
        }
        return found | changes


def view_query(values: Values) -> ViewQuery:
    """Return the visit and settings that a URL specifies. Raises ConfigError for values that a loader would reject."""
    spatial = _choice(values, "spatial", Spatial, "resize_crop")
    scale = None
    if spatial == "rand_size_crop":
        scale = (_share({"scale_from": "0.5", **values}, "scale_from"), _share({"scale_to": "1", **values}, "scale_to"))
    temporal = _choice(values, "temporal", Temporal, "random")
    view = ViewOptions(temporal, whole(values, "interval", 1, 1, 1 << 16), spatial, scale)
    text = TextOptions(
        column=_text(values, "caption") or "text",
        choice="first" if values.get("choice") == "first" else "draw",
        template=_text(values, "template"),
    )
    visit = whole(values, "visit", 0, -_MAX, _MAX)
    return ViewQuery(visit, ViewSettings(whole(values, "seed", 0, 0, _MAX), view, text))


def step_query(values: Values) -> StepQuery:
    """Return the step that a URL specifies."""
    default = "carry" if values.get("split", "train") in ("", "train") else "uneven"
    query = StepQuery(
        epoch=whole(values, "epoch", 0, 0, 1 << 20),
        step=whole(values, "step", 0, 0, _MAX),
        num_ranks=whole(values, "ranks", 1, 1, MAX_RANKS),
        batch_size=whole(values, "batch", 1, 1, MAX_BATCH),
        seed=whole(values, "seed", 0, 0, _MAX),
        shuffle=_choice(values, "shuffle", Shuffle, "window"),
        tail=_choice(values, "tail", Tail, default),
        sync=_choice(values, "sync", Sync, "bucket"),
        split=_text(values, "split") or "train",
        where=_text(values, "where"),
        accumulate=whole(values, "accumulate", 1, 1, 1 << 10),
        repeats=tuple(one.strip() or "1" for one in text.split(",")) if (text := _text(values, "repeats")) else (),
    )
    if query.num_ranks * query.batch_size > MAX_GLOBAL_BATCH:
        raise ConfigError(
            f"ranks={query.num_ranks} with batch={query.batch_size}: a step has "
            f"{query.num_ranks * query.batch_size} samples; at most {MAX_GLOBAL_BATCH} can be shown"
        )
    return replace(query, first_rank=whole(values, "rank", 0, 0, MAX_RANKS))
