// Figures of the GPU data plane, each beside a floor that was measured in the
// same run.
//
//   gpu_bench --list            the GPUs, one a line: UUID, name, bytes
//   gpu_bench [--smoke]         all figures, small with --smoke: that they run
//
// A line of the result: NAME VALUE UNIT FLOOR RATIO GOAL, where RATIO is that
// of the floor's time to the figure's (1 is the floor itself), or "-".
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "glog/logging.h"
#include "transport/cuda/cuda_memory.h"
#include "transport/error.h"
#include "transport/host/host_memory.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

void Must(const absl::Status& status) {
  if (status.ok()) return;
  fprintf(stderr, "gpu_bench: %s: %s\n", ReasonOf(status).c_str(),
          std::string(status.message()).c_str());
  exit(1);
}

// The best of some: what the machine can, without what else it does.
double Best(const std::function<void()>& body, int times) {
  double best = std::numeric_limits<double>::max();
  for (int i = 0; i < times; ++i) {
    const absl::Time start = absl::Now();
    body();
    best = std::min(best, absl::ToDoubleSeconds(absl::Now() - start));
  }
  return best;
}

void Print(const char* name, double seconds, double floor_seconds,
           double goal) {
  printf("%-34s %10.3f ms  floor %10.3f ms  ratio %.3f  goal %.2f\n", name,
         seconds * 1e3, floor_seconds * 1e3, floor_seconds / seconds, goal);
  fflush(stdout);
}

// 18,867 tensors as a model of 8 billion parameters and its like have them:
// most are small rows of larger ones. Pieces of one bucket after another.
std::vector<PackPiece> Pieces(const char* from, int64_t bytes, int count) {
  std::vector<PackPiece> pieces(count);
  const int64_t each = bytes / count / 256 * 256;
  int64_t offset = 0;
  for (int i = 0; i < count; ++i) {
    PackPiece& piece = pieces[i];
    piece.offset = offset;
    piece.copy.src = from + i * 2 * each;
    piece.copy.element_bytes = 2;
    piece.copy.ordinal = static_cast<uint32_t>(i);
    if (i % 2 == 0) {
      piece.copy.run_bytes = each;
    } else {
      // A slice of columns: every second run of its memory.
      const int64_t rows = each % 4096 == 0 ? each / 4096 : each / 256;
      piece.copy.run_bytes = each / rows;
      piece.copy.dims.push_back({rows, piece.copy.run_bytes,
                                 2 * piece.copy.run_bytes,
                                 piece.copy.run_bytes});
    }
    offset += each;
  }
  return pieces;
}

int List() {
  const absl::StatusOr<std::vector<DeviceInfo>> devices = ListDevices();
  Must(devices.status());
  for (const DeviceInfo& device : *devices) {
    printf("%s %s %lld\n", device.uuid.c_str(), device.name.c_str(),
           static_cast<long long>(device.total_bytes));  // NOLINT
  }
  return 0;
}

// Of its own: process numbers repeat where others have their own name space.
struct ScratchDirectory {
  ScratchDirectory()
      : path(absl::StrCat(
            getenv("TMPDIR") != nullptr ? getenv("TMPDIR") : "/tmp",
            "/gpu_bench.XXXXXX")) {
    if (mkdtemp(&path[0]) == nullptr) Must(absl::InternalError(path));
  }
  ~ScratchDirectory() { rmdir(path.c_str()); }

  std::string path;
};

// A worker's process: opens what the daemon has on the GPU, and copies it into
// memory of its own by copy engine, piece by piece. Prints seconds.
int Pause(char** argv) {
  CopyPool pool(1);
  HostMemory host(&pool, nullptr, {});
  CudaMemory::Options options;
  options.device_uuid = argv[0];
  auto memory = CudaMemory::Create(&host, options);
  Must(memory.status());
  MemoryTicket ticket;
  ticket.kind = MemoryKind::kCuda;
  ticket.read_only = true;
  ticket.address = argv[1];
  ticket.token = argv[2];
  ticket.bytes = atoll(argv[3]);
  const int pieces = atoi(argv[4]);
  const int times = atoi(argv[5]);
  auto store = (*memory)->Import(ticket, absl::Seconds(10));
  Must(store.status());
  auto live = (*memory)->Allocate(ticket.bytes, AllocateOptions());
  Must(live.status());
  std::vector<CopyTask> tasks;
  const int64_t each = ticket.bytes / pieces / 256 * 256;
  for (int i = 0; i < pieces; ++i) {
    CopyTask task;
    task.src = (*store)->data() + i * each;
    task.dst = (*live)->data() + i * each;
    task.run_bytes = i + 1 < pieces ? each : ticket.bytes - i * each;
    tasks.push_back(task);
  }
  const auto apply = [&] { Must((*memory)->Copy(tasks, {}, nullptr)); };
  apply();
  printf("%.9f\n", Best(apply, times));
  return 0;
}

