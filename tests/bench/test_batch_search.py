"""Tests of search_batch_sizes: the largest batch for the base bucket, then others limited by its step time.

Open-Sora checklist, row 37.
"""

from __future__ import annotations

import json
import math
import sys
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid import CostTable, VideoLoader, World, fit_costs, search_batch_sizes
from streamvid.bench.batch_search import Trial
from streamvid.errors import ConfigError
from tests.loader.conftest import LONG, SMALL, TALL, build_dataset
from tools import search_batch_sizes as tool

SHAPES = [
    ("832x480-81f", (7, 3, 81, 480, 832)),
    ("832x480-17f", (7, 3, 17, 480, 832)),
    ("480x832-17f", (7, 3, 17, 832, 480)),
    ("832x480-1f", (7, 3, 1, 480, 832)),
]


class Model:
    """Model with a known step cost and memory limit; its clock counts the cost of its steps."""

    def __init__(self, memory: int, constant: int, per_pair: int) -> None:
        self.memory, self.constant, self.per_pair = memory, constant, per_pair
        self.now = 0

    def tokens(self, shape: tuple[int, ...]) -> int:
        return -(-shape[-3] // 4) * (shape[-2] // 16) * (shape[-1] // 16)

    def cost(self, shape: tuple[int, ...]) -> int:
        tokens = self.tokens(shape)
        return self.constant + shape[0] * tokens * 1000 + shape[0] * tokens * tokens * self.per_pair

    def fits(self, shape: tuple[int, ...]) -> bool:
        return shape[0] * self.tokens(shape) <= self.memory

    def step(self, shape: tuple[int, ...]) -> None:
        if not self.fits(shape):
            raise MemoryError(f"{shape} is too large")
        self.now += self.cost(shape)

    def best(self, base: str, most: int) -> dict[str, int]:
        """Return the expected result by trying all sizes."""
        shapes = dict(SHAPES)

        def largest(name: str, limit: float) -> int:
            sizes = [(n, *shapes[name][1:]) for n in range(1, most + 1)]
            return max([s[0] for s in sizes if self.fits(s) and self.cost(s) <= limit], default=0)

        of_base = largest(base, math.inf)
        limit = self.cost((of_base, *shapes[base][1:]))
        return {base: of_base} | {name: largest(name, limit) for name in shapes if name != base}


@settings(max_examples=4, deadline=None)
@given(
    memory=st.integers(32_760, 2_000_000), constant=st.integers(0, 10**9), per_pair=st.integers(0, 5),
    most=st.integers(1, 300), base=st.sampled_from([None, "832x480-17f"]),
)  # fmt: skip
def test_the_sizes_are_the_best_by_cost_and_memory(
    memory: int, constant: int, per_pair: int, most: int, base: str | None
) -> None:
    """Open-Sora checklist, row 37: the result equals a full search, for any cost model that grows with the batch."""
    model = Model(memory, constant, per_pair)
    found = search_batch_sizes(
        model.step, SHAPES, base=base, max_batch_size=most, warmup=1, steps=3, clock=lambda: float(model.now)
    )
    best = model.best(base or "832x480-81f", most)
    assert dict(found.sizes) == {name: max(1, size) for name, size in best.items()}
    assert found.slower == tuple(name for name, _ in SHAPES if best[name] == 0)
    assert found.too_large == ()
    for name, size in found.sizes.items():
        assert found.seconds[name] == model.cost((size, *dict(SHAPES)[name][1:]))
    assert len({(t.bucket_id, t.batch_size) for t in found.trials}) == len(found.trials) <= 20 * len(SHAPES)


def test_a_bucket_too_large_for_one_sample_is_reported_and_the_others_are_kept() -> None:
    model = Model(memory=10_000, constant=0, per_pair=0)
    with pytest.raises(ConfigError, match="not even one sample from bucket 832x480-81f fits in memory"):
        search_batch_sizes(model.step, SHAPES, clock=lambda: float(model.now))
    found = search_batch_sizes(model.step, SHAPES, base="832x480-17f", clock=lambda: float(model.now))
    assert found.too_large == ("832x480-81f",)
    assert dict(found.sizes) == {"832x480-17f": 1, "480x832-17f": 1, "832x480-1f": 5}
    assert Trial("832x480-81f", 1, None) in found.trials


def test_only_out_of_memory_counts_as_too_large() -> None:
    """Open-Sora's tool treats every error as out of memory, and so finds sizes for a broken step."""

    def broken(shape: tuple[int, ...]) -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        search_batch_sizes(broken, SHAPES)

    def of_torch(shape: tuple[int, ...]) -> None:
        if shape[0] > 3:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    found = search_batch_sizes(of_torch, SHAPES, clock=lambda: 0.0)
    assert set(found.sizes.values()) == {3}


def test_tensors_of_a_failed_step_are_released_before_the_next_batch() -> None:
    """Memory held by a step that ran out of memory must be released before the next step."""
    failed: list[weakref.ref[torch.Tensor]] = []

    def step(shape: tuple[int, ...]) -> None:
        held = torch.zeros(3)
        assert all(reference() is None for reference in failed), "a failed step's tensor is still held"
        if shape[0] > 4:
            failed.append(weakref.ref(held))
            raise MemoryError

    found = search_batch_sizes(step, SHAPES, clock=lambda: 0.0)
    assert set(found.sizes.values()) == {4}
    assert failed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shapes": []}, "shapes is empty"),
        ({"shapes": [*SHAPES, SHAPES[0]]}, "shapes contains bucket '832x480-81f' more than once"),
        ({"shapes": [("a", (1,))]}, r"shapes\['a'\]=\(1,\)"),
        ({"base": "640x480-81f"}, "base='640x480-81f' is not a bucket in shapes; allowed: 832x480-81f"),
        ({"max_batch_size": 0}, "max_batch_size=0"),
        ({"warmup": -1}, "warmup=-1"),
        ({"steps": 0}, "steps=0"),
        ({"tolerance": 2.0}, "tolerance=2.0"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search_batch_sizes(lambda shape: None, **({"shapes": SHAPES} | arguments))  # type: ignore[arg-type]


def test_results_of_a_torch_step_work_as_batch_sizes_and_as_costs(tmp_path: Path) -> None:
    """Open-Sora checklist, row 37: with a real model and optimizer, the loader delivers batches of the found sizes."""
    root = build_dataset(tmp_path / "ds", {SMALL: [8], TALL: [8], LONG: [8]})
    with VideoLoader(root, batch_size=1, world=World(0, 1), num_workers=0) as loader:
        shapes, buckets = loader.shapes, loader.buckets
    model = torch.nn.Conv3d(3, 4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(shape: tuple[int, ...]) -> None:
        if math.prod(shape) > 3 * 3 * 17 * 64 * 96:
            raise MemoryError
        optimizer.zero_grad()
        model(torch.rand(shape)).mean().backward()
        optimizer.step()

    found = search_batch_sizes(step, shapes, warmup=1, steps=2, max_batch_size=4)
    assert found.base == LONG.id
    assert found.sizes[LONG.id] == 3
    assert all(1 <= size <= 4 and found.seconds[name] > 0 for name, size in found.sizes.items())
    for name in set(found.sizes) - {found.base} - set(found.slower):
        assert found.seconds[name] <= found.seconds[found.base]
    assert isinstance(fit_costs(found.measurements, buckets), CostTable)
    json.dumps(found.to_json())
    with VideoLoader(root, batch_size=found.sizes, world=World(0, 1), num_workers=0, tail="pad") as loader:
        delivered = {batch.bucket.id: len(batch.sample_keys) for batch in loader}
    assert delivered == dict(found.sizes)


FACTORY = """
def make_step():
    def step(shape):
        if shape[0] * shape[2] > 40:
            raise MemoryError
    return step

def broken():
    return None
"""


def test_the_tool_prints_a_batch_size_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = build_dataset(tmp_path / "ds", {SMALL: [2], LONG: [2]})
    (tmp_path / "steps_of_a_user.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    arguments = [str(root), "--warmup", "0", "--steps", "1", "--tolerance", "1", "--max-batch-size", "4"]
    assert tool.main([*arguments, "--factory", "steps_of_a_user:make_step", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["base"] == LONG.id
    assert found["batch_size"][LONG.id] == 2
    assert tool.main([*arguments, "--factory", "steps_of_a_user:make_step"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("batch_size:\n")
    assert f"  {LONG.id}: 2\n" in printed.out
    assert f"{LONG.id} x 4: out of memory" in printed.err
    for factory in ("steps_of_a_user:nothing", "no_such_module:make", "steps_of_a_user", "steps_of_a_user:broken"):
        assert tool.main([*arguments, "--factory", factory]) == 2
        assert "--factory" in capsys.readouterr().err
