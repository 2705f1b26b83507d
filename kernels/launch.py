"""Triton functions that are compiled at their first launch; until then Triton is not even imported.

A CPU runs the torch references and needs no Triton. A file of kernels writes

    from kernels.launch import constexpr, kernel, tl

    @kernel
    def _double(x: Pointer, out: Pointer, n: Scalar, block: constexpr) -> None: ...

    _double[(programs,)](x, out, n, block=128)

`tl` and the words of annotations are placeholders, which the first launch replaces by Triton's own, in that module
and in those whose kernels it calls. Sizes of tiles are fixed per kernel and never depend on the batch, so that a
row's bits do not either. `EXACT` keeps the compiler from fusing products and sums where a reference rounds both.
Source: ours.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Pointer: TypeAlias = Any  # a tensor at the launch, the address of its first element inside
Scalar: TypeAlias = Any  # a number at the launch
Tile: TypeAlias = Any  # a block of values inside a kernel
constexpr: TypeAlias = Any  # noqa: PYI042  known at compile time; Triton looks for this very word in an annotation

tl: Any = None
EXACT = {"enable_fp_fusion": False}


class MissingTritonError(RuntimeError):
    """Tensors lie on a GPU, but the package that computes there is not installed."""


class Kernel:
    """A Triton function, or one that others call, before its first launch."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._compiled: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """What launches it on that grid. Raises: MissingTritonError."""
        launcher: Callable[..., Any] = self.compiled()[grid]
        return launcher

    def __call__(self, *values: Any) -> Any:
        """Inside another kernel only, where Triton inlines it."""
        raise TypeError(f"{self.function.__name__} runs inside a kernel, not on {len(values)} values")

    def compiled(self) -> Any:
        """Triton's own object, the same at every call; from now on its module's names are such objects too."""
        if self._compiled is None:
            triton, language = _triton()
            self._compiled = triton.jit(self.function)
            names = self.function.__globals__
            names.update(_meanings(language))
            names.update({name: value.compiled() for name, value in names.items() if isinstance(value, Kernel)})
        return self._compiled


def kernel(function: Callable[..., Any]) -> Kernel:
    """Decorator: a function in Triton's language."""
    return Kernel(function)


def _triton() -> tuple[Any, Any]:
    try:
        return importlib.import_module("triton"), importlib.import_module("triton.language")
    except ImportError as error:
        raise MissingTritonError("tensors on a GPU need Triton: install tidemill[gpu]") from error


def _meanings(language: Any) -> dict[str, Any]:
    """What the placeholders stand for: Triton looks up every name in a kernel, those of annotations too."""
    value = language.tensor
    return {"tl": language, "constexpr": language.constexpr, "Pointer": value, "Scalar": value, "Tile": value}


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def dot_in_bf16(x: Tensor) -> bool:
    """Whether products with x may run on bf16 operands. The interpreter's own bf16 products are wrong."""
    return x.dtype == torch.bfloat16 and not interpreted()


def power_of_two(n: int) -> int:
    """The smallest power of two of at least n >= 1: tiles have such sides."""
    return 1 << (n - 1).bit_length()


def tiles(n: int, size: int) -> int:
    """How many tiles of that size cover n elements."""
    return -(-n // size)
