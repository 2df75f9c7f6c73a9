"""A server of MLflow for the tests that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from libs.trainkit.tests.trackers.server import Server


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("mlflow"))
    made.start()
    yield made
    made.stop()
