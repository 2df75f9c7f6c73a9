"""skaffold.yaml: it is what skaffold accepts, and what skaffold would run with it works: build, install, sync."""

from __future__ import annotations

import io
import json
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from scripts.testbed import images
from scripts.testbed.cluster import binaries
from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.patience import PATIENCE_S
from tests.cluster.release import HelmFailed, helm
from tests.conftest import REPOSITORY, wait_until

SCHEMA = json.loads((Path(__file__).parent / "schemas" / "skaffold-v4beta14.json").read_text())
CONFIG: dict[str, Any] = yaml.safe_load((REPOSITORY / "skaffold.yaml").read_text())
ARTIFACTS: dict[str, dict[str, Any]] = {each["image"]: each for each in CONFIG["build"]["artifacts"]}
RELEASE: dict[str, Any] = CONFIG["deploy"]["helm"]["releases"][0]
PROFILES: list[str | None] = [None, *(each["name"] for each in CONFIG["profiles"])]
DIGEST = f"sha256:{'a' * 64}"
CHANGED = "services/metrics/src/trainyard_metrics/answers.py"


def with_profile(name: str) -> dict[str, Any]:
    """The configuration with the patches of a profile, all of which add a value."""
    changed: dict[str, Any] = json.loads(json.dumps(CONFIG))
    profile = next(each for each in changed["profiles"] if each["name"] == name)
    for patch in profile["patches"]:
        *folders, last = patch["path"].strip("/").split("/")
        place: Any = changed
        for folder in folders:
            place = place[int(folder) if folder.isdigit() else folder]
        assert patch["op"] == "add"
        place[last] = patch["value"]
    return changed


def sync_target(path: str) -> str:
    """Where skaffold would bring a changed Python file."""
    rules = ARTIFACTS["trainyard/services"]["sync"]["manual"]
    found = [rule for rule in rules if path.startswith(rule["src"].removesuffix("**/*.py"))]
    assert len(found) == 1, f"{path} is brought to {len(found)} places"
    return f"{found[0]['dest']}/{path.removeprefix(found[0]['strip'])}"


@pytest.mark.parametrize("profile", PROFILES)
def test_it_is_what_skaffold_accepts(profile: str | None) -> None:
    jsonschema.validate(with_profile(profile) if profile else CONFIG, SCHEMA)


def test_a_word_that_skaffold_does_not_know_would_be_noticed() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(CONFIG | {"builds": {}}, SCHEMA)


def test_it_builds_every_image_with_arguments_that_there_are() -> None:
    assert {name.removeprefix("trainyard/") for name in ARTIFACTS} == set(images.NAMES)
    for artifact in ARTIFACTS.values():
        text = (REPOSITORY / artifact["docker"]["dockerfile"]).read_text()
        for argument in artifact["docker"].get("buildArgs", {}):
            assert re.search(rf"^ARG {argument}=", text, re.MULTILINE)


def test_every_source_of_a_service_is_brought_into_the_pods() -> None:
    members = [*REPOSITORY.glob("services/*/src/trainyard_*"), *REPOSITORY.glob("libs/*/src/*")]
    for package in members:
        path = f"{package.relative_to(REPOSITORY)}/__init__.py"
        if package.name in ("trainyard_embedded", "trainyard_setup", "trainkit"):
            continue  # not among the running services
        assert sync_target(path) == f"/opt/services/lib/python3.11/site-packages/{package.name}/__init__.py"


@pytest.mark.parametrize("profile", PROFILES)
def test_it_deploys_the_images_that_it_built_and_forwards_a_port_that_there_is(profile: str | None) -> None:
    config = with_profile(profile) if profile else CONFIG
    (release,) = config["deploy"]["helm"]["releases"]
    (forwarded,) = config["portForward"]
    objects = list(yaml.safe_load_all(as_deployed(release)))
    named = {name for each in objects for name in re.findall(r"registry\.example/[\w./:@-]+", json.dumps(each))}
    repositories = {f"registry.example/{name}" for name in ARTIFACTS}
    assert named == {f"{each}@{DIGEST}" if profile == "registry" else f"{each}:built" for each in repositories}
    services = {each["metadata"]["name"]: each["spec"] for each in objects if each and each["kind"] == "Service"}
    assert forwarded["resourceType"] == "service"
    assert forwarded["namespace"] == release["namespace"]
    assert forwarded["port"] in [port["port"] for port in services[forwarded["resourceName"]]["ports"]]


def as_deployed(release: dict[str, Any]) -> str:
    """The manifests of a release, when its images were built and pushed to a registry."""
    built = {"REPO": "registry.example/{}", "TAG": "built", "DIGEST": DIGEST}
    words = {
        f"{{{{.IMAGE_{what}_{name.replace('/', '_')}}}}}": value.format(name)
        for name in ARTIFACTS
        for what, value in built.items()
    }
    options = [f"--values={REPOSITORY / each}" for each in release["valuesFiles"]]
    options += [f"--set={key}={words[value]}" for key, value in release["setValueTemplates"].items()]
    return helm("template", release["name"], str(REPOSITORY / release["chartPath"]), *options)


