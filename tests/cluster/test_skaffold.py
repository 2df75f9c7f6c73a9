"""skaffold.yaml: it is what skaffold accepts, and what skaffold would run with it works: build, install, sync."""

from __future__ import annotations

import functools
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
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
VERSION = yaml.safe_load((REPOSITORY / RELEASE["chartPath"] / "Chart.yaml").read_text())["appVersion"]
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


def expanded(template: str, environ: Mapping[str, str]) -> str:
    """What skaffold makes of a value: `{{.NAME}}`, and `{{default "TEXT" .NAME}}`."""

    def value(found: re.Match[str]) -> str:
        return environ.get(found["name"]) or found["text"] or ("" if found["default"] else "<no value>")

    return re.sub(r'{{(?P<default>default "(?P<text>[^"]*)" )?\.(?P<name>\w+)}}', value, template)


def sync_targets(path: str) -> list[str]:
    """Where skaffold copies a changed file in the containers of services; nowhere when it builds the image instead."""
    found = [rule for rule in ARTIFACTS["trainyard/services"]["sync"]["manual"] if matches(rule["src"], path)]
    return [f"{rule['dest']}/{path.removeprefix(rule['strip'])}" for rule in found]


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern of skaffold or of a .dockerignore matches a path: `**` any folders, `*` a part of a name."""
    parts = (
        {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}.get(part, re.escape(part))
        for part in re.split(r"(\*\*/|\*\*|\*)", pattern)
    )
    return re.fullmatch("".join(parts), path) is not None


@functools.cache
def is_ignored(path: str) -> bool:
    """Whether .dockerignore keeps a file from builds: the last pattern counts that matches it or a folder above it."""
    above = [path, *map(str, Path(path).parents)]
    ignored = False
    for line in (REPOSITORY / ".dockerignore").read_text().split():
        if any(matches(line.lstrip("!"), each) for each in above):
            ignored = not line.startswith("!")
    return ignored


def builds(path: str) -> set[str]:
    """The images that skaffold builds again when a file changes: those whose Dockerfile copies it."""
    return {
        name.removeprefix("trainyard/")
        for name, artifact in ARTIFACTS.items()
        if not is_ignored(path)
        and any(
            path == each or path.startswith(f"{each.rstrip('/')}/") for each in copied(artifact["docker"]["dockerfile"])
        )
    }


@functools.cache
def copied(dockerfile: str) -> tuple[str, ...]:
    """The files and folders that a Dockerfile copies from the repository."""
    text = (REPOSITORY / dockerfile).read_text().replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line.startswith("COPY ") and "--from=" not in line]
    return tuple(each for words in lines for each in words[1:-1] if not each.startswith("--"))


@functools.cache
def sources() -> tuple[str, ...]:
    """Every file of the repository."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return tuple(listed.stdout.splitlines())


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


IMAGES_OF = {
    "pyproject.toml": {"services", "agent", "worker"},
    "uv.lock": {"services", "agent", "worker"},
    "libs/protos": {"services", "agent", "worker"},
    "libs/trainyard": {"services", "agent", "worker"},
    "libs/servicekit": {"services"},
    "libs/trainkit": {"worker"},
    "services/embedded": set[str](),
    "services": {"services"},
}
"""Which images hold what; the first that fits counts."""


def test_a_change_builds_the_images_that_hold_the_file_and_no_other() -> None:
    for path in sources():
        if path.startswith("images/"):
            assert builds(path) <= {path.split("/")[1]}, path
            continue
        place = next((each for each in IMAGES_OF if path == each or path.startswith(f"{each}/")), None)
        held = IMAGES_OF[place] if place and "tests" not in Path(path).parts else set()
        assert builds(path) == held, path


def test_a_changed_source_of_a_running_service_is_copied_to_where_the_image_has_it() -> None:
    """No other image holds such a file: building that one would restart pods, which would then lack what was copied."""
    found = {path: sync_targets(path) for path in sources()}
    for path, targets in found.items():
        module = path.partition("/src/")[2]
        running = re.match(r"(services/(?!embedded|setup)\w+|libs/servicekit)/src/.*\.py$", path)
        assert targets == ([f"/opt/services/lib/python3.11/site-packages/{module}"] if running else []), path
        assert not targets or builds(path) == {"services"}, path
    assert sum(map(bool, found.values())) > 100


