"""`python -m trainyard_metrics`: the metrics ingestor alone."""

import os

from servicekit.options import DatabaseOptions
from servicekit.process import Context, Program, run

from trainyard_metrics.app import Metrics
from trainyard_metrics.compose import compose
from trainyard_metrics.settings import Settings


def _compose(context: Context[DatabaseOptions]) -> Metrics:
    options = context.options
    return compose(
        home=options.home,
        database_url=options.database("metrics"),
        registry=context.host.registry,
        environ=os.environ,
    )


PROGRAM = Program("metrics", "Stores runs: points, logs, system metrics.", DatabaseOptions, Settings, _compose)

if __name__ == "__main__":
    run(PROGRAM)
