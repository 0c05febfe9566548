#include <memory>

#include "gtest/gtest.h"
#include "transport/conformance/memory_conformance.h"
#include "transport/cuda/testing.h"
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
    CudaBehindFaults, MemoryConformance,
    ::testing::Values([]() -> std::unique_ptr<MemoryFixture> {
      return std::make_unique<FaultyFixture>();
    }));

}  // namespace
}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
