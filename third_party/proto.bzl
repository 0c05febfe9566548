"""C++ code, gRPC stubs and a descriptor set from .proto files.

The system's protoc and grpc_cpp_plugin make them, so that generated code and the
system's libprotobuf always fit each other.
"""

load("@rules_cc//cc:defs.bzl", "cc_library")
load("@system//:tools.bzl", "GRPC_CPP_PLUGIN", "PROTOC")

# Directories that an `import` of a .proto file is relative to. The targets lie in
# these packages themselves, not below them, because a cc_library may not add a
# directory above its own package to the include path.
_IMPORT_ROOTS = [
    "proto",
    "third_party/googleapis",
    "third_party/grpc-proto",
]

def _srcs_label(label):
    """//a/b:c -> //a/b:c_srcs, and //a/b -> //a/b:b_srcs."""
    if ":" not in label:
        label = label + ":" + label.split("/")[-1]
    return label + "_srcs"

def weightsync_proto_library(name, srcs, deps = [], grpc_srcs = None, visibility = ["//visibility:public"]):
    """A cc_library of generated code: #include "weightsync/v1/types.pb.h".

    Also makes `{name}_descriptor_set`: {name}.protoset, a FileDescriptorSet with
    everything that is imported and with comments.

    Args:
      name: the cc_library.
      srcs: .proto files.
      deps: other weightsync_proto_library targets that srcs import. Google's
        well-known types need none.
      grpc_srcs: those of srcs that define services; all of them by default.
      visibility: of the targets.
    """
    package = native.package_name()
    if package not in _IMPORT_ROOTS:
        fail("weightsync_proto_library belongs in one of %s" % _IMPORT_ROOTS)
    if grpc_srcs == None:
        grpc_srcs = srcs
    for src in grpc_srcs:
        if src not in srcs:
            fail("%s is in grpc_srcs, but not in srcs" % src)

    native.filegroup(
        name = name + "_srcs",
        srcs = srcs + [_srcs_label(dep) for dep in deps],
        visibility = visibility,
    )

    # Only those roots that this action was given files of: protoc warns about
    # a directory that is not there.
    protoc = "\n".join([
        "roots=",
        "for root in %s; do" % " ".join(_IMPORT_ROOTS),
        "  if [ -d $$root ]; then roots=\"$$roots -I$$root\"; fi",
        "done",
        PROTOC + " $$roots",
    ])

    paths = ["%s/%s" % (package, src) for src in srcs]
    grpc_paths = ["%s/%s" % (package, src) for src in grpc_srcs]
    stems = [src[:-len(".proto")] for src in srcs]
    grpc_stems = [src[:-len(".proto")] for src in grpc_srcs]
    headers = [s + ".pb.h" for s in stems] + [s + ".grpc.pb.h" for s in grpc_stems]
    sources = [s + ".pb.cc" for s in stems] + [s + ".grpc.pb.cc" for s in grpc_stems]

    # Output paths mirror import paths.
    out = "$(BINDIR)/" + package
    cmd = protoc + " --cpp_out=%s %s" % (out, " ".join(paths))
    if grpc_srcs:
        cmd += "\n" + PROTOC + " $$roots --plugin=protoc-gen-grpc=%s --grpc_out=%s %s" % (
            GRPC_CPP_PLUGIN,
            out,
            " ".join(grpc_paths),
        )
    native.genrule(
        name = name + "_generate",
        srcs = [":" + name + "_srcs"],
        outs = headers + sources,
        cmd = cmd,
        message = "Generating C++ for",
        visibility = ["//visibility:private"],
    )

    native.genrule(
        name = name + "_descriptor_set",
        srcs = [":" + name + "_srcs"],
        outs = [name + ".protoset"],
        cmd = protoc + " --include_imports --include_source_info --descriptor_set_out=$@ " +
              " ".join(paths),
        message = "Describing",
        visibility = visibility,
    )

    cc_library(
        name = name,
        srcs = sources,
        hdrs = headers,
        # As system headers: their warnings are not ours.
        includes = ["."],
        copts = ["-w"],
        visibility = visibility,
        deps = deps + ["@system//:protobuf"] +
               (["@system//:grpc++"] if grpc_srcs else []),
    )
