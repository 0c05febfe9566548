#include "tests/gpu/sim/faults.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "tests/gpu/sim/machine.h"

namespace gpu_sim {
namespace {

struct Rule {
  std::string call, process;
  int64_t after = 0, count = 1;
  bool hang = false;
  Fault fault;
  int64_t seen = 0, struck = 0;
};

std::vector<Rule> Parse(std::istream& lines) {
  std::vector<Rule> rules;
  std::string line;
  while (std::getline(lines, line)) {
    Rule rule;
    std::istringstream words(line);
    std::string word;
    while (words >> word) {
      const size_t equals = word.find('=');
      if (equals == std::string::npos) Die("faults: not name=value: " + word);
      const std::string name = word.substr(0, equals);
      const std::string value = word.substr(equals + 1);
      const int number = std::atoi(value.c_str());
      if (name == "call") {
        rule.call = value;
      } else if (name == "process") {
        rule.process = value;
      } else if (name == "after") {
        rule.after = number;
      } else if (name == "count") {
        rule.count = number;
      } else if (name == "error") {
        rule.fault.error = number;
      } else if (name == "sticky") {
        rule.fault.sticky = number;
      } else if (name == "async") {
        rule.fault.async = number;
      } else if (name == "hang") {
        rule.hang = number != 0;
      } else if (name == "stall") {
        rule.fault.stall = number != 0;
      } else if (name == "note") {
        rule.fault.note = number;
      } else if (name == "no") {
        rule.fault.no = number != 0;
      } else if (name == "unexportable") {
        rule.fault.unexportable = number != 0;
      } else {
        Die("faults: unknown word: " + word);
      }
    }
    if (rule.call.empty()) continue;
    if (!rule.hang && !rule.fault.any()) Die("faults: nothing to do: " + line);
    rules.push_back(rule);
  }
  return rules;
}

}  // namespace

Fault Planted(const char* name, const std::string& given) {
  static std::mutex* const mutex = new std::mutex;
  static std::vector<Rule>* const rules = new std::vector<Rule>;
  static struct timespec read_at = {0, 0};
  static ino_t inode = 0;
  static const std::string* const path = new std::string(Dir() + "/faults");
  static const std::string* const role =
      new std::string(Env("GPU_SIM_ROLE", ""));
  Fault fault;
  bool hang = false;
  {
    std::lock_guard<std::mutex> lock(*mutex);
    struct stat stat;
    if (::stat(path->c_str(), &stat) != 0) {
      rules->clear();
      inode = 0;
      return fault;
    }
    if (stat.st_ino != inode || stat.st_mtim.tv_sec != read_at.tv_sec ||
        stat.st_mtim.tv_nsec != read_at.tv_nsec) {
      inode = stat.st_ino;
      read_at = stat.st_mtim;
      std::ifstream file(*path);
      *rules = Parse(file);
    }
    for (Rule& rule : *rules) {
      if (rule.call != name) continue;
      if (!rule.process.empty() && rule.process != *role) continue;
      if (rule.seen++ < rule.after) continue;
      if (rule.count > 0 && rule.struck >= rule.count) continue;
      ++rule.struck;
      fault = rule.fault;
      hang = rule.hang;
      break;
    }
  }
  if (fault.note != 0) {
    const std::string who =
        fault.note > 1 ? " by " + std::to_string(getpid()) : "";
    const std::string line =
        name + who + (given.empty() ? "" : " " + given) + "\n";
    const int fd = open((Dir() + "/notes").c_str(),
                        O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0 || write(fd, line.data(), line.size()) !=
                      static_cast<ssize_t>(line.size()))
      Die("notes");
    close(fd);
  }
  while (hang) pause();
  return fault;
}

}  // namespace gpu_sim