class Development:
    """What `skaffold dev` does, step by step."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self.cluster, self.namespace, self.folder = cluster, namespace, folder
        self.tag = f"localhost/skaffold/services:{images.reference('services').rpartition(':')[2]}"

    def build(self) -> None:
        """Builds the services' image with the arguments of development; the agent's needs none."""
        docker = ARTIFACTS["trainyard/services"]["docker"]
        if not all(self.tag in found for found in self.cluster.images().values()):
            images.build(docker["dockerfile"], self.tag, REPOSITORY, **docker["buildArgs"])
            archive = self.folder / "services.tar"
            images.save(self.tag, archive)
            self.cluster.load_image(archive)
            archive.unlink()

    def deploy(self) -> None:
        built = {"services": self.tag, "agent": images.reference("agent"), "worker": "localhost/none:1"}
        words = {}
        for name, tag in built.items():
            words[f"{{{{.IMAGE_REPO_trainyard_{name}}}}}"], _, words[f"{{{{.IMAGE_TAG_trainyard_{name}}}}}"] = (
                tag.rpartition(":")
            )
        options = [f"--values={REPOSITORY / each}" for each in RELEASE["valuesFiles"]]
        options += [f"--set={key}={words[value]}" for key, value in RELEASE["setValueTemplates"].items()]
        options.append(f"--set=operator.namespaces={{{self.namespace}}}")  # others have operators of their own
        options.append(f"--set=jobs.namespace={self.namespace}")  # the one that goes with the test
        command = ["upgrade", "--install", RELEASE["name"], str(REPOSITORY / RELEASE["chartPath"]), *options]
        kubeconfig = {"KUBECONFIG": str(self.cluster.kubeconfig)}
        helm(
            *command, f"--namespace={self.namespace}", "--wait", f"--timeout={int(2 * PATIENCE_S)}s", environ=kubeconfig
        )

    def uninstall(self) -> None:
        try:
            helm(
                "uninstall",
                RELEASE["name"],
                f"--namespace={self.namespace}",
                "--wait",
                environ={"KUBECONFIG": str(self.cluster.kubeconfig)},
            )
        except HelmFailed as error:
            assert "not found" in str(error)

    def sync(self, pod: str, path: str, content: bytes) -> None:
        """Brings a changed file into a pod, by the same commands as skaffold."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            entry = tarfile.TarInfo(sync_target(path).lstrip("/"))
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        self.execute(pod, "tar", "xmf", "-", "-C", "/", "--no-same-owner", input=packed.getvalue())
        for hook in ARTIFACTS["trainyard/services"]["sync"]["hooks"]["after"]:
            self.execute(pod, *hook["container"]["command"])

    def execute(self, pod: str, *command: str, input: bytes = b"") -> bytes:
        kubectl = [str(binaries.kubernetes.program("kubectl")), f"--kubeconfig={self.cluster.kubeconfig}"]
        where = [f"--namespace={self.namespace}", "exec", "--stdin", pod, "--", *command]
        done = subprocess.run([*kubectl, *where], input=input, capture_output=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout


@pytest.fixture
def development(cluster: Cluster, cluster_namespace: str, tmp_path: Path) -> Iterator[Development]:
    if not all(images.reference("agent") in found for found in cluster.images().values()):
        cluster.load_image(images.archive("agent"))
    found = Development(cluster, cluster_namespace, tmp_path)
    yield found
    found.uninstall()


@pytest.mark.timeout(8 * PATIENCE_S)
def test_what_it_runs_installs_a_yard_that_takes_changed_sources(development: Development) -> None:
    development.build()
    development.deploy()
    before = _pods(development)
    development.deploy()
    unchanged = {name: uid for name, uid in before.items() if "redis" not in name}
    assert unchanged.items() <= _pods(development).items()

    pod = "trainyard-metrics-0"
    process = development.execute(pod, "cat", "/tmp/service.pid")
    content = (REPOSITORY / CHANGED).read_bytes() + b"\nCHANGED_BY_A_TEST = True\n"
    development.sync(pod, CHANGED, content)
    wait_until(lambda: development.execute(pod, "cat", "/tmp/service.pid") != process, "the service to start again")
    seen = "from trainyard_metrics import answers; print(answers.CHANGED_BY_A_TEST)"
    assert development.execute(pod, "python", "-c", seen).strip() == b"True"
    development.cluster.kubectl(
        *(f"--namespace={development.namespace}", "wait", "--for=condition=Ready", f"pod/{pod}"), "--timeout=240s"
    )
    assert _pods(development)[pod] == before[pod]


def _pods(development: Development) -> dict[str, str]:
    found = development.cluster.get("pods", f"--namespace={development.namespace}")["items"]
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in found}
