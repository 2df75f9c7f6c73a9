"""Each key is worked on once at a time, and again when it could not be done."""

from __future__ import annotations

import asyncio
from collections import Counter

from trainyard_operator.queue import Later, Queue

PATIENCE_S = 120


async def test_a_key_that_waits_is_worked_on_once() -> None:
    done: Counter[str] = Counter()
    both = asyncio.Event()

    async def work(key: str) -> None:
        done[key] += 1
        if done["a"] and done["b"]:
            both.set()

    queue = Queue(work, workers=2, pause_s=0.001)
    for key in "aab":
        queue.add(key)
    queue.start()
    await asyncio.wait_for(both.wait(), PATIENCE_S)
    await queue.stop()
    assert done == {"a": 1, "b": 1}


async def test_a_key_that_comes_while_it_is_worked_on_is_worked_on_again_afterwards() -> None:
    running, most, times = 0, 0, 0
    again = asyncio.Event()

    async def work(key: str) -> None:
        nonlocal running, most, times
        running, times = running + 1, times + 1
        most = max(most, running)
        if times == 1:
            queue.add(key)
            queue.add(key)
        await asyncio.sleep(0)
        running -= 1
        if times == 2:
            again.set()

    queue = Queue(work, workers=4, pause_s=0.001)
    queue.add("a")
    queue.start()
    await asyncio.wait_for(again.wait(), PATIENCE_S)
    await asyncio.sleep(0)
    await queue.stop()
    assert (most, times) == (1, 2)


async def test_what_cannot_be_done_now_is_tried_again_and_a_defect_as_well() -> None:
    tries: list[str] = []
    done = asyncio.Event()

    async def work(key: str) -> None:
        tries.append(key)
        if len(tries) == 1:
            raise Later("the yard is away")
        if len(tries) == 2:
            raise KeyError("a defect")
        done.set()

    queue = Queue(work, workers=1, pause_s=0.001)
    queue.add("a")
    queue.start()
    await asyncio.wait_for(done.wait(), PATIENCE_S)
    await queue.stop()
    assert tries == ["a", "a", "a"]
