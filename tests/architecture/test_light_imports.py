"""What must start fast or stay small does not load what it does not need."""

import subprocess
import sys

import pytest

_PRINT_MODULES = "import sys; print('\\n'.join(sorted(m.partition('.')[0] for m in sys.modules)))"
HEAVY = {"torch", "numpy", "deepspeed", "sklearn"}


def packages_after(statement: str) -> set[str]:
    """Top-level packages that a fresh interpreter holds after a statement, beyond what every interpreter holds."""
    empty = _packages("pass")
    return _packages(statement) - empty


def _packages(statement: str) -> set[str]:
    code = f"{statement}\n{_PRINT_MODULES}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_the_tracker_loads_the_standard_library_alone():
    loaded = packages_after("from trainyard import tracker")
    assert loaded - {"trainyard"} <= sys.stdlib_module_names


def test_importing_trainyard_loads_nothing_else():
    assert packages_after("import trainyard") - {"trainyard"} <= sys.stdlib_module_names


def test_the_agent_loads_nothing_of_the_spec_or_the_terminal():
    loaded = packages_after("import trainyard.agent.supervisor")
    assert not loaded & {"pydantic", "ruamel", "typer", "click", "rich", "plotext", "sqlmodel", "celery", *HEAVY}


def test_the_agent_starts_workers_before_it_loads_grpc():
    assert not packages_after("import trainyard.agent.boot") & {"grpc", "google", "asyncio"}


@pytest.mark.parametrize("module", ["trainyard.client", "trainyard.cli.main", "trainyard.spec"])
def test_the_library_loads_no_training_framework(module):
    assert not packages_after(f"import {module}") & HEAVY


@pytest.mark.parametrize("module", ["cli.main", "cli.commands.context", "cli.run.session", "client.connection"])
def test_a_cluster_s_client_is_loaded_only_for_a_context_that_names_a_release(module):
    assert not packages_after(f"import trainyard.{module}") & {"kubernetes", "aiohttp"}


@pytest.mark.parametrize("service", ["scheduler", "launcher", "metrics", "artifacts", "embedded"])
def test_no_service_loads_a_training_framework(service):
    assert not packages_after(f"import trainyard_{service}.app") & {"torch", "deepspeed", "sklearn"}