// Seconds that such a process takes.
double PauseOf(CudaMemory* memory, const Segment& store, int pieces,
               int times) {
  ExportOptions options;
  options.read_only = true;
  const absl::StatusOr<MemoryTicket> ticket = memory->Export(store, options);
  Must(ticket.status());
  char self[4096] = {};
  if (readlink("/proc/self/exe", self, sizeof(self) - 1) < 0)
    Must(absl::InternalError("/proc/self/exe"));
  int out[2];
  if (pipe(out) != 0) Must(absl::InternalError("pipe"));
  const std::string bytes = absl::StrCat(ticket->bytes);
  const std::string count = absl::StrCat(pieces), rounds = absl::StrCat(times);
  const pid_t worker = fork();
  if (worker == 0) {
    dup2(out[1], 1);
    close(out[0]);
    execl(self, self, "--pause", memory->core()->device().uuid.c_str(),
          ticket->address.c_str(), ticket->token.c_str(), bytes.c_str(),
          count.c_str(), rounds.c_str(), nullptr);
    _exit(127);
  }
  close(out[1]);
  std::string said;
  char part[64];
  for (ssize_t n; (n = read(out[0], part, sizeof(part))) > 0;)
    said.append(part, static_cast<size_t>(n));
  close(out[0]);
  int status = 0;
  waitpid(worker, &status, 0);
  if (status != 0) Must(absl::InternalError("a worker's process has failed"));
  return atof(said.c_str());
}

