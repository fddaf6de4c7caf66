"""Views of an attention window (AAR paper, equation 2). M window."""

import torch
from jaxtyping import Float
from torch import Tensor

from aarlib.aar.config import View


def view_size(view: View, window: int) -> int:
    """M_v: M for `time`, floor(M/2) + 1 bins for `spectrum`."""
    return window if view == "time" else window // 2 + 1


def view_of(view: View, windows: Float[Tensor, "*rows M"]) -> Float[Tensor, "*rows M_v"]:
    """float32 features: the window itself, or log(1 + |DFT|) of its first floor(M/2)+1 bins, unnormalised.

    The magnitude is the complex abs, whose gradient at 0 is 0.
    """
    windows = windows.float()
    if view == "time":
        return windows
    return torch.log1p(torch.fft.rfft(windows, dim=-1).abs())
