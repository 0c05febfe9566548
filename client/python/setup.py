"""Builds the wheel: the shared library from Bazel, and stubs of the API from proto/.

Needs the repository around it (pip builds in the tree), Bazel with the packages of
deploy/install_deps.sh, and a protoc with gRPC's Python plugin. The distribution's protoc is taken
first: what it generates runs with the distribution's protobuf and grpcio as well as with the newest of
PyPI, while what a newer protoc generates refuses older ones.
"""

import pathlib
import shutil
import subprocess
import sys

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70
    from wheel.bdist_wheel import bdist_wheel

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LIBRARY = ROOT / "bazel-bin/client/cc/libweightsync.so"
PROTOS = ["admin", "replica", "trainer", "types"]


def build_library():
    if shutil.which("bazel"):
        subprocess.run(
            ["bazel", "build", "--noshow_progress", "//client/cc:libweightsync.so"], cwd=ROOT, check=True
        )
    if not LIBRARY.exists():
        sys.exit(
            f"setup.py: {LIBRARY} is missing: run deploy/install_deps.sh, then "
            "`bazel build //client/cc:libweightsync.so`, in the repository."
        )


def generate_stubs(target):
    """Writes weightsync/v1/*_pb2.py, *_pb2.pyi and *_pb2_grpc.py under `target`."""
    files = [f"weightsync/v1/{name}.proto" for name in PROTOS]
    outputs = [f"--python_out={target}", f"--pyi_out={target}", f"--grpc_python_out={target}"]
    protoc, plugin = shutil.which("protoc"), shutil.which("grpc_python_plugin")
    if protoc and plugin:
        command = [protoc, f"--plugin=protoc-gen-grpc_python={plugin}", f"--proto_path={ROOT / 'proto'}"]
    else:
        try:
            import grpc_tools
        except ImportError:
            sys.exit(
                "setup.py: no protoc with grpc_python_plugin: install protobuf-compiler and "
                "protobuf-compiler-grpc, or `pip install grpcio-tools` and use --no-build-isolation."
            )
        include = pathlib.Path(grpc_tools.__file__).parent / "_proto"
        command = [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"--proto_path={ROOT / 'proto'}",
            f"--proto_path={include}",
        ]
    subprocess.run(command + outputs + files, check=True)


class Build(build_py):
    def run(self):
        # What an earlier build left: modules that are gone would be packed again.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        here = pathlib.Path(__file__).resolve().parent
        target = here if getattr(self, "editable_mode", False) else pathlib.Path(self.build_lib).resolve()
        build_library()
        (target / "weightsync/_lib").mkdir(parents=True, exist_ok=True)
        copied = target / "weightsync/_lib/libweightsync.so"
        copied.unlink(missing_ok=True)
        shutil.copyfile(LIBRARY, copied)
        generate_stubs(target)


class Wheel(bdist_wheel):
    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        # A library of its own, reached through ctypes: any Python, this platform.
        return "py3", "none", super().get_tag()[2]


class Platform(Distribution):
    def has_ext_modules(self):
        return True


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel}, distclass=Platform)
