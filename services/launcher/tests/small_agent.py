"""An agent reduced to its contract with the launcher; a test can ask it to misbehave (`AGENT_MODE` in the job's env).

Modes: `silent` says nothing after hello; `mute` never connects; `deaf` does not stop; `chatty` says often that it is
well; `stackless` takes no stacks; `tardy` names its workers only a good while after it said that they run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import grpc
from google.protobuf import json_format
from trainyard.home import boot_id, process_start_time
from trainyard_protos.v1 import common_pb2, launcher_pb2, launcher_pb2_grpc

Message = launcher_pb2.AgentMessage
Plan = launcher_pb2.NodePlan


def take(folder: Path) -> bool:
    try:
        with (folder / "started").open("x") as file:
            identity = {"pid": os.getpid(), "start_time": process_start_time(os.getpid()), "boot_id": boot_id()}
            json.dump(identity, file)
    except FileExistsError:
        return False
    return True


async def start_workers(plan: Plan, folder: Path) -> list[asyncio.subprocess.Process]:
    work = folder / "work"
    work.mkdir(exist_ok=True)
    workers = []
    for local in range(plan.workers_per_node):
        rank = plan.node * plan.workers_per_node + local
        environ = os.environ | dict(plan.env) | {"RANK": str(rank), "MASTER_PORT": str(plan.master_port)}
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, plan.gpus))
        workers.append(await asyncio.create_subprocess_exec(*plan.command, cwd=work, env=environ))
    return workers


class Agent:
    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.mode = plan.env.get("AGENT_MODE", "")
        self.phase = Message.Phase(phase="running")
        self.token = plan.token
        self.stopped = ""
        self.workers: list[asyncio.subprocess.Process] = []
        self.said: asyncio.Queue[Message | None] = asyncio.Queue()

    async def run(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.stop, "Signal", 5.0)
        self.workers = await start_workers(self.plan, self.folder)
        talk = asyncio.create_task(self.talk())
        codes = [await worker.wait() for worker in self.workers]
        exit = self.exit_of(codes)
        self.say_phase("finishing", exit)
        (self.folder / "exit.bin").write_bytes(exit.SerializeToString())
        self.say_phase("ended", exit)
        self.said.put_nowait(None)
        await asyncio.wait({talk}, timeout=1)

    def exit_of(self, codes: list[int]) -> common_pb2.Exit:
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if self.stopped:
            return common_pb2.Exit(reason="Stopped", message=self.stopped, acknowledged=True)
        if failed is None:
            return common_pb2.Exit(reason="Completed", exit_code=0, acknowledged=True)
        rank = self.plan.node * self.plan.workers_per_node + failed
        exit = common_pb2.Exit(reason="WorkerFailed", first_failing_rank=rank, acknowledged=True)
        if codes[failed] < 0:
            exit.signal = signal.Signals(-codes[failed]).name
        else:
            exit.exit_code = codes[failed]
        return exit

    def say_phase(self, phase: str, exit: common_pb2.Exit) -> None:
        self.phase = Message.Phase(phase=phase, exit=exit)
        self.said.put_nowait(Message(phase=self.phase))

    def stop(self, reason: str, grace_s: float) -> None:
        if self.mode == "deaf":
            return
        self.stopped = self.stopped or reason
        for worker in self.workers:
            if worker.returncode is None:
                worker.terminate()
        asyncio.get_running_loop().call_later(grace_s, self.kill)

    def kill(self) -> None:
        for worker in self.workers:
            if worker.returncode is None:
                worker.kill()

    async def talk(self) -> None:
        if self.mode == "mute":
            await asyncio.Event().wait()
        while True:
            try:
                await self.converse()
                return
            except grpc.aio.AioRpcError as error:
                print(error.code(), error.details(), flush=True)
                await asyncio.sleep(0.05)

    async def converse(self) -> None:
        endpoint = self.plan.endpoint
        with contextlib.suppress(FileNotFoundError):
            endpoint = json.loads(Path(self.plan.endpoint_file).read_text())["endpoint"]
        async with grpc.aio.insecure_channel(endpoint) as channel:
            stub = launcher_pb2_grpc.AgentServiceStub(channel)
            call = stub.Session(metadata=(("authorization", f"Bearer {self.token}"),))
            await call.write(Message(hello=self.hello()))
            listening = asyncio.create_task(self.listen(call))
            try:
                if self.mode == "silent":
                    await listening
                await self.speak(call, listening)
            finally:
                listening.cancel()

    def hello(self) -> Message.Hello:
        plan = self.plan
        return Message.Hello(attempt_id=plan.attempt_id, fence=plan.fence, node=plan.node, phase=self.phase.phase)

    async def speak(self, call: grpc.aio.StreamStreamCall, listening: asyncio.Task[None]) -> None:
        if self.mode == "tardy":
            await asyncio.sleep(2)
        await call.write(self.heartbeat())
        if lines := self.plan.env.get("AGENT_LINES"):
            texts = [common_pb2.LogLine(seq=i, node=self.plan.node, text=f"line {i}") for i in range(int(lines))]
            await call.write(Message(lines=Message.Lines(lines=texts)))
        await call.write(Message(phase=self.phase))
        while True:
            saying = asyncio.ensure_future(self.said.get())
            await asyncio.wait({saying, listening}, return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                saying.cancel()
                await listening
                raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
            message = saying.result()
            if message is None:
                await call.done_writing()
                return
            await call.write(message)

    async def listen(self, call: grpc.aio.StreamStreamCall) -> None:
        async for command in call:
            kind = command.WhichOneof("command")
            if kind == "welcome":
                if self.mode == "chatty":
                    self.chat()
            elif kind == "stop":
                self.stop(command.stop.reason, command.stop.grace_s)
            elif kind == "token":
                self.token = command.token.token
                self.said.put_nowait(Message(note=Message.Note(reason="TokenRenewed", text="got it")))
            elif kind == "stacks" and self.mode != "stackless":
                ranks = [launcher_pb2.RankStacks(rank=self.rank(i), text="main") for i in range(len(self.workers))]
                reply = Message.StacksReply(request_id=command.stacks.request_id, ranks=ranks)
                self.said.put_nowait(Message(stacks=reply))

    def chat(self) -> None:
        self.said.put_nowait(self.heartbeat())
        asyncio.get_running_loop().call_later(0.2, self.chat)

    def heartbeat(self) -> Message:
        workers = [
            launcher_pb2.WorkerStatus(rank=self.rank(i), pid=worker.pid, state="running")
            for i, worker in enumerate(self.workers)
        ]
        return Message(heartbeat=Message.Heartbeat(workers=workers))

    def rank(self, local: int) -> int:
        return self.plan.node * self.plan.workers_per_node + local


def main() -> None:
    folder = Path(sys.argv[1])
    plan = json_format.Parse((folder / "plan.json").read_bytes(), Plan())
    if not take(folder):
        return
    for file in plan.cgroup_procs:
        Path(file).write_text(str(os.getpid()))
    asyncio.run(Agent(plan, folder).run())


if __name__ == "__main__":
    main()
