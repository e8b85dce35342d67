"""Tests of PLAN-5: a run can stop anywhere and resume in a new process, with a different number of workers or ranks."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.errors import StateError
from streamvid.plan.position import World
from tests.files import write_rows
from tests.loader.conftest import SMALL, TALL, build_dataset, in_legs, new_keys, open_loader, state_after
from tests.processes import run_python
from tests.shard_options import shard_options
from tools.bench_plan import write_dataset

READ_REST = """
import hashlib, json, sys, streamvid
root, state, workers, batch_size = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
with streamvid.VideoLoader(root, batch_size=batch_size, num_workers=workers, num_epochs=3) as loader:
    loader.load_state_dict(state)
    for batch in loader:
        digest = hashlib.sha256(batch.video.contiguous().numpy().tobytes()).hexdigest()
        print(json.dumps([batch.bucket.id, batch.sample_keys, digest]))
"""


def digest(batch: streamvid.Batch) -> list[object]:
    return [batch.bucket.id, batch.sample_keys, hashlib.sha256(batch.video.contiguous().numpy().tobytes()).hexdigest()]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_remainder_is_bit_identical_in_a_new_process(dataset: Path, seed: int) -> None:
    random_step = random.Random(seed)
    with streamvid.VideoLoader(dataset, batch_size=2, num_workers=2, num_epochs=3) as loader:
        stop = random_step.randrange(1, loader.num_steps(3))
        batches = []
        for number, batch in enumerate(loader, 1):
            batches.append(digest(batch))
            if number == stop:
                state = json.dumps(loader.state_dict())
    assert len(state) < 4096
    result = run_python(READ_REST, dataset, state, random_step.choice([0, 1, 3]), 2)
    assert [json.loads(line) for line in result.stdout.splitlines()] == batches[stop:]


def test_other_ranks_and_batch_sizes_deliver_the_remaining_samples(dataset: Path) -> None:
    """An epoch is delivered by 1 rank, then 3 ranks, then 2 ranks, and no sample is delivered twice."""
    legs = [(1, 2, 3), (3, 1, 2), (2, 1, 10**6)]
    seen = Counter(key for _, batch in in_legs(dataset, legs, tail="pad") for key in new_keys(batch))
    assert len(seen) == 23 and set(seen.values()) == {1}


def test_a_state_at_the_end_of_an_epoch_has_no_steps_left(dataset: Path) -> None:
    with streamvid.VideoLoader(dataset, batch_size=2, num_workers=0) as loader:
        for _ in loader:
            last = loader.state_dict()
    with open_loader(dataset, last, batch_size=2) as loader:
        assert loader.num_steps_left == 0 and list(loader) == []
        assert (loader.epoch == 1 and len([1 for _ in loader]) == len(loader)) or loader.epoch == 2


def test_set_epoch_of_the_current_epoch_keeps_the_position(dataset: Path) -> None:
    """The usual loop `for epoch in range(start, n): loader.set_epoch(epoch)` must not undo a resume."""
    state = state_after(4, dataset)
    with open_loader(dataset, state) as loader:
        loader.set_epoch(state["epoch"])
        assert len(list(loader)) == len(loader) - 4 or loader.epoch == 1


@pytest.mark.parametrize(
    "wrong",
    [
        *(None, [], "state", 7, {}),
        *({name: None} for name in ("version", "epoch", "positions", "datasets")),
        *({"version": 3}, {"plan_version": 3}, {"split": "val"}, {"datasets": []}, {"phase": -1}, {"positions": []}),
        *({"epoch": epoch} for epoch in (1.5, True, -1, 1 << 40)),
        *({"positions": {"96x64-5f": position}} for position in (-1, 1.0, "1", 13, 10**300)),
        {"positions": {"nope": 1}},
        *({"positions": positions} for positions in ({}, {"96x64-5f": 1})),  # for two buckets
        *({"step": step} for step in (1, 2**53, 2**53 + 1)),
        *({"epoch": 1000}, {"seed": 0.0}, {"a later version's": 1}, {"checksum": None}, {"checksum": "0" * 16}),
        *({"progress": progress} for progress in (-0.1, 1.1, float("nan"), "1", True)),
    ],
)
def test_a_damaged_state_is_refused(dataset: Path, wrong: Any) -> None:
    """PLAN-5: a state that no run has saved is an error at once.

    A position beyond the epoch would cause an endless wait.
    """
    with streamvid.VideoLoader(dataset, batch_size=1, num_workers=0, num_epochs=None) as loader:
        state = loader.state_dict()
        with pytest.raises(StateError):
            loader.load_state_dict({**state, **wrong} if isinstance(wrong, dict) and wrong else wrong)
        assert loader.state_dict() == state
        loader.load_state_dict(json.loads(json.dumps(state, sort_keys=True)))


def test_a_state_of_ten_thousand_buckets_is_small(tmp_path: Path) -> None:
    """PLAN-5: the state once took 170 kB. Even without the bucket names, a state of other buckets is refused."""
    for name, num_buckets in (("ds", 10_000), ("other", 1_001)):
        (tmp_path / name).mkdir()
        write_dataset(tmp_path / name, 20 * num_buckets, num_buckets, num_buckets)
    with streamvid.VideoLoader(tmp_path / "ds", batch_size=2, num_workers=0) as loader:
        loader.set_epoch(3, 12_345)
        state, num_steps_left = loader.state_dict(), loader.num_steps_left
        text = json.dumps(state)
        loader.set_epoch(0)
        loader.load_state_dict(json.loads(text))
        assert (loader.state_dict(), loader.num_steps_left) == (state, num_steps_left)
        with pytest.raises(StateError, match="do not match the 10000 buckets"):
            loader.load_state_dict({**state, "positions": "AAAA"})
    assert len(text) < 64 * 1024
    with streamvid.VideoLoader(tmp_path / "other", batch_size=2, num_workers=0) as loader:
        with pytest.raises(StateError, match="do not match the 1001 buckets"):
            loader.load_state_dict(state)
        loader.load_state_dict(state, force=True)
        assert loader.epoch == 3 and 0 < loader.num_steps_left < len(loader)


def test_a_state_of_the_same_number_of_other_samples_is_refused(tmp_path: Path) -> None:
    """PLAN-5: the same files are stored in another order, or the files differ.

    Columns that are added later do not invalidate a state: see test_annotate.py.
    """
    roots = [tmp_path / name for name in ("one", "reordered", "others")]
    for root, seed, first in zip(roots, (0, 1, 0), (0, 0, 7), strict=True):
        source = tmp_path / f"{root.name}-source"
        source.mkdir()
        for number in range(first, first + 20):
            Image.new("RGB", (96, 64), (number * 9, 0, 0)).save(source / f"{number}.png")
            (source / f"{number}.txt").write_text(str(number))
        streamvid.shard(source, root, shard_options(buckets=parse_buckets("96x64@1"), seed=seed, workers=1))
    state = state_after(5, roots[0])
    for root in roots[1:]:
        with (
            streamvid.VideoLoader(root, batch_size=1, num_workers=0) as loader,
            pytest.raises(StateError, match="samples_fingerprint of dataset 0 is"),
        ):
            loader.load_state_dict(state)


def test_a_state_of_the_same_clips_read_by_another_rule_is_refused(tmp_path: Path) -> None:
    """PLAN-5: the frame rate differs, or an image is declared as a mask."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(8):
        Image.new("L", (96, 64), number).save(source / f"{number}.png")
    write_rows(source / "rows.csv", [{"path": f"{n}.png", "text": str(n), "matte": f"{n}.png"} for n in range(8)])
    for name, rules in (
        ("media", [{"media": {"m": "matte"}}, {"media": {"mask:m": "matte"}}]),
        ("rate", [{"fps": 6, "fps_rule": "cap"}, {"fps": 12, "fps_rule": "cap"}]),
    ):
        roots = [tmp_path / f"{name}{number}" for number in range(2)]
        for root, rule in zip(roots, rules, strict=True):
            options = shard_options(buckets=parse_buckets("96x64@1"), workers=1, **rule)
            streamvid.shard(source / "rows.csv", root, options)
        state = state_after(2, roots[0])
        with open_loader(roots[1]) as loader, pytest.raises(StateError, match="samples_fingerprint of dataset 0 is"):
            loader.load_state_dict(state)
        tars = [[shard.sha256 for shard in streamvid.open_dataset(root).shards] for root in roots]
        assert tars[0] == tars[1] or name == "media"


