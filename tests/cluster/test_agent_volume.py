"""How the agent gets into pods, on real kubelets and with the image that users get."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts.testbed import images
from scripts.testbed.cluster.cluster import Cluster
from tests.cluster.conftest import in_a_namespace
from tests.cluster.yards import ClusterYard
from tests.conftest import wait_until
from tests.jobs import WAIT_S, document, output

NO_SUCH_IMAGE = "localhost/none/agent:1"
LOOKS_AROUND = "id -u; touch /opt/trainyard/mine 2>/dev/null || echo read-only; echo here; exec sleep 3600"

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(8 * WAIT_S)]


@pytest.fixture
def agent_image(cluster: Cluster) -> str:
    """The agent's image, which every node has."""
    wanted = images.reference("agent")
    if not all(wanted in known for known in cluster.images().values()):
        cluster.load_image(images.archive("agent"))
    return wanted


@pytest.fixture
def yard(
    request: pytest.FixtureRequest, cluster: Cluster, agent_image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterYard]:
    """A yard whose pods get nothing from a template; its settings are the test's parameter."""
    settings = {"AGENT_IMAGE": agent_image, "PULL_POLICY": "Never", "POD_TEMPLATE": ""} | request.param
    yield from in_a_namespace(
        cluster, tmp_path_factory, **{f"KUBERNETES_{name}": value for name, value in settings.items()}
    )


@pytest.mark.parametrize(
    ("yard", "init_containers", "source"),
    [({}, [], "image"), ({"AGENT_VOLUME": "copy"}, ["agent"], "emptyDir")],
    ids=["by itself", "copied"],
    indirect=["yard"],
)
def test_a_job_of_any_user_runs_with_an_agent_that_nobody_can_change(
    yard: ClusterYard, init_containers: list[str], source: str
) -> None:
    """Machines of the testbed can mount images, so they do when nothing is said."""
    wishes = {"runAsUser": 4242, "runAsGroup": 4242}
    with yard.client() as client:
        job = client.submit(document(["sh", "-c", LOOKS_AROUND], kubernetes=wishes, gracePeriod="1s"))
        wait_until(lambda: "here" in output(job), f"{job.name} to print", WAIT_S)
        [pod] = yard.get("pods", **{"job-id": job.id})
        assert output(job) == ["4242", "read-only", "here"]
        assert [each["name"] for each in pod["spec"].get("initContainers", ())] == init_containers
        [volume] = [each for each in pod["spec"]["volumes"] if each["name"] == "trainyard-agent"]
        assert source in volume
        job.cancel()
        assert job.wait(WAIT_S, check=False).reason == "Cancelled"
        yard.assert_nothing_left(job.id)


@pytest.mark.parametrize("yard", [{"AGENT_IMAGE": NO_SUCH_IMAGE}], indirect=True)
def test_an_agents_image_that_is_not_there_is_told_as_the_yards_matter(yard: ClusterYard) -> None:
    with yard.client() as client:
        status = client.submit(document(["true"])).wait(WAIT_S, check=False)
    assert status.reason == "ImageUnavailable"
    assert f"image {NO_SUCH_IMAGE} cannot be had" in status.message
    assert "TRAINYARD_LAUNCHER_KUBERNETES_AGENT_IMAGE" in status.message
