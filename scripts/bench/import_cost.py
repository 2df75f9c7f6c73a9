"""What importing trainkit costs beyond torch, in seconds of processor time, and what must not import torch at all.

Each import runs in a process of its own, alternating, and may cost at most 0.3 s more than `import torch` alone. The
command line, the check of a configuration and the client of the yard must not import torch.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
from functools import partial

from _harness import Bar, clean_environment, conclude, interleave, table

LIMIT_S = 0.3
TORCH = "import torch"
CHECKPOINTS = (
    "checkpoints too"  # shown without a bar: imported by the first run that has some, nearly all of it torch's
)
OURS = {
    "trainkit": "import torch, trainkit",
    "Trainer and Loader": "import torch; from trainkit import Trainer, Checkpoints; from trainkit.data import Loader",
    "the loop": "import torch; from trainkit import Trainer; import trainkit.loop.fit",
    CHECKPOINTS: "import torch; from trainkit import Trainer; import trainkit.loop.fit, trainkit.loop.keeper",
}
WITHOUT_TORCH = {
    "the command line": "import trainyard.cli",
    "a configuration's check": "import trainkit.config.__main__, trainkit.config.checking",
    "yard's client": "import trainyard.client",
}


def seconds(statement: str) -> float:
    """User and system time of a process that runs the statement."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], check=True, env=clean_environment())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imports_torch(statement: str) -> bool:
    check = f"{statement}\nimport sys; sys.exit('torch' in sys.modules)"
    return bool(subprocess.run([sys.executable, "-c", check], env=clean_environment()).returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    options = parser.parse_args()
    rounds = 3 if options.quick else options.rounds
    cases = {"torch": TORCH, **OURS}
    found = interleave({name: partial(seconds, statement) for name, statement in cases.items()}, rounds)
    torch_s = statistics.median(found["torch"])
    over = {name: statistics.median(found[name]) - torch_s for name in OURS}
    table(
        "processor time of imports, seconds",
        ["what", "all", "beyond torch"],
        [
            ["torch", f"{torch_s:.2f}", ""],
            *([name, f"{statistics.median(found[name]):.2f}", f"{over[name]:+.2f}"] for name in OURS),
        ],
    )
    bars = [
        Bar(name=name, ours=max(over[name], 0.0), peer=torch_s, peer_name="torch", unit="s", bar=LIMIT_S)
        for name in OURS
        if name != CHECKPOINTS
    ]
    for name, statement in WITHOUT_TORCH.items():
        bars.append(
            Bar(
                name=f"{name} without torch",
                ours=int(imports_torch(statement)),
                peer=1,
                peer_name="-",
                unit="",
                bar=0.5,
            )
        )
    raise SystemExit(conclude("import_cost", bars))


if __name__ == "__main__":
    main()
