"""Measures the search for near-duplicates: time, memory, and the share of copies that are found.

    python tools/bench_duplicates.py [ROWS ...]

Signatures are random, with the share of high and low values that real videos have. One row in 100 is a copy, in which
values change as often as in planted copies (tests/planted.py).
"""

from __future__ import annotations

import resource
import sys
import time

import numpy as np

from streamvid.sharder.curation.groups import Numbers, find_leaders, similar
from streamvid.sharder.curation.signature import NUM_APPEARANCE_WORDS, NUM_WORDS, Words

_HIGH = 0.38  # share of values that are high, and of those that are low
_CHANGED = (0.02, 0.16)  # least and most share of changed values in a copy
_COPIES = 100  # one row in so many is a copy


def signatures(rng: np.random.Generator, num_rows: int) -> Words:
    """Return random signatures of videos without motion."""
    words = np.zeros((NUM_WORDS, num_rows), np.uint64)
    for word in range(0, NUM_APPEARANCE_WORDS, 2):
        for bit in range(1, 64):
            values = rng.random(num_rows, np.float32)
            words[word] |= (values < _HIGH).astype(np.uint64) << np.uint64(bit)
            words[word + 1] |= (values > 1 - _HIGH).astype(np.uint64) << np.uint64(bit)
    return words


def plant(rng: np.random.Generator, words: Words) -> tuple[Numbers, Numbers]:
    """Replace the last rows with copies of the first rows. Return the pairs (original, copy) that are similar."""
    num_copies = words.shape[1] // _COPIES
    others, shares = signatures(rng, num_copies), rng.uniform(*_CHANGED, num_copies)
    masks = np.zeros((NUM_APPEARANCE_WORDS // 2, num_copies), np.uint64)
    for bit in range(1, 64):
        masks |= (rng.random(masks.shape) < shares).astype(np.uint64) << np.uint64(bit)
    copies = words[:NUM_APPEARANCE_WORDS, :num_copies]
    mask = np.repeat(masks, 2, axis=0)
    words[:NUM_APPEARANCE_WORDS, -num_copies:] = copies & ~mask | others[:NUM_APPEARANCE_WORDS] & mask
    first = np.arange(num_copies)
    second = first + words.shape[1] - num_copies
    is_similar = similar(words, first, second)
    return first[is_similar], second[is_similar]


def main() -> None:
    for num_rows in [int(text) for text in sys.argv[1:]] or [10_000, 100_000]:
        rng = np.random.default_rng(0)
        words = signatures(rng, num_rows)
        first, second = plant(rng, words)
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        leaders = find_leaders(words)
        seconds = time.process_time() - start
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(
            f"{num_rows} rows: {seconds:.0f} s of CPU time, {words.nbytes / 1e6:.0f} MB of signatures, "
            f"{most * 1024 / 1e6:.0f} MB at most ({before * 1024 / 1e6:.0f} MB before), "
            f"{np.mean(leaders[second] == first):.1%} of {len(first)} similar copies found, "
            f"{(leaders != np.arange(num_rows)).sum()} rows grouped",
            flush=True,
        )


if __name__ == "__main__":
    main()
