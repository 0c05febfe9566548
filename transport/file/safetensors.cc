#include "transport/file/safetensors.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "transport/error.h"
#include "transport/host/unique_fd.h"

namespace weightsync {
namespace transport {
namespace {

// A header is an object of objects of arrays; unknown keys may hold anything,
// but not for ever.
constexpr int kMaxDepth = 16;

absl::Status Invalid(absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "SAFETENSORS_INVALID",
                   absl::StrCat("This is no safetensors file: ", message, "."));
}

// A name from the file, for a sentence.
std::string Quoted(absl::string_view name) {
  constexpr size_t kShown = 200;
  return absl::StrCat("\"", name.substr(0, kShown),
                      name.size() > kShown ? "..." : "", "\"");
}

// Builds the entries from the parser's events, without a tree: a hostile header
// costs no more than its tensors do.
class HeaderHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderHandler(SafetensorsHeader* header) : header_(header) {}

  const std::string& error() const { return error_; }

  bool null() override { return Scalar("null"); }
  bool boolean(bool) override { return Scalar("a boolean"); }
  bool number_integer(number_integer_t) override {
    return Scalar("a negative number");
  }
  bool number_float(number_float_t, const string_t&) override {
    return Scalar("a number that is not whole");
  }
  bool binary(binary_t&) override { return Scalar("binary"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (skipping()) return true;
    if (where_ != Where::kShape && where_ != Where::kOffsets) {
      return Scalar("a number");
    }
    if (value > static_cast<number_unsigned_t>(INT64_MAX)) {
      return Error(absl::StrCat("a number of ", Quoted(entry_.name),
                                " is larger than 2^63"));
    }
    const int64_t number = static_cast<int64_t>(value);
    if (where_ == Where::kShape) {
      entry_.shape.push_back(number);
    } else {
      offsets_.push_back(number);
    }
    return true;
  }

  bool string(string_t& value) override {
    if (skipping()) return true;
    if (where_ == Where::kMetadata) {
      if (!header_->metadata.emplace(key_, value).second) {
        return Error(absl::StrCat("its metadata has ", Quoted(key_), " twice"));
      }
      return true;
    }
    if (where_ == Where::kTensor && key_ == "dtype") {
      entry_.dtype = value;
      return true;
    }
    return Scalar("a string");
  }

  bool start_object(size_t) override {
    if (++depth_ > kMaxDepth) return Error("its header is nested too deeply");
    if (skipping()) return true;
    switch (where_) {
      case Where::kNowhere:
        where_ = Where::kTop;
        return true;
      case Where::kTop:
        if (key_ == "__metadata__") {
          where_ = Where::kMetadata;
          return true;
        }
        where_ = Where::kTensor;
        entry_ = SafetensorsTensor();
        entry_.name = key_;
        offsets_.clear();
        seen_.clear();
        return true;
      default:
        return Unexpected("an object");
    }
  }

  bool end_object() override {
    --depth_;
    if (skip_from_ > 0) {
      if (depth_ < skip_from_) skip_from_ = 0;
      return true;
    }
    if (where_ == Where::kTensor) {
      where_ = Where::kTop;
      return EndTensor();
    }
    where_ = where_ == Where::kMetadata ? Where::kTop : Where::kNowhere;
    return true;
  }

  bool start_array(size_t) override {
    if (++depth_ > kMaxDepth) return Error("its header is nested too deeply");
    if (skipping()) return true;
    if (where_ == Where::kTensor && key_ == "shape") {
      where_ = Where::kShape;
      return true;
    }
    if (where_ == Where::kTensor && key_ == "data_offsets") {
      where_ = Where::kOffsets;
      return true;
    }
    return Unexpected("an array");
  }

  bool end_array() override {
    --depth_;
    if (skip_from_ > 0) {
      if (depth_ < skip_from_) skip_from_ = 0;
      return true;
    }
    where_ = Where::kTensor;
    return true;
  }

  bool key(string_t& value) override {
    if (skipping()) return true;
    key_ = value;
    if (where_ == Where::kTop) {
      if (!names_.insert(key_).second) {
        return Error(absl::StrCat("its header has ", Quoted(key_), " twice"));
      }
    } else if (where_ == Where::kTensor) {
      if (!seen_.insert(key_).second) {
        return Error(
            absl::StrCat(Quoted(entry_.name), " has ", Quoted(key_), " twice"));
      }
    }
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    return Error(absl::StrCat("its header is no JSON, at byte ", position));
  }

 private:
  enum class Where { kNowhere, kTop, kMetadata, kTensor, kShape, kOffsets };

  bool skipping() const { return skip_from_ > 0; }

  bool Error(std::string message) {
    if (error_.empty()) error_ = std::move(message);
    return false;
  }

  // Keys of a tensor that the format does not know are passed over, with all
  // that they hold; at other places only what is known may stand.
  bool Scalar(absl::string_view what) {
    if (skipping()) return true;
    if (where_ == Where::kTensor && UnknownKey()) return true;
    return Unexpected(what);
  }
  bool Unexpected(absl::string_view what) {
    if (where_ == Where::kTensor && UnknownKey()) {
      skip_from_ = depth_;
      return true;
    }
    std::string place = "its header";
    if (where_ == Where::kMetadata) place = "its metadata";
    if (where_ >= Where::kTensor) place = Quoted(entry_.name);
    return Error(absl::StrCat(place, " has ", what, " where none belongs"));
  }
  bool UnknownKey() const {
    return key_ != "dtype" && key_ != "shape" && key_ != "data_offsets";
  }

  bool EndTensor() {
    if (!seen_.contains("dtype") || !seen_.contains("shape") ||
        offsets_.size() != 2) {
      return Error(absl::StrCat(Quoted(entry_.name),
                                " lacks its type, its shape or two offsets"));
    }
    entry_.begin = offsets_[0];
    entry_.end = offsets_[1];
    header_->tensors.push_back(std::move(entry_));
    return true;
  }

  SafetensorsHeader* const header_;
  std::string error_;
  Where where_ = Where::kNowhere;
  int depth_ = 0;
  int skip_from_ = 0;  // depth of the value that is passed over; 0: none
  std::string key_;
  SafetensorsTensor entry_;
  std::vector<int64_t> offsets_;
  absl::flat_hash_set<std::string> seen_;
  absl::flat_hash_set<std::string> names_;
};

// Bytes of the tensor; false when they are no number.
bool TensorBytes(const SafetensorsTensor& tensor, int64_t* bytes) {
  // Zeros first, as the format has no limit beside them.
  int64_t elements = 1;
  for (const int64_t extent : tensor.shape) {
    if (extent < 0 || __builtin_mul_overflow(elements, extent, &elements)) {
      return false;
    }
  }
  int64_t bits;
  if (__builtin_mul_overflow(
          elements, int64_t{SafetensorsDTypeBits(tensor.dtype)}, &bits) ||
      bits % 8 != 0) {
    return false;
  }
  *bytes = bits / 8;
  return true;
}

}  // namespace

int SafetensorsDTypeBits(absl::string_view dtype) {
  static constexpr struct {
    const char* name;
    int bits;
  } kTypes[] = {
      {"BOOL", 8},        {"U8", 8},      {"I8", 8},   {"F8_E5M2", 8},
      {"F8_E4M3", 8},     {"F8_E8M0", 8}, {"I16", 16}, {"F8_E4M3FNUZ", 8},
      {"F8_E5M2FNUZ", 8}, {"U16", 16},    {"F16", 16}, {"BF16", 16},
      {"I32", 32},        {"U32", 32},    {"F32", 32}, {"I64", 64},
      {"U64", 64},        {"F64", 64},    {"C64", 64}, {"F4", 4},
      {"F6_E2M3", 6},     {"F6_E3M2", 6},
  };
  for (const auto& type : kTypes) {
    if (dtype == type.name) return type.bits;
  }
  return 0;
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(
    absl::string_view start, int64_t file_bytes) {
  if (file_bytes < 8 || start.size() < 8) {
    return Invalid("it is shorter than 8 bytes");
  }
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) {
    length = length << 8 | static_cast<unsigned char>(start[i]);
  }
  if (length > static_cast<uint64_t>(kMaxSafetensorsHeaderBytes)) {
    return Invalid(
        absl::StrCat("a header of ", length, " bytes is more than 100 MB"));
  }
  if (length > static_cast<uint64_t>(file_bytes - 8) ||
      length > start.size() - 8) {
    return Invalid(
        absl::StrCat("a header of ", length, " bytes is longer than the file"));
  }
  SafetensorsHeader header;
  header.data_begin = 8 + static_cast<int64_t>(length);
  const absl::string_view json = start.substr(8, length);
  HeaderHandler handler(&header);
  // The parser would take a zero byte for the end of the text.
  if (json.empty() || json[0] != '{' ||
      json.find('\0') != absl::string_view::npos) {
    return Invalid("its header is no JSON");
  }
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &handler)) {
    return Invalid(handler.error());
  }

  std::stable_sort(header.tensors.begin(), header.tensors.end(),
                   [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
                     return std::make_pair(a.begin, a.end) <
                            std::make_pair(b.begin, b.end);
                   });
  const int64_t data_bytes = file_bytes - header.data_begin;
  int64_t expected = 0;
  for (SafetensorsTensor& tensor : header.tensors) {
    if (SafetensorsDTypeBits(tensor.dtype) == 0) {
      return Invalid(absl::StrCat(Quoted(tensor.name), " has the type ",
                                  Quoted(tensor.dtype), ", which is none"));
    }
    int64_t bytes = 0;
    if (!TensorBytes(tensor, &bytes)) {
      return Invalid(
          absl::StrCat("the shape of ", Quoted(tensor.name), " is too large"));
    }
    if (tensor.begin != expected) {
      return Invalid(absl::StrCat(
          "the bytes of ", Quoted(tensor.name), " begin at ", tensor.begin,
          tensor.begin < expected ? ", inside of others" : ", after a hole"));
    }
    if (tensor.end < tensor.begin || tensor.end - tensor.begin != bytes) {
      return Invalid(absl::StrCat(Quoted(tensor.name), " has ",
                                  tensor.end - tensor.begin,
                                  " bytes; its shape and type make ", bytes));
    }
    if (tensor.end > data_bytes) {
      return Invalid(absl::StrCat("the bytes of ", Quoted(tensor.name),
                                  " go beyond the end of the file"));
    }
    expected = tensor.end;
  }
  if (expected != data_bytes) {
    return Invalid(absl::StrCat("the file has ", data_bytes - expected,
                                " bytes behind its last tensor"));
  }
  for (SafetensorsTensor& tensor : header.tensors) {
    tensor.begin += header.data_begin;
    tensor.end += header.data_begin;
  }
  return header;
}

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(
    int fd, const std::string& path) {
  struct stat info;
  if (fstat(fd, &info) != 0) {
    return MakeErrnoError(absl::StatusCode::kUnavailable, "FILE_UNREADABLE",
                          path, errno);
  }
  if (!S_ISREG(info.st_mode)) return Invalid("it is no regular file");

  std::string start;
  // Appends up to `bytes` bytes of the file.
  const auto read_more = [&](size_t bytes) -> absl::Status {
    const size_t wanted = start.size() + bytes;
    while (start.size() < wanted) {
      const size_t have = start.size();
      start.resize(wanted);
      const ssize_t got =
          pread(fd, &start[have], wanted - have, static_cast<off_t>(have));
      start.resize(have + (got > 0 ? static_cast<size_t>(got) : 0));
      if (got == 0) break;
      if (got < 0 && errno != EINTR) {
        return MakeErrnoError(absl::StatusCode::kUnavailable, "FILE_UNREADABLE",
                              path, errno);
      }
    }
    return absl::OkStatus();
  };
  absl::Status status = read_more(8);
  if (!status.ok()) return status;
  if (start.size() == 8) {
    uint64_t length = 0;
    memcpy(&length, start.data(), 8);
    // Memory is taken only for what the file has; the rest is refused below.
    const uint64_t there = static_cast<uint64_t>(info.st_size) - 8;
    if (length <= kMaxSafetensorsHeaderBytes && length <= there) {
      status = read_more(length);
      if (!status.ok()) return status;
    }
  }
  return ParseSafetensorsHeader(start, info.st_size);
}

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(
    const std::string& path) {
  UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) {
    const int error = errno;
    if (error == ENOENT || error == ENOTDIR) {
      return MakeErrnoError(absl::StatusCode::kNotFound, "FILE_UNKNOWN", path,
                            error);
    }
    if (error == EACCES || error == EPERM) {
      return MakeErrnoError(absl::StatusCode::kPermissionDenied, "FILE_DENIED",
                            path, error);
    }
    return MakeErrnoError(absl::StatusCode::kUnavailable, "FILE_UNREADABLE",
                          path, error);
  }
  return ReadSafetensorsHeader(fd.get(), path);
}

absl::StatusOr<std::string> MakeSafetensorsHeader(
    absl::Span<const SafetensorsTensor> tensors,
    const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    int64_t bytes = 0;
    int64_t end = 0;
    if (SafetensorsDTypeBits(tensor.dtype) == 0 ||
        SafetensorsDTypeBits(tensor.dtype) % 8 != 0) {
      return Invalid(absl::StrCat(Quoted(tensor.name), " has the type ",
                                  Quoted(tensor.dtype)));
    }
    if (!TensorBytes(tensor, &bytes) ||
        __builtin_add_overflow(offset, bytes, &end)) {
      return Invalid(
          absl::StrCat("the shape of ", Quoted(tensor.name), " is too large"));
    }
    if (tensor.name == "__metadata__" || json.contains(tensor.name)) {
      return Invalid(absl::StrCat(Quoted(tensor.name), " occurs twice"));
    }
    json[tensor.name] = {{"dtype", tensor.dtype},
                         {"shape", tensor.shape},
                         {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = json.dump(
      -1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string header(8, '\0');
  for (int i = 0; i < 8; ++i) {
    header[i] = static_cast<char>(text.size() >> (8 * i));
  }
  return header + text;
}

}  // namespace transport
}  // namespace weightsync