def test_states_around_a_run(dataset: Path) -> None:
    """PLAN-5: states saved before the first batch, within an epoch and after its end resume at their positions."""
    with streamvid.VideoLoader(dataset, batch_size=1, num_workers=2) as loader:
        fresh = loader.state_dict()
        iterator = iter(loader)
        assert loader.state_dict() == fresh  # regardless of prefetched batches
        keys = [next(iterator).sample_keys for _ in range(4)]
        broken = loader.state_dict()
        assert loader.state_dict() == broken
        keys += [batch.sample_keys for batch in iterator]
        ended = loader.state_dict()
        assert ended["epoch"] == 1 and broken["epoch"] == 0
        following = [batch.sample_keys for batch in loader]
    for state, rest in ((fresh, keys), (broken, keys[4:]), (ended, following)):
        with open_loader(dataset, state) as loader:
            assert loader.num_steps_left == len(rest)
            assert [batch.sample_keys for batch in loader] == rest


@pytest.mark.parametrize("how", ["iter", "set_epoch"])
def test_taking_exactly_len_batches_leads_to_the_next_epoch(dataset: Path, how: str) -> None:
    """PLAN-4: Lightning and Open-Sora call next() len(loader) times and never reach the end of the loop.

    The run includes a resume with another batch size. The next epoch starts where the resumed epoch ended, and not at
    its natural start.
    """
    seen: list[str] = []
    with streamvid.VideoLoader(dataset, batch_size=3, num_workers=0) as loader:
        for batch in loader:
            seen += batch.sample_keys
            if len(seen) == 6:
                break
        state = loader.state_dict()
    with open_loader(dataset, state, batch_size=2) as loader:
        for epoch in range(3):
            if how == "set_epoch":
                loader.set_epoch(epoch)
            iterator = iter(loader)
            for _ in range(loader.num_steps_left):
                seen += next(iterator).sample_keys
            assert loader.epoch == epoch and loader.num_steps_left == 0
        carried = sum(row.num_carried for row in loader.plan_report())
    counts = Counter(seen)
    assert len(seen) == 3 * 23 - carried and set(counts.values()) <= {2, 3}


