"""Documents that ``--json`` prints (docs/cli.md). Fields are only added."""

import msgspec

from hypergpu.client.values import JobView, NodeView, TokenView


class Jobs(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/jobs/1"):
    """`job ls`."""

    jobs: list[JobView]


class Submitted(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/submitted/1"):
    """`job submit`."""

    job: str


class Nodes(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/nodes/1"):
    """`node ls`."""

    nodes: list[NodeView]


class NodeDetail(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/node/1"):
    """`node show`."""

    node: NodeView


class Tokens(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/tokens/1"):
    """`token ls`."""

    tokens: list[TokenView]


class Exported(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/exported/1"):
    """`job export`."""

    model: str
    card: str
    digest: str
    size_bytes: int
