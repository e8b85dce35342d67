"""Tests of dataset versions in a loader: the opened version, a state's version, and samples removed or moved later."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import streamvid
from streamvid.buckets.bucket import Bucket
from streamvid.dataset.index import ClipEntry
from streamvid.errors import ConfigError, SampleError, StateError
from streamvid.plan.position import World
from tests.dataset.growing import add_view, grow, keys_of, remove_keys, rewrite, seal_keys
from tests.dataset.samples import ROW
from tests.loader.conftest import SMALL, clip_bytes, open_loader, state_after

A, B = Bucket(9, 64, 96), Bucket(17, 64, 96)
NO_DECODING: dict[str, Any] = {"output": {"decode": False}}
FOLLOW: dict[str, Any] = {**NO_DECODING, "schedule": {"follow": True}}
FIRST = {"a0", "a1", "a2", "a3", "a4", "b0", "b1"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Dataset with three shards and seven samples."""
    seal_keys(tmp_path / "ds", {A: [["a0", "a1", "a2"], ["a3", "a4"]], B: [["b0", "b1"]]})
    return tmp_path / "ds"


def epoch_of(loader: streamvid.VideoLoader) -> Counter[str]:
    """Return the number of deliveries per sample in the loader's next loop, without repeats."""
    rows = [pair for batch in loader for pair in zip(batch.sample_keys, batch.is_repeat.tolist(), strict=True)]
    return Counter(key for key, again in rows if not again)


def version_of(loader: streamvid.VideoLoader) -> int:
    return loader.dataset.manifest.version


# The version of a state.


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_run_resumes_in_its_version_after_the_dataset_has_grown(root: Path, num_ranks: int) -> None:
    """PLAN-5: the remaining samples are from the version in the state, also with a different number of ranks."""
    with open_loader(root, **NO_DECODING, tail="shrink") as loader:
        taken = Counter(key for batch in islice(loader, 3) for key in batch.sample_keys)
        state = loader.state_dict()
    assert state["versions"] == [1]
    grow(root, {A: [["a5", "a6"]]})
    for rank in range(num_ranks):
        with open_loader(root, state, **NO_DECODING, tail="shrink", world=World(rank, num_ranks)) as loader:
            assert version_of(loader) == 1
            taken += epoch_of(loader)
            assert loader.state_dict()["versions"] == [1]
    assert taken == Counter(FIRST)
    with open_loader(root, **NO_DECODING) as loader:
        assert version_of(loader) == 2 and set(epoch_of(loader)) == FIRST | {"a5", "a6"}


def test_a_state_can_be_an_approximate_position_in_the_newest_version(root: Path) -> None:
    state = state_after(4, root, **NO_DECODING)
    grow(root, {A: [["a5", "a6"]]})
    with open_loader(root, **NO_DECODING) as loader:
        loader.load_state_dict(state, force=True)
        assert version_of(loader) == 2
        assert 0 < loader.num_steps_left < len(loader)


def test_a_state_of_a_deleted_version_is_refused_with_remedies(root: Path) -> None:
    state = state_after(2, root, **NO_DECODING)
    grow(root, {A: [["a5", "a6"]]})
    (root / "versions" / "manifest-000001.json").unlink()
    with open_loader(root, **NO_DECODING) as loader:
        with pytest.raises(StateError, match=r"version 1 of .*cannot be opened.*force=True.*tag"):
            loader.load_state_dict(state)
        assert version_of(loader) == 2 and set(epoch_of(loader)) == FIRST | {"a5", "a6"}


def test_a_loader_of_a_named_version_stays_in_it(root: Path) -> None:
    state = state_after(2, root, **NO_DECODING)
    grow(root, {A: [["a5", "a6"]]})
    with open_loader(f"{root}@1", state, **NO_DECODING, num_epochs=2) as loader:
        assert set(epoch_of(loader)) == FIRST
    with open_loader(f"{root}@2", **NO_DECODING) as loader, pytest.raises(StateError, match="samples_fingerprint"):
        loader.load_state_dict(state)


# Following.


def test_following_needs_datasets_that_can_change(root: Path) -> None:
    for dataset in (f"{root}@1", streamvid.open_dataset(root)):
        with pytest.raises(ConfigError, match="follow=True cannot be combined with the dataset"):
            open_loader(dataset, **FOLLOW)
    with pytest.raises(ConfigError, match="follow=True cannot be combined with features"):
        open_loader(root, **FOLLOW, features="latents")


