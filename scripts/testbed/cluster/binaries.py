"""The programs of a Kubernetes cluster, built from their Go modules and kept by version in the cache of the testbed.

Each module is built inside a module of our own that requires nothing else. `go install` would refuse the ones that
replace modules of their own repository by folders that a published module does not carry.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scripts.testbed import fetch

KUBERNETES = "1.36.3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A Go module and the programs that are built from it."""

    name: str
    module: str
    version: str
    programs: dict[str, str]
    """The package of each program, relative to the module; or a file beside this one that uses the module."""
    staging: str = ""
    """The version of the modules that its own go.mod replaces by folders; empty: it replaces none that we need."""
    stamps: dict[str, str] = field(default_factory=dict)
    """The variables that tell the programs their own version."""

    def program(self, name: str) -> Path:
        """Where the program is; built when it is not there yet.

        Raises:
            fetch.Unavailable: it cannot be built.
        """
        return self.folder() / name

    def folder(self) -> Path:
        """The folder with all of its programs; raises as `program`."""
        return fetch.kept(fetch.CACHE / f"{self.name}-{self.version}", lambda folder: _build(self, folder))


def _kubernetes_stamps() -> dict[str, str]:
    major, minor, _ = KUBERNETES.split(".")
    values = {"gitVersion": f"v{KUBERNETES}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return {f"{package}.{name}": value for package in packages for name, value in values.items()}


_KUBERNETES_PROGRAMS = (
    *("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"),
)
kubernetes = Source(
    name="kubernetes",
    module="k8s.io/kubernetes",
    version=f"v{KUBERNETES}",
    programs={name: f"cmd/{name}" for name in _KUBERNETES_PROGRAMS},
    staging=f"v0.{KUBERNETES.partition('.')[2]}",
    stamps=_kubernetes_stamps(),
)
etcd = Source(name="etcd", module="go.etcd.io/etcd/server/v3", version="v3.6.8", programs={"etcd": ""})
containerd = Source(
    name="containerd",
    module="github.com/containerd/containerd/v2",
    version="v2.4.2",
    programs={name: f"cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")},
)
coredns = Source(
    name="coredns", module="github.com/coredns/coredns", version="v1.15.0", programs={"coredns": "coredns.go"}
)
helm = Source(name="helm", module="helm.sh/helm/v4", version="v4.3.1", programs={"helm": "cmd/helm"})
kwok = Source(name="kwok", module="sigs.k8s.io/kwok", version="v0.8.0", programs={"kwok": "cmd/kwok"})

CLUSTER = (kubernetes, etcd, containerd, coredns)
"""What every cluster runs."""
ALL = (*CLUSTER, kwok, helm)


def _build(source: Source, folder: Path) -> None:
    print(f"building {source.name} {source.version} (the first time only)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as draft:
        (Path(draft) / "go.mod").write_text("".join(_go_mod(source)))
        for name, package in source.programs.items():
            flags = ["-mod=mod", "-trimpath", "-ldflags", _linker_flags(source), "-o", str(folder / name)]
            fetch.go(f"build {name}", "build", *flags, _package(source, package), cwd=draft)


def _package(source: Source, package: str) -> str:
    if package.endswith(".go"):
        return str(Path(__file__).with_name(package))
    return f"{source.module}/{package}".rstrip("/")


def _linker_flags(source: Source) -> str:
    return " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in source.stamps.items())])


def _go_mod(source: Source) -> Iterator[str]:
    yield f"module testbed\n\ngo {fetch.GO_VERSION}\n\nrequire {source.module} {source.version}\n"
    for module in _replaced(source) if source.staging else ():
        yield f"replace {module} => {module} {source.staging}\n"


def _replaced(source: Source) -> list[str]:
    with tempfile.TemporaryDirectory() as empty:
        what = f"{source.module}@{source.version}"
        found = json.loads(fetch.go(f"download {what}", "mod", "download", "-json", what, cwd=empty))
        edited = json.loads(fetch.go(f"read the go.mod of {what}", "mod", "edit", "-json", found["GoMod"], cwd=empty))
    return [item["Old"]["Path"] for item in edited["Replace"] if item["New"]["Path"].startswith(f".{os.sep}")]
