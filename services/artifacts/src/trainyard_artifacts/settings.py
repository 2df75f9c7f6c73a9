"""What an operator can set."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, TypeAdapter
from servicekit.settings import Settings as ServiceSettings

from trainyard_artifacts.domain.retention import Rule

Kind = Literal["code", "checkpoint", "output", "data"]
_RULES = TypeAdapter(dict[Kind, Rule])


def _from_json(value: Any) -> Any:
    return _RULES.validate_json(value) if isinstance(value, str) else value


class Settings(ServiceSettings):
    """Limits and periods of the artifact store."""

    max_hashes_per_call: int = Field(10_000, gt=0)
    """Hashes in one FindMissing or GetChunks call."""
    max_version_bytes: int = Field(1024**4 // 2, gt=0)
    """Bytes of all files of one version, those that are the same included."""
    max_labels: int = Field(64, ge=0)
    """Labels of one version."""
    max_inputs: int = Field(256, ge=0)
    """Inputs of one version."""
    max_metrics: int = Field(256, ge=0)
    """Metrics of one version."""
    max_parts: int = Field(4096, gt=0)
    """Nodes that make one version together."""
    max_checkpoint_bytes: int = Field(64 * 1024, gt=0)
    """Size of the facts (cut, metrics) beside a checkpoint."""
    put_batch_bytes: int = Field(16 * 1024 * 1024, gt=0)
    """Bytes of one stream that are collected before they are written as one pack."""
    receive_bytes: int = Field(192 * 1024 * 1024, gt=0)
    """Bytes being received at once over all streams; further streams wait."""
    receive_wait_s: float = Field(60.0, gt=0)
    """How long a stream waits for its turn."""
    receive_idle_s: float = Field(60.0, gt=0)
    """How long a stream may send nothing."""
    chunk_grace_s: float = Field(3600.0, gt=0)
    """How long a chunk that no version uses is kept. An upload that takes longer has to send some chunks again."""
    orphan_grace_s: float = Field(3600.0, gt=0)
    """How long a pack may be under way into the index; what is older and not in it is removed."""
    rewrite_below: float = Field(0.5, ge=0, le=1)
    """Packs with a smaller part of living bytes are rewritten."""
    part_ttl_s: float = Field(86_400.0, gt=0)
    """How long parts wait for the others of their version."""
    collect_interval_s: float = Field(3600.0, gt=0)
    """How often retention is applied and unused chunks are removed."""
    retention: Annotated[dict[Kind, Rule], BeforeValidator(_from_json)] = {}
    """Rules by kind for artifacts without one of their own, as JSON: {"output": {"keep_last": 9, "ttl_s": 86400}}."""
    s3_bucket: str = ""
    """Bucket for packs, or "bucket/prefix"; without one they are in a folder of the yard's home."""
    s3_endpoint: str = ""
    """Address of an S3 server other than Amazon's."""
    s3_region: str = ""
    """Region of the bucket, where the server has regions."""
    s3_access_key_id: SecretStr = SecretStr("")
    """Without keys, those of the environment (AWS_ACCESS_KEY_ID, ...) or of the machine are used."""
    s3_secret_access_key: SecretStr = SecretStr("")
    """Belongs to the key's id; never logged."""
    s3_timeout_s: float = Field(30.0, gt=0)
    """How long one request may take, and how long failed ones are tried again."""
