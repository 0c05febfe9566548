// Moves buckets down a chain of processes and compares with plain sockets. One
// process for each member:
//
//   hop_bench --index=0 --hosts=A,B     the source, which also reports
//   hop_bench --index=1 --hosts=A,B
//
// --bench=one_hop: speed from the first byte until the source knows that all is
// verified, over the best of plain sockets with 1, 2 and 4 streams; in pairs,
// one after the other. The source's digests are computed while frames leave, as
// a snapshot does.
// --bench=fanout: seconds until all receivers have verified everything, over
// the seconds that one plain transfer of the same bytes over one link takes.
//
// The source prints a JSON object.

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "gflags/gflags.h"
#include "glog/logging.h"
#include "tests/bench/plain_sockets.h"
#include "transport/digest_map.h"
#include "transport/landing.h"
#include "transport/tcp/endpoint.h"

DEFINE_string(bench, "one_hop", "one_hop or fanout");
DEFINE_string(name, "", "the name to report; --bench by default");
DEFINE_int32(index, 0, "this member's place in --hosts");
DEFINE_string(hosts, "127.0.0.1,127.0.0.1", "an IPv4 address for each member");
DEFINE_int32(port, 7400,
             "two ports for each member are taken from here on (members that "
             "share an address need different ones)");
DEFINE_int64(bytes, 1 << 30, "to move");
DEFINE_int64(bucket_bytes, 256 << 20, "of one bucket");
DEFINE_int32(streams, 2, "streams for each hop");
DEFINE_int32(runs, 9, "pairs");
DEFINE_bool(digest_before, false,
            "compute the source's digests before the clock starts");

namespace weightsync {
namespace bench {
namespace {

using transport::DigestRun;
using transport::Landing;
using transport::PlacedRun;
using transport::RunDigestMap;

const std::vector<int> kPlainStreams = {1, 2, 4};

double Seconds() {
  return static_cast<double>(absl::GetCurrentTimeNanos()) / 1e9;
}

// Of this process: what a loaded machine changes least.
double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// "CPU seconds for each transfer" of one process.
class CpuMeter {
 public:
  void Start() { start_ = CpuSeconds(); }
  void Stop() {
    sum_ += CpuSeconds() - start_;
    ++count_;
  }
  double mean() const { return count_ == 0 ? 0 : sum_ / count_; }

 private:
  double start_ = 0;
  double sum_ = 0;
  int count_ = 0;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half]
                                : (values[half - 1] + values[half]) / 2;
}

class Member {
 public:
  Member() : hosts_(absl::StrSplit(FLAGS_hosts, ',')), index_(FLAGS_index) {
    // As the store's arenas: what is sent is sent from the file.
    file_ = memfd_create("hop_bench", MFD_CLOEXEC);
    PCHECK(file_ >= 0 && ftruncate(file_, FLAGS_bytes) == 0);
    void* memory =
        mmap(nullptr, static_cast<size_t>(FLAGS_bytes), PROT_READ | PROT_WRITE,
             MAP_SHARED | MAP_POPULATE, file_, 0);
    PCHECK(memory != MAP_FAILED);
    data_ = static_cast<char*>(memory);
    for (int64_t at = 0; at < FLAGS_bytes; at += 4) {
      const uint32_t word = static_cast<uint32_t>(at * 2654435761u);
      if (index_ == 0) std::memcpy(data_ + at, &word, 4);
    }
    transport::tcp::EndpointOptions options;
    options.cluster_id = "bench";
    options.bind_host = hosts_[index_];
    options.first_port = options.last_port = DataPort(index_);
    options.streams = FLAGS_streams;
    auto endpoint = transport::tcp::Endpoint::Create(options);
    CHECK(endpoint.ok()) << endpoint.status();
    endpoint_ = *std::move(endpoint);
  }

