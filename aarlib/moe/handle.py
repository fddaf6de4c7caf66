"""What attaching a method to a model returns: its parameters, and the patches that put them to work."""

from collections.abc import Callable

from torch import nn

from aarlib.moe.anatomy import Anatomy


class PatchHandle:
    """`enabled` switches the model between patched and stock, bit for bit; `detach()` gives the stock model back for good.

    A subclass says how it installs (appending to `_removers`, with a ValueError where another handle is in the way) and what
    it must forget when it is taken off. It sets `enabled = True` at the end of its __init__.
    """

    def __init__(self, parts: Anatomy, module: nn.ModuleDict) -> None:
        self.anatomy = parts
        self.module = module
        """Every trained float32 parameter, for an optimizer or an engine; registered nowhere in the model."""
        self._removers: list[Callable[[], None]] = []
        self._detached = False

    @property
    def enabled(self) -> bool:
        return bool(self._removers)

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if value and self._detached:
            raise ValueError("this handle is detached; attach again")
        if value and not self._removers:
            self._install()
        elif not value:
            for remove in self._removers:
                remove()
            self._removers.clear()
            self._forget()

    def detach(self) -> None:
        """Give the stock model back. The handle keeps its parameters (they can still be saved), but cannot be enabled again."""
        self.enabled = False
        self._detached = True

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) pairs, in the order of `module`."""
        return [(name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad]

    @property
    def num_trainable(self) -> int:
        return sum(getattr(parameter, "ds_numel", parameter.numel()) for _, parameter in self.trainable())

    def _install(self) -> None:
        raise NotImplementedError

    def _forget(self) -> None:
        raise NotImplementedError
