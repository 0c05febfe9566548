"""Programs over the simulated GPU."""

load("//third_party:cc.bzl", "weightsync_cc_binary")
load("//third_party/cuda:cuda.bzl", "REQUIRES_NVCC")
load("@rules_cc//cc:defs.bzl", "cc_binary")

def gpu_sim_twins(name, srcs, hdrs = [], deps = [], **kwargs):
    """A library of host twins of the kernels in .cu files: see twin.h.

    Args:
      name: of the target; the library is lib<name>.so.
      srcs: .cu files.
      hdrs: what they include from their own package.
      deps: libraries with the rest of what they include.
      **kwargs: as in cc_binary.
    """
    sources = []
    for src in srcs:
        # The host compiler takes a .cu file for something to link.
        out = src.replace("/", "_").replace(":", "_").replace(".cu", "") + "_" + name + ".twin.cc"
        native.genrule(
            name = out.replace(".", "_"),
            srcs = [src],
            outs = [out],
            cmd = "{ echo '#include \"tests/gpu/sim/twin_prelude.h\"'; cat $<; } > $@",
        )
        sources.append(out)
    cc_binary(
        name = "lib%s.so" % name,
        testonly = True,
        srcs = sources + hdrs + [
            "//tests/gpu/sim:twin_prelude.h",
            "//tests/gpu/sim:twin.h",
        ],
        copts = [
            "-O2",
            "-Wno-unknown-pragmas",
            "-DWEIGHTSYNC_HOST_TWIN",
        ],
        linkopts = ["-Wl,-Bsymbolic"],
        linkshared = True,
        deps = deps,
        **kwargs
    )

def gpu_sim_test(name, program, user = None, twins = [], data = [], env = {}, size = "small", tags = [], args = []):
    """Runs a program on a simulated machine of its own.

    It fails as well when the program is not linked with the shared cudart, or
    when the simulator found misuse or a leak in any of its processes.

    Args:
      name: of the target.
      program: label of the cc_binary.
      user: label of the program that uses CUDA, where `program` only starts it.
      twins: labels of gpu_sim_twins with the kernels of the program.
      data: as in cc_test.
      env: settings of the simulation, as in machine.h.
      size: as in cc_test.
      tags: as in cc_test.
      args: of the program.
    """
    libraries = []
    for twin in twins:
        package, _, target = twin.rpartition(":")
        libraries.append("%s:lib%s.so" % (package, target))
    native.sh_test(
        name = name,
        size = size,
        srcs = ["//tests/gpu/sim:run_simulated.sh"],
        args = ["%s=%s" % (key, env[key]) for key in sorted(env)] +
               ["$(rootpath %s)" % library for library in libraries] +
               (["--uses", "$(rootpath %s)" % user] if user else []) +
               ["--", "$(rootpath %s)" % program] + args,
        data = data + libraries + ([user] if user else []) + [
            program,
            "//tests/gpu/sim:runtime",
        ],
        tags = tags + ["no_asan", "no_tsan"],
        target_compatible_with = REQUIRES_NVCC,
    )

def gpu_sim_cc_test(name, srcs, deps = [], twins = [], data = [], env = {}, main = True, size = "small", tags = [], args = [], **kwargs):
    """A gtest program and its gpu_sim_test.

    Args:
      name: of the target; the program is <name>_program.
      srcs: as in cc_test.
      deps: as in cc_test. gtest, gmock and (with main) gtest_main are added.
      twins: as in gpu_sim_test.
      data: as in cc_test.
      env: as in gpu_sim_test.
      main: False for a test that brings its own main().
      size: as in cc_test.
      tags: as in cc_test.
      args: of the program.
      **kwargs: as in cc_binary.
    """
    weightsync_cc_binary(
        name = name + "_program",
        testonly = True,
        srcs = srcs,
        copts = ["-O0", "-U_FORTIFY_SOURCE"],
        linkstatic = True,
        target_compatible_with = REQUIRES_NVCC,
        deps = deps + [
            "@cuda_config//:cudart",
            "@system//:gmock",
            "@system//:gtest",
        ] + (["@system//:gtest_main"] if main else []),
        **kwargs
    )
    gpu_sim_test(
        name = name,
        program = ":%s_program" % name,
        twins = twins,
        data = data,
        env = env,
        size = size,
        tags = tags,
        args = args,
    )
