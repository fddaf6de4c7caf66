"""What the AAR paper measures of attention and routing (sections 4.3, 5.1), from recorded tensors. M window, K top_k.

Every mean is over the tokens where `mask` is true, all where it is None; `rec.mask` leaves padding out.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from aarlib.moe.record import Dispatch

UNCORRELATED = 0.1
"""The paper marks the lag at which the autocorrelation first falls below this."""


def autocorrelation(
    windows: Float[Tensor, "*rows M"], mask: Bool[Tensor, "*rows"] | None = None
) -> Float[Tensor, " M"]:
    """Normalised autocorrelation by lag 0 .. M-1, averaged over query tokens, float64.

    Of one window r_k = sum_i x_i x_(i+k) / sum_i x_i^2 with x = w - mean(w); constant windows have none and are left out. Windows
    that are padded with zeros show their padding: `whole_windows` leaves them out. ValueError where no window is left.
    """
    rows = (windows if mask is None else windows[mask.to(windows.device)]).flatten(0, -2).double()
    centred = rows - rows.mean(-1, keepdim=True)
    variance = centred.square().sum(-1)
    centred, variance = centred[variance > 0], variance[variance > 0]
    if not len(centred):
        raise ValueError("windows: none varies, so there is no autocorrelation; pass more tokens, or a longer window")
    size = rows.shape[-1]
    lags = [(centred[:, : size - lag] * centred[:, lag:]).sum(-1) / variance for lag in range(size)]
    return torch.stack(lags, dim=-1).mean(0)


def whole_windows(mask: Bool[Tensor, "B S"], window: int) -> Bool[Tensor, "B S"]:
    """The tokens with at least `window` tokens in their context, themselves included: no zero in the window is padding."""
    return mask & (mask.long().cumsum(-1) >= window)


def correlation_length(acf: Float[Tensor, " M"], threshold: float = UNCORRELATED) -> int:
    """The first lag whose autocorrelation is below `threshold`; M where none is."""
    below = (acf < threshold).nonzero()
    return int(below[0]) if len(below) else len(acf)


def sink_mass(sinks: Mapping[int, Float[Tensor, "B S"]], mask: Bool[Tensor, "B S"] | None = None) -> dict[int, float]:
    """Mean attention weight on the document's first token, by layer. That token's own weight is 1; mask it to leave it out."""
    return {layer: _mean(sink, mask) for layer, sink in sinks.items()}


def routing_change(
    found: Mapping[int, Dispatch], reference: Mapping[int, Dispatch], mask: Bool[Tensor, "B S"] | None = None
) -> dict[int, float]:
    """Share of the picks that `reference` does not make for the same token, by layer; another order is no change."""
    return {layer: picks_changed(found[layer].expert_ids, reference[layer].expert_ids, mask) for layer in found}


def picks_changed(
    expert_ids: Int[Tensor, "*rows K"], reference: Int[Tensor, "*rows K"], mask: Bool[Tensor, "*rows"] | None = None
) -> float:
    return 1 - _mean(picks_kept(expert_ids, reference).double().mean(-1), mask)


def picks_kept(expert_ids: Int[Tensor, "*rows K"], reference: Int[Tensor, "*rows K"]) -> Bool[Tensor, "*rows K"]:
    """Which picks are among those of `reference` for the same token."""
    return (expert_ids[..., :, None] == reference[..., None, :]).any(-1)


def _mean(values: Tensor, mask: Tensor | None) -> float:
    return float((values if mask is None else values[mask.to(values.device)]).double().mean())