@pytest.mark.parametrize("artifact", ARTIFACTS.values(), ids=ARTIFACTS)
def test_the_base_of_every_image_can_be_set(artifact: dict[str, Any]) -> None:
    [default] = re.findall(r"^ARG BASE_IMAGE=(.+)$", (REPOSITORY / artifact["docker"]["dockerfile"]).read_text(), re.M)
    template = artifact["docker"]["buildArgs"]["BASE_IMAGE"]
    assert expanded(template, {}) == default
    assert expanded(template, {"BASE_IMAGE": "mirror.example/debian:12"}) == "mirror.example/debian:12"


def test_it_forwards_a_port_that_there_is() -> None:
    (forwarded,) = CONFIG["portForward"]
    objects = deployed({})
    services = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "Service"}
    assert forwarded["resourceType"] == "service"
    assert forwarded["namespace"] == RELEASE["namespace"]
    assert forwarded["port"] in [port["port"] for port in services[forwarded["resourceName"]]["ports"]]


@pytest.mark.parametrize(
    ("names", "digest"),
    [(tuple(ARTIFACTS), ""), (tuple(ARTIFACTS), DIGEST), *(((name,), "") for name in ARTIFACTS)],
    ids=["local", "pushed", *(f"only {name}" for name in ARTIFACTS)],
)
def test_containers_have_the_references_of_what_was_built(names: tuple[str, ...], digest: str) -> None:
    """All of it: `skaffold dev` copies changed files into containers whose reference is the one that was built.

    An image that was not built (`--build-image`) is the chart's own.
    """
    built = {name: f"registry.example/{name}:built{digest and '@'}{digest}" for name in names}
    used = {name: built.get(name, f"{name}:{VERSION}") for name in ARTIFACTS}
    objects = deployed(built)
    containers = [each for each in objects if each["kind"] in ("Deployment", "StatefulSet")]
    found = {c["image"] for each in containers for c in each["spec"]["template"]["spec"]["containers"]}
    assert found == {used["trainyard/services"]}
    launcher = next(each for each in containers if each["metadata"]["name"] == "trainyard-launcher")
    variables = {c["name"]: c.get("value") for c in launcher["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert variables["TRAINYARD_LAUNCHER_KUBERNETES_AGENT_IMAGE"] == used["trainyard/agent"]
    assert variables["TRAINYARD_LAUNCHER_KUBERNETES_WORKER_IMAGE"] == used["trainyard/worker"]


def deployed(built: Mapping[str, str]) -> list[dict[str, Any]]:
    """The objects that skaffold deploys.

    Args:
        built: the reference of each image that it built.
    """
    chart = str(REPOSITORY / RELEASE["chartPath"])
    return [each for each in yaml.safe_load_all(helm("template", RELEASE["name"], chart, *options(built))) if each]


def options(built: Mapping[str, str]) -> list[str]:
    """Those that skaffold gives to helm."""
    environ = {}
    for image, reference in built.items():
        tagged, _, digest = reference.partition("@")
        repository, _, tag = tagged.rpartition(":")
        for what, value in {"REPO": repository, "TAG": tag, "DIGEST": digest}.items():
            environ[f"IMAGE_{what}_{image.replace('/', '_')}"] = value
    values = {key: expanded(value, environ) for key, value in RELEASE["setValueTemplates"].items()}
    files = [f"--values={REPOSITORY / each}" for each in RELEASE["valuesFiles"]]
    return files + [f"--set={key}={value}" for key, value in values.items()]


class Development:
    """What `skaffold dev` does, step by step."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self.cluster, self.namespace, self.folder = cluster, namespace, folder
        self.tag = f"localhost/skaffold/services:{images.reference('services').rpartition(':')[2]}"

    def build(self) -> None:
        """Builds the services' image with the arguments of development; the agent's needs none."""
        docker = ARTIFACTS["trainyard/services"]["docker"]
        if not all(self.tag in found for found in self.cluster.images().values()):
            arguments = {
                name: expanded(value, {"BASE_IMAGE": images.base()}) for name, value in docker["buildArgs"].items()
            }
            images.build(docker["dockerfile"], self.tag, REPOSITORY, **arguments)
            archive = self.folder / "services.tar"
            images.save(self.tag, archive)
            self.cluster.load_image(archive)
            archive.unlink()

    def deploy(self) -> None:
        built = {"trainyard/services": self.tag, "trainyard/agent": images.reference("agent")}
        given = options(built)
        given.append(f"--set=operator.namespaces={{{self.namespace}}}")  # others have operators of their own
        given.append(f"--set=jobs.namespace={self.namespace}")  # the one that goes with the test
        command = ["upgrade", "--install", RELEASE["name"], str(REPOSITORY / RELEASE["chartPath"]), *given]
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
            [target] = sync_targets(path)
            entry = tarfile.TarInfo(target.lstrip("/"))
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
