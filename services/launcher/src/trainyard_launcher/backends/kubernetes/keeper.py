"""Keeps the attempts, and tells what became of their pods.

    watches (pods, Jobs, nodes, warnings) -> what changed -> the node it is about -> an end, a remark, or nothing
    once a second, from memory            -> machines that are lost, images that do not come, pods without room

Every node ends once, by the first of: its pod is over; its pod is gone; its Job is gone or done before it had a pod;
its machine is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from servicekit.ownership import owned_by
from trainyard.cluster import Api, ApiError
from trainyard_protos.v1 import common_pb2

from trainyard_launcher.backend import NodeEnd, Observer
from trainyard_launcher.backends.kubernetes import binding, jobs, machines, names, pods
from trainyard_launcher.backends.kubernetes.attempts import Attempt, Node
from trainyard_launcher.backends.kubernetes.judge import HELD, HELD_MESSAGE, Judge
from trainyard_launcher.backends.kubernetes.kinds import Kind
from trainyard_launcher.backends.kubernetes.watch import Mirror
from trainyard_launcher.background import Background
from trainyard_launcher.scheduler import backoff
from trainyard_launcher.settings import Settings

logger = logging.getLogger(__name__)

T = TypeVar("T")

_JUDGE_S = 1.0
UNSCHEDULABLE = "Unschedulable"


class Keeper:
    """Lives on the loop's thread."""

    def __init__(
        self,
        api: Api,
        settings: Settings,
        endpoint: str,
        background: Background,
        kinds: Sequence[Kind] = (),
    ) -> None:
        self._kinds = kinds
        self._api, self._settings, self._endpoint, self._background = api, settings, endpoint, background
        self._core = f"/api/v1/namespaces/{settings.kubernetes_namespace}"
        self._batch = f"/apis/batch/v1/namespaces/{settings.kubernetes_namespace}"
        ours = names.selector(settings.pool)
        self.attempts: dict[str, Attempt] = {}
        self._by_name: dict[str, Attempt] = {}
        self.pods = Mirror(api, f"{self._core}/pods", self._own(pods.read), self._pod_changed, labelSelector=ours)
        self.jobs = Mirror(api, f"{self._batch}/jobs", self._own(jobs.read), self._job_changed, labelSelector=ours)
        self.machines = Mirror(api, "/api/v1/nodes", machines.read, self._machine_changed)
        self.machines_changed = asyncio.Event()
        self._warnings = Mirror(
            api, f"{self._core}/events", jobs.read_warning, self._warned, fieldSelector="type=Warning"
        )
        self.judge = Judge(api, settings.kubernetes_lost_silence_s, settings.pool)
        self._observer: Observer

    def _own(self, read: Callable[[dict[str, Any]], T | None]) -> Callable[[dict[str, Any]], T | None]:
        """Reads what this launcher made: another yard may have a pool of the same name in the namespace."""

        def keep(found: dict[str, Any]) -> T | None:
            return read(found) if owned_by(found, self._settings.identity, self._endpoint) else None

        return keep

    async def open(self, observer: Observer) -> None:
        """Returns when all that is there is known."""
        self._observer = observer
        mirrors: tuple[Mirror[object], ...] = (self.pods, self.jobs, self.machines, self._warnings)  # type: ignore[assignment]
        for mirror in mirrors:
            self._background.run(mirror.run(), "watch")
        await asyncio.gather(*(mirror.synced.wait() for mirror in mirrors))
        self._background.run(self._judge(), "judge")

    def keep(self, attempt: Attempt) -> None:
        """From now on this attempt's pods are looked after."""
        self.attempts[attempt.facts.attempt_id] = attempt
        self._by_name[attempt.name] = attempt

    def drop(self, attempt_id: str) -> Attempt | None:
        """They are not any more."""
        attempt = self.attempts.pop(attempt_id, None)
        if attempt is not None:
            self._by_name.pop(attempt.name, None)
        return attempt

    def named(self, name: str) -> Attempt | None:
        """The attempt whose Job and Service have this name."""
        return self._by_name.get(name)

    def orphans(self) -> list[pods.Pod]:
        """Pods of no attempt and of no Job: nobody will ever ask for them."""
        owners = {job.uid for job in self.jobs.objects.values()}
        return [
            pod for pod in self.pods.objects.values() if pod.attempt_id not in self.attempts and pod.owner not in owners
        ]

    def pods_of(self, attempt_id: str) -> list[pods.Pod]:
        """The attempt's pods as they are known now."""
        return [pod for pod in self.pods.objects.values() if pod.attempt_id == attempt_id]

    # Ends

    def take_over(self, attempt: Attempt) -> list[NodeEnd]:
        """Looks at the pods of an attempt that was not kept so far; the ends among them."""
        ends = []
        for pod in self.pods_of(attempt.facts.attempt_id):
            if pod.node < len(attempt.nodes):
                attempt.nodes[pod.node].pod = pod
        job = self.jobs.objects.get(attempt.name)
        for node in attempt.nodes:
            if (node.pod.over if node.pod else job is None or job.finished) and not node.ended:
                node.ended = True
                ends.append(_end(attempt, node, None if node.pod else pods.deleted()))
            elif node.pod and not node.ended:
                # Told before, by an earlier life.
                node.note_trouble(_meant(attempt, node, node.pod.trouble), time.monotonic())
                self._open_gate(attempt, node, node.pod)
        attempt.note_placed()
        return ends

    def look(self, attempt: Attempt) -> None:
        """Delivers the ends of an attempt that was started before; nothing for one whose Job is new."""
        if attempt.name in self.jobs.objects:
            for end in self.take_over(attempt):
                self._observer.ended(end)

    def finish(self, attempt: Attempt, node: Node, cause: common_pb2.Exit | None = None) -> None:
        """A node is over."""
        if not node.ended:
            node.ended = True
            attempt.note_placed()
            self._observer.ended(_end(attempt, node, cause))

    def _pod_changed(self, name: str, before: pods.Pod | None, after: pods.Pod | None) -> None:
        pod = after or before
        attempt = self.attempts.get(pod.attempt_id) if pod else None
        if pod is None or attempt is None or pod.node >= len(attempt.nodes):
            return
        node = attempt.nodes[pod.node]
        if pod.deleting and not (node.pod and node.pod.deleting):
            # Kubernetes itself takes the other pods away when one has failed: that is no news of its own.
            node.asked = node.asked or any(_is_over(each) for each in attempt.nodes if each is not node)
        placed = bool(pod.machine) and not (node.pod and node.pod.machine)
        node.pod = pod
        if placed:
            attempt.note_placed()
            self._observer.placed(attempt.facts.attempt_id)
        self._open_gate(attempt, node, pod)
        if after is None or pod.over:
            gone = pods.deleted() if after is None and not pod.over and not node.asked else None
            self.finish(attempt, node, gone)
        elif not node.ended:
            self._troubled(attempt, node, pod.trouble)

    def _machine_changed(self, name: str, before: machines.Machine | None, after: machines.Machine | None) -> None:
        if before != after:
            self.machines_changed.set()

    def _open_gate(self, attempt: Attempt, node: Node, pod: pods.Pod) -> None:
        if binding.GATE in pod.gates and not node.opening and not pod.deleting:
            node.opening = True
            self._background.run(self._bind(attempt, node, pod), f"bind {pod.name}")

    async def _bind(self, attempt: Attempt, node: Node, pod: pods.Pod) -> None:
        refused = await binding.open_gate(self._api, f"{self._core}/pods/{pod.name}", pod, attempt.facts, self._kinds)
        if refused and not node.ended and node.verdict is None:  # it would stay gated for ever
            message = f"the cluster does not let its pod be bound to its machine: {refused}"
            node.verdict = common_pb2.Exit(reason="PodsRefused", message=message, node=node.index)
            await self.delete_pod(pod.name)

    def _job_changed(self, name: str, before: jobs.JobState | None, after: jobs.JobState | None) -> None:
        attempt = self._by_name.get(name)
        if attempt is not None and (after is None or after.finished):
            self._background.run(self._account(attempt, gone=after is None), f"pods of {name}")

    async def _account(self, attempt: Attempt, *, gone: bool) -> None:
        """A Job is done, or gone: nodes that have no pod now will never have one, and pods it left behind must end."""
        selector = f"{names.ATTEMPT_ID}={attempt.facts.attempt_id}"
        for pause_s in backoff():
            try:
                found = (await self._api.get(f"{self._core}/pods", labelSelector=selector))["items"]
                break
            except ApiError as error:
                logger.info("pods not listed", extra={"attempt": attempt.facts.attempt_id, "why": str(error)})
            await asyncio.sleep(pause_s)
        alive = {pod.node: pod for pod in map(pods.read, found) if pod is not None}
        for node in attempt.nodes:
            if node.pod is None and node.index not in alive:
                self.finish(attempt, node, None if node.asked else pods.deleted())
            elif gone and node.index in alive and not alive[node.index].deleting:
                await self.delete_pod(alive[node.index].name)

    async def delete_pod(self, name: str, grace_s: int | None = None) -> None:
        """Asks for a pod's end, until the API server has heard; with its own grace period unless told otherwise."""
        options = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        for pause_s in backoff():
            try:
                return await self._api.delete(f"{self._core}/pods/{name}", **options)
            except ApiError as error:
                if not error.away:
                    logger.error("pod not deleted", extra={"pod": name, "why": str(error)})
                    return None
            await asyncio.sleep(pause_s)
        raise AssertionError("backoff never ends")

    # What keeps nodes from running

    def _troubled(self, attempt: Attempt, node: Node, trouble: pods.Trouble | None) -> None:
        trouble = _meant(attempt, node, trouble)
        if node.note_trouble(trouble, time.monotonic()) and trouble is not None and trouble.reason not in attempt.told:
            attempt.told.add(trouble.reason)
            self._observer.remark(attempt.facts.attempt_id, trouble.reason, trouble.message)

    def _warned(self, name: str, before: jobs.Warned | None, after: jobs.Warned | None) -> None:
        if after is None:
            return
        if after.kind == "Pod":
            pod = self.pods.objects.get(after.name)
            attempt = self.attempts.get(pod.attempt_id) if pod else None
            affected = [attempt.nodes[pod.node]] if pod and attempt and pod.node < len(attempt.nodes) else []
        else:
            attempt = self._by_name.get(after.name)
            affected = [node for node in attempt.nodes if node.pod is None] if attempt else []
        for node in affected:
            if attempt is not None and not node.ended:
                self._troubled(attempt, node, after.trouble)

    # What nobody tells

    async def _judge(self) -> None:
        while True:
            await asyncio.sleep(_JUDGE_S)
            now = time.monotonic()
            try:
                self._judge_pods(now)
                await self._judge_machines(now)
            except Exception:  # without a judge no machine would ever be lost
                logger.exception("machines and images were not judged")

    def _judge_pods(self, now: float) -> None:
        """Gives up pods whose images do not come, and those that find no room on their machine."""
        patience_s = {
            "ImageUnavailable": self._settings.kubernetes_image_patience_s,
            UNSCHEDULABLE: self._settings.kubernetes_unschedulable_patience_s,
        }
        for _, node in self._alive():
            trouble = node.trouble
            if trouble is None or trouble.reason not in patience_s or node.verdict or node.pod is None:
                continue
            if trouble.hopeless or now - node.troubled_since > patience_s[trouble.reason]:
                node.verdict = common_pb2.Exit(reason=trouble.reason, message=trouble.message, node=node.index)
                self._background.run(self.delete_pod(node.pod.name), f"give up {node.pod.name}")

    async def _judge_machines(self, now: float) -> None:
        ready = {name: machine.ready for name, machine in self.machines.objects.items()}
        found = await self.judge.judge(ready, self._silences(), now)
        for attempt, node in list(self._alive()):
            if node.pod is not None and node.pod.machine in found.lost:
                self._lose(attempt, node, node.pod)
            elif node.pod is not None and node.pod.machine in found.held and HELD not in attempt.told:
                attempt.told.add(HELD)
                message = HELD_MESSAGE.format(node.pod.machine, node.pod.machine)
                self._observer.remark(attempt.facts.attempt_id, HELD, message)

    def _silences(self) -> dict[str, list[float]]:
        silent: dict[str, list[float]] = {}
        for attempt, node in self._alive():
            if node.pod is not None and node.pod.machine:
                silence_s = self._observer.silent_s(attempt.facts.attempt_id, node.index)
                silent.setdefault(node.pod.machine, []).append(silence_s)
        return silent

    def _lose(self, attempt: Attempt, node: Node, pod: pods.Pod) -> None:
        self.machines_changed.set()
        logger.warning("machine lost", extra={"attempt": attempt.facts.attempt_id, "machine": pod.machine})
        node.verdict = pods.lost(pod.machine)
        self._background.run(self.delete_pod(pod.name, 0), f"force-delete {pod.name}")
        self.finish(attempt, node)

    def _alive(self) -> Iterator[tuple[Attempt, Node]]:
        for attempt in self.attempts.values():
            for node in attempt.nodes:
                if not node.ended:
                    yield attempt, node


