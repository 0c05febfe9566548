"""The repositories that stand for what is installed on the machine."""

load("//third_party/cuda:cuda_configure.bzl", "cuda_configure")
load("//third_party/system:system_configure.bzl", "system_configure")

def weightsync_repositories():
    system_configure(name = "system")
    cuda_configure(name = "cuda_config")
