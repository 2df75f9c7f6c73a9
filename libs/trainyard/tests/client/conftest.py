from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libs.trainyard.tests.client.scripted import ScriptedYard


@pytest.fixture
async def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedYard]:
    """A scripted yard that serves TRAINYARD_HOME."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("TRAINYARD_HOME", str(folder))
    for name in ("TRAINYARD_ENDPOINT", "TRAINYARD_TOKEN", "TRAINYARD_CA_FILE"):
        monkeypatch.delenv(name, raising=False)
    served = ScriptedYard(folder)
    await served.start()
    yield served
    await served.stop()
