"""Tests of the architecture: files import only from lower floors or their own room; libraries stay in their rooms."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import streamvid

PACKAGE = Path(streamvid.__file__).parent
FLOORS = {
    "credentials": 0,
    "errors": 0,
    "config": 0,
    "shipped": 0,
    "host": 0,
    "buckets": 1,
    "video": 1,
    "storage": 1,
    "cluster": 2,
    "dataset": 3,
    "plan": 4,
    "ledger": 4,
    "sharder": 5,
    "loader": 5,
    "forecast": 6,
    "bench": 6,
    "modules": 6,
    "recipes": 7,
    "trainer": 8,
    "preview": 9,
    "compat": 9,
    "cli": 10,
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
    "diffusers": {"recipes"},
    "huggingface_hub": {"recipes", "modules"},
    "webdataset": {"dataset"},
    "ray": {"cluster"},
    "prometheus_client": {"loader/monitor"},
    "click": {"cli", "compat"},
    "rich": {"cli", "modules/summary.py", "trainer"},
    "pydantic": {"config.py"},
    "starlette": {"preview"},
    "uvicorn": {"preview"},
    "jinja2": {"preview"},
    "markupsafe": {"preview"},
    "torch": {"modules", "recipes", "trainer", "bench", "loader/batch", "loader/exchange.py"},
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "_shipped" not in path.parts)


def imports(path: Path) -> list[tuple[str, bool]]:
    """Return (module, whether under TYPE_CHECKING) for every import in a file, at any level."""
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
        return  # the package's `__init__.py` lists what it loads lazily
    own = room(path)
    for module, _ in imports(path):
        parts = module.split(".")
        if parts[0] != "streamvid" or len(parts) < 2 or parts[1] not in FLOORS or parts[1] == own:
            continue
        if parts[1] in ("credentials", "errors"):
            continue  # every file may use these, including files on the same floor
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


def module_name(path: Path) -> str:
    """Return the dotted name of a file; an `__init__.py` has the name of its folder."""
    return ".".join(("streamvid", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def import_graph() -> dict[str, set[str]]:
    """Return the imports between our modules, including those inside functions.

    `from a.b import c` counts as an import of `a.b.c` if that is a module. The package's own `__init__.py`, which lists
    what it loads lazily, is left out.
    """
    modules = {module_name(path): path for path in FILES if path != PACKAGE / "__init__.py"}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = {name for name, _ in imports(path)}
        longer = {name.rpartition(".")[0] for name in found if name in modules}
        graph[module] = {name for name in found if name in modules and name not in longer | {module}}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of nodes that reach each other."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        stack = [start]
        while stack:
            for follower in graph.get(stack.pop(), set()) - seen:
                seen.add(follower)
                stack.append(follower)
        reach[start] = seen
    groups = {frozenset(b for b in reach[a] if a in reach.get(b, set())) for a in graph if a in reach[a]}
    return sorted(sorted(group) for group in groups)


def test_no_import_cycle_between_files() -> None:
    assert cycles(import_graph()) == []


def test_no_import_cycle_between_the_units_of_a_folder() -> None:
    """The files and subfolders of a folder have an order in which they can be read."""
    graph = import_graph()
    found = {}
    for folder in sorted({path.parent for path in FILES}):
        prefix = module_name(folder / "__init__.py") + "."
        units: dict[str, set[str]] = {}
        for module, imported in graph.items():
            if module.startswith(prefix):
                unit = module.removeprefix(prefix).partition(".")[0]
                others = {name.removeprefix(prefix).partition(".")[0] for name in imported if name.startswith(prefix)}
                units[unit] = units.get(unit, set()) | others - {unit}
        if cycles(units):
            found[prefix] = cycles(units)
    assert found == {}


def test_folders_hold_at_most_15_files() -> None:
    """Each folder has at most 15 files, not counting its `__init__.py`."""
    sizes = Counter(str(path.parent.relative_to(PACKAGE)) for path in FILES if path.name != "__init__.py")
    assert {folder: size for folder, size in sizes.items() if size > 15} == {}


def test_files_and_functions_stay_small() -> None:
    for path in FILES:
        lines = path.read_text().splitlines()
        assert len(lines) <= 500, f"{path.relative_to(PACKAGE)} has {len(lines)} lines"
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                # Only the body counts, without the docstring and the parameters, which can take one line each.
                has_docstring = ast.get_docstring(node) is not None and len(node.body) > 1
                length = (node.end_lineno or 0) - node.body[1 if has_docstring else 0].lineno + 1
                assert length <= 40, f"{path.relative_to(PACKAGE)}: {node.name} has {length} lines"


def test_code_is_laid_out_by_the_formatter() -> None:
    switch = "fmt: " + "skip"
    assert [str(path.relative_to(PACKAGE)) for path in FILES if switch in path.read_text()] == []


def test_the_map_names_files_that_exist() -> None:
    """Every path in CONTRIBUTING.md, which newcomers read first, exists."""
    root = PACKAGE.parent
    text = (root / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:[a-z_0-9]+/)+(?:[a-z_0-9]+\.py)?)`", text)
    assert len(paths) > 40
    bases = (root, PACKAGE, root / "tests")
    assert [path for path in paths if path != "demo/" and not any((base / path).exists() for base in bases)] == []
