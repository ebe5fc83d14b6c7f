"""The decorators that compile, and whether what they compile is kept for other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numba

from prism.common.compiled import engine_folder

config: Any = numba.config  # its attributes are made as it is loaded
dispatcher: Any = numba.core.dispatcher  # not typed
make_cache: Callable[..., Any] | None = None
with suppress(ImportError, AttributeError):  # other versions may lack what `kept` is made of:
    from prism.engine.kept import make_cache  # then every process compiles for itself
KEPT = make_cache is not None and hasattr(dispatcher, "FunctionCache")

# Without counts of references, half of the code: so no function makes an array, it is given room.
compiled: Callable[..., Any] = partial(
    numba.njit, cache=KEPT, nogil=True, no_cfunc_wrapper=True, _nrt=False
)
jit = compiled()
inner = compiled(no_cpython_wrapper=True)  # for compiled callers: to unpack arrays takes seconds
inlined = compiled(inline="always")


def compile_for(function: Any, *args: Any) -> None:
    """Compile a function, unless it is compiled, for arguments of these types, and keep it."""
    function.compile(tuple(map(numba.typeof, args)))


def choose_features() -> str | None:
    """Give the processor's features, and vectors as wide as it has them; None: Numba's own choice.

    LLVM uses half of AVX-512's width, since processors once slowed down for the whole. A block of
    64 replicates takes 12 to 20 % less with it on Xeons of 2023 (AVX-512 FP16), the same bits.
    """
    given: str | None = config.CPU_FEATURES
    if config.CPU_NAME is not None or given is not None:
        return given
    try:
        features: str = numba.core.codegen.get_host_cpu_features()
    except AttributeError:  # of a version that names it otherwise
        return None
    return f"{features},-prefer-256-bit" if "+avx512fp16" in features.split(",") else None


@contextmanager
def kept_together() -> Iterator[None]:
    """Keep what is imported inside in one folder, named by the sources of this package."""
    before = config.CACHE_DIR, config.CPU_FEATURES
    config.CPU_FEATURES = choose_features()  # until the first function is made
    config.CACHE_DIR = engine_folder()
    if KEPT:
        of_numba, dispatcher.FunctionCache = dispatcher.FunctionCache, make_cache
    try:
        yield
    finally:
        config.CACHE_DIR, config.CPU_FEATURES = before
        if KEPT:
            dispatcher.FunctionCache = of_numba
