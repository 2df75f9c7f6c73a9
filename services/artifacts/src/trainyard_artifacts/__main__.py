"""`python -m trainyard_artifacts`: the artifact store alone."""

import os

from servicekit.options import DatabaseOptions
from servicekit.process import Context, Program, run

from trainyard_artifacts.app import Artifacts
from trainyard_artifacts.compose import compose
from trainyard_artifacts.settings import Settings


def _compose(context: Context[DatabaseOptions]) -> Artifacts:
    options = context.options
    return compose(
        home=options.home,
        database_url=options.database("artifacts"),
        registry=context.host.registry,
        environ=os.environ,
    )


PROGRAM = Program(
    "artifacts", "Stores artifacts: versions of files, in deduplicated chunks.", DatabaseOptions, Settings, _compose
)

if __name__ == "__main__":
    run(PROGRAM)
