"""Tests of whole epochs: uniform, equal steps, each sample exactly once, and correct frames on any number of ranks."""

from __future__ import annotations

import copy
import pickle
import shutil
import threading
import time
from collections import Counter, deque
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch

import streamvid
from streamvid.errors import ConfigError, DatasetError, LoaderError, PlanError, RingFullError, SampleError, StateError
from streamvid.loader.delivery import pipeline
from streamvid.plan.position import World
from tests.loader.conftest import LONG, SMALL, TALL, build_dataset, new_slots, open_loader
from tests.processes import run_python
from tools import make_corpus


def read_epoch(dataset: Path, rank: int, num_ranks: int, **options: object) -> list[tuple[str, list[str], list[bool]]]:
    world = World(rank, num_ranks)
    with streamvid.VideoLoader(dataset, world=world, num_workers=0, **{"batch_size": 1, **options}) as loader:  # type: ignore[arg-type]
        steps = len(loader)
        received = [(batch.bucket.id, batch.sample_keys, batch.is_repeat.tolist()) for batch in loader]
        assert len(received) == steps
        return received


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("tail", ["carry", "drop", "pad"])
def test_one_epoch_over_all_ranks(dataset: Path, num_ranks: int, tail: str) -> None:
    """PLAN-2, PLAN-3, PLAN-4: all ranks have the same steps of one bucket each, and only marked repeats occur twice."""
    per_rank = [read_epoch(dataset, rank, num_ranks, tail=tail) for rank in range(num_ranks)]
    buckets = [[bucket for bucket, _, _ in received] for received in per_rank]
    assert all(sequence == buckets[0] for sequence in buckets)
    rows = [row for received in per_rank for _, keys, repeats in received for row in zip(keys, repeats, strict=True)]
    first = Counter(key for key, repeat in rows if not repeat)
    assert set(first.values()) <= {1}
    num_repeats = sum(repeat for _, repeat in rows)
    sizes = {"64x96-9f": 11, "96x64-5f": 12}
    if tail == "pad":
        assert len(first) == 23
        assert num_repeats == sum(-n % num_ranks for n in sizes.values())
    else:
        assert num_repeats == 0
        assert len(first) == sum(n - n % num_ranks for n in sizes.values())


def test_carry_delivers_the_remainder_first_in_the_next_epoch(dataset: Path) -> None:
    """PLAN-4: over several epochs, each bucket is one stream of passes.

    After n passes, each sample was delivered n times.
    """
    with open_loader(dataset, batch_size=3, num_epochs=6) as loader:
        assert loader.num_steps(num_epochs=6) == 6 * 11 // 3 + 6 * 12 // 3
        seen = Counter(key for batch in loader for key in batch.sample_keys)
    assert len(seen) == 23 and set(seen.values()) == {6}


def test_frames_are_consecutive_and_from_the_clip_they_name(dataset: Path) -> None:
    """SAMPLE-2: the burned-in numbers increase by one within a window, and a sample's windows differ between visits."""
    read_number = make_corpus.read_number
    starts: dict[str, set[int]] = {}
    with streamvid.VideoLoader(dataset, batch_size=2, num_workers=2, num_epochs=8) as loader:
        for batch in loader:
            video = batch.video.permute(0, 2, 3, 4, 1).numpy()
            for key, frames in zip(batch.sample_keys, video, strict=True):
                numbers = [read_number(frame, 0.5) for frame in frames]
                assert None not in numbers, f"{key}: no number in {numbers}"
                assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), f"{key}: {numbers}"
                starts.setdefault(key, set()).add(numbers[0])
    assert len(starts) == 23
    assert np.mean([len(found) for found in starts.values()]) > 3


def test_choices_depend_only_on_seed_key_and_visit(dataset: Path) -> None:
    """SAMPLE-1: the pixels of a visit do not depend on the number of ranks and workers or on the batch size."""

    def pixels(**options: object) -> dict[str, int]:
        found = {}
        ranks = int(options.pop("ranks", 1))  # type: ignore[call-overload]
        for rank in range(ranks):
            with streamvid.VideoLoader(dataset, world=World(rank, ranks), tail="pad", **options) as loader:  # type: ignore[arg-type]
                for batch in loader:
                    for slot in new_slots(batch):
                        found[batch.sample_keys[slot]] = hash(batch.video[slot].contiguous().numpy().tobytes())
        return found

    one = pixels(batch_size=1, num_workers=0)
    assert len(one) == 23
    assert pixels(batch_size=3, num_workers=2) == one
    assert pixels(batch_size=2, num_workers=0, ranks=2) == one
    assert pixels(batch_size=1, num_workers=0, shuffle="none") == one
    assert pixels(batch_size=1, num_workers=0, seed=1) != one


