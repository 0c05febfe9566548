"""The Python client with tensors on GPUs, over the simulator: no torch with CUDA is needed, as the package asks
a tensor only for its device, type, address and strides.

Usage (by python_gpu_test.sh): python_gpu_test.py DAEMON
"""

import ctypes
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import types
import unittest

import weightsync
from weightsync import tensors

CUDART = ctypes.CDLL("libcudart.so.13")
DAEMON = sys.argv.pop()
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
# What has been closed and is never collected: what it still had of a GPU would be a leak at the end, which the
# simulator finds.
CLOSED = []


class GpuTensor:
    """As much of a torch.Tensor on a GPU as the package looks at."""

    dtype = "torch.bfloat16"

    def __init__(self, device, shape, strides=None):
        self.shape = shape
        self.device = types.SimpleNamespace(type="cuda", index=device)
        self._strides = strides or (shape[1], 1)
        self.size = 2 * sum((n - 1) * s for n, s in zip(shape, self._strides)) + 2
        self._pointer = ctypes.c_void_p()
        self._device = device
        self._check(CUDART.cudaSetDevice(device))
        self._check(CUDART.cudaMalloc(ctypes.byref(self._pointer), ctypes.c_size_t(self.size)))

    @staticmethod
    def _check(error):
        assert error == 0, f"CUDA error {error}"

    def data_ptr(self):
        return self._pointer.value

    def stride(self):
        return self._strides

    def write(self, data):
        assert len(data) == self.size
        self._check(CUDART.cudaSetDevice(self._device))
        self._check(CUDART.cudaMemcpy(self._pointer, data, ctypes.c_size_t(self.size), HOST_TO_DEVICE))

    def read(self):
        data = ctypes.create_string_buffer(self.size)
        self._check(CUDART.cudaSetDevice(self._device))
        self._check(CUDART.cudaMemcpy(data, self._pointer, ctypes.c_size_t(self.size), DEVICE_TO_HOST))
        return data.raw

    def free(self):
        self._check(CUDART.cudaSetDevice(self._device))
        self._check(CUDART.cudaFree(self._pointer))


def parts(tensor, name="w"):
    return [tensors.Part(name, weightsync.DType.BF16, tuple(tensor.shape), None, None, tensor)]


class GpuTest(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory(prefix="ws")
        at = pathlib.Path(self.directory.name)
        self.log = open(at / "log", "w+")
        self.daemon = subprocess.Popen(
            [DAEMON, "--node=a", "--listen=", f"--unix_socket={at}/s", f"--state_dir={at}/state",
             f"--ready_file={at}/ready", "--memory=cuda", "--bucket_bytes=65536", "--store_budget_bytes=100000000"],
            stderr=self.log,
        )
        deadline = time.monotonic() + 60
        while not (at / "ready").exists():
            assert self.daemon.poll() is None and time.monotonic() < deadline, (at / "log").read_text()
            time.sleep(0.02)
        self.address = json.loads((at / "ready").read_text())["unix_socket"]
        # What a program holds is what a test says that it holds.
        self.held = []
        tensors.all_parts = lambda _weights: self.held

    def tearDown(self):
        self.daemon.send_signal(signal.SIGTERM)
        self.assertEqual(self.daemon.wait(30), 0)
        self.log.close()
        self.directory.cleanup()

    def test_tensors_go_from_gpu_to_gpu(self):
        source = GpuTensor(0, (300, 64))
        live = GpuTensor(1, (300, 64), strides=(80, 1))
        live.write(bytes(live.size))
        with weightsync.Trainer("m", address=self.address) as trainer:
            self.held = parts(source)
            trainer.register({})
            self.held = parts(live)
            worker = weightsync.Worker("m", "r", {}, address=self.address)
            worker.wait_registered(30)
            for version in (1, 2):
                data = os.urandom(source.size)
                source.write(data)
                self.held = parts(source)
                trainer.publish().wait(60)
                found = live.read()
                for row in range(300):
                    self.assertEqual(found[row * 160 : row * 160 + 128], data[row * 128 : row * 128 + 128], row)
                    self.assertEqual(found[row * 160 + 128 : row * 160 + 160].strip(b"\0"), b"")
            # Another allocation: registered anew by the publish, and the first may go.
            other = GpuTensor(0, (300, 64))
            data = os.urandom(other.size)
            other.write(data)
            self.held = parts(other)
            trainer.publish().wait(60)
            source.free()
            self.assertEqual(live.read()[:128], data[:128])
            worker.close()
            CLOSED.append(worker)
        CLOSED.append(trainer)
        other.free()
        live.free()

    def test_what_cannot_be_exported_is_named(self):
        plan = pathlib.Path(os.environ["GPU_SIM_DIR"]) / "faults"
        plan.write_text("call=cudaMalloc unexportable=1\n")
        source = GpuTensor(0, (8, 8))
        plan.write_text("\n")
        with weightsync.Trainer("m", address=self.address) as trainer:
            self.held = parts(source)
            with self.assertRaises(weightsync.WeightsyncError) as caught:
                trainer.register({})
            self.assertEqual(caught.exception.reason, "NOT_EXPORTABLE")
            self.assertIn("bounce=True", str(caught.exception))
            with self.assertRaises(NotImplementedError) as caught:
                self.held[0].dtype = weightsync.DType.F16
                trainer.register({})
            self.assertEqual(caught.exception.reason, "CUDA_MEMORY")
        source.free()


if __name__ == "__main__":
    unittest.main(verbosity=2)
