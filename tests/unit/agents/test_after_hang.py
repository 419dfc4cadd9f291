"""Which nodes no other one reaches: from what the nodes of a ring measured after an attempt that hung."""

from __future__ import annotations

from typing import Any

import pytest

from conf.schema import ClusterConfig, Config
from launchers.node_group import GroupMember, Order
from orchestra.agents.choose_nodes import next_nodes
from orchestra.agents.node_check.after_hang import without_links
from orchestra.recovery.policy import Action, Decision

NUMBER = 3


def ring(*links: bool | None, number: int = NUMBER) -> dict[int, GroupMember]:
    """Members of which node n reached the next one or did not; None: it is gone."""
    found = {}
    for node, carried in enumerate(links):
        if carried is not None:
            result: dict[str, Any] = {"bytes_per_s": [1e9]} if carried else {"error": "timed out"}
            facts = {"ring": {"to": (node + 1) % len(links), "order": number, **result}}
            found[node] = GroupMember(node, f"node{node + 1}", "10.0.0.1", "x", 1, facts)
    return found


@pytest.mark.parametrize(
    ("links", "alone"),
    [
        # It is not heard: neither does it reach the next one, nor does it answer the one before.
        ((False, False, True), [1]),
        ((False, True, True, False), [0]),
        ((True, False, False, True, True), [2]),
        # Two of them side by side.
        ((True, False, False, False, True), [2, 3]),
        # One link has two ends.
        ((True, False, True, True), []),
        ((True, True, True), []),
        # The network is away for all.
        ((False, False, False), []),
        # What a node that is gone does not answer says nothing.
        ((True, False, None, True), []),
        ((False, None, False, True, True), []),
    ],
)
def test_a_node_without_any_link_that_carries_is_apart(
    links: tuple[bool | None, ...], alone: list[int]
) -> None:
    assert without_links(ring(*links), NUMBER, len(links)) == alone


def test_what_was_measured_at_another_time_says_nothing() -> None:
    assert without_links(ring(False, False, True, number=NUMBER - 1), NUMBER, 3) == []
    assert (
        without_links(
            {node: GroupMember(node, "", "", "x", 1, {"ring": None}) for node in range(3)}, NUMBER, 3
        )
        == []
    )


def test_a_host_that_was_left_out_does_not_come_back_as_a_spare() -> None:
    config = Config(cluster=ClusterConfig(nodes=2, spare_nodes=2, gpus_per_node=1))
    members = {node: it for node, it in ring(True, True, True, True).items() if node != 1}
    decision = Decision(Action.replace, 1, "", exclude=("node2",))
    order = Order(0, "start", (0, 1))
    assert next_nodes(order, decision, members, config, {}) == (0, 2)
    assert next_nodes(order, decision, members, config, {}, {"node3"}) == (0, 3)
    assert next_nodes(order, decision, members, config, {}, {"node3", "node4"}) is None
