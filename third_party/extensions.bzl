"""The same repositories for Bazel 7 and newer. Bazel 4 never loads this file."""

load("//third_party:repositories.bzl", "weightsync_repositories")

def _weightsync_extension_impl(_ctx):
    weightsync_repositories()

weightsync_extension = module_extension(implementation = _weightsync_extension_impl)
