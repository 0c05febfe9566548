"""Clusters that several test files share: made once, by the first that needs one."""

import pytest

import cluster


@pytest.fixture(scope="session")
def demo():
    """Two daemons; the replicas of a small model on both of them serve its third version."""
    with cluster.demo() as here:
        yield here
