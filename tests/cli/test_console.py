"""Tests of tables in a pipe and on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty

import pytest

from streamvid.cli.console import ProgressBar, print_table, size


def test_a_piped_table_is_plain_text_of_any_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SAFE-1: cells are printed literally, without markup, and with control characters escaped."""
    monkeypatch.setenv("COLUMNS", "40")
    long = "/a/path/that/is/long/" * 20 + " and words " * 20 + "end"
    print_table(["bucket", "samples", "what"], [("a", 12, long), ("b", 3456, "[red]x[/red] \x1b[2J\n:smile:")])
    shown = capsys.readouterr().out.splitlines()
    assert [line.split() for line in shown[:1]] == [["bucket", "samples", "what"]] and set(shown[1]) == {"-", " "}
    assert shown[2].split(maxsplit=2) == ["a", "12", long]
    assert shown[3].split() == ["b", "3456", "[red]x[/red]", r"\x1b[2J\n:smile:"]
    assert shown[2].index("12") + 2 == shown[3].index("3456") + 4
    assert not any("\x1b" in line or line != line.rstrip() for line in shown)


def on_a_terminal(
    headers: list[str], rows: list[tuple[object, ...]], width: int, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Print a table to a pseudo-terminal of this width and return the output."""
    controller, terminal = pty.openpty()
    monkeypatch.setenv("COLUMNS", str(width))
    with os.fdopen(terminal, "w") as stream, contextlib.redirect_stdout(stream):
        print_table(headers, rows)
    shown = b""
    # Linux reports a closed terminal as an error.
    with os.fdopen(controller, "rb", buffering=0) as screen, contextlib.suppress(OSError):
        while part := screen.read(1 << 16):
            shown += part
    return shown.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_table_fits_the_terminal_without_breaking_words(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that do not fit form a second table below, and long texts wrap between words."""
    names = ["bucket", "T x H x W", "samples", "shards", "size", "video", "cropped", "sources", "PSNR-Y", "lowest"]
    cells = "256px-33f-16x9|33 x 192 x 336|332461|41557|12.3 MB|12345.1 s|12%|9.1 MB|41.5 dB|30.2 dB"
    row = tuple(cells.split("|"))
    shown = on_a_terminal(names, [row] * 2, width, monkeypatch)
    assert max(map(len, shown.splitlines())) <= width
    assert all(shown.count(cell) == 2 for cell in row[1:]) and all(f" {name}" in shown for name in names[1:])
    assert (shown.count("bucket") > 1) == (width < 200) and shown.count("bucket") * 2 == shown.count("256px-33f-16x9")
    why = "to accept images, add 1 to --num-frames, or add buckets with 1 frame to a copy of the preset"
    kinds = on_a_terminal(
        ["rejected", "why", "remedy"], [(3, "no-image-bucket", why), (2, "x", why)], width, monkeypatch
    )
    assert max(map(len, kinds.splitlines())) <= width
    assert [word for line in kinds.splitlines()[2:] for word in line.split() if word in why.split()] == why.split() * 2


def test_a_table_of_thousands_of_rows_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["bucket", "samples"], [(f"b{number}", number) for number in range(10_000)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 103 and lines[-1] == "and 9900 more rows; --json lists all"


def test_piped_progress_prints_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar() as progress:
        for phase in ("probe", "build"):
            for done in range(50):
                progress(phase, done + 1, 50)
    assert capsys.readouterr().err.splitlines() == ["probe 1/50", "probe 50/50", "build 1/50", "build 50/50"]


def test_sizes_are_decimal() -> None:
    assert [size(number) for number in (1, 999, 12_345_678, 2 * 10**12)] == ["1 byte", "999 bytes", "12.3 MB", "2.0 TB"]
