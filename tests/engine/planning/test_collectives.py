"""What collectives send within and between nodes, with the arithmetic by hand."""

from __future__ import annotations

import pytest

from lightswitch.planning.collectives import Collective, Traffic, traffic

NODE, BOTH = tuple(range(8)), tuple(range(16))


@pytest.mark.parametrize(
    ("collective", "expected"),
    [
        # each of 8 devices gets the 7 parts that it lacks
        (Collective("all_gather", 800, NODE), Traffic(within=700, between=0)),
        (Collective("reduce_scatter", 800, NODE), Traffic(within=700, between=0)),
        (Collective("all_reduce", 800, NODE), Traffic(within=2 * 700, between=0)),
        # of 2 nodes, each gets the other's half; in the node, each of 8 devices gets what came in by the other 7
        (Collective("all_gather", 800, BOTH), Traffic(within=700, between=400)),
        # one device a node: 8 such groups share the network
        (Collective("all_reduce", 100, (0, 8)), Traffic(within=0, between=2 * 8 * 50)),
        (Collective("all_gather", 800, (0,)), Traffic(within=0, between=0)),
    ],
)
def test_links_carry_what_devices_and_nodes_lack(collective: Collective, expected: Traffic) -> None:
    assert traffic([collective], devices_per_node=8) == expected


def test_a_steps_traffic_is_the_sum() -> None:
    one = Collective("all_gather", 800, NODE)
    assert traffic([one, one], devices_per_node=8) == Traffic(1400, 0)
