"""Tests that the frames in the preview are bit-identical to those of the loader."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

import streamvid
from streamvid.preview.deliver import Deliverer, ViewSettings
from streamvid.preview.extract import extract
from streamvid.preview.find import find_keys
from tests.conftest import Sharded
from tests.files import tree_of
from tests.loader.conftest import TALL, build_dataset, open_loader
from tests.preview.conftest import PreviewServer, Serve

Pixels = npt.NDArray[np.uint8]
VIEWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "crop": {"temporal": "uniform", "spatial": "random_crop"},
    "scaled": {"max_interval": 2, "spatial": "rand_size_crop", "spatial_scale": (0.4, 0.9)},
    "chunk": {"temporal": "chunk"},
}


def delivered(root: Path, visit: int, view: dict[str, Any], **options: Any) -> dict[str, streamvid.Batch]:
    """Return the batches, of one sample each, that a loader of all samples delivers in epoch `visit`, by key."""
    settings = {"shuffle": "none", "tail": "uneven", "output": {"layout": "BTHWC", "pixels": "rgb24"}, "view": view}
    with open_loader(root, **settings | options) as loader:
        loader.set_epoch(visit)
        return {batch.sample_keys[0]: batch.clone() for batch in loader}


def settings_of(view: dict[str, Any], seed: int = 0) -> ViewSettings:
    return ViewSettings(seed, streamvid.ViewOptions(**view))


@pytest.fixture(scope="module")
def deliverer(sharded: Sharded) -> Iterator[Deliverer]:
    found = Deliverer(streamvid.open_dataset(sharded.root))
    yield found
    found.close()


@pytest.mark.parametrize("name", VIEWS)
def test_frames_of_copied_clips_equal_those_of_the_loader(sharded: Sharded, deliverer: Deliverer, name: str) -> None:
    """SAMPLE-1: frames are equal in all modes, for any container and visit."""
    view, dataset = VIEWS[name], streamvid.open_dataset(sharded.root)
    expected = delivered(sharded.root, 3, view, seed=7, where=None if name == "plain" else "source_width < 400")
    assert len(expected) > 5
    for key, place in zip(expected, find_keys(dataset, list(expected)), strict=True):
        found, batch = deliverer.deliver(place, 3, settings_of(view, seed=7)), expected[key]
        assert found.frames is not None and np.array_equal(found.frames, batch.video[0].numpy()), key
        assert found.delivery.caption == batch.text[0] and found.delivery.seed == batch.sample_seeds[0]


@pytest.mark.parametrize("clips", ["copy", "native"])
def test_frames_and_conditioning_inputs_equal_those_of_the_loader(roots: dict[str, Path], clips: str) -> None:
    dataset = streamvid.open_dataset(roots[clips])
    view = {} if clips == "native" else VIEWS["scaled"]
    names = ("control", "matte", "reference")
    expected = delivered(roots[clips], 2, view, media=names)
    deliverer = Deliverer(dataset)
    try:
        for key, place in zip(expected, find_keys(dataset, list(expected)), strict=True):
            found, batch = deliverer.deliver(place, 2, settings_of(view)), expected[key]
            assert found.frames is not None and np.array_equal(found.frames, batch.video[0].numpy())
            for name in names:
                items = batch.media[name][0] if name == "reference" else batch.media[name]
                for shown, there in zip(found.media[name], items.numpy(), strict=True):
                    assert np.array_equal(shown, there) if shown is not None else not there.any()
            assert sum(one is not None for one in found.media["reference"]) == int(
                batch.media_present["reference"].sum()
            )
    finally:
        deliverer.close()


def test_a_picture_on_the_page_is_the_frame_of_the_loader(roots: dict[str, Path], serve: Serve) -> None:
    server = serve(roots["copy"])
    expected = delivered(roots["copy"], 5, VIEWS["crop"], media=("matte",))
    for key, batch in expected.items():
        at = server.get(f"/key/{key}").headers["location"].replace("/sample/", "/frame/")
        query = urlencode({"visit": 5, "temporal": "uniform", "spatial": "random_crop"})
        for number in (0, 8):
            shown = server.get(f"{at}/{number}?{query}")
            assert shown.headers["content-type"] == "image/png"
            assert np.array_equal(picture(shown.body), batch.video[0, number].numpy())
        mask = picture(server.get(f"{at}/3?{query}&of=matte").body)
        assert np.array_equal(mask, batch.media["matte"][0, 3, :, :, 0].numpy())
        assert server.get(f"{at}/9?{query}").status == 404


def picture(data: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(data)))


def test_the_uncropped_frame_contains_the_crop_that_the_page_draws(demo: PreviewServer) -> None:
    path = demo.get("/samples?bucket=256px-17f-4x3").samples[0]
    query = "spatial=rand_size_crop&scale_from=0.5&scale_to=0.6&visit=4"
    page, frames = demo.get(f"{path}?{query}").text, path.replace("/sample/", "/frame/")
    _, _, full_width, full_height = map(float, page.split('class="overlay" viewBox="')[1].split('"')[0].split())
    drawn = page.split('class="crop" ')[1].split("/>")[0]
    x, y, width, height = (float(word.split('"')[1]) for word in drawn.split())
    whole = picture(demo.get(f"{frames}/0?{query}&of=source").body)
    frame = Image.open(io.BytesIO(demo.get(f"{frames}/0?{query}").body))
    scale = (whole.shape[1] / full_width, whole.shape[0] / full_height)
    box = (x * scale[0], y * scale[1], (x + width) * scale[0], (y + height) * scale[1])
    cut = Image.fromarray(whole).resize(frame.size, Image.Resampling.BICUBIC, box=box)
    assert np.abs(np.asarray(cut, np.float32) - np.asarray(frame, np.float32)).mean() < 8


def test_a_bad_sample_is_named_with_its_substitute_and_the_next_one_is_shown(tmp_path: Path, serve: Serve) -> None:
    """BAD-1: the page names the substitute that a loader would deliver, and the server keeps running."""
    key = f"{TALL.id}-1"
    root = build_dataset(tmp_path / "ds", {TALL: [3]}, damage={key: b"no video" * 100})
    server = serve(root)
    page = server.get(server.get(f"/key/{key}").headers["location"])
    assert (
        page.status == 200
        and f"sample {key} in " in page.text
        and f"The loader delivers {TALL.id}-2 in its place" in page.text
    )
    assert server.get(f"/poster/{TALL.id}/0/1").headers["content-type"] == "image/svg+xml"
    assert "the audio cannot be shown: the file is not a video" in server.get(f"/audio/{TALL.id}/0/1").text
    for index in (0, 2):
        assert "What the model gets" in server.get(f"/sample/{TALL.id}/0/{index}").text
        assert picture(server.get(f"/poster/{TALL.id}/0/{index}").body).shape == (96, 64, 3)


def test_extracted_files_are_the_clip_and_the_frames_of_the_loader(roots: dict[str, Path], tmp_path: Path) -> None:
    expected = delivered(roots["native"], 1, {"temporal": "head"}, media=("matte",))
    keys, dataset = list(expected), streamvid.open_dataset(roots["native"])
    report = extract(dataset, keys[:2], tmp_path, settings_of({"temporal": "head"}), visit=1)
    assert [one.key for one in report.samples] == keys[:2]
    for one in report.samples:
        files = tree_of(tmp_path / one.folder)
        assert set(files) == set(one.files)
        row = json.loads(files["sample.json"])
        tar = (roots["native"] / row["sample"]["shard_path"]).read_bytes()
        first = row["sample"]["clip_offset"]
        assert files[f"clip.{row['sample']['clip_extension']}"] == tar[first : first + row["sample"]["clip_bytes"]]
        assert row["delivery"]["frame_numbers"] == list(range(9))
        video = expected[one.key].video[0].numpy()
        assert np.array_equal([picture(files[f"frame-{number:04d}.png"]) for number in range(9)], video)
        assert files["caption.txt"].decode() == expected[one.key].text[0]
