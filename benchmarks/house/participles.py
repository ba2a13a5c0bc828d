"""Words that no function may have as its whole name: "held" does not say what is held."""

NO_PARTICIPLES = frozenset({
    "bed", "bleed", "breed", "creed", "deed", "embed", "exceed", "feed", "greed", "heed",
    "need", "proceed", "red", "reed", "seed", "shed", "sled", "speed", "steed", "succeed",
    "weed",
})  # fmt: skip
"""Words that end like a regular participle and are none."""

IRREGULAR = frozenset({
    "arisen", "awoken", "begotten", "begun", "bent", "bitten", "blown", "borne", "bought",
    "broken", "brought", "built", "burnt", "caught", "chosen", "clung", "crept", "dealt",
    "done", "drawn", "driven", "dug", "eaten", "fallen", "fed", "felt", "fled", "flown",
    "flung", "forbidden", "foregone", "foreseen", "forgiven", "forgotten", "forsaken",
    "fought", "found", "frozen", "given", "gone", "got", "gotten", "granted", "grown", "had",
    "heard", "held", "hidden", "hung", "kept", "knelt", "known", "laid", "lain", "learnt",
    "led", "left", "lent", "lit", "lost", "made", "meant", "met", "mistaken", "mown",
    "outgrown", "overseen", "overtaken", "overthrown", "paid", "proven", "ridden", "risen",
    "rung", "said", "sat", "seen", "sent", "sewn", "shaken", "shone", "shorn", "shot", "shown",
    "shrunk", "shrunken", "slain", "slept", "slid", "slung", "smitten", "sold", "sought",
    "sown", "spent", "spoken", "sprung", "spun", "stolen", "stood", "strewn", "stricken",
    "striven", "struck", "stuck", "stung", "stunk", "sung", "sunk", "swept", "swollen",
    "sworn", "swum", "swung", "taken", "taught", "thought", "thrown", "told", "torn",
    "trodden", "undergone", "understood", "undertaken", "undone", "unknown", "unmade",
    "unpaid", "unseen", "unsent", "untold", "withdrawn", "withheld", "withstood", "woken",
    "won", "worn", "wound", "woven", "written", "wrought", "wrung",
})  # fmt: skip
"""Irregular participles that differ from their verb; "bound" is left out, for it is a limit too."""


def is_bare_participle(name: str) -> bool:
    """Whether a function's whole name, leading underscores aside, is one past participle."""
    word = name.strip("_")
    is_one_word = word.islower() and "_" not in word
    is_regular = word.endswith("ed") and is_one_word and word not in NO_PARTICIPLES
    return is_regular or word in IRREGULAR
