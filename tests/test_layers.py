"""The floors of the house: a file imports only from lower floors or its own room, and libraries stay in their rooms."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import streamvid

PACKAGE = Path(streamvid.__file__).parent
FLOORS = {
    "errors": 0,
    "config": 0,
    "shipped": 0,
    "host": 0,
    "buckets": 1,
    "video": 1,
    "storage": 1,
    "dataset": 2,
    "plan": 3,
    "sharder": 4,
    "loader": 4,
    "forecast": 5,
    "bench": 5,
    "modules": 5,
    "recipes": 6,
    "trainer": 7,
    "preview": 7,
    "compat": 8,
    "cli": 9,
}
ROOMS_OF = {
    "av": {"video"},
    "fsspec": {"storage"},
    "s3fs": {"storage"},
    "botocore": {"storage"},
    "accelerate": {"trainer"},
    "safetensors": {"modules", "recipes", "trainer", "dataset/features"},
    "peft": {"modules"},
    "transformers": {"recipes"},
    "webdataset": {"dataset"},
    "click": {"cli", "compat"},
    "rich": {"cli", "trainer"},
    "pydantic": {"config.py"},
    "torch": {"modules", "recipes", "trainer", "bench", "loader/batch", "loader/exchange.py"},
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "_shipped" not in path.parts)


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, is it under TYPE_CHECKING) of every import in a file, wherever it stands."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in for_types) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [(node.module or "", id(node) in for_types)]
            found += [(f"{node.module}.{alias.name}", id(node) in for_types) for alias in node.names]
    return found


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_from_lower_floors(path: Path) -> None:
    if path == PACKAGE / "__init__.py" or room(path) == "__main__":
        return  # the front door: it names what it loads lazily
    own = room(path)
    for module, _ in imports(path):
        parts = module.split(".")
        if parts[0] != "streamvid" or len(parts) < 2 or parts[1] not in FLOORS or parts[1] == own:
            continue
        if parts[1] == "errors":
            continue  # the one file that all may raise from, config.py on its own floor too
        assert FLOORS[parts[1]] < FLOORS[own], f"{path.relative_to(PACKAGE)} (floor {FLOORS[own]}) imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_libraries_stay_in_their_rooms(path: Path) -> None:
    relative = path.relative_to(PACKAGE).as_posix()
    for module, for_types in imports(path):
        rooms = ROOMS_OF.get(module.split(".")[0])
        if rooms is None or for_types:
            continue
        assert any(relative == place or relative.startswith(f"{place}/") for place in rooms), (
            f"{relative} imports {module}, which belongs to {sorted(rooms)}"
        )


def test_every_room_has_a_floor() -> None:
    assert {room(path) for path in FILES} - {"__init__", "__main__"} <= set(FLOORS)


def test_files_and_functions_stay_small() -> None:
    for path in FILES:
        lines = path.read_text().splitlines()
        assert len(lines) <= 500, f"{path.relative_to(PACKAGE)} has {len(lines)} lines"
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                # What it does: neither its parameters, one a line where there are many, nor what is said of them.
                has_docstring = ast.get_docstring(node) is not None and len(node.body) > 1
                length = (node.end_lineno or 0) - node.body[1 if has_docstring else 0].lineno + 1
                assert length <= 40, f"{path.relative_to(PACKAGE)}: {node.name} has {length} lines"
