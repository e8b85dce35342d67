"""Tests of processes that share batches: within a rank, batches are equal, or the difference is named.

There are 2 ranks of 2 processes each.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError, SharedBatchError
from streamvid.ledger.history import read_history
from streamvid.loader.batch.batch import Batch
from streamvid.loader.exchange import SharedBatchCheck, check_equal_on_all_ranks
from streamvid.loader.loader import VideoLoader
from streamvid.loader.world import world_from_mesh
from streamvid.plan.position import World
from tests.loader.conftest import SMALL
from tests.loader.launched import launch

ME = "tests.loader.test_shared_batch"
BATCH_SIZE = 2


# Runs in each of four processes.


def share(dataset: str, damaged: str) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    world, group, me = world_from_mesh(mesh, "dp"), mesh["tp"].get_group(), dist.get_rank()
    with VideoLoader(dataset, world=world, batch_size=BATCH_SIZE, num_workers=0) as loader:
        check_equal_on_all_ranks({"seed": loader.options.seed}, world, dist.group.WORLD, processes_per_rank=2)
        results: dict[str, Any] = {"world": [world.rank, world.num_ranks], "worlds": worlds_of(mesh)}
        check = SharedBatchCheck(world, group)
        batches = []
        for step, batch in enumerate(loader):
            check.batch(0, step, digest_of(batch), batch.sample_keys)
            batches.append((digest_of(batch), batch.sample_keys))
        check.end(0)
        results["batches"] = batches

        def as_is(step: int, batch: Batch) -> tuple[int, int, list[str]]:
            return step, digest_of(batch), batch.sample_keys

        def other_pixels(step: int, batch: Batch) -> tuple[int, int, list[str]]:
            if (me, step) == (3, 1):
                batch.video.zero_()
            return as_is(step, batch)

        def other_sample(step: int, batch: Batch) -> tuple[int, int, list[str]]:
            place, digest, keys = as_is(step, batch)
            return (place, ~digest, [keys[0], "another"]) if (me, step) == (3, 1) else (place, digest, keys)

        def one_ahead(step: int, batch: Batch) -> tuple[int, int, list[str]]:
            return step + (me == 3), digest_of(batch), batch.sample_keys

        for name, of_batch in {"pixels": other_pixels, "sample": other_sample, "step": one_ahead}.items():
            results[name] = run_epoch(loader, SharedBatchCheck(world, group), of_batch)
        results["rank"] = run_epoch(loader, SharedBatchCheck(World(me % 2, 2), group), as_is)
        results["end"] = run_epoch(loader, SharedBatchCheck(world, group), as_is, num_steps=2 if me == 3 else 3)
        results["loaders"] = wired(dataset, damaged, world, group)
        if me != 3:
            results["gone"] = run_epoch(loader, SharedBatchCheck(world, group), as_is)
    return results


def wired(dataset: str, damaged: str, world: World, group: Any) -> dict[str, Any]:
    """Return results of whole loaders: the keys of two epochs, then a bad clip and another seed on process 3."""
    import torch.distributed as dist

    me, groups = dist.get_rank(), {"world": world, "groups": {"process_group": dist.group.WORLD, "shared_group": group}}
    results: dict[str, Any] = {}
    output = {"ledger": Path(damaged).with_name("ledger")}
    with VideoLoader(dataset, batch_size=BATCH_SIZE, num_workers=0, num_epochs=2, output=output, **groups) as loader:
        results["keys"] = [batch.sample_keys for batch in loader]
    results["ledger"] = str(output["ledger"])
    root = damaged if me == 3 else dataset
    with VideoLoader(root, batch_size=BATCH_SIZE, num_workers=0, limits={"max_bad_fraction": 1.0}, **groups) as loader:
        results["bad clip"] = outcome(loader)
    with VideoLoader(dataset, batch_size=BATCH_SIZE, num_workers=0, seed=int(me == 3), **groups) as loader:
        results["seed"] = outcome(loader)
    return results


def outcome(loader: VideoLoader) -> list[str]:
    try:
        list(map(id, loader))
    except (ConfigError, SharedBatchError) as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def digest_of(batch: Batch) -> int:
    """Return a 64-bit digest of all pixels and keys."""
    data = repr(batch.sample_keys).encode() + batch.video.contiguous().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())


def run_epoch(
    loader: VideoLoader, check: SharedBatchCheck, of_batch: Callable[..., Any], num_steps: int = 3
) -> list[Any]:
    """Run the first steps of an epoch, numbered as epoch 7. Return [last step that began, error]."""
    step = -1
    try:
        for step, batch in zip(range(num_steps), loader, strict=False):
            check.batch(7, *of_batch(step, batch))
        check.end(7)
    except SharedBatchError as error:
        return [step, str(error)]
    return [step, None]


def worlds_of(mesh: Any) -> list[list[int]]:
    """Return the worlds for other choices of data dimensions, and check that invalid choices raise."""
    results: list[Any] = []
    for names in (("dp", "tp"), ("tp", "dp"), ("tp",)):
        world = world_from_mesh(mesh, *names)
        results.append([world.rank, world.num_ranks])
    for names in ((), ("cp",), ("dp", "dp")):
        with pytest.raises(ConfigError, match="data_dims="):
            world_from_mesh(mesh, *names)
    return results


@pytest.fixture(scope="module")
def results(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    damaged = tmp_path_factory.mktemp("damaged") / "copy"
    shutil.copytree(dataset, damaged)
    for shard in open_dataset(damaged).shards:  # one byte of the first clip in each shard of one bucket
        if shard.bucket_id == SMALL.id:
            data = bytearray((damaged / shard.path).read_bytes())
            for row in open_dataset(damaged).samples(shard).to_pylist()[:1]:
                data[row["clip_offset"] + 40] ^= 255
            (damaged / shard.path).write_bytes(data)
    return launch(ME, "share", 4, tmp_path_factory.mktemp("share") / "run", dataset, damaged)


def test_a_mesh_determines_which_processes_share_a_rank(results: list[dict[str, Any]]) -> None:
    assert [mine["world"] for mine in results] == [[0, 2], [0, 2], [1, 2], [1, 2]]
    both, swapped, only_tp = zip(*(mine["worlds"] for mine in results), strict=True)
    assert list(both) == [[0, 4], [1, 4], [2, 4], [3, 4]]  # the last dimension changes fastest
    assert list(swapped) == [[0, 4], [2, 4], [1, 4], [3, 4]]
    assert list(only_tp) == [[0, 2], [1, 2], [0, 2], [1, 2]]


def test_batches_are_the_same_within_a_rank_and_disjoint_between_ranks(results: list[dict[str, Any]]) -> None:
    """PLAN-2, PLAN-4: processes of one rank receive equal keys and pixels at each step.

    No two ranks receive the same sample.
    """
    assert results[0]["batches"] == results[1]["batches"]
    assert results[2]["batches"] == results[3]["batches"]
    of_ranks = [[key for _, keys in results[process]["batches"] for key in keys] for process in (0, 2)]
    assert len(of_ranks[0]) == len(of_ranks[1]) == BATCH_SIZE * len(results[0]["batches"]) > 0
    assert len({*of_ranks[0], *of_ranks[1]}) == 2 * len(of_ranks[0])


@pytest.mark.parametrize("case", ["pixels", "sample", "step", "end"])
def test_only_the_rank_that_differs_fails(results: list[dict[str, Any]], case: str) -> None:
    assert results[0][case] == results[1][case] == [2, None]
    assert results[2][case][1] is not None


@pytest.mark.parametrize(
    ("case", "place", "says"),
    [
        ("pixels", "step 1 of epoch 7", "have different contents (digest "),
        ("sample", "step 1 of epoch 7", 'the sample in slot 1 is "'),
        ("sample", "step 1 of epoch 7", '"another" on process 3'),
        ("step", "step 0 of epoch 7", "step 0 of epoch 7 on process 2, step 1 of epoch 7 on process 3"),
        (
            "rank",
            "step 0 of epoch 7",
            "rank 0 on process 2, rank 1 on process 3. Pass the same world=World(rank, num_ranks)",
        ),
    ],
)
def test_all_members_name_the_difference(results: list[dict[str, Any]], case: str, place: str, says: str) -> None:
    """The error is exactly one step late: the batch that differs was handed out, but the next one is not."""
    assert results[2][case] == results[3][case]
    for mine in results[2:]:
        step, message = mine[case]
        assert f"differ at {place}: " in message
        assert says in message
        assert step == (2 if place.startswith("step 1") else 1)


def test_a_member_that_ends_its_epoch_early_is_named(results: list[dict[str, Any]]) -> None:
    """PLAN-2: no member waits for a step that its peer does not have."""
    for mine in results[2:]:
        assert "step 2 of epoch 7 on process 2, the end of epoch 7 on process 3" in mine["end"][1]


def test_a_member_that_has_exited_is_an_error(results: list[dict[str, Any]]) -> None:
    """STOP-1: its peer notices at the next step because the connection closes, and does not wait for the timeout."""
    assert results[0]["gone"] == results[1]["gone"] == [2, None]
    assert (
        "processes 2-3 share batches, but not all of these processes reached step 0 of epoch 7: "
        in results[2]["gone"][1]
    )


def test_one_process_per_rank_writes_the_ledger(results: list[dict[str, Any]]) -> None:
    (attempt,) = read_history(Path(results[0]["loaders"]["ledger"]))
    for rank in range(2):
        logged = [[sample.key for sample in batch.samples] for _, batch, counts in attempt.batches(rank) if counts]
        assert logged == results[2 * rank]["loaders"]["keys"]


def test_a_loader_compares_automatically(results: list[dict[str, Any]]) -> None:
    """PLAN-2, BAD-1: with `process_group` and `shared_group`, every loop compares plans and every step its batches.

    A clip that is bad for only one member is replaced there, and all members of its rank report the difference.
    """
    loaders = [mine["loaders"] for mine in results]
    assert loaders[0]["keys"] == loaders[1]["keys"] and loaders[2]["keys"] == loaders[3]["keys"]
    for mine in loaders[2:]:
        assert mine["bad clip"][0] == "SharedBatchError" and "on process 3" in mine["bad clip"][1]
    assert [mine["bad clip"][0] for mine in loaders[:2]] == ["", ""]
    for mine in loaders:
        assert mine["seed"] == loaders[0]["seed"] and mine["seed"][0] == "ConfigError"
        assert "seed" in mine["seed"][1] and "3" in mine["seed"][1]
