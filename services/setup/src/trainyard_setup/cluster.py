"""The cluster as the hooks see it: a few named objects. Every write may be repeated."""

from __future__ import annotations

import base64
import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from servicekit.ownership import owned_by

from trainyard_setup.final_status import of_uninstalled

MANAGED_BY = "app.kubernetes.io/managed-by"
INSTANCE = "app.kubernetes.io/instance"
_MANAGER = "trainyard-setup"
_POD_SECURITY = "pod-security.kubernetes.io/enforce"
_POOL = "trainyard.dev/pool"
_RESOURCE, _PLURAL = ("trainyard.dev", "v1alpha1"), "trainingjobs"
_FINALIZER, _OPERATOR = "trainyard.dev/job", "trainyard.dev/operator"
_CALL_TIMEOUT_S = 30
_NOT_FOUND, _CONFLICT, _INVALID = 404, 409, 422


class Cluster:
    """Reads and writes objects of one installation.

    Args:
        release: name of the installation; what is made carries it as a label.
    """

    def __init__(self, release: str) -> None:
        try:
            config.load_incluster_config()
        except config.ConfigException:
            config.load_kube_config()
        self._labels = {MANAGED_BY: _MANAGER, INSTANCE: release}
        self._core = client.CoreV1Api()
        self._batch = client.BatchV1Api()
        self._extensions = client.ApiextensionsV1Api()

    def secret(self, namespace: str, name: str) -> dict[str, bytes] | None:
        """Content of a secret; None when there is none."""
        try:
            found = self._core.read_namespaced_secret(name, namespace, _request_timeout=_CALL_TIMEOUT_S)
        except ApiException as error:
            if error.status == _NOT_FOUND:
                return None
            raise
        return {key: base64.b64decode(value) for key, value in (found.data or {}).items()}

    def create_secret(self, namespace: str, name: str, data: Mapping[str, bytes]) -> dict[str, bytes]:
        """Makes a secret; the content of the one that is there, when somebody was faster."""
        kind = "kubernetes.io/tls" if {"tls.crt", "tls.key"} <= data.keys() else "Opaque"
        body = client.V1Secret(metadata=self._named(name), type=kind, data=_encoded(data))
        try:
            self._core.create_namespaced_secret(namespace, body, _request_timeout=_CALL_TIMEOUT_S)
        except ApiException as error:
            if error.status != _CONFLICT:
                raise
            return self.secret(namespace, name) or {}
        return dict(data)

    def replace_secret(self, namespace: str, name: str, data: Mapping[str, bytes]) -> None:
        """Gives a secret new content."""
        self._core.patch_namespaced_secret(name, namespace, {"data": _encoded(data)}, _request_timeout=_CALL_TIMEOUT_S)

    def write_config_map(self, namespace: str, name: str, data: Mapping[str, str]) -> None:
        """Makes a config map, or gives it this content."""
        body = client.V1ConfigMap(metadata=self._named(name), data=dict(data))
        try:
            self._core.create_namespaced_config_map(namespace, body, _request_timeout=_CALL_TIMEOUT_S)
        except ApiException as error:
            if error.status != _CONFLICT:
                raise
            self._core.patch_namespaced_config_map(name, namespace, body, _request_timeout=_CALL_TIMEOUT_S)

    def update_definition(self, definition: Mapping[str, Any]) -> bool:
        """Brings a custom resource definition up to date; False when the cluster does not have it."""
        name = definition["metadata"]["name"]
        try:
            self._extensions.read_custom_resource_definition(name, _request_timeout=_CALL_TIMEOUT_S)
        except ApiException as error:
            if error.status == _NOT_FOUND:
                return False
            raise
        # In helm's name, which makes definitions: else its next installation would find fields that are another's.
        self._extensions.patch_custom_resource_definition(
            name,
            dict(definition),
            field_manager="helm",
            force=True,
            _content_type="application/apply-patch+yaml",
            _request_timeout=_CALL_TIMEOUT_S,
        )
        return True

    def delete_made(self, namespace: str, secrets: list[str], config_maps: list[str]) -> None:
        """Removes what an installation made, as far as it is there and its own."""
        for read, delete, names in (
            (self._core.read_namespaced_secret, self._core.delete_namespaced_secret, secrets),
            (self._core.read_namespaced_config_map, self._core.delete_namespaced_config_map, config_maps),
        ):
            for name in names:
                try:
                    found = read(name, namespace, _request_timeout=_CALL_TIMEOUT_S)
                    if _metadata(found).get("labels", {}).get(MANAGED_BY) == _MANAGER:
                        delete(name, namespace, _request_timeout=_CALL_TIMEOUT_S)
                except ApiException as error:
                    if error.status != _NOT_FOUND:
                        raise

    def ensure_namespace(self, name: str, pod_security: str) -> None:
        """Makes a namespace that holds its pods to a standard of pod security, unless it is there."""
        metadata = self._named(name)
        metadata.labels = {**self._labels, _POD_SECURITY: pod_security}
        try:
            self._core.create_namespace(client.V1Namespace(metadata=metadata), _request_timeout=_CALL_TIMEOUT_S)
        except ApiException as error:
            if error.status != _CONFLICT:
                raise

    def jobs(self, namespace: str, pool: str, launcher: str, endpoint: str, *, unfinished: bool = False) -> list[str]:
        """Names of a launcher's jobs: other yards may have a pool of this name in the namespace."""
        selector = f"{MANAGED_BY}=trainyard,{_POOL}={pool}"
        found = self._batch.list_namespaced_job(namespace, label_selector=selector, _request_timeout=_CALL_TIMEOUT_S)
        jobs = client.ApiClient().sanitize_for_serialization(found)["items"]
        return [
            str(job["metadata"]["name"])
            for job in jobs
            if owned_by(job, launcher, endpoint) and not (unfinished and _is_finished(job))
        ]

    def failed_hooks(self, namespace: str, release: str) -> list[str]:
        """Names of the jobs of hooks that did not succeed: helm keeps them, and nobody else removes them."""
        selector = f"app.kubernetes.io/instance={release},{MANAGED_BY}=Helm"
        found = self._batch.list_namespaced_job(namespace, label_selector=selector, _request_timeout=_CALL_TIMEOUT_S)
        jobs = client.ApiClient().sanitize_for_serialization(found)["items"]
        return [str(job["metadata"]["name"]) for job in jobs if _is_finished(job)]

    def delete_jobs(self, namespace: str, names: Sequence[str]) -> None:
        """Removes attempts' jobs with their pods, and their services."""
        options: dict[str, Any] = {"propagation_policy": "Background", "_request_timeout": _CALL_TIMEOUT_S}
        for name in names:
            for delete in (self._batch.delete_namespaced_job, self._core.delete_namespaced_service):
                try:
                    delete(name, namespace, **options)
                except ApiException as error:
                    if error.status != _NOT_FOUND:
                        raise

    def release_resources(self, operator: str, namespaces: Sequence[str]) -> None:
        """Writes to TrainingJob resources that their operator is gone, and removes its finalizer: it blocks deletion.

        Those of other operators stay as they are. What never became a job is free for them; what did stays this
        operator's, for its next installation to go on with.

        Args:
            operator: its identity.
            namespaces: where they are; none for all.
        """
        api = client.CustomObjectsApi()
        options: dict[str, Any] = {"_request_timeout": _CALL_TIMEOUT_S}
        try:
            answers: list[Any] = [
                api.list_namespaced_custom_object(*_RESOURCE, namespace, _PLURAL, **options) for namespace in namespaces
            ] or [api.list_cluster_custom_object(*_RESOURCE, _PLURAL, **options)]
        except ApiException as error:
            if error.status == _NOT_FOUND:  # the definition is gone, and they with it
                return
            raise
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        options["_content_type"] = "application/merge-patch+json"
        for item in [item for answer in answers for item in answer["items"]]:
            where = (*_RESOURCE, item["metadata"]["namespace"], _PLURAL, item["metadata"]["name"])
            if taken_by(item) == operator and (said := of_uninstalled(item, operator, now)):
                # The definition may be that of an older yard in the cluster, which does not know the phase.
                _patch(api.patch_namespaced_custom_object_status, where, said, options, _NOT_FOUND, _INVALID)
            if patch := released(item, operator):
                _patch(api.patch_namespaced_custom_object, where, patch, options, _NOT_FOUND)

    def claims(self, namespace: str) -> list[str]:
        """Names of the installation's volumes' claims."""
        selector = f"{INSTANCE}={self._labels[INSTANCE]}"
        found = self._core.list_namespaced_persistent_volume_claim(
            namespace, label_selector=selector, _request_timeout=_CALL_TIMEOUT_S
        )
        return [_metadata(claim)["name"] for claim in found.items]

    def _named(self, name: str) -> client.V1ObjectMeta:
        return client.V1ObjectMeta(name=name, labels=self._labels)


