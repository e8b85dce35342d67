"""Tests of the plan comparison before the first step: every process names the differences, and none waits forever."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from streamvid.errors import StreamvidError
from streamvid.loader.exchange import check_equal_on_all_ranks
from streamvid.loader.loader import VideoLoader
from streamvid.loader.mix import DatasetConfig
from streamvid.loader.state import plan_identity
from streamvid.loader.view.text import TextOptions
from streamvid.plan import Cursor, PlanOptions
from streamvid.plan.cost import CostTable, fit_costs
from streamvid.plan.position import World
from tests.loader.conftest import SMALL, TALL, build_dataset
from tests.loader.launched import launch

ME = "tests.loader.test_exchange"


def test_one_process_compares_nothing() -> None:
    check_equal_on_all_ranks({"seed": 0}, World(1, 4))


def identity_of(loader: VideoLoader) -> dict[str, str | int]:
    return {
        "dataset": loader.dataset.manifest.fingerprints.plan,
        "batch_sizes": hashlib.sha256(repr(sorted(loader.batch_sizes.items())).encode()).hexdigest(),
        "seed": loader.options.seed,
        "tail": loader.options.tail,
    }


def error_of(identity: Mapping[str, Any], world: World, **options: Any) -> str | None:
    try:
        check_equal_on_all_ranks(identity, world, **options)
    except StreamvidError as error:
        return f"{type(error).__name__}: {error}"
    return None


def measured(seconds: float) -> CostTable:
    return fit_costs([(SMALL.id, 1, 1.0), (TALL.id, 1, seconds)] * 3, [SMALL, TALL])


# Runs in each of three processes.


def compare(one: str, other: str) -> dict[str, str | None]:
    import torch.distributed as dist

    me = dist.get_rank()

    def of_loader(dataset: str = one, **options: Any) -> str | None:
        with VideoLoader(dataset, num_workers=0, **({"batch_size": 2} | options)) as loader:
            return error_of(identity_of(loader), loader.world)

    def of_loop(*datasets: str | DatasetConfig, step: int = 0, **options: Any) -> str | None:
        with VideoLoader(datasets, num_workers=0, **({"batch_size": 1} | options)) as loader:
            loader.set_epoch(0, step=step)
            try:
                next(iter(loader))
            except StreamvidError as error:
                return f"{type(error).__name__}: {error}"
        return None

    outer = dist.new_group([0, 2])
    assert outer is not None
    results = {
        "equal": of_loader(),
        "seed": of_loader(seed=me % 2),
        "two": of_loader(seed=me, batch_size=2 if me else 1),
        "dataset": of_loader(other if me == 2 else one),
        "long": error_of({"where": "x" * 200 + str(me % 2)}, World(me, 3)),
        "absent": error_of({"a": 1} if me else {}, World(me, 3)),
        "num_ranks": error_of({}, World(0, me // 2 + 1)),
        "duplicate": error_of({}, World(min(me, 1), 3)),
        "uneven": error_of({}, World(min(me, 1), 2)),
        "shared by all": error_of({}, World(0, 1)),
        "shared by none": error_of({}, World(0, 1), processes_per_rank=1),
    }
    config = DatasetConfig
    results |= {
        "loop": of_loop(one),
        "loop where": of_loop(config(one, where="year < 2004" if me else None)),
        "loop bucket": of_loop(config(one, where="clip_height < 150" if me else None)),
        "loop repeats": of_loop(one, config(other, num_repeats=1 + me)),
        "loop name": of_loop(one, config(other, name="b" if me else "a")),
        "loop datasets": of_loop(one, other) if me else of_loop(one),
        "loop dataset": of_loop(one, other if me else one),
        "loop sizes": of_loop(one, batch_size={"96x64-5f": 1 + me % 2, "64x96-9f": 1}),
        "loop step": of_loop(one, step=me),
        "loop long": of_loop(config(one, where=f"place != {'x' * 300 + str(me)!r}")),
        "loop costs": of_loop(one, schedule={"costs": measured(1 + me % 2), "order": "largest-first"}),
        "loop seed": of_loop(one, seed=me, num_epochs=1 + me),
        "loop own world": of_loop(one, seed=me, world=World(me, 3)),
        "loop other worlds": of_loop(one, seed=me, world=World(0, 1)),
        "loop locality": of_loop(one, schedule={"shard_locality": 8 if me else 64}),
        "loop follow": of_loop(one, schedule={"follow": me > 0}),
        "loop view": of_loop(one, view={"temporal": "middle" if me else "random"}),
        "loop layout": of_loop(one, output={"layout": "BTCHW" if me else "BCTHW"}),
        "loop captions": of_loop(config(one, captions=TextOptions(dropout=0.1 * me))),
    }
    if me != 1:
        results["part"] = error_of({"seed": 0}, World(me // 2, 2), group=outer)
        results["part differs"] = error_of({"seed": me}, World(me // 2, 2), group=outer)
    return results | {"equal again": of_loader()}


def one_is_missing(folder: str) -> list[str | None]:
    import torch.distributed as dist

    me = dist.get_rank()
    some = dist.new_group([0, 1, 2])
    given_up = [Path(folder) / f"given-up-{process}" for process in (0, 2)]
    if me == 1:
        end = time.monotonic() + 60
        while not all(path.exists() for path in given_up) and time.monotonic() < end:
            time.sleep(0.1)
        return []
    stands_still = error_of({"seed": 0}, World(me, 3), group=some, timeout_seconds=2)
    given_up[me // 2].touch()
    has_ended = error_of({"seed": 0}, World(me, 3), timeout_seconds=2)
    return [stands_still, has_ended]


@pytest.fixture(scope="module")
def results(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    folder = tmp_path_factory.mktemp("compare")
    other = build_dataset(folder / "other", {SMALL: [5, 4]})
    return launch(ME, "compare", 3, folder, dataset, other)


def test_equal_loaders_pass_also_after_others_failed(results: list[dict[str, str | None]]) -> None:
    for mine in results:
        assert mine["equal"] is mine["equal again"] is mine["shared by all"] is mine["loop other worlds"] is None
    assert results[0]["part"] is results[2]["part"] is None


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("seed", "seed is 0 on processes 0, 2, 1 on process 1"),
        ("two", "seed is 0 on process 0, 1 on process 1, 2 on process 2"),
        ("two", "batch_sizes is"),
        ("dataset", "on processes 0-1, "),
        ("long", "(sha256 "),
        ("absent", "a is 1 on processes 1-2, absent on process 0"),
        ("num_ranks", "num_ranks is 1 on processes 0-1, 2 on process 2"),
        (
            "duplicate",
            "of the 3 ranks must have the same number of processes, but rank 1 has processes 1-2, rank 2 has no process",
        ),
        ("uneven", "each of the 2 ranks must have the same number of processes, but rank 0 has process 0"),
        ("shared by none", "rank 0 has processes 0-2"),
    ],
)
def test_all_processes_name_the_same_differences(results: list[dict[str, str | None]], case: str, says: str) -> None:
    """PLAN-1, PLAN-2: ranks can have the same steps only if the inputs of their plans are the same."""
    messages = {mine[case] for mine in results}
    assert len(messages) == 1
    message = str(messages.pop())
    assert message.startswith("ConfigError: ")
    assert says in message


OF_SECOND = tuple(f"{name} of dataset 1" for name in ("version", "samples_fingerprint", "where", "num_repeats", "name"))


@pytest.mark.parametrize(
    ("case", "says", "then"),
    [
        ("where", 'where of dataset 0 is "(`user.year`) < (2004)" on processes 1-2, null on process 0', ()),
        ("bucket", 'where of dataset 0 is "(`clip_height`) < (150)" on processes 1-2', ("batch_sizes", "position")),
        ("repeats", 'num_repeats of dataset 1 is "1" on process 0, "2" on process 1, "3" on process 2', ()),
        ("name", 'name of dataset 1 is "b" on processes 1-2, "a" on process 0', ()),
        (
            "datasets",
            "number of datasets is 2 on processes 1-2, 1 on process 0",
            ("name of dataset 0", *OF_SECOND, "captions of dataset 1"),
        ),
        ("dataset", 'samples_fingerprint of dataset 1 is "', ()),
        (
            "sizes",
            'batch_sizes is {"64x96-9f": 1, "96x64-5f": 1} on processes 0, 2, {"64x96-9f": 1, "96x64-5f": 2}',
            (),
        ),
        ("step", 'position is {"epoch": 0, "positions": {"64x96-9f": ', ()),
        ("long", "where of dataset 0 is \"(`user.place`) != ('xxx", ()),
        ("costs", "costs is {", ()),
        ("seed", "seed is 0 on process 0, 1 on process 1, 2 on process 2", ("num_epochs",)),
        ("own world", "seed is 0 on process 0, 1 on process 1, 2 on process 2", ()),
        ("locality", "shard_locality is 8 on processes 1-2, 64 on process 0", ()),
        ("follow", "schedule.follow is true on processes 1-2, false on process 0", ()),
        ("view", 'temporal is "middle" on processes 1-2, "random" on process 0', ()),
        ("layout", 'layout is "BTCHW" on processes 1-2, "BCTHW" on process 0', ()),
        ("captions", 'captions of dataset 0 is [{"text": 1.0}, "draw", null, "", 0.0, 0.0] on process 0', ()),
    ],
)
def test_a_loop_that_differs_names_the_cause_first(
    results: list[dict[str, str | None]], case: str, says: str, then: tuple[str, ...]
) -> None:
    """PLAN-1, PLAN-2: the error names the argument that differs, as the caller knows it, before its consequences."""
    assert results[0]["loop"] is None
    message = str(results[0][f"loop {case}"])
    assert {mine[f"loop {case}"] for mine in results} == {message}
    named = message.partition("differ: ")[2].rpartition(". Give every")[0]
    assert named.startswith(says)
    assert [text.partition(" is ")[0] for text in named.split("; ")] == [says.partition(" is ")[0], *then]
    if "fingerprint" not in named:
        assert not re.search("[0-9a-f]{16}", named) and len(named) < 700, named


def test_every_plan_option_is_compared() -> None:
    """PLAN-2: the identity contains everything that a plan depends on, and includes new options automatically."""
    options = PlanOptions()
    belongs_to = {"datasets": [], "split": "train", **options.order_key(), "tail": options.tail}
    identity = plan_identity(belongs_to, Cursor(), options, {})
    assert {option.name: getattr(options, option.name) for option in fields(options)}.items() <= identity.items()


def test_only_differences_are_named(results: list[dict[str, str | None]]) -> None:
    message = str(results[0]["dataset"])
    assert "dataset is" in message and "seed" not in message and "tail" not in message


def test_members_of_a_group_are_named_by_global_number(results: list[dict[str, str | None]]) -> None:
    assert results[0]["part differs"] == results[2]["part differs"]
    assert "seed is 0 on process 0, 2 on process 2" in str(results[0]["part differs"])


def test_a_missing_process_is_an_error_in_time(tmp_path: Path) -> None:
    """STOP-1: there is never a hang, whether the missing process is alive or not, and all others end on their own."""
    first, _, last = launch(ME, "one_is_missing", 3, tmp_path / "run", tmp_path)
    for message in (*first, *last):
        assert message.startswith("LoaderError: the loaders of all processes could not be compared (time limit: 2 s)")
    assert "Ranks 1" in first[0] and "failed to pass" in first[0]
