"""A job among liars: the product's admission, codec, sketches, weighing, fold and pay, round after
round in one process, without the network between them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.ours.trust.attacks import (
    ABSENT,
    ATTACKS,
    BACKDOOR,
    FIRST_LIES,
    LEARNERS,
    NONE,
    POISONS,
    SMALL_BACKDOOR,
    Attack,
)
from benchmarks.ours.trust.backdoor_defences import END_DEFENCES
from benchmarks.ours.trust.defended_rounds import DefendedRounds, defended_rounds
from benchmarks.ours.trust.outcome import (
    CODEC,
    HELD_OUT,
    LAST,
    OWN_RULES,
    ROBUST,
    ROUNDS,
    JobTally,
    ModelScores,
    Outcome,
    Setting,
)
from benchmarks.ours.trust.sent_updates import NodeEncoders, ToldLies
from benchmarks.ours.trust.training import (
    BATCH,
    INNER_STEPS,
    HeldOutParts,
    NodeShards,
    Rows,
    TrainingNodes,
    node_shards,
    stacked_models,
)
from coordinator.core.training.job.commands import FoldedUpdate
from coordinator.core.training.job.trust_memory import PayMemory, TrustMemory, Weighing
from coordinator.core.training.trust.own_draw import drawn_nodes
from coordinator.core.training.trust.own_samples import USE_LEAST
from coordinator.core.training.trust.weights import WHOLE, ban_reason, is_exploded
from coordinator.core.work.outer_step import PLAIN_STEP
from coordinator.shell.aggregation.evidence import (
    SketchedUpdate,
    weigh_rollback,
    weigh_sketched,
)
from coordinator.shell.aggregation.fold import fold
from coordinator.shell.aggregation.fold_request import (
    DivergedError,
    FoldRequest,
    NoUpdatesError,
    StoredBlob,
    StoredUpdate,
)
from coordinator.shell.aggregation.layer_groups import LayerGroups, layer_groups, one_group
from coordinator.shell.aggregation.measurements import HeldOutGradient, OwnGradient, UpdateTrial
from coordinator.shell.aggregation.sketch import (
    SketchKey,
    UpdateSketch,
    sketch_layers,
    sketch_update,
    sketch_vector,
)
from coordinator.shell.kinds.training.aggregation import weighted_updates
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.ids import NodeId, Slot
from hypergpu.jobfile.spec import SPARSE_CODECS, Outer
from hypergpu.partitions import Indices
from hypergpu.tensors.codec import IncrementalCheck, decode_parameters, encode_update
from hypergpu.tensors.layout import Flat, Float32s
from hypergpu.units import Bytes
from hypergpu.workloads.networks.task import Classification

OWN_SAMPLES = 25
"""Secret samples of each shard."""
Rule = Callable[[Rows], Float32s]
"""A classical rule: one vector of all of a round's updates."""


class Machinery(NamedTuple):
    """What jobs share, made once."""

    workload: Classification
    parts: HeldOutParts
    attacks: Mapping[str, Attack] = ATTACKS
    rules: Mapping[str, Callable[[int], Rule]] = {}
    """Makers of classical rules, called with the number of attackers to expect."""


class _Sent(NamedTuple):
    slot: int
    stored: FoldedUpdate
    sketched: SketchedUpdate
    payload: bytes


_UNMEASURED = UpdateSketch(np.zeros(0), 1.0, 0.0)
"""What stands for a sketch under a rule that looks at none."""


