// Figures of the GPU data plane, each beside a floor that was measured in the
// same run.
//
//   gpu_bench --list            the GPUs, one a line: UUID, name, bytes
//   gpu_bench [--smoke]         all figures, small with --smoke: that they run
//   gpu_bench --floors BYTES    seconds of one copy of so many bytes within the
//                               GPU, to pinned host memory and from it: what
//                               daemon_check.sh holds a daemon against
//
// A line of the result: "NAME V ms  floor F ms  ratio R  goal G", where R is
// F / V (1 is the floor itself). A goal of 0 is none.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "glog/logging.h"
#include "tests/gpu/load_kernel.h"
#include "transport/cuda/cuda_memory.h"
#include "transport/cuda/process_copy.h"
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

void MustCuda(int error, const char* call) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "gpu_bench: %s: %s\n", call,
          cudaGetErrorString(static_cast<cudaError_t>(error)));
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

// `count` pieces of `bytes` in all, one after another in the bucket, and apart
// in the source: most tensors of a model are rows of larger ones.
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

// A GPU's memory as an agent has it, and pinned host memory.
struct Bench {
  Bench() : pool(1), host(&pool, nullptr, {}) {
    const absl::StatusOr<std::vector<DeviceInfo>> devices = ListDevices();
    Must(devices.status());
    device = (*devices)[0];
    CudaMemory::Options options;
    options.device_uuid = device.uuid;
    absl::StatusOr<std::unique_ptr<CudaMemory>> created =
        CudaMemory::Create(&host, options);
    Must(created.status());
    memory = *std::move(created);
  }
  std::unique_ptr<Segment> Allocate(int64_t bytes) {
    AllocateOptions options;
    options.name = "bench";
    auto segment = memory->Allocate(bytes, options);
    Must(segment.status());
    return *std::move(segment);
  }
  void Pin(int64_t bytes) {
    AllocateOptions options;
    options.name = "store";
    auto allocated = host.Allocate(bytes, options);
    Must(allocated.status());
    store = *std::move(allocated);
    auto made = memory->PinHost(store->data(), bytes, true, store);
    Must(made.status());
    pinned = *std::move(made);
  }
  void Copy(const char* from, char* to, int64_t bytes) {
    CopyTask task;
    task.src = from;
    task.dst = to;
    task.run_bytes = bytes;
    Must(memory->Copy({task}, {}, nullptr));
  }

  CopyPool pool;
  HostMemory host;
  DeviceInfo device;
  std::unique_ptr<CudaMemory> memory;
  std::shared_ptr<Segment> store;
  std::unique_ptr<CudaMemory::PinnedHost> pinned;
};

// As many bytes as a model has, a GiB at a time: there may be no room for it
// twice more.
int Floors(int64_t bytes) {
  if (bytes <= 0) {
    fprintf(stderr, "gpu_bench: --floors wants how many bytes\n");
    return 2;
  }
  const int64_t part = std::min<int64_t>(bytes, int64_t{1} << 30);
  const double parts = static_cast<double>(bytes) / static_cast<double>(part);
  Bench bench;
  const auto from = bench.Allocate(part), to = bench.Allocate(part);
  bench.Pin(part);
  const std::pair<const char*, std::function<void()>> copies[] = {
      {"within", [&] { bench.Copy(from->data(), to->data(), part); }},
      {"to_host", [&] { bench.Copy(from->data(), bench.store->data(), part); }},
      {"from_host",
       [&] { bench.Copy(bench.store->data(), to->data(), part); }}};
  for (const auto& [name, copy] : copies) {
    copy();
    printf("floor_%s %.6f\n", name, parts * Best(copy, 5));
  }
  return 0;
}

