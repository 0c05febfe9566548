"""Everything that the README does with grpc_cli works with reflection alone.

The client here has no generated code of weightsync: it asks the server for descriptors, parses
the README's text-format requests with them, and makes the calls.
"""

import subprocess
import sys

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

import grpc_cli
import readme

SERVICES = {
    "grpc.channelz.v1.Channelz",
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
    "weightsync.v1.AdminService",
    "weightsync.v1.NodeService",
    "weightsync.v1.ReplicaService",
    "weightsync.v1.TrainerService",
}


@pytest.fixture(params=["loopback", "unix"])
def address(demo, request):
    node = demo.nodes[0]
    return node.listen if request.param == "loopback" else node.socket


def test_reflection_lists_every_service(address):
    server = grpc_cli.Server(address)
    try:
        assert SERVICES <= set(server.services())
    finally:
        server.close()


def test_reflection_describes_every_method_and_message(address):
    server = grpc_cli.Server(address)
    try:
        for name in SERVICES:
            methods = server.service(name).methods
            assert methods, name
            for method in methods:
                # Reaching into the types fetches the files that define them.
                assert method.input_type.full_name
                assert method.output_type.full_name
        version = server.message_type("weightsync.v1.Version")
        assert "update_id" in version.fields_by_name
        assert "phases" in version.fields_by_name
    finally:
        server.close()


def readme_commands():
    return [pytest.param(words[1:], id=" ".join(words[1:])) for words in readme.commands("grpc_cli")]


def test_the_readme_has_examples():
    called = [words for words in readme.commands("grpc_cli") if words[1] == "call"]
    assert len(called) >= 5


@pytest.mark.parametrize("words", readme_commands())
def test_the_example_works(demo, words):
    """Runs the command as it is written, at the address of a cluster that runs."""
    assert grpc_cli.run(words, address=demo.nodes[0].listen).strip()


@pytest.mark.parametrize("words", readme_commands())
def test_every_node_answers(demo, words):
    """A daemon that does not coordinate asks the one that does."""
    assert grpc_cli.run(words, address=demo.nodes[1].listen).strip()


def test_an_error_says_what_to_do(address):
    server = grpc_cli.Server(address)
    try:
        with pytest.raises(grpc.RpcError) as error:
            server.call("weightsync.v1.AdminService.GetModel", 'name: "models/no-such-model"')
        assert error.value.code() == grpc.StatusCode.NOT_FOUND
        assert "no-such-model" in error.value.details()
        trailers = {key: value for key, value in error.value.trailing_metadata()}
        # google.rpc.Status with an ErrorInfo in it.
        assert b"MODEL_UNKNOWN" in trailers["grpc-status-details-bin"]
        assert b"weightsync.dev" in trailers["grpc-status-details-bin"]
    finally:
        server.close()


def test_health(address):
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_channelz(address):
    with grpc.insecure_channel(address) as channel:
        channelz = channelz_pb2_grpc.ChannelzStub(channel)
        servers = channelz.GetServers(channelz_pb2.GetServersRequest(), timeout=10).server
        assert servers
        assert sum(server.data.calls_started for server in servers) > 0


def test_the_small_grpc_cli_of_the_readme_runs(demo):
    """tests/python/grpc_cli.py as a program, for those who have no grpc_cli."""
    program = [sys.executable, "-B", str(readme.ROOT / "tests/python/grpc_cli.py")]
    listed = subprocess.run(
        [*program, "ls", demo.nodes[0].listen], capture_output=True, text=True, timeout=60
    )
    assert listed.returncode == 0, listed.stderr
    assert SERVICES <= set(listed.stdout.split())
    unknown = subprocess.run(
        [*program, "call", demo.nodes[0].listen, "weightsync.v1.AdminService.GetNode", 'name: "nodes/x"'],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert unknown.returncode == 1
    assert unknown.stderr.startswith("NOT_FOUND: ")
