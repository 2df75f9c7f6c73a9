"""A hook of the chart that fails: it says why, the next try is a new one, and nothing of it outlives the release."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.patience import PATIENCE_S
from tests.cluster.release import HelmFailed, Release

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(8 * PATIENCE_S)]

KINDS = "jobs,pods,configmaps,secrets,serviceaccounts,roles,rolebindings"


@pytest.fixture
def release(cluster: Cluster, cluster_namespace: str, tmp_path: Path) -> Iterator[Release]:
    found = Release(cluster, cluster_namespace, tmp_path)
    found.load_images()
    yield found
    found.remove_cluster_objects()


def why_not(release: Release) -> str:
    """What helm says of an installation that does not come to be."""
    with pytest.raises(HelmFailed) as failed:
        release.install()
    return str(failed.value)


@pytest.mark.exhaustive  # a hook is tried four times, with longer and longer pauses
def test_a_failed_hook_says_why_is_tried_anew_and_goes_with_the_release(release: Release) -> None:
    release.values["tls"] = {"existingSecret": "mine"}
    release.kubectl("create", "secret", "generic", "mine", "--from-literal=tls.crt=x")
    before = release.named(KINDS)
    assert "has no tls.key and no ca.crt" in why_not(release)
    [failed] = release.objects("jobs")
    assert "has no tls.key" in release.kubectl("logs", f"job/{failed['metadata']['name']}")
    release.kubectl("patch", "secret", "mine", '--patch={"stringData":{"tls.key":"x"}}')
    assert "has no ca.crt" in why_not(release)
    release.uninstall()
    assert release.named(KINDS) == before
    assert release.cluster_objects() == []
