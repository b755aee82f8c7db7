"""Without a GPU the Triton kernels run in its interpreter; Triton decides that when it is first imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
