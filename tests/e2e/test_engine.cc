// An engine in a process of its own, to be killed: test_engine ADDRESS REPLICA
// WORKERS. Serves until it is.
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "tests/e2e/cluster.h"

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  weightsync::e2e::TestReplica replica(
      std::vector<std::string>(static_cast<size_t>(std::atoi(argv[3])),
                               argv[1]),
      argv[2]);
  while (true) pause();
}
