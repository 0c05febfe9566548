// A program that computes on a GPU, as a trainer or an engine does beside a
// transfer, and writes down how long each piece of its work took.
//
//   gpu_load --out FILE [--smoke]   until SIGTERM
//
// A line of the file: when a piece began and ended, in seconds of the monotonic
// clock.
#include <cuda_runtime_api.h>
#include <signal.h>
#include <time.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/gpu/load_kernel.h"

namespace weightsync {
namespace load {
namespace {

// Of a piece: a kernel of a training step is about as long.
constexpr double kPieceSeconds = 0.002;

std::atomic<bool> over{false};

void Must(int error, const char* call) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "gpu_load: %s: %s\n", call,
          cudaGetErrorString(static_cast<cudaError_t>(error)));
  exit(1);
}

double Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * now.tv_nsec;
}

int Run(const char* path, bool smoke) {
  FILE* const out = fopen(path, "w");
  if (out == nullptr) {
    perror(path);
    return 1;
  }
  signal(SIGTERM, [](int) { over = true; });
  cudaDeviceProp properties;
  Must(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  const int blocks = smoke ? 1 : 4 * properties.multiProcessorCount;
  void* memory = nullptr;
  Must(cudaMalloc(&memory, sizeof(float) * kThreads * blocks), "cudaMalloc");
  cudaStream_t stream;
  Must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
       "cudaStreamCreateWithFlags");
  const auto piece = [&](int64_t rounds) {
    const double began = Now();
    Must(LaunchLoad(static_cast<float*>(memory), rounds, blocks, stream),
         "a launch");
    Must(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    return Now() - began;
  };
  int64_t rounds = 100;
  piece(rounds);
  while (!smoke && piece(rounds) < kPieceSeconds) rounds += rounds / 2;
  printf("ready\n");
  fflush(stdout);
  while (!over) {
    const double began = Now();
    const double seconds = piece(rounds);
    fprintf(out, "%.6f %.6f\n", began, began + seconds);
  }
  fclose(out);
  Must(cudaStreamDestroy(stream), "cudaStreamDestroy");
  Must(cudaFree(memory), "cudaFree");
  return 0;
}

}  // namespace
}  // namespace load
}  // namespace weightsync

int main(int argc, char** argv) {
  if (argc < 3 || argc > 4 || strcmp(argv[1], "--out") != 0 ||
      (argc == 4 && strcmp(argv[3], "--smoke") != 0)) {
    fprintf(stderr, "usage: gpu_load --out FILE [--smoke]\n");
    return 2;
  }
  return weightsync::load::Run(argv[2], argc == 4);
}
