"""Tests of the conversion from yuv420p to RGB against a float64 implementation of the standards' definitions."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from streamvid.errors import ConfigError
from streamvid.loader.batch.color import LUMA_SHARES, RANGES, SITINGS, color_table, yuv420p_to_rgb

# Kr and Kb as printed in each standard, and chroma positions in pixels; not taken from the code under test.
SHARES = {
    "bt601": (0.299, 0.114),
    "bt709": (0.2126, 0.0722),
    "bt2020": (0.2627, 0.0593),
    "smpte240m": (0.212, 0.087),
    "fcc": (0.30, 0.11),
}
PLACES = {
    "left": (0.0, 0.5),
    "center": (0.5, 0.5),
    "topleft": (0.0, 0.0),
    "top": (0.5, 0.0),
    "bottomleft": (0.0, 1.0),
    "bottom": (0.5, 1.0),
}
COMPILERS = ["eager", "aot_eager", *(["inductor"] if shutil.which("g++") else [])]

Names = tuple[str, str, str]
names = st.tuples(
    st.sampled_from(sorted(SHARES)), st.sampled_from(["limited", "full"]), st.sampled_from(sorted(PLACES))
)


def full_size(chroma: NDArray[np.uint8], shift: float, axis: int) -> NDArray[np.float64]:
    """Interpolate linearly at every pixel of `axis`. Beyond the outermost samples, their values are repeated."""
    places = (np.arange(chroma.shape[axis] * 2) - shift) / 2
    samples = np.arange(chroma.shape[axis])
    return np.apply_along_axis(lambda line: np.interp(places, samples, line), axis, chroma.astype(np.float64))


def reference(frame: NDArray[np.uint8], height: int, width: int, names: Names) -> NDArray[np.float64]:
    """Return RGB (H, W, 3) in 0..255 of one frame's planes, clamped but not rounded."""
    matrix, color_range, siting = names
    kr, kb = SHARES[matrix]
    shift_x, shift_y = PLACES[siting]
    luma = frame[: height * width].reshape(height, width).astype(np.float64)
    chroma = frame[height * width :].reshape(2, height // 2, width // 2)
    cb, cr = (full_size(full_size(plane, shift_y, 0), shift_x, 1) - 128 for plane in chroma)
    if color_range == "limited":
        luma, cb, cr = (luma - 16) / 219, cb / 224, cr / 224
    else:
        luma, cb, cr = luma / 255, cb / 255, cr / 255
    red = luma + 2 * (1 - kr) * cr
    blue = luma + 2 * (1 - kb) * cb
    green = (luma - kr * red - kb * blue) / (1 - kr - kb)
    return np.clip(np.stack([red, green, blue], axis=-1) * 255, 0, 255)


def table_of(samples: list[Names]) -> torch.Tensor:
    matrices, ranges, sitings = zip(*samples, strict=True)
    return color_table(matrices, ranges, sitings)


def flat(height: int, width: int, yuv: tuple[int, int, int]) -> torch.Tensor:
    """Return one sample with one frame of a single color."""
    sizes = (height * width, height * width // 4, height * width // 4)
    values = [torch.full((size,), value, dtype=torch.uint8) for size, value in zip(sizes, yuv, strict=True)]
    return torch.cat(values).view(1, 1, -1)


def random_planes(num_samples: int, num_frames: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_samples, num_frames, height * width * 3 // 2)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


MIXED: list[Names] = [("bt709", "limited", "left"), ("bt601", "full", "center"), ("bt2020", "limited", "topleft")]


@settings(max_examples=60)
@given(
    samples=st.lists(names, min_size=1, max_size=4),
    num_frames=st.integers(1, 3),
    half_height=st.integers(1, 9),
    half_width=st.integers(1, 9),
    seed=st.integers(0, 2**32),
)
def test_every_pixel_is_the_exact_value_rounded_to_nearest(
    samples: list[Names], num_frames: int, half_height: int, half_width: int, seed: int
) -> None:
    """YUV-1: planes, sizes, and the mix of matrices, ranges and sitings in a batch are arbitrary."""
    height, width = half_height * 2, half_width * 2
    planes = random_planes(len(samples), num_frames, height, width, seed)
    found = yuv420p_to_rgb(planes, table_of(samples), height, width, "BTHWC").numpy()
    for sample, names in enumerate(samples):
        for frame in range(num_frames):
            exact = reference(planes[sample, frame].numpy(), height, width, names)
            assert np.abs(found[sample, frame] - exact).max() <= 0.5 + 0.005


@pytest.mark.parametrize("matrix", SHARES)
@pytest.mark.parametrize("color_range", ["limited", "full"])
def test_a_large_picture_has_no_bias(matrix: str, color_range: str) -> None:
    """YUV-1: at least 58 dB, and a bias below 0.05 levels per channel, where nothing is clamped."""
    height, width = 128, 160
    random = np.random.default_rng(1)
    luma, chroma = random.integers(100, 150, height * width), random.integers(110, 146, height * width // 2)
    planes = np.concatenate([luma, chroma]).astype(np.uint8)
    names = (matrix, color_range, "left")
    found = yuv420p_to_rgb(torch.from_numpy(planes).view(1, 1, -1), table_of([names]), height, width, "BTHWC")
    error = found[0, 0].numpy() - reference(planes, height, width, names)
    assert np.abs(error.mean(axis=(0, 1))).max() < 0.05
    assert 10 * np.log10(255**2 / np.mean(error**2)) >= 58


def test_the_names_match_the_standards() -> None:
    assert set(LUMA_SHARES) == set(SHARES)
    assert set(RANGES) == {"limited", "full"}
    assert set(SITINGS) == set(PLACES)


@pytest.mark.parametrize("matrix", SHARES)
def test_grays_have_equal_channels(matrix: str) -> None:
    """YUV-1: every Y is tested without color. Values below black become black, and values above white become white."""
    ramp = torch.cat([torch.arange(256, dtype=torch.uint8), torch.full((128,), 128, dtype=torch.uint8)]).view(1, 1, -1)
    levels = np.arange(256)
    for color_range, right in (
        ("limited", np.clip(np.floor((levels - 16) * 255 / 219 + 0.5), 0, 255)),
        ("full", levels),
    ):
        rgb = yuv420p_to_rgb(ramp, table_of([(matrix, color_range, "left")]), 2, 128).numpy().reshape(3, 256)
        for channel in rgb:
            np.testing.assert_array_equal(channel, right)


@pytest.mark.parametrize(
    ("matrix", "yuv", "rgb"),
    [
        ("bt601", (81, 90, 240), (255, 0, 0)),
        ("bt601", (145, 54, 34), (0, 255, 0)),
        ("bt601", (41, 240, 110), (0, 0, 255)),
        ("bt709", (63, 102, 240), (255, 0, 0)),
        ("bt709", (173, 42, 26), (0, 255, 0)),
        ("bt709", (32, 240, 118), (0, 0, 255)),
        ("bt709", (235, 128, 128), (255, 255, 255)),
        ("bt709", (16, 128, 128), (0, 0, 0)),
    ],
)
def test_color_bars_are_reproduced(matrix: str, yuv: tuple[int, int, int], rgb: tuple[int, int, int]) -> None:
    """The 100 % color bars are from the standards' tables, where Y, U and V are already rounded."""
    found = yuv420p_to_rgb(flat(4, 6, yuv), table_of([(matrix, "limited", "left")]), 4, 6, "BTHWC")
    assert found.unique(dim=3).shape[3] == 1
    assert np.abs(found[0, 0, 0, 0].numpy().astype(int) - rgb).max() <= 1


def test_extremes_do_not_overflow() -> None:
    """YUV-1: 0 and 255 in every combination of planes are clamped to the correct end of the range."""
    for names in [(matrix, color_range, "left") for matrix in SHARES for color_range in RANGES]:
        for yuv in np.ndindex(2, 2, 2):
            frame = flat(2, 2, tuple(255 * int(level) for level in yuv))  # type: ignore[arg-type]
            found = yuv420p_to_rgb(frame, table_of([names]), 2, 2, "BTHWC")[0, 0].numpy()
            assert np.abs(found - reference(frame.view(-1).numpy(), 2, 2, names)).max() <= 0.505


def test_centered_chroma_has_no_preferred_side() -> None:
    """Rotating the planes by 180 degrees rotates the RGB picture."""
    height, width = 10, 14
    planes = random_planes(1, 1, height, width)
    parts = planes[0, 0].split([height * width, height * width // 4, height * width // 4])
    turned = torch.cat([part.flip(0) for part in parts]).view(1, 1, -1)
    table = table_of([("bt709", "limited", "center")])
    there, back = (yuv420p_to_rgb(frame, table, height, width, "BTHWC") for frame in (planes, turned))
    assert torch.equal(there, back.flip(2, 3))


@pytest.mark.parametrize(("siting", "x", "y"), [("topleft", 0, 0), ("bottomleft", 0, 1)])
def test_a_pixel_at_a_chroma_position_uses_only_that_sample(siting: str, x: int, y: int) -> None:
    height, width = 8, 12
    planes = random_planes(1, 1, height, width)
    planes[..., : height * width] = 128
    u, v = planes[0, 0, height * width :].view(2, height // 2, width // 2)
    table = table_of([("bt709", "limited", siting)])
    rgb = yuv420p_to_rgb(planes, table, height, width, "BTHWC")[0, 0]
    for row in range(height // 2):
        for column in range(width // 2):
            alone = yuv420p_to_rgb(flat(2, 2, (128, int(u[row, column]), int(v[row, column]))), table, 2, 2, "BTHWC")
            assert torch.equal(rgb[row * 2 + y, column * 2 + x], alone[0, 0, 0, 0])


def test_layouts_differ_only_in_order() -> None:
    planes, table = random_planes(3, 2, 6, 8), table_of(MIXED)
    last = yuv420p_to_rgb(planes, table, 6, 8, "BTHWC")
    first = yuv420p_to_rgb(planes, table, 6, 8)
    middle = yuv420p_to_rgb(planes, table, 6, 8, "BTCHW")
    assert last.shape == (3, 2, 6, 8, 3)
    assert torch.equal(first, last.permute(0, 4, 1, 2, 3))
    assert torch.equal(middle, last.permute(0, 1, 4, 2, 3))
    assert first.is_contiguous()
    assert middle.is_contiguous()
    assert last.is_contiguous()


@pytest.mark.parametrize(("num_frames", "height", "width"), [(7, 240, 320), (1, 240, 320), (2, 600, 640)])
def test_a_batch_is_its_frames_one_by_one(num_frames: int, height: int, width: int) -> None:
    """YUV-1: the result does not depend on the amount processed at once or on the ring's strides between frames."""
    ring = random_planes(len(MIXED), num_frames + 1, height, width)
    planes = ring[:, 1:]
    whole = yuv420p_to_rgb(planes, table_of(MIXED), height, width, "BTHWC")
    for sample, names in enumerate(MIXED):
        for frame in range(num_frames):
            one = planes[sample : sample + 1, frame : frame + 1].clone()
            assert torch.equal(
                whole[sample, frame], yuv420p_to_rgb(one, table_of([names]), height, width, "BTHWC")[0, 0]
            )


def test_an_empty_batch_gives_an_empty_result() -> None:
    assert yuv420p_to_rgb(random_planes(0, 4, 6, 8), color_table([], [], []), 6, 8).shape == (0, 3, 4, 6, 8)


@pytest.mark.slow
@pytest.mark.parametrize("backend", COMPILERS)
def test_compilation_happens_once_per_shape_and_is_bit_exact(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """YUV-2: there is one graph, and other matrices, ranges and sitings do not cause a recompilation."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    options = {"compile_threads": 1} if backend == "inductor" else None  # more threads are processes that would remain
    torch.compiler.reset()
    compiled = torch.compile(yuv420p_to_rgb, backend=backend, fullgraph=True, dynamic=False, options=options)
    try:
        compiled(random_planes(3, 2, 16, 24), table_of(MIXED), 16, 24)
        with torch.compiler.set_stance("fail_on_recompile"):
            for seed, samples in enumerate([MIXED, MIXED[::-1], [("fcc", "full", "bottom")] * 3]):
                planes, table = random_planes(3, 2, 16, 24, seed), table_of(samples)
                assert torch.equal(compiled(planes, table, 16, 24), yuv420p_to_rgb(planes, table, 16, 24))
    finally:
        torch.compiler.reset()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_every_device_gives_the_same_pixels(is_compiled: bool) -> None:
    """YUV-2: integer arithmetic cannot round differently."""
    planes, table = random_planes(3, 9, 240, 320), table_of(MIXED)
    convert = torch.compile(yuv420p_to_rgb, fullgraph=True, dynamic=False) if is_compiled else yuv420p_to_rgb
    found = convert(planes.cuda(), table.cuda(), 240, 320)
    assert found.is_cuda
    assert torch.equal(found.cpu(), yuv420p_to_rgb(planes, table, 240, 320))


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ((["bt470"], ["full"], ["left"]), "matrix='bt470'.*bt709"),
        ((["rgb"], ["full"], ["left"]), "matrix='rgb'"),
        ((["bt709"], ["tv"], ["left"]), "range='tv'.*limited"),
        ((["bt709"], ["full"], ["right"]), "siting='right'.*topleft"),
    ],
)
def test_unknown_names_are_refused(lists: tuple[list[str], list[str], list[str]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        color_table(*lists)
