"""Who a pod is: its service-account token, reviewed by the API server for our audience alone.

What a token says of itself is read first, which costs nothing: only one that names a pod of ours is worth a review.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

from trainyard.cluster import Api, is_name

from trainyard_launcher.backend import JoinRefused
from trainyard_launcher.backends.kubernetes.manifests import AUDIENCE

_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"
_TOKEN_MOST = 16 * 1024  # characters


@dataclass(frozen=True, slots=True)
class PodIdentity:
    """The pod a token was made for."""

    namespace: str
    name: str
    uid: str


def claimed(token: str) -> PodIdentity:
    """The pod that a token says it was made for. Anybody can write such a token: `review` says whether it is true.

    Raises:
        JoinRefused: it is no token of a pod.
    """
    parts = token.split(".") if len(token) <= _TOKEN_MOST else ()
    if len(parts) != 3:
        raise JoinRefused("this is no service-account token")
    try:
        payload = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        of_cluster = payload["kubernetes.io"]
        namespace, pod = of_cluster["namespace"], of_cluster["pod"]
        found = PodIdentity(str(namespace), str(pod["name"]), str(pod["uid"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise JoinRefused("this token is not bound to a pod") from error
    if not is_name(found.name):
        raise JoinRefused("this token names no pod")
    return found


async def review(api: Api, token: str) -> PodIdentity:
    """The pod that a token belongs to.

    Raises:
        JoinRefused: it is no token of a pod, not for this audience, or not valid any more.
        ApiError: the API server could not say.
    """
    answer = await api.create(
        "/apis/authentication.k8s.io/v1/tokenreviews",
        {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [AUDIENCE]},
        },
    )
    status = answer.get("status", {})
    if not status.get("authenticated") or AUDIENCE not in status.get("audiences", ()):
        raise JoinRefused(f"the cluster does not know this token: {status.get('error', 'not authenticated')}")
    user = status["user"]
    extra = user.get("extra", {})
    parts = str(user.get("username", "")).split(":")
    if len(parts) != 4 or not extra.get(_POD_NAME) or not extra.get(_POD_UID):
        raise JoinRefused("this token is not bound to a pod")
    return PodIdentity(parts[2], str(extra[_POD_NAME][0]), str(extra[_POD_UID][0]))
