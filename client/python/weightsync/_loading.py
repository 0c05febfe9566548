"""What is around an engine's own loader when it runs on a thread of the library."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator


@contextlib.contextmanager
def loading(device: Any) -> Iterator[None]:
    """The engine's device is current here, nothing is recorded for gradients, and copies have ended at the end.

    `device`: a torch.device; None: of the CPU.
    """
    import torch

    on_gpu = getattr(device, "type", None) == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    with torch.no_grad():
        yield
    if on_gpu:
        # Installed is what lies there, and not what is on its way.
        torch.cuda.synchronize(device)


def device_of(model: Any) -> Any:
    """Of a module's first parameter; None where it has none."""
    parameters = getattr(model, "parameters", None)
    first = next(iter(parameters()), None) if callable(parameters) else None
    return getattr(first, "device", None)
