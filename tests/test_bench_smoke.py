"""Tests of tools/bench_smoke.py: what it reports as slower, and what it does not."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clips import ROOT
from tests.processes import run_command
from tools.bench_smoke import REFERENCE, cpu_seconds, exit_code, interval, judge, measure

REFERENCES = {"copy": 1.6, "native": 1.2}


def noisy(line: str, factor: float, count: int = 15, noise: float = 0.04) -> list[float]:
    """Return ratios like those of a run in which the library takes `factor` times as long."""
    draw = random.Random(f"{line} {factor}")
    return [REFERENCES[line] / factor * draw.lognormvariate(0, noise) for _ in range(count)]


def test_only_an_injected_slowdown_is_reported_by_name() -> None:
    good = judge({line: noisy(line, 1) for line in REFERENCES}, REFERENCES)
    assert exit_code(good) == 0 and not any(verdict.is_slower for verdict in good)
    slow = judge({"copy": noisy("copy", 1), "native": noisy("native", 1.25)}, REFERENCES)
    assert exit_code(slow) == 1 and [verdict.line for verdict in slow if verdict.is_slower] == ["native"]
    text = str(slow[1])
    assert text.startswith("native: ") and "the reference is 1.200" in text and "95 % interval -" in text
    assert text.endswith("SLOWER by more than 10 %") and "SLOWER" not in str(slow[0])


def test_faster_slightly_slower_and_noisy_results_pass() -> None:
    for ratios in (noisy("copy", 0.5), noisy("copy", 1.08), noisy("copy", 1.2, noise=1.5)):
        assert exit_code(judge({"copy": ratios}, REFERENCES)) == 0
    (unknown,) = judge({"new": [1.0, 1.1, 1.2]}, REFERENCES)
    assert not unknown.is_slower and str(unknown).endswith("no reference")


@given(st.lists(st.floats(0.1, 100), min_size=3, max_size=30), st.floats(0.1, 100))
def test_only_an_interval_entirely_below_the_limit_is_slower(ratios: list[float], reference: float) -> None:
    low, high = interval(ratios)
    assert min(ratios) <= low <= high <= max(ratios) and interval(ratios) == (low, high)
    (verdict,) = judge({"line": ratios}, {"line": reference})
    assert verdict.is_slower == (high < 0.9 * reference)
    assert low <= verdict.ratio <= high


def test_slow_adds_work() -> None:
    """Each repeat yields one ratio of CPU times; wall time is not asserted."""
    work = list(range(200_000))
    (ratios,) = measure({"line": (lambda: sorted(work), lambda: sorted(work))}, 3, {"line": 4.0}).values()
    assert len(ratios) == 3
    assert cpu_seconds(lambda: sum(work), 3.0) > 0


def test_invalid_arguments_are_usage_errors(tmp_path: Path) -> None:
    for given_arguments in (
        ["--slow", "none=2"],
        ["--repeats", "2"],
        ["--only", "none"],
        ["--update", "--only", "index"],
    ):
        assert run(*given_arguments).returncode == 2
    done = run("--reference", str(tmp_path / "none.json"))
    assert done.returncode == 2 and "run with --update to write it" in done.stderr


def test_the_reference_records_its_environment() -> None:
    reference = json.loads(REFERENCE.read_text())
    assert reference["machine"]["pyav"] and reference["machine"]["cpu"] and reference["repeats"] >= 9
    for line in reference["lines"].values():
        assert 0 < line["low"] <= line["ratio"] <= line["high"]


@pytest.mark.slow
def test_a_real_run_notices_an_injected_slowdown(tmp_path: Path) -> None:
    """The whole tool detects extra work against its own reference, and passes without it."""
    found = run("--only", "native_yuv", "index", "--repeats", "9", "--json")
    lines = {line["line"]: line for line in json.loads(found.stdout)["lines"]}
    assert set(lines) == {"native_yuv", "index"}
    reference = tmp_path / "reference.json"
    kept = {name: {key: line[key] for key in ("ratio", "low", "high")} for name, line in lines.items()}
    reference.write_text(json.dumps({"machine": {}, "lines": kept}))
    same = ("--only", "native_yuv", "index", "--repeats", "9", "--reference", str(reference))
    done = run(*same, "--slow", "native_yuv=1.6")
    assert done.returncode == 1, done.stdout
    slower = [line for line in done.stdout.splitlines() if line.endswith("SLOWER by more than 10 %")]
    assert [line.split(":")[0] for line in slower] == ["native_yuv"]
    done = run(*same)
    assert done.returncode == 0, done.stdout


def run(*given_arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command([sys.executable, "-m", "tools.bench_smoke", *given_arguments], check=False, cwd=ROOT)
