"""Runner for the fenced blocks of a Markdown page, in order, in one folder: python -m tests.docs.snippets PAGE

bash blocks run in a shell that stops at the first error, python blocks in a shared namespace. A comment directly before
a block changes that:

    <!-- not run: REASON -->     the block is skipped, and the reason is printed
    <!-- save: NAME -->          the block is written to this file in the folder, as a reader would do
    <!-- fails: TEXT -->         the block must fail, and its output must contain TEXT

Blocks of other languages are ignored. Each block that runs or is skipped prints one line of JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RUN = ("bash", "python")
_BLOCK = re.compile(
    r"(?:^(?P<indent>[ ]*)<!-- (?P<mark>not run|save|fails): (?P<says>[^\n]*?) -->\n\s*)?"
    r"^(?P<space>[ ]*)```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^(?P=space)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block. line: line number of its fence, counted from 1."""

    line: int
    language: str
    code: str
    mark: str | None
    says: str


def blocks_of(text: str) -> Iterator[Block]:
    """Yield the blocks of a page that run, are saved or are skipped."""
    for match in _BLOCK.finditer(text):
        if match["language"] in RUN or match["mark"] == "save":
            line = text.count("\n", 0, match.start("language")) + 1
            yield Block(line, match["language"], textwrap.dedent(match["code"]), match["mark"], match["says"] or "")


def main(page: Path) -> int:
    """Run the blocks of a page in the current folder; return 1 at the first one that contradicts the page."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(page.read_text()):
        if block.mark == "not run":
            _tell(block, "skipped", block.says)
            continue
        if block.mark == "save":
            Path(block.says).write_text(block.code)
            continue
        is_right, output = _run(block, namespace)
        if block.mark == "fails":
            is_right = not is_right and block.says in output
        _tell(block, "passed" if is_right else "failed", output if not is_right else "")
        if not is_right:
            return 1
    return 0


def _run(block: Block, namespace: dict[str, Any]) -> tuple[bool, str]:
    if block.language == "bash":
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.code],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, check=False,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        )  # fmt: skip
        return done.returncode == 0, done.stdout[-4000:]
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            exec(compile(block.code, f"line {block.line}", "exec"), namespace)
    except Exception:
        return False, shown.getvalue() + traceback.format_exc()
    return True, shown.getvalue()


def _tell(block: Block, outcome: str, text: str) -> None:
    print(json.dumps({**asdict(block), "outcome": outcome, "text": text}), flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
