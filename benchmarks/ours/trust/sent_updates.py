"""What the nodes of a simulated job send: codecs with what they leave unsaid, and lies."""

from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.ours.trust.attacks import Attack, RoundView
from benchmarks.ours.trust.training import Rows
from hypergpu.tensors.codec import encode_update
from hypergpu.tensors.layout import Flat, Float32s, Layout


class NodeEncoders:
    """The nodes' codecs with what each left unsaid; forgers send what they forged, whole."""

    def __init__(self, codec: str, forgers: frozenset[int]) -> None:
        self._codec = codec
        self._forgers = forgers
        self._unsaid: dict[int, Float32s] = {}

    def encode(
        self, layout: Layout, model: Flat, rows: Rows, slots: Sequence[int]
    ) -> dict[int, bytes]:
        """Encode updates of some nodes."""
        payloads = {}
        for slot in slots:
            flat = Flat(rows[slot], model.statistics, model.integers)
            with np.errstate(all="ignore"):
                encoded_update = encode_update(layout, self._codec, flat, self._unsaid.get(slot))
            if slot not in self._forgers:
                self._unsaid[slot] = encoded_update.residual
            payloads[slot] = encoded_update.payload.tobytes()
        return payloads


class ToldLies:
    """The attackers of one job, who all do the same."""

    def __init__(
        self, attack: Attack | None, attackers: Sequence[int], draws: np.random.Generator
    ) -> None:
        self._attack = attack
        self._attackers = list(attackers)
        self._draws = draws
        self._first: Rows | None = None
        self.last_change: Float32s | None = None

    def tell(
        self, layout: Layout, number: int, rows: Rows, target: Callable[[Rows], Float32s]
    ) -> Rows:
        """What all nodes send, of what they all computed.

        Args:
            layout: The model's.
            number: The round's.
            rows: One update for each node.
            target: The mean that the coordinator would make of such rows.
        """
        if self._attack is None or not self._attackers:
            return rows
        own = rows[self._attackers]
        self._first = own if self._first is None else self._first
        honest = np.delete(rows, self._attackers, axis=0)
        order = [slot for slot in range(len(rows)) if slot not in self._attackers] + self._attackers
        inverse = np.argsort(order)

        def target_of(chosen: Rows) -> Float32s:
            return target(chosen[inverse])

        last = np.zeros_like(own[0]) if self.last_change is None else self.last_change
        view = RoundView(
            layout=layout,
            number=number,
            honest=honest,
            own=own,
            first=self._first,
            last_change=last,
            target=target_of,
            draws=self._draws,
        )
        sent_rows = rows.copy()
        with np.errstate(all="ignore"):
            sent_rows[self._attackers] = self._attack(view)
        return sent_rows
