"""Makes what an installation on a cluster lacks: secrets, certificates, and the newest custom resource definitions.

It runs as a hook of the chart, before an installation or an upgrade, and once more after a removal. Nothing secret is
ever rendered into a manifest, so rendering the chart again, by an upgrade, `skaffold` or GitOps, changes no secret.

`certificates` and `secrets` decide what has to be made, and know nothing of a cluster; `cluster` talks to it; `install`
and `remove` are the two hooks.
"""
