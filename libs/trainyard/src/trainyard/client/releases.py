"""The yard of a release, as its cluster knows it: the gateway's pods, the root certificate, the token.

The chart writes into annotations of the gateway's Service in which Secret and ConfigMap those are, so that values that
name others are no matter here. What the cluster refuses is said with the permission that is missing.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import aiohttp

from trainyard import errors
from trainyard.client.contexts import Release
from trainyard.cluster import Api, ApiError, Object, is_name, load_configuration

TOKEN_SECRET = "trainyard.dev/token-secret"
CA_CONFIG_MAP = "trainyard.dev/ca-config-map"
PROTOCOL = "v4.channel.k8s.io"
_COMPONENT = "app.kubernetes.io/component=gateway"
_INSTANCE = "app.kubernetes.io/instance"
_REQUEST_S = 15.0


def api_of(release: Release) -> Api:
    """A client of the cluster that a release is on.

    Raises:
        NotFound: the kubeconfig has no such context, or there is no kubeconfig.
    """
    try:
        configuration = load_configuration(release.kubeconfig, release.kube_context)
    except ValueError as error:
        raise errors.NotFound(
            f"{release}: {error}",
            reason="KubeContextNotFound",
            hint="'kubectl config get-contexts' lists those there are; another file: --kubeconfig",
        ) from error
    return Api(configuration, timeout_s=_REQUEST_S)


class Gateway:
    """The gateway of a release; made by `find`.

    Args:
        api: client of its cluster.
        release: which it is.
        service: its Service.
    """

    def __init__(self, api: Api, release: Release, service: Object) -> None:
        self._api = api
        self._release = release
        self._service = service
        self._path = f"/api/v1/namespaces/{release.namespace}"

    @classmethod
    async def find(cls, api: Api, release: Release) -> Gateway:
        """The gateway of a release.

        Raises:
            NotFound: it is not installed there.
            Conflict: there are several, and any of them may be meant.
            NotRunning, Refused: the cluster does not answer, or does not let the user look.
        """
        with explained(release, "list", "services"):
            found = await _services(api, f"/api/v1/namespaces/{release.namespace}/services", release.release)
        if not found:
            raise await _not_installed(api, release)
        if len(found) > 1:
            raise _ambiguous(release, found)
        return cls(api, release, found[0])

    @property
    def host(self) -> str:
        """Its name within the cluster, which its certificate holds."""
        return f"{self._service['metadata']['name']}.{self._release.namespace}.svc"

    async def ca(self) -> bytes:
        """The root certificate (PEM). Raises YardError."""
        return (await self._kept("configmaps", CA_CONFIG_MAP, "ca.crt")).encode()

    async def token(self) -> str:
        """The token of users. Raises YardError."""
        return base64.b64decode(await self._kept("secrets", TOKEN_SECRET, "token")).decode().strip()

    async def _kept(self, kind: str, annotation: str, key: str) -> str:
        """What a key holds of the Secret or ConfigMap that an annotation names."""
        name = str(self._service["metadata"]["annotations"].get(annotation, ""))
        what = f"{kind.removesuffix('s')} {name}"
        if not is_name(name):
            raise _incomplete(self._release, f"annotation {annotation} of its gateway's Service names none")
        with explained(self._release, "get", kind, what):
            found = await self._api.get(f"{self._path}/{kind}/{name}")
        if key not in found.get("data", {}):
            raise _incomplete(self._release, f"{what} has no {key}")
        return str(found["data"][key])

    async def connect(self) -> aiohttp.ClientWebSocketResponse:
        """A connection to a pod that is ready now: two channels, data and errors, as Kubernetes forwards ports.

        Raises:
            NotRunning: no pod is ready, or the cluster does not answer.
            Refused: the user may not forward ports.
        """
        pod = await self.ready_pod()
        path = f"{self._path}/pods/{pod['metadata']['name']}/portforward"
        with explained(self._release, "get and create", "pods/portforward"):
            return await self._api.websocket(path, [("ports", str(self._port(pod)))], PROTOCOL)

    async def ready_pod(self) -> Object:
        """A pod of it that is ready. Raises YardError as `connect`."""
        selector = ",".join(f"{name}={value}" for name, value in self._service["spec"]["selector"].items())
        with explained(self._release, "list", "pods"):
            pods = (await self._api.get(f"{self._path}/pods", labelSelector=selector))["items"]
        ready: list[Object] = [pod for pod in pods if _is_ready(pod)]
        if not ready:
            raise errors.NotRunning(
                f"{self._release}: the gateway is not ready: {'; '.join(map(_state, pods)) or 'it has no pods'}",
                reason="GatewayNotReady",
                hint=f"see {kubectl(self._release)} get pods",
                fields={"pod": pods[0]["metadata"]["name"]} if pods else {},
            )
        return ready[0]

    def _port(self, pod: Object) -> int:
        target = self._service["spec"]["ports"][0]["targetPort"]
        ports = [port for each in pod["spec"]["containers"] for port in each.get("ports", ())]
        return next((int(port["containerPort"]) for port in ports if port.get("name") == target), 0) or int(target)


@contextmanager
def explained(release: Release, verb: str, resource: str, what: str = "") -> Iterator[None]:
    """Turns what the API server answers into errors that say what is missing; raises YardError."""
    try:
        yield
    except ApiError as error:
        raise _explanation(error, release, verb, resource, what or resource) from error


def _explanation(error: ApiError, release: Release, verb: str, resource: str, what: str) -> errors.YardError:
    if error.status == 401:
        return errors.Refused(
            f"{release}: the cluster does not know you: {error}",
            reason="ClusterLogin",
            hint=f"log in to it; {kubectl(release)} get pods has to work",
        )
    if error.status == 403:
        message = f"{release}: the cluster does not let you {verb} {resource} there"
        hint = f"ask for a role in namespace {release.namespace} that allows: {verb} on {resource}"
        if resource == "secrets":
            hint = "ask for the token, and add the context anew with --token-file FILE"
        return errors.Refused(message, reason="ClusterForbidden", hint=hint)
    if error.status == 404 and verb == "get":
        return _incomplete(release, f"there is no {what}")
    return errors.NotRunning(
        f"{release}: the cluster does not answer: {error}",
        reason="ClusterUnreachable",
        hint=f"see whether {kubectl(release)} get pods answers",
    )


def _incomplete(release: Release, why: str) -> errors.NotFound:
    hint = f"the chart's setup makes it; see {kubectl(release)} get jobs,pods"
    return errors.NotFound(f"{release}: {why}", reason="InstallationIncomplete", hint=hint)


def kubectl(release: Release) -> str:
    """How kubectl is called for the release: what a hint begins with."""
    words = ["kubectl"]
    words += [f"--kubeconfig {release.kubeconfig}"] if release.kubeconfig else []
    words += [f"--context {release.kube_context}"] if release.kube_context else []
    return " ".join([*words, f"--namespace {release.namespace}"])


async def _services(api: Api, path: str, instance: str = "") -> list[Object]:
    """Services of gateways, those that the chart made."""
    selector = f"{_COMPONENT},{_INSTANCE}={instance}" if instance else _COMPONENT
    found = (await api.get(path, labelSelector=selector))["items"]
    return [each for each in found if TOKEN_SECRET in each["metadata"].get("annotations", {})]


async def _not_installed(api: Api, release: Release) -> errors.NotFound:
    others: list[Object] = []
    with suppress(ApiError):  # who may not look everywhere is told less
        others = await _services(api, "/api/v1/services")
    there = ", ".join(sorted(f"{_instance(each)} in {each['metadata']['namespace']}" for each in others))
    return errors.NotFound(
        f"no {release}",
        reason="ReleaseNotFound",
        hint=f"there is: {there}" if there else "see 'helm list --all-namespaces'",
    )


def _ambiguous(release: Release, found: list[Object]) -> errors.Conflict:
    names = ", ".join(sorted(str(each["metadata"]["name"]) for each in found))
    return errors.Conflict(
        f"{release}: several gateways are there: {names}",
        reason="ReleaseAmbiguous",
        hint="a token belongs to one of them: uninstall what is left of the other, or name yours by its address: "
        "'yard context add NAME --endpoint HOST:PORT'",
    )


def _instance(service: Object) -> str:
    return str(service["metadata"]["labels"][_INSTANCE])


def _is_ready(pod: Object) -> bool:
    conditions: list[Mapping[str, Any]] = pod.get("status", {}).get("conditions", [])
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def _state(pod: Object) -> str:
    """Why a pod is not ready, in a few words."""
    status = pod.get("status", {})
    waits = [each.get("state", {}).get("waiting", {}).get("reason") for each in status.get("containerStatuses", [])]
    return f"pod {pod['metadata']['name']} is {next(filter(None, waits), None) or status.get('phase', 'new')}"
