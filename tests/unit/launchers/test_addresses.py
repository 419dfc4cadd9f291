"""Addresses of this host, compared with what the sockets of this very machine say."""

from __future__ import annotations

import socket

import pytest

from launchers import LauncherError, host_network
from launchers.host_network import (
    address_of_interface,
    address_towards,
    free_port,
    interface_of,
    listener,
    reachable_address,
)


def test_interfaces_and_addresses_lead_to_each_other() -> None:
    assert address_of_interface("lo") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert address_of_interface("nosuch0") is None
    for _, name in socket.if_nameindex():
        address = address_of_interface(name)
        assert address is None or interface_of(address) is not None


def test_packets_to_this_host_leave_by_its_own_address() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no such name") is None


def test_configured_interface_is_taken_or_named_as_missing() -> None:
    assert reachable_address("lo", "anything", None) == "127.0.0.1"
    with pytest.raises(LauncherError, match=r"interface nosuch0 has no IPv4 address here; there are .*lo"):
        reachable_address("nosuch0", "anything", None)


def test_name_that_means_only_this_host_is_no_address_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # As Debian writes the host's own name into /etc/hosts.
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    with pytest.raises(LauncherError, match="name the interface to use"):
        reachable_address(None, "node1", None)


def test_a_port_is_given_once_and_can_be_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(host_network, "_FIRST", port)
    monkeypatch.setattr(host_network, "_LAST", port)
    with pytest.raises(LauncherError, match=f"no free TCP port found in {port}-{port}"):
        free_port()
    # As others do, such as torch's store.
    with socket.create_server(("127.0.0.1", port)) as server:
        with socket.create_connection(server.getsockname(), timeout=5):
            pass
        with pytest.raises(LauncherError, match="no free TCP port found"):
            free_port()


def test_who_listens_takes_another_port_where_somebody_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    other = free_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = iter([server.getsockname()[1], other, other])
        monkeypatch.setattr(host_network, "free_port", lambda: next(ports))
        with listener("127.0.0.1") as listening:
            assert listening.getsockname() == ("127.0.0.1", other)
    with pytest.raises(OSError, match="assign requested address"):
        listener("192.0.2.1")
