"""From an assignment of the scheduler to the plan each node's agent gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from servicekit.auth import AttemptTokens
from servicekit.grants import Grants
from trainyard_protos.v1 import common_pb2, launcher_pb2, scheduler_pb2

from trainyard_launcher.backend import Facts, Launch
from trainyard_launcher.secrets import resolve
from trainyard_launcher.settings import Settings

if TYPE_CHECKING:
    from trainyard.spec import TrainingJob

Plan = launcher_pb2.NodePlan
_CHECKPOINT_SETTLE_S = 1.0  # a checkpoint that is not renamed into place counts when nothing wrote to it for so long


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes launches.

    Args:
        tokens: mints attempt tokens.
        endpoint: host and port of the yard.
        home: the yard's folder; its `yard.json` names the endpoint for those that reconnect.
    """

    tokens: AttemptTokens
    endpoint: str
    home: Path
    settings: Settings

    def launch(self, assignment: scheduler_pb2.Assignment) -> Launch:
        """What the backend starts for an assignment.

        Raises:
            SecretUnavailable: a secret of the job cannot be read here.
        """
        from trainyard.spec import TrainingJob, quantities

        job = TrainingJob.from_json(assignment.spec, stored=True)
        cpu, memory, gpu = job.per_worker()
        facts = Facts(
            workspace=assignment.workspace or "default",
            job_id=assignment.job_id,
            job_name=assignment.job_name,
            attempt_id=assignment.attempt_id,
            fence=assignment.fence,
            nodes=job.spec.nodes,
            workers_per_node=job.spec.workers_per_node,
            grace_s=quantities.seconds(job.spec.grace_period),
            deadline_ns=assignment.deadline_ns,
            outputs=bool(job.spec.outputs),
            database_id=assignment.database_id,
            machines=tuple("" if each.kind else each.machine for each in assignment.placements),
            kinds=tuple(each.kind for each in assignment.placements),
        )
        common = self._common(assignment, facts, job)
        common.memory_bytes = memory * facts.workers_per_node
        plans = []
        for node in range(facts.nodes):
            plan = Plan(node=node)
            plan.MergeFrom(common)
            plans.append(plan)
        per_worker = common_pb2.Resources(cpu=cpu, memory_bytes=memory, gpu=gpu)
        secrets = resolve(job, cluster=self.settings.backend == "kubernetes")
        labels, annotations = job.metadata.labels, job.metadata.annotations
        checked = assignment.secrets_checked
        return Launch(facts, plans, per_worker, secrets, job.spec, labels, annotations, secrets_checked=checked)

    def _common(self, assignment: scheduler_pb2.Assignment, facts: Facts, job: TrainingJob) -> Plan:
        from trainyard.spec import quantities

        spec = job.spec
        plan = Plan(
            workspace=facts.workspace,
            job_id=facts.job_id,
            job_name=facts.job_name,
            run_name=facts.job_name,
            attempt_id=facts.attempt_id,
            fence=facts.fence,
            nodes=facts.nodes,
            workers_per_node=facts.workers_per_node,
            runtime=spec.runtime,
            command=spec.command,
            env=spec.env,
            gpus_per_worker=spec.resources.gpu,
            code_artifact=(spec.code.artifact or "") if spec.code else "",
            code_git=_git(job),
            requirements=spec.python.requirements if spec.python else "",
            inputs=[Plan.Input(artifact=each.artifact, path=each.path) for each in spec.inputs],
            checkpoints=_checkpoints(job),
            outputs=[Plan.Output(path=each.path, artifact=each.artifact) for each in spec.outputs],
            log_rules=[
                Plan.LogRule(rule=index, pattern=rule.log_pattern)
                for index, rule in enumerate(spec.retries.rules)
                if rule.log_pattern
            ],
            grace_s=facts.grace_s,
            hang_timeout_s=quantities.seconds(spec.hang_timeout) if spec.hang_timeout else 0,
            finalize_timeout_s=self.settings.finalize_timeout_s,
            rejected_checkpoints=assignment.rejected_checkpoints,
            spec_json=assignment.spec,
            endpoint=self.endpoint,
            endpoint_file=str(self.home / "yard.json"),
            ca_file=self.settings.ca_file,
            tied_to_pid=self.settings.tied_to_pid,
            tied_to_start_time=self.settings.tied_to_start_time,
        )
        plan.token, _ = self.tokens.mint(
            facts.workspace,
            facts.job_id,
            facts.attempt_id,
            facts.fence,
            self.settings.token_ttl_s,
            grants_of(plan),
            database_id=facts.database_id,
        )
        return plan


def grants_of(plan: Plan) -> Grants:
    """Which artifacts an attempt may use: what its job declares."""
    references = [each.artifact for each in plan.inputs] + ([plan.code_artifact] if plan.code_artifact else [])
    return Grants.of(
        write=[each.artifact for each in plan.outputs],
        read=[reference.partition("@")[0] for reference in references],
    )


def _git(job: TrainingJob) -> Plan.CodeGit | None:
    git = job.spec.code.git if job.spec.code else None
    return Plan.CodeGit(url=git.url, ref=git.ref, path=git.path) if git else None


def _checkpoints(job: TrainingJob) -> Plan.Checkpoints | None:
    wanted = job.spec.checkpoints
    if wanted is None:
        return None
    best = wanted.keep.best
    return Plan.Checkpoints(
        path=wanted.path,
        pattern=wanted.pattern,
        keep_last=wanted.keep.last,
        best_metric=best.metric if best else "",
        best_mode=best.mode if best else "",
        settle_s=_CHECKPOINT_SETTLE_S,
    )