def test_epochs_differ_and_set_epoch_returns_to_one(dataset: Path) -> None:
    with open_loader(dataset) as loader:
        first = [batch.sample_keys[0] for batch in loader]
        assert loader.epoch == 1
        second = [batch.sample_keys[0] for batch in loader]
        assert sorted(first) == sorted(second) and first != second
        loader.set_epoch(0)
        assert [batch.sample_keys[0] for batch in loader] == first


def test_a_loop_after_a_break_restarts_the_epoch(dataset: Path) -> None:
    with open_loader(dataset, num_workers=2) as loader:
        seen = []
        for batch in loader:
            seen.append(batch.sample_keys[0])
            if len(seen) == 5:
                break
        assert loader.num_steps_left == len(loader) - 5
        assert [batch.sample_keys[0] for batch in loader][:5] == seen


def test_an_abandoned_iterator_raises(dataset: Path) -> None:
    with open_loader(dataset) as loader:
        first = iter(loader)
        next(first)
        second = iter(loader)
        next(second)
        with pytest.raises(LoaderError, match="another iteration"):
            next(first)
    with pytest.raises(LoaderError, match="closed"):
        iter(loader)


def test_a_batch_keeps_its_memory_until_its_last_tensor_is_freed(dataset: Path) -> None:
    """BATCH-1: no later batch overwrites a held one, not even if only a view is held or the loader has closed."""
    with open_loader(dataset, num_workers=2, num_epochs=4, limits={"prefetch_bytes": 0}) as loader:
        iterator = iter(loader)
        held = next(iterator)
        view, copy = held.video[0, :, 1], held.video[0, :, 1].clone()
        del held
        for _ in range(30):
            next(iterator)
        assert torch.equal(view, copy)
    assert torch.equal(view, copy)


def test_a_full_ring_waits_then_names_the_remedies(dataset: Path) -> None:
    """BATCH-1: a caller that keeps every batch gets an error that names prefetch_bytes and clone, never old frames."""
    with open_loader(dataset, batch_size=2, num_epochs=3, limits={"prefetch_bytes": 0}) as loader:
        with pytest.raises(RingFullError, match=r"clone\(\).*prefetch_bytes"):
            _ = list(loader)
        kept = [batch.clone() for batch in loader]
        assert len(kept) > 9


def test_a_caller_may_hold_most_of_a_deep_ring(dataset: Path) -> None:
    """PLAN-4, BATCH-1: the feeder fills a deep ring several batches at a time, but never waits for batches in use."""

    def received(num_held: int) -> list[list[str]]:
        """Return the keys that a caller receives which holds the last `num_held` batches."""
        held: deque[streamvid.Batch] = deque(maxlen=num_held)
        found, most = [], 0
        with open_loader(dataset, num_epochs=2, num_workers=1, limits={"prefetch_bytes": 1 << 22}) as loader:
            for batch in loader:
                held.append(batch)
                found.append(batch.sample_keys)
                most = max(most, loader.stats().ring_batches)
        assert most > 24
        return found

    alone = received(0)
    assert len(alone) == 46
    assert received(8) == received(24) == alone


def test_a_full_ring_is_refilled_several_batches_at_a_time(dataset: Path) -> None:
    """The feeder sleeps until several batches are taken, because waking it for each takes longer than its work."""
    with open_loader(dataset, num_epochs=None, num_workers=1, limits={"prefetch_bytes": 1 << 22}) as loader:
        iterator = iter(loader)
        next(iterator)
        feeder = loader._pipeline._feeder
        while feeder.ring_wait_since is None or not feeder.lacks_memory:
            time.sleep(0.01)
        num_full = loader.stats().ring_batches
        assert num_full >= 16
        next(iterator)
        time.sleep(0.5)  # more than the feeder would need; on a slow machine, the test proves less
        assert loader.stats().ring_batches == num_full - 1
        num_taken = num_full // 2
        for _ in range(num_taken):
            next(iterator)
        while loader.stats().ring_batches < num_full - num_taken + 2:
            time.sleep(0.01)


@pytest.mark.slow
def test_a_full_ring_is_an_error_only_after_a_wait(dataset: Path) -> None:
    """BATCH-1: a caller that was busy for a long time while holding all batches gets the next one if it frees them."""
    with open_loader(dataset, batch_size=2, num_epochs=3, limits={"prefetch_bytes": 0}) as loader:
        iterator = iter(loader)
        held = []
        with pytest.raises(RingFullError):
            while True:
                held.append(next(iterator))
        iterator = iter(loader)  # from now on, the feeder waits for room
        time.sleep(pipeline.RING_WAIT_SECONDS + 1)
        threading.Timer(0.25, held.clear).start()  # freed by another thread while this one waits
        assert len([batch.sample_keys for batch in iterator]) == 34


