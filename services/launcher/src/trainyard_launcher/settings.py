"""Settings of the launcher; the defaults suit one machine."""

from __future__ import annotations

import socket

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Frozen; unknown keys are refused. Names end in their unit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pool: str = "local"
    heartbeat_s: float = Field(default=5, gt=0)
    """How often agents say that they are well."""
    silence_s: float = Field(default=300, gt=0)
    """An agent that was heard and then says nothing for so long is given up, its process alive or not. Longer than
    networks are usually away: training goes on without its yard."""
    connect_s: float = Field(default=600, gt=0)
    """The same for an agent that was never heard: code, inputs and environments may take long to arrive."""
    token_ttl_s: float = Field(default=86_400, gt=1)
    """How long an attempt's token is valid; it is renewed at half of it. Long enough for a laptop to sleep over night,
    or a yard to be away: an agent whose token has expired cannot come back."""
    finalize_timeout_s: float = Field(default=300, gt=0)
    """How long outputs, logs and points may take after the workers ended."""
    stop_slack_s: float = Field(default=5, ge=0)
    """Beyond grace period and finalizing, before an attempt that was asked to stop is killed."""

    ring_lines: int = Field(default=20_000, gt=0)
    ring_bytes: int = Field(default=8 * 1024 * 1024, gt=0)
    """Recent output kept in memory for followers, per attempt."""
    recent_attempts: int = Field(default=32, ge=0)
    """Ended attempts whose recent output is kept for followers that come late."""
    max_followers: int = Field(default=1000, gt=0)
    max_notes: int = Field(default=100, gt=0)
    """Unsent notes kept per attempt while the scheduler does not answer."""

    start_concurrency: int = Field(default=32, gt=0)
    stop_concurrency: int = Field(default=4, gt=0)
    task_timeout_s: float = Field(default=45, gt=0)
    """How long one Celery task may take; less than the broker's visibility timeout."""
    call_timeout_s: float = Field(default=10, gt=0)
    """Deadline of a call to the scheduler."""
    stacks_timeout_s: float = Field(default=20, gt=0)

    lease_s: float = Field(default=30, gt=0)
    renew_s: float = Field(default=10, gt=0)
    """The pool's registration, and how often it is renewed."""
    reconcile_s: float = Field(default=30, gt=0)
    """How often the launcher's view is compared with the scheduler's."""

    capacity_cpu: float | None = Field(default=None, gt=0)
    capacity_memory: int | None = Field(default=None, gt=0)
    capacity_gpu: int | None = Field(default=None, ge=0)
    """What this machine offers, in cores, bytes and devices; absent: what it has."""
    machine: str = Field(default_factory=socket.gethostname)

    enforce_limits: bool = True
    """CPU and memory limits through cgroups, where they are writable."""
    agent_cpu: float = Field(default=0.5, ge=0)
    agent_memory: int = Field(default=256 * 1024 * 1024, ge=0)
    """The agent's own share of a node's limits, in cores and bytes."""
    sweep_timeout_s: float = Field(default=10, gt=0)
    """How long a process may take to die of SIGKILL before that is reported."""

    tied_to_pid: int = 0
    tied_to_start_time: int = 0
    """A yard for one command: agents end when this process does."""
    ca_file: str = ""
    """Root certificate agents check the yard's endpoint against; empty: plaintext on loopback."""
