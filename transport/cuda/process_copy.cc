#include "transport/cuda/process_copy.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "glog/logging.h"
#include "transport/cuda/copy_policy.h"
#include "transport/cuda/cuda_error.h"
#include "transport/cuda/kernels.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

// The most bytes between rows that a copy engine takes.
constexpr int64_t kMaxPitch = int64_t{1} << 30;
// So many rows in one command.
constexpr int64_t kMaxRows = 1 << 16;
// How much is given to the GPU before it is waited for.
constexpr int kMaxCommands = 1024;
// Larger ones are launched in parts, so that each has room in a table.
constexpr int64_t kMaxKernelBytes = int64_t{1} << 30;

// Whether a copy engine takes all rows of the innermost dimension at once.
bool Pitched(const CopyTask& task) {
  if (task.dims.empty()) return false;
  const CopyDim& rows = task.dims.back();
  return rows.dst_stride >= task.run_bytes &&
         rows.src_stride >= task.run_bytes && rows.dst_stride <= kMaxPitch &&
         rows.src_stride <= kMaxPitch;
}

// That a copy engine would take for it.
int64_t CommandsOf(const CopyTask& task) {
  if (task.bytes() == 0) return 0;
  const int64_t rows = task.rows();
  if (!Pitched(task)) return rows;
  const int64_t extent = task.dims.back().extent;
  return rows / extent * ((extent + kMaxRows - 1) / kMaxRows);
}

// At most, whatever its place.
int64_t TableBytes(const CopyTask& task) {
  return static_cast<int64_t>(sizeof(DeviceCopy)) +
         (task.bytes() / kUnitBytes + 1) *
             static_cast<int64_t>(sizeof(DeviceUnit));
}
static_assert((kMaxKernelBytes / kUnitBytes + 1) * sizeof(DeviceUnit) +
                      sizeof(DeviceCopy) <=
                  kCopyTableBytes,
              "a part has room in a table");

}  // namespace

