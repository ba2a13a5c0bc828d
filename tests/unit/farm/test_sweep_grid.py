"""Points of a sweep, and which of them go on to the next rung."""

from collections.abc import Callable

import pytest

from hypergpu.errors import HyperGPUError
from hypergpu.jobfile.reading import parse_job
from hypergpu.user.farm.sweep_grid import grid_points, metric_mode, point_specs
from hypergpu.user.farm.sweep_plan import sweep_plan
from hypergpu.user.farm.sweep_rungs import rungs_of, survivors

SPEC = parse_job('workload = "digits-mlp"\ntraining = { rounds = 2, inner_steps = 5 }')


def test_a_grid_is_every_combination_and_the_last_key_varies_fastest() -> None:
    points = grid_points({"lr": [0.1, 0.2], "options.width": [8, 16]})
    assert [[*point.values()] for point in points] == [[0.1, 8], [0.1, 16], [0.2, 8], [0.2, 16]]
    assert [*points[0]] == ["inner.learning_rate", "options.width"]
    specs = point_specs(SPEC, points)
    assert [(spec.inner.learning_rate, spec.options["width"]) for spec in specs] == [
        (0.1, 8),
        (0.1, 16),
        (0.2, 8),
        (0.2, 16),
    ]


def test_points_may_be_a_list_with_keys_of_their_own() -> None:
    points: list[dict[str, int | str]] = [{"training.seed": 1}, {"inner.optimizer": "sgd"}]
    specs = point_specs(SPEC, grid_points(points))
    assert (specs[0].training.seed, specs[1].inner.optimizer) == (1, "sgd")


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda: grid_points({}), "the sweep has 0 points"),
        (lambda: grid_points({"lr": []}), "the grid's lr is no list of values"),
        (lambda: grid_points({"rounds": "9"}), "the grid's rounds is no list of values"),
        (lambda: grid_points({"inner.lerning_rate": [1.0]}), "did you mean inner.learning_rate"),
        (lambda: grid_points({"outer.momentum": [0.5]}), "plays no part in a sweep"),
        (lambda: grid_points({"training.nodes": [2]}), "training.nodes plays no part in a sweep"),
        (lambda: grid_points([{"lr": 1.0}, {"lr": 1.0}]), "the points 0 and 1 are equal"),
        (lambda: grid_points({"lr": [0.1] * 200, "options.a": [1] * 200}), "has 40000 points"),
        (lambda: point_specs(SPEC, [{"inner.beta1": -1.0}]), r'point \{"inner.beta1":-1.0\}'),
        (lambda: point_specs(SPEC, [{"options.width": 7}]), "options.width"),
        (lambda: point_specs(parse_job('workload = "null"'), [{}]), "null trains nothing"),
        (lambda: metric_mode("zing", ""), "does not say whether it falls or rises"),
        (lambda: sweep_plan(SPEC, {"lr": [0.1]}, None, {"stop_early": 1}), "stop_early is 1"),
        (lambda: sweep_plan(SPEC, {"lr": [0.1]}, None, {"metric": "f1"}), "has no metric 'f1'"),
    ],
)
def test_what_is_no_sweep_is_refused_with_its_reason(
    act: Callable[[], object], reason: str
) -> None:
    with pytest.raises(HyperGPUError, match=reason):
        act()


def test_a_users_path_does_not_travel() -> None:
    spec = parse_job('workload = "text-gpt"\ndata.path = "/home/me/secret"')
    (point_spec,) = point_specs(spec, [{"inner.learning_rate": 0.1}])
    assert point_spec.data.path == "data"


def test_rungs_take_more_steps_with_fewer_points() -> None:
    assert [each.steps_of(270) for each in rungs_of(27, 3)] == [10, 30, 90, 270]
    assert [each.steps_of(100) for each in rungs_of(9, 3)] == [12, 34, 100]
    assert [each.steps_of(100) for each in rungs_of(2, 3)] == [100]
    assert len(rungs_of(10_000, 2)) == 4
    assert len(rungs_of(27, 0)) == 1


def test_the_best_go_on_and_points_without_a_metric_do_not() -> None:
    values = {4: 0.3, 5: 0.1, 7: 0.1, 8: 0.9}
    points = (4, 5, 6, 7, 8, 9)
    assert survivors(values, 3, "min", points) == (5, 7)
    assert survivors(values, 2, "max", points) == (4, 5, 8)
    assert survivors({9: 1.0}, 3, "min", points) == (9,)
