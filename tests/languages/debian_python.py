"""A trainer and a worker in one process, for a Python whose gRPC and protobuf are the distribution's.

  PYTHONPATH=FOLDER_OF_THE_PACKAGE /usr/bin/python3 tests/languages/debian_python.py ADDRESS
"""

import sys

import google.protobuf
import grpc
import numpy
import weightsync

address = sys.argv[1]
mine = {"w": numpy.arange(12, dtype=numpy.float32).reshape(3, 4)}
live = {"w": numpy.zeros((3, 4), numpy.float32)}
with weightsync.Trainer("debian", address=address) as trainer:
    trainer.register(mine)
    with weightsync.Worker("debian", "r", live, address=address) as worker:
        worker.wait_registered()
        assert trainer.publish().wait(60).version == 1
        assert (live["w"] == mine["w"]).all()
        with weightsync.Admin(address) as admin:
            (replica,) = admin.call("ListReplicas", parent="models/-").replicas
            assert replica.name == "models/debian/replicas/r" and replica.version == 1
            try:
                admin.call("GetModel", name="models/nowhere")
            except weightsync.NotFoundError as error:
                assert error.reason == "MODEL_UNKNOWN"
print(f"grpc {grpc.__version__} protobuf {google.protobuf.__version__}")
