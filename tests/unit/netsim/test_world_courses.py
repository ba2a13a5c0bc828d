"""What a world's links are at a moment, and when they change."""

from itertools import pairwise

from netsim.network.course import WorldCourse
from netsim.network.world_file import parse_world

SECOND_US = 1_000_000
WORLD = parse_world(
    """
    seed = 3
    [[nodes]]
    name = "attic"
    profile = "A"
    [[nodes]]
    name = "van"
    profile = "lte-moving"
    churn = { session = { scale = "60s" }, absence = { scale = "5s" } }
    [[faults]]
    kind = "flap"
    nodes = "attic"
    at = "10s"
    for = "9s"
    every = "4s"
    [[faults]]
    kind = "partition"
    nodes = "attic"
    at = "30s"
    """,
    source="w.toml",
)


def test_flap_cuts_for_half_of_each_turn_and_a_partition_for_good() -> None:
    changes = WorldCourse(WORLD).changes("attic", 100 * SECOND_US)
    assert [(at_us // SECOND_US, state.is_cut) for at_us, state in changes] == [
        (0, False),
        (10, True),
        (12, False),
        (14, True),
        (16, False),
        (18, True),
        (19, False),
        (30, True),
    ]


def test_changes_of_all_nodes_come_in_order_of_time() -> None:
    changes = list(WorldCourse(WORLD).all_changes(60 * SECOND_US))
    assert all(before[:2] < after[:2] for before, after in pairwise(changes))
    assert {name for _, name, _ in changes} == {"attic", "van"}
    alone = list(WorldCourse(WORLD).changes("van", 60 * SECOND_US))
    assert [(at_us, state) for at_us, name, state in changes if name == "van"] == alone


def test_churn_takes_away_those_who_have_it() -> None:
    course = WorldCourse(WORLD)
    assert list(course.absences("attic", 3600 * SECOND_US)) == []
    away = list(course.absences("van", 3600 * SECOND_US))
    assert 20 < len(away) < 120
    assert away == list(WorldCourse(WORLD).absences("van", 3600 * SECOND_US))


def test_another_node_moves_nobodys_dice() -> None:
    more = parse_world(
        'seed = 3\n[[nodes]]\nname = "first"\nprofile = "stress"\n'
        '[[nodes]]\nname = "van"\nprofile = "lte-moving"\n',
        source="w.toml",
    )
    looks = [WorldCourse(each).state("van", 5 * SECOND_US) for each in (more, WORLD)]
    assert looks[0] == looks[1]
