"""@system: libraries of the distribution as cc_library targets.

Headers and libraries lie on the compiler's own search paths, so that a target
is just its linker options. Bazel does not watch those paths: after an upgrade
of a library's packages run `bazel clean` (and drop your disk cache).
"""

# Target -> (header that proves it is installed, libraries, other targets).
# Dependents stand before what they depend on, as a static archive needs it.
_LIBRARIES = {
    "benchmark": ("benchmark/benchmark.h", ["benchmark", "pthread"], []),
    "benchmark_main": ("benchmark/benchmark.h", ["benchmark_main"], ["benchmark"]),
    "civetweb": ("civetweb.h", ["civetweb"], []),
    "gflags": ("gflags/gflags.h", ["gflags"], []),
    "glog": ("glog/logging.h", ["glog"], ["gflags"]),
    "gmock": ("gmock/gmock.h", ["gmock"], ["gtest"]),
    "grpc++": ("grpcpp/grpcpp.h", ["grpc++", "grpc", "gpr"], ["protobuf", "absl"]),
    "grpc++_reflection": (
        "grpcpp/ext/proto_server_reflection_plugin.h",
        ["grpc++_reflection"],
        ["grpc++"],
    ),
    "grpcpp_channelz": (
        "grpcpp/ext/channelz_service_plugin.h",
        ["grpcpp_channelz"],
        ["grpc++"],
    ),
    "gtest": ("gtest/gtest.h", ["gtest", "pthread"], []),
    # Also gmock's main would do; this one serves tests with and without gmock.
    "gtest_main": ("gtest/gtest.h", ["gtest_main"], ["gtest"]),
    "nlohmann_json": ("nlohmann/json.hpp", [], []),
    "openssl": ("openssl/ssl.h", ["ssl", "crypto"], []),
    "prometheus_cpp": (
        "prometheus/registry.h",
        ["prometheus-cpp-core"],
        [],
    ),
    "protobuf": ("google/protobuf/message.h", ["protobuf", "pthread"], []),
    "re2": ("re2/re2.h", ["re2"], []),
    "xxhash": ("xxhash.h", ["xxhash"], []),
}

# Names for readers of a BUILD file. All are the same target: only what a binary
# uses of it is linked (--as-needed).
_ABSL = [
    "algorithm_container",
    "any_invocable",
    "base",
    "bits",
    "cleanup",
    "cord",
    "core_headers",
    "flat_hash_map",
    "flat_hash_set",
    "function_ref",
    "hash",
    "inlined_vector",
    "int128",
    "node_hash_map",
    "numeric",
    "optional",
    "random",
    "span",
    "stacktrace",
    "status",
    "statusor",
    "str_format",
    "strings",
    "symbolize",
    "synchronization",
    "time",
    "type_traits",
    "variant",
]

def _find_header(ctx, header):
    for root in ["/usr/local/include", "/usr/include"]:
        if ctx.path(root + "/" + header).exists:
            return True
    return False

def _absl_libraries(ctx):
    result = ctx.execute([
        "sh",
        "-c",
        "ls /usr/local/lib/libabsl_*.so /usr/local/lib/*/libabsl_*.so" +
        " /usr/lib/libabsl_*.so /usr/lib64/libabsl_*.so /usr/lib/*/libabsl_*.so 2>/dev/null",
    ])
    names = {}
    for line in result.stdout.splitlines():
        name = line.split("/")[-1]

        # The flags library registers --flagfile and friends when it is linked,
        # beside gflags' own; nothing here uses it.
        if not name.startswith("libabsl_flags"):
            names[name[len("lib"):-len(".so")]] = True
    return sorted(names.keys())

def _target(name, libraries, deps):
    linkopts = []
    if libraries:
        linkopts = ["-Wl,--as-needed"] + ["-l" + lib for lib in libraries]
    return """
cc_library(
    name = "{name}",
    linkopts = {linkopts},
    deps = {deps},
)
""".format(name = name, linkopts = repr(linkopts), deps = repr([":" + d for d in deps]))

def _system_configure_impl(ctx):
    missing = []
    for name, (header, _, _) in _LIBRARIES.items():
        if not _find_header(ctx, header):
            missing.append("%s (%s)" % (name, header))
    absl = _absl_libraries(ctx)
    if not absl or not _find_header(ctx, "absl/base/config.h"):
        missing.append("absl (absl/base/config.h, libabsl_*.so)")
    tools = {}
    for tool in ["protoc", "grpc_cpp_plugin"]:
        path = ctx.which(tool)
        if path == None:
            missing.append(tool)
        tools[tool] = str(path)
    if missing:
        fail("These are not installed: %s. Run deploy/install_deps.sh." % ", ".join(missing))

    build = [
        "load(\"@rules_cc//cc:defs.bzl\", \"cc_library\")\n",
        "package(default_visibility = [\"//visibility:public\"])\n",
        "licenses([\"notice\"])\n",
    ]
    for name, (_, libraries, deps) in _LIBRARIES.items():
        build.append(_target(name, libraries, deps))
    build.append(_target("absl", absl + ["pthread", "rt"], []))
    for name in _ABSL:
        build.append("\nalias(\n    name = \"absl_%s\",\n    actual = \":absl\",\n)\n" % name)
    ctx.file("BUILD.bazel", "\n".join(build))
    ctx.file("tools.bzl", "".join([
        "PROTOC = %r\n" % tools["protoc"],
        "GRPC_CPP_PLUGIN = %r\n" % tools["grpc_cpp_plugin"],
    ]))

system_configure = repository_rule(
    implementation = _system_configure_impl,
    # So that `bazel sync --configure` looks again after packages were installed.
    configure = True,
    environ = ["PATH"],
    local = True,
)
