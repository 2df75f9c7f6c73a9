"""What an operator can set."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Limits and periods of the artifact store."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_hashes_per_call: int = Field(10_000, gt=0)
    """Hashes in one FindMissing or GetChunks call."""
    max_labels: int = Field(64, ge=0)
    """Labels of one version."""
    max_inputs: int = Field(256, ge=0)
    """Inputs of one version."""
    max_parts: int = Field(4096, gt=0)
    """Nodes that make one version together."""
    max_checkpoint_bytes: int = Field(64 * 1024, gt=0)
    """Size of the facts (cut, metrics) beside a checkpoint."""
    put_batch_bytes: int = Field(16 * 1024 * 1024, gt=0)
    """Bytes of one stream held in memory before they are written."""
    chunk_grace_s: float = Field(3600.0, ge=3600.0)
    """How long a chunk that no version uses is kept: an upload may be about to commit it."""
    part_ttl_s: float = Field(86_400.0, gt=0)
    """How long parts wait for the others of their version."""
    collect_interval_s: float = Field(3600.0, gt=0)
    """How often unused chunks are looked for."""