  // Every receiver has a control connection to the source, and the first one
  // the plain data connections.
  void Connect() {
    if (index_ == 0) {
      const int listener = ListenPlain(hosts_[0], ControlPort());
      controls_.resize(hosts_.size() - 1);
      for (size_t i = 1; i < hosts_.size(); ++i) {
        const int fd = AcceptPlain(listener);
        int index = 0;
        CHECK(absl::SimpleAtoi(ReadLine(fd), &index));
        controls_[index - 1] = fd;
      }
      WriteLine(controls_[0], "plain");
      for (const int streams : kPlainStreams) {
        plain_.emplace_back();
        for (int i = 0; i < streams; ++i) {
          plain_.back().push_back(AcceptPlain(listener));
        }
      }
    } else {
      controls_ = {ConnectPlain(hosts_[0], ControlPort())};
      WriteLine(controls_[0], absl::StrCat(index_));
      if (index_ == 1) {
        CHECK_EQ(ReadLine(controls_[0]), "plain");
        for (const int streams : kPlainStreams) {
          plain_.emplace_back();
          for (int i = 0; i < streams; ++i) {
            plain_.back().push_back(ConnectPlain(hosts_[0], ControlPort()));
          }
        }
      }
    }
  }

  void Join() {
    transport::GroupSpec spec;
    spec.cluster_id = "bench";
    spec.group_id = "bench";
    spec.epoch = transport::Epoch{1, 1};
    spec.secret = "bench";
    for (size_t i = 0; i < hosts_.size(); ++i) {
      spec.members.push_back(
          {absl::StrCat("n", i),
           absl::StrCat(hosts_[i], ":", DataPort(static_cast<int>(i)))});
    }
    spec.self = index_;
    auto group = endpoint_->NewGroup(spec, transport::GroupOptions());
    CHECK(group.ok()) << group.status();
    group_ = *std::move(group);
    const absl::Status joined = group_->Join(absl::Seconds(30));
    CHECK(joined.ok()) << joined;
  }

  void MakeLandings() {
    landings_.clear();
    for (int64_t at = 0; at < FLAGS_bytes; at += FLAGS_bucket_bytes) {
      const int64_t size = std::min(FLAGS_bucket_bytes, FLAGS_bytes - at);
      auto map = std::make_shared<RunDigestMap>(std::vector<PlacedRun>{
          {0, DigestRun{static_cast<uint32_t>(landings_.size()), 0, size / 2,
                        2}}});
      landings_.push_back(std::make_shared<Landing>(
          landings_.size(),
          absl::MakeSpan(data_ + at, static_cast<size_t>(size)), map,
          transport::FileRange{file_, at}));
    }
  }

  // ---- The source ----

  double PlainSeconds(size_t which) {
    WriteLine(controls_[0], absl::StrCat("plain ", which));
    CHECK_EQ(ReadLine(controls_[0]), "ready");
    plain_cpu_.Start();
    const double start = Seconds();
    SendPlain(plain_[which], data_, FLAGS_bytes);
    const double seconds = Seconds() - start;
    plain_cpu_.Stop();
    return seconds;
  }

  double OurSeconds() {
    for (const int control : controls_) WriteLine(control, "ours");
    for (const int control : controls_) CHECK_EQ(ReadLine(control), "ready");
    our_cpu_.Start();
    MakeLandings();
    if (FLAGS_digest_before) MarkAll();
    const double start = Seconds();
    CHECK(group_->Move(landings_).ok());
    std::thread packer;
    if (!FLAGS_digest_before) packer = std::thread([this] { MarkAll(); });
    const absl::Status status = group_->Wait(absl::Seconds(30));
    const double seconds = Seconds() - start;
    if (packer.joinable()) packer.join();
    our_cpu_.Stop();
    CHECK(status.ok()) << status;
    for (const int control : controls_) {
      CHECK_EQ(
          ReadLine(control),
          absl::StrCat("digest ", landings_[0]->bucket_digest().ToString()));
    }
    return seconds;
  }

