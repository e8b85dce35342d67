"""Tests of the histograms of a dataset's columns: every value is counted once, whatever the values are."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamvid.dataset.reader import Dataset
from streamvid.dataset.versions.open import open_dataset
from streamvid.forecast.histograms import figure_labels, histograms_of
from tests.dataset.samples import BUCKETS, ROW, Part, seal_parts, tar_bytes

KINDS: dict[str, tuple[str, list[Any]]] = {
    "few": ("int64", [1, 2, 2, 5]),
    "wide": ("double", [0.001, 1.0, 30.0, 90000.0]),
    "same": ("double", [0.3, 0.3, 0.3, 0.3]),
    "mixed": ("double", [-1.5, None, 2.5, math.nan]),
    "none": ("double", [None] * 4),
    "huge": ("int64", [-(2**63), 0, 1, 2**63 - 1]),
    "truth": ("bool", [True, False, True, None]),
    "words": ("string", ["a", "b", None, "c"]),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dataset with two shards of two samples each."""
    folder = tmp_path_factory.mktemp("histograms") / "ds"
    rows = [
        replace(ROW, key=f"a-{n}", index=n % 2, text="é" * n or None, columns={k: v[n] for k, (_, v) in KINDS.items()})
        for n in range(4)
    ]
    tars = [tar_bytes([(row.key, {"mp4": b"clp", "txt": b""}) for row in rows[n : n + 2]]) for n in (0, 2)]
    parts = [Part(BUCKETS[0], n, tar, rows[2 * n : 2 * n + 2]) for n, tar in enumerate(tars)]
    seal_parts(folder, BUCKETS[:1], parts, {name: kind for name, (kind, _) in KINDS.items()})
    return folder


def test_each_value_is_in_one_bin(root: Path) -> None:
    dataset = open_dataset(root)
    found = histograms_of(dataset)
    assert found.is_complete and found.hours == pytest.approx(4 * ROW.clip.duration_seconds / 3600)
    figures = {one.name: one for one in found.figures}
    assert list(figures) == list(figure_labels(dataset)) and "user.words" not in figures
    for name, (kind, values) in KINDS.items():
        if kind == "string":
            continue
        figure = figures[f"user.{name}"]
        there = [float(v) for v in values if v is not None and not math.isnan(v)]
        assert (figure.num_values, figure.num_missing) == (len(there), 4 - len(there)), name
        if there:
            assert (figure.minimum, figure.maximum) == (np.float32(min(there)), np.float32(max(there)))
            assert figure.median == pytest.approx(float(np.median(there)), rel=1e-6)
            expected, _ = np.histogram(np.float32(there), figure.edges)
            assert figure.counts == tuple(expected) and list(figure.edges) == sorted(figure.edges)
        else:
            assert figure.edges == () and figure.to_json()["mean"] is None
    assert figures["user.few"].counts == (1, 2, 0, 0, 1)
    assert figures["user.same"].edges == (np.float32(0.3),) * 2
    wide = figures["user.wide"]
    assert (wide.edges[0], wide.edges[-1]) == (wide.minimum, wide.maximum), "bin labels show the bounds"
    assert sum(count > 0 for count in figures["user.wide"].counts) == 4
    assert figures["caption_length"].maximum == 3 and figures["caption_length"].minimum == 0


def test_samples_outside_the_view_are_not_counted(root: Path) -> None:
    whole = open_dataset(root)
    found = histograms_of(Dataset(whole.store, manifest=whole.manifest, where="few == 2"))
    assert (found.num_samples, found.num_scanned) == (2, 2)
    assert found.hours == pytest.approx(2 * ROW.clip.duration_seconds / 3600)
    assert {one.num_values + one.num_missing for one in found.figures} == {2}
    (few,) = (one for one in found.figures if one.name == "user.few")
    assert (few.minimum, few.maximum) == (2, 2)


def test_large_datasets_are_read_in_part(root: Path) -> None:
    found = histograms_of(open_dataset(root), max_samples=2)
    assert not found.is_complete and found.num_scanned == 2 and found.num_samples == 4
    assert found.hours == pytest.approx(4 * ROW.clip.duration_seconds / 3600)
