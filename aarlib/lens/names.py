"""Names of components, and which receivers a component reaches."""

import difflib
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

Level = Literal["layer", "head", "edge", "expert", "neuron"]
LEVELS: tuple[Level, ...] = ("layer", "head", "edge", "expert", "neuron")
Kind = Literal["embedding", "bias", "view", "attn", "moe", "shared", "mlp"]

_PATTERN = re.compile(
    r"(?P<whole>embedding|bias|view\.(?P<view>\w+))$"
    r"|(?P<kind>attn|moe|shared|mlp)\.(?P<layer>\d+)"
    r"(?:\.(?P<bias>bias)"
    r"|\.head\.(?P<head>\d+)(?:\.key\.(?P<key>\d+))?"
    r"|\.expert\.(?P<expert>\d+)(?:\.neuron\.(?P<neuron>\d+))?)?$"
)
_PARTS = {"attn": ("head", "key", "bias"), "moe": ("expert", "neuron", "bias")}


class Component(NamedTuple):
    """`attn.3.head.5.key.7` taken apart; of the finer fields only those that the name has are set."""

    name: str
    kind: Kind
    layer: int | None = None
    head: int | None = None
    key: int | None = None
    expert: int | None = None
    neuron: int | None = None
    view: str | None = None
    is_bias: bool = False

    @property
    def parent(self) -> str:
        """The component of the layer level that it is a part of."""
        return self.name if self.layer is None else f"{self.kind}.{self.layer}"


def parse(name: str) -> Component | None:
    """None where `name` is no component's name."""
    found: Any = _PATTERN.match(name)
    if found is None:
        return None
    if found["whole"]:
        return Component(name, "view" if found["view"] else found["whole"], view=found["view"])
    kind = found["kind"]
    given = [field for field in ("head", "key", "expert", "neuron", "bias") if found[field] is not None]
    if any(field not in _PARTS.get(kind, ()) for field in given):
        return None
    numbers: dict[str, Any] = {field: int(found[field]) for field in ("layer", *given) if field != "bias"}
    return Component(name, kind, is_bias="bias" in given, **numbers)


def depth_of(component: Component) -> int:
    """Position along the residual stream: -1 the embedding, 2 l attention of layer l, 2 l + 1 its MoE or MLP part."""
    if component.layer is None:
        return -1
    return 2 * component.layer + (component.kind != "attn")


def reaches(depth: int, receiver: int) -> bool:
    """Whether what is written at `depth` is in the residual stream that the router of layer `receiver` reads."""
    return depth <= 2 * receiver


def unknown(name: str, known: Sequence[str], where: str) -> ValueError:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"near names: {', '.join(near)}" if near else f"names there: {', '.join(known[:8])}, ..."
    return ValueError(f"component = {name!r} is not a component {where}; {hint}")
