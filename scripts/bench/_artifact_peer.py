"""mlflow's client, run by its own Python: stores or fetches a folder through its server and prints the seconds.

_artifact_peer.py URI put FOLDER        prints {"seconds", "run"}
_artifact_peer.py URI get RUN FOLDER    prints {"seconds"}
"""

from __future__ import annotations

import json
import sys
import time

import mlflow


def put(folder: str) -> dict[str, object]:
    with mlflow.start_run() as run:
        started = time.perf_counter()
        mlflow.log_artifacts(folder)
        return {"seconds": time.perf_counter() - started, "run": run.info.run_id}


def get(run: str, folder: str) -> dict[str, object]:
    started = time.perf_counter()
    mlflow.artifacts.download_artifacts(run_id=run, dst_path=folder)
    return {"seconds": time.perf_counter() - started}


mlflow.set_tracking_uri(sys.argv[1])
action = {"put": put, "get": get}[sys.argv[2]]
print(json.dumps(action(*sys.argv[3:])))
