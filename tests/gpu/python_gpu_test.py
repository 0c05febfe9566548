"""The Python client with tensors on GPUs, over the simulator: no torch with CUDA is needed, as the package asks
a tensor only for its device, type, address and strides.

Usage (by python_gpu_test.sh): python_gpu_test.py DAEMON
"""

import array
import ctypes
import json
import os
import pathlib
import signal
import struct
import subprocess
import sys
import tempfile
import time
import types
import unittest
from unittest import mock

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

    def __init__(self, device, shape, strides=None, dtype="torch.bfloat16"):
        self.dtype = dtype
        self.itemsize = 4 if dtype == "torch.float32" else 2
        self.shape = shape
        self.device = types.SimpleNamespace(type="cuda", index=device)
        self._strides = strides or (shape[1], 1)
        self.size = self.itemsize * (sum((n - 1) * s for n, s in zip(shape, self._strides)) + 1)
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

    def new_empty(self, shape, dtype):
        return GpuTensor(self._device, shape, dtype=dtype)

    def copy_(self, other):
        raise NotImplementedError

    def free(self):
        self._check(CUDART.cudaSetDevice(self._device))
        self._check(CUDART.cudaFree(self._pointer))


def parts(tensor, name="w"):
    return [tensors.Part(name, tensors.to_dtype(tensor.dtype), tuple(tensor.shape), None, None, tensor)]


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

    def test_fp32_masters_are_cast_by_the_daemon(self):
        masters = GpuTensor(0, (40, 64), dtype="torch.float32")
        live = GpuTensor(1, (40, 64))
        copied = mock.Mock(side_effect=AssertionError("nothing is made or copied in the trainer"))
        with mock.patch.object(GpuTensor, "new_empty", copied), mock.patch.object(
            GpuTensor, "copy_", copied
        ), weightsync.Trainer("m", address=self.address, dtype=weightsync.DType.BF16) as trainer:
            self.held = parts(masters)
            trainer.register({})
            self.held = parts(live)
            worker = weightsync.Worker("m", "r", {}, address=self.address)
            worker.wait_registered(30)
            for version in (1, 2):
                values = [(i * 2654435761 + version * 40503) % 10**9 / 3e8 for i in range(40 * 64)]
                masters.write(struct.pack(f"{len(values)}f", *values))
                self.held = parts(masters)
                trainer.publish().wait(60)
                found = array.array("H", live.read())
                for value, bits in zip(values, found):
                    word = struct.unpack("I", struct.pack("f", value))[0]
                    self.assertEqual(bits, (word + 0x7FFF + (word >> 16 & 1)) >> 16)
            worker.close()
            CLOSED.append(worker)
        CLOSED.append(trainer)
        for tensor in (masters, live):
            tensor.free()

    def test_another_cast_is_made_on_the_gpu(self):
        """Of a pair that the daemon does not know: here bf16 to fp16, by what stands for torch."""
        source = GpuTensor(0, (40, 64))
        live = GpuTensor(1, (40, 64), dtype="torch.float16")
        made = []
        new_empty = GpuTensor.new_empty

        def remember(tensor, shape, dtype):
            made.append(new_empty(tensor, shape, dtype))
            return made[-1]

        with mock.patch.object(GpuTensor, "new_empty", remember), mock.patch.object(
            GpuTensor, "copy_", lambda to, other: to.write(bytes(b ^ 0x55 for b in other.read()))
        ), mock.patch.object(
            tensors, "torch_dtype", lambda dtype: {"F16": "torch.float16"}[dtype.name]
        ), weightsync.Trainer("m", address=self.address, dtype=weightsync.DType.F16) as trainer:
            self.held = parts(source)
            trainer.register({})
            self.held = parts(live)
            worker = weightsync.Worker("m", "r", {}, address=self.address)
            worker.wait_registered(30)
            for _ in (1, 2):
                data = os.urandom(source.size)
                source.write(data)
                self.held = parts(source)
                trainer.publish().wait(60)
                self.assertEqual(live.read(), bytes(b ^ 0x55 for b in data))
            worker.close()
            CLOSED.append(worker)
        CLOSED.append(trainer)
        # One, and it was used again; nobody has it open any more.
        self.assertEqual(len(made), 1)
        for tensor in (*made, source, live):
            tensor.free()

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
        source.free()


if __name__ == "__main__":
    unittest.main(verbosity=2)
