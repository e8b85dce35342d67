"""Tests that the pictures in README.md and docs/ are those that tools/draw_docs.py draws from the current plan."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from tools.draw_docs import FOLDER, PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_the_script_draws(name: str) -> None:
    drawn = PICTURES[name]().svg()
    assert ET.fromstring(drawn).tag.endswith("svg")
    assert (FOLDER / name).read_text() == drawn, "the picture is outdated; run `python -m tools.draw_docs`"


def test_every_picture_in_the_folder_is_drawn_here() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(PICTURES)
