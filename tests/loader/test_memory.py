"""Acceptance tests of memory use, measured by tools/bench_memory.py over the loader's whole process tree."""

from __future__ import annotations

import pytest

from tests.processes import run_tool


def check(*arguments: object) -> None:
    result = run_tool("bench_memory", *arguments, timeout=1200)
    decoders = result["workers"] * result["decoder_bytes"]
    assert result["bound_bytes"] == pytest.approx(1.1 * (result["ring_bytes"] + decoders), rel=1e-6)
    # The ring was full during the measurement, and never exceeds the announced size.
    assert 0.6 * result["ring_bytes"] < result["peak_shared_bytes"] <= result["ring_bytes"] + 64 * 1024
    assert result["peak_bytes"] <= result["bound_bytes"], result
    assert result["growth_bytes"] < 0.1 * result["bound_bytes"], result


@pytest.mark.timeout(900)
def test_streaming_1080p_takes_only_the_ring_and_its_decoders() -> None:
    """At this size, frames that outlive their decode show as growth.

    A reference cycle through PyAV's frames kept one frame per clip.
    """
    check("--clips", 3, "--frames", 50, "--epochs", 5, "--batch-size", 1, "--prefetch-bytes", 2**26)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_twenty_epochs_of_1080p_stay_within_the_bound(workers: int) -> None:
    check("--workers", workers, "--epochs", 20)
