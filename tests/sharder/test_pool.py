"""Tests of the local engine with tasks that kill, hang, exhaust memory and fail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from streamvid.errors import SourceError, StreamvidError
from streamvid.sharder.work.pool import Crash, Pool, timed_out


@pytest.fixture
def held_fd() -> Iterator[int]:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def run(tasks: list[Any], held_fd: int, num_workers: int = 2, **limits: Any) -> dict[int, Any]:
    with Pool("tests.sharder.tasks:handle", num_workers, held_fd, **limits) as pool:
        results = list(pool.run(len(tasks), tasks.__getitem__))
    assert len(results) == len(tasks)
    return dict(results)


def test_every_task_has_its_own_answer(held_fd: int) -> None:
    tasks = [["echo", {"n": number, "none": None}] for number in range(50)]
    assert run(tasks, held_fd, 3) == {number: task[1] for number, task in enumerate(tasks)}


def test_only_workers_that_open_stores_receive_credentials(held_fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SAFE-1: a file that takes over a decoder finds no credentials in its environment."""
    secrets = {"AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "HTTPS_PROXY"}
    for name in secrets:
        monkeypatch.setenv(name, "canary")
    alone = set(run([["environment", None]], held_fd)[0])
    assert "PATH" in alone and not alone & secrets
    assert secrets <= set(run([["environment", None]], held_fd, opens_stores=True)[0])


@pytest.mark.parametrize("module", ["units.probe_unit", "units.encode_unit", "build"])
def test_the_modules_of_workers_import_little(held_fd: int, module: str) -> None:
    heavy = {"torch", "pandas"} if module == "build" else {"torch", "pandas", "pyarrow", "numpy"}
    (modules,) = run([["modules", f"streamvid.sharder.{module}"]], held_fd).values()
    assert f"streamvid.sharder.{module}" in modules and not heavy & set(modules)


def test_a_poisonous_task_is_found_and_affects_no_other(held_fd: int) -> None:
    """SHARD-3: segmentation faults, kills, exits and endless tasks are identified, and all other tasks succeed."""
    tasks = [["echo", number] for number in range(20)]
    tasks[3], tasks[9], tasks[14] = ["signal", 11], ["exit", 3], ["sleep", 100]
    results = run(tasks, held_fd, timeout_seconds=2.0)
    assert results.pop(3) == Crash(11)
    assert results.pop(9) == Crash(0)
    assert timed_out(results.pop(14))
    assert results == {number: task[1] for number, task in enumerate(tasks) if task[0] == "echo"}


def test_memory_is_limited(held_fd: int) -> None:
    results = run([["allocate", 2**31], ["echo", 1]], held_fd, memory_bytes=2**30)
    assert results == {0: "MemoryError", 1: 1}


def test_package_errors_are_raised_unchanged(held_fd: int) -> None:
    with pytest.raises(SourceError, match="^no such thing$"):
        run([["raise", "no such thing"]], held_fd)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run([["divide", 0]], held_fd)


def test_workers_that_cannot_start_are_an_error_and_not_a_rejection(
    held_fd: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        Pool("tests.sharder.no_such_module:handle", 2, held_fd) as pool,
        pytest.raises(StreamvidError, match="before its first unit of work"),
    ):
        list(pool.run(3, lambda number: number))
    assert "no_such_module" in capfd.readouterr().err
