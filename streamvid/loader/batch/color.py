"""Conversion of yuv420p planes to RGB in exact integer arithmetic, on the device that holds the planes.

Integers give the same pixels on every device, in eager and compiled mode. In float32, each device would order and fuse
operations differently, so that ranks could round values near a half differently.

    planes (B, T, H*W*3/2) ──┬─ Y ────────────────────────────┐
                             └─ U, V ── to full size, x 16 ───┴── x coefficients (B, 8) ── round, clamp ── RGB
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

from streamvid.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from streamvid.loader.options import Layout

#: Name → (Kr, Kb), the shares of red and blue in luma: ITU-R BT.601, BT.709 and BT.2020, SMPTE 240M, FCC 73.682.
LUMA_SHARES = {
    "bt601": (0.299, 0.114),
    "bt709": (0.2126, 0.0722),
    "bt2020": (0.2627, 0.0593),
    "smpte240m": (0.212, 0.087),
    "fcc": (0.30, 0.11),
}
#: Name → (black, luma range from black to white, whole chroma range), in 8-bit levels.
RANGES = {"limited": (16, 219, 224), "full": (0, 255, 255)}
#: FFmpeg's name → position of a chroma sample in its 2x2 pixels, (x, y) in half pixels from the first pixel.
SITINGS = {
    "left": (0, 1),
    "center": (1, 1),
    "topleft": (0, 0),
    "top": (1, 0),
    "bottomleft": (0, 2),
    "bottom": (1, 2),
}

_COEFFICIENT_BITS = 17  # the most that, with 4 bits for chroma, keeps the sum of two products below 2**31
_SHIFT = _COEFFICIENT_BITS + 4
# Number of pixels to process at once. On the CPU, they stay in the cache; elsewhere, they are worth the kernel launches
# and need about 35 bytes of temporary memory per pixel (150 MB).
_CPU_PIXELS, _DEVICE_PIXELS = 1 << 18, 1 << 22


def color_table(matrices: Sequence[str], ranges: Sequence[str], sitings: Sequence[str]) -> torch.Tensor:
    """Return the color table for `yuv420p_to_rgb`, as int32 with shape (B, 8), in host memory.

    matrices: one name from LUMA_SHARES per sample.
    ranges: one name from RANGES per sample.
    sitings: one name from SITINGS per sample, as in FFmpeg's AVChromaLocation. The default is "left" for H.264, HEVC
        and MPEG-2, and "center" for JPEG.
    Raises ConfigError for an unknown name.
    """
    import torch

    rows = [_coefficients(*names) for names in zip(matrices, ranges, sitings, strict=True)]
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), 8)


@cache
def _coefficients(matrix: str, color_range: str, siting: str) -> tuple[int, ...]:
    """Return one row of the color table, with fixed-point coefficients.

    The row is [black, Y to RGB, V to R, U to G, V to G, U to B, siting x, siting y].
    """
    for field, name, known in (
        ("matrix", matrix, LUMA_SHARES),
        ("range", color_range, RANGES),
        ("siting", siting, SITINGS),
    ):
        if name not in known:
            raise ConfigError(
                f"{field}={name!r} is not supported for conversion from yuv420p to RGB; allowed: {', '.join(known)}"
            )
    (red, blue), (black, luma, chroma) = LUMA_SHARES[matrix], RANGES[color_range]
    green = 1 - red - blue
    to_red, to_blue = 2 * (1 - red), 2 * (1 - blue)
    exact = [to_red, -to_blue * blue / green, -to_red * red / green, to_blue]
    one = 255 * 2**_COEFFICIENT_BITS
    return (black, round(one * 16 / luma), *(round(one * number / chroma) for number in exact), *SITINGS[siting])


def yuv420p_to_rgb(
    planes: torch.Tensor, table: torch.Tensor, height: int, width: int, layout: Layout = "BCTHW"
) -> torch.Tensor:
    """Return yuv420p frames as contiguous uint8 RGB in `layout`. The result is the same on every device.

    planes: uint8 with shape (B, T, height * width * 3 // 2). Each frame consists of Y (H, W), then U and V (H/2, W/2
        each).
    table: result of `color_table` for these B samples, on the same device. Different values do not cause
        recompilation, because no branch depends on them.

    Chroma is upsampled linearly from its siting, with the edges repeated. Values are clamped last.
    """
    import torch

    if torch.compiler.is_compiling():  # one kernel without intermediates: no need to split
        channels = _channels(planes, table, height, width)
        return torch.stack([channel.to(torch.uint8) for channel in channels], dim=layout.index("C"))
    shape = {"B": planes.shape[0], "C": 3, "T": planes.shape[1], "H": height, "W": width}
    out = torch.empty([shape[name] for name in layout], dtype=torch.uint8, device=planes.device)
    pictures = out.unbind(layout.index("C"))  # R, G and B, (B, T, H, W) each
    for samples, frames in _pieces(planes, height * width):
        channels = _channels(planes[samples, frames], table[samples], height, width)
        for picture, channel in zip(pictures, channels, strict=True):
            picture[samples, frames] = channel
    return out


def _pieces(planes: torch.Tensor, frame_pixels: int) -> Iterator[tuple[slice, slice]]:
    """Yield pairs of slices (samples, frames) that together cover `planes`."""
    num_samples, num_frames, _ = planes.shape
    frames_at_once = max(1, (_CPU_PIXELS if planes.device.type == "cpu" else _DEVICE_PIXELS) // frame_pixels)
    samples_at_once = max(1, frames_at_once // max(1, num_frames))
    for sample in range(0, num_samples, samples_at_once):
        for frame in range(0, num_frames, frames_at_once):
            yield slice(sample, sample + samples_at_once), slice(frame, frame + frames_at_once)


def _channels(planes: torch.Tensor, table: torch.Tensor, height: int, width: int) -> list[torch.Tensor]:
    """Return the R, G and B channels of frames with shape (b, t, …), each as int32 with shape (b, t, H, W)."""
    import torch

    num_samples, num_frames, _ = planes.shape
    black, gain, v_to_r, u_to_g, v_to_g, u_to_b = table[:, :6].reshape(num_samples, 6, 1, 1, 1).unbind(1)
    luma = planes[..., : height * width].view(num_samples, num_frames, height, width)
    chroma = planes[..., height * width :].view(num_samples, num_frames, 2, height // 2, width // 2)
    small, siting = chroma.to(torch.int16) - 128, table[:, 6:].to(torch.int16).reshape(num_samples, 2, 1, 1, 1, 1)
    u, v = _doubled(_doubled(small, siting[:, 1], -2), siting[:, 0], -1).to(torch.int32).unbind(2)
    # Add half a level, so that the shift, which rounds down, rounds to the nearest level.
    gray = torch.addcmul((1 << (_SHIFT - 1)) - black * gain, luma.to(torch.int32), gain)
    sums = (
        torch.addcmul(gray, v, v_to_r),
        torch.addcmul(gray, u, u_to_g).addcmul_(v, v_to_g),
        torch.addcmul(gray, u, u_to_b),
    )
    return [total.bitwise_right_shift_(_SHIFT).clamp_(0, 255) for total in sums]


def _doubled(samples: torch.Tensor, siting: torch.Tensor, dim: int) -> torch.Tensor:
    """Double the size along `dim` by linear interpolation, and multiply values by 4.

    siting: offset of the chroma samples along `dim`, in half pixels, from 0 to 2.
    """
    import torch

    count, edge = samples.shape[dim], torch.zeros_like(samples.narrow(dim, 0, 1))  # no slope beyond an edge
    slopes = torch.cat([edge, samples.narrow(dim, 1, count - 1) - samples.narrow(dim, 0, count - 1), edge], dim)
    fourfold = samples * 4
    even = torch.addcmul(fourfold, slopes.narrow(dim, 0, count), -siting)
    odd = torch.addcmul(fourfold, slopes.narrow(dim, 1, count), 2 - siting)
    after_dim = samples.ndim + dim + 1
    return torch.stack([even, odd], after_dim).flatten(after_dim - 1, after_dim)