ProcessCopier::~ProcessCopier() {
  absl::MutexLock lock(&mutex_);
  // To free and to unload is to wait for the GPU, which has no end here; and
  // what it may still read stays as it is.
  if (stalled_ && cudaStreamQuery(stream_) == cudaErrorNotReady) {
    LOG(WARNING) << name_ << " is stalled: what copies have of it is not freed";
    (void)kernel_.release();
    return;
  }
  GiveBackKernel();
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

void ProcessCopier::GiveBackKernel() {
  kernel_ = nullptr;
  for (Table& table : tables_) {
    if (table.event != nullptr) cudaEventDestroy(table.event);
    if (table.device != nullptr) cudaFree(table.device);
    if (table.host != nullptr) cudaFreeHost(table.host);
    table = Table();
  }
}

void ProcessCopier::Prepare(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  // Whoever copies will be told.
  if (Begin(timeout).ok()) PrepareLocked(timeout);
}

void ProcessCopier::PrepareLocked(absl::Duration timeout) {
  if (prepared_) return;
  prepared_ = true;
  const absl::Status status = MakeKernel(timeout);
  ready_ = status.ok();
  if (ready_) return;
  LOG(WARNING) << "copies within " << name_
               << " go by its copy engines, piece by piece, which takes longer "
                  "where there are many: "
               << status;
  // A launch that does not end keeps its code.
  if (!stalled_) GiveBackKernel();
}

absl::Status ProcessCopier::MakeKernel(absl::Duration timeout) {
  absl::StatusOr<std::unique_ptr<DriverKernel>> loaded =
      DriverKernel::Load(PlainCopyImage(), kPlainCopyName);
  if (!loaded.ok()) return loaded.status();
  kernel_ = *std::move(loaded);
  for (Table& table : tables_) {
    void* memory = nullptr;
    absl::Status status =
        CheckCuda(cudaHostAlloc(&memory, kCopyTableBytes, cudaHostAllocDefault),
                  "cudaHostAlloc");
    if (!status.ok()) return status;
    table.host = static_cast<char*>(memory);
    status = CheckCuda(cudaMalloc(&memory, kCopyTableBytes), "cudaMalloc");
    if (!status.ok()) return status;
    table.device = static_cast<char*>(memory);
    status = CheckCuda(
        cudaEventCreateWithFlags(&table.event, cudaEventDisableTiming),
        "cudaEventCreateWithFlags");
    if (!status.ok()) return status;
  }
  // The host's pages, too: there are tables of up to 4 MiB to be made.
  made_.copies.resize(kCopyTableBytes / sizeof(DeviceCopy));
  made_.units.resize(kCopyTableBytes / sizeof(DeviceUnit));
  ClearMade();
  // Of no units. What the driver puts off until a first launch is done now, and
  // a GPU that does not run it is known now.
  const CopyLaunch nothing = {};
  const absl::Status status =
      kernel_->Launch(1, kBlockThreads, &nothing, stream_);
  return status.ok() ? WaitForAll(timeout) : status;
}

absl::Status ProcessCopier::Copy(absl::Span<const CopyTask> tasks,
                                 absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  absl::Status status = Begin(timeout);
  if (!status.ok()) return status;
  for (const CopyTask& task : tasks) {
    status = ByEngine(task, timeout);
    if (!status.ok()) break;
  }
  return End(status, timeout);
}

absl::Status ProcessCopier::CopyWithin(absl::Span<const CopyTask> tasks,
                                       absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  absl::Status status = Begin(timeout);
  if (!status.ok()) return status;
  if (!prepared_) {
    PrepareLocked(timeout);
    status = Begin(timeout);
    if (!status.ok()) return status;
  }
  int64_t saved = 0;
  for (const CopyTask& task : tasks) {
    if (!ByCopyEngine(task, kEngineBytesInPause)) saved += CommandsOf(task);
    if (saved > kCommandsOfALaunch) break;
  }
  const bool launch = ready_ && saved > kCommandsOfALaunch;
  // First what the GPU can do while tables are made.
  for (const CopyTask& task : tasks) {
    if (launch && !ByCopyEngine(task, kEngineBytesInPause)) continue;
    status = ByEngine(task, timeout);
    if (!status.ok()) break;
  }
  if (launch) {
    for (const CopyTask& task : tasks) {
      if (!status.ok()) break;
      if (!ByCopyEngine(task, kEngineBytesInPause))
        status = ByKernel(task, timeout);
    }
    if (status.ok()) status = LaunchMade(timeout);
    ClearMade();
  }
  return End(status, timeout);
}

absl::Status ProcessCopier::Begin(absl::Duration timeout) {
  if (stream_ == nullptr) {
    const absl::Status status =
        CheckCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
                  "cudaStreamCreateWithFlags");
    if (!status.ok()) return status;
  }
  commands_ = 0;
  // Behind a copy that has not ended nothing would move, and its tables are its
  // own until it has.
  return stalled_ ? WaitForAll(timeout) : absl::OkStatus();
}

absl::Status ProcessCopier::End(const absl::Status& begun,
                                absl::Duration timeout) {
  // It has been waited for already.
  if (stalled_) return begun;
  // Also after an error: what was begun still writes.
  const absl::Status ended = WaitForAll(timeout);
  // Whoever owns the memory has to know that it may still be written to.
  return stalled_ || begun.ok() ? ended : begun;
}

absl::Status ProcessCopier::ByEngine(const CopyTask& task,
                                     absl::Duration timeout) {
  const absl::Status status = task.Validate();
  if (!status.ok() || task.bytes() == 0) return status;
  return Submit(task, 0, task.dst, task.src, timeout);
}