def test_ranks_that_cannot_communicate_are_refused(root: Path) -> None:
    says = r"follow=True with 2 ranks .*init_process_group.*process_group"
    with open_loader(root, **FOLLOW, world=World(0, 2)) as loader, pytest.raises(ConfigError, match=says):
        iter(loader)


def test_callers_that_never_reach_the_end_follow_too(root: Path) -> None:
    """Such loops take as many batches as the loader announces, and may set the epoch before each loop."""
    with open_loader(root, **FOLLOW) as loader:
        for epoch, keys in enumerate([FIRST, FIRST | {"a5", "a6"}, FIRST | {"a5", "a6"}]):
            if epoch == 1:
                loader.set_epoch(epoch)
            batches = iter(loader)
            taken = [next(batches).sample_keys[0] for _ in range(loader.num_steps_left)]
            assert Counter(taken) == Counter(keys)
            if epoch == 0:
                grow(root, {A: [["a5", "a6"]]})


def test_all_epochs_of_one_loop_follow(root: Path) -> None:
    with open_loader(root, **FOLLOW, num_epochs=3) as loader:
        found: dict[int, Counter[str]] = {}
        for number, batch in enumerate(loader):
            found.setdefault(loader.epoch, Counter()).update(batch.sample_keys)
            if number == 2:
                grow(root, {B: [["b2"]]})
            elif number == 10:
                remove_keys(root, {"a0", "b2"})
        assert found == {0: Counter(FIRST), 1: Counter(FIRST | {"b2"}), 2: Counter(FIRST - {"a0"})}


@pytest.mark.parametrize("tail", ["carry", "shrink"])
def test_each_dataset_of_a_mix_has_its_own_version(root: Path, tmp_path: Path, tail: str) -> None:
    """PLAN-4: the samples of both datasets are delivered once per epoch, and carried samples are delivered first."""
    other = tmp_path / "other"
    seal_keys(other, {A: [["c0", "c1"]]})
    with open_loader([root, other], **FOLLOW, tail=tail, batch_size=2) as loader:
        found, expected = epoch_of(loader), Counter(FIRST | {"c0", "c1"})
        grow(other, {A: [["c2"]], B: [["d0"]]})
        for _ in range(2):
            found += epoch_of(loader)
            expected.update(FIRST | {"c0", "c1"})
            if loader.state_dict()["versions"] == [1, 2]:
                break
        assert loader.state_dict()["versions"] == [1, 2]
        found += epoch_of(loader)
        expected.update(keys_of(root) | keys_of(other))
        left = expected - found
        assert found <= expected and (not left if tail == "shrink" else len(left) <= 2)


# Keeping a version.


