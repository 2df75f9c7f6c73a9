"""A warm Ray client, run with the peers' Python: submits the same job for every line on its input.

For each it prints one JSON line: when it began to submit, and what the job printed.
"""

import json
import sys
import time

from ray.job_submission import JobStatus, JobSubmissionClient

client = JobSubmissionClient(sys.argv[1])
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    started = time.time()
    job = client.submit_job(entrypoint=line.strip())
    # Ray has no call that waits for a job's end; the job's own clock is what counts.
    while client.get_job_status(job) not in (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED):
        time.sleep(0.05)
    print(json.dumps({"started": started, "output": client.get_job_logs(job)}), flush=True)
