import numpy as np
from sklearn.datasets import load_digits

from hypergpu.workloads.digits.load import digits
from hypergpu.workloads.digits.softmax import DigitsSoftmax
from hypergpu.workloads.workload import ArraySamples


def as_sets() -> tuple[ArraySamples, ArraySamples]:
    dataset = digits()
    assert isinstance(dataset.train, ArraySamples)
    assert isinstance(dataset.test, ArraySamples)
    return dataset.train, dataset.test


def rows(samples: ArraySamples) -> set[bytes]:
    return {row.tobytes() for row in samples.inputs}


def test_they_are_the_digits_that_scikit_learn_ships() -> None:
    train, test = as_sets()
    pixels, labels = load_digits(return_X_y=True)
    ours = np.concatenate([train.inputs, test.inputs]) * 16
    joined = np.column_stack([ours, np.concatenate([train.targets, test.targets])])
    theirs = np.column_stack([pixels, labels])
    np.testing.assert_array_equal(np.unique(joined, axis=0), np.unique(theirs, axis=0))


def test_no_image_is_both_trained_on_and_held_out() -> None:
    train, test = as_sets()
    assert len(train.targets) + len(test.targets) == 1797
    assert not rows(train) & rows(test)


def test_every_digit_has_its_fifth_held_out() -> None:
    train, test = as_sets()
    shares = np.bincount(test.targets) / (np.bincount(test.targets) + np.bincount(train.targets))
    assert 0.19 < shares.min() <= shares.max() <= 0.2


def test_the_softmax_gradient_is_the_slope_of_its_loss() -> None:
    workload = DigitsSoftmax()
    inputs, targets = workload.load("").train.batch(np.arange(20))
    draw = np.random.Philox(key=1).random_raw(650) / 2.0**64 - 0.5
    parameters = {
        "bias": draw[:10].astype(np.float32),
        "weight": draw[10:].reshape(64, 10).astype(np.float32),
    }
    _, gradient = workload.gradient(parameters, inputs, targets)
    for name, place in (("bias", (3,)), ("weight", (20, 7))):
        losses = []
        for step in (-1e-2, 1e-2):
            moved = {key: array.copy() for key, array in parameters.items()}
            moved[name][place] += step
            losses.append(workload.gradient(moved, inputs, targets)[0])
        assert abs((losses[1] - losses[0]) / 2e-2 - gradient[name][place]) < 1e-3
