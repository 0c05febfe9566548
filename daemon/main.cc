// weightsyncd: one for each node. daemon/run.h has its exit codes.

#include "daemon/run.h"

int main(int argc, char** argv) {
  return weightsync::daemon::RunDaemon(argc, argv);
}