def _meant(attempt: Attempt, node: Node, trouble: pods.Trouble | None) -> pods.Trouble | None:
    """What a trouble means for this node: one that waits for a new machine finds no room before it is there."""
    kind = binding.target(attempt.facts, node.index).kind
    return pods.awaiting(kind, trouble) if kind and trouble and trouble.reason == UNSCHEDULABLE else trouble


def _is_over(node: Node) -> bool:
    return node.ended or (node.pod is not None and node.pod.over)


def _end(attempt: Attempt, node: Node, cause: common_pb2.Exit | None) -> NodeEnd:
    pod = node.pod
    known = node.verdict or cause or (pod.cause if pod else None)
    if known is not None and known.reason == "PodDeleted" and node.asked:
        known = None
    presumed = known is None and not node.asked
    return NodeEnd(
        attempt.facts.attempt_id,
        node.index,
        pod.record if pod and node.verdict is None else None,
        out_of_memory=pod.out_of_memory if pod else False,
        memory=_memory(pod) if pod else None,
        cause=pods.told_to_end(pod) if presumed and pod else known,
        presumed=presumed,
    )


def _memory(pod: pods.Pod) -> common_pb2.MemoryUse | None:
    """The limit; what a container used, the cluster does not keep."""
    if not pod.memory_limit:
        return None
    return common_pb2.MemoryUse(limit_bytes=pod.memory_limit, sampled=True, enforced=True)
