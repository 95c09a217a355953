"""The remote side: ``python -m horo.runner.agent``, run by ssh or srun, spoken to over stdin and stdout.

It sends its host info, receives the job, starts its ranks, and sends back their output and how they end. When its stdin
ends, when it receives nothing for the agreed time (in which it could run itself), or on SIGTERM, it ends all processes
and exits. If the agent is killed, its guard ends them.

In an elastic job, workers start and end one by one, and the agent stays until it is to end. On SIGTERM it has hororun
take the workers away, and ends them itself if they are there after the grace time.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from horo.runner.agent.command import StartError, with_python, without
from horo.runner.agent.machine import Binding, host_facts
from horo.runner.agent.protocol import MAGIC, PING_S, Kind, Message, MessageError, MessageReader, encode, encode_json
from horo.runner.agent.ranks import Event, Exited, HostRanks, Noted, Remained, Started, Wrote, reap
from horo.runner.agent.workers import HostWorkers
from horo.runner.config import EXIT_SETUP, EXIT_UNREACHABLE
from horo.runner.loop import Loop, Timer
from horo.runner.network import (
    NetworkError,
    connection,
    free_port,
    interface_addresses,
    listen,
    network_identity,
    unreachable,
)
from horo.runner.processes import (
    ENDING_WITHOUT_RANKS,
    PASSED_ON_BY_AGENTS,
    Guard,
    Tree,
    become_subreaper,
    describe_process,
    end_all,
)

__all__ = ["main"]

_READ_BYTES = 1 << 16
_OUTGOING_MAX_BYTES = 1 << 20
_JOB_TIMEOUT_S = 600.0
_LEAVE_S = 5.0
"""The time that hororun has for the end of workers beside the grace time."""


def main() -> int:
    """Runs until the job is over or the launcher gone; returns the exit code."""
    guard = Guard()
    become_subreaper()
    loop = Loop()
    agent = _Agent(loop, guard)
    agent.send_host_info()
    loop.run_until(lambda: agent.over)
    guard.dismiss()
    return 0


class _Agent:
    def __init__(self, loop: Loop, guard: Guard) -> None:
        self._loop = loop
        self._guard = guard
        self._ranks: HostRanks | None = None
        self._messages = MessageReader(magic=False)
        self._outgoing = bytearray()
        self._paused = False
        self._connected = True
        self._silence_s = _JOB_TIMEOUT_S
        self._silence_timer: Timer = loop.call_later(self._silence_s, self._on_silence)
        self._leaving = False
        self._is_to_leave = False
        self._listener: socket.socket | None = None
        self._host = socket.gethostname()
        self._job: dict[str, Any] = {}
        # Ranks get /dev/null and pipes of their own: 0 and 1 are for nobody but us.
        self._in, self._out = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(2, 1)
        os.close(null)
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        loop.watch(self._in, read=self._read)
        loop.on_stopped(self._restart_silence_timer)  # the launcher may have been stopped, too, and continues later
        loop.on_signal(signal.SIGCHLD, self._on_child)
        loop.on_signal(signal.SIGTERM, self._on_end)
        for number in PASSED_ON_BY_AGENTS:
            loop.on_signal(number, self._on_signal)

    @property
    def over(self) -> bool:
        """Whether no rank runs, and all messages have been sent or the launcher is gone."""
        ranks_are_over = self._ranks.finished if self._ranks else self._leaving
        return ranks_are_over and not (self._connected and self._outgoing)

    def send_host_info(self) -> None:
        """Sends the host info: facts about this host that the launcher needs."""
        host_info = {
            **host_facts(),
            "pid": os.getpid(),
            "connection": connection(os.environ),
            "network": network_identity(),
            "free_port": free_port(),
        }
        self._send(MAGIC + encode_json(Kind.HOST_INFO, host_info))
        self._loop.call_later(PING_S, self._send_ping)

    def _send_ping(self) -> None:
        if self._connected:
            if not self._outgoing:  # else hororun does not read, or will see that we are there
                self._send(encode(Kind.PING))
            self._loop.call_later(PING_S, self._send_ping)

    def _read(self) -> None:
        try:
            data = os.read(self._in, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._leave()
            return
        self._restart_silence_timer()
        try:
            for message in self._messages.feed(data):
                self._handle(message)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            self._give_up(f"hororun sent an invalid message: {error!r}", EXIT_SETUP)

    def _restart_silence_timer(self) -> None:
        self._silence_timer.cancel()
        self._silence_timer = self._loop.call_later(self._silence_s, self._on_silence)

    def _handle(self, message: Message) -> None:
        if message.kind == Kind.JOB:
            self._start(message.json())
        elif message.kind == Kind.START:
            self._start_worker(message.rank, **message.json())
        elif message.kind == Kind.END and isinstance(self._ranks, HostWorkers):
            self._ranks.end_worker(message.rank, **message.json())
        elif message.kind == Kind.TERMINATE and self._ranks:
            self._ranks.terminate()
        elif message.kind == Kind.KILL and self._ranks:
            self._ranks.kill()
        elif message.kind == Kind.SIGNAL:
            self._pass_on(int(message.json()["number"]))
        elif message.kind == Kind.INTERRUPT and self._ranks:
            self._ranks.interrupt()
        elif message.kind == Kind.WATCH and self._ranks:
            self._ranks.watch(float(message.json()["every_s"]))
        elif message.kind == Kind.STACKS and self._ranks:
            self._ranks.show_stacks()
        elif message.kind == Kind.LISTEN:
            self._send(encode_json(Kind.LISTENING, self._listen(**message.json())))
        elif message.kind == Kind.REACH:
            self._send(encode_json(Kind.REACHED, {"failures": unreachable(**message.json())}))
        elif message.kind not in (
            Kind.PING,
            Kind.TERMINATE,
            Kind.KILL,
            Kind.INTERRUPT,
            Kind.END,
            Kind.WATCH,
            Kind.STACKS,
        ):
            raise MessageError(f"{message.kind.name} is not for agents")

    def _listen(self, cwd: str, interfaces: list[str], ports: list[int] | None) -> dict[str, Any]:
        """Opens a port for the other hosts to try, and checks the directory and the interfaces of the ranks."""
        answer: dict[str, Any] = {"error": "", "code": EXIT_SETUP, "port": 0, "addresses": []}
        try:
            if not Path(cwd).is_dir():
                return {**answer, "error": f"there is no directory {cwd}, in which ranks would start"}
            addresses = interface_addresses(interfaces) if interfaces else []
            self._listener = listen(None if ports is None else range(ports[0], ports[1] + 1))
        except (NetworkError, OSError) as error:
            return {**answer, "error": str(error)}
        return {**answer, "port": self._listener.getsockname()[1], "addresses": addresses}

    def _start(self, job: dict[str, Any]) -> None:
        if self._ranks is not None:
            raise MessageError("a second job")
        self._silence_s = float(job["silence_s"])
        self._restart_silence_timer()
        self._job, self._host = job, str(job["host"])
        environments = {int(rank): self._environment(own) for rank, own in job["ranks"].items()}
        tree = Tree(str(job["mark"]), ancestor=os.getpid(), spared={self._guard.pid})
        kind = HostRanks if environments else HostWorkers
        self._ranks = kind(self._loop, self._guard, tree, job["grace_s"], self._emit)
        if not environments:  # they come by START
            self._end_all_of(job["marks_before"])
            return
        try:
            if job["master_port"]:
                free_port(int(job["master_port"]))
            self._ranks.start(self._command(), environments, job["cwd"], self._host, binding=Binding(**job["binding"]))
        except NetworkError as error:
            self._give_up(f"host {self._host}: {error}", EXIT_SETUP)
        except StartError as error:
            self._give_up(str(error), error.code)

    def _end_all_of(self, marks: list[str]) -> None:
        """Ends what agents before this one have left here, the host being lost meanwhile."""
        for mark in marks:
            left = Tree(str(mark))
            if not end_all(left, 0.0):
                words = ", ".join(map(describe_process, sorted(left.find())))
                self._give_up(
                    f"host {self._host}: {words} of this job, which run there still, cannot be ended", EXIT_SETUP
                )

    def _start_worker(self, worker: int, slot: int, environment: dict[str, str]) -> None:
        if not isinstance(self._ranks, HostWorkers):
            raise MessageError("a worker, and the job is not elastic")
        if self._leaving:
            return
        try:
            workers = self._ranks
            workers.start_worker(
                self._command(),
                worker,
                int(slot),
                self._environment(environment),
                cwd=self._job["cwd"],
                host=self._host,
            )
        except StartError as error:
            self._send(encode_json(Kind.NOT_STARTED, {"message": str(error), "code": error.code}, worker))

    def _environment(self, own: dict[str, str]) -> dict[str, str]:
        return {**without(os.environ, self._job["unset"]), **self._job["environment"], **own}

    def _command(self) -> list[str]:
        cwd, path = str(self._job["cwd"]), self._environment({}).get("PATH", os.defpath)
        if not Path(cwd).is_dir():
            raise StartError(
                f"host {self._host} has no directory {cwd}: ranks start in the directory hororun is called from",
                EXIT_SETUP,
            )
        return with_python(self._job["command"], cwd, path, self._host)

    def _give_up(self, message: str, code: int) -> None:
        self._send(encode_json(Kind.FAILED, {"message": message, "code": code}))
        if self._ranks:
            self._ranks.kill()
        self._leaving = True

    def _on_silence(self) -> None:
        os.write(2, f"hororun has sent nothing for {self._silence_s:g} s\n".encode())
        self._leave()

    def _leave(self) -> None:
        """The launcher is gone: ends the ranks with the usual grace time. An elastic job goes on without: at once."""
        self._connected = False
        self._leaving = True
        self._loop.watch(self._in)
        self._loop.watch(self._out)
        self._flow()
        if isinstance(self._ranks, HostWorkers):
            self._ranks.kill()
        elif self._ranks:
            self._ranks.terminate()

    def _on_end(self, number: int) -> None:
        if isinstance(self._ranks, HostWorkers) and self._connected and not self._is_to_leave:
            self._is_to_leave = True
            self._send(encode(Kind.LEAVING))
            self._loop.call_later(self._job["grace_s"] + _LEAVE_S, lambda: self._on_end(number))
            return
        if not self._leaving:
            message = f"host {self._host} ended its ranks: {signal.Signals(number).name} came to the agent there"
            self._send(encode_json(Kind.FAILED, {"message": message, "code": EXIT_UNREACHABLE}))
        self._leaving = True
        if self._ranks:
            self._ranks.terminate()

    def _on_signal(self, number: int) -> None:
        if self._ranks is None and number in ENDING_WITHOUT_RANKS:
            self._on_end(number)
            return
        self._pass_on(number)
        self._send(encode_json(Kind.SIGNALLED, {"number": number}))

    def _pass_on(self, number: int) -> None:
        if self._ranks and number in PASSED_ON_BY_AGENTS:
            self._ranks.pass_on(number)

    def _on_child(self, _number: int) -> None:
        reap([self._ranks.on_child] if self._ranks else [])

    def _emit(self, event: Event) -> None:
        if isinstance(event, Started):
            self._send(encode_json(Kind.STARTED, {"pid": event.pid, "bound": event.bound}, event.rank))
        elif isinstance(event, Wrote):
            self._send(encode(Kind.STDOUT if event.stream == 1 else Kind.STDERR, event.rank, event.data))
        elif isinstance(event, Noted):
            self._send(encode(Kind.NOTE, event.rank, event.data))
        elif isinstance(event, Exited):
            end = {"code": event.code, "signal": event.signal, "asked": event.asked, "overdue": event.overdue}
            self._send(encode_json(Kind.EXITED, end, event.rank))
        elif isinstance(event, Remained):
            self._send(encode_json(Kind.REMAINED, {"processes": event.processes}))

    def _send(self, data: bytes) -> None:
        if self._connected:
            self._outgoing += data
            self._write()

    def _write(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self._out, self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._leave()
            return
        self._loop.watch(self._out, write=self._write if self._outgoing else None)
        self._flow()

    def _flow(self) -> None:
        """Pauses the reading of the ranks' output while the launcher does not read it."""
        paused = self._connected and len(self._outgoing) > _OUTGOING_MAX_BYTES
        if paused != self._paused and self._ranks:
            self._paused = paused
            self._ranks.pause(paused)


if __name__ == "__main__":
    sys.exit(main())
