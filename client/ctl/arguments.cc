#include "client/ctl/arguments.h"

#include <algorithm>
#include <iterator>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace weightsync {
namespace ctl {

namespace {

// Options with a value, and whose they are.
constexpr struct {
  const char* name;
  const char* command;
} kCommandOptions[] = {
    {"--mode", "pause"},           {"--template", "save"},
    {"--max_shard_bytes", "save"}, {"--version", "load"},
    {"--pause_mode", "load"},      {"--rules", "names"},
};

}  // namespace

absl::StatusOr<Arguments> ParseArguments(const std::vector<std::string>& args,
                                         const std::string& default_address) {
  Arguments parsed;
  parsed.address = default_address;
  const auto usage = [](const std::string& message) {
    return absl::InvalidArgumentError(message);
  };
  for (size_t i = 0; i < args.size(); ++i) {
    std::string name = args[i];
    if (!absl::StartsWith(name, "-") || name == "-") {
      if (parsed.command.empty()) {
        parsed.command = name;
      } else {
        parsed.positional.push_back(name);
      }
      continue;
    }
    if (name == "--json") {
      parsed.json = true;
      continue;
    }
    if (name == "--undo") {
      parsed.undo = true;
      continue;
    }
    if (name == "--overwrite") {
      parsed.overwrite = true;
      continue;
    }
    if (name == "--help" || name == "-h") {
      parsed.help = true;
      continue;
    }
    std::string value;
    const size_t equals = name.find('=');
    if (equals != std::string::npos) {
      value = name.substr(equals + 1);
      name.resize(equals);
    }
    const bool of_plan =
        absl::StartsWith(name, "--") && IsPlanOption(name.substr(2));
    const bool of_command = std::any_of(
        std::begin(kCommandOptions), std::end(kCommandOptions),
        [&name](const auto& option) { return name == option.name; });
    if (name != "--address" && name != "--timeout" && !of_command && !of_plan) {
      return usage(absl::StrCat("unknown option ", name));
    }
    if (equals == std::string::npos) {
      if (i + 1 == args.size()) {
        return usage(absl::StrCat(name, " needs a value"));
      }
      value = args[++i];
    }
    if (of_plan) {
      parsed.options.emplace_back(name.substr(2), value);
      continue;
    }
    if (name == "--address") {
      parsed.address = value;
      continue;
    }
    if (of_command) {
      parsed.values[name] = value;
      continue;
    }
    absl::Duration timeout;
    if (!absl::ParseDuration(value, &timeout) ||
        timeout <= absl::ZeroDuration()) {
      return usage(absl::StrCat("--timeout ", value,
                                " is no time: write 500ms, 10s or 2m"));
    }
    parsed.timeout = timeout;
  }
  // What a command does not know it must not seem to have heeded.
  if (parsed.undo && parsed.command != "drain") {
    return usage("--undo is an option of drain only");
  }
  if (parsed.overwrite && parsed.command != "save") {
    return usage("--overwrite is an option of save only");
  }
  for (const auto& option : kCommandOptions) {
    if (parsed.values.count(option.name) != 0 &&
        parsed.command != option.command) {
      return usage(absl::StrCat(option.name, " is an option of ",
                                option.command, " only"));
    }
  }
  if (!parsed.options.empty() && parsed.command != "plan") {
    return usage(absl::StrCat("--", parsed.options[0].first,
                              " is an option of plan only"));
  }
  return parsed;
}

}  // namespace ctl
}  // namespace weightsync
