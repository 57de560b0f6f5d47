"""The dtypes that pools take."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels import codecs


def float_dtype(dtype: Any, where: str) -> np.dtype:
    """`dtype` as a numpy dtype; ValueError unless it is one that unquantised rows may have."""
    parsed = codecs.parse_dtype(dtype)
    if parsed is None or parsed.name not in codecs.FLOAT_DTYPES:
        hint = "; for 4 bits there are the FP4 pools" if parsed is not None and parsed.name.startswith("float4") else ""
        raise ValueError(f"{where}: dtype must be one of {', '.join(codecs.FLOAT_DTYPES)}, got {dtype!r}{hint}")
    return parsed


def only_dtype(dtype: Any, allowed: Any, where: str) -> np.dtype:
    """`allowed` as a numpy dtype; ValueError unless `dtype` is that: quantised rows have one."""
    if codecs.parse_dtype(dtype) != jnp.dtype(allowed):
        raise ValueError(f"{where}: dtype must be {jnp.dtype(allowed).name}, got {dtype!r}")
    return jnp.dtype(allowed)
