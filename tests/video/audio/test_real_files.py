"""SAMPLE-2: tests that audio of real files is delivered where the ffmpeg program puts it relative to the same frame.

The files are test data of Debian's source packages: tests/data/real_audio.csv names package, version and file.
STREAMVID_REAL_MEDIA is a folder with the unpacked source packages (apt-get source --download-only firefox-esr).
"""

from __future__ import annotations

import csv
import hashlib
import os
from pathlib import Path

import pytest

from tools.compare_audio import compare_file

_TABLE = Path(__file__).resolve().parents[2] / "data" / "real_audio.csv"
_ROWS = list(csv.DictReader(_TABLE.read_text().splitlines()))


@pytest.mark.slow
@pytest.mark.parametrize("row", _ROWS, ids=[row["file"] for row in _ROWS])
def test_windows_of_a_real_file_equal_the_ffmpeg_programs(row: dict[str, str]) -> None:
    folder = os.environ.get("STREAMVID_REAL_MEDIA")
    if not folder:
        pytest.skip("STREAMVID_REAL_MEDIA is not set to a folder with unpacked source packages")
    path = next(Path(folder).glob(f"*/{row['file']}"), None)
    if path is None:
        pytest.skip(f"{folder} does not contain the source of {row['package']} {row['version']}")
    if not hashlib.sha256(path.read_bytes()).hexdigest().startswith(row["sha256"]):
        pytest.skip(f"{path} is not the file of {row['package']} {row['version']}")
    result = compare_file(path, num_windows=5, tolerance=0.001)
    assert result is not None and result.num_frames
    assert not result.problems, "\n".join(result.problems)
