"""What the launchers of a run's nodes tell each other, and which of them have been lost.

Every launcher writes its state into the store of node 0, twice a second. The one of node 0 reads them all and writes
what follows from them, which the others read: so a node costs two small requests per turn, however many there are. A
state that counts on no more is that of a dead launcher or machine. All of it runs in a thread, since a connection to a
machine that is gone may hang.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from trainer.errors import RunError
from trainer.failures import CRASHED, Failure, failure_of, first_cause, load_failure
from trainer.peers.store import Meeting
from trainer.text import listed

TURN_SECONDS = 0.5
LOST_SECONDS = 20.0
"""Without a word from a node: a busy one is heard of far more often."""

_END_SECONDS = 40.0
"""What all nodes together get to end once one has failed; more than killed workers get to be gone."""

_FAREWELL_SECONDS = 5.0
_VERDICT = "peers/verdict"


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """What a launcher says of its node."""

    name: str
    ranks: str = ""
    """Of its workers, for messages."""

    stop: int | None = None
    """A signal that asked it to stop."""

    asks: bool = False
    """Its ranks hang, and all ranks are to say what they are doing."""

    failing: bool = False
    ended: bool = False
    """It has no workers any more."""

    failure: str | None = None
    """`Failure.dump` of why, once it has ended."""

    has_left: bool = False
    """It knows the end of the others, too."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What follows from the states of all nodes."""

    all_here: bool = False
    stop: int | None = None
    """The first signal that asked a node to stop."""

    stop_node: str = ""
    asks: bool = False
    """All ranks are to say what they are doing."""

    failing: str = ""
    """The first node seen to fail, in words; empty while none does."""

    over: bool = False
    """No node has workers any more."""

    failure: str | None = None
    """`Failure.dump` of what the others followed from, once it is over."""


