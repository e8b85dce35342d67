"""Tests of the packet tables of unusual streams."""

from __future__ import annotations

from itertools import pairwise

import pytest

from streamvid.video.container import open_video
from streamvid.video.limits import LIMITS
from streamvid.video.packets import read_packets
from tests.video.clips import ClipFolder


@pytest.mark.parametrize("name", ["vp8_hidden.webm", "edit_list.mp4"])
def test_packets_that_show_nothing_are_not_frames(clip: ClipFolder, name: str) -> None:
    """SAMPLE-2: hidden references and frames cut off by an edit list are decoded but not counted."""
    with open_video(clip(name), LIMITS) as video:
        table = read_packets(video)
    assert len(table.rows) > len(table.timestamps) == len(table.ordinals)


def test_decoding_starts_at_a_key_frame_before_all_wanted_frames(clip: ClipFolder) -> None:
    with open_video(clip("hevc_open_gop.mp4"), LIMITS) as video:
        table = read_packets(video)
    assert table.reorder_depth > 0
    assert all(a < b for a, b in pairwise(table.timestamps))
    for first in range(len(table.timestamps)):
        for last in (first, len(table.timestamps) - 1):
            starts = table.decode_starts(first, last)
            assert 1 <= len(starts) <= 2
            for time, ordinal in starts:
                assert time <= table.timestamps[first]
                assert ordinal <= min(table.ordinals[first : last + 1])
            assert starts == sorted(starts, reverse=True)
