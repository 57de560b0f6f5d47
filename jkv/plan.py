"""How many tokens of a model fit: `python -m jkv.plan --model config.json --memory 141GB --dcp 8`.

For every KV dtype and number of DCP ranks, from the model's Hugging Face config alone: nothing is allocated and no
device is touched.
"""

import argparse
import dataclasses
import fractions
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from jax.sharding import AbstractMesh

import jkv
from jkv.model_config import ModelConfig, read_model_config

_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_FLOATS = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2")
# What each KV dtype is: a pool class, and the options that choose it.
_FORMATS: dict[str, dict[str, tuple[Any, dict[str, str]]]] = {
    "MHA": {
        **{name: (jkv.MHATokenToKVPool, {"dtype": name}) for name in _FLOATS},
        "fp4": (jkv.MHATokenToKVPoolFP4, {}),
    },
    "MLA": {
        **{name: (jkv.MLATokenToKVPool, {"dtype": name}) for name in _FLOATS},
        "dsa": (jkv.DSATokenToKVPool, {}),
        "fp4": (jkv.MLATokenToKVPoolFP4, {}),
    },
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What one KV dtype makes possible.

    Args:
      kv_dtype: what the pool stores.
      bytes_per_token: of the whole token, all layers, replicas over TP counted once.
      bytes_per_token_on_device: of the part on one device that holds it.
      extra_bytes_per_token: what a token takes on that device beside the pool; counted in what fits.
      fits: for each number of DCP ranks what fits, where something does.
      misfits: for each of the others why nothing does, if there are both.
      note: why nothing fits for any; None otherwise.
    """

    kv_dtype: str
    bytes_per_token: int | None = None
    bytes_per_token_on_device: int | None = None
    extra_bytes_per_token: int = 0
    fits: dict[int, jkv.Capacity] = dataclasses.field(default_factory=dict)
    misfits: dict[int, str] = dataclasses.field(default_factory=dict)
    note: str | None = None


def plan(
    model: ModelConfig,
    memory_bytes: int,
    *,
    dcp_sizes: Sequence[int],
    tp: int = 1,
    page_size: int = 64,
    extra_bytes_per_token: int = 0,
) -> list[Row]:
    """A row for every KV dtype of the model's family.

    Args:
      model: of `read_model_config`.
      memory_bytes: what one device has for the pool.
      dcp_sizes: numbers of DCP ranks, the smallest first.
      tp: TP ranks: they share the heads of MHA pools, and each holds the rows of MLA ones.
      page_size: tokens of a page on one rank.
      extra_bytes_per_token: what a token takes on a device beside the pool.

    Raises:
      ValueError: `tp` does not divide the KV heads.
    """
    heads = model.dims.get("head_num", tp)
    if heads % tp:
        raise ValueError(f"tp {tp} does not divide the {heads} KV heads: the pools never replicate heads")
    rows = []
    for name, (pool_class, options) in _FORMATS[model.family].items():
        row = Row(name, extra_bytes_per_token=extra_bytes_per_token)
        for dcp in dcp_sizes:
            place = {"mesh": AbstractMesh((dcp, tp), ("dcp", "tp")), "dcp_axis": "dcp", "tp_axis": "tp"}
            try:
                spec = jkv.PoolSpec(pool_class, **options, **model.dims, **place)
                row.fits[dcp] = jkv.max_tokens(
                    memory_bytes, spec, page_size=page_size, extra_bytes_per_token=extra_bytes_per_token
                )
            except ValueError as error:  # dimensions that the format does not take, memory for no page, or too many ids
                row.misfits[dcp] = str(error)
                continue
            row = dataclasses.replace(
                row,
                bytes_per_token=jkv.bytes_per_token(spec),
                bytes_per_token_on_device=jkv.bytes_per_token(spec, per_rank=True),
            )
        if not row.fits:
            row = dataclasses.replace(row, misfits={}, note=row.misfits[dcp_sizes[0]])
        rows.append(row)
    return rows


def parse_size(text: str) -> int:
    """Bytes of "141GB" (10**9), "80 GiB" (2**30), "512MB" or a plain number.

    Raises:
      ValueError: anything else.
    """
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?) *([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"expected a number of bytes such as 141GB, 80GiB or 1048576, got {text!r}")
    return int(fractions.Fraction(match[1].replace("_", "")) * _UNITS[match[2].upper()])


def parse_reserve(text: str, memory_bytes: int) -> int:
    """Bytes of a size as in `parse_size`, or of a part of the memory: "10%".

    Raises:
      ValueError: as `parse_size`, or no number from 0 to 100 before the percent sign.
    """
    if not text.strip().endswith("%"):
        return parse_size(text)
    try:
        part = fractions.Fraction(text.strip()[:-1]) / 100
    except (ValueError, ZeroDivisionError):
        part = fractions.Fraction(-1)
    if not 0 <= part <= 1:
        raise ValueError(f"expected a percentage such as 10%, got {text!r}")
    return int(memory_bytes * part)


def parse_dcp(text: str) -> list[int]:
    """Numbers of ranks: of "8" the powers of two up to it and itself, of "1,3,6" those.

    Raises:
      ValueError: no positive integers.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"expected a number of ranks such as 8, or several such as 1,4,8, got {text!r}")
    sizes = {int(part) for part in parts}
    if len(parts) == 1:
        (most,) = sizes
        sizes |= {2**i for i in range(most.bit_length())}
    return sorted(sizes)