class Peers:
    """A launcher's view of the nodes of its run, itself included."""

    def __init__(
        self, meeting: Meeting, name: str, *, ranks: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            meeting: where they meet.
            name: of this node's machine.
            ranks: of its workers, for messages.
            clock: seconds.
        """
        self.meeting = meeting
        self.verdict = Verdict()
        self._clock = clock
        self._state = NodeState(name=name, ranks=ranks)
        self._host = _Host(meeting.num_nodes, clock) if meeting.node_rank == 0 else None
        self._turn = 0
        self._host_turn = -1
        self._heard = clock()
        self._heard_time = time.time()
        self._broken = ""
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)

    @property
    def here(self) -> str:
        """This node, for messages."""
        return name_node(self.meeting.node_rank, self._state)

    def start(self) -> None:
        """Begin to talk."""
        if self._host is not None:
            self.meeting.store.set(_VERDICT, json.dumps({"turn": 0, "verdict": asdict(Verdict())}))
        self._thread.start()

    def tell(
        self,
        *,
        stop: int | None = None,
        asks: bool = False,
        failing: bool = False,
        ended: bool = False,
        failure: Failure | None = None,
        has_left: bool = False,
    ) -> None:
        """Add to what is said of this node; nothing of it is taken back."""
        state = self._state
        new = replace(
            state,
            stop=state.stop or stop,
            asks=state.asks or asks,
            failing=state.failing or failing or failure is not None,
            ended=state.ended or ended,
            failure=state.failure or (failure.dump() if failure is not None else None),
            has_left=state.has_left or has_left,
        )
        if new != state:
            self._state = new
            self._wake.set()

    def lost_host(self) -> Failure | None:
        """What is to be said where there is no word from node 0 any more."""
        if self._host is not None or not (self._broken or self._clock() - self._heard > LOST_SECONDS):
            return None
        why = f"the connection to it broke ({self._broken})" if self._broken else f"no word for {LOST_SECONDS:g} s"
        message = f"node 0 is lost, its machine or its launcher must be dead: {why}"
        return Failure(kind="worker", message=message, time=self._heard_time, weight=CRASHED)

    def wait_for_all(self, seconds: float) -> None:
        """Until all nodes are there.

        Raises:
            RunError: some did not come in time.
            Exception: what another one failed of meanwhile.
        """
        end = self._clock() + seconds
        while not self.verdict.all_here:
            if self.verdict.failing or self.verdict.over or self.lost_host() is not None:
                break
            if self._clock() > end:
                missing = self._host.missing() if self._host is not None else "some nodes"
                self.fail(RunError(f"{missing} of {self.meeting.num_nodes} did not come within {seconds:g} s"))
            self._wait(0.05)
        if self.verdict.failing or self.lost_host() is not None:
            failure = self.settle(None)
            if failure is not None:
                raise failure.error()

    def fail(self, error: Exception) -> None:
        """This node cannot take part.

        Raises:
            Exception: the error, or what it followed from.
        """
        failure = self.settle(failure_of(error, time=time.time()))
        raise error if failure is None else failure.error()

    def settle(self, failure: Failure | None, look: Callable[[], Failure | None] = lambda: None) -> Failure | None:
        """This node's workers are gone: wait until those of the others are, too.

        Args:
            failure: of this node.
            look: called often meanwhile; may give a reason not to wait any more.

        Returns:
            what the whole run failed of; the same on all nodes that can still talk.
        """
        self.tell(ended=True, failure=failure)
        while not self.verdict.over:
            lost, hurry = self.lost_host(), look()
            if lost is not None or hurry is not None:
                return first_cause([each for each in (failure, lost, hurry) if each is not None])
            self._wait(0.05)
        self.tell(has_left=True)
        end = self._clock() + _FAREWELL_SECONDS
        while self._thread.is_alive() and self._clock() < end:
            self._wait(0.05)
        return None if self.verdict.failure is None else load_failure(self.verdict.failure)

    def _wait(self, seconds: float) -> None:
        self._thread.join(seconds)
        if not self._thread.is_alive():
            time.sleep(seconds)

    def _run(self) -> None:
        try:
            store = self.meeting.connect_again()
            while not self._exchange(store):
                self._wake.wait(TURN_SECONDS)
                self._wake.clear()
        except RuntimeError as error:  # torch's errors of connections are such
            self._broken = str(error).splitlines()[0] if str(error) else type(error).__name__

    def _exchange(self, store: TCPStore) -> bool:
        """One turn. Gives whether there is nothing more to say or to hear."""
        self._turn += 1
        state = self._state
        if self._host is not None:
            self._host.hear(store, state)
            self.verdict = self._host.judge()
            store.set(_VERDICT, json.dumps({"turn": self._turn, "verdict": asdict(self.verdict)}))
            return state.has_left and self._host.all_left()
        store.set(_key(self.meeting.node_rank), json.dumps({"turn": self._turn, "state": asdict(state)}))
        record = json.loads(store.get(_VERDICT))
        if record["turn"] != self._host_turn:
            self._host_turn, self._heard, self._heard_time = record["turn"], self._clock(), time.time()
        self.verdict = Verdict(**record["verdict"])
        return state.has_left


class _Host:
    """Node 0's view: the last word of every node."""

    def __init__(self, num_nodes: int, clock: Callable[[], float]) -> None:
        self._num_nodes = num_nodes
        self._clock = clock
        self._states: dict[int, NodeState] = {}
        self._turns: dict[int, int] = {}
        self._heard: dict[int, float] = {}
        self._heard_time: dict[int, float] = {}
        self._lost: set[int] = set()
        self._verdict = Verdict()
        self._failing_since: float | None = None

    def missing(self) -> str:
        """Nodes that have not come, in words."""
        nodes = [str(node) for node in range(self._num_nodes) if node not in self._states]
        return f"{'node' if len(nodes) == 1 else 'nodes'} {listed(nodes, 8)}"

    def all_left(self) -> bool:
        return all(state.has_left for node, state in self._states.items() if node not in self._lost)

    def hear(self, store: TCPStore, own: NodeState) -> None:
        """Read what the others say."""
        self._states[0] = own
        others = range(1, self._num_nodes)
        here = [node for node in others if node in self._turns or store.check([_key(node)])]
        for node, text in zip(here, store.multi_get([_key(node) for node in here]) if here else [], strict=True):
            record = json.loads(text)
            self._states[node] = NodeState(**record["state"])
            if record["turn"] != self._turns.get(node):
                self._turns[node] = record["turn"]
                self._heard[node], self._heard_time[node] = self._clock(), time.time()
        now = self._clock()
        for node in here:
            if now - self._heard[node] > LOST_SECONDS and not self._states[node].has_left:
                self._lost.add(node)

    def judge(self) -> Verdict:
        """What follows."""
        old, states = self._verdict, self._states
        asks = any(state.asks for state in states.values())
        new = replace(old, all_here=len(states) == self._num_nodes, asks=asks)
        asked = next((node for node, state in sorted(states.items()) if state.stop is not None), None)
        if old.stop is None and asked is not None:
            new = replace(new, stop=states[asked].stop, stop_node=name_node(asked, states[asked]))
        failing = next((node for node, state in sorted(states.items()) if state.failing or node in self._lost), None)
        if not old.failing and failing is not None:
            self._failing_since = self._clock()
            verb = "is lost" if failing in self._lost else "fails"
            new = replace(new, failing=f"{name_node(failing, states[failing])} {verb}")
        if not old.over and self._is_over(all_here=new.all_here):
            cause = first_cause(self._failures(new.stop))
            new = replace(new, over=True, failure=None if cause is None else cause.dump())
        self._verdict = new
        return new

    def _is_over(self, *, all_here: bool) -> bool:
        if all(state.ended or node in self._lost for node, state in self._states.items()):
            return all_here or self._failing_since is not None
        # Not before node 0 has ended itself: it is this process.
        since = self._failing_since
        return self._states[0].ended and since is not None and self._clock() - since > _END_SECONDS

    def _failures(self, stop: int | None) -> list[Failure]:
        failures = [load_failure(state.failure) for state in self._states.values() if state.failure is not None]
        for node in sorted(self._lost):
            name, when = name_node(node, self._states[node]), self._heard_time[node]
            if self._states[node].ended:
                continue
            if stop is not None:
                message = f"{name} ended before it could stop"
                failures.append(Failure(kind="killed", message=message, time=when, weight=CRASHED, signum=stop))
                continue
            message = f"{name} is lost: no word for {LOST_SECONDS:g} s, its machine or its launcher must be dead"
            failures.append(Failure(kind="worker", message=message, time=when, weight=CRASHED))
        return failures


def name_node(node: int, state: NodeState) -> str:
    """`node 3 (gpu-17, ranks 24 to 31)`"""
    facts = ", ".join(fact for fact in (state.name, state.ranks) if fact)
    return f"node {node} ({facts})"


def _key(node: int) -> str:
    return f"peers/node/{node}"
