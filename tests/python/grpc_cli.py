#!/usr/bin/env python3
"""A small grpc_cli: looks at a server and calls it by reflection alone, with text format.

Understands the forms of grpc_cli's command line that README.md uses:
  grpc_cli ls ADDRESS [SERVICE|METHOD] [-l]
  grpc_cli type ADDRESS MESSAGE
  grpc_cli call ADDRESS METHOD 'TEXT FORMAT'
Nothing of weightsync is compiled in: what a server does not describe cannot be called.
"""

import sys

import grpc
from google.protobuf import descriptor_pb2
from google.protobuf import descriptor_pool
from google.protobuf import message_factory
from google.protobuf import text_format
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

DEADLINE_SECONDS = 30


class Server:
    """A server seen through its reflection service."""

    def __init__(self, address):
        self._channel = grpc.insecure_channel(address)
        self._database = ProtoReflectionDescriptorDatabase(self._channel)
        self._pool = descriptor_pool.DescriptorPool(self._database)

    def close(self):
        self._channel.close()

    def services(self):
        """Full names of all services."""
        return sorted(self._database.get_services())

    def service(self, name):
        """The descriptor of a service; KeyError when the server knows none of that name."""
        return self._pool.FindServiceByName(name)

    def method(self, name):
        """The descriptor of "package.Service.Method" or "package.Service/Method"."""
        service, _, method = name.replace("/", ".").rpartition(".")
        return self.service(service).methods_by_name[method]

    def message_type(self, name):
        return self._pool.FindMessageTypeByName(name)

    def new_message(self, descriptor, text=""):
        message = message_factory.GetMessageClass(descriptor)()
        text_format.Parse(text, message, descriptor_pool=self._pool)
        return message

    def stub(self, name):
        """A callable of grpc for a method, of the method's own kind."""
        method = self.method(name)
        proto = descriptor_pb2.MethodDescriptorProto()
        method.CopyToProto(proto)
        make = {
            (False, False): self._channel.unary_unary,
            (False, True): self._channel.unary_stream,
            (True, False): self._channel.stream_unary,
            (True, True): self._channel.stream_stream,
        }[proto.client_streaming, proto.server_streaming]
        return make(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )

    def call(self, name, text="", timeout=DEADLINE_SECONDS):
        """Calls a method with one request; returns the list of answers (one, if not a stream)."""
        request = self.new_message(self.method(name).input_type, text)
        stub = self.stub(name)
        if isinstance(stub, (grpc.StreamUnaryMultiCallable, grpc.StreamStreamMultiCallable)):
            request = iter([request])
        answer = stub(request, timeout=timeout)
        if isinstance(stub, (grpc.UnaryStreamMultiCallable, grpc.StreamStreamMultiCallable)):
            return list(answer)
        return [answer]


def describe(descriptor):
    """A descriptor in the language of .proto files, roughly."""
    lines = [f"message {descriptor.name} {{"]
    for field in descriptor.fields:
        kind = field.message_type or field.enum_type
        name = kind.full_name if kind else descriptor_pb2.FieldDescriptorProto.Type.Name(field.type)
        lines.append(f"  {name} {field.name} = {field.number};")
    return "\n".join(lines + ["}"])


def run(arguments, address=None):
    """Executes one command line without its first word. Returns what it prints.

    With `address`, that one is used in place of the one that is written.
    """
    verb, *rest = arguments
    long = "-l" in rest
    rest = [word for word in rest if word != "-l"]
    server = Server(address or rest[0])
    try:
        if verb == "ls":
            if len(rest) == 1:
                return "\n".join(server.services())
            try:
                service = server.service(rest[1])
            except KeyError:
                method = server.method(rest[1])
                return f"{method.name}({method.input_type.full_name}) -> {method.output_type.full_name}"
            if not long:
                return "\n".join(method.name for method in service.methods)
            return "\n".join(
                f"rpc {m.name}({m.input_type.full_name}) returns ({m.output_type.full_name})"
                for m in service.methods
            )
        if verb == "type":
            return describe(server.message_type(rest[1]))
        if verb == "call":
            answers = server.call(rest[1], rest[2] if len(rest) > 2 else "")
            return "\n".join(text_format.MessageToString(answer) for answer in answers)
        raise ValueError(f"grpc_cli: {verb} is not one of ls, type, call")
    finally:
        server.close()


def main(arguments):
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(run(arguments))
    except grpc.RpcError as error:
        print(f"{error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    except (KeyError, ValueError, text_format.ParseError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
