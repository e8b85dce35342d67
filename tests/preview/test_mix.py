"""Tests of pages with several datasets or precomputed features: they show what a loader delivers."""

from __future__ import annotations

import io
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import streamvid
from streamvid.errors import ConfigError
from streamvid.preview.features import open_features
from streamvid.preview.options import PreviewOptions
from tests.dataset.frozen import FROZEN
from tests.loader.conftest import open_loader
from tests.loader.sidecars import facts_of, make_sidecar
from tests.preview.conftest import Serve

COPY, NATIVE = FROZEN / "copy", FROZEN / "native"
MISSING = "b-bcf186c7d4a71579"


@pytest.fixture
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features of two visits per sample; one sample lacks the second visit."""
    view = facts_of(COPY, seed=3, view={"temporal": "uniform", "spatial": "random_crop"})
    return make_sidecar(tmp_path_factory.mktemp("features") / "f", COPY, missing=[(MISSING, 1)], view=view)


def test_a_step_of_a_mix_is_that_of_the_loader(serve: Serve) -> None:
    """PLAN-1, SAMPLE-1: keys, frames and micro-steps are equal, with repeats and gradient accumulation."""
    server = serve(COPY, NATIVE)
    mix = [streamvid.DatasetConfig(COPY), streamvid.DatasetConfig(NATIVE, num_repeats=2)]
    output = {"layout": "BTHWC", "pixels": "rgb24"}
    of_both = set()
    with open_loader(mix, seed=4, accumulate=3, output=output) as loader:
        batches = [batch.clone() for batch in islice(loader, 6)]
    for step, batch in enumerate(batches):
        page = server.get(f"/step?seed=4&accumulate=3&repeats=1,2&step={step}").text
        assert f"Batch {step % 3 + 1} of 3 of optimizer step {step // 3}" in page
        cards = re.findall(r'href="([^"]+)" aria-label="([^"]+)"><img src="([^"]+)"', page)
        assert [key for _, key, _ in cards] == list(batch.sample_keys)
        for slot, (link, _, picture) in enumerate(cards):
            of_both.add(link.startswith("/dataset/1/"))
            frame = server.get(picture.replace("width=320&", ""))
            assert np.array_equal(Image.open(io.BytesIO(frame.body)), batch.video[slot, 0].numpy())
    assert of_both == {True, False} and server.get(link).status == 200
    overview = server.get("/dataset/1/").text
    assert str(NATIVE) in overview and str(COPY) not in overview and "/dataset/1/samples?bucket=" in overview
    assert "has more values than there are datasets (2)" in server.get("/step?repeats=1,1,1").text
    assert "num_repeats" in server.get("/step?repeats=x").text


def test_features_are_shown_as_the_loader_delivers_them(serve: Serve, features: Path) -> None:
    server = serve(COPY, "--features", features)
    view, output = streamvid.ViewOptions("uniform", spatial="random_crop"), {"layout": "BTHWC", "pixels": "rgb24"}
    options = {"shuffle": "none", "tail": "uneven", "seed": 3, "view": view}
    clips, stored = open_loader(COPY, output=output, **options), open_loader(COPY, features=features, **options)
    with clips, stored:
        clips.set_epoch(1)
        stored.set_epoch(1)
        pairs = [(clip.clone(), batch.clone()) for clip, batch in zip(clips, stored, strict=True)]
    assert MISSING in [clip.sample_keys[0] for clip, _ in pairs]
    for clip, batch in pairs:
        at = server.get(f"/key/{clip.sample_keys[0]}").headers["location"]
        page, frame = server.get(f"{at}?visit=1").text, at.replace("/sample/", "/frame/") + "/0?visit="
        picture = server.get(f"{frame}1").body
        assert np.array_equal(Image.open(io.BytesIO(picture)), clip.video[0, 0].numpy())
        assert server.get(f"{frame}3&spatial=resize_crop").body == picture, "visit 3 must use stored visit 1"
        if clip.sample_keys[0] == MISSING:
            assert "could not encode this visit" in page
            continue
        row = page.split('<th scope="row">latents</th>')[1].split("</tr>")[0]
        assert "BF16" in row and "2 × 3" in row and f">{batch.latents.float().max().item():g}<" in row
        assert f"<dd>{batch.sample_seeds[0]}</dd>" in page and f">{batch.text[0] or '(empty)'}<" in page
    assert "visit 3 uses the stored visit 1, one of 2" in server.get(f"{at}?visit=3").text
    page = server.get("/step?epoch=3&seed=3").text
    assert "precomputed features" in page and "stored visit 1" in page
    for tar in features.rglob("*.tar"):
        data = tar.read_bytes()
        tar.write_bytes(data[:700] + bytes(len(data) - 700))
    page = server.get(at)
    assert page.status == 200 and "do not match the checksum" in page.text and "Index" in page.text


def test_features_must_fit(features: Path) -> None:
    copy, native = map(streamvid.open_dataset, (COPY, NATIVE))
    options = PreviewOptions(features=str(features))
    with pytest.raises(ConfigError, match=r"number of datasets: 2, number of --features: 1"):
        open_features([copy, native], options, streamvid.StorageOptions())
    with pytest.raises(ConfigError, match="were created from a dataset other than"):
        open_features([native], options, streamvid.StorageOptions())