def table(rows: Sequence[Row], dcp_sizes: Sequence[int]) -> str:
    """The rows as text: bytes of a token on a device, tokens of a rank, and of all ranks for each number of them."""
    lines = [["KV dtype", "bytes/token", "tokens/rank", *(f"dcp {dcp}" for dcp in dcp_sizes)]]
    notes = []
    for row in rows:
        if row.note is not None:
            notes.append(f"{row.kv_dtype}: {row.note}")
            lines.append([row.kv_dtype, *["-"] * (2 + len(dcp_sizes))])
            continue
        notes.extend(f"dcp {dcp}: {why}" for dcp, why in row.misfits.items())  # the same for most KV dtypes
        totals = {dcp: f"{fit.aggregate:,}{'*' * (fit.limit != 'memory')}" for dcp, fit in row.fits.items()}
        extra = f" + {row.extra_bytes_per_token:,}" if row.extra_bytes_per_token else ""
        per_rank = next(iter(row.fits.values())).per_rank
        cells = [f"{row.bytes_per_token_on_device:,}{extra}", f"{per_rank:,}"]
        lines.append([row.kv_dtype, *cells, *(totals.get(dcp, "-") for dcp in dcp_sizes)])
    if any(fit.limit != "memory" for row in rows for fit in row.fits.values()):
        notes.append("* memory holds more; slot ids end at int32, unless x64 is enabled")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines]
    return "\n".join(text + ([""] + list(dict.fromkeys(notes)) if notes else []))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m jkv.plan",
        description="How many tokens of a model fit into a KV pool, for every KV dtype and number of DCP ranks.",
        epilog="Sizes: 141GB (10**9), 80GiB (2**30), 512MB, or plain bytes.",
    )
    p.add_argument("--model", required=True, metavar="PATH", help="a Hugging Face config.json, or a folder with one")
    p.add_argument("--memory", required=True, metavar="SIZE", help="memory of one device")
    p.add_argument("--weights-bytes", default="0", metavar="SIZE", help="of it, the weights on one device (default 0)")
    p.add_argument("--reserve", default="0", metavar="SIZE", help="of it, for all else: a size, or 10%% (default 0)")
    p.add_argument("--dcp", default="1", metavar="N", help="DCP ranks: up to N in powers of two, or a list as 1,3,6")
    p.add_argument("--tp", type=int, default=1, metavar="N", help="TP ranks that share the KV heads (default 1)")
    p.add_argument("--page-size", type=int, default=64, metavar="N", help="tokens of a page on a rank (default 64)")
    extra = "bytes that a token takes on a device beside the pool, such as the keys of an index (default 0)"
    p.add_argument("--extra-bytes-per-token", type=int, default=0, metavar="N", help=extra)
    p.add_argument("--json", action="store_true", help="print JSON")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan. Returns 0, or 1 where nothing fits; a mistake in arguments or config ends with status 2."""
    p = parser()
    args = p.parse_args(argv)
    for name in ("tp", "page_size"):
        if getattr(args, name) < 1:
            p.error(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
    if args.extra_bytes_per_token < 0:
        p.error(f"--extra-bytes-per-token must not be negative, got {args.extra_bytes_per_token}")
    try:
        model = read_model_config(args.model)
        dcp_sizes = parse_dcp(args.dcp)
        memory = parse_size(args.memory)
        free = memory - parse_size(args.weights_bytes) - parse_reserve(args.reserve, memory)
        if free <= 0:
            p.error(f"weights and reserve leave nothing of {memory:,} bytes for the pool")
        rows = plan(
            model, free, dcp_sizes=dcp_sizes, tp=args.tp, page_size=args.page_size,
            extra_bytes_per_token=args.extra_bytes_per_token,
        )  # fmt: skip
    except ValueError as error:
        p.error(str(error))
    status = 0 if any(row.fits for row in rows) else 1
    dims = {name: value for name, value in model.dims.items() if name != "layer_num"}
    if args.json:
        facts = {"model": args.model, "memory_bytes": memory, "pool_bytes": free, "page_size": args.page_size}
        facts |= {"tp": args.tp, "extra_bytes_per_token": args.extra_bytes_per_token}
        report = facts | dataclasses.asdict(model) | {"rows": list(map(dataclasses.asdict, rows))}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return status
    held = f"{model.dims['layer_num']} of {model.layers} layers"
    beside = " (in the pool + beside it)" if args.extra_bytes_per_token else ""
    lines = [
        f"{args.model}: {model.family} pools, {', '.join(f'{name} {value}' for name, value in dims.items())}, {held}",
        *(f"not in the pool: {what}" for what in model.left_out),
        f"{free:,} of {memory:,} bytes of a device for the pool; page_size {args.page_size}, tp {args.tp}",
        f"bytes/token: on a device{beside}; tokens/rank: on one DCP rank; dcp N: tokens on N ranks together",
        "",
        table(rows, dcp_sizes),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
