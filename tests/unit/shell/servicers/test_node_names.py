"""What nodes call themselves reaches people's terminals."""

from coordinator.shell import translate
from hypergpu.v1 import node_pb2


def test_name_of_a_node_comes_back_without_what_would_act_on_a_terminal() -> None:
    told = translate.capabilities_value(node_pb2.Capabilities(name="at\x1b[2Jtic\n"))
    assert translate.capabilities_message(told).name == "at[2Jtic"


def test_name_of_a_node_has_an_end() -> None:
    told = translate.capabilities_value(node_pb2.Capabilities(name="a" * 10_000))
    assert len(told.name) < 1_000
