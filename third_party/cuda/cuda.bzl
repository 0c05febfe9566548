"""cuda_library and cuda_fatbin: kernels, compiled by the toolkit's nvcc."""

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

# What carries kernels where there is an nvcc, and none where there is not.
_REQUIRES_TOOLKIT = select({
    "@cuda_config//:has_cuda": [],
    "//conditions:default": ["@platforms//:incompatible"],
})

# The same as REQUIRES_NVCC, and NCCL too.
REQUIRES_NVCC_AND_NCCL = select({
    "@cuda_config//:has_nccl": [],
    "//conditions:default": ["@platforms//:incompatible"],
}) if NVCC else ["@platforms//:incompatible"]

def _flags(more):
    flags = [
        "-std=c++17",
        "-O3",
        "-Werror all-warnings",
    ] + more
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
            cmd = NVCC + " " + _flags(["-lineinfo", "-Xcompiler=-fPIC,-Wall,-g1"]) +
                  " -I. -c $(location %s) -o $@" % src,
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

def cuda_fatbin(name, src, symbol, textual_hdrs = []):
    """Kernels as bytes, for a program that has no cudart linked in to register them.

    They lie from `symbol` to `symbol`_end (const char[], extern "C"), for
    cuModuleLoadData. Not compressed: drivers do not know what newer toolkits
    compress with. Where there is no nvcc, there are no bytes.

    Args:
      name: of the target, a cc_library.
      src: a .cu file. Its kernels have C++ names.
      symbol: where they begin.
      textual_hdrs: files of this repository that src includes. All of them.
    """
    fatbin = name + ".fatbin"
    object = name + ".fatbin.o"
    compile = NVCC + " " + _flags(["--no-compress"]) + " -I. -fatbin $(location %s) -o" % src
    assembly = "\\n".join([
        ".section .rodata",
        ".balign 64",
        ".globl {s}, {s}_end",
        "{s}:",
        ".incbin \"%s\"",
        "{s}_end:",
        ".byte 0",
        ".section .note.GNU-stack,\"\",%%progbits",
        "",
    ]).format(s = symbol)
    native.genrule(
        name = object.replace(".", "_"),
        srcs = [src] + textual_hdrs,
        outs = [
            fatbin,
            object,
        ],
        cmd = (compile if NVCC else ": >") + " $(location %s) && " % fatbin +
              "printf '%s' $(location %s) | as -o $(location %s)" % (assembly, fatbin, object),
        message = "Compiling kernels for %d architectures" % len(_ARCHITECTURES),
        target_compatible_with = _REQUIRES_TOOLKIT,
    )
    cc_library(
        name = name,
        srcs = [object],
        linkstatic = True,
        target_compatible_with = _REQUIRES_TOOLKIT,
    )
