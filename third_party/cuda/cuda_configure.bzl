"""@cuda_config: the CUDA toolkit and NCCL of this machine, or their absence.

Looks in $CUDA_PATH, $CUDA_HOME, /usr/local/cuda, and for NCCL also in $NCCL_HOME
and /usr. WEIGHTSYNC_CUDA=0 (in the environment, or --repo_env) makes a build
as on a machine that has neither.

    @cuda_config//:has_cuda, :has_nccl   config_settings for select()
    @cuda_config//:cudart                headers, and the shared libcudart
    @cuda_config//:cuda_headers          headers alone
    @cuda_config//:nccl_headers          headers alone: libnccl is loaded at run time
    @cuda_config//:config.bzl            HAS_CUDA, HAS_NCCL, CUDA_VERSION, ...

libcuda is never linked: a machine without a GPU has only a stub of it.
"""

def _define(ctx, path, macro):
    """The value of `#define macro value` in a header, or ""."""
    for line in ctx.read(path).splitlines():
        words = line.replace("\t", " ").split(" ")
        words = [w for w in words if w]
        if len(words) >= 3 and words[0] == "#define" and words[1] == macro:
            return words[2]
    return ""

def _exists(ctx, path):
    return ctx.path(path).exists

def _find_cuda(ctx):
    env = ctx.os.environ
    for root in [env.get("CUDA_PATH", ""), env.get("CUDA_HOME", ""), "/usr/local/cuda"]:
        if not root or not _exists(ctx, root + "/include/cuda_runtime_api.h"):
            continue
        for lib in ["lib64", "lib", "targets/x86_64-linux/lib"]:
            # The unversioned name is what -lcudart looks for. Wheels lack it.
            if _exists(ctx, root + "/" + lib + "/libcudart.so"):
                return struct(root = root, include = root + "/include", lib = root + "/" + lib)
    return None

def _find_nccl(ctx, cuda):
    env = ctx.os.environ
    for root in [env.get("NCCL_HOME", ""), cuda.root, "/usr/local", "/usr"]:
        if root and _exists(ctx, root + "/include/nccl.h"):
            return root + "/include"
    return None

_HEADER = """load("@rules_cc//cc:defs.bzl", "cc_library")
load("@{main}//third_party/cuda:bool_setting.bzl", "bool_setting")

package(default_visibility = ["//visibility:public"])

# --@cuda_config//:cuda=false builds without CUDA although it is there.
bool_setting(
    name = "cuda",
    build_setting_default = {has_cuda},
)

bool_setting(
    name = "nccl",
    build_setting_default = {has_nccl},
)

config_setting(
    name = "has_cuda",
    flag_values = {{":cuda": "True"}},
)

config_setting(
    name = "has_nccl",
    flag_values = {{
        ":cuda": "True",
        ":nccl": "True",
    }},
)
"""

# Targets exist without CUDA too, so that a select() on has_cuda may name them.
_CUDA = """
cc_library(
    name = "cuda_headers",
    hdrs = glob(["cuda/**"], allow_empty = True),
    includes = {cuda_includes},
)

cc_library(
    name = "cudart",
    linkopts = {cudart_linkopts},
    deps = [":cuda_headers"],
)

cc_library(
    name = "nccl_headers",
    hdrs = glob(["nccl/**"], allow_empty = True),
    includes = {nccl_includes},
    deps = [":cuda_headers"],
)
"""

def _cuda_configure_impl(ctx):
    cuda = None
    if ctx.os.environ.get("WEIGHTSYNC_CUDA", "1") != "0":
        cuda = _find_cuda(ctx)
    nccl = _find_nccl(ctx, cuda) if cuda else None

    cuda_version = ""
    nvcc = ""
    linkopts = []
    if cuda:
        ctx.symlink(cuda.include, "cuda")
        cuda_version = _define(ctx, cuda.include + "/cuda_runtime_api.h", "CUDART_VERSION")
        if _exists(ctx, cuda.root + "/bin/nvcc"):
            nvcc = cuda.root + "/bin/nvcc"

        # The run path finds it where it was found here, which need not be where
        # the loader looks; a bundle for another machine brings its own.
        linkopts = ["-L" + cuda.lib, "-lcudart", "-Wl,-rpath," + cuda.lib]
    nccl_version = ""
    if nccl:
        # Only NCCL's own files: its directory may hold everything in /usr/include.
        ctx.symlink(nccl + "/nccl.h", "nccl/nccl.h")
        if _exists(ctx, nccl + "/nccl_device.h"):
            ctx.symlink(nccl + "/nccl_device.h", "nccl/nccl_device.h")
        if _exists(ctx, nccl + "/nccl_device"):
            ctx.symlink(nccl + "/nccl_device", "nccl/nccl_device")
        nccl_version = ".".join([
            _define(ctx, nccl + "/nccl.h", "NCCL_" + part)
            for part in ["MAJOR", "MINOR", "PATCH"]
        ])

    ctx.file("BUILD.bazel", _HEADER.format(
        main = "weightsync",
        has_cuda = repr(cuda != None),
        has_nccl = repr(nccl != None),
    ) + _CUDA.format(
        cuda_includes = repr(["cuda"] if cuda else []),
        cudart_linkopts = repr(linkopts),
        nccl_includes = repr(["nccl"] if nccl else []),
    ))
    ctx.file("config.bzl", "".join([
        "HAS_CUDA = %r\n" % (cuda != None),
        "HAS_NCCL = %r\n" % (nccl != None),
        "CUDA_ROOT = %r\n" % (cuda.root if cuda else ""),
        "CUDA_LIB = %r\n" % (cuda.lib if cuda else ""),
        "CUDA_VERSION = %r\n" % cuda_version,
        "NCCL_VERSION = %r\n" % nccl_version,
        # Empty where there are headers and libraries but no compiler.
        "NVCC = %r\n" % nvcc,
    ]))

cuda_configure = repository_rule(
    implementation = _cuda_configure_impl,
    configure = True,
    environ = ["CUDA_PATH", "CUDA_HOME", "NCCL_HOME", "WEIGHTSYNC_CUDA"],
    local = True,
)
