"""Workers the agent starts see the environment that the installed torchrun gives."""

import json
import re
import subprocess
import sys
from pathlib import Path

from scripts.testbed.patience import PATIENCE_S

SCRIPT = """
    import json, os
    names = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "OMP_")
    print("env " + json.dumps({k: v for k, v in os.environ.items() if k.startswith(names)}), flush=True)
"""
OF_ITS_OWN = {
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",  # rank 0 serves the store, since no torchrun does
    "TORCHELASTIC_SIGNALS_TO_HANDLE",  # which torchrun reads itself
}


def environments(output: str) -> dict[str, dict[str, str]]:
    """What each worker printed, by rank."""
    found = [json.loads(text) for text in re.findall(r"env (\{.*?\})", output)]
    return {each["RANK"]: each for each in found}


def test_workers_get_what_torchrun_gives_them(yard, job_file):
    file = job_file(SCRIPT, "runtime: torchrun\ncommand: [python, train.py]\ncode: {path: .}\nworkersPerNode: 2\n")
    torchrun = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", "2", "train.py"]
    stock = subprocess.run(
        torchrun, cwd=file.parent, env=yard.environ, capture_output=True, text=True, timeout=PATIENCE_S
    )
    wanted = environments(stock.stdout)
    given = environments(yard.run("run", file).stdout)
    assert wanted.keys() == given.keys() == {"0", "1"}
    for rank, variables in wanted.items():
        shared = variables.keys() - OF_ITS_OWN
        assert {name: given[rank].get(name) for name in shared} == {name: variables[name] for name in shared}
