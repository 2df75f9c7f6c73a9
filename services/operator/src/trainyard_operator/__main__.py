"""`python -m trainyard_operator`: the operator, beside the yard of a cluster."""

import os
from pathlib import Path

from pydantic import Field
from servicekit.options import Endpoint
from servicekit.options import Options as ServiceOptions
from servicekit.process import Context, Program, run
from servicekit.settings import from_environment
from trainyard.client.connection import Target
from trainyard.cluster import load_configuration

from trainyard_operator.app import Operator
from trainyard_operator.settings import Settings

PREFIX = "TRAINYARD_OPERATOR"


class Options(ServiceOptions):
    """Where everything is."""

    endpoint: Endpoint = Field(description="host:port at which every service of the yard is reached")
    ca_file: Path | None = Field(None, description="root certificate of that endpoint, PEM; needed beyond loopback")


def _compose(context: Context[Options]) -> Operator:
    settings = from_environment(Settings, PREFIX, os.environ)
    hint = f"set {PREFIX}_KUBECONFIG"
    return Operator(
        configuration=load_configuration(settings.kubeconfig, settings.context, hint),
        target=Target(context.options.endpoint, context.token, context.options.ca_file),
        settings=settings,
        registry=context.host.registry,
    )


PROGRAM = Program("operator", "Makes TrainingJob resources of a cluster into jobs.", Options, Settings, _compose)

if __name__ == "__main__":
    run(PROGRAM)
