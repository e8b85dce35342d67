"""Tests that tools/lowest.txt, which lists the lowest allowed versions for CI, matches pyproject.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def test_each_dependency_is_pinned_to_its_lower_bound() -> None:
    """Every dependency except torch is pinned; no package index has older CPU builds of torch."""
    lines = (ROOT / "tools" / "lowest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = {
        requirement.name: Version(next(one.version for one in requirement.specifier if one.operator == ">="))
        for requirement in map(Requirement, wanted)
    }
    assert {name: Version(pins[name]) for name in bounds if name != "torch"} == {
        name: bound for name, bound in bounds.items() if name != "torch"
    }