int Run(bool smoke) {
  const int64_t bucket_bytes = smoke ? 4 << 20 : 256 << 20;
  const int times = smoke ? 1 : 9;
  const int pieces_of_a_bucket = smoke ? 50 : 2000;
  Bench bench;
  CudaMemory* const memory = bench.memory.get();
  printf("card %s (%s)\n", bench.device.name.c_str(),
         bench.device.uuid.c_str());
  const auto from = bench.Allocate(2 * bucket_bytes);
  const auto to = bench.Allocate(bucket_bytes);

  // The floor: one copy of as many bytes inside the GPU.
  const auto copy = [&] { bench.Copy(from->data(), to->data(), bucket_bytes); };
  copy();
  const double d2d = Best(copy, times);
  Print("copy inside the GPU", d2d, d2d, 1);

  const std::vector<PackPiece> pieces =
      Pieces(from->data(), bucket_bytes, pieces_of_a_bucket);
  PackRequest request;
  request.bucket = to->data();
  request.bucket_bytes = bucket_bytes;
  request.pieces = pieces;
  const auto pack = [&] { Must(memory->Pack(request, nullptr)); };
  pack();
  Print("pack, with digests of frames", Best(pack, times), d2d, 0.8);

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
    task.src = to->data() + piece.offset;
    back.push_back(task);
  }
  // As workers have it in a pause.
  MustCuda(cudaSetDevice(bench.device.ordinal), "cudaSetDevice");
  {
    const absl::Duration stall = absl::Minutes(1);
    ProcessCopier copier(bench.device.uuid);
    copier.Prepare(stall);
    const auto unpack = [&] { Must(copier.CopyWithin(back, stall)); };
    unpack();
    Print("unpack", Best(unpack, times), d2d, 0.8);
    // As those have it that generate meanwhile, or could load no kernel.
    const auto engines = [&] { Must(copier.Copy(back, stall)); };
    engines();
    Print("unpack, by copy engines", Best(engines, times), d2d, 0);
  }
  const auto by_agent = [&] { Must(memory->Copy(back, {}, nullptr)); };
  by_agent();
  Print("unpack, by the agent", Best(by_agent, times), d2d, 0.8);

  // Its floor is a kernel that reads as much and does nothing with it.
  cudaDeviceProp properties;
  MustCuda(cudaGetDeviceProperties(&properties, bench.device.ordinal),
           "cudaGetDeviceProperties");
  const int blocks = smoke ? 1 : 16 * properties.multiProcessorCount;
  cudaStream_t stream;
  MustCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
           "cudaStreamCreateWithFlags");
  const auto read = [&] {
    MustCuda(load::LaunchRead(from->data(), bucket_bytes, to->data(), blocks,
                              stream),
             "a launch");
    MustCuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  };
  read();
  const double reading = Best(read, times);
  Print("read of GPU memory", reading, reading, 1);
  CopyTask look;
  look.src = from->data();
  look.run_bytes = bucket_bytes;
  look.element_bytes = 2;
  const auto digest = [&] {
    Digest sum;
    Must(memory->DigestEach({look}, {}, absl::MakeSpan(&sum, 1)));
  };
  digest();
  Print("digest, over a read", Best(digest, times), reading, 0.7);
  MustCuda(cudaStreamDestroy(stream), "cudaStreamDestroy");

  bench.Pin(bucket_bytes);
  const auto d2h = [&] {
    bench.Copy(to->data(), bench.store->data(), bucket_bytes);
  };
  d2h();
  const double bus = Best(d2h, times);
  Print("copy to pinned host memory", bus, bus, 1);
  return 0;
}

}  // namespace
}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

int main(int argc, char** argv) {
  FLAGS_logtostderr = true;
  if (argc == 3 && std::string(argv[1]) == "--floors")
    return weightsync::transport::cuda::Floors(atoll(argv[2]));
  const std::string argument = argc == 2 ? argv[1] : "";
  if (argument == "--list") return weightsync::transport::cuda::List();
  if (argc > 2 || (argc == 2 && argument != "--smoke")) {
    fprintf(stderr, "usage: gpu_bench [--list | --smoke | --floors BYTES]\n");
    return 2;
  }
  return weightsync::transport::cuda::Run(argument == "--smoke");
}
