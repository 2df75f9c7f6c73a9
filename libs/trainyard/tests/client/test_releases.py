"""What a cluster knows of a release. `tests/cluster` has the installed chart."""

from __future__ import annotations

from typing import Any

import pytest
from trainyard import errors
from trainyard.client.contexts import Release
from trainyard.client.releases import CA_CONFIG_MAP, TOKEN_SECRET, Gateway

ANNOTATIONS = {CA_CONFIG_MAP: "yard-ca", TOKEN_SECRET: "yard-token"}
KEPT: dict[str, dict[str, Any]] = {
    "/api/v1/namespaces/lab/configmaps/yard-ca": {"data": {"ca.crt": "PEM"}},
    "/api/v1/namespaces/lab/secrets/yard-token": {"data": {"token": "c2VzYW1l"}},
}


class Cluster:
    """An API server that has these objects."""

    def __init__(self, kept: dict[str, dict[str, Any]]) -> None:
        self.kept = kept
        self.asked: list[str] = []

    async def get(self, path: str, **_: str) -> dict[str, Any]:
        self.asked.append(path)
        return self.kept[path]


def gateway(cluster: Cluster, **annotations: str) -> Gateway:
    service = {"metadata": {"name": "gateway", "annotations": annotations}}
    return Gateway(cluster, Release("yard", "lab"), service)  # type: ignore[arg-type]


async def test_certificate_and_token_are_where_the_service_says() -> None:
    found = gateway(Cluster(KEPT), **ANNOTATIONS)
    assert (await found.ca(), await found.token()) == (b"PEM", "sesame")


@pytest.mark.parametrize("name", ["../secrets/other", "a/b", "x?watch=true", "..", ""])
async def test_a_service_leads_to_no_other_place(name: str) -> None:
    cluster = Cluster({})
    found = gateway(cluster, **{CA_CONFIG_MAP: name, TOKEN_SECRET: name})
    for part in (found.ca, found.token):
        with pytest.raises(errors.NotFound, match="of its gateway's Service names none"):
            await part()
    assert cluster.asked == []


async def test_of_several_gateways_none_is_taken() -> None:
    metadata = {"labels": {"app.kubernetes.io/instance": "yard"}, "annotations": ANNOTATIONS}
    found = [{"metadata": metadata | {"name": name}} for name in ("yard-gateway", "old-gateway")]
    cluster = Cluster({"/api/v1/namespaces/lab/services": {"items": found}})
    with pytest.raises(errors.Conflict, match="several gateways are there: old-gateway, yard-gateway"):
        await Gateway.find(cluster, Release("yard", "lab"))  # type: ignore[arg-type]


@pytest.mark.parametrize("kept", [{}, {"data": {"other": "x"}}])
async def test_what_is_not_filled_yet_is_told(kept: dict[str, Any]) -> None:
    found = gateway(Cluster(dict.fromkeys(KEPT, kept)), **ANNOTATIONS)
    with pytest.raises(errors.NotFound, match=r"configmap yard-ca has no ca\.crt"):
        await found.ca()
    with pytest.raises(errors.NotFound, match="secret yard-token has no token"):
        await found.token()