@pytest.mark.parametrize("stopped", [0, 7])
@pytest.mark.parametrize("batch_size", [2, 3, 5])
def test_taking_the_length_of_the_first_epoch_loses_no_batches(dataset: Path, batch_size: int, stopped: int) -> None:
    """PLAN-4: Lightning reads the length only once.

    With tail="carry", later epochs may be longer, and one of them was repeated forever.

    stopped: number of batches before a resume.
    """
    options: dict[str, Any] = {"batch_size": batch_size, "num_workers": 0}
    with streamvid.VideoLoader(dataset, **options, num_epochs=None) as loader:
        expected = [batch.sample_keys for batch in islice(loader, 60)]
    with streamvid.VideoLoader(dataset, **options) as loader:
        length, seen = len(loader), []
        for _ in range(60 // length):
            for number, batch in enumerate(loader, 1):
                seen.append(batch.sample_keys)
                if stopped and len(seen) == stopped:
                    loader.load_state_dict(json.loads(json.dumps(loader.state_dict())))
                    break
                if number == length:
                    break
    assert seen == expected[: len(seen)] and len(seen) > 60 - 2 * length


def test_restarting_an_epoch_is_a_warning(dataset: Path, caplog: pytest.LogCaptureFixture) -> None:
    with streamvid.VideoLoader(dataset, batch_size=1, num_workers=0) as loader:
        first = [batch.sample_keys for batch in islice(loader, 3)]
        assert not caplog.records
        assert [batch.sample_keys for batch in islice(loader, 3)] == first
        assert "epoch 0 begins again, although 20 of its batches were not delivered" in caplog.text


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Datasets with different numbers of samples."""
    root = tmp_path_factory.mktemp("sizes")
    return {
        size: build_dataset(root / str(size), {SMALL: [size // 2, size // 4], TALL: [size // 4]})
        for size in (40, 32, 48)
    }


@pytest.mark.parametrize("tail", ["carry", "drop", "pad"])
def test_progress_is_the_completed_share_of_the_epoch(sizes: dict[int, Path], tail: Any) -> None:
    """PLAN-5: progress is the same on all ranks and rises from 0 to 1 in every epoch, whatever was carried into it."""
    told = []
    for rank in range(2):
        with open_loader(sizes[40], batch_size=3, world=World(rank, 2), num_epochs=3, tail=tail) as loader:
            shares = [(loader.epoch, loader.state_dict()["progress"])]
            shares += [(loader.epoch, loader.state_dict()["progress"]) for _ in loader]
        told.append(shares)
    assert told[0] == told[1] == sorted(told[0])
    for epoch in range(3):
        mine = [share for number, share in told[0] if number == epoch]
        assert mine[0] <= 6 / 40 and mine[-1] == 1.0 and len(set(mine)) == len(mine)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_forced_state_resumes_at_the_same_share_of_the_epoch(sizes: dict[int, Path], accumulate: int) -> None:
    """PLAN-5: positions count samples of a dataset of another size, so the state also contains the completed share."""
    options: dict[str, Any] = {"batch_size": 1, "num_workers": 0, "accumulate": accumulate}
    for epoch, step in ((0, 0), (0, 10), (3, 20), (3, 39), (3, 40)):
        with streamvid.VideoLoader(sizes[40], **options) as loader:
            loader.set_epoch(epoch, step=step)
            state = json.loads(json.dumps(loader.state_dict()))
        for size in (32, 48):
            with streamvid.VideoLoader(sizes[size], **options) as loader:
                with pytest.raises(StateError, match="samples_fingerprint of dataset 0 is"):
                    loader.load_state_dict(state)
                loader.load_state_dict(state, force=True)
                left = size - round(size * step / 40)
                assert (loader.epoch, loader.num_steps_left) == (epoch, left)
                assert len(list(map(id, loader))) == left and loader.epoch == epoch + 1
                del state["progress"]
                with pytest.raises(StateError, match="progress=None in the loader state"):
                    loader.load_state_dict(state, force=True)
                state["progress"] = step / 40