absl::Status ProcessCopier::Submit(const CopyTask& task, size_t dim, char* dst,
                                   const char* src, absl::Duration timeout) {
  if (dim == task.dims.size()) {
    return Told(cudaMemcpyAsync(dst, src, static_cast<size_t>(task.run_bytes),
                                cudaMemcpyDefault, stream_),
                "cudaMemcpyAsync", timeout);
  }
  const CopyDim& loop = task.dims[dim];
  if (dim + 1 == task.dims.size() && Pitched(task)) {
    for (int64_t row = 0; row < loop.extent; row += kMaxRows) {
      const absl::Status status = Told(
          cudaMemcpy2DAsync(
              dst + row * loop.dst_stride, static_cast<size_t>(loop.dst_stride),
              src + row * loop.src_stride, static_cast<size_t>(loop.src_stride),
              static_cast<size_t>(task.run_bytes),
              static_cast<size_t>(std::min(kMaxRows, loop.extent - row)),
              cudaMemcpyDefault, stream_),
          "cudaMemcpy2DAsync", timeout);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
  for (int64_t i = 0; i < loop.extent; ++i) {
    const absl::Status status = Submit(task, dim + 1, dst + i * loop.dst_stride,
                                       src + i * loop.src_stride, timeout);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status ProcessCopier::Told(cudaError_t error, const char* call,
                                 absl::Duration timeout) {
  const absl::Status status = CheckCuda(error, call);
  if (!status.ok() || ++commands_ < kMaxCommands) return status;
  commands_ = 0;
  return WaitForAll(timeout);
}

absl::Status ProcessCopier::ByKernel(const CopyTask& task,
                                     absl::Duration timeout) {
  absl::Status status = task.Validate();
  if (!status.ok() || task.bytes() == 0) return status;
  if (task.cast != CopyCast::kNone || task.dst == nullptr) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_COPY",
                     "this kernel casts nothing, and has no digests");
  }
  if (task.bytes() <= kMaxKernelBytes) return AddToTable(task, timeout);
  for (const CopyTask& part : SplitCopy(task, kMaxKernelBytes)) {
    status = AddToTable(part, timeout);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status ProcessCopier::AddToTable(const CopyTask& task,
                                       absl::Duration timeout) {
  const int64_t bytes = TableBytes(task);
  if (bytes > room_) {
    const absl::Status status = LaunchMade(timeout);
    if (!status.ok()) return status;
  }
  room_ -= bytes;
  return AddTasks(absl::MakeConstSpan(&task, 1), &made_);
}

void ProcessCopier::ClearMade() {
  made_.copies.clear();
  made_.units.clear();
  room_ = kCopyTableBytes;
}

absl::Status ProcessCopier::LaunchMade(absl::Duration timeout) {
  if (made_.units.empty()) return absl::OkStatus();
  Table& table = tables_[next_table_];
  next_table_ = (next_table_ + 1) % tables_.size();
  absl::Status status;
  if (table.used) {
    status = WaitFor([&table] { return cudaEventQuery(table.event); }, timeout);
    if (!status.ok()) return status;
  }
  const size_t copies_bytes = made_.copies.size() * sizeof(DeviceCopy);
  const size_t units_bytes = made_.units.size() * sizeof(DeviceUnit);
  memcpy(table.host, made_.copies.data(), copies_bytes);
  memcpy(table.host + copies_bytes, made_.units.data(), units_bytes);
  CopyLaunch launch = {};
  launch.copies = reinterpret_cast<const DeviceCopy*>(table.device);
  launch.units =
      reinterpret_cast<const DeviceUnit*>(table.device + copies_bytes);
  launch.unit_count = static_cast<int64_t>(made_.units.size());
  launch.unit_bytes = made_.unit_bytes;
  ClearMade();
  status = CheckCuda(
      cudaMemcpyAsync(table.device, table.host, copies_bytes + units_bytes,
                      cudaMemcpyHostToDevice, stream_),
      "cudaMemcpyAsync of a launch's table");
  if (status.ok()) {
    status = kernel_->Launch(
        static_cast<unsigned>(std::min(launch.unit_count, kMaxBlocks)),
        kBlockThreads, &launch, stream_);
  }
  if (status.ok()) {
    status =
        CheckCuda(cudaEventRecord(table.event, stream_), "cudaEventRecord");
  }
  // Otherwise whoever comes next waits for the whole stream (End), and the
  // table is free then.
  table.used = status.ok();
  return status;
}

absl::Status ProcessCopier::WaitForAll(absl::Duration timeout) {
  const absl::Status status =
      WaitFor([this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(
                  mutex_) { return cudaStreamQuery(stream_); },
              timeout);
  if (!stalled_) {
    for (Table& table : tables_) table.used = false;
  }
  return status;
}

absl::Status ProcessCopier::WaitFor(const std::function<cudaError_t()>& query,
                                    absl::Duration timeout) {
  const absl::Time start = absl::Now();
  while (true) {
    const cudaError_t error = query();
    if (error != cudaErrorNotReady) {
      stalled_ = false;
      return CheckCuda(error, "a copy to or from a GPU");
    }
    const absl::Duration waited = absl::Now() - start;
    if (waited > timeout) {
      stalled_ = true;
      return MakeError(absl::StatusCode::kDeadlineExceeded, "DEVICE_STALLED",
                       absl::StrCat(name_, " has not done a copy for ",
                                    absl::FormatDuration(timeout)));
    }
    // An engine stands still meanwhile: not much longer than the copy takes.
    absl::SleepFor(
        std::min(waited / 64 + absl::Microseconds(5), absl::Milliseconds(1)));
  }
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
