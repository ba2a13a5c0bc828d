"""Where a node's receipts are looked for: no further than they can be, and in as few questions."""

from hypergpu.cli.ledger.acts.whereabouts import AT_ONCE, Seen, next_to_see

CLOSED, OPEN = Seen(0, is_closed=True), Seen(0, is_closed=False)


def asked(ledger: dict[int, Seen], own: set[int]) -> tuple[list[int], int]:
    """Which epochs hold receipts by what is found, and how many questions it took.

    Args:
        ledger: Its closed epochs, and open ones with receipts; all others are open and empty.
        own: The epochs that receipts name.
    """
    counted = sum(epoch.receipts for epoch in ledger.values())
    seen: dict[int, Seen] = {}
    wanted, questions = sorted(own), 0
    while wanted:
        seen |= {number: ledger.get(number, OPEN) for number in wanted}
        wanted, questions = next_to_see(seen, counted), questions + 1
    return sorted(number for number, epoch in seen.items() if epoch.receipts), questions


def test_a_node_whose_receipts_are_all_in_their_own_epochs_is_asked_for_once() -> None:
    ledger = {number: Seen(2, is_closed=True) for number in range(10_000)}
    assert asked(ledger, set(range(10_000))) == (list(range(10_000)), 1)


def test_a_late_receipt_is_found_behind_every_epoch_that_was_closed_before_it_came() -> None:
    ledger = dict.fromkeys(range(3), CLOSED) | {3: Seen(1, is_closed=False)}
    assert asked(ledger, {0}) == ([3], 2)
    assert asked({0: Seen(3, is_closed=True), 1: Seen(1, is_closed=True)}, {0}) == ([0, 1], 2)


def test_nothing_is_looked_for_behind_an_open_epoch() -> None:
    assert next_to_see({4: OPEN}, counted=1) == []
    assert next_to_see({4: CLOSED, 5: OPEN}, counted=1) == []


def test_what_is_far_behind_is_found_in_few_questions() -> None:
    far = 10 * AT_ONCE
    ledger = dict.fromkeys(range(far), CLOSED) | {far: Seen(1, is_closed=True)}
    assert asked(ledger, {0}) == ([far], 11)


def test_a_question_is_never_longer_than_so_many_epochs() -> None:
    own = range(0, 100 * AT_ONCE, 2 * AT_ONCE)
    wanted = next_to_see(dict.fromkeys(own, CLOSED), counted=1)
    assert wanted == list(range(1, AT_ONCE + 1))


def test_a_node_without_receipts_is_looked_for_nowhere() -> None:
    assert next_to_see({}, counted=5) == []
