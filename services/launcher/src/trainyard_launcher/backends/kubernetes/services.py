"""The headless Services by which the nodes of an attempt find each other, and the policies that let them.

Both are made with their Job and go with it. What somebody deletes of them meanwhile is made again at once: nodes that
look for rank 0 later, or again, would not find it, or not be let in.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from trainyard.cluster import Api, ApiError

from trainyard_launcher.backends.kubernetes import manifests, names
from trainyard_launcher.backends.kubernetes.keeper import Keeper
from trainyard_launcher.backends.kubernetes.patience import patiently
from trainyard_launcher.backends.kubernetes.watch import Mirror
from trainyard_launcher.background import Background
from trainyard_launcher.settings import Settings

logger = logging.getLogger(__name__)


class Services:
    """Lives on the loop's thread."""

    def __init__(self, api: Api, settings: Settings, keeper: Keeper, background: Background) -> None:
        self._api, self._settings, self._keeper, self._background = api, settings, keeper, background
        self._path = f"/api/v1/namespaces/{settings.kubernetes_namespace}/services"
        self._policies = f"/apis/networking.k8s.io/v1/namespaces/{settings.kubernetes_namespace}/networkpolicies"
        ours = names.selector(settings.pool)
        watched = [self._path] + ([self._policies] if settings.kubernetes_network_policies else [])
        self._mirrors = [Mirror(api, path, _name, self._changed, labelSelector=ours) for path in watched]

    def watch(self) -> None:
        """Begins to watch. Nothing has to wait for it."""
        for mirror in self._mirrors:
            self._background.run(mirror.run(), "watch")

    async def ensure(self, job_metadata: Mapping[str, Any]) -> None:
        """Makes the Service of a Job, and what lets its pods reach each other, unless they are there.

        Raises:
            ApiError: the cluster refused it, or was away for too long.
        """
        job = {"metadata": job_metadata}
        if self._settings.kubernetes_network_policies:
            await self._make(self._policies, manifests.network_policy(job))
        await self._make(self._path, manifests.service(job))

    async def _make(self, path: str, made: manifests.Object) -> None:
        try:
            await patiently(partial(self._api.create, path, made), self._settings.connect_s)
        except ApiError as error:
            if error.status != 409:
                raise

    def _changed(self, name: str, before: str | None, after: str | None) -> None:
        job = self._keeper.jobs.objects.get(name)
        attempt = self._keeper.named(name)
        if after is not None or attempt is None or attempt.over:
            return
        if job is None or job.ending:
            return  # it goes with its Job
        logger.warning("service or policy was deleted and is made again", extra={"object": name})
        self._background.run(self.ensure(job.metadata), f"service of {name}")


def _name(service: Mapping[str, Any]) -> str:
    return str(service["metadata"]["name"])