def test_batches_held_in_unusual_ways(dataset: Path) -> None:
    """BATCH-1: numpy, another thread or a reference cycle may hold a batch, also after the loader has closed.

    Copies are independent.
    """
    with open_loader(dataset, num_workers=2, num_epochs=None, limits={"prefetch_bytes": 0}) as loader:
        iterator = iter(loader)
        array = next(iterator).video.numpy()[0, 1]
        expected = array.copy()
        copied, pickled = (copy.deepcopy(next(iterator)), pickle.loads(pickle.dumps(next(iterator))))
        for owned in (copied, pickled):
            assert owned.video.shape[0] == 1 and owned.bucket in loader.buckets and owned.sample_keys
        copies = [owned.video.clone() for owned in (copied, pickled)]
        received: SimpleQueue[torch.Tensor] = SimpleQueue()
        threads = []
        for number in range(40):
            batch = next(iterator)
            if number % 3 == 0:
                cycle: list[object] = [batch]
                cycle.append(cycle)
                del cycle
            elif number % 3 == 1:
                received.put(batch.video[:, :1])
                threads.append(threading.Thread(target=received.get))
                threads[-1].start()
            del batch
        for thread in threads:
            thread.join()
    del iterator
    assert np.array_equal(array, expected)
    assert torch.equal(copied.video, copies[0]) and torch.equal(pickled.video, copies[1])


def test_epochs_without_a_step_at_the_end_of_a_loop_belong_to_it(tmp_path: Path) -> None:
    """PLAN-2: the next loop has the number of steps that its epochs announce."""
    root = build_dataset(tmp_path, {SMALL: [3]})
    with open_loader(root, batch_size=4, num_epochs=5) as loader:
        counts = []
        for _ in range(3):
            counts.append(len([batch.sample_keys for batch in loader]))
        assert counts == [3, 4, 4] and sum(counts) == loader.num_steps(15)
        assert loader.epoch == 15


def test_a_position_change_ends_the_loop_but_a_refused_one_does_not(dataset: Path) -> None:
    with open_loader(dataset, num_workers=2) as loader:
        iterator = iter(loader)
        first = next(iterator).sample_keys
        state = loader.state_dict()
        for wrong in ({**state, "seed": 1}, {**state, "positions": {"96x64-5f": 10**9}}, {**state, "epoch": -1}):
            with pytest.raises(StateError):
                loader.load_state_dict(wrong)
        with pytest.raises(ConfigError, match="epoch=-1"):
            loader.set_epoch(-1)
        second = next(iterator).sample_keys
        loader.set_epoch(0)
        assert loader.num_steps_left == 21 and len(list(map(id, iterator))) == 21
        loader.load_state_dict(state)
        assert next(iter(loader)).sample_keys == second != first
        iterator = iter(loader)
        next(iterator)
        loader.set_epoch(5)
        with pytest.raises(LoaderError, match="the loader's state or epoch was set"):
            next(iterator)
        assert loader.epoch == 5 and len(list(map(id, loader))) == 23 and loader.epoch == 6


def test_the_ring_is_sized_for_its_largest_bucket(tmp_path: Path) -> None:
    root = build_dataset(tmp_path, {SMALL: [2], LONG: [3]})
    with open_loader(root, batch_size=2, limits={"prefetch_bytes": 0}) as loader:
        largest = 2 * 17 * 64 * 96 * 3
        assert loader.shapes[0] == ("96x64-17f", (2, 3, 17, 64, 96))
        assert 3 * largest <= loader.ring_bytes < 4 * largest + 2 * 10**6


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_unreadable_store_is_an_error_that_names_the_sample(tmp_path: Path, num_workers: int) -> None:
    """BAD-1: a missing tar does not show that its bytes are bad, so its samples are not replaced."""
    root = build_dataset(tmp_path, {SMALL: [2, 2]})
    shard = root / "shards/96x64-5f/96x64-5f-000000.tar"
    shard.unlink()
    for reason in ("No such file", "Is a directory"):
        with (
            open_loader(root, num_workers=num_workers, shuffle="none") as loader,
            pytest.raises(SampleError, match=rf"sample 96x64-5f-0 \(index 0 in .*000000.tar.*{reason}"),
        ):
            list(loader)
        shard.mkdir(exist_ok=True)


