from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from streamvid.loader.batch.batch import Batch
from streamvid.loader.stats import BatchStats, LoaderStats, StatsMeter
from streamvid.trainer.data import BatchClock
from streamvid.trainer.metrics import METRICS_FILE, append_metrics, drop_metrics_after
from tests.trainer.runs import metrics_in
from tests.trainer.stand_in import StandInLoader, read_clip_frames


def steps_in(folder: Path) -> list[int]:
    return [line["step"] for line in metrics_in(folder)]


def test_later_lines_and_an_incomplete_one_are_dropped(tmp_path: Path) -> None:
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


def test_a_number_that_json_cannot_represent_is_null(tmp_path: Path) -> None:
    append_metrics(tmp_path, {"step": 1, "loss_of_bucket": {"a": float("nan"), "b": 2.0}, "grad_norm": float("inf")})
    line = json.loads((tmp_path / METRICS_FILE).read_text())
    assert line == {"step": 1, "loss_of_bucket": {"a": None, "b": 2.0}, "grad_norm": None}


class MeteredLoader(StandInLoader):
    """A loader with stats: its n-th batch costs n bytes and finds n batches in the queue."""

    meter = StatsMeter()

    def stats(self) -> LoaderStats:
        return self.meter.stats()

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            number = self.stats().num_steps + 1
            cost = BatchStats(0.25, 0.5, number, 1, 0)
            self.meter.add(cost, 2, wait_seconds=0.0, batch_seconds=0.125, queue_depth=number)
            yield batch


def test_a_line_covers_the_steps_since_the_previous_line(tmp_path: Path) -> None:
    clock = BatchClock(MeteredLoader(read_clip_frames(12, 16, 16), steps=3))
    for num_steps, num_bytes, depth in ((2, 1 + 2, 1.5), (4, 3 + 4 + 5 + 6, 4.5)):
        for _ in range(num_steps):
            clock.next_batch()
        fields = clock.take_fields()
        append_metrics(tmp_path, {"step": num_steps, **fields})
        assert 0 <= fields["data_wait_seconds"] <= fields["seconds"]
        assert 0 <= fields.pop("data_wait_share") <= 1
        assert {name: value for name, value in fields.items() if "seconds" not in name} == {
            "data_bytes": num_bytes, "data_retries": num_steps, "data_substituted": 0, "data_queue_depth": depth,
        }  # fmt: skip
        assert fields["data_fetch_seconds"] == 0.25 * num_steps
        assert fields["data_decode_seconds"] == 0.5 * num_steps
        assert fields["data_batch_seconds"] == 0.125 * num_steps
    assert steps_in(tmp_path) == [2, 4]


def test_the_wait_is_measured_for_a_loader_without_stats() -> None:
    clock = BatchClock(StandInLoader(read_clip_frames(12, 16, 16)))
    clock.next_batch()
    assert clock.take_fields().keys() == {"seconds", "data_wait_seconds", "data_wait_share"}
    assert LoaderStats().figures()["data_queue_depth"] == 0
