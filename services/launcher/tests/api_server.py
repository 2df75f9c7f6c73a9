"""An API server that says what a test puts into its mouth, and a Kubernetes backend that talks to it."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from trainyard.spec import Spec
from trainyard_launcher.backend import Facts, Launch
from trainyard_launcher.backends.kubernetes import KubernetesBackend, manifests, names
from trainyard_launcher.settings import Settings
from trainyard_protos.v1 import common_pb2, launcher_pb2

JOBS = "/apis/batch/v1/namespaces/default/jobs"
PODS, SERVICES, EVENTS = (f"/api/v1/namespaces/default/{kind}" for kind in ("pods", "services", "events"))
NODES = "/api/v1/nodes"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"
REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
ENDPOINT = "yard:1"
PATIENCE_S = 120
Object = dict[str, Any]


class ApiServer:
    """Answers what a test puts in: by method and path, one after the other, the last one for ever."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], list[tuple[int, Any]]] = {}
        self.asked: list[tuple[str, str]] = []
        self.bodies: dict[tuple[str, str], Object] = {}  # the last of each
        self.held = asyncio.Event()
        self.held.set()

    def say(self, method: str, path: str, *answers: tuple[int, Any]) -> None:
        self.answers[method, path] = list(answers)

    def list(self, path: str, *items: Object) -> None:
        """Has a collection of these objects."""
        self.say("GET", path, (200, {"metadata": {"resourceVersion": "1"}, "items": items}))

    def tell(self, path: str, *events: Object) -> None:
        """Has a watch that tells these events, then breaks off."""
        self.say("GET", f"{path}?watch", (200, list(events)), (503, {"message": "away"}))

    def asked_to(self, method: str) -> set[str]:
        """Paths of all requests of a method."""
        return {path for each, path in self.asked if each == method}

    async def handle(self, request: web.Request) -> web.Response:
        key = (request.method, request.path + ("?watch" if "watch" in request.query else ""))
        if request.can_read_body:
            self.bodies[key] = json.loads(await request.read())
        self.asked.append(key)
        await self.held.wait()
        waiting = self.answers.get(key, [(404, {"reason": "NotFound", "message": "not found"})])
        status, body = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        lines = body if isinstance(body, list) else [body]
        return web.Response(status=status, text="".join(json.dumps(line) + "\n" for line in lines))


@asynccontextmanager
async def talking_to(server: ApiServer, folder: Path, **settings: Any) -> AsyncIterator[KubernetesBackend]:
    """A backend of the launcher "here" that talks to it."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    async with TestServer(app) as listening:
        config = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": str(listening.make_url("/"))}}],
            "users": [{"name": "u", "user": {"token": "sesame"}}],
        }
        (folder / "config").write_text(json.dumps(config))
        given = {"identity": "here", "kubernetes_kubeconfig": str(folder / "config")} | settings
        backend = KubernetesBackend(ENDPOINT, Settings(**given))
        try:
            yield backend
        finally:
            server.held.set()
            await backend.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def facts(number: int = 1, *, nodes: int = 1) -> Facts:
    """Of an attempt of a job of its own."""
    return Facts("vision", f"job-{number}", "digits", f"0198c0de-0000-7000-8000-{number:012}", 3, nodes, 1, 30)


def launch(of: Facts) -> Launch:
    plans = [launcher_pb2.NodePlan(nodes=of.nodes, workers_per_node=1) for _ in range(of.nodes)]
    return Launch(of, plans, common_pb2.Resources(cpu=1, memory_bytes=2**30), spec=Spec(command=("true",)))


def job(of: Facts, *, launcher: str = "here", endpoint: str = ENDPOINT, **metadata: Any) -> Object:
    """The Job of an attempt as the API server has it."""
    made = manifests.job(launch(of), endpoint, Settings(identity=launcher))
    made["metadata"] |= {"uid": f"uid-of-{of.job_id}", "resourceVersion": "1"} | metadata
    return made


def pod(of: Object, node: int = 0) -> Object:
    """A pod of a Job, as the Job controller makes it."""
    template = of["spec"]["template"]
    metadata = {
        "name": f"{of['metadata']['name']}-{node}-x",
        "uid": f"uid-of-pod-{node}-{of['metadata']['uid']}",
        "resourceVersion": "1",
        "labels": template["metadata"]["labels"] | {names.INDEX: str(node)},
        "ownerReferences": [{"controller": True, "kind": "Job", "uid": of["metadata"]["uid"]}],
    }
    spec = template["spec"] | {"nodeName": "node-1"}
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Running"}}


def token(of: Object) -> str:
    """A token that says it was made for a pod; nobody signed it."""
    metadata = of["metadata"]
    payload = {"kubernetes.io": {"namespace": "default", "pod": {"name": metadata["name"], "uid": metadata["uid"]}}}
    return ".".join(
        base64.urlsafe_b64encode(part).decode().rstrip("=") for part in (b"{}", json.dumps(payload).encode(), b"x")
    )


def review(of: Object) -> Object:
    """What the API server says of the token of a pod."""
    metadata = of["metadata"]
    prefix = "authentication.kubernetes.io/pod"
    user = {
        "username": "system:serviceaccount:default:default",
        "extra": {f"{prefix}-name": [metadata["name"]], f"{prefix}-uid": [metadata["uid"]]},
    }
    return {"status": {"authenticated": True, "audiences": [manifests.AUDIENCE], "user": user}}
