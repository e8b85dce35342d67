"""The allocator never hands out overlapping blocks, loses none, and wakes who waits."""

from __future__ import annotations

import threading
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.loader.workers.arena import ALIGN_BYTES, Arena, Block, align
from streamvid.loader.workers.messages import GENERATION


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40_000)), max_size=80))
def test_blocks_never_overlap_and_all_comes_back(moves: list[tuple[bool, int]]) -> None:
    arena = Arena("test", 100_000)
    held: dict[int, int] = {}
    for take, number in moves:
        if take:
            offset = arena.allocate(number, 0.0)
            if offset is not None:
                assert offset % ALIGN_BYTES == 0 and offset + number <= arena.num_bytes
                assert all(offset + number <= o or o + n <= offset for o, n in held.items())
                held[offset] = number
            else:
                assert sum(align(n) for n in held.values()) + align(number) > arena.num_bytes / (len(held) + 1)
        elif held:
            offset = sorted(held)[number % len(held)]
            del held[offset]
            arena.release(offset)
    assert arena.num_allocated == len(held)
    for offset in held:
        arena.release(offset)
    assert arena.allocate(arena.num_bytes, 0.0) == 0
    arena.close()


def test_a_release_from_another_thread_ends_the_wait() -> None:
    arena = Arena("test", 8192)
    first = arena.allocate(8192, 0.0)
    assert first == 0 and arena.allocate(1, 0.0) is None
    threading.Timer(0.05, arena.release, [first]).start()
    assert arena.allocate(8192, 10.0) == 0
    arena.close()


def test_wake_ends_the_wait_with_nothing() -> None:
    arena = Arena("test", 4096)
    arena.allocate(1, 0.0)
    threading.Timer(0.05, arena.wake).start()
    before = time.monotonic()
    assert arena.allocate(1, 60.0) is None
    assert time.monotonic() - before < 30
    arena.close()


def test_what_must_be_over_is_waited_for_before_a_block_is_used_again() -> None:
    """BATCH-1: a copy to a device may still read the block when its last tensor has died."""
    arena = Arena("test", 4096)
    offset = arena.allocate(1, 0.0)
    assert offset is not None
    seen = []
    arena.release(offset, lambda: seen.append("waited"))
    assert arena.allocate(1, 0.0) == offset and seen == ["waited"]
    arena.close()


def test_memory_outlives_the_arena_while_somebody_looks_at_it() -> None:
    arena = Arena("test", 4096)
    view = arena.view[10:14]
    view[:] = b"data"
    arena.close()
    assert bytes(view) == b"data"


def test_a_block_goes_back_once_whoever_loses_it() -> None:
    """STOP-1: told twice, or never, as where an interrupt comes between two lines."""
    arena = Arena("test", 2 * ALIGN_BYTES)
    offset = arena.allocate(ALIGN_BYTES, 0.0)
    assert offset is not None
    block = Block(arena, offset)
    block.release()
    again = arena.allocate(ALIGN_BYTES, 0.0)
    assert again == offset
    block.release()
    del block
    assert arena.num_allocated == 1
    lost = Block(arena, again)
    del lost
    assert arena.num_allocated == 0
    arena.close()


def test_a_write_that_comes_after_the_close_is_lost() -> None:
    """STOP-1: a thread that begins or ends a loop while another closes the loader writes the number of its run."""
    arena = Arena("test", ALIGN_BYTES)
    arena.close()
    GENERATION.pack_into(arena.view, 0, 7)