  void RunSource() {
    const double gib = static_cast<double>(FLAGS_bytes) / (1 << 30);
    const bool one_hop = FLAGS_bench == "one_hop";
    std::vector<double> ours, floors, ratios;
    std::vector<std::vector<double>> plain(kPlainStreams.size());
    OurSeconds();  // warm
    PlainSeconds(1);
    for (int run = 0; run < FLAGS_runs; ++run) {
      double mine = 0;
      if (run % 2 == 0) mine = OurSeconds();
      double best = 1e9;
      for (size_t i = 0; i < (one_hop ? kPlainStreams.size() : 1); ++i) {
        const double seconds = PlainSeconds(i);
        plain[i].push_back(gib / seconds);
        best = std::min(best, seconds);
      }
      if (run % 2 == 1) mine = OurSeconds();
      ours.push_back(mine);
      floors.push_back(best);
      ratios.push_back(one_hop ? best / mine : mine / best);
    }
    for (const int control : controls_) WriteLine(control, "quit");
    const std::string name = FLAGS_name.empty() ? FLAGS_bench : FLAGS_name;
    std::cerr << absl::StrFormat("%s: ours %.3f s", name, Median(ours));
    for (size_t i = 0; i < plain.size(); ++i) {
      if (!plain[i].empty()) {
        std::cerr << absl::StrFormat(", plain %d: %.2f GiB/s", kPlainStreams[i],
                                     Median(plain[i]));
      }
    }
    std::cerr << "; ratios";
    for (const double ratio : ratios)
      std::cerr << absl::StrFormat(" %.3f", ratio);
    std::cerr << std::endl;
    ReportCpu();
    const double value = one_hop ? gib / Median(ours) : Median(ours);
    const double floor = one_hop ? gib / Median(floors) : Median(floors);
    const char* unit = one_hop ? "GiB/s" : "s";
    std::cout << absl::StrFormat(
                     "{\"bench\": \"%s\", \"value\": %.4f, \"unit\": \"%s\", "
                     "\"floor\": %.4f, \"floor_unit\": \"%s\", \"ratio\": "
                     "%.4f, \"runs\": %d}",
                     name, value, unit, floor, unit, Median(ratios), FLAGS_runs)
              << std::endl;
  }

  // ---- A receiver ----

  void RunReceiver() {
    while (true) {
      const std::string command = ReadLine(controls_[0]);
      if (command == "quit") {
        ReportCpu();
        return;
      }
      if (command == "ours") {
        our_cpu_.Start();
        MakeLandings();
        CHECK(group_->Move(landings_).ok());
        WriteLine(controls_[0], "ready");
        const absl::Status status = group_->Wait(absl::Seconds(30));
        our_cpu_.Stop();
        CHECK(status.ok()) << status;
        WriteLine(
            controls_[0],
            absl::StrCat("digest ", landings_[0]->bucket_digest().ToString()));
        continue;
      }
      size_t which = 0;
      CHECK(absl::SimpleAtoi(command.substr(6), &which)) << command;
      WriteLine(controls_[0], "ready");
      plain_cpu_.Start();
      ReceivePlain(plain_[which], data_, FLAGS_bytes);
      plain_cpu_.Stop();
    }
  }

 private:
  void ReportCpu() const {
    std::cerr << absl::StrFormat(
                     "member %d: CPU seconds for each transfer: ours %.3f, "
                     "plain %.3f",
                     index_, our_cpu_.mean(), plain_cpu_.mean())
              << std::endl;
  }
  void MarkAll() {
    for (const auto& landing : landings_) CHECK(landing->MarkAllReady().ok());
  }
  static int ControlPort() { return FLAGS_port; }
  static int DataPort(int index) { return FLAGS_port + 1 + index; }

  const std::vector<std::string> hosts_;
  const int index_;
  char* data_ = nullptr;
  int file_ = -1;
  std::unique_ptr<transport::tcp::Endpoint> endpoint_;
  std::unique_ptr<transport::Group> group_;
  std::vector<std::shared_ptr<Landing>> landings_;
  std::vector<int> controls_;  // at the source: of each receiver
  std::vector<std::vector<int>> plain_;
  CpuMeter our_cpu_, plain_cpu_;
};

}  // namespace
}  // namespace bench
}  // namespace weightsync

int main(int argc, char** argv) {
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  FLAGS_logtostderr = true;
  google::InitGoogleLogging(argv[0]);
  weightsync::bench::Member member;
  member.Connect();
  member.Join();
  if (FLAGS_index == 0) {
    member.RunSource();
  } else {
    member.RunReceiver();
  }
  return 0;
}
