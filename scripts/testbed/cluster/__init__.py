"""A real Kubernetes cluster on one machine, as root, without a container engine.

`binaries` and `system` say what it needs, `layout` where everything is. `machine` is a set of namespaces, on which
`controlplane` and `node` run their programs; `network`, `cgroups`, `certificates` and `images` are what those stand on.
`cluster` composes it, `kwok` adds fake nodes, `plugin` has the fixtures for pytest.
"""
