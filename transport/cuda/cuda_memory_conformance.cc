// Exporter and importer in one process, and in two, as a daemon's agent and its
// workers are.
#include <signal.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "glog/logging.h"
#include "gtest/gtest.h"
#include "transport/conformance/memory_conformance.h"
#include "transport/cuda/test_child.h"
#include "transport/cuda/testing.h"
#include "transport/error.h"
#include "transport/fault/faulty_memory.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

class CudaFixture : public MemoryFixture {
 public:
  Memory* memory() override { return memory_.get(); }
  Memory* importer() override { return importer_.get(); }

 private:
  TestProcess memory_, importer_;
};

// ---- Two processes ----

// A message to the child is lines; bytes to write are what follows the last.
std::vector<std::string> Lines(const std::string& message, int count) {
  return absl::StrSplit(message, absl::MaxSplits('\n', count - 1));
}

int64_t Number(const std::string& text) {
  int64_t number = 0;
  return absl::SimpleAtoi(text, &number) ? number : -1;
}

// The importer: does what it is told, with memory of its own process.
int Importer() {
  TestProcess process;
  std::map<int64_t, std::unique_ptr<Segment>> segments;
  for (int64_t next = 1;;) {
    const std::string message = FromParent();
    const std::vector<std::string> words = Lines(message, 4);
    const int64_t first = words.size() > 1 ? Number(words[1]) : 0;
    const int64_t second = words.size() > 2 ? Number(words[2]) : 0;
    if (words[0] == "import") {
      auto segment =
          process->Import(DecodeTicket(message.substr(7)), absl::Seconds(10));
      if (!segment.ok()) {
        ToParent(absl::StrCat("error\n",
                              static_cast<int>(segment.status().code()), "\n",
                              ReasonOf(segment.status())));
        continue;
      }
      ToParent(absl::StrCat(
          "ok\n", next, "\n", reinterpret_cast<uint64_t>((*segment)->data()),
          "\n", (*segment)->bytes(), "\n", (*segment)->writable() ? 1 : 0, "\n",
          (*segment)->generation_slots()));
      segments[next++] = *std::move(segment);
    } else if (words[0] == "generation") {
      ToParent(absl::StrCat(
          segments.at(first)->Generation(static_cast<int>(second))));
    } else if (words[0] == "advance") {
      ToParent(absl::StrCat(
          segments.at(first)->AdvanceGeneration(static_cast<int>(second))));
    } else if (words[0] == "read") {
      ToParent(process.Read(reinterpret_cast<const char*>(first),
                            static_cast<size_t>(second)));
    } else if (words[0] == "write") {
      const std::string bytes =
          message.substr(words[0].size() + words[1].size() + 2);
      process.Write(bytes, reinterpret_cast<char*>(first));
      ToParent("written");
    } else if (words[0] == "drop") {
      segments.erase(first);
      process->core()->Drain(absl::Seconds(5));
      ToParent("dropped");
    } else {
      return 0;
    }
  }
}

// What the child has imported, as the test sees it: addresses are the child's.
class OtherProcess final : public Memory {
 public:
  OtherProcess() : child_("importer") {}

  MemoryKind kind() const override { return MemoryKind::kCuda; }
  absl::StatusOr<std::unique_ptr<Segment>> Allocate(
      int64_t, const AllocateOptions&) override {
    return OnlyImports();
  }
  absl::StatusOr<MemoryTicket> Export(const Segment&,
                                      const ExportOptions&) override {
    return OnlyImports();
  }
  void Withdraw(const MemoryTicket&) override {}
  absl::StatusOr<std::unique_ptr<Segment>> Import(const MemoryTicket& ticket,
                                                  absl::Duration) override {
    const std::vector<std::string> said =
        absl::StrSplit(Ask(absl::StrCat("import\n", Encode(ticket))), '\n');
    if (said[0] != "ok") {
      return MakeError(
          said.size() == 3 ? static_cast<absl::StatusCode>(Number(said[1]))
                           : absl::StatusCode::kInternal,
          said.size() == 3 ? said[2] : "CHILD_ENDED", "in the other process");
    }
    return std::unique_ptr<Segment>(std::make_unique<Imported>(this, said));
  }
  absl::Status Copy(absl::Span<const CopyTask>, const CopyOptions&,
                    Digest*) override {
    return OnlyImports();
  }
  absl::Status Pack(const PackRequest&, PackResult*) override {
    return OnlyImports();
  }
  absl::Status Read(const char* from, absl::Span<char> to) override {
    const std::string bytes = Ask(absl::StrCat(
        "read\n", reinterpret_cast<uint64_t>(from), "\n", to.size()));
    if (bytes.size() != to.size()) return absl::InternalError(bytes);
    memcpy(to.data(), bytes.data(), bytes.size());
    return absl::OkStatus();
  }
  absl::Status Write(absl::Span<const char> from, char* to) override {
    const std::string said =
        Ask(absl::StrCat("write\n", reinterpret_cast<uint64_t>(to), "\n",
                         absl::string_view(from.data(), from.size())));
    return said == "written" ? absl::OkStatus() : absl::InternalError(said);
  }

