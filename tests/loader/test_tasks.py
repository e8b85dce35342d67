"""Tests of the messages to decode workers: tasks arrive unchanged and in order, and one worker runs what it receives."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.buckets.pick import Pick
from streamvid.loader.view.index_row import PacketsPlace, SampleFile
from streamvid.loader.workers.arena import Arena
from streamvid.loader.workers.messages import (
    GENERATION,
    MAX_MESSAGE_BYTES,
    Answer,
    AudioTask,
    ClipBlock,
    DecodeTask,
    ReadSlot,
    ReadTask,
    TarFile,
    Task,
    open_message,
    parse_task,
    task_messages,
)
from streamvid.loader.workers.pool import DecodePool
from streamvid.video.picture import PictureFormat
from streamvid.video.transform import Crop

NUMBERS = st.integers(0, 1 << 62)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=1024) | st.just("\U0001f600" * 1024)
PICKS = st.builds(Pick, st.integers(1, 99), NUMBERS, st.integers(1, 9), st.just("time"), st.just(Fraction(30000, 1001)))
PIECES = st.builds(
    lambda pieces, count: tuple(pieces * count),
    st.lists(st.tuples(NUMBERS, NUMBERS, st.binary(min_size=8, max_size=8)), min_size=1, max_size=2),
    st.sampled_from([1, 256]),
)
RANGES = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=2)
DECODES = st.builds(
    DecodeTask,
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.builds(ClipBlock, NUMBERS, NUMBERS, NUMBERS, PIECES, NUMBERS, TEXTS, NUMBERS, TEXTS, RANGES),
    PICKS,
    st.none() | st.builds(Crop, st.integers(0, 1 << 31), st.integers(0, 1 << 31), st.integers(1, 1 << 16)),
    st.none() | st.just(PictureFormat(64, 96, "rgb24", "exact")),
    NUMBERS,
    audio=st.none() | st.just(AudioTask(48000, 2, 1000, 7, "", (3, 4))),
)
READS = st.builds(
    ReadTask,
    NUMBERS,
    NUMBERS,
    st.tuples(st.builds(PacketsPlace, TEXTS, NUMBERS, NUMBERS, TEXTS, NUMBERS)),
    st.tuples(
        st.builds(
            ReadSlot,
            st.builds(TarFile, TEXTS, TEXTS),
            st.builds(SampleFile, NUMBERS, NUMBERS, st.binary(min_size=32, max_size=32), NUMBERS),
            *(PICKS, st.just(0), NUMBERS, NUMBERS, NUMBERS),
        )
    ),
)


@settings(max_examples=60)
@given(tasks=st.lists(DECODES | READS, max_size=9))
def test_tasks_arrive_unchanged_and_in_order(tasks: list[Task]) -> None:
    messages = list(task_messages(tasks))
    assert all(len(message) <= MAX_MESSAGE_BYTES for message in messages)
    found = [parse_task(*opened) for message in messages for opened in open_message(message)]
    # JSON has no tuples, so the tasks are compared as the messages that each of them makes.
    assert [[*task_messages([task])] for task in found] == [[*task_messages([task])] for task in tasks]
    assert all([*open_message(message)] for message in messages), "an empty message would end a worker"
    assert len(messages) <= 1 or sum(map(len, messages)) > MAX_MESSAGE_BYTES


def test_one_worker_runs_the_tasks_of_a_message() -> None:
    """Tasks of a run that is over need no decoder."""
    clips, ring = Arena("clips", 4096), Arena("ring", 4096)
    GENERATION.pack_into(clips.view, 0, 2)
    pool = DecodePool(2, clips, ring)
    block = ClipBlock(0, 0, 0, (), 1)
    heard: list[Answer] = []

    def tasks(*numbers: int) -> list[DecodeTask]:
        return [DecodeTask(number, 1, 7, block, Pick(1), None, None, 0) for number in numbers]

    try:
        pool.submit(tasks(0, 1, 2, 3))
        pool.submit([])
        while len(heard) < 4:
            pool.serve(1.0, heard.append)
        assert [(answer.task_id, answer.kind) for answer in heard] == [(number, "done") for number in range(4)]
        assert len({answer.pid for answer in heard}) == 1 and heard[0].pid in pool.pids
    finally:
        pool.close()
        clips.close()
        ring.close()
