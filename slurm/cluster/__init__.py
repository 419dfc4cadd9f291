"""The development cluster: munge, MariaDB, slurmdbd, slurmctld and one slurmd per host, on one Linux machine.

A *host* is a set of Linux namespaces (network, process ids, mounts, host name, IPC) held by its first
process, `host.py`. Killing that process ends every process on the host and removes its addresses and mounts,
so that a host can fail like a real one and nothing can be left over. The *controller* is a host too: it
runs all daemons but slurmd and holds the bridge that joins the others. The file system is the machine's own
and so is shared, except for /proc, /dev/shm, /etc/hosts and /etc/resolv.conf.

Standard library only.
"""