def test_a_removed_sample_is_replaced_and_not_counted_as_bad(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """BAD-1: removals are reported at the start of an epoch, substitutes are marked, and the run does not end."""
    limits = {"max_bad_fraction": 0.0}
    with open_loader(root, **NO_DECODING, limits=limits) as loader:
        assert set(epoch_of(loader)) == FIRST
        remove_keys(root, {"a1", "b0"})
        caplog.set_level(logging.WARNING)
        for _ in range(2):
            assert epoch_of(loader) == Counter(FIRST - {"a1", "b0"})
        (line,) = [record.getMessage() for record in caplog.records]
        assert "2 samples of version 1 have been removed as of version 2" in line
        assert {one.key for one in loader.substituted} == {"a1", "b0"}
        assert all(one.is_removed for one in loader.substituted)
        assert loader.stats().work.num_substituted == 0
    with open_loader(f"{root}@1", **NO_DECODING, limits=limits) as loader:
        assert epoch_of(loader) == Counter(FIRST - {"a1", "b0"})


def test_removals_are_reported_once_and_only_for_the_loaded_version(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def announced() -> list[str]:
        caplog.clear()
        for _ in range(2):
            with open_loader(f"{root}@1", **NO_DECODING) as loader:
                assert set(epoch_of(loader)) == FIRST & keys_of(root)
        return [record.getMessage() for record in caplog.records]

    caplog.set_level(logging.WARNING)
    grow(root, {A: [["a5", "a6"]]})
    remove_keys(root, {"a5"})
    rewrite(root, {0, 1, 2})
    assert announced() == [], "the removed sample was added in a later version"
    remove_keys(root, {"a6", "b0"})
    (line,) = announced()
    assert "1 samples of version 1 have been removed as of version 5" in line, (
        "one removed sample had been moved to another tar"
    )
    remove_keys(root, {"a1"})
    (line,) = announced()
    assert "2 samples of version 1 have been removed as of version 6" in line


def test_a_run_that_keeps_its_version_ends_if_a_bucket_was_removed(root: Path) -> None:
    remove_keys(root, {"b0", "b1"})
    with open_loader(f"{root}@1", **NO_DECODING) as loader, pytest.raises(SampleError, match=r"removed.*all other"):
        epoch_of(loader)


def video(bucket: Bucket, key: str) -> tuple[bytes, ClipEntry]:
    """Return a real clip of 24 frames, one of three variants."""
    data = clip_bytes(int(key[1:]) % 3, bucket.width * 2, bucket.height * 2, 24)
    return data, replace(ROW.clip, num_frames=24, width=bucket.width * 2, height=bucket.height * 2)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("decode", [True, False])
def test_samples_of_deleted_tars_are_read_from_their_replacements(
    tmp_path: Path, decode: bool, num_workers: int
) -> None:
    """The pixels, or bytes, do not change, and no sample is treated as bad."""
    root = tmp_path / "real"
    seal_keys(root, {SMALL: [["k0", "k1", "k2"], ["k3", "k4"]]}, video)

    def contents(loader: streamvid.VideoLoader) -> dict[str, bytes]:
        found = {}
        for batch in loader:
            data = batch.video.numpy().tobytes() if decode else bytes(batch.clips[0].data)
            found[batch.sample_keys[0]] = data
        return found

    options: dict[str, Any] = {"output": {"decode": decode}, "view": {"temporal": "head"}, "num_workers": num_workers}
    with open_loader(f"{root}@1", **options) as loader:
        before = contents(loader)
        remove_keys(root, {"k3"})
        rewrite(root, {0, 1}, video)
        rewrite(root, {0}, video)
        after = contents(loader)  # the old tars have been deleted
        assert after == {key: data for key, data in before.items() if key != "k3"}
        assert all(one.is_removed for one in loader.substituted)
    with open_loader(f"{root}@1", **options) as loader:
        assert contents(loader) == after


def test_a_tar_that_is_deleted_within_an_epoch_is_found_again(root: Path) -> None:
    with open_loader(root, **NO_DECODING, tail="shrink", limits={"prefetch_bytes": 0}) as loader:
        batches = iter(loader)
        taken = Counter(next(batches).sample_keys)
        rewrite(root, {0, 1, 2})
        taken += Counter(key for batch in batches for key in batch.sample_keys)
        assert taken == Counter(FIRST)


def test_a_missing_tar_without_a_replacement_is_an_error(root: Path) -> None:
    grow(root, {A: [["a5"]]})
    for path in (root / "shards").rglob("*.tar"):
        path.unlink()
    with open_loader(f"{root}@1", **NO_DECODING) as loader, pytest.raises(SampleError, match="cannot be delivered"):
        epoch_of(loader)


# Views.


def test_a_view_is_a_condition_of_the_loader(root: Path) -> None:
    scores = {row["key"]: row["user.score"] for row in streamvid.open_dataset(root).samples_table().to_pylist()}
    low = min(scores.values())
    add_view(root, "high", f"score > {low}")
    high = {key for key, score in scores.items() if score > low}
    with open_loader(f"{root}#high", **NO_DECODING) as loader:
        assert epoch_of(loader) == Counter(high)
        state = loader.state_dict()
        assert state["datasets"][0]["where"] == f"(`user.score`) > ({low})"
    config = streamvid.DatasetConfig(f"{root}#high", where="key != 'a0'")
    with open_loader([config, str(root)], **NO_DECODING, tail="shrink") as loader:
        assert epoch_of(loader) == Counter(FIRST) + Counter(high - {"a0"})
    with open_loader(root, **NO_DECODING) as loader, pytest.raises(StateError, match="where of dataset 0"):
        loader.load_state_dict(state)
    add_view(root, "high", "score > 1000")
    grow(root, {A: [["a5"]]})
    with open_loader(f"{root}@2#high", state, **NO_DECODING, num_epochs=2) as loader:
        assert set(epoch_of(loader)) == high
