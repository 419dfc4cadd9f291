"""Warm starts: one process per node imports the slow modules once; torchrun and workers are forked from it.

    NodeAgent ──► WarmHost (host.py) ──socket──► zygote.py ──fork──► torchrun ──exec──► stub.py, per rank
                                                     │ ◄──abstract socket: "start this rank"──┘
                                                     └──fork──► worker: its stub ends as it ends

It is an accelerator and nothing else: whatever does not fit (imports that fail, a second thread, a device
that was touched, another environment) is refused with a reason, and the caller starts plainly. It imports
none of what it is told to import by name.
"""
