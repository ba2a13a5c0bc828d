"""Time to the first token of later turns, with and without what replicas have read before."""

import random
import statistics
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

from benchmarks.ours.serving.random_model import VOCABULARY, save_random_base
from benchmarks.ours.serving.served import ServedModelRun, TimedAnswer, served_model
from benchmarks.ours.table import PartFigures
from hypergpu.serving.calls import ModelCall, Sampling

_CONVERSATIONS, _TURNS = 4, 4
_BEGIN_TOKENS, _TURN_TOKENS, _ANSWER_TOKENS = 768, 32, 8
_WANTED = 2.0


class _TurnFigures(NamedTuple):
    first_token_s: list[float]
    """Times of turns after the first."""
    tokens: list[tuple[int, ...]]
    held_tokens: int
    prompt_tokens: int


def prefix_figures() -> PartFigures:
    """Conversations side by side on two nodes, by turns with and without a common scope."""
    with tempfile.TemporaryDirectory() as name:
        base = save_random_base(Path(name) / "base", width=512, layers=8)
        with served_model(Path(name) / "run", base, ("one", "two")) as run:
            _conversations(run, "warm", is_kept=False)
            anew_run = _conversations(run, "anew", is_kept=False)
            kept_run = _conversations(run, "kept", is_kept=True)
    anew_s, kept_s = (statistics.median(each.first_token_s) for each in (anew_run, kept_run))
    same = sum(one == other for one, other in zip(anew_run.tokens, kept_run.tokens, strict=True))
    return PartFigures(
        rows=[
            ("first token of a later turn, read anew", f"{1000 * anew_s:.0f} ms", ""),
            ("the same, sent where the turn before was read", f"{1000 * kept_s:.0f} ms", ""),
            ("read anew over sent there", f"{anew_s / kept_s:.1f}x", f"{_WANTED:g}x"),
            (
                "prompt tokens that were not read again",
                f"{kept_run.held_tokens / kept_run.prompt_tokens:.0%}",
                "",
            ),
            ("answers with the same tokens", f"{same} of {len(kept_run.tokens)}", "all"),
        ],
        metrics={
            "prefix_first_token_ratio": anew_s / kept_s,
            "prefix_answers_same": same / len(kept_run.tokens),
        },
        notes=[
            f"27M parameters, {_CONVERSATIONS} conversations at once of {_TURNS} turns.",
            f"{_BEGIN_TOKENS} tokens first, {_TURN_TOKENS} a turn, {_ANSWER_TOKENS} an answer.",
        ],
    )


def _conversations(run: ServedModelRun, name: str, *, is_kept: bool) -> _TurnFigures:
    answers: dict[tuple[int, int], TimedAnswer] = {}

    def talk(number: int) -> None:
        draws = random.Random(number)
        text = tuple(draws.randrange(VOCABULARY) for _ in range(_BEGIN_TOKENS))
        for turn in range(_TURNS):
            text += tuple(draws.randrange(VOCABULARY) for _ in range(_TURN_TOKENS))
            scope = name if is_kept else f"{name}-{number}-{turn}"
            call = ModelCall(
                tokens=text,
                sampling=Sampling(temperature=0.0),
                new_tokens_most=_ANSWER_TOKENS,
                prefix_scope=scope,
            )
            answers[number, turn] = run.answer(call)
            text += answers[number, turn].tokens

    threads = [threading.Thread(target=talk, args=(each,)) for each in range(_CONVERSATIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    later = [answer for (_, turn), answer in sorted(answers.items()) if turn]
    return _TurnFigures(
        [answer.at_s[0] for answer in later],
        [answer.tokens for _, answer in sorted(answers.items())],
        sum(answer.held_tokens for answer in later),
        sum(answer.prompt_tokens for answer in later),
    )