def _metadata(found: Any) -> dict[str, Any]:
    """The client's types say that even a name may be missing."""
    return {key: value for key, value in found.metadata.to_dict().items() if value is not None}


def taken_by(resource: Mapping[str, Any]) -> str:
    """Identity of the operator that took a resource; "" for none."""
    metadata = resource["metadata"]
    owner, _, uid = (metadata.get("annotations") or {}).get(_OPERATOR, "").rpartition("/")
    return owner if uid == metadata["uid"] else ""


def released(resource: Mapping[str, Any], operator: str) -> dict[str, Any]:
    """The patch with which an operator lets go of a resource; empty when there is nothing, or it is another's."""
    metadata = resource["metadata"]
    finalizers = metadata.get("finalizers", [])
    if _FINALIZER not in finalizers or taken_by(resource) not in ("", operator):
        return {}
    released: dict[str, Any] = {"finalizers": [each for each in finalizers if each != _FINALIZER]}
    if not resource.get("status", {}).get("jobId"):
        released["annotations"] = {_OPERATOR: None}
    return {"metadata": released}


def _patch(call: Callable[..., Any], where: tuple[str, ...], patch: object, options: Any, *accepted: int) -> None:
    """Patches an object; answers with one of these statuses are passed over."""
    try:
        call(*where, patch, **options)
    except ApiException as error:
        if error.status not in accepted:
            raise


def _is_finished(job: Mapping[str, Any]) -> bool:
    conditions = job.get("status", {}).get("conditions") or ()
    return any(each["type"] in ("Complete", "Failed") and each["status"] == "True" for each in conditions)


def _encoded(data: Mapping[str, bytes]) -> dict[str, str]:
    return {key: base64.b64encode(value).decode() for key, value in data.items()}
