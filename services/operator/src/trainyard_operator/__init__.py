"""The operator: TrainingJob resources of a cluster, as jobs of the yard.

    resources (kopf's watch) --seen--> Controller --Submit, Cancel--> scheduler
                                           ^                              |
    status, finalizer, events <--patches---+------- Watch, one stream ----+

What a resource says is submitted under its uid, so that submitting twice makes one job. What the yard says is mirrored
to `status`. The operator keeps nothing of its own: after a restart it reads the resources, asks for their jobs, and
goes on where it was.
"""