def test_a_missing_dataset_or_split_is_an_error(tmp_path: Path, dataset: Path) -> None:
    with pytest.raises(DatasetError, match="no dataset at .*streamvid shard"):
        streamvid.VideoLoader(tmp_path, batch_size=1)
    with pytest.raises(DatasetError, match="split='val' has no samples in .*'train'"):
        streamvid.VideoLoader(dataset, batch_size=1, split="val")


def test_a_plan_without_a_step_is_an_error_with_remedies(dataset: Path) -> None:
    """PLAN-4: the error gives the number of samples and suggests tail='pad'."""
    with pytest.raises(PlanError, match=r"11 of the 100 samples.*tail='pad'"):
        open_loader(dataset, batch_size=100)
    with open_loader(dataset, batch_size=100, tail="pad") as loader:
        assert len(loader) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({}, "exactly one"),
        ({"batch_size": 1, "num_workers": -1}, "num_workers=-1"),
        ({"batch_size": 1, "tail": "keep"}, "tail"),
        ({"batch_size": 1, "num_epochs": 0}, "num_epochs=0"),
        ({"batch_size": {"96x64-5f": 1}}, "64x96-9f"),
    ],
)
def test_invalid_options_are_refused(dataset: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        streamvid.VideoLoader(dataset, **options)  # type: ignore[arg-type]


def test_tokens_decide_the_batch_size(dataset: Path) -> None:
    with streamvid.VideoLoader(dataset, max_tokens_per_batch=200, num_workers=0) as loader:
        assert loader.batch_sizes == {"96x64-5f": 200 // (2 * 4 * 6), "64x96-9f": 200 // (3 * 6 * 4)}


def test_a_state_of_another_dataset_or_order_is_refused(dataset: Path, tmp_path: Path) -> None:
    """PLAN-5: positions are valid only for one dataset, split, seed and shuffle."""
    other = build_dataset(tmp_path, {SMALL: [5], TALL: [3]})
    with open_loader(dataset) as loader:
        state = loader.state_dict()
    for options, name in (
        ({"seed": 1}, "seed is 0"),
        ({"shuffle": "none"}, "shuffle is 'window'"),
        ({"tail": "pad"}, "tail is 'carry'"),  # would lose samples that were carried into the epoch
    ):
        with (
            open_loader(dataset, **options) as loader,  # type: ignore[arg-type]
            pytest.raises(StateError, match=name),
        ):
            loader.load_state_dict(state)
    with (
        open_loader(other) as loader,
        pytest.raises(StateError, match="samples_fingerprint of dataset 0 is"),
    ):
        loader.load_state_dict(state)


def test_a_copied_dataset_is_the_same_dataset(dataset: Path, tmp_path: Path) -> None:
    """FETCH-2: a path and a file:// URL give the same plan and batches, wherever the dataset is stored."""
    copy = tmp_path / "elsewhere"
    shutil.copytree(dataset, copy)
    with open_loader(dataset) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        rest = [batch.sample_keys for batch in iterator]
    with open_loader(f"file://{copy}", state) as loader:
        assert [batch.sample_keys for batch in loader] == rest


def test_wrapping_it_in_a_dataloader_is_an_error_with_a_remedy(dataset: Path) -> None:
    with open_loader(dataset) as loader, pytest.raises(TypeError, match="Do not wrap it in a torch DataLoader"):
        next(iter(torch.utils.data.DataLoader(loader)))  # type: ignore[arg-type]


def test_accelerate_returns_the_loader_unchanged(dataset: Path) -> None:
    # Runs in a separate process, because accelerate keeps one state per process.
    code = "import sys, accelerate, streamvid\n"
    code += "with streamvid.VideoLoader(sys.argv[1], batch_size=1, num_workers=0) as loader:\n"
    code += "    assert accelerate.Accelerator(cpu=True).prepare(loader) is loader"
    run_python(code, dataset)


def test_a_first_batch_imports_only_what_it_needs(dataset: Path) -> None:
    """pyarrow's conversions to numpy import pandas, which takes four times as long as all other imports together.

    numpy.unique imports numpy.ma.
    """
    code = "import sys, streamvid\n"
    code += "with streamvid.VideoLoader(sys.argv[1], batch_size=1, num_workers=0) as loader: next(iter(loader))\n"
    code += "assert not {'pandas', 'numpy.ma'} & set(sys.modules)"
    run_python(code, dataset)
    code = "import sys, streamvid.loader.workers.worker, streamvid.video.decode.stored, streamvid.buckets.pick\n"
    code += "assert not {'streamvid.storage', 'streamvid.buckets.config', 'pyarrow', 'torch'} & set(sys.modules)"
    run_python(code)
