#include "daemon/service/fault_point.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"

namespace weightsync {
namespace daemon {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// The `update_id` of the message, or of a message in it ("pause", "resume").
std::string UpdateOf(const Message& message) {
  const auto* reflection = message.GetReflection();
  const FieldDescriptor* id =
      message.GetDescriptor()->FindFieldByName("update_id");
  if (id != nullptr && id->cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
    return reflection->GetString(message, id);
  }
  for (const char* name : {"pause", "resume", "publish_opened"}) {
    const FieldDescriptor* field =
        message.GetDescriptor()->FindFieldByName(name);
    if (field != nullptr && !field->is_repeated() &&
        field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE &&
        reflection->HasField(message, field)) {
      return UpdateOf(reflection->GetMessage(message, field));
    }
  }
  return "";
}

}  // namespace

void ReachFaultPoint(const FaultPoint& hook, absl::string_view where,
                     const Message& message) {
  if (!hook) return;
  const auto* oneof = message.GetDescriptor()->oneof_decl(0);
  const FieldDescriptor* field =
      message.GetReflection()->GetOneofFieldDescriptor(message, oneof);
  if (field == nullptr || field->name() == "heartbeat") return;
  hook(absl::StrCat(where, field->name()),
       UpdateOf(message.GetReflection()->GetMessage(message, field)));
}

}  // namespace daemon
}  // namespace weightsync
