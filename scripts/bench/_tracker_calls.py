"""A plain script that times its own calls of `tracker.log`; prints `{"calls_ns": [...]}`."""

import json
import sys
import time

from trainyard import tracker


def main() -> None:
    row = {f"train/metric{number}": 0.5 + number for number in range(10)}
    clock, took = time.perf_counter_ns, []
    for step in range(int(sys.argv[1])):
        began = clock()
        tracker.log(row, step=step)
        took.append(clock() - began)
    print(json.dumps({"calls_ns": took}))


if __name__ == "__main__":
    main()
