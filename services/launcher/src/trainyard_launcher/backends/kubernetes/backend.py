"""The Kubernetes backend: an attempt is an Indexed Job, a node is its pod.

What must be remembered is in the cluster (labels, and the facts as an annotation of the Job), so a launcher that was
killed at any moment finds everything again. A node's life:

    Job -> pod -> agent joins (its service-account token, reviewed) -> plan -> works -> termination message -> `NodeEnd`
    the scheduler knows the end -> the Job is deleted, and with it pods and Service
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from prometheus_client import CollectorRegistry
from trainyard.cluster import Api, ApiError, load_configuration
from trainyard_protos.v1 import common_pb2, launcher_pb2, scheduler_pb2
from trainyard_protos.v1.admin_pb2 import GetUsageResponse

from trainyard_launcher.backend import (
    Claim,
    Facts,
    Found,
    Joined,
    JoinLater,
    JoinRefused,
    Launch,
    Observer,
    Place,
    Shell,
    ShellRequest,
    StartError,
)
from trainyard_launcher.backends.kubernetes import (
    allowed,
    binding,
    foreign,
    jobs,
    machines,
    manifests,
    names,
    placement,
    pods,
    taints,
    tokens,
    usable_secrets,
)
from trainyard_launcher.backends.kubernetes.agent_volume import AgentVolume
from trainyard_launcher.backends.kubernetes.attempts import Attempt, Node
from trainyard_launcher.backends.kubernetes.exec import PodShell
from trainyard_launcher.backends.kubernetes.foreign import Foreign
from trainyard_launcher.backends.kubernetes.keeper import Keeper
from trainyard_launcher.backends.kubernetes.kinds import read_kinds
from trainyard_launcher.backends.kubernetes.merge import read_template
from trainyard_launcher.backends.kubernetes.patience import patiently
from trainyard_launcher.backends.kubernetes.services import Services
from trainyard_launcher.background import Background
from trainyard_launcher.scheduler import backoff
from trainyard_launcher.settings import Settings

logger = logging.getLogger(__name__)

_LOG_LINES = 20
_WHOLE_S = 10.0  # less than an agent waits for the answer to its call
_UNREADABLE = "FactsUnreadable"
_REBUILT = (
    "annotation trainyard.dev/facts of Job {} cannot be read: it was changed, or a later version of the yard wrote it; "
    "the attempt goes on by what the labels say, without its deadline"
)
_LEFT_ALONE = "neither its annotation trainyard.dev/facts nor its labels say what it is: restore them, or delete it"
_KILL_S = 1  # from SIGTERM to SIGKILL for what has to end at once; 0 would not wait for the kubelet's word

_NOT_MEASURED = (
    "folders of attempts lie in their pods, and are removed with them; what jobs keep on volume claims is not measured"
)


class KubernetesBackend:
    """Runs nodes as pods of one namespace. Lives on the loop's thread.

    Args:
        endpoint: host:port of the yard, unless the settings name another for pods.
        registry: where its numbers are shown.

    Raises:
        ValueError: there is no way to an API server, the pod template cannot be read, or there is no identity.
    """

    def __init__(self, endpoint: str, settings: Settings, registry: CollectorRegistry | None = None) -> None:
        if not settings.identity:
            raise ValueError("identity: what a launcher makes in a cluster carries it; set TRAINYARD_LAUNCHER_IDENTITY")
        self._settings = settings
        self._endpoint = settings.kubernetes_agent_endpoint or endpoint
        self._template = read_template(settings.kubernetes_pod_template)
        self._kinds = read_kinds(settings.kubernetes_machine_kinds)
        self._agent_volume = AgentVolume(settings, self._template)
        self._api = Api(
            load_configuration(
                settings.kubernetes_kubeconfig,
                settings.kubernetes_context,
                "set TRAINYARD_LAUNCHER_KUBERNETES_KUBECONFIG",
            ),
            qps=settings.kubernetes_qps,
            burst=settings.kubernetes_burst,
            timeout_s=settings.kubernetes_request_timeout_s,
        )
        self._core = f"/api/v1/namespaces/{settings.kubernetes_namespace}"
        self._batch = f"/apis/batch/v1/namespaces/{settings.kubernetes_namespace}"
        self._background = Background()
        self._keeper = Keeper(self._api, settings, self._endpoint, self._background, self._kinds)
        (registry or CollectorRegistry()).register(self._keeper.judge)
        self._foreign = Foreign(self._api, settings, self._endpoint, self._background)
        self._services = Services(self._api, settings, self._keeper, self._background)

    @property
    def keeps_records(self) -> bool:
        """No: a pod's folder goes with it."""
        return False

    def offer(self) -> scheduler_pb2.RegisterPoolRequest:
        """The nodes of the cluster that take pods, with what others leave of them, and those that it may make."""
        settings, template = self._settings, self._template.get("spec") or {}
        gpu = settings.kubernetes_gpu_resource
        known, lost = self._keeper.machines.objects, self._keeper.judge.gone
        usable, unusable = machines.offered(
            known.values(), settings, self._foreign.residents(), self._foreign.guests(), template, lost
        )
        mounted = self._agent_volume.is_mounted(known.values())
        empty = manifests.overhead(self._endpoint, settings, self._template, agent_mounted=mounted)
        return scheduler_pb2.RegisterPoolRequest(
            machines=usable,
            unusable_machines=unusable,
            overhead=machines.resources(foreign.read(empty).amounts, gpu),
            gpu_tolerations=taints.toleration_messages([taints.of_gpus(gpu)]),
            kinds=[kind.offer(known.values(), gpu, template.get("tolerations") or ()) for kind in self._kinds],
            allowed_pods=scheduler_pb2.AllowedPods(**allowed.allowed_pods(settings)._asdict()),
        )

    async def changed(self) -> None:
        """Returns when machines came, went, or take pods differently than when this was last asked."""
        await self._keeper.machines_changed.wait()
        self._keeper.machines_changed.clear()

    # Finding what an earlier life left

    async def open(self, observer: Observer) -> Sequence[Found]:
        """Takes over the Jobs of this launcher; waits for an API server that is away."""
        await asyncio.gather(self._keeper.open(observer), self._foreign.open())
        self._services.watch()
        unfinished = [job for job in self._keeper.jobs.objects.values() if not job.kept]
        found = [self._take_over(job, job.facts) for job in unfinished if job.facts is not None]
        for job in unfinished:
            if job.facts is None:
                logger.error("job left alone", extra={"object": job.name, "reason": _UNREADABLE, "why": _LEFT_ALONE})
        for pod in self._keeper.orphans():
            self._background.run(self._keeper.delete_pod(pod.name), f"orphan {pod.name}")
        return found

    def _take_over(self, job: jobs.JobState, facts: Facts) -> Found:
        attempt = Attempt(facts, job.name, job.uid)
        ends = self._keeper.take_over(attempt)
        self._keeper.keep(attempt)
        if facts.nodes > 1 and not attempt.over:
            self._background.run(self._services.ensure(job.metadata), f"service of {job.name}")
        return Found(facts, ends, remark=(_UNREADABLE, _REBUILT.format(job.name)) if job.rebuilt else None)

    # Starting

    async def start(self, launch: Launch) -> str:
        """Makes the Job and its Service; an API server that is away is waited for."""
        attempt = self._keeper.attempts.get(launch.facts.attempt_id)
        if attempt is None:
            attempt = Attempt(launch.facts, names.object_name(launch.facts))
            self._keeper.keep(attempt)
        attempt.launch = launch
        mounted = self._agent_volume.is_mounted(self._keeper.machines.objects.values())
        body = manifests.job(launch, self._endpoint, self._settings, self._template, agent_mounted=mounted)
        pod_spec = body["spec"]["template"]["spec"]
        binding.bind_template(pod_spec, launch.facts, self._kinds)
        placement.avoid(pod_spec, self._keeper.judge.gone)
        try:
            await usable_secrets.check(self._api, self._settings, launch)
            attempt.uid = await self._make_job(body)
            if launch.facts.nodes > 1:
                await self._make_service(body["metadata"] | {"uid": attempt.uid})
        except StartError as error:
            self._keeper.drop(launch.facts.attempt_id)
            if not isinstance(error, _NotOurs):
                await self._delete_job(attempt.name)
            raise
        self._keeper.look(attempt)
        return ""

    async def _make_job(self, body: manifests.Object) -> str:
        """The uid of the attempt's Job, made or found."""
        path = f"{self._batch}/jobs"
        try:
            made = await patiently(partial(self._api.create, path, body), self._settings.connect_s)
        except ApiError as error:
            if error.status != 409:
                raise _refused(error) from error
            made = await self._made_before(f"{path}/{body['metadata']['name']}", body)
        return str(made["metadata"]["uid"])

    async def _made_before(self, path: str, body: manifests.Object) -> manifests.Object:
        try:
            made = await patiently(partial(self._api.get, path), self._settings.connect_s)
        except ApiError as error:
            raise _refused(error) from error
        if names.facts_of(made["metadata"]) != names.facts_of(body["metadata"]):
            raise _NotOurs(f"the namespace has another Job named {body['metadata']['name']}: remove or rename it")
        return made

    async def _make_service(self, job_metadata: manifests.Object) -> None:
        try:
            await self._services.ensure(job_metadata)
        except ApiError as error:
            raise _refused(error) from error

    # Agents

    async def join(self, attempt_id: str, node: int, credential: str, claim: Claim) -> Joined:
        """The plan, for the pod that the token is bound to, if it is the node's pod."""
        attempt = self._keeper.attempts.get(attempt_id)
        if attempt is None:
            raise JoinRefused(f"attempt {attempt_id} is not here")
        if not attempt.uid:  # its pods may be there before the answer to making it, which may have been lost
            raise JoinLater("the Job of this pod is still being made")
        await self._introduce(attempt, attempt.nodes[node], credential)
        if attempt.launch is None:
            attempt.launch = await claim()
        await self._check_secrets(attempt, attempt.launch, attempt.nodes[node])
        joined = self._complete(attempt.launch, attempt, node)
        if all(each.joined for each in attempt.nodes):
            attempt.launch = None
        return joined

    async def _introduce(self, attempt: Attempt, node: Node, credential: str) -> None:
        """Raises unless who asks is the node's pod.

        Strangers may ask as well, as often as they like. What their tokens say costs no request, a token that says it
        is the node's own is reviewed now and then, and nobody spends what another node's pod needs.
        """
        claimed = tokens.claimed(credential)
        try:
            pod = await self._pod(node, claimed)
            _check(attempt, node, pod, claimed)
            if set(attempt.unplaced) - {node.index}:  # a pod that asks has a machine, seen or not
                await self._whole(attempt)
            if not node.reviews.take(time.monotonic()):
                raise JoinLater(f"node {node.index} asks too often")
            identity = await tokens.review(self._api, credential)
        except ApiError as error:
            if error.status == 404:
                raise JoinRefused("there is no such pod any more") from error
            raise JoinLater(f"the cluster did not say whose token this is: {error}") from error
        _check(attempt, node, pod, identity)
        node.joined = identity.uid

    async def _check_secrets(self, attempt: Attempt, launch: Launch, node: Node) -> None:
        """Raises JoinRefused when the job may no longer have a Secret: its label may go while pods wait."""
        if attempt.secrets_usable:
            return
        try:
            await usable_secrets.check(self._api, self._settings, launch)
        except StartError as error:
            node.verdict = node.verdict or common_pb2.Exit(reason=error.reason, message=str(error), node=node.index)
            raise JoinRefused(str(error)) from error
        attempt.secrets_usable = True

    async def _whole(self, attempt: Attempt) -> None:
        """Raises JoinLater unless every node of the gang has a machine: it starts as a whole or not at all."""
        try:
            async with asyncio.timeout(_WHOLE_S):
                await attempt.placed.wait()
        except TimeoutError:
            nodes = ", ".join(map(str, attempt.unplaced))
            raise JoinLater(f"the job starts when all of its nodes have a machine; without one: {nodes}") from None

    async def _pod(self, node: Node, claimed: tokens.PodIdentity) -> pods.Pod | None:
        if claimed.namespace != self._settings.kubernetes_namespace:
            return None
        known = self._keeper.pods.objects.get(claimed.name)
        if known is not None:
            return known
        if not node.lookups.take(time.monotonic()):
            raise JoinLater(f"pod {claimed.name} was not seen yet")
        return pods.read(await self._api.get(f"{self._core}/pods/{claimed.name}"))

    def _complete(self, launch: Launch, attempt: Attempt, node: int) -> Joined:
        plan = launcher_pb2.NodePlan()
        plan.CopyFrom(launch.plans[node])
        plan.gpus[:] = range(plan.gpus_per_worker * plan.workers_per_node)
        plan.master_addr = manifests.master(attempt.name, plan.nodes)
        plan.master_port = manifests.MASTER_PORT
        plan.endpoint, plan.endpoint_file, plan.ca_file = self._endpoint, "", ""
        plan.state_dir = manifests.STATE_FOLDER
        plan.in_image = True
        plan.drain_timeout_s = min(self._settings.kubernetes_drain_timeout_s, self._settings.finalize_timeout_s)
        plan.threads = launch.threads if self._settings.enforce_limits else 0
        return Joined(plan, launch.secrets)

    # Stopping

    async def stop(self, attempt_id: str, node: int, *, kill: bool) -> None:
        """Deletes the pod, with its grace period or at once; without a pod, the Job, so that none is made."""
        attempt = self._keeper.attempts.get(attempt_id)
        if attempt is None or attempt.nodes[node].ended:
            return
        wanted = attempt.nodes[node]
        wanted.asked = True
        if wanted.pod is None:
            await self._delete_job(attempt.name)
        else:
            await self._keeper.delete_pod(wanted.pod.name, _KILL_S if kill else None)

    # What users ask

    async def logs(self, attempt_id: str, node: int) -> Sequence[str]:
        """The end of the container's log, as far as it is still there."""
        known = self._node(attempt_id, node)
        if known.pod is None or known.lost:  # of a machine that is gone nobody answers, which takes long to find out
            return ()
        try:
            path = f"{self._core}/pods/{known.pod.name}/log"
            text = await self._api.text(path, container=manifests.WORKER, tailLines=str(_LOG_LINES))
        except ApiError:
            return ()
        return text.splitlines()[-_LOG_LINES:]

    def place(self, attempt_id: str, node: int) -> Place:
        """The machine of a node's pod, or what keeps it from having one."""
        known = self._node(attempt_id, node)
        trouble = known.trouble
        return Place(
            machine=known.pod.machine if known.pod else "",
            reason=trouble.reason if trouble else "",
            message=trouble.message if trouble else "",
        )

    def awaits_machines(self, attempt_id: str) -> bool:
        """Whether not all pods of an attempt have a machine."""
        attempt = self._keeper.attempts.get(attempt_id)
        return attempt is not None and not attempt.placed.is_set()

    async def usage(self, job_ids: Collection[str] = ()) -> GetUsageResponse:
        """Says what is known: folders of attempts lie in their pods, and what jobs keep on volumes is theirs."""
        response = GetUsageResponse(unread=[_NOT_MEASURED])
        claims: Counter[str] = Counter()
        for pod in self._keeper.pods.objects.values() if not job_ids else ():
            if not pod.over:  # one that is kept for people mounts nothing
                claims.update(pod.claims)
        for claim, count in sorted(claims.items()):
            response.unread.append(
                f"volume claim {claim} of {self._settings.kubernetes_namespace}, pods that mount it: {count}; "
                f"kubectl get pvc {claim} -n {self._settings.kubernetes_namespace} shows its capacity"
            )
        return response

    async def shell(self, attempt_id: str, node: int, request: ShellRequest) -> Shell:
        """A shell in the worker's container."""
        pod = self._node(attempt_id, node).pod
        if pod is None:
            raise StartError(f"node {node} has no pod now")
        return await PodShell.open(self._api, f"{self._core}/pods/{pod.name}", request)

    def _node(self, attempt_id: str, node: int) -> Node:
        attempt = self._keeper.attempts.get(attempt_id)
        return attempt.nodes[node] if attempt else Node(node)

    # Afterwards

    async def undelivered(self, attempt_id: str) -> Sequence[str]:
        """None: what an agent did not deliver went with its pod."""
        return ()

    async def settle(self, attempt_id: str) -> None:
        """Removes Job, pods and Service. Those of a failed attempt are left to Kubernetes, which removes them later."""
        attempt = self._keeper.drop(attempt_id)
        if attempt is None:
            return
        left = [pod for pod in self._keeper.pods_of(attempt_id) if pod.failed and not pod.deleting]
        if left and self._settings.kubernetes_keep_failed_s:
            self._background.run(self._keep_job(attempt.name), f"keep {attempt.name}")
        else:
            self._background.run(self._delete_job(attempt.name), f"remove {attempt.name}")

    async def _keep_job(self, name: str) -> None:
        """Until the API server has heard; pods and Service stay as long as the Job. Finished pods hold no resources."""
        kept = {
            "metadata": {"annotations": {names.KEPT: "failed"}},
            "spec": {"ttlSecondsAfterFinished": self._settings.kubernetes_keep_failed_s},
        }
        for pause_s in backoff():
            try:
                await self._api.patch(f"{self._batch}/jobs/{name}", kept)
                return
            except ApiError as error:
                if error.status == 404:
                    return
                if not error.away:
                    logger.warning("job not kept", extra={"object": name, "why": str(error)})
                    return await self._delete_job(name)
            await asyncio.sleep(pause_s)

    async def _delete_job(self, name: str) -> None:
        """Until the API server has heard; pods and Service go with it."""
        for pause_s in backoff():
            try:
                return await self._api.delete(f"{self._batch}/jobs/{name}", propagationPolicy="Background")
            except ApiError as error:
                if not error.away:
                    logger.error("job not deleted", extra={"object": name, "why": str(error)})
                    return None
            await asyncio.sleep(pause_s)
        raise AssertionError("backoff never ends")

    async def held(self) -> Sequence[Facts]:
        """None: what is kept of attempts that are over, Kubernetes removes."""
        return ()

    async def forget(self, attempt_ids: Sequence[str]) -> AbstractSet[str]:
        """Removes what is kept of failed ones for people."""
        wanted, left = frozenset(attempt_ids), set()
        known = self._keeper.jobs.objects.values()
        kept = {job.facts.attempt_id: job.name for job in known if job.facts is not None}
        for attempt_id in (wanted & kept.keys()) - self._keeper.attempts.keys():
            try:
                await self._api.delete(f"{self._batch}/jobs/{kept[attempt_id]}", propagationPolicy="Background")
            except ApiError as error:
                if error.status != 404:
                    logger.info("kept job not removed", extra={"object": kept[attempt_id], "why": str(error)})
                    left.add(attempt_id)
        return wanted - left

    async def close(self) -> None:
        """Stops watching."""
        await self._background.close()
        await self._api.close()


class _NotOurs(StartError):
    """What is there under the attempt's name is somebody else's, and stays."""


def _check(attempt: Attempt, node: Node, pod: pods.Pod | None, identity: tokens.PodIdentity) -> None:
    """Raises JoinRefused unless the pod is the one that Kubernetes made for this node of this attempt's Job."""
    if pod is None or pod.uid != identity.uid:
        raise JoinRefused("the token's pod is not one of this yard")
    if (pod.attempt_id, pod.node, pod.owner) != (attempt.facts.attempt_id, node.index, attempt.uid):
        raise JoinRefused(f"pod {identity.name} is not node {node.index} of attempt {attempt.facts.attempt_id}")
    if pod.over or node.ended:
        raise JoinRefused(f"node {node.index} is over")
    if node.joined and node.joined != identity.uid:
        raise JoinRefused(f"another pod is node {node.index} already")


def _refused(error: ApiError) -> StartError:
    if error.status in (401, 403):
        return StartError(
            f"the cluster refuses the job: {error}; change what it asks for, or let who runs the cluster allow it",
            "PodsRefused",
        )
    if error.away:
        return StartError(f"the cluster was away for too long: {error}")
    return StartError(f"the cluster does not take the job: {error}; check spec.kubernetes")