int Run(bool smoke) {
  const int64_t bucket_bytes = smoke ? 4 << 20 : 256 << 20;
  const int times = smoke ? 1 : 9;
  const int tensors = smoke ? 300 : 18867;
  const int pieces_of_a_bucket = smoke ? 50 : 2000;

  const absl::StatusOr<std::vector<DeviceInfo>> devices = ListDevices();
  Must(devices.status());
  CopyPool pool(1);
  const ScratchDirectory scratch;
  absl::StatusOr<std::unique_ptr<FdServer>> fds =
      FdServer::Start(absl::StrCat(scratch.path, "/fds"), FdServer::Options());
  Must(fds.status());
  HostMemory host(&pool, fds->get(), {});
  CudaMemory::Options options;
  options.device_uuid = (*devices)[0].uuid;
  absl::StatusOr<std::unique_ptr<CudaMemory>> created =
      CudaMemory::Create(&host, options);
  Must(created.status());
  CudaMemory* const memory = created->get();
  printf("card %s (%s)\n", (*devices)[0].name.c_str(),
         (*devices)[0].uuid.c_str());

  AllocateOptions allocate;
  allocate.name = "bench";
  auto from = memory->Allocate(2 * bucket_bytes, allocate);
  Must(from.status());
  auto to = memory->Allocate(bucket_bytes, allocate);
  Must(to.status());

  // The floor: one copy of as many bytes inside the GPU.
  CopyTask whole;
  whole.src = (*from)->data();
  whole.dst = (*to)->data();
  whole.run_bytes = bucket_bytes;
  const auto copy = [&] { Must(memory->Copy({whole}, {}, nullptr)); };
  copy();
  const double d2d = Best(copy, times);
  Print("copy inside the GPU", d2d, d2d, 1);

  const std::vector<PackPiece> pieces =
      Pieces((*from)->data(), bucket_bytes, pieces_of_a_bucket);
  PackRequest request;
  request.bucket = (*to)->data();
  request.bucket_bytes = bucket_bytes;
  request.pieces = pieces;
  const auto pack = [&] { Must(memory->Pack(request, nullptr)); };
  pack();
  const double packed = Best(pack, times);
  Print("pack, with digests of frames", packed, d2d, 0.8);
  // A trainer stands still while its buckets are packed, and an engine while
  // its worker copies them: at the same pace for 16 GB as for one.
  Print("store=device: stall", packed, d2d, 1 / 1.3);
  Print("store=device: pause",
        PauseOf(memory, **to, pieces_of_a_bucket / 10, times), d2d, 1 / 1.3);

  std::vector<CopyTask> back;
  for (const PackPiece& piece : pieces) {
    CopyTask task = piece.copy;
    int64_t stride = task.run_bytes;
    for (size_t i = task.dims.size(); i-- > 0;) {
      task.dims[i].dst_stride = task.dims[i].src_stride;
      task.dims[i].src_stride = stride;
      stride *= task.dims[i].extent;
    }
    task.dst = const_cast<char*>(piece.copy.src);
    task.src = (*to)->data() + piece.offset;
    back.push_back(task);
  }
  const auto unpack = [&] { Must(memory->Copy(back, {}, nullptr)); };
  unpack();
  Print("unpack", Best(unpack, times), d2d, 0.8);

  // A copy reads and writes: reading alone cannot take more than half of it.
  CopyTask look = whole;
  look.dst = nullptr;
  look.element_bytes = 2;
  const auto digest = [&] {
    Digest sum;
    Must(memory->Copy({look}, {}, &sum));
  };
  digest();
  Print("digest, over half a copy", Best(digest, times), d2d / 2, 0.7);

  // Pinned host memory, as the store is.
  allocate.name = "store";
  auto allocated = host.Allocate(bucket_bytes, allocate);
  Must(allocated.status());
  const std::shared_ptr<Segment> store = *std::move(allocated);
  {
    auto pinned = memory->PinHost(store->data(), bucket_bytes, true, store);
    Must(pinned.status());
    CopyTask out = whole;
    out.src = (*to)->data();
    out.dst = store->data();
    const auto d2h = [&] { Must(memory->Copy({out}, {}, nullptr)); };
    d2h();
    const double bus = Best(d2h, times);
    Print("copy to pinned host memory", bus, bus, 1);
    PackRequest staged = request;
    staged.on_frames = [&](int64_t first, int64_t last,
                           absl::Span<const Digest>) {
      CopyTask part;
      const int64_t begin = first * staged.frame_bytes;
      part.src = (*to)->data() + begin;
      part.dst = store->data() + begin;
      part.run_bytes =
          std::min(bucket_bytes, last * staged.frame_bytes) - begin;
      Must(memory->Copy({part}, {}, nullptr));
    };
    const auto snapshot = [&] { Must(memory->Pack(staged, nullptr)); };
    snapshot();
    Print("store=host: stall", Best(snapshot, times), bus, 1 / 1.1);
    // As a worker does it: by copy engine, and the pieces where they belong.
    CopyTask in = whole;
    in.src = store->data();
    in.dst = (*to)->data();
    const auto h2d = [&] { Must(memory->Copy({in}, {}, nullptr)); };
    h2d();
    const double up = Best(h2d, times);
    std::vector<CopyTask> applied = back;
    for (CopyTask& task : applied)
      task.src = store->data() + (task.src - (*to)->data());
    const auto apply = [&] { Must(memory->Copy(applied, {}, nullptr)); };
    apply();
    Print("store=host: pause", Best(apply, times), up, 1 / 1.1);
  }

  // Registration: every tensor is looked up, few allocations are described.
  const auto describe = [&] {
    for (int i = 0; i < tensors; ++i) {
      const int64_t offset = i * ((2 * bucket_bytes) / tensors) / 256 * 256;
      Must(memory->exporter().Describe((*from)->data() + offset, 256).status());
    }
  };
  describe();
  const double registration = Best(describe, times);
  Print(absl::StrCat("describe ", tensors, " tensors").c_str(), registration,
        0.05, 1);
  return 0;
}

}  // namespace
}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

int main(int argc, char** argv) {
  FLAGS_logtostderr = true;
  if (argc == 8 && std::string(argv[1]) == "--pause")
    return weightsync::transport::cuda::Pause(argv + 2);
  const std::string argument = argc == 2 ? argv[1] : "";
  if (argument == "--list") return weightsync::transport::cuda::List();
  if (argc > 2 || (argc == 2 && argument != "--smoke")) {
    fprintf(stderr, "usage: gpu_bench [--list | --smoke]\n");
    return 2;
  }
  return weightsync::transport::cuda::Run(argument == "--smoke");
}
