"""The same loader where there is CUDA: pinned batches, copies that are right however soon the batch dies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import streamvid

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def test_batches_are_pinned(dataset: Path) -> None:
    with streamvid.VideoLoader(dataset, batch_size=2, num_workers=2) as loader:
        for batch in loader:
            assert batch.video.is_pinned()


def test_a_copy_in_flight_outlives_its_batch(dataset: Path) -> None:
    """BATCH-1: a ring slot is not used again before the copies queued from it are over."""
    options = {"batch_size": 1, "num_workers": 2, "num_epochs": 6, "prefetch_bytes": 0}
    with streamvid.VideoLoader(dataset, **options) as loader:  # type: ignore[arg-type]
        expected = [batch.video.clone() for batch in loader]
    with streamvid.VideoLoader(dataset, **options) as loader:  # type: ignore[arg-type]
        busy = torch.randn(4096, 4096, device="cuda")
        copies = []
        for batch in loader:
            busy = busy @ busy / 64  # keeps the stream behind, so that copies start late
            copies.append(batch.to("cuda").video)
    for copy, right in zip(copies, expected, strict=True):
        assert torch.equal(copy.cpu(), right)
