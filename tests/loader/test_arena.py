"""Tests of the ring allocator: blocks never overlap, none is lost, and waiting callers are woken."""

from __future__ import annotations

import threading
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.loader.workers.arena import ALIGN_BYTES, Arena, Block, align
from streamvid.loader.workers.messages import GENERATION


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40_000)), max_size=80))
def test_blocks_never_overlap_and_all_are_returned(moves: list[tuple[bool, int]]) -> None:
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


def test_wake_ends_the_wait_without_a_block() -> None:
    arena = Arena("test", 4096)
    arena.allocate(1, 0.0)
    threading.Timer(0.05, arena.wake).start()
    before = time.monotonic()
    assert arena.allocate(1, 60.0) is None
    assert time.monotonic() - before < 30
    arena.close()


def test_pending_work_finishes_before_a_block_is_reused() -> None:
    """BATCH-1: a copy to a device may still be reading the block after its last tensor has been freed."""
    arena = Arena("test", 4096)
    offset = arena.allocate(1, 0.0)
    assert offset is not None
    seen = []
    arena.release(offset, lambda: seen.append("waited"))
    assert arena.allocate(1, 0.0) == offset and seen == ["waited"]
    arena.close()


def test_memory_outlives_the_arena_while_a_view_exists() -> None:
    arena = Arena("test", 4096)
    view = arena.view[10:14]
    view[:] = b"data"
    arena.close()
    assert bytes(view) == b"data"


def test_a_block_is_returned_exactly_once() -> None:
    """STOP-1: `release` may be called twice, or never if an interrupt occurs between two lines."""
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


def test_a_write_after_close_is_ignored() -> None:
    """STOP-1: a thread that starts or ends a loop may write its run number while another thread closes the loader."""
    arena = Arena("test", ALIGN_BYTES)
    arena.close()
    GENERATION.pack_into(arena.view, 0, 7)
