"""Tests of the ledger that a loader writes, and of reading it after resumes. For kills, see test_kill.py."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import streamvid
from streamvid.buckets.bucket import Bucket
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError, SourceError, StreamvidError
from streamvid.forecast.ledger import LedgerReport, check_ledger
from streamvid.ledger.history import read_history
from streamvid.ledger.queries import position_of, seen_before, sightings
from streamvid.ledger.records import LoggedBatch, LoggedSample
from streamvid.ledger.writer import LedgerWriter
from tests.dataset.growing import grow, remove_keys, seal_keys
from tests.loader.conftest import SMALL, TALL, build_dataset, open_loader

Rows = list[tuple[int, int, list[str]]]  # epoch, step, keys


def check(ledger: Path, *datasets: Path) -> LedgerReport:
    return check_ledger(read_history(ledger), [open_dataset(one) for one in datasets], lambda *_: None)


def run(ledger: Path, dataset: Any, num_steps: int | None, state: Any = None, **options: Any) -> tuple[Rows, Any]:
    """Take `num_steps` batches from a loader with a ledger. Return its rows and its state."""
    rows: Rows = []
    output = {"ledger": ledger, **options.pop("output", {})}
    with open_loader(dataset, state, output=output, **{"batch_size": 2, **options}) as loader:
        first = loader.state_dict()["step"]
        for number, batch in enumerate(islice(loader, num_steps)):
            rows.append((loader.epoch, first + number, batch.sample_keys))
        return rows, loader.state_dict()


def counted(ledger: Path) -> list[LoggedBatch]:
    """Return the batches of all ranks that count."""
    return [
        batch
        for attempt in read_history(ledger)
        for rank in sorted(attempt.logs)
        for _, batch, counts in attempt.batches(rank)
        if counts
    ]


def keys_of(batches: list[LoggedBatch]) -> Counter[tuple[int, str]]:
    return Counter((batch.position.epoch, sample.key) for batch in batches for sample in batch.samples)


def test_every_delivery_is_logged_with_its_view(dataset: Path, tmp_path: Path) -> None:
    view = {"max_interval": 3}
    with open_loader(dataset, batch_size=2, num_epochs=2, view=view, output={"ledger": tmp_path}, seed=4) as loader:
        got = [(loader.epoch, list(batch.sample_keys), list(batch.text)) for batch in loader]
    logged = counted(tmp_path)
    assert [(one.position.epoch, [sample.key for sample in one.samples]) for one in logged] == [row[:2] for row in got]
    assert [[bool(sample.caption) for sample in one.samples] for one in logged] == [
        list(map(bool, row[2])) for row in got
    ]
    steps = Counter(one.position.epoch for one in logged)
    assert [one.position.step for one in logged] == [step for epoch in (0, 1) for step in range(steps[epoch])]
    samples = [sample for one in logged for sample in one.samples]
    assert {sample.visit for sample in samples} == {0, 1} and {sample.stride for sample in samples} == {1, 2, 3}
    assert len({sample.start for sample in samples}) > 3
    report = check(tmp_path, dataset)
    assert report.is_right and report.num_batches == len(got) and report.num_replaced == 0


def test_a_resume_from_an_older_state_replaces_later_batches(dataset: Path, tmp_path: Path) -> None:
    """PLAN-4: the final model has seen each sample once per epoch, even if a run continued beyond its saved state."""
    _, state = run(tmp_path, dataset, 3, seed=1)
    run(tmp_path, dataset, 5, state, seed=1)  # its state is lost
    for rank in range(2):
        run(tmp_path, dataset, None, state, seed=1, batch_size=1, world=streamvid.World(rank, 2), num_epochs=1)
    seen = keys_of(counted(tmp_path))
    names = set(open_dataset(dataset).samples_table().column("key").to_pylist())
    assert set(seen.values()) == {1} and len(seen) > len(names) - 4, "carry leaves less than a step of each bucket"
    report = check(tmp_path, dataset)
    assert report.is_right and report.num_replaced == 5 and report.num_attempts == 3
    again = [one for key in names for one in sightings(read_history(tmp_path), key) if not one.counts]
    assert len(again) == 10 and {one.session for one in again} == {"session-000002"}


def test_without_a_state_a_new_run_replaces_the_old_one(dataset: Path, tmp_path: Path) -> None:
    run(tmp_path, dataset, 6)
    rows, _ = run(tmp_path, dataset, 2)
    assert keys_of(counted(tmp_path)) == Counter((epoch, key) for epoch, _, keys in rows for key in keys)


def test_an_epoch_that_a_loader_begins_again_counts_twice(dataset: Path, tmp_path: Path) -> None:
    with open_loader(dataset, batch_size=2, output={"ledger": tmp_path}) as loader:
        first = [key for batch in islice(loader, 2) for key in batch.sample_keys]
        every = [key for batch in loader for key in batch.sample_keys]
    assert keys_of(counted(tmp_path)) == Counter((0, key) for key in first + every)


def test_epochs_continue_and_steps_count_over_them(dataset: Path, tmp_path: Path) -> None:
    with open_loader(dataset, batch_size=2, output={"ledger": tmp_path}) as loader:
        rows = [batch.sample_keys for _ in range(3) for batch in loader]
        num_first = loader.num_steps(1)
    attempts = read_history(tmp_path)
    for num_steps in (0, 1, num_first, num_first + 2, len(rows), len(rows) + 9):
        seen = seen_before(attempts, position_of(attempts, num_steps))
        keys = Counter((str(dataset), key) for row in rows[:num_steps] for key in row)
        assert seen == keys, num_steps


def test_a_bad_sample_is_logged_with_its_substitute(tmp_path: Path) -> None:
    bad = f"{SMALL.id}-2"
    root = build_dataset(tmp_path / "ds", {SMALL: [5, 4]}, damage={bad: b"no clip at all" * 99})
    with open_loader(root, output={"ledger": tmp_path / "ledger"}) as loader:
        delivered = [key for batch in loader for key in batch.sample_keys]
        (record,) = loader.substituted
    (logged,) = [one for batch in counted(tmp_path / "ledger") for one in batch.samples if one.substituted_for]
    assert (logged.substituted_for, logged.key, logged.is_repeat) == (bad, record.substitute_key, False)
    assert bad not in delivered
    report = check(tmp_path / "ledger", root)
    assert report.is_right and report.epochs[0].num_substituted == 1
    (sighting,) = sightings(read_history(tmp_path / "ledger"), bad)
    assert sighting.planned_only and sighting.counts


def test_captions_and_several_datasets_are_distinguished(dataset: Path, tmp_path: Path) -> None:
    sources = [{"url": dataset, "num_repeats": "3/2", "captions": {"column": {"text": 1, "place": 2}}, "name": "a"}]
    sources.append({"url": dataset, "where": "year > 2001", "captions": {"dropout": 0.5}, "name": "b"})
    with open_loader(sources, batch_size=2, num_epochs=4, output={"ledger": tmp_path}) as loader:
        texts = [text for batch in loader for text in batch.text]
    samples = [sample for batch in counted(tmp_path) for sample in batch.samples]
    for text, sample in zip(texts, samples, strict=True):
        written = {"text": text.startswith("clip "), "user.place": text.startswith("p"), "": text == ""}
        assert written[sample.caption], (text, sample)
    assert {(one.dataset, one.caption) for one in samples} >= {(0, "text"), (0, "user.place"), (1, "text"), (1, "")}
    assert check(tmp_path, dataset, dataset).is_right
    with pytest.raises(SourceError, match=r"the number of datasets must be 2, as in the run, but is 1"):
        check(tmp_path, dataset)


@pytest.mark.parametrize("tail", ["drop", "pad", "shrink", "uneven"])
def test_every_tail_is_verified(dataset: Path, tmp_path: Path, tail: str) -> None:
    for rank in range(3):
        with open_loader(
            dataset, batch_size=2, tail=tail, world=streamvid.World(rank, 3), num_epochs=2, output={"ledger": tmp_path}
        ) as loader:
            total = sum(len(batch.sample_keys) for batch in loader)
            assert total
    assert check(tmp_path, dataset).is_right


@pytest.mark.parametrize("tail", ["carry", "drop", "pad", "shrink", "uneven"])
def test_a_run_that_follows_versions_is_verified(tmp_path: Path, tail: str) -> None:
    """The epochs use versions 1, 2, 2 and 3, with a resume within the third epoch.

    The last version has fewer samples.
    """
    root, ledger = tmp_path / "ds", tmp_path / "ledger"
    few, many = Bucket(9, 64, 96), Bucket(17, 64, 96)
    seal_keys(root, {few: [["a0", "a1", "a2"]], many: [["b0", "b1", "b2", "b3"], ["b4", "b5", "b6"]]})
    options = {"tail": tail, "schedule": {"follow": True}, "output": {"decode": False, "ledger": ledger}}
    with open_loader(root, batch_size=2, **options) as loader:
        first = [key for batch in loader for key in batch.sample_keys]
        grow(root, {few: [["a3", "a4"]], many: [["b7"]]})
        second = [key for _ in range(2) for batch in loader for key in batch.sample_keys][:12]
        versions = {loader.dataset.manifest.version}
        third = [key for batch in islice(loader, 1) for key in batch.sample_keys]
        state = loader.state_dict()
    with open_loader(root, state, batch_size=1, **options) as loader:
        third += [key for batch in loader for key in batch.sample_keys]
        remove_keys(root, {"a3", "b0", "b6"})
        fourth = [key for batch in loader for key in batch.sample_keys]
        assert versions == {2} and loader.dataset.manifest.version == 3
    assert first and second and third and "b0" not in fourth
    report = check(ledger, root)
    assert report.is_right, report.differences
    assert [one.epoch for one in report.epochs] == [0, 1, 2, 3, 4]
    assert sum(one.num_samples for one in report.epochs) == sum(len(one.samples) for one in counted(ledger))


@pytest.mark.parametrize(("num_steps", "batch_size"), [(0, 4), (1, 4), (1, 1), (3, 1)])
def test_versions_with_equal_samples_are_verified(tmp_path: Path, num_steps: int, batch_size: int) -> None:
    """Each epoch carries samples over to a version with one more column, and the run is resumed in the fourth epoch."""
    root, ledger = tmp_path / "ds", tmp_path / "ledger"
    keys = {Bucket(9, 64, 96): [f"a{n}" for n in range(7)], Bucket(17, 64, 96): [f"b{n}" for n in range(5)]}
    seal_keys(root, {bucket: [few] for bucket, few in keys.items()})
    options = {"tail": "carry", "schedule": {"follow": True}, "output": {"decode": False, "ledger": ledger}}
    with open_loader(root, batch_size=4, **options) as loader:
        for epoch in range(3):
            assert list(loader)
            rows = [{"key": key, f"column{epoch}": 1} for few in keys.values() for key in few]
            (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
            streamvid.annotate(root, tmp_path / "rows.jsonl")
        assert len(list(islice(loader, num_steps))) == num_steps
        state = loader.state_dict()
    with open_loader(root, state, batch_size=batch_size, **options) as loader:
        assert list(loader)
    report = check(ledger, root)
    assert report.is_right, report.differences


def rewritten(source: Path, target: Path, change: Any) -> None:
    """Write a copy of a ledger with one session and one rank, in which `change` is applied to each batch."""
    (attempt,) = read_history(source)
    writer = LedgerWriter(target, 0, ["ds"])
    writer.begin(attempt.plan, attempt.cursor, is_again=False)
    for number, batch in enumerate(counted(source)):
        changed = change(number, batch)
        if changed is not None:
            writer.add(changed)
    writer.close()


def test_differences_from_the_plan_are_reported(dataset: Path, tmp_path: Path) -> None:
    rows, _ = run(tmp_path / "right", dataset, None)

    def edit(number: int, batch: LoggedBatch, **values: Any) -> LoggedBatch:
        first: LoggedSample = batch.samples[0]._replace(**values)
        return LoggedBatch(batch.position, (first, *batch.samples[1:])) if number == 2 else batch

    changes = {
        "same": (lambda number, batch: batch, None),
        "key": (lambda number, batch: edit(number, batch, key="other"), "slot 0 delivered other "),
        "visit": (lambda number, batch: edit(number, batch, visit=7), "visit 7"),
        "repeat": (lambda number, batch: edit(number, batch, is_repeat=True), "a repeat"),
        "missing": (lambda number, batch: batch if number != 2 else None, "step 2 is missing"),
        "size": (
            lambda number, batch: LoggedBatch(batch.position, batch.samples[: 1 + (number != 2)]),
            "has 1 samples",
        ),
    }
    for name, (change, match) in changes.items():
        rewritten(tmp_path / "right", tmp_path / name, change)
        report = check(tmp_path / name, dataset)
        if match is None:
            assert report.is_right and report.num_batches == len(rows)
        else:
            assert report.num_differences == 1 and match in report.differences[0], (name, report)
            assert "epoch 0, step 2" in report.differences[0]


def test_unrecorded_batches_are_counted(dataset: Path, tmp_path: Path) -> None:
    """A resume shows that the batches before it were delivered."""
    state = None
    for num_steps in (3, None):
        for rank in range(2):
            _, after = run(tmp_path, dataset, num_steps, state, batch_size=1, world=streamvid.World(rank, 2))
        state = after
    assert check(tmp_path, dataset).is_right
    (tmp_path / "session-000001" / "rank-00001.ledger").unlink()
    report = check(tmp_path, dataset)
    assert not report.is_right and (report.num_unrecorded, report.num_differences) == (3, 0)


def test_a_state_of_another_run_is_reported(dataset: Path, tmp_path: Path) -> None:
    run(tmp_path / "ledger", dataset, 2, batch_size=1)
    _, state = run(tmp_path / "elsewhere", dataset, 2, batch_size=3)
    run(tmp_path / "ledger", dataset, 2, state, batch_size=1)
    report = check(tmp_path / "ledger", dataset)
    assert report.num_differences == 1 and "started from another run's state" in report.differences[0]


def test_another_dataset_is_refused(dataset: Path, tmp_path: Path) -> None:
    other = build_dataset(tmp_path / "ds", {SMALL: [5, 4, 3], TALL: [6, 4]})
    run(tmp_path / "ledger", dataset, 2)
    with pytest.raises(
        SourceError,
        match=r"belongs to different data: samples_fingerprint of .* is '[0-9a-f]{12}', not '[0-9a-f]{12}'\.",
    ):
        check(tmp_path / "ledger", other)
    session = tmp_path / "ledger" / "session-000001" / "session.json"
    right = json.loads(session.read_text())
    for damage in ({"options": {"nothing": 1}}, {"datasets": 7}, {"batch_sizes": None}, {"split": 3}):
        session.write_text(json.dumps({**right, "plan": {**right["plan"], **damage}}))
        with pytest.raises(StreamvidError):
            check(tmp_path / "ledger", dataset)


def test_options_are_checked_before_anything_starts(dataset: Path, tmp_path: Path) -> None:
    for ledger in ("s3://bucket/ledger", 7):
        with pytest.raises(ConfigError, match=r"ledger=.*: must be the path to a local folder \(not a URL\), or None"):
            open_loader(dataset, output={"ledger": ledger})
    root = tmp_path / "ds"
    shutil.copytree(dataset, root)
    with pytest.raises(ConfigError, match=r"output\.ledger=.*: must not be inside the dataset"):
        open_loader(root, output={"ledger": root / "ledger"})
    assert not (root / "ledger").exists()
