"""Jobs in images of users that know nothing of Trainyard, as pods of real kubelets.

One image has a program and nothing else: no shell, no Python, no C library. The other has a Python that finds another
grpcio and another protobuf than the agent's before all others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainyard.client import JobHandle
from trainyard_protos.v1 import common_pb2

from scripts.testbed import images
from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.cluster.images import busybox, write_archive
from tests.cluster.conftest import in_a_namespace
from tests.cluster.yards import ClusterYard
from tests.conftest import REPOSITORY
from tests.jobs import WAIT_S, document, python

ALONE = "localhost/trainyard/test-alone:1"
CONFLICTING = "localhost/trainyard/test-conflicting:1"
LINES = 2000
STEPS = [f"step {step}" for step in range(1, LINES + 1)]
COUNT = f'BEGIN {{ for (i = 1; i <= {LINES}; i++) print "step " i; exit code }}'
THEIRS = python(
    """
    import sys
    import google.protobuf, grpc
    for step in range(1, int(sys.argv[1]) + 1):
        print("step", step)
    print(grpc.__version__, google.protobuf.__version__)
    try:
        with open("/tmp/mine", "w"):
            print("written")
    except OSError as error:
        print(error.strerror)
    sys.exit(int(sys.argv[2]))
    """,
    str(LINES),
)
THEIRS[0] = "python3.11"
READ_ONLY = {"spec": {"containers": [{"name": "worker", "securityContext": {"readOnlyRootFilesystem": True}}]}}

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(8 * WAIT_S)]


@pytest.fixture
def loaded(cluster: Cluster, tmp_path: Path) -> None:
    """Every node has both images, and the agent's."""
    known = list(cluster.images().values())

    def missing(image: str) -> bool:
        return not all(image in each for each in known)

    if missing(images.reference("agent")):
        cluster.load_image(images.archive("agent"))
    if missing(ALONE):
        # By this name busybox is awk, and the image has no other.
        write_archive(tmp_path / "alone.tar", ALONE, {"awk": busybox()})
        cluster.load_image(tmp_path / "alone.tar")
    if missing(CONFLICTING):
        images.build("Dockerfile", CONFLICTING, REPOSITORY / "tests" / "cluster" / "user_images" / "conflicting")
        images.save(CONFLICTING, tmp_path / "conflicting.tar")
        cluster.load_image(tmp_path / "conflicting.tar")


@pytest.fixture
def yard(
    request: pytest.FixtureRequest, cluster: Cluster, loaded: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterYard]:
    """A yard whose pods get nothing of this machine: the agent comes from its image, as the test's parameter says."""
    volume, template = request.param
    file = tmp_path_factory.mktemp("template") / "pod.yaml"
    file.write_text(json.dumps(template))
    settings = {
        "AGENT_IMAGE": images.reference("agent"),
        "AGENT_VOLUME": volume,
        "PULL_POLICY": "Never",
        "POD_TEMPLATE": str(file),
    }
    yield from in_a_namespace(
        cluster, tmp_path_factory, **{f"KUBERNETES_{name}": value for name, value in settings.items()}
    )


def printed(yard: ClusterYard, job: JobHandle) -> list[str]:
    """What `yard logs` shows of it."""
    done = yard.yard("logs", job.id)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def ended(job: JobHandle) -> common_pb2.Exit:
    """How its one attempt ended."""
    job.wait(WAIT_S, check=False)
    [attempt] = job.status().attempts
    return attempt.exit


@pytest.mark.parametrize(
    ("yard", "said_of_writing"),
    [(("image", {}), "written"), (("copy", READ_ONLY), "Read-only file system")],
    ids=["mounted", "copied, read-only"],
    indirect=["yard"],
)
def test_the_agent_runs_where_there_is_one_program_and_where_its_packages_are_of_other_versions(
    yard: ClusterYard, said_of_writing: str
) -> None:
    with yard.client() as client:
        counts = client.submit(document(["/awk", COUNT], image=ALONE))
        fails = client.submit(document(["/awk", "-v", "code=3", COUNT], image=ALONE))
        no_shell = client.submit(document(["sh", "-c", "true"], image=ALONE))
        theirs = client.submit(document([*THEIRS, "0"], image=CONFLICTING))
        theirs_fails = client.submit(document([*THEIRS, "9"], image=CONFLICTING))

        assert ended(counts).reason == "Completed"
        assert printed(yard, counts) == STEPS
        assert (ended(fails).reason, ended(fails).exit_code) == ("WorkerFailed", 3)
        assert printed(yard, fails) == STEPS
        assert ended(no_shell).reason == "StartFailed"
        assert "no program of this name is in PATH" in ended(no_shell).message
        assert ended(theirs).reason == "Completed", printed(yard, theirs)[-20:]
        assert printed(yard, theirs) == [*STEPS, "1.60.2 4.25.8", said_of_writing]
        assert (ended(theirs_fails).reason, ended(theirs_fails).exit_code) == ("WorkerFailed", 9)
    yard.assert_nothing_left()
