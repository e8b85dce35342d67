from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamvid.trainer.metrics import METRICS_FILE, append_metrics, drop_metrics_after


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / METRICS_FILE).read_text().splitlines()]


def test_later_lines_and_a_torn_one_go(tmp_path: Path) -> None:
    for step in range(6):
        append_metrics(tmp_path, {"step": step, "loss": 0.5})
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 3, "lo')
    drop_metrics_after(tmp_path, 3)
    assert steps_in(tmp_path) == [0, 1, 2, 3]
    append_metrics(tmp_path, {"step": 4})
    assert steps_in(tmp_path) == [0, 1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]


def test_without_a_file_there_is_nothing_to_drop(tmp_path: Path) -> None:
    drop_metrics_after(tmp_path, 3)
    assert not list(tmp_path.iterdir())


def test_a_line_is_json_or_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        append_metrics(tmp_path, {"step": 1, "loss": float("nan")})
    assert not (tmp_path / METRICS_FILE).exists()
