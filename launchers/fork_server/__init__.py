"""Optional: one process per node imports the slow modules once, and torchrun and ranks are forked from it.

An agent uses `client.ForkServer`, by four methods:

    start()            have the server started; it imports in the background
    await_ready(...)   wait until it has imported everything, or never will
    start_torchrun()   fork torchrun, whose workers are forked too; raises StartRefused with a reason
    close()            end the server and all that it forked

    NodeAgent ──► ForkServer (client) ──socket──► server ──fork──► torchrun ──exec──► worker launcher
                      │                            ▲  │ ◄──abstract socket: "start this rank"──┘
                      └──► owner (its parent) ─────┘  └──fork──► worker: its launcher ends as it ends

The owner is the agent itself, or the process that starts the agent again when it was killed: then the server
outlives the agent, and the next one need not wait for imports (SIGKILL of an agent to the next step: 3.2 s
instead of 13.1 s, benchmarks/RESULTS.md). Whatever was forked for an agent ends with that agent. What
cannot be forked (imports that fail, a second thread, a device that was opened, another environment) is
refused with a reason, and the caller starts a new interpreter.
"""
