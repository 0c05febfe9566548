#include "client/ctl/commands.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cc/rpc.h"
#include "client/ctl/arguments.h"
#include "client/ctl/ctl.h"
#include "client/ctl/help.h"

namespace weightsync {
namespace ctl {

int Run(const std::vector<std::string>& args,
        const std::string& default_address, const Screen& screen) {
  const absl::StatusOr<Arguments> parsed =
      ParseArguments(args, default_address);
  // Also when what stands beside it cannot be read.
  const bool json = std::find(args.begin(), args.end(), "--json") != args.end();
  const auto usage = [&](const std::string& message) {
    PrintError(screen, json, absl::InvalidArgumentError(message),
               GeneralHelp());
    return kExitUsage;
  };
  const auto no_such = [&](const std::string& command) {
    PrintError(screen, json, absl::InvalidArgumentError(NoSuchCommand(command)),
               kHelpHint);
    return kExitUsage;
  };
  if (!parsed.ok()) return usage(std::string(parsed.status().message()));
  const Arguments& arguments = *parsed;
  if (arguments.command.empty() || arguments.command == "help" ||
      arguments.help) {
    std::string topic = arguments.command;
    if (topic == "help") {
      topic = arguments.positional.empty() ? "" : arguments.positional[0];
    }
    const std::string text = topic.empty() ? GeneralHelp() : CommandHelp(topic);
    if (text.empty()) return no_such(topic);
    if (json && arguments.command.empty() && !arguments.help) {
      return usage("a command is missing");
    }
    if (args.empty()) {
      *screen.err << text;
      return kExitUsage;
    }
    *screen.out << text;
    return kExitOk;
  }
  static const struct {
    const char* name;
    int (Ctl::*run)();
  } kCommands[] = {
      {"status", &Ctl::Status},     {"watch", &Ctl::Watch},
      {"models", &Ctl::Models},     {"versions", &Ctl::Versions},
      {"replicas", &Ctl::Replicas}, {"nodes", &Ctl::Nodes},
      {"prepare", &Ctl::Prepare},   {"plan", &Ctl::Plan},
      {"pause", &Ctl::Pause},       {"resume", &Ctl::Resume},
      {"rollback", &Ctl::Rollback}, {"release", &Ctl::Release},
      {"verify", &Ctl::Verify},     {"drain", &Ctl::Drain},
      {"delete", &Ctl::Delete},     {"adopt", &Ctl::Adopt},
      {"save", &Ctl::Save},         {"load", &Ctl::Load},
      {"remove", &Ctl::Remove},     {"names", &Ctl::Names},
  };
  for (const auto& command : kCommands) {
    if (arguments.command != command.name) continue;
    auto channel = client::MakeChannel(arguments.address);
    if (!channel.ok()) {
      if (json) return usage(std::string(channel.status().message()));
      *screen.err << "weightsyncctl: " << channel.status().message() << "\n";
      return kExitUsage;
    }
    return (Ctl(arguments, *std::move(channel), screen).*command.run)();
  }
  return no_such(arguments.command);
}

}  // namespace ctl
}  // namespace weightsync
