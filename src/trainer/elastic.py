"""Worker processes through torch's elastic agent.

The agent starts those of this node, each in a session of its own, and tells them of the store at which all meet. It
runs in a thread, where it installs no signal handlers: its own would kill workers that are saving a checkpoint.
"""

import logging
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from trainer.peers.store import Meeting, host_meeting

_POLL_SECONDS = 0.3
"""How often the agent looks at its workers. The launcher looks more often, so that it sees a death first."""

_BARRIER_SECONDS = 0.01


class WorkerGroup:
    """The processes of one attempt, from `start` until `is_alive` says no."""

    def __init__(
        self, command: Sequence[str], *, num_workers: int, env: Mapping[str, str], meeting: Meeting | None = None
    ) -> None:
        """
        Args:
            command: program and arguments of every worker.
            num_workers: processes on this node, as many as on every other one.
            env: added to the environment of each.
            meeting: where the nodes of the run meet; None: there is only this one.
        """
        # The agent replaces ${local_rank} in arguments; a dollar in a path is to stay one.
        program, *arguments = (part.replace("$", "$$") for part in command)
        spec = WorkerSpec(
            role="trainer",
            local_world_size=num_workers,
            entrypoint=program,
            args=tuple(arguments),
            rdzv_handler=_Rendezvous(meeting or host_meeting()),
            max_restarts=0,
            monitor_interval=_POLL_SECONDS,
            # Without it the host's full name is looked up, and many machines cannot find their own.
            local_addr="localhost",
        )
        # Nodes wait for each other's end by `trainer.peers`, which notices that one is dead.
        self._agent = LocalElasticAgent(spec, _InheritedStreams(env), exit_barrier_timeout=_BARRIER_SECONDS)
        self._thread = threading.Thread(target=self._run, name="elastic agent", daemon=True)
        self._result: RunResult | None = None
        self._error: BaseException | None = None
        self._gone: set[int] = set()
        _silence_agent()

    def start(self) -> None:
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Until all workers are gone, or this long. Signal handlers run meanwhile."""
        self._thread.join(seconds)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def exit_codes(self) -> dict[int, int]:
        """Exit codes of failed workers by rank, negative for a signal, once all are gone.

        Raises:
            Exception: what kept the agent from starting the workers.
        """
        if self._error is not None:
            raise self._error
        failures = self._result.failures if self._result is not None else {}
        return {rank: failure.exitcode for rank, failure in failures.items()}

    def pids(self) -> dict[int, int]:
        """Process ids of the workers started, by rank. Also of those that are gone."""
        workers = self._agent.get_worker_group().workers
        return {worker.global_rank: worker.id for worker in workers if isinstance(worker.id, int)}

    def find_gone(self) -> dict[int, bool | None]:
        """Ranks that ended since the last call, and whether they failed: by a signal or an exit code other than 0.

        Looks without reaping, which is the agent's part. None: the agent was faster, and `exit_codes` will tell.
        """
        gone: dict[int, bool | None] = {}
        for rank, pid in self.pids().items():
            if rank in self._gone:
                continue
            try:
                info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                gone[rank] = None
                continue
            if info is not None:
                gone[rank] = info.si_code != os.CLD_EXITED or info.si_status != 0
        self._gone |= gone.keys()
        return gone

    def send(self, rank: int, signum: int) -> None:
        """A signal to one worker."""
        if self._is_running(rank):
            with suppress(ProcessLookupError):
                os.kill(self.pids()[rank], signum)

    def kill(self) -> None:
        """SIGKILL to every worker and what it started, as far as that stayed in its process group."""
        for pid in self.pids().values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def _is_running(self, rank: int) -> bool:
        try:
            return os.waitid(os.P_PID, self.pids()[rank], os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def _run(self) -> None:
        try:
            result: Any = self._agent.run()  # its decorator hides the type
            self._result = result
        except BaseException as error:
            self._error = error


class _Rendezvous(RendezvousHandler):
    """The nodes have met before: tells the agent where, and which one this is."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        return True  # or workers would start a second one, at a port that may not be free

    def next_rendezvous(self) -> RendezvousInfo:
        meeting = self._meeting
        place = RendezvousStoreInfo(meeting.address, meeting.port)
        return RendezvousInfo(PrefixStore("agents", meeting.store), meeting.node_rank, meeting.num_nodes, place)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0  # none comes later: a failed attempt is followed by a new one

    def get_run_id(self) -> str:
        return self._meeting.token

    def shutdown(self) -> bool:
        return True


class _InheritedStreams(LogsSpecs):
    """Workers keep the launcher's streams (each turns its own output into its file) and get more environment."""

    def __init__(self, env: Mapping[str, str]) -> None:
        super().__init__()
        self._env = env

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for env in envs.values():
            env.update(self._env)
        inherited = dict.fromkeys(envs, "")
        return LogsDest(stdouts=inherited, stderrs=inherited, error_files=inherited)

    @property
    def root_log_dir(self) -> str:
        return ""


def _silence_agent() -> None:
    """Its warnings tell in its own terms what the launcher tells in ours."""
    manager: Any = logging.Logger.manager
    for name in list(manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
