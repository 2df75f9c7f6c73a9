"""Settings of the launcher that count on a Kubernetes cluster."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from servicekit.settings import Settings as ServiceSettings


class ClusterSettings(ServiceSettings):
    """Frozen; unknown keys are refused. Names end in their unit."""

    kubernetes_namespace: str = "default"
    """Namespace of the jobs' pods."""
    kubernetes_kubeconfig: str = ""
    """How the API server is reached; empty: as the pod this launcher runs in, or by the user's own kubeconfig."""
    kubernetes_context: str = ""
    """Context of the kubeconfig; empty: its current one."""
    kubernetes_agent_endpoint: str = ""
    """host:port at which pods reach the yard; empty: the launcher's own endpoint."""
    kubernetes_ca_config_map: str = "trainyard-ca"
    """ConfigMap in the namespace of the jobs whose key ca.crt is the root certificate of that endpoint."""
    kubernetes_agent_image: str = "trainyard/agent"
    """Image that brings the agent into every pod."""
    kubernetes_agent_volume: Literal["auto", "copy", "image"] = "auto"
    """How: `image` mounts it, which needs Kubernetes 1.35 and containerd 2.2 on every machine; `copy` has an init
    container copy 260 MB into each pod; `auto` mounts it when all machines say that they can."""
    kubernetes_worker_image: str = "trainyard/worker"
    """Image of jobs that name none."""
    kubernetes_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When images are pulled, unless the job says so itself."""
    kubernetes_service_account: str = "default"
    """Account of pods whose job names none. It needs no rights."""
    kubernetes_reserved_names: str = ""
    """Names of Secrets, claims and service accounts that jobs may not use, because they are the yard's own, with commas
    between them; `*` stands for any characters."""
    kubernetes_allowed_priority_classes: str = ""
    """Priority classes that jobs may ask for, with commas between them; `*` stands for any characters."""
    kubernetes_allowed_tolerations: str = ""
    """Keys of taints that jobs may tolerate, with commas between them; `*` stands for any characters, and alone also
    allows jobs to tolerate every taint. Pods that ask for GPUs tolerate the taint of GPUs in any case."""
    kubernetes_network_policies: bool = False
    """Whether pods of an attempt are allowed to reach each other by a NetworkPolicy of their own. Needed where another
    one keeps everybody away from them, as the chart's does."""
    kubernetes_run_as_user: int = Field(default=1000, gt=0)
    """User of the workers of jobs that name none."""
    kubernetes_run_as_group: int = Field(default=1000, gt=0)
    """Their group, also of the volumes."""
    kubernetes_host_paths: bool = False
    """Whether jobs may mount folders of the nodes."""
    kubernetes_pod_template: str = ""
    """YAML file that is merged into every pod: volumes, tolerations and the like that all jobs get."""
    kubernetes_machine_kinds: str = ""
    """JSON list of the kinds of machines that a cluster autoscaler makes when pods need them: of each `name`, `max`,
    `resources`, `labels`, `taints` and `provisionTimeout`. The guide "Kubernetes" explains them."""
    kubernetes_unschedulable_patience_s: float = Field(default=60, ge=0)
    """How long a pod may find no room on its machine before the job returns to its place in the queue."""
    kubernetes_gpu_resource: str = "nvidia.com/gpu"
    """Name of the resource that GPUs are."""
    kubernetes_drain_timeout_s: float = Field(default=120, ge=0)
    """How long an agent that is told to end may try to deliver records, at least, at most `finalize_timeout_s`: what
    metrics has not taken by then is lost with the pod."""
    kubernetes_qps: float = Field(default=100, gt=0)
    """Requests a second to the API server, on average."""
    kubernetes_burst: int = Field(default=200, gt=0)
    """Requests that may be made at once."""
    kubernetes_request_timeout_s: float = Field(default=30, gt=0)
    """Deadline of one request; watches have none."""
    kubernetes_keep_failed_s: int = Field(default=600, ge=0)
    """How long Jobs and pods of failed attempts are kept after their end, so that `kubectl logs` and `kubectl describe`
    show them; 0: they are removed at once, as those of other attempts are."""
    kubernetes_image_patience_s: float = Field(default=120, ge=0)
    """How long an image that cannot be pulled is tried again before the attempt ends."""
    kubernetes_lost_silence_s: float = Field(default=15, gt=0)
    """How long the agents of a machine that is not ready must have been silent before it counts as lost."""
