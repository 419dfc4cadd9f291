"""Addresses of this host, compared with what the sockets of this very machine say."""

from __future__ import annotations

import socket

import pytest

from launchers import LauncherError
from launchers.host_network import address_of_interface, address_towards, interface_of, reachable_address


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
