"""How much a service stores: what its `GetUsage` method answers."""

from __future__ import annotations

import shutil
from pathlib import Path

from sqlalchemy import text
from sqlmodel import Session
from trainyard_protos.v1.admin_pb2 import GetUsageResponse

Usage = GetUsageResponse.Usage


def database_bytes(session: Session) -> int:
    """Bytes of the database on disk: of SQLite the file and its log, of PostgreSQL what the server says."""
    bind = session.connection()
    if bind.dialect.name != "sqlite":
        return int(session.connection().execute(text("SELECT pg_database_size(current_database())")).scalar_one())
    file = Path(bind.engine.url.database or "")
    return sum(path.stat().st_size for path in (file, file.with_name(f"{file.name}-wal")) if path.exists())


def free_bytes(folder: Path) -> int:
    """Bytes that are free on the disk of a folder."""
    return shutil.disk_usage(folder).free
