"""A worker extension whose model fails while it loads, once, when it is told to (vllm_cpu.py)."""

from weightsync.vllm import WorkerExtension


class FailingExtension(WorkerExtension):
    def weightsync_test_fail_once(self):
        """The next load ends after the first q_proj: half of a layer of vLLM's, which has q, k and v in one."""
        model = self.get_model()
        load_weights = model.load_weights
        self._weightsync_test_failures = 0

        def some(pairs):
            for name, tensor in pairs:
                yield name, tensor
                if "q_proj" in name:
                    self._weightsync_test_failures += 1
                    raise ValueError(f"nothing after {name}")

        def fail(pairs):
            del model.load_weights
            return load_weights(some(pairs))

        model.load_weights = fail

    def weightsync_test_failures(self):
        return self._weightsync_test_failures
