import pytest

from hypergpu.workloads.entry import Option, OptionError, Options, WorkloadEntry, complete_options

ENTRY = WorkloadEntry(
    name="toy",
    version=1,
    kind="numpy",
    dataset="toys",
    metric="accuracy",
    meaning="",
    builder="nowhere:build",
    options=(
        Option("width", 8, "", 4, 16),
        Option("rate", 0.5, "", 0.0, 1.0),
        Option("augment", default=True, meaning=""),
    ),
)


def test_what_is_not_given_takes_its_default() -> None:
    assert complete_options(ENTRY, {"width": 16}) == {
        "width": 16,
        "rate": 0.5,
        "augment": True,
    }


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"widht": 8},
            "options.widht: toy has no such option; it has: width, rate, augment",
        ),
        ({"width": 3}, "options.width of toy is 3; it must be at least 4"),
        ({"width": 17}, "options.width of toy is 17; it must be at most 16"),
        ({"width": "8"}, "options.width of toy is '8', a str; it must be a int, such as 8"),
        ({"width": True}, "options.width of toy is True, a bool; it must be a int, such as 8"),
        ({"augment": 1}, "options.augment of toy is 1, a int; it must be a bool, such as True"),
        ({"rate": float("nan")}, "options.rate of toy is not a number"),
    ],
)
def test_a_wrong_option_is_named_with_what_would_be_right(given: Options, text: str) -> None:
    with pytest.raises(OptionError) as caught:
        complete_options(ENTRY, given)
    assert str(caught.value) == text
