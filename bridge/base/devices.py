"""The host: the device on which modules are captured, imported and compared with eager.

Compiled code runs on the device of its backend, :attr:`bridge.compile.Backend.device`, which may be another one day.
"""

from __future__ import annotations

import torch

__all__ = ["HOST"]

HOST = torch.device("cpu")
