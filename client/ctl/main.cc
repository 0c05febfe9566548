// weightsyncctl: look at a cluster. See help.cc.
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "client/ctl/commands.h"

int main(int argc, char** argv) {
  weightsync::ctl::Screen screen;
  screen.out = &std::cout;
  screen.err = &std::cerr;
  screen.terminal = isatty(STDOUT_FILENO) != 0;
  winsize size = {};
  if (screen.terminal && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 &&
      size.ws_col > 0) {
    screen.columns = size.ws_col;
  }
  const char* address = std::getenv("WEIGHTSYNC_ADDRESS");
  return weightsync::ctl::Run(std::vector<std::string>(argv + 1, argv + argc),
                              address == nullptr ? "" : address, screen);
}
