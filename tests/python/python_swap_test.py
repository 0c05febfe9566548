"""Two sets of tensors that a worker swaps between: they must be the same ones."""

import numpy
import pytest
import weightsync
from weightsync import WeightsyncError

import cluster


@pytest.fixture(scope="module")
def address():
    with cluster.Cluster() as here:
        yield here.nodes[0].socket


@pytest.fixture
def model():
    return "swapped"


def test_sets_to_swap_between_must_be_the_same(address, model):
    """Whatever is in one only, or tied in one only, is named; nothing beside a set is read."""
    shared = numpy.zeros((4, 4), numpy.float32)
    first = {"a.weight": numpy.zeros((6, 2), numpy.float32), "embed": shared, "head": shared}
    for spare, name in [
        ({}, "a.weight"),
        ({n: t.copy() for n, t in first.items() if n != "a.weight"}, "a.weight"),
        ({**first, "more": numpy.zeros(2, numpy.float32)}, "more"),
        ({n: t.copy() for n, t in first.items()}, "head"),
        ({**first, "a.weight": numpy.zeros((3, 3), numpy.float32)}, "a.weight"),
    ]:
        with pytest.raises(WeightsyncError) as error:
            weightsync.Worker(model, "r", first, spare=spare, swap=lambda *_: None, address=address)
        assert error.value.reason == "SWAP_INVALID" and name in error.value.message, error.value
    with pytest.raises(WeightsyncError) as error:
        weightsync.Worker(
            model, "r", {"w": ((4,), "f32")}, load=print, spare={}, swap=lambda *_: None, address=address
        )
    assert error.value.reason == "SWAP_INVALID"


def test_tied_tensors_may_be_swapped(address, model):
    """Both sets are tied, the spare one is in another order, and has a tensor that no trainer knows."""

    def tied(value):
        array = numpy.full((4, 4), value, numpy.float32)
        return {"embed": array, "head": array, "w": numpy.full(3, value, numpy.float32)}

    first = {**tied(0), "mine": numpy.full(2, 7, numpy.float32)}
    spare = dict(reversed(list({**tied(0), "mine": numpy.full(2, 7, numpy.float32)}.items())))
    flips = []
    with weightsync.Trainer(model, address=address) as trainer:
        trainer.register(tied(1))
        with pytest.warns(weightsync.names.PatternWarning, match="mine"):
            worker = weightsync.Worker(
                model,
                "r",
                first,
                spare=spare,
                swap=lambda number, update_id: flips.append(number),
                policy="warn",
                address=address,
            )
        with worker:
            worker.wait_registered()
            trainer.publish(pause_mode="none").wait(60)
    assert flips == [1]
    for name in ("embed", "head", "w"):
        assert (spare[name] == 1).all() and (first[name] == 0).all()
    assert list(spare["mine"]) == [7, 7]
