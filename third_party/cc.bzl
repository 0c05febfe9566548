"""cc_library, cc_binary and cc_test for this project's own code.

Warnings are errors here and only here: generated code and system headers are
compiled as they come. Includes are relative to the root of the workspace:
#include "transport/digest.h".
"""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_library", "cc_test")

_WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Werror",
]

_COPTS = _WARNINGS + select({
    "//third_party:clang": ["-Wthread-safety"],
    "//conditions:default": [],
})

# A test's own code is gtest, which takes a third longer to optimize than to
# compile. What it tests is in libraries, and optimized.
_TEST_COPTS = ["-O0", "-U_FORTIFY_SOURCE"]

# What needs CUDA or NCCL names one of these as target_compatible_with. Without
# them `bazel build //...` passes over it, and so over what depends on it.
REQUIRES_CUDA = select({
    "@cuda_config//:has_cuda": [],
    "//conditions:default": ["@platforms//:incompatible"],
})

REQUIRES_NCCL = select({
    "@cuda_config//:has_nccl": [],
    "//conditions:default": ["@platforms//:incompatible"],
})

def weightsync_cc_library(name, copts = [], **kwargs):
    cc_library(
        name = name,
        copts = _COPTS + copts,
        **kwargs
    )

def weightsync_cc_binary(name, copts = [], **kwargs):
    cc_binary(
        name = name,
        copts = _COPTS + copts,
        **kwargs
    )

def weightsync_cc_test(name, copts = [], deps = [], data = [], main = True, size = "small", **kwargs):
    """A gtest program.

    Args:
      name: of the target.
      copts: added to the project's own.
      deps: gtest, gmock and (with main) gtest_main are added.
      data: as in cc_test.
      main: False for a test that brings its own main().
      size: as in cc_test.
      **kwargs: as in cc_test.
    """
    cc_test(
        name = name,
        size = size,
        copts = _COPTS + _TEST_COPTS + copts,
        data = data + ["//third_party:tsan.supp"],
        # One static program starts faster than one of fifty small libraries,
        # and sanitizers find no symbol defined twice.
        linkstatic = True,
        deps = deps + [
            "@system//:gmock",
            "@system//:gtest",
        ] + (["@system//:gtest_main"] if main else []),
        **kwargs
    )
