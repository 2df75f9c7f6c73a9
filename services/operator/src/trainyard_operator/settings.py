"""Settings of the operator."""

from __future__ import annotations

from pydantic import Field
from servicekit.settings import Settings as ServiceSettings


class Settings(ServiceSettings):
    """Frozen; unknown keys are refused. Names end in their unit."""

    identity: str = Field(default="trainyard", min_length=1)
    """Name of this operator, of which the cluster has no second: it leaves alone what others took."""
    namespaces: str = ""
    """Namespaces whose resources are jobs of this yard, separated by commas; empty: all of the cluster."""
    secrets_checked: bool = False
    """Whether the API server refuses a resource that names Secrets which its author may not get, as the chart's
    admission policy does. Otherwise jobs get only Secrets with the label trainyard.dev/usable."""
    kubeconfig: str = ""
    """How the API server is reached; empty: as the pod this operator runs in, or by the user's own kubeconfig."""
    context: str = ""
    """Context of the kubeconfig; empty: its current one."""
    qps: float = Field(default=200, gt=0)
    """Requests a second to the API server, on average, without kopf's own watch."""
    burst: int = Field(default=400, gt=0)
    """Requests that may be made at once."""
    request_timeout_s: float = Field(default=30, gt=0)
    """Deadline of one request."""
    workers: int = Field(default=32, gt=0)
    """Resources that are worked on at once."""
    retry_s: float = Field(default=0.5, gt=0)
    """Pause before a resource that could not be handled is tried again; it doubles up to a minute."""
    progress_interval_s: float = Field(default=30, gt=0)
    """Least time between two looks at the progress of one job, and so between two patches of it."""
    progress_per_s: float = Field(default=20, gt=0)
    """Looks at progress a second, over all jobs."""
    call_timeout_s: float = Field(default=30, gt=0)
    """Deadline of a call to the yard."""

    @property
    def watched(self) -> list[str]:
        """The namespaces by name; empty: all."""
        return [name.strip() for name in self.namespaces.split(",") if name.strip()]