 private:
  class Imported final : public Segment {
   public:
    Imported(OtherProcess* process, const std::vector<std::string>& said)
        : process_(process),
          id_(said[1]),
          data_(reinterpret_cast<char*>(Number(said[2]))),
          bytes_(Number(said[3])),
          writable_(said[4] == "1"),
          slots_(static_cast<int>(Number(said[5]))) {}
    ~Imported() override { process_->Ask(absl::StrCat("drop\n", id_)); }

    MemoryKind kind() const override { return MemoryKind::kCuda; }
    char* data() const override { return data_; }
    int64_t bytes() const override { return bytes_; }
    bool writable() const override { return writable_; }
    int generation_slots() const override { return slots_; }
    uint64_t Generation(int slot) const override {
      return static_cast<uint64_t>(
          Number(process_->Ask(absl::StrCat("generation\n", id_, "\n", slot))));
    }
    uint64_t AdvanceGeneration(int slot) override {
      return static_cast<uint64_t>(
          Number(process_->Ask(absl::StrCat("advance\n", id_, "\n", slot))));
    }

   private:
    OtherProcess* const process_;
    const std::string id_;
    char* const data_;
    const int64_t bytes_;
    const bool writable_;
    const int slots_;
  };

  static absl::Status OnlyImports() {
    return absl::UnimplementedError("the other process only imports");
  }
  std::string Ask(const std::string& message) {
    child_.Send(message);
    return child_.Receive();
  }

  Child child_;
};

class TwoProcessesFixture : public MemoryFixture {
 public:
  Memory* memory() override { return memory_.get(); }
  Memory* importer() override { return &importer_; }

 private:
  TestProcess memory_;
  OtherProcess importer_;
};

class FaultyFixture : public MemoryFixture {
 public:
  FaultyFixture() : faulty_(cuda_.memory()) {}
  Memory* memory() override { return &faulty_; }
  Memory* importer() override { return cuda_.importer(); }

 private:
  CudaFixture cuda_;
  FaultyMemory faulty_;
};

INSTANTIATE_TEST_SUITE_P(
    Cuda, MemoryConformance,
    ::testing::Values([]() -> std::unique_ptr<MemoryFixture> {
      return std::make_unique<CudaFixture>();
    }));
INSTANTIATE_TEST_SUITE_P(
    CudaInTwoProcesses, MemoryConformance,
    ::testing::Values([]() -> std::unique_ptr<MemoryFixture> {
      return std::make_unique<TwoProcessesFixture>();
    }));
INSTANTIATE_TEST_SUITE_P(
    CudaBehindFaults, MemoryConformance,
    ::testing::Values([]() -> std::unique_ptr<MemoryFixture> {
      return std::make_unique<FaultyFixture>();
    }));

}  // namespace

int Play(const std::string& part) {
  return part == "importer" ? Importer() : 2;
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

int main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  FLAGS_logtostderr = true;
  if (argc == 2 &&
      absl::StartsWith(argv[1], weightsync::transport::cuda::kChild)) {
    return weightsync::transport::cuda::Play(
        argv[1] + std::strlen(weightsync::transport::cuda::kChild));
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
