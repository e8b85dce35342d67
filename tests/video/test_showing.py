from __future__ import annotations

import io

import av
import numpy as np
import pytest

from streamvid.video.encode.showing import contact_sheet, movie


@pytest.mark.parametrize(("count", "frames", "height", "width"), [(1, 1, 16, 24), (2, 5, 33, 47), (3, 20, 48, 32)])
def test_a_sheet_has_one_row_per_video_and_a_movie_shows_all_side_by_side(
    count: int, frames: int, height: int, width: int
) -> None:
    levels = np.arange(count * frames, dtype=np.uint8).reshape(count, frames, 1, 1, 1) * 3
    videos = np.broadcast_to(levels, (count, frames, height, width, 3)).copy()
    with av.open(io.BytesIO(contact_sheet(videos))) as sheet:
        picture = next(sheet.decode(video=0)).to_ndarray(format="rgb24")
    columns = min(8, frames)
    assert picture.shape == (count * height, columns * width, 3)
    assert picture[0, 0, 0] == levels[0, 0] and picture[-1, -1, 0] == levels[-1, -1]
    with av.open(io.BytesIO(movie(videos, 12.5))) as played:
        assert played.streams.video[0].average_rate == 12.5 or frames == 1
        shown = [frame.to_ndarray(format="rgb24") for frame in played.decode(video=0)]
    assert len(shown) == frames
    even = (height + height % 2, count * width + count * width % 2)
    assert shown[0].shape == (*even, 3)
    for number in (0, frames - 1):
        assert abs(int(shown[number][height // 2, width // 2, 0]) - int(levels[0, number, 0, 0, 0])) <= 4
