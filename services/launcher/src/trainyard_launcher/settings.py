"""Settings of the launcher; the defaults suit one machine."""

from __future__ import annotations

import socket
from typing import Literal

from pydantic import Field

from trainyard_launcher.cluster_settings import ClusterSettings


class Settings(ClusterSettings):
    """Frozen; unknown keys are refused. Names end in their unit."""

    backend: Literal["process", "kubernetes"] = "process"
    """Where nodes run: processes of this machine, or pods of a cluster."""
    identity: str = ""
    """Name of this launcher, the same over all of its lives; empty: one is made and kept in its home."""
    pool: str = "local"
    """Name of the pool of machines that this launcher announces."""
    heartbeat_s: float = Field(default=5, gt=0)
    """How often agents say that they are well."""
    silence_s: float = Field(default=300, gt=0)
    """An agent that was heard and then says nothing for so long is given up, its process alive or not. Longer than
    networks are usually away: training goes on without its yard."""
    connect_s: float = Field(default=600, gt=0)
    """The same for an agent that was never heard: code, inputs and environments may take long to arrive."""
    token_ttl_s: float = Field(default=600, gt=1)
    """How long an attempt's token is valid; it is renewed at half of it. An agent that was away for longer, because the
    machine slept or the yard was away, gets the next one when it comes back."""
    finalize_timeout_s: float = Field(default=300, gt=0)
    """How long outputs, logs and points may take after the workers ended."""
    stop_slack_s: float = Field(default=5, ge=0)
    """Beyond grace period and finalizing, before an attempt that was asked to stop is killed."""

    ring_lines: int = Field(default=20_000, gt=0)
    """Recent lines of output kept in memory for followers, per attempt."""
    ring_bytes: int = Field(default=8 * 1024 * 1024, gt=0)
    """Bytes of recent output kept in memory for followers, per attempt."""
    recent_attempts: int = Field(default=32, ge=0)
    """Ended attempts whose recent output is kept for followers that come late."""
    max_followers: int = Field(default=1000, gt=0)
    """Readers that follow live output at once."""
    max_notes: int = Field(default=100, gt=0)
    """Unsent notes kept per attempt while the scheduler does not answer."""

    start_concurrency: int = Field(default=32, gt=0)
    """Attempts that are started at once."""
    stop_concurrency: int = Field(default=4, gt=0)
    """Attempts that are stopped at once."""
    task_timeout_s: float = Field(default=45, gt=0)
    """How long one Celery task may take; less than the broker's visibility timeout."""
    call_timeout_s: float = Field(default=10, gt=0)
    """Deadline of a call to the scheduler."""
    stacks_timeout_s: float = Field(default=20, gt=0)
    """How long the stacks of all ranks may take."""

    lease_s: float = Field(default=30, gt=0)
    """How long the pool's registration holds; a pool that is not heard of for so long takes no new work."""
    renew_s: float = Field(default=10, gt=0)
    """How often it is renewed."""
    reconcile_s: float = Field(default=30, gt=0)
    """How often the launcher's view is compared with the scheduler's."""
    orphan_check_s: float = Field(default=21_600, gt=0)
    """How often the scheduler is told of which jobs there are folders here and runs in metrics, so that it finds those
    that it does not know; also at start."""

    capacity_cpu: float | None = Field(default=None, gt=0)
    """Cores that this machine offers to jobs; none: those it has."""
    capacity_memory: int | None = Field(default=None, gt=0)
    """Bytes of memory that it offers; none: what it has."""
    capacity_gpu: int | None = Field(default=None, ge=0)
    """GPUs that it offers; none: those it has."""
    machine: str = Field(default_factory=socket.gethostname)
    """Its name; default: the host's."""

    inherit_environment: str = ""
    """Names and globs of variables, separated by commas, that jobs on this machine inherit from the launcher's
    environment beside those that programs need to run, which `docs/guides/security.md` lists."""
    enforce_limits: bool = True
    """CPU and memory limits through cgroups, where they are writable."""
    agent_cpu: float = Field(default=0.05, ge=0)
    """On a cluster, cores that each pod requests for its agent beside what its workers ask for."""
    agent_cpu_limit: float = Field(default=1, ge=0)
    """Cores by which a node's limit is above its workers' share, at least `agent_cpu`: held to its share alone an agent
    takes seconds to start."""
    agent_memory: int = Field(default=96 * 1024 * 1024, ge=0)
    """The agent's own share of a node's request and limit, in bytes."""
    sweep_timeout_s: float = Field(default=10, gt=0)
    """How long a process may take to die of SIGKILL before that is reported."""

    tied_to_pid: int = 0
    """Of a yard for one command, its process: agents end when it does. 0: they go on."""
    tied_to_start_time: int = 0
    """When that process was started, in clock ticks since boot."""
    ca_file: str = ""
    """Root certificate agents check the yard's endpoint against; empty: plaintext on loopback."""
