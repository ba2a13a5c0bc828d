"""Answers whose node is killed at a token by chance, beside the same answers left alone."""

import random
from pathlib import Path
from typing import NamedTuple

from benchmarks.ours.serving.served import served_model
from hypergpu.serving.calls import ModelCall, Sampling

_TOKENS = 48
_PROMPT_TOKENS = 32
_FLOOR_MS = 20


class KillFigures(NamedTuple):
    """What came of it."""

    same: int
    """Answers with the very same tokens, by two nodes."""
    gaps_s: list[float]
    """Longest time between two tokens of each answer."""


def answers_after_kills(
    folder: Path, model: Path, kills: int, vocabulary: int = 4_096
) -> KillFigures:
    """Kill the node that answers, greedy and seeded by turns.

    Args:
        folder: Gets the processes' files.
        model: Folder or GGUF file.
        kills: How often.
        vocabulary: Tokens that prompts are drawn from.
    """
    draws = random.Random(7)
    gaps_s: list[float] = []
    same = 0
    with served_model(folder, model, ("one", "two"), floor_ms=_FLOOR_MS) as run:
        for number in range(kills):
            rules = Sampling(temperature=float(number % 2), seed=number)
            prompt = tuple(draws.randrange(vocabulary) for _ in range(_PROMPT_TOKENS))
            call = ModelCall(tokens=prompt, sampling=rules, new_tokens_most=_TOKENS)
            whole = run.answer(call)
            after_kill = run.answer(call, kill_after=draws.randint(1, _TOKENS - 2))
            same += after_kill.tokens == whole.tokens and len(after_kill.nodes) == 2
            gaps_s.append(after_kill.longest_gap_s)
            run.wait_until_ready(2)
    return KillFigures(same, gaps_s)
