"""A yard that only reads gives way to a yard that runs jobs."""

from collections.abc import AsyncIterator

import pytest
from servicekit.auth import Principal, set_principal
from servicekit.errors import Unavailable
from trainyard_embedded.yard_servicer import ReadingYardServicer
from trainyard_protos.v1 import yard_pb2
from trainyard_scheduler.yard_servicer import YardFacts


async def attach(servicer: ReadingYardServicer) -> None:
    async def requests() -> AsyncIterator[yard_pb2.AttachRequest]:
        yield yard_pb2.AttachRequest()

    set_principal(Principal("user"))
    async for _ in servicer.Attach(requests(), None):  # type: ignore[arg-type]
        pass


async def test_it_takes_no_clients_while_it_gives_way_and_takes_them_again_when_that_yard_is_gone() -> None:
    servicer = ReadingYardServicer(YardFacts(home="/home"))
    servicer.give_way(600)
    with pytest.raises(Unavailable):
        await attach(servicer)
    servicer.stay()
    await attach(servicer)
    assert not servicer.ended.is_set()


async def test_it_ends_when_its_clients_stay_for_too_long() -> None:
    servicer = ReadingYardServicer(YardFacts(home="/home"))
    servicer.give_way(0)
    await servicer.ended.wait()
    servicer.stay()
    with pytest.raises(Unavailable):
        await attach(servicer)
