"""`python -m trainyard_scheduler`: the scheduler alone. Several may be started; one is active, the others stand by."""

import os

from servicekit.celery import celery_app
from servicekit.options import BrokerOptions, DatabaseOptions
from servicekit.process import Context, Program, run
from trainyard_protos.v1 import yard_pb2_grpc

from trainyard_scheduler.app import Scheduler
from trainyard_scheduler.compose import compose
from trainyard_scheduler.settings import Settings
from trainyard_scheduler.yard_servicer import YardFacts, YardServicer


class Options(DatabaseOptions, BrokerOptions):
    """Where everything is."""


def _compose(context: Context[Options]) -> Scheduler:
    options = context.options
    scheduler = compose(
        home=options.home,
        database_url=options.database("scheduler"),
        celery=celery_app(options.broker_url),
        registry=context.host.registry,
        environ=os.environ,
    )
    facts = YardFacts(home=str(options.home), metrics_url=context.metrics_url)
    yard_pb2_grpc.add_YardServiceServicer_to_server(YardServicer(facts, scheduler.cancel), context.host.server)
    return scheduler


PROGRAM = Program("scheduler", "Decides what runs: jobs, queues, attempts.", Options, Settings, _compose)

if __name__ == "__main__":
    run(PROGRAM)
