#include "transport/cuda/sim_control.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace gpu_sim {
namespace {

std::string InDir(const std::string& name) {
  const char* dir = getenv("GPU_SIM_DIR");
  if (dir == nullptr) abort();
  return std::string(dir) + "/" + name;
}

}  // namespace

void Plant(const std::string& rules) {
  std::string lines = rules;
  std::replace(lines.begin(), lines.end(), ';', '\n');
  // A new file each time: it is told from the old one even within a tick of
  // the clock.
  const std::string path = InDir("faults");
  std::ofstream(path + ".new") << lines << "\n";
  rename((path + ".new").c_str(), path.c_str());
}

std::string TakeFindings() {
  const std::string path = InDir("findings");
  for (int i = 0; i < 100; ++i) {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    if (!text.str().empty()) {
      unlink(path.c_str());
      return text.str();
    }
    usleep(2000);
  }
  return "";
}

std::string Notes() {
  std::ifstream file(InDir("notes"));
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string TakeNotes() {
  std::string notes = Notes();
  unlink(InDir("notes").c_str());
  return notes;
}

}  // namespace gpu_sim
