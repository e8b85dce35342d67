"""Conversion of a tokenizer's result to fields of a batch. Legend: B samples, L tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streamvid.errors import ConfigError, LoaderError
from streamvid.loader.options import Tokenizer

TOKENS, MASK = "text_tokens", "text_mask"
_NAMES = {"input_ids": TOKENS, "attention_mask": MASK}  # names in Hugging Face's tokenizers


def check_token_fields(columns: Sequence[str]) -> None:
    """Raise ConfigError if a column has a name that is reserved for the tokenizer's result."""
    for name in columns:
        if name in (TOKENS, MASK):
            raise ConfigError(
                f"columns: {name!r} is reserved for the tokenizer's result; leave it out or rename the column"
            )


def tokenize(tokenizer: Tokenizer, texts: list[str], keys: Sequence[str]) -> Mapping[str, Any]:
    """Call the tokenizer once and return its result as fields: tensors, or lists of B values.

    In a mapping, `input_ids` becomes text_tokens (int64), `attention_mask` becomes text_mask (bool), both with shape
    (B, L), and any other `name` becomes text_<name>. A list of B lists of integers, a list of B objects with `ids`
    (Hugging Face's Encoding) or an array with shape (B, L) becomes text_tokens. Lists of unequal length are padded on
    the right: tokens with the tokenizer's pad_token_id if it has one, and all other lists with 0. Without a mask in
    the result, text_mask is False for this padding.

    Raises LoaderError, which names the samples, if the tokenizer raises an error or returns any other result.
    """
    try:
        result = tokenizer(list(texts))
    except Exception as error:
        raise LoaderError(_about(keys, f"the tokenizer failed: {type(error).__name__}: {error}")) from error
    try:
        fields = _fields(result, len(texts), getattr(tokenizer, "pad_token_id", None))
    except ValueError as error:
        raise LoaderError(_about(keys, str(error))) from error
    import torch

    kinds = {TOKENS: torch.int64, MASK: torch.bool}
    return {
        name: value if isinstance(value, list) else torch.as_tensor(value, dtype=kinds.get(name))
        for name, value in fields.items()
    }


def _fields(result: Any, num_samples: int, pad: object) -> Mapping[str, Any]:
    if isinstance(result, Mapping):
        given = {name: value for name, value in result.items() if value is not None}
        named = {_NAMES.get(name, f"text_{name}"): value for name, value in given.items()}
        if len(named) < len(given):
            twice = next(name for name in (TOKENS, MASK) if name.removeprefix("text_") in given)
            raise ValueError(
                f"the tokenizer returned {twice} under two names (the result contains {', '.join(map(str, given))}); "
                f"return {twice} only once"
            )
    elif isinstance(result, list | tuple) and result and all(hasattr(one, "ids") for one in result):
        named = {TOKENS: [one.ids for one in result]}
        if all(hasattr(one, "attention_mask") for one in result):
            named[MASK] = [one.attention_mask for one in result]
    else:
        named = {TOKENS: result}
    fields = {}
    for name, value in named.items():
        filler = pad if name == TOKENS and isinstance(pad, int) else 0
        fields[name], mask = _padded(name, value, num_samples, filler)
        if name == TOKENS and MASK not in named:
            fields[MASK] = mask
    for name, allowed in ((TOKENS, "int"), (MASK, "bool|int")):
        if name in fields and not re.search(allowed, str(fields[name].dtype)):
            raise ValueError(
                f"the tokenizer returned {name} with dtype {fields[name].dtype}; return integers. To return values of "
                "other dtypes, return a dict that contains them under other names"
            )
    if TOKENS in fields and tuple(fields[MASK].shape) != tuple(fields[TOKENS].shape):
        raise ValueError(
            f"the tokenizer returned a mask of shape {tuple(fields[MASK].shape)} for tokens of shape "
            f"{tuple(fields[TOKENS].shape)}; the shapes must be equal"
        )
    return fields


def _padded(name: str, value: Any, num_samples: int, filler: int) -> tuple[Any, Any]:
    """Check one output of a tokenizer, and return (values, mask).

    Lists of numbers are padded to one array, and the mask is False for padding. A list of other values is returned
    unchanged, with None as the mask.
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        if not value.shape or value.shape[0] != num_samples:
            raise ValueError(
                f"the tokenizer returned {name} of shape {tuple(value.shape)} for {num_samples} texts; return one row "
                "per text"
            )
        return value, np.ones(tuple(value.shape), np.bool_)
    if not isinstance(value, list | tuple) or len(value) != num_samples:
        said = (
            f"{len(value)} entries of {name}"
            if isinstance(value, list | tuple)
            else f"{name} as a {type(value).__name__}"
        )
        raise ValueError(f"the tokenizer returned {said} for {num_samples} texts; return one entry per text")
    if not all(isinstance(one, list | tuple | np.ndarray) for one in value):
        if name in (TOKENS, MASK):
            raise ValueError(
                f"the tokenizer returned {name} with an entry that is not a list of integers; return one list of "
                "integers per text"
            )
        return list(value), None
    rows: list[npt.NDArray[Any]] = [np.asarray(one) if len(one) else np.zeros(0, np.int64) for one in value]
    if any(row.ndim != 1 or row.dtype.kind not in "biuf" for row in rows):
        raise ValueError(
            f"the tokenizer returned {name} with an entry that is not a list of numbers; return one list of numbers "
            "per text"
        )
    length, kind = max(map(len, rows)), np.result_type(*rows)
    if name == TOKENS and kind.kind in "iu":
        kind = np.dtype(np.int64)  # the dtype of the tokens may not fit the padding, such as -100
    out = np.full((num_samples, length), filler, kind)
    mask = np.zeros((num_samples, length), np.bool_)
    for number, row in enumerate(rows):
        out[number, : len(row)] = row
        mask[number, : len(row)] = True
    return out, mask


def _about(keys: Sequence[str], what: str) -> str:
    named = ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
    return f"{what} (texts of {named})"
