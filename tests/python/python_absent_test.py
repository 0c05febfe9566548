"""A version that not all known replicas serve says so: in Python's result, and in weightsyncctl's words."""

import json
import subprocess

import numpy
import pytest
import weightsync

import cluster


@pytest.fixture(scope="module")
def daemon():
    with cluster.Cluster() as here:
        yield here


@pytest.fixture
def address(daemon):
    return daemon.nodes[0].socket


def weights(value):
    return {"w": numpy.full((32, 8), value, numpy.float32)}


def ctl(address, *words):
    done = subprocess.run(
        [cluster.CTL, *words, f"--address={address}"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def half(model, replica, index, address, live, incarnation):
    return weightsync.Worker(
        model, replica, live, index=index, workers=2, incarnation=incarnation, address=address
    )


def test_who_does_not_serve_it_yet_is_named(address):
    first, second = weights(0), weights(0)
    with weightsync.Worker("m", "whole", first, address=address) as whole:
        whole.wait_registered()
        replica = weightsync.Replica("m", "half", workers=2, address=address)
        with replica, half("m", "half", 0, address, second, replica.incarnation) as one:
            replica.wait_registered()
            one.wait_registered()
            with weightsync.Trainer("m", address=address) as trainer:
                update = trainer.publish(tensors=weights(1))
                result = update.wait(60)
                assert result.absent_replicas == ("models/m/replicas/half",)
                assert result.serving_count == 1 and result.replica_count == 1
                sentence = (
                    f"1 replica serves {result.version_name}; not yet: half (not whole when it began, gets it "
                    "when it comes)"
                )
                assert str(result) == sentence
                assert str(update.progress()) == sentence
                assert "not yet: half" in ctl(address, "versions", "m")
                assert "not yet: half" in ctl(address, "versions", "m/latest")
                assert "not yet: half" in ctl(address, "watch", f"m/{result.version}")
                assert json.loads(ctl(address, "versions", "m/latest", "--json"))["absentReplicas"] == [
                    "models/m/replicas/half"
                ]
                # The other half comes, and with it the version.
                with half("m", "half", 1, address, weights(0), replica.incarnation) as other:
                    cluster.wait_until(
                        lambda: other.version == one.version == result.version, "it gets it when it comes"
                    )
                    assert (second["w"] == 1).all()
                    # And then nobody is told any more that it does not serve it.
                    cluster.wait_until(
                        lambda: str(update.progress()) == f"2 replicas serve {result.version_name}",
                        "it is counted among those who serve it",
                    )
                    for words in (("versions", "m"), ("versions", "m/latest"), ("watch", f"m/{result.version}")):
                        assert "not yet" not in ctl(address, *words), words
                    result = trainer.publish(tensors=weights(2)).wait(60)
                    assert result.absent_replicas == ()
                    assert str(result) == f"2 replicas serve {result.version_name}"


def test_a_removal_names_who_may_still_hold_it(address):
    live = weights(0)
    replica = weightsync.Replica("lora", "half", workers=2, address=address, removable=True)
    with replica, half("lora", "half", 0, address, live, replica.incarnation) as one:
        replica.wait_registered()
        one.wait_registered()
        with weightsync.Trainer("lora", address=address) as trainer:
            trainer.publish(tensors=weights(1)).wait(60)
        said = ctl(address, "remove", "lora")
        assert said.strip().endswith("1 replica may still hold it and drops it when it comes: half")
        with weightsync.Admin(address) as admin:
            model = admin.call("RemoveModel", name="models/lora", timeout=30)
        assert model.removed and list(model.absent_replicas) == ["models/lora/replicas/half"]


def test_nobody_serves_what_nobody_wants(address):
    with weightsync.Trainer("lonely", address=address) as trainer:
        result = trainer.publish(tensors=weights(1)).wait(60)
        assert str(result) == "no replica serves models/lonely/versions/1"
        assert result.serving_count == 0


def test_right_after_a_restart_the_journal_knows_who_there_is(tmp_path):
    """The daemon is back before its replicas are: they are not forgotten."""
    with cluster.Cluster() as here:
        address = here.nodes[0].socket
        with weightsync.Worker("m", "engine", weights(0), address=address) as worker:
            worker.wait_registered()
            with weightsync.Trainer("m", address=address) as trainer:
                assert str(trainer.publish(tensors=weights(1)).wait(60)).startswith("1 replica serves")
        # The engine is gone for now: so nothing of it comes back before the publish.
        here.restart_node(0)
        with weightsync.Trainer("m", address=address) as trainer:
            result = trainer.publish(tensors=weights(2)).wait(60)
        assert result.serving_count == 0
        assert result.absent_replicas == ("models/m/replicas/engine",)
        # What is not known of the first is not said to be nothing.
        (line,) = [row for row in ctl(address, "versions", "m").splitlines() if row.split()[1:2] == ["1"]]
        assert " 0 s" not in line and " 0 B" not in line, line
