// A model whose trainers hold it in other types than it has: fp32 masters, and
// bf16 that becomes fp8 with block scales. What must come of it is computed
// here by the definition, an element at a time.
#ifndef WEIGHTSYNC_TESTS_E2E_CAST_MODEL_H_
#define WEIGHTSYNC_TESTS_E2E_CAST_MODEL_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "client/cc/tensor.h"
#include "transport/cast_definition.h"

namespace weightsync {
namespace e2e {
namespace cast_model {

inline client::Tensor Of(const std::string& name, std::vector<int64_t> shape,
                         v1::DType dtype,
                         v1::DType stored = v1::DTYPE_UNSPECIFIED) {
  client::Tensor tensor;
  tensor.name = name;
  tensor.shape = std::move(shape);
  tensor.dtype = dtype;
  tensor.stored_dtype = stored;
  return tensor;
}

// What trainers hold.
inline std::vector<client::Tensor> Held() {
  return {Of("embed.weight", {100, 64}, v1::DTYPE_F16, v1::DTYPE_F32),
          Of("head.weight", {66, 40}, v1::DTYPE_BF16),
          Of("norm.weight", {777}, v1::DTYPE_BF16, v1::DTYPE_F32),
          Of("up.weight", {512, 300}, v1::DTYPE_F8_E4M3, v1::DTYPE_BF16)};
}

// What workers want: scales come by themselves.
inline std::vector<client::Tensor> Wanted() {
  std::vector<client::Tensor> tensors = Held();
  for (client::Tensor& tensor : tensors)
    tensor.stored_dtype = v1::DTYPE_UNSPECIFIED;
  tensors.push_back(Of("up.weight_scale_inv", {4, 3}, v1::DTYPE_F32));
  return tensors;
}

// Part `part` of `parts` of a dimension, in units of `unit`; all of it where it
// has no such dimension.
inline void Cut(client::Tensor* tensor, size_t dim, int part, int parts,
                int64_t unit) {
  if (parts == 1 || dim >= tensor->shape.size()) return;
  const int64_t extent = tensor->shape[dim];
  const int64_t each = (extent / parts + unit - 1) / unit * unit;
  client::Box box;
  box.offset.assign(tensor->shape.size(), 0);
  box.extent = tensor->shape;
  box.offset[dim] = each * part;
  box.extent[dim] = part + 1 == parts ? extent - each * part : each;
  tensor->box = box;
}

// Rows, of whole blocks.
inline std::vector<client::Tensor> ShardsOf(int rank, int ranks) {
  std::vector<client::Tensor> tensors = Held();
  for (client::Tensor& tensor : tensors) {
    Cut(&tensor, 0, rank, ranks, tensor.dtype == v1::DTYPE_F8_E4M3 ? 128 : 1);
  }
  return tensors;
}

// Columns, through the middle of blocks.
inline std::vector<client::Tensor> WantedBy(int worker, int workers) {
  std::vector<client::Tensor> tensors = Wanted();
  for (client::Tensor& tensor : tensors) Cut(&tensor, 1, worker, workers, 1);
  return tensors;
}

// All of a tensor as its trainers hold it in a version.
inline std::string HeldContent(const client::Tensor& tensor, int version) {
  int64_t elements = 1;
  for (const int64_t extent : tensor.shape) elements *= extent;
  uint64_t state = static_cast<uint64_t>(version) * 1000 + tensor.name.size();
  std::string content;
  for (int64_t i = 0; i < elements; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    // From 2^-10 to 2^6, of both signs, and some zeros.
    uint32_t bits = static_cast<uint32_t>(state >> 40) & 0x807fffffu;
    bits |= (117u + static_cast<uint32_t>(state >> 33) % 17u) << 23;
    bits |= static_cast<uint32_t>(state >> 63) << 31;
    if (state >> 58 == 5) bits = 0;
    if (tensor.stored_dtype == v1::DTYPE_F32) {
      content.append(reinterpret_cast<const char*>(&bits), 4);
    } else {
      const uint16_t half = transport::FloatToBF16(bits);
      content.append(reinterpret_cast<const char*>(&half), 2);
    }
  }
  return content;
}

// What a version is when it has been cast: by name.
inline std::map<std::string, std::string> Sent(int version) {
  std::map<std::string, std::string> sent;
  for (const client::Tensor& tensor : Held()) {
    const std::string held = HeldContent(tensor, version);
    std::string& to = sent[tensor.name];
    if (tensor.stored_dtype == v1::DTYPE_F32) {
      for (size_t at = 0; at < held.size(); at += 4) {
        uint32_t bits;
        std::memcpy(&bits, &held[at], 4);
        const uint16_t cast = tensor.dtype == v1::DTYPE_F16
                                  ? transport::FloatToF16(bits)
                                  : transport::FloatToBF16(bits);
        to.append(reinterpret_cast<const char*>(&cast), 2);
      }
    } else if (tensor.dtype == v1::DTYPE_F8_E4M3) {
      const int64_t rows = tensor.shape[0], columns = tensor.shape[1];
      const auto value = [&](int64_t r, int64_t c) {
        uint16_t bits;
        std::memcpy(&bits, &held[static_cast<size_t>(r * columns + c) * 2], 2);
        return bits;
      };
      to.resize(static_cast<size_t>(rows * columns));
      for (int64_t row = 0; row < rows; row += 128) {
        for (int64_t column = 0; column < columns; column += 128) {
          const auto each = [&](auto fn) {
            for (int64_t r = row; r < std::min(rows, row + 128); ++r)
              for (int64_t c = column; c < std::min(columns, column + 128); ++c)
                fn(r, c);
          };
          uint32_t largest = 0;
          each([&](int64_t r, int64_t c) {
            largest = std::max(largest, (value(r, c) & 0x7fffu) << 16);
          });
          const float scale = transport::BlockScale(largest);
          each([&](int64_t r, int64_t c) {
            to[static_cast<size_t>(r * columns + c)] =
                static_cast<char>(transport::BF16ToE4M3(value(r, c), scale));
          });
          sent[tensor.name + "_scale_inv"].append(
              reinterpret_cast<const char*>(&scale), 4);
        }
      }
    } else {
      to = held;
    }
  }
  return sent;
}

// The part that lies in `tensor`, dense; `whole` has elements of its bytes.
inline std::string PartOf(const client::Tensor& tensor,
                          const std::string& whole) {
  if (!tensor.box.has_value()) return whole;
  const client::Box& box = *tensor.box;
  const auto element = static_cast<size_t>(client::StoredBytes(tensor));
  const bool vector = tensor.shape.size() == 1;
  const auto columns = static_cast<size_t>(vector ? 1 : tensor.shape[1]);
  const auto first = static_cast<size_t>(vector ? 0 : box.offset[1]);
  const auto count = static_cast<size_t>(vector ? 1 : box.extent[1]);
  std::string part;
  for (int64_t row = 0; row < box.extent[0]; ++row) {
    part += whole.substr(
        (static_cast<size_t>(box.offset[0] + row) * columns + first) * element,
        count * element);
  }
  return part;
}

}  // namespace cast_model
}  // namespace e2e
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_E2E_CAST_MODEL_H_
