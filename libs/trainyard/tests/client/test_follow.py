"""Every line once, whatever the launcher still has in memory."""

from trainyard.client import AsyncClient
from trainyard.client.follow import Position
from trainyard_protos.v1 import launcher_pb2, metrics_pb2

from libs.trainyard.tests.client.scripted import JOB_ID, ScriptedYard, job, line, lines, started


async def followed(yard: ScriptedYard, position: Position | None = None) -> list[str]:
    yard.job = job("succeeded")
    seen = []
    async with AsyncClient() as client:
        async for event in client.follow(JOB_ID, position):
            if event.WhichOneof("event") == "dropped":
                seen.append(f"lost {event.dropped.from_seq}-{event.dropped.to_seq}")
            seen += [each.text for each in event.lines.lines]
    return seen


def stored(attempt: int, *texts: str) -> list[metrics_pb2.StoredLine]:
    return [metrics_pb2.StoredLine(attempt=attempt, line=line(seq, text)) for seq, text in enumerate(texts)]


async def test_lines_come_in_order(yard: ScriptedYard) -> None:
    yard.live = [[started(1), lines(line(0, "a"), line(1, "b")), lines(line(2, "c"))]]
    assert await followed(yard) == ["a", "b", "c"]


async def test_lines_that_left_the_memory_are_read_from_the_store(yard: ScriptedYard) -> None:
    dropped = launcher_pb2.FollowEvent(dropped=launcher_pb2.FollowEvent.Dropped(node=0, from_seq=0, to_seq=2))
    yard.live = [[started(1), dropped, lines(line(2, "c"))]]
    yard.stored = stored(1, "a", "b", "c")
    assert await followed(yard) == ["a", "b", "c"]


async def test_a_gap_is_filled_even_when_nobody_announced_it(yard: ScriptedYard) -> None:
    yard.live = [[started(1), lines(line(0, "a"), line(2, "c"))]]
    yard.stored = stored(1, "a", "b", "c")
    assert await followed(yard) == ["a", "b", "c"]


async def test_lines_that_are_nowhere_leave_a_mark(yard: ScriptedYard) -> None:
    yard.live = [[started(1), lines(line(5, "f"))]]
    yard.stored = stored(1, "a", "b")
    assert await followed(yard) == ["a", "b", "lost 2-5", "f"]


async def test_lines_that_come_twice_are_shown_once(yard: ScriptedYard) -> None:
    yard.live = [[started(1), lines(line(0, "a"), line(1, "b")), lines(line(0, "a"), line(1, "b"), line(2, "c"))]]
    assert await followed(yard) == ["a", "b", "c"]


async def test_a_new_attempt_is_counted_from_its_own_first_line(yard: ScriptedYard) -> None:
    yard.live = [[started(1), lines(line(0, "a")), started(2), lines(line(0, "again"))]]
    assert await followed(yard) == ["a", "again"]


async def test_nodes_are_counted_apart(yard: ScriptedYard) -> None:
    yard.live = [[started(1), lines(line(0, "a"), line(0, "b", node=1)), lines(line(1, "c", node=1), line(1, "d"))]]
    assert await followed(yard) == ["a", "b", "c", "d"]


async def test_a_restart_of_the_yard_leaves_no_gap_and_no_double(yard: ScriptedYard) -> None:
    yard.live = [
        [started(1), lines(line(0, "a"), line(1, "b")), "die"],
        [started(1), lines(line(1, "b"), line(2, "c"))],
    ]
    assert await followed(yard) == ["a", "b", "c"]
    assert [dict(request.next_seq) for request in yard.asked("Follow")] == [{}, {0: 2}]


async def test_a_reader_who_has_read_some_gets_the_rest(yard: ScriptedYard) -> None:
    yard.live = [[started(2), lines(line(0, "a"), line(1, "b"), line(2, "c"))]]
    assert await followed(yard, Position(attempt=2, next_seq={0: 2})) == ["c"]
