// weightsync_device_agent: the child process of weightsyncd that has a GPU. Not
// a program to start by hand.

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "glog/logging.h"
#include "transport/cuda/agent/agent_server.h"

int main(int argc, char** argv) {
  constexpr char kFlag[] = "--device_agent=";
  if (argc != 2 || strncmp(argv[1], kFlag, strlen(kFlag)) != 0) {
    fprintf(stderr,
            "weightsync_device_agent: weightsyncd starts this where it is told "
            "--group=nccl\n");
    return 2;
  }
  const int socket = atoi(argv[1] + strlen(kFlag));
  // The daemon's sockets are not for its children to hold.
  close_range(static_cast<unsigned>(socket) + 1, ~0U, 0);
  FLAGS_logtostderr = true;
  google::InitGoogleLogging(argv[0]);
  return weightsync::transport::cuda::RunDeviceAgent(socket);
}
