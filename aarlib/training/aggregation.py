"""FDAA and the static calibrator as methods: true next-token CE through the changed aggregation, two penalties (DESIGN 2.5)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from aarlib.audit.head import kl_to_native
from aarlib.fdaa.attach import AggregationHandle, Scored, attach_fdaa
from aarlib.fdaa.config import FDAAConfig, StaticCalibratorConfig
from aarlib.training.objectives import IGNORED, Term, next_token_ce
from aarlib.training.prefix import FrozenPrefix, resumed

PREFIX = "prefix"
"""Key of a batch under which a Prefix of its rows may be handed to `loss`."""


class Assignment(NamedTuple):
    domain: int
    layer: int


def assignment(unit: int, num_domains: int, layers: Sequence[int]) -> Assignment:
    """The unit rule: domain = unit mod d, layer = layers[(unit div d) mod n]. A function of the global row index alone."""
    return Assignment(unit % num_domains, layers[unit // num_domains % len(layers)])


class AggregationMethod:
    """Trains a head, or the static calibrator, at one layer at a time; everything below its weighted sum has no graph."""

    def __init__(self, config: FDAAConfig | StaticCalibratorConfig, seed: int) -> None:
        self.config = config
        self.seed = seed
        self._handle: AggregationHandle | None = None

    @property
    def first_trainable_layer(self) -> int:
        return self.config.layers[0]

    def attach(self, model: nn.Module) -> AggregationHandle:
        self._handle = attach_fdaa(model, self.config, seed=self.seed)
        return self._handle

    def acting_layer(self, batch: Mapping[str, Any], step: int) -> int:
        """Of the batch's `unit` [B] and `num_domains`; a batch without them is a unit of its own, number `step`.

        Raises ValueError where the rows belong to units of different layers.
        """
        units = {step} if "unit" not in batch else set(batch["unit"].tolist())
        num_domains = int(batch.get("num_domains", 1))
        layers = {assignment(unit, num_domains, self.config.layers).layer for unit in units}
        if len(layers) != 1:
            raise ValueError(
                f"units {sorted(units)} of one batch train layers {sorted(layers)}; split global batches at unit boundaries"
            )
        return layers.pop()

    def loss(self, model: nn.Module, batch: Mapping[str, Any], step: int) -> dict[str, Term]:
        """{"ce", "kl_penalty", "score_penalty"}: sums over target tokens, the penalties multiplied by their lambda."""
        assert self._handle is not None, "attach the method first"
        layer = self.acting_layer(batch, step)
        prefix = batch.get(PREFIX)
        if prefix is None:
            self._handle.enabled = False
            prefix = FrozenPrefix(self._handle.anatomy, self.first_trainable_layer)(batch, layer)
            self._handle.enabled = True
        tail = {"inputs_embeds": prefix.residual, "labels": batch["labels"], "attention_mask": batch["attention_mask"]}
        with resumed(self._handle, prefix), self._handle.scoring() as scored:
            ce_sum_B, num_targets_B = next_token_ce(model, tail)
        count = num_targets_B.sum()
        kl_sum, square_sum = penalties(scored[layer], batch["labels"])
        return {
            "ce": Term(ce_sum_B.sum(), count),
            "kl_penalty": Term(self.config.kl_weight * kl_sum, count),
            "score_penalty": Term(self.config.score_weight * square_sum, count),
        }


class Penalties(NamedTuple):
    kl_sum: Tensor
    square_sum: Tensor


def penalties(scored: Scored, labels: Tensor) -> Penalties:
    """KL(q || p) and ||s||^2 summed over the positions [B, S] that predict a target."""
    predicts_T = nn.functional.pad(labels[:, 1:] != IGNORED, (0, 1)).flatten()
    kl_T = kl_to_native(scored.weights, scored.scores)
    square_T = scored.scores.square().sum(dim=-1)
    return Penalties((kl_T * predicts_T).sum(), (square_T * predicts_T).sum())
