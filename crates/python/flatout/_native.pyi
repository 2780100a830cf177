"""The native half, from `crates/python/src`."""

import os
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

__version__: str

class UserError(ValueError): ...
class Error(RuntimeError): ...

def train_recipe(
    recipe: str,
    presets: Sequence[str],
    overrides: Sequence[str],
    run: str | None,
    resume: str,
    max_seconds: float | None,
    on_begin: Callable[[str], object],
    on_event: Callable[[dict[str, Any]], object],
) -> os.PathLike[str]: ...
def resume(
    run: str,
    overrides: Sequence[str],
    max_seconds: float | None,
    on_begin: Callable[[str], object],
    on_event: Callable[[dict[str, Any]], object],
) -> os.PathLike[str]: ...
def plan_json(
    recipe: str,
    presets: Sequence[str],
    overrides: Sequence[str],
    gpu: str | None,
    gpus: int | None,
    nodes: int | None,
    link: str | None,
    net: str | None,
    ranks: int | None,
) -> str: ...
def recipes_json() -> str: ...
def schema_json() -> str: ...
def named(run: str) -> os.PathLike[str]: ...
def run_config(dir: str) -> str: ...
def run_summary(dir: str) -> str: ...
def run_steps(dir: str) -> str: ...
def is_running(dir: str) -> bool: ...
def run_plot(dir: str, name: str) -> str: ...
@final
class Model:
    def __new__(cls, path: str, overrides: Sequence[str]) -> Model: ...
    @property
    def checkpoint(self) -> os.PathLike[str]: ...
    @property
    def step(self) -> int | None: ...
    @property
    def context(self) -> int: ...
    @property
    def vocab(self) -> int | None: ...
    @property
    def device(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    def logits(self, rows: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]: ...
    def generate(
        self,
        texts: Sequence[str] | None,
        rows: Sequence[Sequence[int]],
        is_chat: bool,
        max_tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        seed: int,
        at_once: int,
        on_text: Callable[[int, str], object] | None,
    ) -> tuple[list[npt.NDArray[np.uint32]], list[str] | None]: ...

@final
class Tokenizer:
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def bos(self) -> int: ...
    @property
    def eos(self) -> int: ...
