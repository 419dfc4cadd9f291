"""A node agent's part in the copies in memory, from a job's start to its end, over any number of attempts.

`NodeCopies` puts store, server and sender together. The agents decide which step training goes on from and
who fetches what. All methods are called by the agent, from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launchers.launch_errors import LauncherError
from launchers.memory_store.exchange import (
    Address,
    CopyPusher,
    CopyServer,
    WantedCopy,
    bring_copies,
    listed,
    shared_secret,
)
from launchers.memory_store.store import open_copy_store


@dataclass(frozen=True)
class NodeCopyPlan:
    """This node's part in an attempt: its own ranks, where their copies go, and whose come here.

    `neighbour` is the address of the next node, None where there is no other node; `kept` are the
    ranks of the node before this one. A spare has no ranks of its own, and may be the neighbour; `elsewhere`
    is asked, from another thread, for an address where the neighbour takes no more.
    """

    attempt: int
    own: range
    neighbour: Mapping[str, Any] | None = None
    kept: range = range(0)
    elsewhere: Callable[[], Mapping[str, Any] | None] = lambda: None


class NodeCopies:
    """One agent's store of copies, server and sender. Close it when the run ends here."""

    def __init__(self, run: str, host: str, address: str, secret: Path) -> None:
        """Open the folder and listen on `address`; `secret` is a file that all agents of the job share.

        Raises LauncherError where either cannot be done: the run then has its checkpoints alone.
        """
        self._store = open_copy_store(run, host)
        try:
            self._secret = shared_secret(secret)
            self._server = CopyServer(self._store, address, self._secret)
        except OSError as error:
            self._store.close()
            raise LauncherError(f"copies in memory cannot be exchanged: {error}") from error
        self._pusher: CopyPusher | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What the environment of the ranks has to say."""
        return self._store.environment

    @property
    def address(self) -> dict[str, Any]:
        """Where the other nodes reach this one, as JSON."""
        return asdict(self._server.address)

    def held(self) -> list[dict[str, Any]]:
        """Return the complete copies that lie here, as JSON."""
        return [copy.to_json() for copy in self._store.held()]

    def held_at(self, address: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the complete copies that lie on the node with this address. Raises LauncherError."""
        return listed(Address(**address), self._secret)

    def fetch(self, own: range, step: int, attempt: int, sources: Mapping[int, Mapping[str, Any]]) -> None:
        """Bring the copies of a step to this node's ranks: those of `sources` (addresses by rank) from there.

        Raises LauncherError where one cannot be had; the ranks then agree to begin with the checkpoint.
        """
        wanted = [WantedCopy(rank, Address(**source)) for rank, source in sources.items()]
        bring_copies(self._store, own, step, attempt, wanted, self._secret)

    def begin(self, part: NodeCopyPlan) -> None:
        """Keep and send copies of an attempt from now on. Before its ranks are started."""
        self.end()
        self._server.expect(part.attempt)
        if part.neighbour is not None:
            self._pusher = CopyPusher(
                self._store,
                part.own,
                part.attempt,
                Address(**part.neighbour),
                self._secret,
                begun=lambda: self._store.keep_only(part.own, part.kept),
                elsewhere=lambda: _address(part.elsewhere()),
            )

    def end(self) -> dict[str, Any]:
        """Send no more, and take no more from the neighbour; return how it went, as evidence."""
        self._server.expect(None)
        pusher, self._pusher = self._pusher, None
        if pusher is None:
            return {}
        pusher.close()
        return {"pushed_step": pusher.pushed_step, "push_s": pusher.push_s, "push_problem": pusher.problem}

    def close(self) -> None:
        """End all of it and give the memory back."""
        self.end()
        self._server.close()
        self._store.close()


def _address(record: Mapping[str, Any] | None) -> Address | None:
    return None if record is None else Address(**record)
