"""A real metrics ingestor behind a real server, on a free port, in a folder of the test's own."""

import pytest

from services.metrics.tests.metrics_kit import Ingestor


@pytest.fixture
async def ingestor(tmp_path):
    ingestor = Ingestor(tmp_path / "home")
    await ingestor.start()
    yield ingestor
    await ingestor.stop()


@pytest.fixture
async def each_ingestor(tmp_path, database_url):
    """The same on every kind of database."""
    ingestor = Ingestor(tmp_path / "home", database_url)
    await ingestor.start()
    yield ingestor
    await ingestor.stop()
