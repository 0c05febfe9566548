"""cuda_library: kernels, compiled by the toolkit's nvcc."""

load("@cuda_config//:config.bzl", "NVCC")
load("@rules_cc//cc:defs.bzl", "cc_library")

# Code for the GPUs of today, and PTX for those to come. nvcc's own default is
# sm_75 alone.
_ARCHITECTURES = ["80", "90", "100", "120"]

# What is compiled by nvcc names this as target_compatible_with. A machine may
# have the toolkit's headers and libraries without the compiler.
REQUIRES_NVCC = select({
    "@cuda_config//:has_cuda": [],
    "//conditions:default": ["@platforms//:incompatible"],
}) if NVCC else ["@platforms//:incompatible"]

# The same, and NCCL too.
REQUIRES_NVCC_AND_NCCL = select({
    "@cuda_config//:has_nccl": [],
    "//conditions:default": ["@platforms//:incompatible"],
}) if NVCC else ["@platforms//:incompatible"]

def _flags():
    flags = [
        "-std=c++17",
        "-O3",
        "-lineinfo",
        "-Werror all-warnings",
        "-Xcompiler=-fPIC,-Wall,-g1",
    ]
    for arch in _ARCHITECTURES:
        flags.append("-gencode arch=compute_%s,code=sm_%s" % (arch, arch))
    flags.append("-gencode arch=compute_%s,code=compute_%s" % (_ARCHITECTURES[0], _ARCHITECTURES[0]))
    return " ".join(flags)

def cuda_library(name, srcs, hdrs = [], textual_hdrs = [], deps = [], **kwargs):
    """A library of kernels and their launches.

    Args:
      name: of the target.
      srcs: .cu files.
      hdrs: what others include; plain C++.
      textual_hdrs: files of this repository that srcs include, hdrs apart. All
        of them: nvcc runs where only these are.
      deps: for linking. The shared cudart is added.
      **kwargs: as in cc_library.
    """
    objects = []
    for src in srcs:
        object = src.replace(".cu", ".cu.o")
        objects.append(object)
        native.genrule(
            name = object.replace(".", "_"),
            srcs = [src] + hdrs + textual_hdrs,
            outs = [object],
            # By one thread: the machine has other things to build.
            cmd = NVCC + " " + _flags() + " -I. -c $(location %s) -o $@" % src,
            message = "Compiling kernels for %d architectures" % len(_ARCHITECTURES),
            target_compatible_with = REQUIRES_NVCC,
        )
    cc_library(
        name = name,
        srcs = objects,
        hdrs = hdrs,
        linkstatic = True,
        alwayslink = True,
        target_compatible_with = REQUIRES_NVCC,
        deps = deps + ["@cuda_config//:cudart"],
        **kwargs
    )
