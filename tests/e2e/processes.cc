#include "tests/e2e/processes.h"

#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "glog/logging.h"

namespace weightsync {
namespace e2e {

TempDirectory::TempDirectory() : path_("/tmp/weightsync-test.XXXXXX") {
  PCHECK(mkdtemp(&path_[0]) != nullptr);
}

TempDirectory::~TempDirectory() {
  nftw(
      path_.c_str(),
      [](const char* path, const struct stat*, int, struct FTW*) {
        return remove(path);
      },
      16, FTW_DEPTH | FTW_PHYS);
}

std::vector<std::string> TempDirectory::List() const {
  std::vector<std::string> names;
  DIR* directory = opendir(path_.c_str());
  PCHECK(directory != nullptr);
  while (const dirent* entry = readdir(directory)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  closedir(directory);
  std::sort(names.begin(), names.end());
  return names;
}

Process::Process(const std::vector<std::string>& arguments, std::string log)
    : log_(std::move(log)) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) {
    argv.push_back(const_cast<char*>(argument.c_str()));
  }
  argv.push_back(nullptr);
  const int out =
      open(log_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  PCHECK(out >= 0) << log_;
  const pid_t parent = getpid();
  pid_ = fork();
  PCHECK(pid_ >= 0);
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    dup2(out, STDOUT_FILENO);
    dup2(out, STDERR_FILENO);
    execv(argv[0], argv.data());
    _exit(127);
  }
  close(out);
}

Process::~Process() {
  if (Running()) {
    Signal(SIGKILL);
    Wait(absl::Seconds(10));
  }
}

bool Process::Running() { return !Wait(absl::ZeroDuration()).has_value(); }

void Process::Signal(int signal) {
  if (!exit_.has_value()) kill(pid_, signal);
}

absl::optional<int> Process::Wait(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (!exit_.has_value()) {
    int status = 0;
    if (waitpid(pid_, &status, WNOHANG) == pid_) {
      exit_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    } else if (absl::Now() >= deadline) {
      break;
    } else {
      absl::SleepFor(absl::Milliseconds(10));
    }
  }
  return exit_;
}

std::string Process::Log() const {
  std::ostringstream text;
  text << std::ifstream(log_).rdbuf();
  const std::string all = text.str();
  constexpr size_t kShown = 4000;
  return absl::StrCat(
      "--- ", log_, "\n",
      all.size() > kShown ? all.substr(all.size() - kShown) : all);
}

bool WaitUntil(const std::function<bool()>& condition, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (!condition()) {
    if (absl::Now() >= deadline) return false;
    absl::SleepFor(absl::Milliseconds(20));
  }
  return true;
}

std::string DataPath(const std::string& path) {
  const char* sources = getenv("TEST_SRCDIR");
  const char* workspace = getenv("TEST_WORKSPACE");
  if (sources == nullptr || workspace == nullptr) return "bazel-bin/" + path;
  return absl::StrCat(sources, "/", workspace, "/", path);
}

pid_t ChildOf(pid_t parent, const std::string& name) {
  pid_t found = 0;
  DIR* proc = opendir("/proc");
  while (const dirent* entry = readdir(proc)) {
    std::ifstream file(absl::StrCat("/proc/", entry->d_name, "/stat"));
    std::string line;
    if (!std::getline(file, line)) continue;
    const size_t end = line.rfind(')');
    if (end == std::string::npos) continue;
    std::istringstream rest(line.substr(end + 1));
    std::string state;
    pid_t ppid = 0;
    rest >> state >> ppid;
    if (ppid == parent && line.find("(" + name.substr(0, 15)) != line.npos)
      found = static_cast<pid_t>(atoi(entry->d_name));
  }
  closedir(proc);
  return found;
}

}  // namespace e2e
}  // namespace weightsync
