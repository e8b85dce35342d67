"""Audio as a conditioning input: the samples of a file beside the clip that belong to its frames (SAMPLE-2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from streamvid.buckets.bucket import parse_buckets
from streamvid.sharder.sharder import shard
from tests.files import write_rows
from tests.loader.conftest import open_loader
from tests.loader.sounds import FPS, HEIGHT, RATE, WIDTH, Sound, folder_of, numbers_of, times_of
from tests.loader.speech import samples_of, write_wav
from tests.shard_options import shard_options
from tests.video.clips import run_ffmpeg

COUNT, NUM_FRAMES = 9, 72
SECONDS = NUM_FRAMES / FPS
OUTPUT = {"audio": {"sample_rate": RATE, "num_channels": 2}}
CLIPS = [Sound(f"clip-{number}.{ending}", None) for number, ending in enumerate(("mp4", "mkv", "mov", "avi"))]
#: File of each clip → its length relative to the clip, and ffmpeg's options.
SPEECH: dict[str, tuple[float, tuple[str, ...]]] = {
    "long.wav": (1.5, ()),
    "short.flac": (0.5, ("-c:a", "flac")),
    "speech.mka": (1.0, ("-c:a", "flac")),
    "": (0.0, ()),
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = folder_of(tmp_path_factory.mktemp("clips"), CLIPS)
    rows: list[dict[str, Any]] = []
    for number, (clip, (name, (share, options))) in enumerate(zip(CLIPS, SPEECH.items(), strict=True)):
        if name:
            write_wav(folder / "made.wav", samples_of(number, share * SECONDS))
            run_ffmpeg("-y", "-i", folder / "made.wav", *options, folder / name)
        rows.append({"path": clip.name, "speech": name or None})
    (folder / "made.wav").unlink()
    return write_rows(folder / "rows.jsonl", rows)


@pytest.fixture(scope="module")
def dataset_of(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("sealed")
    options = {"copy": {}, "native": {"clips": "native", "audio_codec": "flac", "max_clip_seconds": 1}}

    @cache
    def of(kind: str) -> Path:
        given = {"buckets": parse_buckets(f"{WIDTH}x{HEIGHT}@{COUNT}"), "workers": 1, "caption_column": ""}
        given |= {"media": {"audio:speech?": "speech"}, **options[kind]}
        report = shard(table, root / kind, shard_options(**given))
        assert report.num_samples == len(CLIPS) * (3 if kind == "native" else 1) and not report.rejections
        return root / kind

    return of


def window_of(times: Sequence[Fraction], number: int, first_frame: int, num_samples: int) -> NDArray[np.float32]:
    """The samples of clip `number`'s file that belong to its frames from `first_frame` on. times: of its frames."""
    share = list(SPEECH.values())[number][0]
    whole = np.zeros((2, round(2 * SECONDS * RATE)), np.float32)
    if share:
        samples = samples_of(number, share * SECONDS)
        whole[:, : samples.shape[1]] = samples / 32768
    first = round((times[first_frame] - times[0]) * RATE)
    return whole[:, first : first + num_samples]


@pytest.mark.parametrize(("kind", "num_workers"), [("copy", 0), ("copy", 2), ("native", 0)])
def test_each_window_has_the_audio_of_its_frames(
    table: Path, dataset_of: Callable[[str], Path], kind: str, num_workers: int
) -> None:
    """Bit for bit, in any container of the clip and of the audio; silence after its end, and for clips without any."""
    times, seen = [times_of(table.parent / clip.name) for clip in CLIPS], set()
    with open_loader(
        dataset_of(kind),
        batch_size=2,
        num_epochs=6,
        num_workers=num_workers,
        columns=["source"],
        media=["speech"],
        output=OUTPUT,
        tail="pad",
    ) as loader:
        for batch in loader:
            speech, present = batch.media["speech"], batch.media_present["speech"]
            assert speech.shape == (2, 2, COUNT * RATE // FPS) and speech.dtype == torch.float32
            assert not batch.audio.any() and not batch.audio_present.any()
            for index, source in enumerate(batch["source"]):
                number, first = int(source[5]), numbers_of(batch.video[index].numpy())[0]
                wanted = window_of(times[number], number, first, speech.shape[2])
                assert np.array_equal(speech[index].numpy(), wanted), (source, first)
                assert bool(present[index]) is (number != 3)
                seen.add((number, first))
    assert {number for number, _ in seen} == {0, 1, 2, 3} and len(seen) > 12
