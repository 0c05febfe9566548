// Versions as checkpoints on a disk, and back.

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/cc/served.h"
#include "client/cc/wire_time.h"
#include "client/ctl/ctl.h"
#include "client/ctl/format.h"
#include "client/ctl/names.h"
#include "client/ctl/render.h"

namespace weightsync {
namespace ctl {

int Ctl::Save() {
  std::vector<std::string> names = arguments_.positional;
  if (names.size() == 3) {
    names = {absl::StrCat(names[0], "/", names[1]), names[2]};
  }
  if (names.size() != 2) return Usage("save needs a VERSION and a PATH");
  const absl::StatusOr<Name> version = ParseName(names[0], "versions");
  if (!version.ok()) return UsageOf(version.status());
  const absl::StatusOr<int64_t> shard_bytes = NumberOf("--max_shard_bytes");
  if (!shard_bytes.ok()) return UsageOf(shard_bytes.status());
  v1::SaveVersionRequest request;
  request.set_name(version->resource.empty()
                       ? absl::StrCat(version->model, "/versions/latest")
                       : version->resource);
  request.set_path(names[1]);
  request.set_template_path(Value("--template"));
  request.set_max_shard_bytes(*shard_bytes);
  request.set_overwrite(arguments_.overwrite);
  disk_ = true;
  SayTimeout(&request);
  v1::SaveVersionResponse response;
  const absl::Status status =
      Call("SaveVersion", [&](grpc::ClientContext* context) {
        return stub_->SaveVersion(context, request, &response);
      });
  if (!status.ok()) return Fail(status);
  return Print(response, [&] {
    return absl::StrCat(
        "version ", response.version(), " is at ", response.path(), ": ",
        Counted(response.tensor_count(), "tensor"), ", ",
        HumanBytes(response.written_bytes()), " in ",
        Counted(response.shard_count(), "file"), ", written in ",
        HumanDuration(client::FromProto(response.save_duration())), " by ",
        absl::StrJoin(response.nodes(), ", "), "\n");
  });
}

int Ctl::Load() {
  if (arguments_.positional.size() != 2) {
    return Usage("load needs a MODEL and a PATH");
  }
  const auto name = ParseTopName(arguments_.positional[0], "models");
  if (!name.ok()) return UsageOf(name.status());
  const absl::StatusOr<int64_t> number = NumberOf("--version");
  if (!number.ok()) return UsageOf(number.status());
  const absl::StatusOr<v1::PauseMode> mode = PauseModeOf("--pause_mode");
  if (!mode.ok()) return UsageOf(mode.status());
  v1::LoadVersionRequest request;
  request.set_name(*name);
  request.set_path(arguments_.positional[1]);
  request.set_version(*number);
  request.mutable_options()->set_pause_mode(*mode);
  disk_ = true;
  SayTimeout(&request);
  v1::Version version;
  const absl::Status status =
      Call("LoadVersion", [&](grpc::ClientContext* context) {
        return stub_->LoadVersion(context, request, &version);
      });
  if (!status.ok()) return Fail(status);
  return Print(version, [&] {
    return absl::StrCat(RenderVersion(version, absl::Now()), "\n",
                        arguments_.positional[1],
                        " is loaded: ", client::ServedText(version), "\n");
  });
}

}  // namespace ctl
}  // namespace weightsync
