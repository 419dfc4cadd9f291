"""`python -m launchers.bound_torchrun …`: torchrun, whose store listens at the master's address alone.

torchrun's own listens on all interfaces, also for a run on one machine, and answers whoever asks. All else is
torchrun's: its options, its output, its exit codes.
"""

from __future__ import annotations

import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousInfo, static_tcp_rendezvous
from torch.distributed.run import main

# As many nodes and ranks as may call at the same time.
_BACKLOG = 4096


class BoundRendezvous(static_tcp_rendezvous.StaticTCPRendezvous):
    """torchrun's static rendezvous, its socket opened here."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Return where the nodes meet. Raises OSError where the master's port is taken."""
        if self._store is None and self.rank == 0:
            listener = socket.create_server((self.master_addr, self.master_port), backlog=_BACKLOG)
            self._store = TCPStore(
                self.master_addr,
                self.master_port,
                self.world_size,
                is_master=True,
                timeout=self.timeout,
                multi_tenant=True,
                master_listen_fd=listener.detach(),
            )
        return super().next_rendezvous()


if __name__ == "__main__":
    static_tcp_rendezvous.StaticTCPRendezvous = BoundRendezvous  # type: ignore[misc]
    main()