class SimulatedJob:
    """The coordinator's side of one job."""

    def __init__(
        self, machinery: Machinery, setting: Setting, folder: Path, shards: NodeShards
    ) -> None:
        self._parts = machinery.parts
        self.layout = machinery.parts.trial.layout
        self._folder = folder
        self._has_evidence = setting.rule in (ROBUST, HELD_OUT)
        self._groups = layer_groups(self.layout) if setting.rule == ROBUST else None
        self._shards = shards
        self._workload = machinery.workload
        self._own: dict[int, OwnGradient] = {}
        self._samples: dict[int, Indices] = {}
        self._key = SketchKey(setting.seed.to_bytes(8, "little"))
        self._codec = setting.codec
        self._attackers = setting.nodes * setting.percent // 100
        self._nodes = setting.nodes
        self._defended = defended_rounds(setting, machinery.workload, self.layout, shards)
        self._other: Callable[[int], Rule] | None = None
        if setting.rule not in OWN_RULES:
            self._other = machinery.rules[setting.rule]
        vectors = machinery.parts.trial.initial(setting.seed)
        self.base = self._store("model", b"".join(vector.tobytes() for vector in vectors))
        self._outer: StoredBlob | None = None
        self._before: tuple[StoredBlob, StoredBlob | None] | None = None
        self._makers: list[_Sent] = []
        self._memory = TrustMemory(
            by_own_samples=setting.rule == ROBUST,
            pay=PayMemory() if setting.rule == ROBUST else None,
            unseen={} if setting.rule == ROBUST else None,
            use_least=USE_LEAST if setting.rule == ROBUST else 0,
        )
        self._gradient: HeldOutGradient | None = None
        self._number = 0
        self._useless = [0] * setting.nodes
        self._rows: dict[bytes, UpdateSketch] = {}
        self.banned: set[int] = set()
        """Slots that get no more work."""

    @property
    def model(self) -> Flat:
        """As nodes hold it."""
        return Flat.view(self.layout, np.fromfile(self.base.path, np.uint8))

    def open_round(self, number: int) -> None:
        """Measure the held-out gradient, while nodes train."""
        self._number = number
        self._rows.clear()
        if not self._has_evidence:
            return
        model = self.model
        if self._groups is not None:
            self._measure_own(model, self._groups)
        with np.errstate(all="ignore"):
            gradient = self._parts.trial.gradient(model, 0)
        sketch = sketch_vector(self._key, self.layout, gradient.parameters, self._groups)
        is_finite = bool(np.isfinite(sketch).all())
        self._gradient = HeldOutGradient(
            self.base.digest,
            gradient.loss if np.isfinite(gradient.loss) else None,
            sketch if is_finite else None,
        )

    def _measure_own(self, model: Flat, groups: LayerGroups) -> None:
        """Differentiate the loss of secret samples of each shard."""
        draws = np.random.default_rng([99, self._number])
        names = sorted(map(_node, range(self._nodes)))
        slots = [_slot(node) for node in drawn_nodes(str(self._number), self._memory, names)]
        shards = self._shards.of_round(self._number)
        self._samples = {
            slot: draws.choice(shards[slot], OWN_SAMPLES, replace=False) for slot in slots
        }
        with np.errstate(all="ignore"):
            places = np.stack(list(self._samples.values()))
            rows = self._shards.own_gradients(self._workload, model, places)
        layers = [sketch_layers(self._key, self.layout, row, groups) for row in rows]
        if self._shards.is_even:
            layers = [np.mean(layers, axis=0)] * len(layers)
        self._own = {slot: OwnGradient(it) for slot, it in zip(slots, layers, strict=True)}

    def try_updates(self, sent: list[_Sent]) -> list[_Sent]:
        """The updates with losses of samples of their own shards, before and after each."""
        tried_updates = [each for each in sent if each.slot in self._own]
        if not tried_updates:
            return sent
        base = self.model.parameters
        samples = np.stack([self._samples[each.slot] for each in tried_updates])
        payloads = [each.payload for each in tried_updates]
        updates = [decode_parameters(self.layout, self._codec, each) for each in payloads]
        losses = []
        for rows in (np.repeat(base[None], len(tried_updates), axis=0), base - np.stack(updates)):
            with np.errstate(all="ignore"):
                tensors = stacked_models(self.layout, rows)
                losses.append(self._shards.own_losses(self._workload, tensors, samples))
        trials = {
            each.slot: UpdateTrial(loss, after if math.isfinite(after) else math.inf)
            for each, loss, after in zip(
                tried_updates, *(it.tolist() for it in losses), strict=True
            )
        }
        return [
            each._replace(sketched=each.sketched._replace(trial=trials.get(each.slot)))
            for each in sent
        ]

    def accept(self, slot: int, payload: bytes) -> _Sent | None:
        """Admit an update as it arrives, and sketch it; None: it is refused."""
        check = IncrementalCheck(self.layout, self._codec)
        try:
            check.feed(payload)
            check.finish()
        except HyperGPUError:
            return None
        blob = self._store(f"update-{self._number % 2}-{slot}", payload)
        node = _node(slot)
        folded_update = FoldedUpdate(
            node=node,
            slot=Slot(slot),
            blob=BlobRef(blob.digest, Bytes(len(payload))),
            weight=INNER_STEPS * BATCH,
            codec=self._codec,
            inner_steps=INNER_STEPS,
        )
        sketch = _UNMEASURED
        if self._has_evidence:
            files = (blob.path, self.base.path)
            sketch = sketch_update(self._key, self.layout, self._codec, *files, self._groups)
        own = self._own.get(slot)
        return _Sent(
            slot, folded_update, SketchedUpdate(node, INNER_STEPS, sketch, own=own), payload
        )

    def close_round(self, sent: list[_Sent]) -> Weighing:
        """Weigh the updates and make the next model of them, or go back to the one before."""
        gradient = self._gradient
        if gradient and self._before and is_exploded(self._memory, gradient.loss):
            makers = [each.sketched for each in self._makers]
            weighing = weigh_rollback(self._memory, makers, gradient, self._number)
            (self.base, self._outer), self._before = self._before, (self.base, self._outer)
        else:
            sketches = [each.sketched for each in sent]
            rule = "robust" if self._has_evidence else "mean"
            weighing = weigh_sketched(self._memory, rule, sketches, gradient)
            before = (self.base, self._outer)
            self._fold(self._terms(sent, weighing))
            self._before = before
        self._memory, self._makers = weighing.memory, sent
        for each in sent:
            is_useless = each.stored.node in weighing.useless
            self._useless[each.slot] = self._useless[each.slot] + 1 if is_useless else 0
            if ban_reason(self._useless[each.slot], ""):
                self.banned.add(each.slot)
        return weighing

    def target(self, rows: Rows) -> Float32s:
        """The mean that the rule would make of some updates, were they this round's."""
        if self._other is not None:
            return self._other_rule(self._other, len(rows))(rows)
        sketches = [
            SketchedUpdate(_node(slot), INNER_STEPS, self._sketch_row(row), own=self._own.get(slot))
            for slot, row in enumerate(rows)
        ]
        rule = "robust" if self._has_evidence else "mean"
        weighing = weigh_sketched(self._memory, rule, sketches, self._gradient)
        votes = np.array([weighing.votes.get(each.node, WHOLE) for each in sketches], np.float64)
        clips = np.array([weighing.clips.get(each.node, WHOLE) for each in sketches]) / WHOLE
        mean: Float32s = (votes * clips / max(votes.sum(), 1)) @ rows
        return mean

    def _sketch_row(self, row: Float32s) -> UpdateSketch:
        """The sketch of a row; attackers that try many forged ones keep the honest."""
        name = row.tobytes()
        if name not in self._rows:
            groups = self._groups or one_group(self.layout)
            layers = sketch_layers(self._key, self.layout, row, groups)
            norm = float(np.linalg.norm(row.astype(np.float64)))
            self._rows[name] = UpdateSketch(layers.sum(axis=0), norm, 0.0, layers)
        return self._rows[name]

    def _terms(self, sent: list[_Sent], weighing: Weighing) -> tuple[StoredUpdate, ...]:
        if self._other is not None:
            return self._one_term(self._other_rule(self._other, len(sent)), sent)
        if self._defended is not None:
            return self._one_term(self._defended_rule(self._defended, sent, weighing), sent)
        by_digest = {
            each.stored.blob.digest: f"update-{self._number % 2}-{each.slot}" for each in sent
        }
        return tuple(
            StoredUpdate(
                self._folder / by_digest[term.blob.digest],
                term.blob.digest,
                term.weight,
                term.codec,
                term.clip,
            )
            for term in weighted_updates([each.stored for each in sent], weighing)
        )

    def _defended_rule(
        self, defended: DefendedRounds, sent: Sequence[_Sent], weighing: Weighing
    ) -> Rule:
        """A defence against backdoors, on top of the votes and clips of the rule."""
        nodes = [each.stored.node for each in sent]
        votes = np.array([weighing.votes.get(it, WHOLE) for it in nodes], np.float64)
        clips = [weighing.clips.get(it, WHOLE) / WHOLE for it in nodes]
        slots = [each.slot for each in sent]
        base = self.model.parameters
        return lambda rows: defended.aggregate(
            self._number, base, slots, _clipped_rows(rows, clips), votes / max(1, votes.sum())
        )

    def _other_rule(self, make: Callable[[int], Rule], updates: int) -> Rule:
        """A classical rule, told how many of the updates are forged. Of those that admission left
        that may be half or more, which no such rule takes.
        """
        return make(min(self._attackers, (updates - 1) // 2))

    def _one_term(self, rule: Rule, sent: list[_Sent]) -> tuple[StoredUpdate, ...]:
        """A classical rule's vector, as the only update of the round."""
        with np.errstate(all="ignore"):
            rows = np.stack(
                [decode_parameters(self.layout, self._codec, it.payload) for it in sent]
            )
            vector = rule(rows).astype(np.float32)
        flat = self.model
        flat = Flat(vector, flat.statistics, flat.integers)
        payload = encode_update(self.layout, "fp32", flat).payload.tobytes()
        blob = self._store("aggregate", payload)
        return (StoredUpdate(blob.path, blob.digest, 1, "fp32"),)

    def _fold(self, terms: Sequence[StoredUpdate]) -> None:
        try:
            with np.errstate(all="ignore"):
                fold_result = fold(
                    FoldRequest(
                        layout=self.layout,
                        down=CODEC,
                        outer=PLAIN_STEP if self._codec in SPARSE_CODECS else Outer(),
                        base_model=self.base,
                        outer_state=self._outer,
                        updates=tuple(terms),
                        output_dir=self._folder,
                    )
                )
        except (NoUpdatesError, DivergedError):
            return
        if fold_result.delta is not None:
            fold_result.delta.path.unlink()
        self._forget()
        self.base = StoredBlob(fold_result.model.path, fold_result.model.digest)
        outer_file = fold_result.outer_state
        self._outer = None if outer_file is None else StoredBlob(outer_file.path, outer_file.digest)

    def _forget(self) -> None:
        """Delete the model before the base."""
        kept_blobs = {self.base, self._outer}
        for blob in self._before or ():
            if blob is not None and blob not in kept_blobs:
                blob.path.unlink(missing_ok=True)

    def _store(self, name: str, payload: bytes) -> StoredBlob:
        path = self._folder / name
        path.write_bytes(payload)
        return StoredBlob(path, digest_of(payload))


def train_job(
    machinery: Machinery, setting: Setting, folder: Path, *, rounds: int = ROUNDS
) -> Outcome:
    """Train one job among its attackers.

    Args:
        machinery: What jobs share.
        setting: Its rule, attackers, data and seed.
        folder: An empty one for its files.
        rounds: How many.
    """
    draws = np.random.default_rng([17, setting.seed])
    nodes_count = setting.nodes
    count = 0 if setting.attack == NONE else nodes_count * setting.percent // 100
    attackers = sorted(int(slot) for slot in draws.choice(nodes_count, count, replace=False))
    honest = [slot for slot in range(nodes_count) if slot not in attackers]
    shards = _shards(machinery, setting)
    trains = [*range(nodes_count)] if setting.attack in LEARNERS else honest
    nodes = TrainingNodes(machinery.workload, shards, trains)
    job = SimulatedJob(machinery, setting, folder, shards)
    tally = _tally(setting, attackers)
    lies = ToldLies(machinery.attacks.get(setting.attack), attackers, draws)
    poison = POISONS.get(setting.attack)
    encoders = NodeEncoders(setting.codec, frozenset() if poison else frozenset(attackers))
    has_backdoor = setting.attack in (BACKDOOR, SMALL_BACKDOOR, NONE)
    scores = ModelScores(machinery.parts, has_backdoor=has_backdoor)
    taking_part = honest if setting.attack == ABSENT else range(nodes_count)
    for number in range(rounds):
        job.open_round(number)
        before = job.model
        rows = nodes.train(job.layout, before, number, poison, attackers)
        honest_slots = [slot for slot in taking_part if slot not in job.banned]
        payloads = encoders.encode(
            job.layout, before, lies.tell(job.layout, number, rows, job.target), honest_slots
        )
        answers = [job.accept(slot, payload) for slot, payload in payloads.items()]
        sent_updates = job.try_updates([each for each in answers if each is not None])
        nodes_by_slot = {each.slot: each.stored.node for each in sent_updates}
        tally.add(number, nodes_by_slot, job.close_round(sent_updates))
        tally.refused += len(answers) - len(sent_updates)
        lies.last_change = before.parameters - job.model.parameters
        if number >= rounds - LAST:
            scores.add(model_after_pruning(machinery, setting.defence, job.model))
    return msgspec.structs.replace(
        tally.outcome(scores.accuracies),
        honest_banned=len(job.banned.difference(attackers)),
        triggered=scores.triggered_percent,
    )


def model_after_pruning(machinery: Machinery, defence: str, model: Flat) -> Flat:
    """The model after the defence of the end that a setting names, if any."""
    prune = END_DEFENCES.get(defence)
    if prune is None:
        return model
    return prune(machinery.workload, model, machinery.parts.trial)


def _tally(setting: Setting, attackers: Sequence[int]) -> JobTally:
    first_lie = FIRST_LIES.get(setting.attack, 0)
    return JobTally(attackers, nodes=setting.nodes, first_lie=first_lie)


def _shards(machinery: Machinery, setting: Setting) -> NodeShards:
    alpha = 0.0 if setting.alpha == "inf" else float(setting.alpha)
    return node_shards(machinery.workload, alpha, setting.seed, setting.nodes)


def _clipped_rows(rows: Rows, clips: Sequence[float]) -> Rows:
    return np.asarray(rows * np.array(clips)[:, None], np.float32)


def _node(slot: int) -> NodeId:
    return NodeId(f"{slot:032x}")


def _slot(node: NodeId) -> int:
    return int(node, 16)
