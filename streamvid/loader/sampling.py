"""The random choices made for one delivery of a sample (SAMPLE-1): functions of (seed, key, visit) and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamvid.loader.mix import MixPart
from streamvid.plan.hashing import hash_below, hash_text, uniform

# Each kind of choice has a number of its own, so that adding one moves no other.
_TEMPORAL_CROP = 1
_CAPTION_DROPOUT = 2
_SUBSTITUTE = 3


def window_start(num_frames: int, wanted: int, *, seed: int, key: str, visit: int) -> int:
    """First frame of a window of `wanted` consecutive frames in a clip of `num_frames`, uniform over all that fit."""
    return hash_below(num_frames - wanted + 1, seed, _TEMPORAL_CROP, hash_text(key), visit)


def caption(part: MixPart, row: Mapping[str, Any], visit: int) -> str:
    """What a delivery has as its text: the prefix and the caption, or with the part's dropout the empty string.

    row: an index row with "key" and the part's caption column; a caption that is missing is empty.
    """
    if part.caption_dropout > 0.0:
        draw = uniform(part.seed, _CAPTION_DROPOUT, hash_text(row["key"]), visit)
        if draw < part.caption_dropout:
            return ""
    text = row[part.caption_column]
    return part.caption_prefix + ("" if text is None else str(text))


def substitute_visit(key: str, visit: int) -> int:
    """The visit of what takes a bad sample's place (BAD-1): its own, whichever sample it is and however often.

    Negative and below -2**62, where no pass and no repeat of tail="pad" has its visits (plan/step.py).
    """
    return -((1 << 63) - 1 - hash_below(1 << 61, _SUBSTITUTE, hash_text(key), visit))
