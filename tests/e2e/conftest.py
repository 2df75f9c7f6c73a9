"""What holds for the yard of one machine holds for one whose services run apart."""

import pytest


@pytest.fixture(scope="module", params=["embedded", "split"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)
