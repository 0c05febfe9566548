"""Lists the replicas of a model and watches a version until it has ended, without the package weightsync.

  protoc -I proto --plugin=protoc-gen-grpc_python=/usr/bin/grpc_python_plugin --python_out=STUBS \
    --grpc_python_out=STUBS proto/weightsync/v1/{admin,types}.proto
  PYTHONPATH=STUBS python3 tests/languages/watch.py ADDRESS models/MODEL VERSION
"""

import re
import sys

import grpc
from weightsync.v1 import admin_pb2, admin_pb2_grpc


def main(address, model, version):
    with grpc.insecure_channel(address) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        page = ""
        while True:
            answer = admin.ListReplicas(
                admin_pb2.ListReplicasRequest(parent=model, page_size=1, page_token=page), timeout=60
            )
            for replica in answer.replicas:
                state = admin_pb2.Replica.State.Name(replica.state)
                print(f"replica {replica.name} version {replica.version} {state} workers {len(replica.workers)}")
            page = answer.next_page_token
            if not page:
                break
        request = admin_pb2.WatchVersionRequest(name=f"{model}/versions/{version}")
        for found in admin.WatchVersion(request, timeout=60):
            print(f"{found.name} {admin_pb2.Version.State.Name(found.state)} {found.total_bytes} bytes")
        try:
            admin.GetModel(admin_pb2.GetModelRequest(name="models/nowhere"), timeout=60)
        except grpc.RpcError as error:
            details = dict(error.trailing_metadata()).get("grpc-status-details-bin", b"")
            reason = re.search(rb"[A-Z]{3,}(_[A-Z]+)+", details)
            print(f"error {error.code().value[0]} {reason.group().decode() if reason else ''}")


if __name__ == "__main__":
    main(*sys.argv[1:])
