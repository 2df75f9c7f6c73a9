"""Huey on SQLite, run with the peers' Python: as many no-op tasks as the argument says, queued, run and recorded.

Every change is synced to disk, as the yard's are. Prints one JSON line: seconds from the first task sent to the last
result stored.
"""

import json
import sys
import threading
import time
from pathlib import Path

from huey import SqliteHuey
from huey.signals import SIGNAL_COMPLETE

count, folder = int(sys.argv[1]), Path(sys.argv[2])
queue = SqliteHuey("bench", filename=str(folder / "huey.db"), fsync=True)
done = threading.Semaphore(0)


@queue.task()
def no_op() -> bool:
    return True


@queue.signal(SIGNAL_COMPLETE)
def completed(signal: str, task: object) -> None:
    done.release()


consumer = queue.create_consumer(
    workers=1, initial_delay=0.001, backoff=1.0, max_delay=0.001, check_worker_health=False
)
consumer.start()
started = time.monotonic()
for _ in range(count):
    no_op()
for _ in range(count):
    done.acquire()
print(json.dumps({"seconds": time.monotonic() - started}), flush=True)
consumer.stop(graceful=True)
