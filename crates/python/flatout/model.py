"""Inference: logits and texts from a run or a folder in the Hugging Face layout."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Union, overload

from . import _native
from ._native import Tokenizer, UserError
from .words import overrides

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Unpack

    Tokens = Union[Sequence[int], npt.NDArray[np.integer]]

    class GenerateOptions(TypedDict, total=False):
        """Keywords of `Model.generate`."""

        max_tokens: int
        temperature: float
        top_k: int
        top_p: float
        seed: int
        chat: bool
        at_once: int
        on_text: Callable[[int, str], object] | None

__all__ = ["Model", "Tokenizer"]


class Model:
    """A model for inference: of a run (a Run, its directory or its name under ``runs``, or ``RUN@step``), or of a folder in the Hugging
    Face layout.

    device: ``"cpu"``, ``"cuda"`` or ``"auto"``, which uses a GPU if there is one. Other switches are keywords, as
    ``precision="fp32"``.

    The first call of a kind compiles its plan and loads the weights; later calls of the same sizes reuse them.
    """

    def __init__(self, path: str | os.PathLike[str], device: str = "auto", **keys: Any) -> None:
        words = overrides({"backend": device, **keys})
        self._native = _native.Model(os.fspath(path), words)

    @property
    def checkpoint(self) -> str:
        """The path of the weights."""
        return os.fspath(self._native.checkpoint)

    @property
    def step(self) -> int | None:
        """The number of updates, for a run."""
        return self._native.step

    @property
    def context(self) -> int:
        """The context length of the model."""
        return self._native.context

    @property
    def vocab_size(self) -> int | None:
        """The number of logits per token."""
        return self._native.vocab

    @property
    def device(self) -> str:
        """The device on which it computes."""
        return self._native.device

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokeniser, with ``encode`` and ``decode``."""
        found = self._native.tokenizer
        if found is None:
            raise UserError(f"{self.checkpoint} has no tokenizer.json beside it")
        return found

    def logits(self, tokens: Tokens | Sequence[Tokens]) -> Any:
        """All logits of rows of tokens in f32, the same as those of ``flatout logits``.

        Rows of equal length, also as a two-dimensional array, give an array [rows, tokens, vocabulary]; a single row gives [tokens,
        vocabulary]; rows of different lengths give a list of such arrays. The values are not copied on their way to NumPy if a single
        run of the plan computes them all.
        """
        rows = _rows(tokens)
        lengths = {len(row) for row in rows}
        if len(lengths) == 1:
            logits = _array(self._native.logits(rows))
            return logits[0] if _is_row(tokens) else logits
        found: list[Any] = [None] * len(rows)
        for length in lengths:
            places = [place for place, row in enumerate(rows) if len(row) == length]
            for place, logits in zip(places, _array(self._native.logits([rows[place] for place in places]))):
                found[place] = logits
        return found

    @overload
    def generate(self, **options: Unpack[GenerateOptions]) -> str: ...
    @overload
    def generate(self, prompts: str, **options: Unpack[GenerateOptions]) -> str: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, prompts: Sequence[str], **options: Unpack[GenerateOptions]) -> list[str]: ...
    @overload
    def generate(self, prompts: Sequence[Sequence[int]], **options: Unpack[GenerateOptions]) -> list[npt.NDArray[np.uint32]]: ...
    @overload
    def generate(self, prompts: Sequence[int], **options: Unpack[GenerateOptions]) -> npt.NDArray[np.uint32]: ...
    def generate(
        self,
        prompts: Any = "",
        *,
        max_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        chat: bool = False,
        at_once: int = 16,
        on_text: Callable[[int, str], object] | None = None,
    ) -> Any:
        """Continues prompts, many at a time, with the same text or tokens as ``flatout generate``.

        A text gives a text, and a list of texts a list: each prompt with its continuation. With ``chat=True`` prompts are questions,
        which are put into the model's chat template, and only the answers are returned. Rows of tokens give arrays of the tokens that
        follow.

        temperature: 0 selects the likeliest token every time.
        at_once: the most prompts in a batch.
        on_text: called with the index of a prompt and each piece of text that is added to it, as it is generated. An exception in it,
            like KeyboardInterrupt, ends the call and is raised unchanged.
        """
        if not (math.isfinite(temperature) and temperature >= 0):
            raise UserError(f"temperature is {temperature} and must be a number of at least 0")
        if not 0 < top_p <= 1:
            raise UserError(f"top_p is {top_p} and must be above 0 and at most 1")
        for name, value, least in (("max_tokens", max_tokens, 0), ("top_k", top_k, 0), ("seed", seed, 0), ("at_once", at_once, 1)):
            if value < least:
                raise UserError(f"{name} is {value} and must be at least {least}")
        texts: list[str] | None = None
        rows: list[list[int]] = []
        if isinstance(prompts, str):
            texts = [prompts]
        elif len(prompts) > 0 and all(isinstance(prompt, str) for prompt in prompts):
            texts = list(prompts)
        else:
            rows = _rows(prompts)
        if chat and texts is None:
            raise UserError("chat=True needs questions as texts, and these are rows of tokens: give texts")
        made, written = self._native.generate(
            texts, rows, chat, max_tokens, temperature, top_k, top_p, seed, at_once, on_text
        )
        if isinstance(prompts, str):
            assert written is not None
            return written[0]
        if texts is not None:
            return written
        arrays = [_array(tokens) for tokens in made]
        return arrays[0] if _is_row(prompts) else arrays

    def __repr__(self) -> str:
        return f"flatout.Model({self.checkpoint!r}, device={self.device!r})"


def _array(values: _native.Array) -> Any:
    """Values as a NumPy array, without a copy."""
    import numpy

    return numpy.asarray(values)


def _is_row(tokens: Any) -> bool:
    """Whether this is a row of tokens, and not a list of rows."""
    if getattr(tokens, "ndim", None) is not None:
        return tokens.ndim == 1
    return len(tokens) > 0 and not hasattr(tokens[0], "__len__")


def _rows(tokens: Any) -> list[list[int]]:
    """Rows of token ids, as plain lists."""
    given = [tokens] if _is_row(tokens) else tokens
    rows = [row.tolist() if hasattr(row, "tolist") else list(row) for row in given]
    if not rows:
        raise UserError("there are no rows of tokens")
    for number, row in enumerate(rows):
        if not row:
            raise UserError(f"row {number} has no tokens")
        for token in row:
            if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= token < 2**32:
                raise UserError(f"row {number} has {token!r}, and tokens are whole numbers from 0 on")
    return rows
