"""Settings of the scheduler; the defaults suit one machine."""

from __future__ import annotations

from pydantic import Field
from servicekit.settings import Settings as ServiceSettings


class Settings(ServiceSettings):
    """Frozen; unknown keys are refused."""

    reclaim_after_s: float = Field(default=10, gt=0)
    """An attempt that no launcher claimed for so long is announced again."""
    finalize_timeout_s: float = Field(default=300, gt=0)
    """How long outputs, logs and points may take after the workers ended, on top of the job's grace period."""
    max_queued_jobs: int = Field(default=100_000, gt=0)
    """Submit is refused beyond this."""
    admission_batch: int = Field(default=500, gt=0)
    """Most jobs admitted in one transaction."""
    max_document_bytes: int = Field(default=1024 * 1024, gt=0)
    """Size of a job's document."""
    max_batch: int = Field(default=1000, gt=0)
    """Most requests of one SubmitBatch."""
    submit_chunk: int = Field(default=250, gt=0)
    """How many of a batch go into one transaction."""
    kind_retry_s: float = Field(default=600, ge=0)
    """How long no job waits for machines of a kind of which none came in time."""
    expiry_batch: int = Field(default=200, gt=0)
    """Most jobs removed in one transaction after their TTL."""
    orphan_grace_s: float = Field(default=604_800, ge=0)
    """How long folders and runs of jobs that the scheduler should know and does not are kept, from the time when they
    are found: time to put a backup back that has the jobs."""
